"""Cut a range of C-order elements of an N-d array into rectangular blocks, as HDF5 selects them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod


def hyperslabs(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Cut the elements ``start:stop`` of an array into at most ``2 * ndim - 1`` disjoint rectangular blocks, in order.

    Parameters
    ----------
    shape : sequence of int
        Shape of the array; ``()`` is a scalar.
    start, stop : int
        Range of elements, as indices into the array flattened in C order.

    Yields
    ------
    tuple of slice
        One block, as one slice for each axis of the array.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (slice(start, stop),) if shape else ()
        return
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _inside_row(shape, first, head, tail)
        return
    if head:
        yield from _inside_row(shape, first, head, row)
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, n) for n in shape[1:]))
    if tail:
        yield from _inside_row(shape, last, 0, tail)


def _inside_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    for block in hyperslabs(shape[1:], start, stop):
        yield (slice(index, index + 1), *block)
