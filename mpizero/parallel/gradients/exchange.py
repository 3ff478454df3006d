"""Exchange gradients between peers, compressed or not, and keep what compression has left out (error feedback).

[Note: residuals] A compressed message leaves out a part of the values. The sender keeps that part, the residual, and
adds it to its next message. A rank has residuals of its partial sums, one for the ranges of each peer. With replicated
optimizer state it also has one of its own reduced gradient, which it sends to all peers. A step changes only a copy of
the residuals. The copy replaces them once the parameters have been updated, so a skipped step leaves them unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpizero.comm.reduce.codecs import Codec
from mpizero.comm.reduce.exact import ExactExchange, gather_packed, gather_spans, in_flight
from mpizero.layout import Span
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.parallel.placement import Placement
from mpizero.parallel.step_rules import gradient_codec
from mpizero.types import Array

#: The kind under which the allocator counts the memory of residuals.
RESIDUALS = "residuals"


def residual_sizes(totals: Sequence[int], peer: int, codec: Codec | None, *, replicated: bool) -> list[int]:
    """Return how many residual values a rank keeps for each of its peers. Not collective.

    Parameters
    ----------
    totals : sequence of int
        Gradient elements that each peer owns.
    peer : int
        The peer that keeps the residuals.
    codec : Codec or None
        Compresses its messages; None: they are not compressed.
    replicated : bool
        Whether reduced gradients are sent to all peers.
    """
    if codec is None or not codec.feedback or len(totals) == 1:
        return [0] * len(totals)
    return [0 if place == peer and not replicated else size for place, size in enumerate(totals)]


class GradientExchange(ExactExchange):
    """Send partial sums of gradients to their owners, compressed as the configuration says.

    Parameters
    ----------
    store : ParameterStore
        The parameters: their owners, their type, and the allocator for residuals and messages. Only float32 is
        compressed.
    placement : Placement
        The strategy. It says whether all peers keep the whole optimizer state and so need all reduced gradients.
    compression : str or None
        As ``ShardingConfig.gradient_compression``.
    elements : int or None
        Elements in flight at once; None is the default.
    """

    def __init__(
        self,
        store: ParameterStore,
        placement: Placement,
        compression: str | None = None,
        *,
        elements: int | None = None,
    ) -> None:
        super().__init__(store.grid.peers, None, store.memory.scratch, elements)
        self.memory, self.shares, self.dtype, self.placement = store.memory, store.peer_shares, store.dtype, placement
        self.replicated = not placement.shard_optimizer
        self._kept = self._next = np.empty(0, np.float32)
        self._begun = False
        self.compress(compression)

    def compress(self, compression: str | None) -> None:
        """Change the compression from the next step on, and drop all residuals. Not collective.

        All ranks must do the same.
        """
        codec = gradient_codec(compression, self.dtype.itemsize)
        self.memory.release(RESIDUALS, self._kept)
        self.memory.release(RESIDUALS, self._next)
        self.compression, self.codec = compression, codec
        totals = [share.gradient_size for share in self.shares]
        sizes = residual_sizes(totals, self.peers.rank, self.codec, replicated=self.replicated)
        self._begun = False
        self._bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self._kept, self._next = (self.memory.private(RESIDUALS, self._bounds[-1], np.float32) for _ in range(2))

    @property
    def bucket_mb(self) -> float:
        """Return the MiB in flight at once; 0.0 if there is only one peer. Not collective."""
        return 0.0 if self.peers.size == 1 else in_flight(self.elements) * self.dtype.itemsize / 2**20

    @property
    def feedback(self) -> bool:
        """Tell whether this rank keeps residuals. Not collective."""
        return self._kept.size > 0

    @property
    def owes(self) -> bool:
        """Tell whether this rank has residuals other than 0, which it still has to send. Not collective."""
        return bool(self._kept.any())

    # ------------------------------------------------------------------ residuals

    def begin(self) -> None:
        """Begin a step with a copy of the residuals; those of an unfinished step are dropped. Not collective."""
        self._next[:] = self._kept
        self._begun = True

    def finish(self, factor: float, *, updated: bool) -> None:
        """End a step: if it has updated the parameters, keep the residuals that it has left. Not collective.

        ``factor`` is the next loss scale over the current one: gradients, and so residuals, are larger by it.
        """
        if updated and self._begun:
            self._kept, self._next = self._next, self._kept
        self._begun = False
        if factor != 1.0:
            for peer in range(len(self.shares)):
                if peer != self.peers.rank:
                    self._kept[self._bounds[peer] : self._bounds[peer + 1]] *= np.float32(factor)

    def forget(self) -> None:
        """Set all residuals to 0. Not collective."""
        self._kept[:] = 0

    def copy_from(self, other: GradientExchange) -> None:
        """Take over the compression and the residuals of another exchange between the same ranks. Not collective."""
        if self.compression != other.compression:
            self.compress(other.compression)
        self._kept[:] = other._kept

    def left_for(self, peer: int, unit: int | None = None) -> Array:
        """Return this step's residuals for a peer: of one unit's gradients, or of all units. Not collective.

        For this rank itself it is the residual of its reduced gradient, from which the loss scale is divided out.
        """
        left = self._next[self._bounds[peer] : self._bounds[peer + 1]]
        if unit is None or not left.size:
            return left
        share = self.shares[peer]
        start = share.gradient_offsets[unit]
        return left[start : start + sum(span.size for span in share.gradient_spans[unit])]

    def residuals(self, unit: int | None = None) -> list[Array]:
        """Return the residuals for every peer, as :meth:`left_for`; empty without feedback. Not collective."""
        return [self.left_for(peer, unit) for peer in range(len(self.shares))] if self.feedback else []

    # ------------------------------------------------------------------ reduced gradients

    def replicate(self, row: Array, spans: Sequence[Sequence[Span]]) -> None:
        """All-gather ``row``: send the spans that each peer owns to all peers. Collective over the peers."""
        if self.codec is None or self.peers.size == 1:
            own = [row[s.start : s.stop] for s in spans[self.peers.rank]]
            gather_spans(self.peers, own, row, spans, self.scratch, self.elements)
        else:
            gather_packed(self.peers, self.codec, row, spans, self.left_for(self.peers.rank), self.scratch)
