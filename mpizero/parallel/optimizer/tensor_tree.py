"""Sum the squares of the elements of each parameter, for norms that do not depend on the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero.comm import ProcessGrid
from mpizero.layout import FlatLayout, Span, cover, merge
from mpizero.parallel.parameters.shards import Share, UpdatePiece
from mpizero.types import Array


class TensorTree:
    """Sum the squares of each parameter's elements in float64, in the order of a binary tree over the elements.

    [Note: scalar sums] A rank computes the sums of the largest subtrees that lie inside its ranges. These few numbers
    are gathered from all ranks, and every rank adds them in the same order. So norms have the same bits on every
    layout.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks.
    layout : FlatLayout
        The parameters.
    pieces : sequence of UpdatePiece
        The ranges of parameters that this rank updates. Only the pieces in its own shard are summed by this rank; they
        are kept as ``own``.
    """

    def __init__(self, grid: ProcessGrid, layout: FlatLayout, pieces: Sequence[UpdatePiece]) -> None:
        self.grid = grid
        share = Share(layout, grid.data.rank, grid.data.size)
        self.own = [piece for piece in pieces if _inside(piece.span, share.spans[piece.entry.unit])]
        self.names = [e.spec.name for e in layout.parameters if e.spec.optimized]
        self.counts = [0] * grid.data.size
        arrivals: dict[str, list[Any]] = {name: [] for name in self.names}
        place = 0
        for rank in range(grid.data.size):
            for name, nodes in _held(Share(layout, rank, grid.data.size)):
                arrivals[name] += [(node, (place + i,)) for i, node in enumerate(nodes)]
                place += len(nodes)
                self.counts[rank] += len(nodes)
        totals = {e.spec.name: e.spec.size for e in layout.parameters}
        self.programs = {name: merge(held, totals[name]) for name, held in arrivals.items()}
        cuts = [self._cuts(piece) for piece in self.own] or [np.empty((2, 0), np.int64)]
        self._cut = np.concatenate(cuts, axis=1)
        self._cuts_of = [cut.shape[1] for cut in cuts]

    @staticmethod
    def _cuts(piece: UpdatePiece) -> Array:
        """Return the starts (row 0) and stops (row 1), in elements of the piece, of the subtrees that make it up."""
        entry, span = piece.entry, piece.span
        nodes = cover(span.start - entry.offset, span.stop - entry.offset, entry.spec.size)
        leaves = [node.leaves(entry.spec.size) for node in nodes]
        start = span.start - entry.offset
        return np.array([[r.start - start for r in leaves], [r.stop - start for r in leaves]], np.int64)

    def square_sums(self, values: Array, starts: Sequence[int]) -> dict[str, float]:
        """Return, for every optimized parameter of the layout, by name, the sum of squares of its elements.

        Collective over the data group. ``values`` holds this rank's elements; those of piece ``own[i]`` begin at index
        ``starts[i]``.
        """
        local = np.empty(self.counts[self.grid.data.rank], np.float64)
        first, stop = self._cut + np.repeat(np.array(starts, np.int64), self._cuts_of[: len(starts)])
        kernels.backend(values).reduction.tree_square_sums(values, first, stop, local)
        everyone = np.empty(sum(self.counts), np.float64)
        self.grid.data.allgatherv(local, everyone, self.counts, "tensor sums")
        return {name: _evaluate(held, everyone) for name, held in self.programs.items()}


def _inside(span: Span, other: Span) -> bool:
    return other.start <= span.start and span.stop <= other.stop


def _held(share: Share) -> list[tuple[str, tuple[Any, ...]]]:
    held = []
    for span in share.spans:
        for entry, part in share.layout.pieces(span):
            if entry.spec.optimized:
                first, last = part.start - entry.offset, part.stop - entry.offset
                held.append((entry.spec.name, cover(first, last, entry.spec.size)))
    return held


def _evaluate(held: Sequence[tuple[Any, tuple[int, ...]]], values: Array) -> float:
    if not held:
        return 0.0
    stack: list[float] = []
    for v in held[0][1]:
        if v >= 0:
            stack.append(float(values[v]))
        elif v == -1:
            right = stack.pop()
            stack[-1] += right
        else:
            stack[-1] += float(values[-2 - v])
    return stack[0]
