from __future__ import annotations

import itertools
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero._util.numbers import crc32, crc32_combine
from mpizero.checkpoint.format import BLOCK, block_count, crc32_shifted, cut, judge


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_the_crc_is_the_one_that_every_tool_computes(data, start):
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data, start) == zlib.crc32(data, start)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combined_crc_is_the_crc_of_the_joined_bytes(first, second):
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [2**16 + 1, 3 * BLOCK + 5])
def test_crc_of_long_pieces_combines(length):
    tail = bytes(length)
    assert crc32_combine(zlib.crc32(b"head"), zlib.crc32(tail), length) == zlib.crc32(b"head" + tail)


@given(st.integers(0, 3 * BLOCK), st.integers(0, 3 * BLOCK))
def test_cuts_tile_a_range_and_never_cross_a_block(a, b):
    start, stop = sorted((a, b))
    parts = list(cut(start, stop))
    assert [p for part in parts for p in part][1:-1:2] == [p for part in parts for p in part][2::2]
    assert sum(high - low for low, high in parts) == stop - start
    assert all(low // BLOCK == (high - 1) // BLOCK for low, high in parts)
    assert block_count(stop) == len(list(cut(0, stop)))


@st.composite
def readers(draw):
    data = draw(st.binary(min_size=1, max_size=60))
    cuts = st.lists(st.integers(0, len(data)), max_size=4)
    tilings = [sorted({0, len(data), *draw(cuts)}) for _ in range(draw(st.integers(1, 3)))]
    return data, [(a, b) for borders in tilings for a, b in zip(borders, borders[1:], strict=False)]


@given(readers())
def test_segments_of_any_overlapping_tilings_are_proven(case):
    data, spans = case
    segments = [(a, b, zlib.crc32(data[a:b])) for a, b in spans]
    assert judge(len(data), zlib.crc32(data), segments) == [True] * len(segments)


@given(readers(), st.data())
def test_a_segment_read_wrongly_is_not_proven(case, data_strategy):
    data, spans = case
    bad = data_strategy.draw(st.integers(0, len(spans) - 1))
    segments = [(a, b, zlib.crc32(data[a:b]) ^ (k == bad)) for k, (a, b) in enumerate(spans)]
    assert judge(len(data), zlib.crc32(data), segments)[bad] is False


def test_segments_that_do_not_reach_both_ends_stay_open():
    data = b"0123456789"
    spans = [(0, 4), (5, 10), (4, 6)]
    segments = [(a, b, zlib.crc32(data[a:b])) for a, b in spans]
    assert judge(10, zlib.crc32(data), segments) == [None, None, None]


def test_parts_join_in_any_order() -> None:
    data = bytes(range(256)) * 40
    ends = [0, 1, 7, 300, 301, 5000, len(data)]
    parts = [data[start:stop] for start, stop in itertools.pairwise(ends)]
    whole = 0
    for part, stop in reversed(list(zip(parts, ends[1:], strict=True))):  # in any order
        whole ^= crc32_shifted(zlib.crc32(part), len(data) - stop)
    assert whole == zlib.crc32(data)
