"""Gather elements that the shard rule separates: whole tensors to update them, and gradients of tied parameters.

:class:`TensorUpdater` updates the tensors that this rank owns. :class:`TensorPlan` computes which rank owns which
tensor and which elements ranks exchange, and :class:`TensorExchange` sends these elements. :class:`TieExchange` adds up
the gradients of parameters that several pipeline stages use, such as a token table (embedding and head).

[Note: whole tensors] Matrix optimizers need a whole tensor at a time: Muon makes its momentum orthogonal, SOAP computes
eigenvectors from its gradients. The shard rule cuts tensors anywhere. So whole tensors are assigned to data ranks by
their costs, in the same way on every layout with the same number of data ranks. The ranks that hold elements of a
tensor's reduced gradient send them to its owner. The owner, which alone keeps the tensor's state, updates the whole
tensor and sends the new values to all ranks that hold elements of the parameter. The receiving ranks write the values,
which are then all-gathered like any update. An owner computes with arrays of the tensor's own shape, so no bit depends
on the number of ranks or on how shards are cut.

[Note: cut ties] Every stage that uses a tied parameter stores a copy of it. Different data ranks may own the same range
of the parameter on different stages, because the stages have different units. First each stage sums the gradients of
its own uses over grains. Then the stage receives the gradients of the other stages' uses, and adds the gradients of all
uses in declared order. All stages make the same update, so the copies stay equal to the bit without another message.
Norms and checkpoints use only the copy on the home stage, the stage whose block declares the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero._util.checks import require, whole
from mpizero.comm import ProcessGrid, Request
from mpizero.comm.agreement import all_ranks
from mpizero.errors import ArgumentError, ConfigError
from mpizero.layout import Span
from mpizero.layout.flat import FlatLayout, ParameterUse, owners_by_cost
from mpizero.layout.mesh import Coordinates
from mpizero.optim.elementwise import optimizer_name, state_specs, takes_tensor
from mpizero.sharding.params import ParameterStore, Shard, StatePiece, UpdatePiece
from mpizero.sharding.partition import PartitionedModel, Use
from mpizero.types import Array, ParameterSpec


def home_of(spec: Any) -> str:
    """Return a parameter's name in the whole model; for a copy on another stage, the original's. Not collective."""
    return str(spec.guest or spec.name)


#: MPI tags of messages with elements of gradients, of parameters, and of updated parameters.
_GRADIENT, _PARAMETER, _UPDATED = 1, 2, 3


class TensorUpdater:
    """Exchange the elements of whole tensors with their owners, and update those that this rank owns.

    Parameters
    ----------
    optimizer : TensorOptimizer
        The matrix optimizer, as returned by :func:`mpizero.optim.elementwise.with_copies`.
    store, plan, pieces
        As in :class:`.TensorExchange`.
    """

    def __init__(self, optimizer: Any, store: ParameterStore, plan: TensorPlan, pieces: Sequence[UpdatePiece]) -> None:
        self.optimizer, self.store, self.plan = optimizer, store, plan
        self.exchange = TensorExchange(store, plan, pieces)
        self.owned = self.exchange.owned
        self.pieces = [piece for piece in pieces if piece.entry.spec.name in plan.names]
        self.owned_state = {slot: self._owned_state(slot) for slot in optimizer.tensor_slots}

    def _owned_state(self, slot: str) -> list[StatePiece]:
        """Return the state arrays ``slot`` (such as "exp_avg") that this rank keeps, one for each tensor that it owns.

        Tensors without such an array are left out.
        """
        pieces, offset = list[StatePiece](), 0
        for number in self.owned:
            spec = state_specs(self.optimizer, self.plan.tensors[number].spec).get(slot)
            if spec is not None:
                pieces.append(StatePiece(spec, 0, offset, spec.size))
                offset += spec.size
        return pieces

    def size(self, slot: str) -> int:
        """Return the number of elements of this rank's state arrays ``slot``, such as "exp_avg". Not collective."""
        return sum(piece.size for piece in self.owned_state[slot])

    def update(self, reduced: Array, hypers: Mapping[int, Array], state: Mapping[str, Array]) -> None:
        """Update all whole tensors from the reduced gradient. Collective over all ranks.

        New values are written only to the ranges of parameters that this rank updates, :attr:`pieces`.

        Parameters
        ----------
        reduced : 1-D array
            The reduced gradient; complete in the ranges that this rank updates.
        hypers : mapping of int to Array
            The hyperparameters of each optimizer group.
        state : mapping of str to Array
            This rank's optimizer state, by slot.

        Raises
        ------
        Exception
            What ``update_tensor`` raised, on the owner of the tensor; RemoteError on all other ranks, those of other
            pipeline stages included. No parameter has changed then.
        """
        gradients, requests = self.exchange.begin_gather(reduced, lambda piece: piece.gradient, _GRADIENT)
        values, more = self.exchange.begin_parameters(_PARAMETER)
        for request in requests + more:
            request.wait()
        with all_ranks(self.store.grid.world, "whole tensors"):
            for number in self.owned:
                self._update_one(number, values[number], gradients[number], hypers, state)
        self.exchange.send_back(values, self.store.values, lambda piece: piece.store, _UPDATED)

    def _update_one(
        self, number: int, w: Array, g: Array, hypers: Mapping[int, Array], state: Mapping[str, Array]
    ) -> None:
        spec = self.plan.tensors[number].spec
        group = self.optimizer.group_of(replace(spec, name=home_of(spec)))
        step = self.optimizer.tensor_step(hypers[group])
        arrays = {
            slot: state[slot][p.state : p.state + p.size].reshape(p.spec.shape)
            for slot, pieces in self.owned_state.items()
            for p in pieces
            if p.spec.name == spec.name
        }
        try:
            result = self.optimizer.update_tensor(w.reshape(spec.shape), g.reshape(spec.shape), arrays, step)
        except Exception as error:
            error.add_note(f"In the update of parameter {home_of(spec)!r} of shape {spec.shape}, step {step.number}")
            raise
        if result is not None:
            raise ArgumentError(
                f"{optimizer_name(self.optimizer)}.update_tensor returned {type(result).__name__} for "
                f"{home_of(spec)!r}; expected None: change w and the arrays of state in place"
            )


