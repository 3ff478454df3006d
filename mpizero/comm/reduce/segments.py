"""Add rows in the order of the binary tree over grains, and describe the segments in which partial sums are exchanged.

A row is one copy of the whole gradient vector; see exact.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.comm.reduce.codecs import Codec
from mpizero.comm.transport import Request
from mpizero.errors import LayoutError
from mpizero.layout import Span
from mpizero.layout.sum_tree import Program
from mpizero.types import Array

_NO_RESIDUAL = np.empty(0, np.float32)
#: Depth of the stack of the kernels that execute tree programs (``kernels.cpu.fused.DEPTH``).
MAX_DEPTH = 16


class RowRange(NamedTuple):
    """Describe rows that the owner of some elements has to add, elementwise: ``rows[:, first : first + size]``.

    ``target`` is the index of the first of these elements in the gradient vector. ``position`` is its index in the
    concatenation of all ranges of elements that this rank owns.
    """

    rows: Array
    first: int
    target: int
    position: int
    size: int


@lru_cache(maxsize=4096)
def program_array(program: Program) -> Array:
    """Convert a tree program (a sequence of integer codes for a stack machine) to a read-only int32 array for kernels.

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
    """Add rows in the order of ``program``, divide the sum by ``divisor``, and write the result to ``out``.

    ``rows`` is a two-dimensional, C-contiguous array, of which the columns ``first : first + out.size`` are used.
    ``program`` is from :func:`program_array`; if it is empty, nothing is written. ``divisor`` has one element. ``out``
    may be a slice of one of the rows.
    """
    if program.size:
        kernels.backend(out).fused.tree_sum(rows, first, rows[:0], 0, program, divisor, out, 0, out.size)


class Segment:
    """Describe one segment of an exchange: some of the elements that each peer owns, and the sums to send for them.

    ``windows`` holds, for each peer, the ranges of its elements in this segment, each as a pair: the position in the
    concatenation of all ranges that the peer owns, and the range itself. ``counts`` is the number of partial sums that
    each group sends, and ``sums`` are the tree programs of the partial sums of this rank's group. ``residuals`` holds,
    for each peer, the part that earlier compressed messages to this peer have left out. ``codec`` compresses the
    messages; None sends them as they are. A group is the ranks of one node that share memory, or a single rank.
    """

    def __init__(
        self,
        rows: Array,
        windows: Sequence[Sequence[tuple[int, Span]]],
        counts: Sequence[int],
        sums: Sequence[Array],
        tag: str,
        *,
        residuals: Sequence[Array] = (),
        codec: Codec | None = None,
    ) -> None:
        self.rows, self.windows, self.counts, self.sums, self.tag = rows, windows, counts, sums, tag
        self.residuals, self.codec = residuals or [_NO_RESIDUAL] * len(windows), codec
        self.widths = [sum(span.size for _, span in window) for window in windows]
        self.one = np.ones(1, rows.dtype)

    def add(self, peer: int, number: int, out: Array) -> None:
        """Compute the sum ``sums[number]`` over the segment's elements that ``peer`` owns, and write it to ``out``."""
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
        """Wait for the messages, and yield the partial sums that this rank has to add, received ones and its own."""
        if self._request is not None:
            self._request.wait()
        rows, column = self._unpack(), 0
        for position, span in self._window:
            yield RowRange(rows, column, span.start, position, span.size)
            column += span.size
