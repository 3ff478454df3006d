from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import layers
from tests.support.reference import layers as reference

ALL_HALVES = np.arange(2**16, dtype=np.uint16)


def float32_patterns():
    """Random patterns, and every 16-bit value with its neighbours and the points halfway between."""
    rng = np.random.default_rng(0)
    with np.errstate(invalid="ignore"):
        halves = ALL_HALVES.view(np.float16).astype(np.float32).view(np.uint32).astype(np.int64)
    brains = ALL_HALVES.astype(np.int64) << 16
    near = [base[::3] + step for base in (halves, brains) for step in (0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000)]
    random = rng.integers(0, 2**32, 100_000)
    return np.concatenate([random, *near]).astype(np.uint32).view(np.float32)


def same(got, want):
    """Equal patterns, where one NaN is as good as another."""
    view = np.float16 if got.dtype == np.uint16 else np.float32
    nan = np.isnan(want.view(view))
    return np.array_equal(got[~nan], want[~nan]) and np.isnan(got.view(view)[nan]).all()


@pytest.mark.parametrize("name", ["from_bfloat16", "from_float16"])
def test_widening_all_65536_patterns_agrees_with_the_oracle(name):
    got, want = np.empty((2, 2**16), np.float32)
    getattr(layers, name)(ALL_HALVES, got)
    getattr(reference, name)(ALL_HALVES, want)
    assert same(got.view(np.uint32), want.view(np.uint32)) or same(got, want)


def test_rounding_to_float16_agrees_with_the_oracle():
    x = float32_patterns()
    got, want = np.empty((2, x.size), np.uint16)
    layers.to_float16(x, got)
    reference.to_float16(x, want)
    assert same(got, want)


def test_rounding_to_bfloat16_agrees_with_the_oracle():
    x = float32_patterns()
    got, want = np.empty((2, x.size), np.uint16)
    layers.to_bfloat16(x, got)
    reference.to_bfloat16(x, want)
    nan = np.isnan(x)
    assert np.array_equal(got[~nan], want[~nan])
    back = np.empty_like(x)
    layers.from_bfloat16(got, back)
    assert np.isnan(back[nan]).all()
    assert not np.isnan(back[~nan]).any()


def test_ids_outside_of_a_table_read_and_write_nothing():
    table, ids = np.ones((3, 2), np.float32), np.array([-1, 3, 2])
    out, dtable = np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32)
    layers.gather(table, ids, out)
    layers.scatter_add(table, ids, dtable)
    assert np.isnan(out[:2]).all()
    assert (out[2] == 1).all()
    assert dtable.tolist() == [[0, 0], [0, 0], [1, 1]]


def test_what_is_packed_or_split_comes_back():
    source, target = np.random.default_rng(0).standard_normal((2, 5000)).astype(np.float32)
    starts, sizes = np.array([4000, 7, 100, 0, 2000]), np.array([1000, 0, 1023, 1, 7])
    packed = np.zeros(int(sizes.sum()) + 3, np.float32)
    layers.pack(source, starts, sizes, packed)
    layers.unpack(packed, starts, sizes, target)
    for start, size in zip(starts, sizes, strict=True):
        assert np.array_equal(target[start : start + size], source[start : start + size])
    matrix, parts, joined = (
        np.arange(15, dtype=np.float32).reshape(3, 5),
        np.zeros(17, np.float32),
        np.zeros((3, 5), np.float32),
    )
    ranges = np.array(
        [[0, 1, 8, 3], [1, 2, 0, 2], [3, 2, 9, 3]]
    )  # columns 0, 3, 4 to a matrix at 8, 1 and 2 to one at 0
    layers.split_columns(matrix, ranges, parts)
    assert np.array_equal(parts[8:].reshape(3, 3), matrix[:, [0, 3, 4]])
    assert np.array_equal(parts[:6].reshape(3, 2), matrix[:, [1, 2]])
    layers.join_columns(parts, ranges, joined)
    assert np.array_equal(joined, matrix)