class Move(NamedTuple):
    """Describe elements of a tensor that data rank ``source`` has and ``target`` needs; both may be the same rank.

    ``tensor`` is the number of the tensor, ``span`` the range of its elements in the flat vector of all parameters.
    """

    tensor: int
    span: Span
    source: int
    target: int


@dataclass(frozen=True)
class TensorPlan:
    """Compute the owners of tensors, and the elements that ranks exchange; equal on all ranks of a data group.

    A tensor is divided among its *holders*: shard j of the shard rule is held by data rank j, or with replicated
    optimizer state by the inter-node group of rank j, one rank on each node.

    Attributes
    ----------
    layout : FlatLayout
        The layout of the parameters.
    tensors : tuple of ParameterUse
        The parameters that are updated as whole tensors, in declared order.
    owners : tuple of int
        For each tensor, the data rank that updates it and keeps its state.
    nodes : sequence of sequences of int
        The data ranks of every node.
    replicated : bool
        Whether every node keeps the whole optimizer state (DDP).
    """

    layout: FlatLayout
    tensors: tuple[ParameterUse, ...]
    owners: tuple[int, ...]
    nodes: Sequence[Sequence[int]]
    replicated: bool

    @classmethod
    def of(cls, optimizer: Any, layout: FlatLayout, nodes: Sequence[Sequence[int]], *, replicated: bool) -> TensorPlan:
        """Select the tensors that ``optimizer`` updates as a whole, and assign them to data ranks by their costs.

        Raises
        ------
        ConfigError
            If the optimizer selects a complex tensor, or one of which a rank holds only a slice, or if a cost is not a
            whole number.
        """
        tensors = tuple(entry for entry in layout.parameters if takes_tensor(optimizer, entry.spec))
        for entry in tensors:
            _check(optimizer, entry.spec)
        costs = [tensor_cost(optimizer, entry.spec.shape) for entry in tensors]
        return cls(layout, tensors, owners_by_cost(costs, sum(map(len, nodes))), nodes, replicated)

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors that the optimizer updates as a whole."""
        return frozenset(entry.spec.name for entry in self.tensors)

    def owned(self, rank: int) -> list[int]:
        """Return the indices of the tensors that data rank ``rank`` owns."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]

    @cached_property
    def gathers(self) -> list[list[Move]]:
        """For each data rank, the moves (messages or copies) that it makes to gather gradients on tensors' owners."""
        return self._by_rank(
            Move(number, span, self._source(self.owners[number], shard), self.owners[number])
            for number, shard, span in self._parts
        )

    @cached_property
    def returns(self) -> list[list[Move]]:
        """For each data rank, the moves (messages or copies) that it makes to send updated tensors to all holders."""
        return self._by_rank(
            Move(number, span, self.owners[number], target)
            for number, shard, span in self._parts
            for target in self._holders[shard]
        )

    def _by_rank(self, moves: Iterable[Move]) -> list[list[Move]]:
        """Return, for each rank, the moves (messages or copies) in which it takes part, in their order."""
        by_rank: list[list[Move]] = [[] for _ in self._holders]
        for move in moves:
            for rank in {move.source, move.target}:
                by_rank[rank].append(move)
        return by_rank

    def _source(self, owner: int, shard: int) -> int:
        """Return the data rank that sends the elements of shard number ``shard`` to ``owner``.

        It is the owner itself if it holds them; else a rank on the owner's node, if one holds them; else rank
        ``shard``.
        """
        node = next(ranks for ranks in self.nodes if owner in ranks)
        return owner if owner in self._holders[shard] else next((r for r in node if r in self._holders[shard]), shard)

    @cached_property
    def _parts(self) -> list[tuple[int, int, Span]]:
        """The range of every tensor that each shard has, as (tensor, shard, range); empty ranges are left out."""
        shards = [Shard(self.layout, rank, len(self._holders)).spans for rank in range(len(self._holders))]
        return [
            (number, shard, part)
            for number, entry in enumerate(self.tensors)
            for shard, spans in enumerate(shards)
            if (part := entry.span.intersect(spans[entry.unit])).size
        ]

    @cached_property
    def _holders(self) -> list[tuple[int, ...]]:
        """For each shard, the data ranks that hold its elements of gradients and of optimizer state."""
        positions = {rank: ranks.index(rank) for ranks in self.nodes for rank in ranks}
        if not self.replicated:
            return [(rank,) for rank in range(len(positions))]
        return [tuple(ranks[positions[rank]] for ranks in self.nodes) for rank in range(len(positions))]


