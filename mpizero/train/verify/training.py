"""Run one of the trainings that ``mpizero verify`` compares, and return what its steps compute."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.pytree import SampleTree
from mpizero.comm import Communicator
from mpizero.kernels import to_host
from mpizero.layout.flat import FlatLayout, ParameterUse, joined
from mpizero.sharding import ShardingConfig, StepReport
from mpizero.sharding.batch import Totals
from mpizero.sharding.engine import Engine
from mpizero.sharding.full_params import take
from mpizero.sharding.model import ShardedModelBase
from mpizero.sharding.parameter_access import gather_pieces, gather_slot, slot_entries
from mpizero.sharding.params import UpdatePiece, flat_names
from mpizero.sharding.update import Updater
from mpizero.train.config.build import lay_out
from mpizero.train.verify.layouts import Layout
from mpizero.types import Array

#: A function ``feed(config, group)`` that yields this rank's part of one global batch after the other.
Feed = Callable[[ShardingConfig, Communicator], Iterator[tuple[Any, Any]]]
#: What was hashed: a quantity ("parameter", "optimizer slot 'exp_avg'"), and the name of the parameter.
Key = tuple[str, str]
PARAMETER = "parameter"


@dataclass(frozen=True)
class TrainingTask:
    """Describe the training that every layout runs.

    Attributes
    ----------
    make_model : callable
        ``make_model(comm)`` returns the model, the same on every rank of ``comm``.
    make_optimizer : callable
        Returns a new optimizer.
    feed : callable
        ``feed(config, group)`` yields this rank's part of each global batch, for its rank in ``group``.
    steps : int
        Number of steps to compare.
    settings : mapping
        Further settings of :class:`~mpizero.ShardingConfig`, such as ``micro_batch`` and ``clip``.
    """

    make_model: Callable[[Communicator], Any]
    make_optimizer: Callable[[], Any]
    feed: Feed
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)


class TrainingState(NamedTuple):
    """Hold the parameters, as this rank sees them, and the optimizer's arrays, as flat vectors of the whole model.

    ``slots`` has the optimizer's arrays by name, such as "exp_avg", as :meth:`ObservedTraining.entries_of` places them;
    ``step_count`` is the optimizer's step number, ``progress`` what a method of whole vectors has saved of itself.
    """

    parameters: Array
    slots: dict[str, Array]
    step_count: int
    progress: Any = None


class BatchGradient(NamedTuple):
    """Hold the loss and the averaged gradient of one batch, before the update.

    ``values`` is the gradient of the whole model as a flat vector. ``reduced`` has this rank's part of the gradient, as
    ``Engine.step`` takes it. ``totals`` has the sums of losses and weights, ``grains`` the loss sum of each grain of
    this rank by its number.
    """

    totals: Totals
    values: Array
    grains: dict[int, float]
    reduced: Array

    @property
    def loss(self) -> float:
        """Return the mean loss over the global batch."""
        return self.totals.loss / self.totals.weight


#: Number of a grain, number of a micro-batch in it, and the name of one use of a parameter.
PartKey = tuple[int, int, str]


class TensorParts(NamedTuple):
    """Hold the gradient of a batch, and what single ranks contributed to it.

    Attributes
    ----------
    gradient : BatchGradient
        The gradient of the global batch.
    own : Array
        Flat vector of the whole model: for every element, the gradient sum over the samples of the rank that updates
        this element only.
    uses : dict of str to Array
        By name of the use of a parameter, the gradient sum over this rank's samples; in a tensor group, for this rank's
        part of the parameter.
    parts : dict of PartKey to Array
        For one tensor, the gradient sum of every micro-batch of this rank, by number of the grain, number of the
        micro-batch in it, and name of the use.
    """

    gradient: BatchGradient
    own: Array
    uses: dict[str, Array]
    parts: dict[PartKey, Array]


class StepUpdate(NamedTuple):
    """Hold the result of one training step.

    ``clipped`` is the gradient that the optimizer got, after clipping; None if it was not recorded on all ranks.
    """

    report: StepReport
    clipped: Array | None
    state: TrainingState


class ObservedTraining:
    """Train a model on one layout, step by step; made by :func:`placed`. Methods are collective over the layout."""

    def __init__(self, model: ShardedModelBase, batches: Iterator[tuple[Any, Any]]) -> None:
        self.model, self._batches = model, batches

    @property
    def engine(self) -> Engine:
        """Return the model's engine. Not collective."""
        return self.model.engine

    @property
    def updater(self) -> Updater:
        """Return the updater of the model's optimizer. Not collective."""
        updater = self.engine.updater
        assert updater is not None
        return updater

    @property
    def layout(self) -> FlatLayout:
        """Return where each parameter lies in the flat vector of the whole model. Not collective."""
        return self.engine.whole.layout

    def batch(self) -> tuple[Any, Any]:
        """Return this rank's part of the next global batch. Not collective."""
        return next(self._batches)

    def train(self, steps: int) -> None:
        """Train ``steps`` steps by ``model.train``, as a user does."""
        for _ in range(steps):
            self.model.train(*self.batch())

    def state(self) -> TrainingState:
        """Gather and return the parameters and the optimizer's arrays of the whole model."""
        updater = self.updater
        slots = {slot: gather_slot(self.engine, slot) for slot in updater.state}
        progress = None if updater.method is None else updater.method.progress.saved()
        return TrainingState(self.engine.whole.vector(), slots, updater.step_count, progress)

    def entries_of(self, slot: str) -> tuple[ParameterUse, ...]:
        """Return where each array of a slot of :meth:`state` lies in the slot's vector. Not collective."""
        return slot_entries(self.engine, slot)

    def gradient(self, batch: tuple[Any, Any]) -> BatchGradient:
        """Compute the loss and the averaged gradient of a batch, without updating the parameters."""
        self._make_room(batch)
        totals, reduced = self.engine.gradients(*batch)
        values = gather_pieces(self.engine, self.engine.dtype, partial(_of, reduced))
        return BatchGradient(totals, values, self.engine.scalars.losses(), reduced)

    def _make_room(self, batch: tuple[Any, Any]) -> None:
        """Allocate the memory that a step on ``batch`` needs, as a training does before its first step."""
        tree = SampleTree.of(**dict(zip("xy", batch, strict=True)))
        counts = self.model.batch_group.allgather_object(None if tree.uncut else tree.count(), "samples")
        if None not in counts and sum(counts):
            self.model.reserve(sum(counts))

    def update(self, batch: tuple[Any, Any]) -> StepUpdate:
        """Train one step, and record the gradient that the optimizer gets."""
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
        """Tell whether ``here`` is true on all ranks: whether every rank recorded the gradient its optimizer got."""
        answers = np.array([here], np.int8)
        self.engine.grid.world.allreduce(answers, "min", "watched")
        return bool(answers[0])

    def owners(self) -> Array:
        """Return, for each element of the flat vector of the model, the rank that updates it; -1 if it is frozen."""
        return gather_pieces(self.engine, np.int32, lambda piece: self.model.rank + 1) - 1

    def look(self, batch: tuple[Any, Any], tensor: str | None) -> TensorParts:
        """Compute the gradient of a batch, and record what each rank contributes to it.

        For the parameter ``tensor``, record also the gradient of each micro-batch.
        """
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
        """Return the part that this rank holds of ``whole``, all values of the parameter ``use``. Not collective."""
        spec = next(entry.spec for entry in self.engine.layout.entries if entry.spec.name == use)
        held = np.empty(spec.size, whole.dtype)
        take(spec, whole, 0, held)
        return held

    def replica_of(self, rank: int) -> tuple[int, ...]:
        """Return all ranks of the replica to which ``rank`` belongs. Not collective."""
        return self.engine.grid.axes.group(rank, ("pipeline", "tensor", "context"))

    def unlike_copy(self, parameters: Array) -> str | None:
        """Compare this rank's copy of the parameters with ``parameters``, the flat vector of the whole model.

        Return the name of the first parameter that differs; None if none differs or parameters are sharded. Not
        collective.
        """
        store, whole = self.engine.store, self.engine.whole
        for entry in store.layout.parameters if not store.sharded else ():
            home = whole.home(entry.spec)
            expected = np.empty(entry.spec.size, parameters.dtype)
            take(entry.spec, parameters[home.span.start : home.span.stop], 0, expected)
            if store.values[entry.span.start : entry.span.stop].tobytes() != expected.tobytes():
                return home.spec.name
        return None

    def digests(self) -> dict[Key, bytes]:
        """Return a hash of every tensor as this rank sees it, by quantity and parameter; optimizer arrays come first.

        Keys are such as ``("optimizer slot 'exp_avg'", "head.weight")`` and ``("parameter", "head.weight")``.
        """
        state = self.state()
        vectors = [(slot_name(slot), values, self.entries_of(slot)) for slot, values in sorted(state.slots.items())]
        return {
            (quantity, entry.spec.name): hashlib.sha256(vector[entry.span.start : entry.span.stop].tobytes()).digest()
            for quantity, vector, entries in [*vectors, (PARAMETER, state.parameters, self.layout.parameters)]
            for entry in entries
        }

    # ------------------------------------------------------------------ in one process (not collective)

    def take_state(self, state: TrainingState) -> None:
        """Set the parameters and the optimizer's arrays to ``state``, which another layout's :meth:`state` returned."""
        self.model.set_parameters(state.parameters)
        held = self.updater.host_state()
        for slot, values in state.slots.items():
            places = {entry.spec.name: entry.offset for entry in self.entries_of(slot)}
            for piece in self.updater.state_pieces(slot):
                start = places[piece.spec.name] + piece.start
                held[slot][piece.state : piece.state + piece.size] = values[start : start + piece.size]
        self.updater.take_state(held)
        self.updater.step_count = state.step_count
        if self.updater.method is not None:
            self.updater.method.restore(state.progress)

    def update_from(self, gradient: BatchGradient, values: Array) -> StepUpdate:
        """Train one step with ``values``, the averaged gradient of another layout, in place of ``gradient``.

        ``gradient`` is the gradient that this training computed; its arrays are overwritten.
        """
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
    """Return how findings name the optimizer's array ``slot``. Not collective."""
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
    """Build the training ``task`` on a layout over the ranks of ``comm``, and free it after the ``with`` block.

    Collective over ``comm``.
    """
    parallel = layout.parallel
    own = {
        name: getattr(parallel, name) for name in ("grain_assignment", "share_node_memory", "ranks_per_node", "tiles")
    }
    with ShardingConfig(comm=comm, **{**task.settings, **own}) as config:
        model = lay_out(task.make_model(config.communicator), task.make_optimizer(), parallel, config)
        with model:
            yield ObservedTraining(model, iter(task.feed(config, model.batch_group)))
