"""Run one of the compared trainings, and return what it computes on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpizero.comm import Communicator
from mpizero.kernels import to_host
from mpizero.layout import FlatLayout
from mpizero.layout.flat import joined
from mpizero.parallel import ShardingConfig, StepReport
from mpizero.parallel.batch.step_scalars import Totals
from mpizero.parallel.engine import Engine
from mpizero.parallel.model.base import ShardedModelBase
from mpizero.parallel.model.gather_state import gather_pieces
from mpizero.parallel.optimizer.sharded_update import Updater
from mpizero.parallel.parameters.global_view import take
from mpizero.parallel.parameters.shards import UpdatePiece
from mpizero.parallel.parameters.store import flat_names
from mpizero.sampletree import SampleTree
from mpizero.train.config.builder import lay_out
from mpizero.train.verify.layouts import Layout
from mpizero.types import Array

#: ``feed(config, group)`` yields this rank's part of one global batch after the other.
Feed = Callable[[ShardingConfig, Communicator], Iterator[tuple[Any, Any]]]
#: What a digest is of: "optimizer slot 'exp_avg'", "parameter", and the name of the tensor.
Key = tuple[str, str]
PARAMETER = "parameter"


@dataclass(frozen=True)
class TrainingTask:
    """Describe a training that every layout must repeat.

    Attributes
    ----------
    make_model : callable
        ``make_model(comm)`` returns the model, the same on every rank of ``comm``.
    make_optimizer : callable
        Returns the optimizer.
    feed : callable
        The batches.
    steps : int
        How many are compared.
    settings : mapping
        Further settings of :class:`~mpizero.ShardingConfig`, such as ``micro_batch`` and ``clip``.
    """

    make_model: Callable[[Communicator], Any]
    make_optimizer: Callable[[], Any]
    feed: Feed
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)


class TrainingState(NamedTuple):
    """Hold parameters as this rank sees them and the optimizer's arrays, in the declared order of the whole model."""

    parameters: Array
    slots: dict[str, Array]
    step_count: int


class BatchGradient(NamedTuple):
    """Hold the loss and averaged gradient of one batch, before anything is updated.

    ``grains`` are the losses of this rank's own grains; ``reduced`` is the gradient as ``Engine.step`` takes it.
    """

    totals: Totals
    values: Array
    grains: dict[int, float]
    reduced: Array

    @property
    def loss(self) -> float:
        """Mean loss over the global batch."""
        return self.totals.loss / self.totals.weight


#: A grain, one of its micro-batches, and the name of a use of a parameter.
PartKey = tuple[int, int, str]


class TensorParts(NamedTuple):
    """Hold an evaluation, and the parts that this rank alone computed in it.

    Attributes
    ----------
    gradient : BatchGradient
        Of the global batch.
    own : Array
        For every element the gradient sum over the samples of its owner alone, in the order of the whole model.
    uses : dict of str to Array
        The gradient sum of every use of a parameter over this rank's samples, as this rank holds it.
    parts : dict of PartKey to Array
        Of one tensor, the gradient sum of every micro-batch of this rank.
    """

    gradient: BatchGradient
    own: Array
    uses: dict[str, Array]
    parts: dict[PartKey, Array]


class StepUpdate(NamedTuple):
    """Hold what one training step did; ``clipped`` is the gradient that the optimizer got, if it was seen."""

    report: StepReport
    clipped: Array | None
    state: TrainingState


