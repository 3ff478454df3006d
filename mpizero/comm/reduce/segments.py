"""Add rows in the order of a tree, and exchange the partial sums segment by segment."""

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
#: Rows that the kernels' stack machine holds at once (``kernels.cpu.fused.DEPTH``).
MAX_DEPTH = 16


class Piece(NamedTuple):
    """Describe rows to be summed: ``size`` elements from column ``first`` of ``rows``.

    ``target`` is where they start in the row space of the gradient, ``position`` in the concatenation of the owner's
    ranges.
    """

    rows: Array
    first: int
    target: int
    position: int
    size: int


@lru_cache(maxsize=4096)
def program_array(program: Program) -> Array:
    """Return a tree program as the kernels take it: a read-only int32 array.

    Raises
    ------
    LayoutError
        If its sums are nested deeper than the kernels' stack.
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
    """Write the tree sum of ``rows[:, first:first + out.size]``, divided by ``divisor``, to ``out``.

    ``rows`` is two-dimensional and C-contiguous; ``out`` may be one of its rows' slices.
    """
    if program.size:
        kernels.backend(out).fused.tree_sum(rows, first, rows[:0], 0, program, divisor, out, 0, out.size)


class Segment:
    """Describe what one exchange moves: parts of every peer's ranges, and this rank's partial sums over them.

    ``windows`` are the parts, each with its place in the concatenation of its peer's ranges; ``residuals`` are what
    earlier messages have left out of them, one array a peer.
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
        """Write partial sum ``number`` over the parts of a peer's ranges to ``out``."""
        place = 0
        for _, span in self.windows[peer]:
            tree_sum(self.rows, span.start, self.sums[number], self.one, out[place : place + span.size])
            place += span.size


class Arriving:
    """Hold the partial sums of a segment in flight; see :meth:`ExactExchange.begin_segment`."""

    def __init__(
        self, request: Request | None, unpack: Callable[[], Array], window: Sequence[tuple[int, Span]]
    ) -> None:
        self._request, self._unpack, self._window = request, unpack, window

    def test(self) -> bool:
        """Let messages move on and tell whether all have arrived and left."""
        return self._request is None or self._request.test()

    def pieces(self) -> Iterator[Piece]:
        """Wait for what arrives, and yield what this rank has to sum."""
        if self._request is not None:
            self._request.wait()
        rows, column = self._unpack(), 0
        for position, span in self._window:
            yield Piece(rows, column, span.start, position, span.size)
            column += span.size
