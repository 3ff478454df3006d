"""Add up gradients of parameters that several pipeline stages use, such as a token table (embedding and head).

[Note: cut ties] Every stage that uses such a parameter stores a copy of it. Different data ranks may own the same range
of it on different stages, because the stages have different units. First each stage sums the gradients of its own uses
over grains. Then it receives the gradients of the other stages' uses, and adds the gradients of all uses in declared
order. All stages make the same update, so the copies stay equal to the bit without another message. Norms and
checkpoints use only the copy on the home stage, the stage whose block declares the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.comm import ProcessGrid, Request
from mpizero.layout import Span
from mpizero.layout.flat import FlatLayout
from mpizero.layout.mesh import Coordinates
from mpizero.parallel.parameters.shards import Share, UpdatePiece
from mpizero.parallel.partition.local_model import PartitionedModel, Use
from mpizero.types import Array


class _Holder(NamedTuple):
    """Describe one data rank of a stage, and the range of a tied parameter's elements that it owns."""

    stage: int
    data_rank: int
    span: Span


class _Tie(NamedTuple):
    """Describe, for one rank, a parameter that several stages use.

    ``tag`` is the MPI tag for the first of its uses; the tag of the next use is larger by 2. ``holders`` are the data
    ranks of all stages that use it. ``mine`` is the range of its elements that this rank owns.
    """

    name: str
    tag: int
    uses: tuple[Use, ...]
    holders: tuple[_Holder, ...]
    mine: Span


class TieExchange:
    """Add the gradients of all uses of tied parameters over the pipeline stages that use them.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks.
    partitioned : PartitionedModel
        This rank's part of the model.
    layouts : mapping of int to FlatLayout
        The layout of every stage, by the stage's number.
    pieces : sequence of UpdatePiece
        The ranges of parameters in this rank's own shard.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        partitioned: PartitionedModel,
        layouts: Mapping[int, FlatLayout],
        pieces: Sequence[UpdatePiece],
    ) -> None:
        self.grid, self.number = grid, partitioned.stage
        self.pieces = {home_of(piece.entry.spec): piece for piece in pieces}
        ties, tag = [], 1
        for name, uses in sorted(partitioned.uses.items()):  # on every stage, so that all agree on tags
            if any(use.stage == self.number for use in uses) and home_trainable(name, layouts):
                ties.append(self._tie(name, tag, uses, layouts))
            tag += 2 * len(uses)
        self.ties = tuple(ties)

    def _tie(self, name: str, tag: int, uses: tuple[Use, ...], layouts: Mapping[int, FlatLayout]) -> _Tie:
        data = self.grid.data
        holders = []
        for stage in sorted({use.stage for use in uses}):
            layout = layouts[stage]
            entry = next(e for e in layout.parameters if home_of(e.spec) == name)
            for rank in range(data.size):
                part = entry.span.intersect(Share(layout, rank, data.size).spans[entry.unit])
                holders.append(_Holder(stage, rank, part.shift(-entry.offset) if part.size else Span(0, 0)))
        mine = next(h.span for h in holders if (h.stage, h.data_rank) == (self.number, data.rank))
        return _Tie(name, tag, uses, tuple(holders), mine)

    @property
    def names(self) -> frozenset[str]:
        """The names of the tied parameters that this stage shares with other stages."""
        return frozenset(tie.name for tie in self.ties)

    def add(self, reduced: Array) -> None:
        """Replace the gradient of each shared parameter in ``reduced`` by the sum of the gradients of all its uses.

        Collective over the data groups of the stages that share parameters. Gradients on a GPU are copied to the host
        to be sent and added, and the sums are copied back.
        """
        with_all = [(tie, *self._start(tie, reduced)) for tie in self.ties]
        for tie, arrived, requests in with_all:
            for request in requests:
                request.wait()
            if tie.mine.size:
                self._sum(tie, arrived, reduced)

    def _start(self, tie: _Tie, reduced: Array) -> tuple[dict[Use, list[tuple[Span, Array]]], list[Request]]:
        """Begin to exchange the gradient of each use with the ranks of other stages that own the same elements.

        Returns
        -------
        (dict, list of Request)
            For each use on another stage, the ranges of elements and the buffers that receive their gradients; and the
            requests of all messages.
        """
        world, requests, sent = self.grid.world, [], []
        arrived: dict[Use, list[tuple[Span, Array]]] = {}
        for holder in tie.holders:
            common = holder.span.intersect(tie.mine)
            if holder.stage == self.number or not common.size:
                continue
            peer = self._world_rank(holder)
            for use in tie.uses:
                tag = tie.tag + 2 * tie.uses.index(use)
                if use.stage == holder.stage:
                    buffer = np.empty(common.size, reduced.dtype)
                    arrived.setdefault(use, []).append((common, buffer))
                    requests.append(world.irecv(buffer, peer, tag))
                elif use.stage == self.number:
                    buffer = _copied(self._gradient(tie, use, common, reduced))
                    sent.append(buffer)
                    requests.append(world.isend(buffer, peer, tag))
        return arrived, requests

    def _sum(self, tie: _Tie, arrived: Mapping[Use, Sequence[tuple[Span, Array]]], reduced: Array) -> None:
        total = np.empty(tie.mine.size, reduced.dtype)
        for position, use in enumerate(tie.uses):
            for span, values in self._parts(tie, use, arrived, reduced):
                part = total[span.start - tie.mine.start : span.stop - tie.mine.start]
                if position == 0:
                    part[:] = values
                else:
                    part += values
        target = self._gradient(tie, Use(self.number, 0), tie.mine, reduced)
        if isinstance(target, np.ndarray):
            target[:] = total
        else:
            target.set(total)

    def _parts(
        self, tie: _Tie, use: Use, arrived: Mapping[Use, Sequence[tuple[Span, Array]]], reduced: Array
    ) -> Iterator[tuple[Span, Array]]:
        if use.stage == self.number:
            yield tie.mine, kernels.to_host(self._gradient(tie, use, tie.mine, reduced))
        else:
            yield from arrived[use]

    def _gradient(self, tie: _Tie, use: Use, span: Span, reduced: Array) -> Array:
        """Return a view, in ``reduced``, of the gradient of one use on this stage, for the elements ``span``."""
        piece = self.pieces[tie.name]
        start = (piece.gradient, *piece.uses)[use.number] + span.start - tie.mine.start
        return reduced[start : start + span.size]

    def _world_rank(self, holder: _Holder) -> int:
        axes, here = self.grid.axes, self.grid.here
        data, context = divmod(holder.data_rank, axes.context)
        return axes.rank_of(Coordinates(holder.stage, here.tensor, data, context))


def _copied(values: Array) -> Array:
    """Return a copy, on the host, of an array on the host or on a GPU."""
    return values.copy() if isinstance(values, np.ndarray) else kernels.to_host(values)


def home_of(spec: Any) -> str:
    """Return the name that a parameter has in the whole model; for a copy of it, the original's. Not collective."""
    return str(spec.guest or spec.name)


def home_trainable(name: str, layouts: Mapping[int, FlatLayout]) -> bool:
    """Tell whether any stage trains the parameter ``name``; ``layouts`` are those of all stages. Not collective."""
    found = (e.spec for layout in layouts.values() for e in layout.parameters)
    return any(spec.trainable for spec in found if home_of(spec) == name)