def tensor_cost(optimizer: Any, shape: tuple[int, ...]) -> int:
    """Return the number of floating-point operations that an optimizer states for a tensor's update. Not collective.

    Raises
    ------
    ConfigError
        If what the optimizer states is not a whole number >= 0.
    """
    return require(f"{optimizer_name(optimizer)}.cost({shape})", optimizer.cost(shape), whole())


def _check(optimizer: Any, spec: ParameterSpec) -> None:
    name = optimizer_name(optimizer)
    if spec.part is not None and spec.part.shape != spec.shape:
        raise ConfigError(
            f"{name} updates whole tensors, and a tensor group splits {home_of(spec)!r} of shape {spec.part.shape}: "
            "train with tensor_parallel_size=1 (data, pipeline and context ranks work), or exclude it"
        )
    if spec.complex:
        raise ConfigError(
            f"{name}.takes chooses {home_of(spec)!r}, which is complex: tensors of real numbers only can be taken"
        )


#: Returns a view of the elements of a move.
_View = Callable[[Move], Array]
#: Returns the index of a piece's first element in an array that is kept in pieces.
OffsetOf = Callable[[UpdatePiece], int]


class TensorExchange:
    """Gather the elements of each tensor on its owner, the rank that updates it, and send results to its holders.

    Holders are the ranks whose pieces have elements of the tensor. Methods that send are collective over the data
    group; their ``tag`` distinguishes exchanges that are in flight together.

    Parameters
    ----------
    store : ParameterStore
        Holds the parameters.
    plan : TensorPlan
        The tensors and their owners.
    pieces : sequence of UpdatePiece
        The ranges of all parameters that this rank updates.
    """

    def __init__(self, store: ParameterStore, plan: TensorPlan, pieces: Sequence[UpdatePiece]) -> None:
        self.store, self.plan, self.data = store, plan, store.grid.data
        self.owned = plan.owned(self.data.rank)
        self._pieces = {piece.span: piece for piece in pieces if piece.entry.spec.name in plan.names}

    def begin_gather(self, values: Array, offset_of: OffsetOf, tag: int) -> tuple[dict[int, Array], list[Request]]:
        """Begin to gather tensors of which every rank holds pieces (ranges of elements) in ``values``.

        ``offset_of`` takes a piece and returns its offset in ``values``. Return new flat arrays for the tensors that
        this rank owns, by number, and the requests: the arrays are complete when the requests have ended.
        """
        tensors = {number: np.empty(self.plan.tensors[number].spec.size, values.dtype) for number in self.owned}
        moves = self.plan.gathers[self.data.rank]
        return tensors, self._exchange(moves, tag, self._in_pieces(values, offset_of), self._inside(tensors))

    def begin_parameters(self, tag: int) -> tuple[dict[int, Array], list[Request]]:
        """Begin to gather parameter values, like :meth:`begin_gather`; replicated parameters are just copied."""
        values = self.store.values
        if self.store.sharded:
            return self.begin_gather(values, lambda piece: piece.store, tag)
        spans = {number: self.plan.tensors[number].span for number in self.owned}
        return {number: values[span.start : span.stop].copy() for number, span in spans.items()}, []

    def send_back(self, tensors: Mapping[int, Array], values: Array, offset_of: OffsetOf, tag: int) -> None:
        """Send the elements of ``tensors``, which this rank owns, to all ranks that hold pieces of them.

        Each rank writes what it receives to ``values``; ``offset_of`` takes a piece and returns its offset in them.
        """
        moves = self.plan.returns[self.data.rank]
        for request in self._exchange(moves, tag, self._inside(tensors), self._in_pieces(values, offset_of)):
            request.wait()

    def _inside(self, tensors: Mapping[int, Array]) -> _View:
        return lambda move: _range(tensors[move.tensor], move.span.start - self.plan.tensors[move.tensor].offset, move)

    def _in_pieces(self, values: Array, offset_of: OffsetOf) -> _View:
        return lambda move: _range(values, offset_of(self._pieces[move.span]), move)

    def _exchange(self, moves: Sequence[Move], tag: int, source: _View, target: _View) -> list[Request]:
        """Begin the messages of ``moves``, and copy at once what stays on this rank.

        A move says which elements of a tensor one rank needs from another. ``source`` takes a move and returns a view
        of the elements to send, ``target`` a view to receive them.
        Messages between two ranks arrive in the order of the moves, which both ranks know.
        """
        requests = []
        for move in moves:
            if move.source == move.target:
                target(move)[:] = source(move)
            elif move.source == self.data.rank:
                requests.append(self.data.isend(source(move), move.target, tag))
            else:
                requests.append(self.data.irecv(target(move), move.source, tag))
        return requests