class ObservedTraining:
    """Train a sharded model on its batches; made by :func:`placed`. Methods are collective over the layout's ranks."""

    def __init__(self, model: ShardedModelBase, batches: Iterator[tuple[Any, Any]]) -> None:
        self.model, self._batches = model, batches

    @property
    def engine(self) -> Engine:
        """The model's engine. Not collective."""
        return self.model.engine

    @property
    def updater(self) -> Updater:
        """The bound optimizer's. Not collective."""
        updater = self.engine.updater
        assert updater is not None
        return updater

    @property
    def layout(self) -> FlatLayout:
        """Return the layout of the whole model. Not collective."""
        return self.engine.whole.layout

    def batch(self) -> tuple[Any, Any]:
        """Return this rank's part of the next global batch. Not collective."""
        return next(self._batches)

    def train(self, steps: int) -> None:
        """Make some steps, the way a user makes them."""
        for _ in range(steps):
            self.model.train(*self.batch())

    def state(self) -> TrainingState:
        """Return parameters and optimizer arrays."""
        updater = self.updater
        slots = {
            slot: gather_pieces(self.engine, self.engine.dtype, partial(updater.state_of, slot))
            for slot in updater.state
        }
        return TrainingState(self.engine.whole.vector(), slots, updater.step_count)

    def gradient(self, batch: tuple[Any, Any]) -> BatchGradient:
        """Return loss and averaged gradient of a batch without changing anything."""
        self._make_room(batch)
        totals, reduced = self.engine.gradients(*batch)
        values = gather_pieces(self.engine, self.engine.dtype, partial(_of, reduced))
        return BatchGradient(totals, values, self.engine.scalars.losses(), reduced)

    def _make_room(self, batch: tuple[Any, Any]) -> None:
        """Take the memory that a step on these samples needs, as a training does before its first step."""
        tree = SampleTree.of(**dict(zip("xy", batch, strict=True)))
        counts = self.model.batch_group.allgather_object(None if tree.uncut else tree.count(), "samples")
        if None not in counts and sum(counts):
            self.model.reserve(sum(counts))

    def update(self, batch: tuple[Any, Any]) -> StepUpdate:
        """Make one training step and watch it."""
        updater, seen = self.updater, list[Array]()
        updater.watch = lambda reduced: seen.extend(_of(reduced, piece).copy() for piece in self.engine.pieces())
        try:
            self.model.train(*batch)
        finally:
            updater.watch = None
        report = self.model.last_step
        assert report is not None
        clipped, in_order = None, iter(seen)
        if self._watched(len(seen) == len(self.engine.pieces())):
            clipped = gather_pieces(self.engine, self.engine.dtype, lambda piece: next(in_order))
        return StepUpdate(report, clipped, self.state())

    def _watched(self, here: bool) -> bool:
        """Tell whether all ranks saw the gradient that they used."""
        answers = np.array([here], np.int8)
        self.engine.grid.world.allreduce(answers, "min", "watched")
        return bool(answers[0])

    def owners(self) -> Array:
        """Return the rank that updates each element; -1 for frozen ones."""
        return gather_pieces(self.engine, np.int32, lambda piece: self.model.rank + 1) - 1

    def look(self, batch: tuple[Any, Any], tensor: str | None) -> TensorParts:
        """Evaluate a batch as :meth:`gradient` does, and keep what this rank computes; ``tensor`` in parts."""
        engine = self.engine
        homes = {entry.spec.name: entry.spec.tied or entry.spec.name for entry in self.layout.entries}
        entries = {entry.spec.name: entry for entry in engine.layout.entries if entry.gradient >= 0}
        scale = engine.dtype.type(engine.current_loss_scale())
        sums, parts = dict[str, Array](), dict[PartKey, Array]()

        def watch(grain: int, number: int, block: str, views: Any) -> None:
            for name, view in flat_names(views):
                use = joined(block, name)
                if use in entries:
                    values = to_host(view).reshape(-1) / scale
                    sums[use] = sums[use] + values if use in sums else values
                    if homes[use] == tensor:
                        parts[grain, number, use] = values

        engine.scalars.watch = watch
        try:
            gradient = self.gradient(batch)
        finally:
            engine.scalars.watch = None
        held = np.zeros(engine.layout.size, engine.dtype)
        for use, values in sums.items():
            held[entries[use].span.start : entries[use].span.stop] += values
        own = gather_pieces(engine, engine.dtype, lambda piece: held[piece.span.start : piece.span.stop])
        return TensorParts(gradient, own, sums, parts)

    def part_of(self, use: str, whole: Array) -> Array:
        """Return what this rank holds of all values of a parameter. Not collective."""
        spec = next(entry.spec for entry in self.engine.layout.entries if entry.spec.name == use)
        held = np.empty(spec.size, whole.dtype)
        take(spec, whole, 0, held)
        return held

    def replica_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that compute the samples of a replica together with ``rank``. Not collective."""
        return self.engine.grid.axes.group(rank, ("pipeline", "tensor", "context"))

    def unlike_copy(self, parameters: Array) -> str | None:
        """Return the first parameter of which this rank holds other values than the whole model has. Not collective."""
        store, whole = self.engine.store, self.engine.whole
        for entry in store.layout.parameters if not store.sharded else ():
            home = whole.home(entry.spec)
            expected = np.empty(entry.spec.size, parameters.dtype)
            take(entry.spec, parameters[home.span.start : home.span.stop], 0, expected)
            if store.values[entry.span.start : entry.span.stop].tobytes() != expected.tobytes():
                return home.spec.name
        return None

    def digests(self) -> dict[Key, bytes]:
        """Return a hash of every tensor as this rank sees it: of the optimizer first, then parameters."""
        state = self.state()
        vectors = {slot_name(slot): values for slot, values in sorted(state.slots.items())}
        return {
            (quantity, entry.spec.name): hashlib.sha256(vector[entry.span.start : entry.span.stop].tobytes()).digest()
            for quantity, vector in {**vectors, PARAMETER: state.parameters}.items()
            for entry in self.layout.parameters
        }

    # ------------------------------------------------------------------ in one process (not collective)

    def take_state(self, state: TrainingState) -> None:
        """Go on from another layout's parameters and optimizer arrays."""
        self.model.set_parameters(state.parameters)
        held = self.updater.host_state()
        for slot, values in state.slots.items():
            for piece in self.engine.pieces():
                held[slot][piece.state : piece.state + piece.size] = values[piece.span.start : piece.span.stop]
        self.updater.take_state(held)
        self.updater.step_count = state.step_count

    def update_from(self, gradient: BatchGradient, values: Array) -> StepUpdate:
        """Make one step with another layout's averaged gradient in place of the own one."""
        seen = list[Array]()
        for piece in self.engine.pieces():
            _of(gradient.reduced, piece)[:] = values[piece.span.start : piece.span.stop]
        pieces = self.engine.pieces()
        self.updater.watch = lambda reduced: seen.append(_in_order(reduced, pieces, values))
        try:
            report = self.engine.step(gradient.totals, lambda: gradient.reduced, 0)
        finally:
            self.updater.watch = None
        self.model.invalidate_cache()
        return StepUpdate(report, seen[0] if seen else None, self.state())


def slot_name(slot: str) -> str:
    """Return what an optimizer array is called in findings. Not collective."""
    return f"optimizer slot {slot!r}"


def _of(reduced: Array, piece: UpdatePiece) -> Array:
    return reduced[piece.gradient : piece.gradient + piece.size]


def _in_order(reduced: Array, pieces: tuple[UpdatePiece, ...], like: Array) -> Array:
    values = np.zeros_like(like)
    for piece in pieces:
        values[piece.span.start : piece.span.stop] = _of(reduced, piece)
    return values


@contextmanager
def placed(task: TrainingTask, comm: Communicator | str, layout: Layout) -> Iterator[ObservedTraining]:
    """Lay a training out over the ranks of ``comm``, and free it at the end.

    Collective over ``comm``.
    """
    parallel = layout.parallel
    memory = {"share_node_memory": parallel.share_node_memory, "ranks_per_node": parallel.ranks_per_node}
    with ShardingConfig(comm=comm, **{**task.settings, **memory}) as config:
        model = lay_out(task.make_model(config.communicator), task.make_optimizer(), parallel, config)
        with model:
            yield ObservedTraining(model, iter(task.feed(config, model.batch_group)))
