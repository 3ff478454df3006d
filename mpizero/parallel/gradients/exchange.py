"""Exchange gradients between peers, compressed or not, and keep what compression has left out (error feedback).

[Note: residuals] A compressed message leaves out a part of every value. The sender keeps this part, the residual, and
adds it to the value in its next message. A rank keeps residuals of the partial sums that it sends to the other peers,
an array for each of them. With replicated optimizer state it also sends its own range of the reduced gradient to all
peers, and keeps residuals of it. A step changes only a copy of the residuals. The copy replaces them when the
parameters have been updated, so a skipped step leaves the residuals unchanged.

[Note: units of means] What a step leaves out is a part of its mean, whatever the next batch weighs. So residuals are
kept in units of the mean gradient: partial sums divided by the total weight and the loss scale. A step multiplies them
by its own divisor. Rows are sent when that is known. Waves are sent before the ranks have agreed on it: they take the
weight that a sample had in the last step, and what that gave too much or too little stays in the residuals. The sum of
all messages plus the residual, in means, is therefore that of all mean gradients with any weights.

[Note: copies] A compressed value depends on its neighbours in a message, on who owns it, and on what earlier messages
left out. A parameter of which other ranks hold a copy that they update themselves (on another pipeline stage, or
unsplit in a tensor group) has other neighbours there. Its gradients are sent exactly, so that copies stay equal; those
of averaged parameters, which are values and no gradients, are too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mpizero.comm.reduce import Codec, ExactExchange, gather_packed, gather_spans, in_flight
from mpizero.layout import Span
from mpizero.parallel.parameters.shards import Share
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
        Number of gradient elements that each peer owns and that are compressed.
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


def compressed_sizes(share: Share, exact: Sequence[Span]) -> list[int]:
    """Return, for each unit, how many gradients that ``share`` owns are compressed: all but those in ``exact``.

    Not collective.
    """
    every = (share.row_spans(unit.index) for unit in share.layout.units)
    return [sum(p.size for span in spans for p, inside in span.split(exact) if not inside) for spans in every]


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
    exact : sequence of Span
        The ranges of the vector of all gradients that are never compressed ([Note: copies]), ascending.
    """

    def __init__(
        self,
        store: ParameterStore,
        placement: Placement,
        compression: str | None = None,
        *,
        elements: int | None = None,
        exact: Sequence[Span] = (),
    ) -> None:
        super().__init__(store.grid.peers, None, store.memory.scratch, elements)
        self.memory, self.shares, self.dtype, self.placement = store.memory, store.peer_shares, store.dtype, placement
        self.replicated, self.exact = not placement.shard_optimizer, exact
        self._kept = self._next = np.empty(0, np.float32)
        self.compress(compression)

    def compress(self, compression: str | None) -> None:
        """Use another compression from the next step on, and drop all residuals.

        Not collective, but all ranks must call it before the same step.
        """
        self.memory.release(RESIDUALS, self._kept)
        self.memory.release(RESIDUALS, self._next)
        self.compression, self.codec = compression, gradient_codec(compression, self.dtype.itemsize)
        self._of_units = [compressed_sizes(share, self.exact) for share in self.shares]
        sizes = residual_sizes(
            [sum(units) for units in self._of_units], self.peers.rank, self.codec, replicated=self.replicated
        )
        self._bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self._kept, self._next = (self.memory.private(RESIDUALS, self._bounds[-1], np.float32) for _ in range(2))
        self.forget()

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

    def begin(self, samples: int, loss_scale: float) -> None:
        """Copy the residuals for a step of ``samples`` samples, which changes only the copy. Not collective.

        The copy is in units of the step's partial sums, as far as the weight is known ([Note: units of means]). The
        copy of an earlier step that was not finished is overwritten.
        """
        self._samples, self._loss_scale = samples, loss_scale
        self._copy(samples * self._weight_of_a_sample * loss_scale)

    def weigh(self, weight: float, *, sent: bool) -> None:
        """Take the total weight of the step's batch, now that it is known. Not collective.

        ``sent`` tells whether the step's partial sums have been sent.
        """
        if not math.isfinite(weight):
            return  # of a step that is skipped
        self._divisor = weight * self._loss_scale
        if not sent:
            self._copy(self._divisor)

    def _copy(self, factor: float) -> None:
        self._factor = self._divisor = factor
        self._next[:] = self._kept
        for part in self._partial_sums:
            self._next[part] *= np.float32(factor)

    @property
    def _partial_sums(self) -> list[slice]:
        """The slices of the residuals that hold those of partial sums for other peers."""
        bounds = [slice(*pair) for pair in pairwise(self._bounds)]
        return [part for peer, part in enumerate(bounds) if peer != self.peers.rank]

    def finish(self, *, updated: bool) -> None:
        """End a step: if it has ``updated`` the parameters, the copy of the residuals replaces them. Not collective."""
        if not updated or not self._divisor:
            return
        for part in self._partial_sums:
            left, kept = self._next[part], self._kept[part]
            left /= np.float32(self._divisor)
            if self._factor != self._divisor:
                left += kept * np.float32(1 - self._factor / self._divisor)
        self._kept, self._next = self._next, self._kept
        self._weight_of_a_sample = self._divisor / self._loss_scale / self._samples
        self._divisor = 0.0

    def forget(self) -> None:
        """Set all residuals to 0. Not collective."""
        self._kept[:] = 0
        self._weight_of_a_sample, self._samples, self._loss_scale = 1.0, 0, 1.0
        self._factor = self._divisor = 0.0  # of the step that has begun; 0 if none has

    def copy_from(self, other: GradientExchange) -> None:
        """Use the compression of ``other``, an exchange of the same ranks, and copy its residuals. Not collective."""
        if self.compression != other.compression:
            self.compress(other.compression)
        self._kept[:] = other._kept
        self._weight_of_a_sample = other._weight_of_a_sample

    def left_for(self, peer: int, unit: int | None = None) -> Array:
        """Return the copy, for this step, of the residuals that this rank keeps for ``peer``. Not collective.

        ``unit`` selects the residuals of one unit's gradients; None: of all units. For this rank's own number among the
        peers, they are the residuals of its range of the reduced gradient, which is a mean.
        """
        left = self._next[self._bounds[peer] : self._bounds[peer + 1]]
        if unit is None or not left.size:
            return left
        start, sizes = sum(self._of_units[peer][:unit]), self._of_units[peer]
        return left[start : start + sizes[unit]]

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
        plain = spans
        if self.codec is not None and self.peers.size > 1:
            plain, packed = (
                [[part for span in own for part, exact in span.split(self.exact) if exact is chosen] for own in spans]
                for chosen in (True, False)
            )
            gather_packed(self.peers, self.codec, row, packed, self.left_for(self.peers.rank), self.scratch)
        own = [row[s.start : s.stop] for s in plain[self.peers.rank]]
        gather_spans(self.peers, own, row, plain, self.scratch, self.elements)