def _range(values: Array, start: int, move: Move) -> Array:
    return values[start : start + move.span.size]


class TieExchange:
    """Add the gradients of all uses of tied parameters over the pipeline stages that use them.

    Parameters
    ----------
    grid : ProcessGrid
        The process groups of this rank.
    partitioned : PartitionedModel
        This rank's part of the model.
    layouts : mapping of int to FlatLayout
        The layout of each stage that shares a parameter with another stage, by the stage's number.
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
                part = entry.span.intersect(Shard(layout, rank, data.size).spans[entry.unit])
                holders.append(_Holder(stage, rank, part.shift(-entry.offset) if part.size else Span(0, 0)))
        local_span = next(h.span for h in holders if (h.stage, h.data_rank) == (self.number, data.rank))
        return _Tie(name, tag, uses, tuple(holders), local_span)

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
            if tie.local_span.size:
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
            common = holder.span.intersect(tie.local_span)
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
                    buffer = kernels.to_host(self._gradient(tie, use, common, reduced).copy())
                    sent.append(buffer)
                    requests.append(world.isend(buffer, peer, tag))
        return arrived, requests

    def _sum(self, tie: _Tie, arrived: Mapping[Use, Sequence[tuple[Span, Array]]], reduced: Array) -> None:
        total = np.empty(tie.local_span.size, reduced.dtype)
        for position, use in enumerate(tie.uses):
            for span, values in self._parts(tie, use, arrived, reduced):
                part = total[span.start - tie.local_span.start : span.stop - tie.local_span.start]
                if position == 0:
                    part[:] = values
                else:
                    part += values
        target = self._gradient(tie, Use(self.number, 0), tie.local_span, reduced)
        if isinstance(target, np.ndarray):
            target[:] = total
        else:
            target.set(total)

    def _parts(
        self, tie: _Tie, use: Use, arrived: Mapping[Use, Sequence[tuple[Span, Array]]], reduced: Array
    ) -> Iterator[tuple[Span, Array]]:
        if use.stage == self.number:
            yield tie.local_span, kernels.to_host(self._gradient(tie, use, tie.local_span, reduced))
        else:
            yield from arrived[use]

    def _gradient(self, tie: _Tie, use: Use, span: Span, reduced: Array) -> Array:
        """Return a view, in ``reduced``, of elements ``span`` of the gradient of one use of a tied parameter."""
        piece = self.pieces[tie.name]
        start = (piece.gradient, *piece.uses)[use.number] + span.start - tie.local_span.start
        return reduced[start : start + span.size]

    def _world_rank(self, holder: _Holder) -> int:
        axes, coordinates = self.grid.axes, self.grid.coordinates
        data, context = divmod(holder.data_rank, axes.context)
        return axes.rank_of(Coordinates(holder.stage, coordinates.tensor, data, context))


class _Holder(NamedTuple):
    """Describe one data rank of a stage, and the range of a tied parameter's elements that it owns."""

    stage: int
    data_rank: int
    span: Span


class _Tie(NamedTuple):
    """Describe, for one rank, a parameter that several stages use.

    ``tag`` is the MPI tag for the first of its uses; the tag of the next use is larger by 2. ``holders`` are the data
    ranks of all stages that use it. ``local_span`` is the range of its elements that this rank owns.
    """

    name: str
    tag: int
    uses: tuple[Use, ...]
    holders: tuple[_Holder, ...]
    local_span: Span


def home_trainable(name: str, layouts: Mapping[int, FlatLayout]) -> bool:
    """Tell whether any stage trains the parameter ``name``, which several stages share. Not collective.

    ``layouts`` are those of all stages that share parameters.
    """
    specs = (e.spec for layout in layouts.values() for e in layout.parameters)
    return any(spec.trainable for spec in specs if home_of(spec) == name)
