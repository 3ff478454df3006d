"""Slices of parameters: the integer maps agree with NumPy's indexing, whatever the shape, the axis and the ranges."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero.errors import LayoutError
from mpizero.layout.tensor_parts import (
    PartRun,
    elements_within,
    part_rows,
    part_runs,
    part_shape,
    put_rows,
    row_runs,
    take_rows,
    tile_rows,
)
from mpizero.types import Array, ParameterSpec, Part


@st.composite
def parts(draw: Any) -> Part:
    """Any slice: of up to four axes, empty ones too, by up to three ranges, empty and touching ones too."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=4)))
    axis = draw(st.integers(0, len(shape) - 1))
    ends = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=0, max_size=6)))
    return Part(shape, axis, tuple(zip(ends[::2], ends[1::2], strict=False)))


def numbered(part: Part) -> Array:
    """The whole parameter; its values are their places."""
    return np.arange(prod(part.shape)).reshape(part.shape)


def held(part: Part) -> Array:
    """What the rank holds, by NumPy's indexing."""
    kept = [i for start, stop in part.ranges for i in range(start, stop)]
    return numbered(part).take(np.array(kept, np.int64), axis=part.axis)


def some_range(data: Any, size: int) -> tuple[int, int]:
    start = data.draw(st.integers(0, size))
    return start, data.draw(st.integers(start, size))


@given(parts(), st.data())
def test_runs_are_the_fewest_that_name_the_elements_that_numpy_selects(part: Part, data: Any) -> None:
    local = held(part)
    assert part_shape(part) == local.shape
    start, stop = some_range(data, local.size)
    runs = list(part_runs(part, local.shape, start, stop))
    assert all(run.size > 0 for run in runs)
    assert all(a.full + a.size < b.full for a, b in zip(runs, runs[1:], strict=False)), "two could be one"
    found = [i for whole, _, size in runs for i in range(whole, whole + size)]
    assert found == local.reshape(-1)[start:stop].tolist()
    assert [i for _, first, size in runs for i in range(first, first + size)] == list(range(start, stop))


@given(parts(), st.data())
def test_any_range_can_be_taken_from_no_more_than_its_elements(part: Part, data: Any) -> None:
    local = held(part).reshape(-1)
    start, stop = some_range(data, local.size)
    whole, low, high = numbered(part).reshape(-1), 0, 0
    if start < stop:
        low, high = data.draw(st.integers(0, int(local[start]))), int(local[stop - 1]) + 1
        assert elements_within(part_rows(part), low, high).stop == stop
    out = np.full(stop - start, -1)
    take_rows(part_rows(part), whole[low:high], start, out, low)
    assert out.tolist() == local[start:stop].tolist()


@st.composite
def tiled(draw: Any) -> Part:
    """Any slice whose indices belong to up to three tiles, at random."""
    part = draw(parts())
    kept = [i for start, stop in part.ranges for i in range(start, stop)]
    tile_of = draw(st.lists(st.integers(0, 2), min_size=len(kept), max_size=len(kept)))
    tiles = tuple(tuple((i, i + 1) for i, t in zip(kept, tile_of, strict=True) if t == tile) for tile in range(3))
    return replace(part, tiles=tiles)


@given(tiled(), st.data())
def test_the_tiles_of_a_part_are_numpys_selections_of_the_whole(part: Part, data: Any) -> None:
    local = held(part)
    spec = ParameterSpec("w", local.shape, part=part)
    start, stop = some_range(data, local.size)
    for tile, rows in zip(part.tiles, tile_rows(spec), strict=True):
        expected = numbered(part).take(np.array([i for i, _ in tile], np.int64), axis=part.axis).reshape(-1)
        assert rows.size == expected.size
        found = np.full(expected.size, -1)
        take_rows(rows, local.reshape(-1), 0, found)
        assert found.tolist() == expected.tolist()
        within = elements_within(rows, start, stop)
        inside = local.reshape(-1)[start:stop].tolist()
        assert expected[within.start : within.stop].tolist() == [i for i in expected.tolist() if i in inside]


@given(parts())
def test_what_was_taken_goes_back_to_its_place_and_touches_nothing_else(part: Part) -> None:
    whole = np.full(prod(part.shape), -1)
    put_rows(part_rows(part), np.ascontiguousarray(held(part)).reshape(-1), whole)
    places = held(part).reshape(-1)
    assert whole[places].tolist() == places.tolist()
    assert (np.delete(whole, places) == -1).all()


def test_a_part_that_is_the_whole_is_one_run() -> None:
    part = Part((5, 4), 1, ((0, 1), (1, 4)))
    assert list(part_runs(part, (5, 4), 3, 17)) == [PartRun(3, 3, 14)]


def test_a_row_that_ends_where_the_next_begins_is_one_run_with_it() -> None:
    part = Part((3, 4), 1, ((0, 1), (3, 4)))
    assert list(part_runs(part, (3, 2), 0, 6)) == [(0, 0, 1), (3, 1, 2), (7, 3, 2), (11, 5, 1)]


@pytest.mark.parametrize(
    ("shape", "axis", "ranges", "message"),
    [
        ((4, 6), 2, ((0, 1),), "has no axis 2"),
        ((4, 6), -1, ((0, 1),), "has no axis -1"),
        ((), 0, (), "has no axis 0"),
        ((4, 6), 1, ((0, 7),), "within 0:6"),
        ((4, 6), 1, ((2, 4), (1, 2)), "ascending"),
        ((4, 6), 1, ((0, 4), (3, 5)), "disjoint"),
        ((4, 6), 1, ((3, 2),), "ascending"),
    ],
)
def test_a_slice_that_no_rank_can_hold_is_refused(shape: Any, axis: int, ranges: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        part_shape(Part(shape, axis, ranges))


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ((((0, 2),), ((2, 3),)), "each index of the ranges .* once"),
        ((((0, 2),), ((1, 3), (4, 6))), "each index of the ranges .* once"),
        ((((0, 2),), ((2, 4), (4, 6))), "each index of the ranges .* once"),
        ((((0, 2),), ((4, 6), (2, 3))), "ascending"),
        ((((0, 2),), ((2, 3), (4, 7))), "within 0:6"),
    ],
)
def test_tiles_that_are_not_the_ranges_are_refused(tiles: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        part_shape(Part((4, 6), 1, ((0, 3), (4, 6)), tiles))


def test_tiles_may_be_empty_and_cross_ranges() -> None:
    held = ((0, 3), (4, 6))
    assert part_shape(Part((4, 6), 1, held, (((0, 1), (5, 6)), ((1, 2), (2, 3), (4, 5)), (), ((5, 5),)))) == (4, 5)


def test_a_parameter_without_tiles_is_one_tile() -> None:
    for part in (None, Part((4, 6), 1, ((0, 3), (4, 6)))):
        (rows,) = tile_rows(ParameterSpec("w", (4, 5), part=part))
        assert list(row_runs(rows, 3, 17)) == [PartRun(3, 3, 14)]


def test_a_declaration_that_does_not_fit_its_part_is_refused_at_once() -> None:
    part = Part((4, 6), 1, ((0, 3),))
    with pytest.raises(LayoutError, match=r"has shape \(4, 3\), the parameter is declared with \(4, 2\)"):
        part_runs(part, (4, 2), 0, 1)
    with pytest.raises(LayoutError, match="elements 0:13 do not exist"):
        part_runs(part, (4, 3), 0, 13)
