"""Map the part of a parameter that one tensor rank holds to elements of the whole parameter.

A part is one or more ranges of one axis of the parameter, with all elements of the other axes. In this module a *row*
is the elements that have the same indices on all axes before that axis. Inside a row, the elements of a range are
contiguous, both in the part and in the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from mpizero.errors import LayoutError
from mpizero.types import Array, ParameterSpec, Part, Ranges


class PartRun(NamedTuple):
    """Describe a run of elements that are contiguous in the whole parameter and in the part.

    Attributes
    ----------
    full, local : int
        Index of the run's first element in the whole parameter, and in the part.
    size : int
        Number of elements of the run.
    """

    full: int
    local: int
    size: int


class PartRows(NamedTuple):
    """Describe which elements of each row of the whole parameter belong to a part.

    A *row* is the elements that have the same indices on all axes before the axis that is split.

    Attributes
    ----------
    number : int
        Number of rows: the same in the part and in the whole parameter.
    full, local : int
        Number of elements of a row of the whole parameter, and of a row of the part.
    runs : tuple of PartRun
        The contiguous runs that make up a row of the part, in order, with indices counted from the start of the row.
        Ranges that follow one another without a gap are one run.
    """

    number: int
    full: int
    local: int
    runs: tuple[PartRun, ...]

    @property
    def size(self) -> int:
        """Number of elements of the part."""
        return self.number * self.local


def part_shape(part: Part) -> tuple[int, ...]:
    """Return the shape of the part that a rank holds.

    Raises
    ------
    LayoutError
        If the parameter has no axis ``part.axis``, or the ranges, or those of a tile, are not ascending, disjoint and
        inside that axis, or the tiles do not hold each index of the ranges once.
    """
    if not 0 <= part.axis < len(part.shape):
        raise LayoutError(f"a parameter of shape {part.shape} has no axis {part.axis} to be split along")
    for ranges in (part.ranges, *part.tiles):
        _check_ranges(part, ranges)
    if part.tiles and joined_ranges(span for tile in part.tiles for span in tile) != joined_ranges(part.ranges):
        raise LayoutError(
            f"tiles {part.tiles} of axis {part.axis} of a parameter of shape {part.shape} must hold each index of the "
            f"ranges {part.ranges} once, and no other"
        )
    return shape_of_ranges(part)


def shape_of_ranges(part: Part) -> tuple[int, ...]:
    """Return the shape of a part with the ranges ``part.ranges``, without checking the ranges."""
    length = sum(stop - start for start, stop in part.ranges)
    return (*part.shape[: part.axis], length, *part.shape[part.axis + 1 :])


def _check_ranges(part: Part, ranges: Ranges) -> None:
    end = 0
    for start, stop in ranges:
        if not end <= start <= stop <= part.shape[part.axis]:
            raise LayoutError(
                f"ranges {ranges} of axis {part.axis} of a parameter of shape {part.shape} must be ascending, "
                f"disjoint and within 0:{part.shape[part.axis]}"
            )
        end = stop


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ranges sorted by their starts, without empty ranges, and with adjacent ranges joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start == joined[-1][1]:
            joined[-1] = joined[-1][0], stop
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def part_rows(part: Part) -> PartRows:
    """Return which elements of the whole parameter belong to the part that a rank holds, in terms of rows.

    A *row* is the elements that have the same indices on all axes before the axis that is split. A part that is the
    whole parameter is one row.
    """
    length = part_shape(part)[part.axis]
    inner = prod(part.shape[part.axis + 1 :])
    sizes = [stop - start for start, stop in part.ranges]
    runs: list[PartRun] = []
    for (start, _), before, size in zip(part.ranges, accumulate(sizes, initial=0), sizes, strict=False):
        _join(runs, PartRun(start * inner, before * inner, size * inner))
    if length == part.shape[part.axis]:
        size = prod(part.shape)
        return PartRows(1, size, size, (PartRun(0, 0, size),))
    return PartRows(prod(part.shape[: part.axis]), part.shape[part.axis] * inner, length * inner, tuple(runs))


def tile_rows(spec: ParameterSpec) -> tuple[PartRows, ...]:
    """Return, for each tile of a parameter that a rank holds, which elements of each row of the rank's array form it.

    In each :class:`PartRows` returned, the "whole parameter" is the rank's array, and the "part" is the tile. A row is
    the elements that have the same indices on all axes before the split axis. A parameter without tiles is one tile,
    the rank's whole array.
    """
    part = spec.part
    if part is None or not part.tiles:
        return (PartRows(1, spec.size, spec.size, (PartRun(0, 0, spec.size),)),)
    shape = part_shape(part)
    return tuple(part_rows(Part(shape, part.axis, local_ranges(tile, part.ranges))) for tile in part.tiles)


def local_ranges(ranges: Ranges, local: Ranges) -> Ranges:
    """Return what ``ranges`` and ``local`` have in common, as ranges of positions in the concatenation of ``local``."""
    before = list(accumulate((stop - start for start, stop in local), initial=0))
    return tuple(
        (max(low, start) - start + first, min(high, stop) - start + first)
        for low, high in ranges
        for (start, stop), first in zip(local, before, strict=False)
        if max(low, start) < min(high, stop)
    )


def elements_within(rows: PartRows, start: int, stop: int) -> range:
    """Return the range of a part's elements that are among elements ``start:stop`` of the whole parameter.

    ``rows`` says which elements of each row of the whole parameter belong to the part.
    """
    return range(_elements_before(rows, start), _elements_before(rows, stop))


def _elements_before(rows: PartRows, index: int) -> int:
    if not rows.full:
        return 0
    row, column = divmod(index, rows.full)
    return row * rows.local + sum(min(max(column - run.full, 0), run.size) for run in rows.runs)


def _join(runs: list[PartRun], run: PartRun) -> None:
    """Append ``run`` to ``runs``, or lengthen the last run if ``run`` follows it in the whole parameter without a gap.

    A run is elements that are contiguous in the whole parameter and in the part.

    A run without elements is not appended.
    """
    if runs and runs[-1].full + runs[-1].size == run.full:
        runs[-1] = runs[-1]._replace(size=runs[-1].size + run.size)
    elif run.size:
        runs.append(run)


def part_runs(part: Part, shape_local: Sequence[int], start: int, stop: int) -> Iterator[PartRun]:
    """Cut a range of the part that a rank holds into the longest runs that are contiguous in the whole parameter.

    Parameters
    ----------
    part : Part
        The part.
    shape_local : sequence of int
        Shape of the part, as the declaration of the rank's parameter says it.
    start, stop : int
        Range of elements of the part, as indices into the part flattened in C order.

    Returns
    -------
    iterator of PartRun
        The runs, in order. ``full`` and ``local`` are indices into the whole parameter and into the part, both
        flattened in C order.

    Raises
    ------
    LayoutError
        If the part's shape is not ``shape_local``, or ``start:stop`` is not inside the part.
    """
    shape = part_shape(part)
    if tuple(shape_local) != shape:
        raise LayoutError(f"{part} has shape {shape}, the parameter is declared with {tuple(shape_local)}")
    if not 0 <= start <= stop <= prod(shape):
        raise LayoutError(f"elements {start}:{stop} do not exist in a part of shape {shape}")
    return row_runs(part_rows(part), start, stop)


def row_runs(rows: PartRows, start: int, stop: int) -> Iterator[PartRun]:
    """Cut elements ``start:stop`` of a part into the longest runs that are contiguous in the whole parameter.

    ``rows`` describes the part: it says which elements of each row (elements that have the same indices on all axes
    before the split axis) belong to the part. :func:`part_runs` takes a :class:`Part` instead.
    """
    if start == stop:
        return
    last = PartRun(0, start, 0)
    for row in range(start // rows.local, -(-stop // rows.local)):
        for run in rows.runs:
            first = row * rows.local + run.local
            low, high = max(start, first), min(stop, first + run.size)
            if low >= high:
                continue
            full = row * rows.full + run.full + low - first
            if last.size and full != last.full + last.size:
                yield last
                last = PartRun(full, low, high - low)
            else:
                last = PartRun(last.full if last.size else full, last.local, high - last.local)
    yield last


def take_rows(rows: PartRows, full: Array, start: int, out: Array, origin: int = 0) -> None:
    """Copy a range of a part's elements from an array of the whole parameter to ``out``.

    A *row* is the elements that have the same indices on all axes before the axis that is split.

    Parameters
    ----------
    rows : PartRows
        Which elements of each row of the whole parameter belong to the part, from :func:`part_rows`.
    full : 1-D array
        Consecutive elements of the whole parameter, which include all elements to copy.
    start : int
        Index in the part of the first element to copy, counted from the start of a row.
    out : 1-D array
        Contiguous array, which receives the ``out.size`` elements of the part from ``start`` on.
    origin : int
        Index in the whole parameter of the first element of ``full``, counted from the same row as ``start``.
    """
    for low, high in _complete_rows(rows.local, start, start + out.size):
        target = out[low - start : high - start]
        if low % rows.local or high % rows.local:
            for run in row_runs(rows, low, high):
                source = full[run.full - origin : run.full - origin + run.size]
                target[run.local - low : run.local - low + run.size] = source
            continue
        first, last = low // rows.local, high // rows.local - 1
        target = target.reshape(-1, rows.local)
        for run in rows.runs:  # of the last row, ``full`` may lack what follows the run
            begin, end = (row * rows.full + run.full - origin for row in (first, last))
            columns = slice(run.local, run.local + run.size)
            target[:-1, columns] = full[begin:end].reshape(last - first, rows.full)[:, : run.size]
            target[-1, columns] = full[end : end + run.size]


def put_rows(rows: PartRows, values: Array, full: Array) -> None:
    """Copy ``values``, all elements of a part, to their positions in ``full``, an array of the whole parameter.

    ``values`` and ``full`` are 1-D and contiguous.
    """
    if not values.size:
        return
    source, target = values.reshape(rows.number, rows.local), full.reshape(rows.number, rows.full)
    for run in rows.runs:
        target[:, run.full : run.full + run.size] = source[:, run.local : run.local + run.size]


def _complete_rows(row: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut elements ``start:stop`` into an incomplete first row, complete rows and an incomplete last row.

    Yield (start, stop) of each of these three ranges that is not empty. ``row`` is the number of elements of a row.
    """
    if start == stop:
        return
    first = min(stop, -(-start // row) * row)
    last = max(first, stop // row * row)
    yield from ((low, high) for low, high in ((start, first), (first, last), (last, stop)) if low < high)
