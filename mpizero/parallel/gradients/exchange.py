"""Exchange gradients between peers, compressed or not, and keep what compression has left out (error feedback).

[Note: residuals] A compressed message leaves out a part of every value. The sender keeps this part, the residual, and
adds it to the value in its next message. A rank keeps residuals of the partial sums that it sends to the other peers,
an array for each of them. With replicated optimizer state it also sends its own range of the reduced gradient to all
peers, and keeps residuals of it. A step changes only a copy of the residuals. The copy replaces them when the
parameters have been updated, so a skipped step leaves the residuals unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpizero.comm.reduce.codecs import Codec
from mpizero.comm.reduce.exact import ExactExchange, gather_packed, gather_spans, in_flight
from mpizero.errors import ConfigError
from mpizero.layout import Span
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.parallel.placement import Placement
from mpizero.parallel.step_rules import gradient_codec
from mpizero.types import Array

#: The kind under which the allocator counts the memory of residuals.
RESIDUALS = "residuals"


def residual_sizes(totals: Sequence[int], peer: int, codec: Codec | None, *, replicated: bool) -> list[int]:
    """Return how many residual values a rank keeps for each of the peers. Not collective.

    Parameters
    ----------
    totals : sequence of int
        Number of gradient elements that each peer owns.
    peer : int
        Number, among the peers, of the rank that keeps the residuals.
    codec : Codec or None
        The codec that compresses messages; None: they are not compressed.
    replicated : bool
        Whether every rank sends its range of the reduced gradient to all peers, and so keeps residuals of it.
    """
    if codec is None or not codec.feedback or len(totals) == 1:
        return [0] * len(totals)
    return [0 if place == peer and not replicated else size for place, size in enumerate(totals)]


class GradientExchange(ExactExchange):
    """Send partial sums of gradients to the peers that own the elements, compressed as the configuration says.

    Parameters
    ----------
    store : ParameterStore
        The parameters: the ranges that each peer owns, the data type, and the allocator for residuals and messages.
        Only float32 is compressed.
    placement : Placement
        The strategy. It says whether all peers keep the whole optimizer state and so need all reduced gradients.
    compression : str or None
        The setting ``ShardingConfig.gradient_compression``.
    elements : int or None
        Number of elements in flight between peers at once; None is the default of :class:`ExactExchange`.
    exact : sequence of str
        Names of parameters whose values are sent among the gradients and must arrive exactly: averaged parameters.

    Raises
    ------
    ConfigError
        If gradients are to be compressed and ``exact`` is not empty.
    """

    def __init__(
        self,
        store: ParameterStore,
        placement: Placement,
        compression: str | None = None,
        *,
        elements: int | None = None,
        exact: Sequence[str] = (),
    ) -> None:
        super().__init__(store.grid.peers, None, store.memory.scratch, elements)
        self.memory, self.shares, self.dtype, self.placement = store.memory, store.peer_shares, store.dtype, placement
        self.replicated, self.exact = not placement.shard_optimizer, exact
        self._kept = self._next = np.empty(0, np.float32)
        self._begun = False
        self.compress(compression)

    def compress(self, compression: str | None) -> None:
        """Use another compression from the next step on, and drop all residuals.

        Not collective, but all ranks must call it before the same step.

        Raises
        ------
        ConfigError
            If gradients are to be compressed and the model has averaged parameters.
        """
        codec = gradient_codec(compression, self.dtype.itemsize)
        if codec is not None and self.exact:
            raise ConfigError(
                f"compression {compression!r} would change {self.exact[0]!r}, an averaged parameter whose values are "
                "sent among the gradients: leave gradient_compression out for this model"
            )
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
        """The number of MiB of gradients in flight at once; 0.0 if there is only one peer. Not collective."""
        return 0.0 if self.peers.size == 1 else in_flight(self.elements) * self.dtype.itemsize / 2**20

    @property
    def feedback(self) -> bool:
        """Tell whether this rank keeps residuals. Not collective."""
        return self._kept.size > 0

    @property
    def owes(self) -> bool:
        """Tell whether any of this rank's residuals, which are still to be sent, is not 0. Not collective."""
        return bool(self._kept.any())

    # ------------------------------------------------------------------ residuals

    def begin(self) -> None:
        """Copy the residuals for a step, which changes only the copy. Not collective.

        The copy of an earlier step that was not finished is overwritten.
        """
        self._next[:] = self._kept
        self._begun = True

    def finish(self, factor: float, *, updated: bool) -> None:
        """End a step: if it has ``updated`` the parameters, the copy of the residuals replaces them. Not collective.

        ``factor`` is the next step's loss scale divided by this step's. The residuals of partial sums, which contain
        the loss scale, are multiplied by it.
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
        """Use the compression of ``other``, an exchange of the same ranks, and copy its residuals. Not collective."""
        if self.compression != other.compression:
            self.compress(other.compression)
        self._kept[:] = other._kept

    def left_for(self, peer: int, unit: int | None = None) -> Array:
        """Return the copy, for this step, of the residuals that this rank keeps for ``peer``. Not collective.

        ``unit`` selects the residuals of one unit's gradients; None: of all units. For this rank's own number among the
        peers, they are the residuals of its range of the reduced gradient, which does not contain the loss scale.
        """
        left = self._next[self._bounds[peer] : self._bounds[peer + 1]]
        if unit is None or not left.size:
            return left
        share = self.shares[peer]
        start = share.gradient_offsets[unit]
        return left[start : start + sum(span.size for span in share.gradient_spans[unit])]

    def residuals(self, unit: int | None = None) -> list[Array]:
        """Return, for every peer, what :meth:`left_for` returns; an empty list if this rank keeps no residuals.

        Not collective.
        """
        return [self.left_for(peer, unit) for peer in range(len(self.shares))] if self.feedback else []

    # ------------------------------------------------------------------ reduced gradients

    def replicate(self, row: Array, spans: Sequence[Sequence[Span]]) -> None:
        """All-gather a row, a copy of the whole gradient vector: send the ranges that each peer owns to all peers.

        Collective over the peers. ``spans`` holds the ranges of every peer.
        """
        if self.codec is None or self.peers.size == 1:
            own = [row[s.start : s.stop] for s in spans[self.peers.rank]]
            gather_spans(self.peers, own, row, spans, self.scratch, self.elements)
        else:
            gather_packed(self.peers, self.codec, row, spans, self.left_for(self.peers.rank), self.scratch)
