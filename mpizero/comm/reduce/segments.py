"""Add rows in the order of the canonical tree, and describe the segments in which partial sums are exchanged.

A row is one copy of the whole gradient vector; see exact.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.comm.transport import Request
from mpizero.errors import LayoutError
from mpizero.layout import Program, Span
from mpizero.types import Array

_NO_RESIDUAL = np.empty(0, np.float32)
#: Depth of the stack of the kernels that execute tree programs (``kernels.cpu.fused.DEPTH``).
MAX_DEPTH = 16


class RowRange(NamedTuple):
    """Describe a sum that an owner has to compute: over ``size`` elements of ``rows``, from column ``first`` on.

    ``target`` is the index of the first element in the gradient vector. ``position`` is its index in the concatenation
    of the ranges that the owner owns.
    """

    rows: Array
    first: int
    target: int
    position: int
    size: int


@lru_cache(maxsize=4096)
def program_array(program: Program) -> Array:
    """Convert a tree program to the array that the kernels take: int32, read-only.

    Raises
    ------
    LayoutError
        If the program needs a deeper stack than the kernels have.
    """
    depth = deepest = 0
    for code in program:
        depth += (code >= 0) - (code == -1)
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise LayoutError(
            f"a sum over so many grains is nested {deepest} deep, at most {MAX_DEPTH} are supported: use larger grains "
            "(micro_batch), so that a global batch has at most 32,768 of them"
        )
    array = np.array(program, np.int32)
    array.flags.writeable = False
    return array


def tree_sum(rows: Array, first: int, program: Array, divisor: Array, out: Array) -> None:
    """Add rows in the order of ``program``, divide by ``divisor``, and write the result to ``out``.

    The columns ``first`` to ``first + out.size`` of ``rows`` are used, a two-dimensional, C-contiguous array. ``out``
    may be a slice of one of the rows.
    """
    if program.size:
        kernels.backend(out).fused.tree_sum(rows, first, rows[:0], 0, program, divisor, out, 0, out.size)


class Segment:
    """Describe one segment of an exchange: some elements of every peer's ranges, and this rank's partial sums of them.

    ``windows`` holds, for each peer, parts of its ranges, each with its position in the concatenation of the ranges.
    ``counts`` is the number of partial sums of each group, and ``sums`` are the tree programs of this group's ones.
    ``residuals`` holds, for each peer, the values that earlier compressed messages have left out.
    """

    def __init__(
        self,
        rows: Array,
        windows: Sequence[Sequence[tuple[int, Span]]],
        counts: Sequence[int],
        sums: Sequence[Array],
        tag: str,
        residuals: Sequence[Array] = (),
    ) -> None:
        self.rows, self.windows, self.counts, self.sums, self.tag = rows, windows, counts, sums, tag
        self.residuals = residuals or [_NO_RESIDUAL] * len(windows)
        self.widths = [sum(span.size for _, span in window) for window in windows]
        self.one = np.ones(1, rows.dtype)

    def add(self, peer: int, number: int, out: Array) -> None:
        """Compute partial sum ``number`` over the segment's elements that ``peer`` owns, and write it to ``out``."""
        place = 0
        for _, span in self.windows[peer]:
            tree_sum(self.rows, span.start, self.sums[number], self.one, out[place : place + span.size])
            place += span.size


class Arriving:
    """Represent a segment whose messages are in flight; see :meth:`ExactExchange.begin_segment`."""

    def __init__(
        self, request: Request | None, unpack: Callable[[], Array], window: Sequence[tuple[int, Span]]
    ) -> None:
        self._request, self._unpack, self._window = request, unpack, window

    def test(self) -> bool:
        """Let MPI make progress, and tell whether all messages have been sent and received."""
        return self._request is None or self._request.test()

    def pieces(self) -> Iterator[RowRange]:
        """Wait for the messages, and yield the received partial sums that this rank has to add."""
        if self._request is not None:
            self._request.wait()
        rows, column = self._unpack(), 0
        for position, span in self._window:
            yield RowRange(rows, column, span.start, position, span.size)
            column += span.size
