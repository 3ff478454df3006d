"""Exchange gradients between groups of ranks, compressed or not, and keep what compression has left out.

[Note: residuals] A rank keeps what its messages have left out of its partial sums, for the ranges of all its peers;
with replicated optimizer state also what it has left out of its own reduced gradient, which all peers take. Residuals
belong to a step as parameters do: a step works on a copy, which counts only when the parameters have been updated, so a
skipped step leaves them as they were.
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

#: What the allocator calls residuals.
RESIDUALS = "residuals"


def residual_sizes(totals: Sequence[int], peer: int, codec: Codec | None, *, replicated: bool) -> list[int]:
    """Return how many values a rank keeps for each of its peers. Not collective.

    Parameters
    ----------
    totals : sequence of int
        Gradient elements that each peer owns.
    peer : int
        Which of them keeps.
    codec : Codec or None
        What packs its messages.
    replicated : bool
        Whether reduced gradients are sent to all peers.
    """
    if codec is None or not codec.feedback or len(totals) == 1:
        return [0] * len(totals)
    return [0 if place == peer and not replicated else size for place, size in enumerate(totals)]


class GradientExchange(ExactExchange):
    """Deliver partial sums of gradients to their owners, by the compression that the configuration names.

    Parameters
    ----------
    store : ParameterStore
        The parameters: who owns which, their type, and memory for residuals and messages. Only float32 is compressed.
    placement : Placement
        Whether all peers keep the whole optimizer state, and so take all reduced gradients.
    compression : str or None
        As ``ShardingConfig.gradient_compression``.
    elements : int or None
        Elements in flight at once; None takes the default.
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
        """Use another compression from the next step on, without residuals of earlier steps. Not collective.

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
        """MiB in flight at once; 0.0 where nothing travels. Not collective."""
        return 0.0 if self.peers.size == 1 else in_flight(self.elements) * self.dtype.itemsize / 2**20

    @property
    def feedback(self) -> bool:
        """Whether this rank keeps residuals. Not collective."""
        return self._kept.size > 0

    @property
    def owes(self) -> bool:
        """Whether earlier messages have left something out that is still to be sent by this rank. Not collective."""
        return bool(self._kept.any())

    # ------------------------------------------------------------------ residuals

    def begin(self) -> None:
        """Begin a step, or begin it anew: what an unfinished one has left is forgotten. Not collective."""
        self._next[:] = self._kept
        self._begun = True

    def finish(self, factor: float, *, updated: bool) -> None:
        """End a step: if it has updated the parameters, what it has left is kept from now on. Not collective.

        ``factor`` is by how much sums will be larger from now on: the ratio of two loss scales.
        """
        if updated and self._begun:
            self._kept, self._next = self._next, self._kept
        self._begun = False
        if factor != 1.0:
            for peer in range(len(self.shares)):
                if peer != self.peers.rank:
                    self._kept[self._bounds[peer] : self._bounds[peer + 1]] *= np.float32(factor)

    def forget(self) -> None:
        """Keep nothing. Not collective."""
        self._kept[:] = 0

    def copy_from(self, other: GradientExchange) -> None:
        """Take compression and residuals of an exchange between the same ranks. Not collective."""
        if self.compression != other.compression:
            self.compress(other.compression)
        self._kept[:] = other._kept

    def left_for(self, peer: int, unit: int | None = None) -> Array:
        """Return what this step has left out of messages to a peer: of one unit's gradients or of all. Not collective.

        That of the own rank is what is left out of its reduced gradient, which is not larger by any loss scale.
        """
        left = self._next[self._bounds[peer] : self._bounds[peer + 1]]
        if unit is None or not left.size:
            return left
        share = self.shares[peer]
        start = share.gradient_offsets[unit]
        return left[start : start + sum(span.size for span in share.gradient_spans[unit])]

    def residuals(self, unit: int | None = None) -> list[Array]:
        """Return :meth:`left_for` of every peer; empty without feedback. Not collective."""
        return [self.left_for(peer, unit) for peer in range(len(self.shares))] if self.feedback else []

    # ------------------------------------------------------------------ reduced gradients

    def replicate(self, row: Array, spans: Sequence[Sequence[Span]]) -> None:
        """Give what each peer has at its spans of ``row`` to all of them. Collective over the peers."""
        if self.codec is None or self.peers.size == 1:
            own = [row[s.start : s.stop] for s in spans[self.peers.rank]]
            gather_spans(self.peers, own, row, spans, self.scratch, self.elements)
        else:
            gather_packed(self.peers, self.codec, row, spans, self.left_for(self.peers.rank), self.scratch)
