"""Map the part of a parameter that one tensor rank holds to elements of the whole parameter.

A part is cut along one axis. Here a *row* is the elements with the same indices on the axes before that axis. The
elements of a range of the axis are then contiguous in a row, in the part as in the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from mpizero.errors import LayoutError
from mpizero.types import Array, Part


class PartRun(NamedTuple):
    """Describe ``size`` elements, contiguous from index ``whole`` in the whole and from index ``local`` in the part."""

    whole: int
    local: int
    size: int


class PartRows(NamedTuple):
    """Describe how the rows of a part lie in the rows of the whole parameter.

    Attributes
    ----------
    number : int
        Number of rows.
    whole, local : int
        Number of elements of a row of the whole, and of a row of the part.
    runs : tuple of PartRun
        The contiguous runs that make up a row of the part, in order; adjacent ranges are one run.
    """

    number: int
    whole: int
    local: int
    runs: tuple[PartRun, ...]


def part_shape(part: Part) -> tuple[int, ...]:
    """Return the shape of the part that a rank holds.

    Raises
    ------
    LayoutError
        If the part has no such axis, or its ranges are not ascending, disjoint and inside the axis.
    """
    if not 0 <= part.axis < len(part.shape):
        raise LayoutError(f"a parameter of shape {part.shape} has no axis {part.axis} to be split along")
    end = 0
    for start, stop in part.ranges:
        if not end <= start <= stop <= part.shape[part.axis]:
            raise LayoutError(
                f"ranges {part.ranges} of axis {part.axis} of a parameter of shape {part.shape} must be ascending, "
                f"disjoint and within 0:{part.shape[part.axis]}"
            )
        end = stop
    held = sum(stop - start for start, stop in part.ranges)
    return (*part.shape[: part.axis], held, *part.shape[part.axis + 1 :])


def part_rows(part: Part) -> PartRows:
    """Return how the rows of the part that a rank holds lie in the rows of the whole parameter."""
    held = part_shape(part)[part.axis]
    inner = prod(part.shape[part.axis + 1 :])
    sizes = [stop - start for start, stop in part.ranges]
    runs: list[PartRun] = []
    for (start, _), before, size in zip(part.ranges, accumulate(sizes, initial=0), sizes, strict=False):
        _join(runs, PartRun(start * inner, before * inner, size * inner))
    return PartRows(prod(part.shape[: part.axis]), part.shape[part.axis] * inner, held * inner, tuple(runs))


def _join(runs: list[PartRun], run: PartRun) -> None:
    """Append a run, or lengthen the last run where the new one follows it in the whole without a gap."""
    if runs and runs[-1].whole + runs[-1].size == run.whole:
        runs[-1] = runs[-1]._replace(size=runs[-1].size + run.size)
    elif run.size:
        runs.append(run)


def part_runs(part: Part, shape_local: Sequence[int], start: int, stop: int) -> Iterator[PartRun]:
    """Cut C-order elements ``start:stop`` of the part that a rank holds into the longest contiguous runs, in order.

    Parameters
    ----------
    part : Part
        The part.
    shape_local : sequence of int
        Its shape, as the rank's parameter declares it.
    start, stop : int
        Range of the part's elements.

    Returns
    -------
    iterator of PartRun
        Unpacks to (first element in the whole, first element in the part, size).

    Raises
    ------
    LayoutError
        If the part does not have this shape, or ``start:stop`` is not inside it.
    """
    shape = part_shape(part)
    if tuple(shape_local) != shape:
        raise LayoutError(f"{part} has shape {shape}, the parameter is declared with {tuple(shape_local)}")
    if not 0 <= start <= stop <= prod(shape):
        raise LayoutError(f"elements {start}:{stop} do not exist in a part of shape {shape}")
    return _runs(part_rows(part), start, stop)


def _runs(rows: PartRows, start: int, stop: int) -> Iterator[PartRun]:
    if start == stop:
        return
    last = PartRun(0, start, 0)
    for row in range(start // rows.local, -(-stop // rows.local)):
        for run in rows.runs:
            first = row * rows.local + run.local
            low, high = max(start, first), min(stop, first + run.size)
            if low >= high:
                continue
            whole = row * rows.whole + run.whole + low - first
            if last.size and whole != last.whole + last.size:
                yield last
                last = PartRun(whole, low, high - low)
            else:
                last = PartRun(last.whole if last.size else whole, last.local, high - last.local)
    yield last


def take_rows(rows: PartRows, whole: Array, start: int, out: Array) -> None:
    """Copy elements of a part from the values of the whole.

    Parameters
    ----------
    rows : PartRows
        How the part lies in the whole, from :func:`part_rows`.
    whole : 1-D array
        All rows of the whole, or its rows from a certain row on. Elements are counted from the first row given.
    start : int
        The first element of the part to copy.
    out : 1-D array
        Receives ``out.size`` elements; contiguous.
    """
    for low, high in _whole_rows(rows.local, start, start + out.size):
        target = out[low - start : high - start]
        if low % rows.local or high % rows.local:
            for run in _runs(rows, low, high):
                target[run.local - low : run.local - low + run.size] = whole[run.whole : run.whole + run.size]
            continue
        first, last = low // rows.local, high // rows.local
        source = whole[first * rows.whole : last * rows.whole].reshape(last - first, rows.whole)
        target = target.reshape(last - first, rows.local)
        for run in rows.runs:
            target[:, run.local : run.local + run.size] = source[:, run.whole : run.whole + run.size]


def put_rows(rows: PartRows, values: Array, whole: Array) -> None:
    """Copy all elements of a part, ``values``, to their places in ``whole``; both arrays are 1-D and contiguous."""
    if not values.size:
        return
    source, target = values.reshape(rows.number, rows.local), whole.reshape(rows.number, rows.whole)
    for run in rows.runs:
        target[:, run.whole : run.whole + run.size] = source[:, run.local : run.local + run.size]


def _whole_rows(row: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut ``start:stop`` into incomplete first row, complete rows and incomplete last row; skip what is empty."""
    if start == stop:
        return
    first = min(stop, -(-start // row) * row)
    last = max(first, stop // row * row)
    yield from ((low, high) for low, high in ((start, first), (first, last), (last, stop)) if low < high)
