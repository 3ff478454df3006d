"""Map the part of a parameter that one tensor rank holds to places in the whole.

A part is cut along one axis, so both the whole and the part are *rows*: one for each index of the axes before it. The
elements of a range of the axis are neighbours in a row, in the part as in the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from mpizero.errors import LayoutError
from mpizero.types import Array, Part


class PartRun(NamedTuple):
    """Describe ``size`` elements that are neighbours in the whole (from ``whole``) and in the part (from ``local``)."""

    whole: int
    local: int
    size: int


class PartRows(NamedTuple):
    """Describe the whole and the part as rows.

    Attributes
    ----------
    number : int
        Number of rows.
    whole, local : int
        Elements of a row of the whole, and of one of the part.
    runs : tuple of PartRun
        The elements of a row of the part, in its order; neighbouring ranges are one run.
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
    """Return the whole parameter and the part that a rank holds as rows."""
    held = part_shape(part)[part.axis]
    inner = prod(part.shape[part.axis + 1 :])
    sizes = [stop - start for start, stop in part.ranges]
    runs: list[PartRun] = []
    for (start, _), before, size in zip(part.ranges, accumulate(sizes, initial=0), sizes, strict=False):
        _join(runs, PartRun(start * inner, before * inner, size * inner))
    return PartRows(prod(part.shape[: part.axis]), part.shape[part.axis] * inner, held * inner, tuple(runs))


def _join(runs: list[PartRun], run: PartRun) -> None:
    """Append a run, or lengthen the last one where the whole goes on without a gap."""
    if runs and runs[-1].whole + runs[-1].size == run.whole:
        runs[-1] = runs[-1]._replace(size=runs[-1].size + run.size)
    elif run.size:
        runs.append(run)


def part_runs(part: Part, shape_local: Sequence[int], start: int, stop: int) -> Iterator[PartRun]:
    """Cover C-order elements ``start:stop`` of the part that a rank holds by maximal runs, in order.

    Parameters
    ----------
    part : Part
        The slice.
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
        If the part does not have this shape, or the shape no such elements.
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
        How the part stands in the whole.
    whole : 1-D array
        All rows of the whole, or those from a certain one on: elements are counted from its first row.
    start : int
        The first element of the part that is wanted.
    out : 1-D array
        Takes as many elements as it has; contiguous.
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
    """Copy all elements of a part to their places in the values of the whole; both arrays are 1-D and contiguous."""
    if not values.size:
        return
    source, target = values.reshape(rows.number, rows.local), whole.reshape(rows.number, rows.whole)
    for run in rows.runs:
        target[:, run.whole : run.whole + run.size] = source[:, run.local : run.local + run.size]


def _whole_rows(row: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut ``start:stop`` at the first and after the last whole row: three ranges, without empty ones."""
    if start == stop:
        return
    first = min(stop, -(-start // row) * row)
    last = max(first, stop // row * row)
    yield from ((low, high) for low, high in ((start, first), (first, last), (last, stop)) if low < high)
