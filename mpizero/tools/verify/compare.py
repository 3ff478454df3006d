"""Run a training on several parallel layouts, as threads or on ranks of a communicator, and compare with one process.

:class:`Vectors` compares a quantity of the whole model, such as the gradient, and :func:`difference` describes the
first element that differs; both without communication. :class:`ObservedTraining` runs one training, and returns what
each step computes. :class:`TrainingPair` compares a layout with one process step by step, and explains the first
difference. :func:`compare_layouts` compares every layout. First it trains in one process, and keeps the numbers and
hashes of this training in a :class:`ReferenceTrace`. A :class:`LayoutComparison` compares a layout with this trace, and
makes a :class:`TrainingPair` only to explain a difference, or if the layout rounds differently than one process.

[Note: following] Some layouts with tensor or context groups, such as groups of 3 ranks, add in an order that one
process cannot reproduce, and an optimizer such as Adam amplifies the rounding differences from step to step. For these
layouts the training in one process copies the layout's parameters and optimizer arrays before every step, and updates
them with the layout's gradient. So rounding differences do not accumulate.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpizero._util.numbers import Rounding, largest
from mpizero._util.pytree import SampleTree
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks, from_rank_0
from mpizero.comm.startup import communicator_of, default_world
from mpizero.comm.threads import run_in_threads
from mpizero.data.batches import slab_of
from mpizero.errors import ConfigError
from mpizero.kernels import to_host
from mpizero.layout import Grains
from mpizero.layout.flat import FlatLayout, ParameterUse, flat_names
from mpizero.optim import SGD
from mpizero.sharding import Config, StepReport, distribute
from mpizero.sharding.batch import Totals
from mpizero.sharding.engine import Engine
from mpizero.sharding.exactness import layer_reasons, tiles_setting
from mpizero.sharding.full_params import take
from mpizero.sharding.model import Model
from mpizero.sharding.parameter_access import gather_pieces, gather_slot, slot_entries
from mpizero.sharding.params import UpdatePiece
from mpizero.sharding.update import Updater
from mpizero.tools.verify import verdicts
from mpizero.tools.verify.verdicts import (
    ONE_PROCESS,
    Diagnosis,
    Finding,
    Layout,
    RankGradients,
    Report,
    Verdict,
    each_once,
)
from mpizero.types import Array


@dataclass(frozen=True)
class Vectors:
    """Hold the values of one quantity, such as the gradient, in the layout and in one process.

    ``actual`` and ``expected`` are flat vectors of the whole model. ``bound`` is the absolute difference allowed; None
    if the bits must be equal. ``entries`` are the tensors in the vectors; None means the parameters.
    """

    quantity: str
    actual: Array
    expected: Array
    bound: float | None
    entries: Sequence[ParameterUse] | None = None

    def mask(self, entry: ParameterUse) -> Array:
        """Return a mask of the elements of tensor ``entry`` that differ by more than ``bound`` (None: in any bit)."""
        a, b = (values[entry.span.start : entry.span.stop] for values in (self.actual, self.expected))
        bits = f"u{a.dtype.itemsize}"
        different: Array = a.view(bits) != b.view(bits)
        if self.bound is not None and different.any():
            with np.errstate(invalid="ignore"):
                different &= ~(np.abs(a - b) <= self.bound) & ~(np.isnan(a) & np.isnan(b))
        return different


class LocatedDifference(NamedTuple):
    """Hold a finding (the description of a difference), and the ``indices`` of the elements that differ.

    The indices are those in the flat vector of the quantity that ``finding.quantity`` names.

    ``of_parameters`` tells whether the flat vector has one element for each element of the parameters.
    """

    finding: Finding
    indices: Array = np.empty(0, np.int64)
    of_parameters: bool = True

    def with_finding(self, **changes: Any) -> LocatedDifference:
        """Return a copy in which some attributes of ``finding`` are changed. Not collective."""
        return self._replace(finding=replace(self.finding, **changes))


def difference(vectors: Vectors, entry: ParameterUse, mask: Array, tensors: int) -> LocatedDifference:
    """Describe the elements of a tensor that differ, given as ``mask``; ``tensors`` tensors differ in total."""
    indices = np.flatnonzero(mask)
    first = int(indices[0])
    actual, expected = (float(v[entry.span.start + first]) for v in (vectors.actual, vectors.expected))
    finding = Finding(
        0,
        vectors.quantity,
        entry.spec.name,
        index=tuple(int(i) for i in np.unravel_index(first, entry.spec.shape)),
        found=actual,
        expected=expected,
        differing=int(indices.size),
        size=entry.spec.size,
        tensors=tensors,
    )
    return LocatedDifference(finding, entry.span.start + indices, vectors.entries is None)


#: A function ``feed(model)`` that yields this rank's part of one global batch after the other.
Feed = Callable[[Model], Iterator[tuple[Any, Any]]]
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
        ``feed(model)`` yields this rank's part of each global batch of a sharded model.
    steps : int
        Number of steps to compare.
    settings : mapping
        Further settings of :class:`~mpizero.Config`, such as ``micro_batch`` and ``clip``.
    """

    make_model: Callable[[Communicator], Any]
    make_optimizer: Callable[[], Any]
    feed: Feed
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)


class TrainingState(NamedTuple):
    """Hold the parameters, as this rank sees them, and the optimizer's arrays, as flat vectors of the whole model.

    ``slots`` has the optimizer's arrays by name, such as "exp_avg"; :func:`slot_entries` says where each tensor lies in
    such a vector. ``step_count`` is the optimizer's step number, ``progress`` the saved state of a full-batch method
    such as L-BFGS.
    """

    parameters: Array
    slots: dict[str, Array]
    step_count: int
    progress: Any = None


class BatchGradient(NamedTuple):
    """Hold the loss and the averaged gradient of one batch, before the update.

    ``values`` is the gradient of the whole model as a flat vector. ``reduced`` has this rank's part of the gradient, as
    ``Engine.step`` takes it. ``totals`` has the sums of the samples' losses and weights. ``grains`` maps the number of
    each grain (a fixed slice of the global batch) that this rank computes to its loss sum.
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
    """Hold the gradient of a batch, and the contributions of single ranks to it.

    Attributes
    ----------
    gradient : BatchGradient
        The gradient of the global batch.
    owner_sums : Array
        Flat vector of the whole model: for every element, the gradient sum over only the samples of the rank that
        updates this element.
    uses : dict of str to Array
        For each use of a parameter (a tied parameter has several), by name: the gradient sum over this rank's samples;
        in a tensor group, only for this rank's part of the parameter.
    parts : dict of PartKey to Array
        For one tensor, the gradient sum of every micro-batch of this rank. The key is number of the grain, number of
        the micro-batch in the grain, and name of the parameter's use.
    """

    gradient: BatchGradient
    owner_sums: Array
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
    """Train a model on one layout, step by step; methods are collective over the layout's ranks.

    :func:`placed` creates it. ``batches`` yields this rank's part of one global batch after the other.
    """

    def __init__(self, model: Model, batches: Iterator[tuple[Any, Any]]) -> None:
        self.model, self.batches = model, batches

    @property
    def engine(self) -> Engine:
        """Return the model's engine. Not collective."""
        return self.model._engine

    @property
    def updater(self) -> Updater:
        """Return the updater of the model's optimizer. Not collective."""
        updater = self.engine.updater
        assert updater is not None
        return updater

    @property
    def layout(self) -> FlatLayout:
        """Return where each parameter lies in the flat vector of the whole model. Not collective."""
        return self.engine.global_view.layout

    def train(self, steps: int) -> None:
        """Train ``steps`` steps by ``model.train``, as a user does."""
        for _ in range(steps):
            self.model.train(*next(self.batches))

    def state(self) -> TrainingState:
        """Gather and return the parameters and the optimizer's arrays of the whole model."""
        updater = self.updater
        slots = {slot: gather_slot(self.engine, slot) for slot in updater.state}
        progress = None if updater.method is None else updater.method.progress.saved()
        return TrainingState(self.engine.global_view.vector(), slots, updater.step_count, progress)

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
        updater, pieces = self.updater, list[Array]()
        updater.watch = lambda reduced: pieces.extend(_of(reduced, piece).copy() for piece in self.engine.pieces())
        try:
            self.model.train(*batch)
        finally:
            updater.watch = None
        report = self.model.last_step
        assert report is not None
        clipped, in_order = None, iter(pieces)
        complete = len(pieces) == len(self.engine.pieces())
        if all(self.engine.grid.world.allgather_object(complete, "watched")):
            clipped = gather_pieces(self.engine, self.engine.dtype, lambda piece: next(in_order))
        return StepUpdate(report, clipped, self.state())

    def owners(self) -> Array:
        """Return, for each element of the flat vector of the model, the rank that updates it; -1 if it is frozen."""
        return gather_pieces(self.engine, np.int32, lambda piece: self.model.rank + 1) - 1

    def look(self, batch: tuple[Any, Any], tensor: str | None) -> TensorParts:
        """Compute the gradient of a batch, and record each rank's contribution to it.

        For the parameter ``tensor``, also record the gradient of each micro-batch.
        """
        engine = self.engine
        homes = {entry.spec.name: entry.spec.tied or entry.spec.name for entry in self.layout.entries}
        entries = {entry.spec.name: entry for entry in engine.layout.entries if entry.gradient >= 0}
        scale = engine.dtype.type(engine.current_loss_scale())
        sums, parts = dict[str, Array](), dict[PartKey, Array]()

        def watch(grain: int, number: int, block: str, views: Any) -> None:
            for use, view in flat_names(views, block):
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
        local = np.zeros(engine.layout.size, engine.dtype)
        for use, values in sums.items():
            local[entries[use].span.start : entries[use].span.stop] += values
        owner_sums = gather_pieces(engine, engine.dtype, lambda piece: local[piece.span.start : piece.span.stop])
        return TensorParts(gradient, owner_sums, sums, parts)

    def part_of(self, use: str, full: Array) -> Array:
        """Return the part that this rank holds of ``full``, all values of the parameter ``use``. Not collective."""
        spec = next(entry.spec for entry in self.engine.layout.entries if entry.spec.name == use)
        part = np.empty(spec.size, full.dtype)
        take(spec, full, 0, part)
        return part

    def unlike_copy(self, parameters: Array) -> str | None:
        """Compare this rank's copy of the parameters with ``parameters``, the flat vector of the whole model.

        Return the name of the first parameter that differs; None if none differs or parameters are sharded. Not
        collective.
        """
        store, full_params = self.engine.store, self.engine.global_view
        for entry in store.layout.parameters if not store.sharded else ():
            home = full_params.home(entry.spec)
            expected = np.empty(entry.spec.size, parameters.dtype)
            take(entry.spec, parameters[home.span.start : home.span.stop], 0, expected)
            if store.values[entry.span.start : entry.span.stop].tobytes() != expected.tobytes():
                return home.spec.name
        return None

    def digests(self) -> dict[Key, bytes]:
        """Return a hash of every tensor as this rank sees it, by quantity and parameter; optimizer arrays come first.

        Examples of keys are ``("optimizer slot 'exp_avg'", "head.weight")`` and ``("parameter", "head.weight")``.
        """
        state = self.state()
        vectors = [
            (slot_name(slot), values, slot_entries(self.engine, slot)) for slot, values in sorted(state.slots.items())
        ]
        return {
            (quantity, entry.spec.name): hashlib.sha256(vector[entry.span.start : entry.span.stop].tobytes()).digest()
            for quantity, vector, entries in [*vectors, (PARAMETER, state.parameters, self.layout.parameters)]
            for entry in entries
        }

    # ------------------------------------------------------------------ in one process (not collective)

    def take_state(self, state: TrainingState) -> None:
        """Set the parameters and the optimizer's arrays to ``state``, which another layout's :meth:`state` returned."""
        self.model.set_parameters(state.parameters)
        state_arrays = self.updater.host_state()
        for slot, values in state.slots.items():
            offsets = {entry.spec.name: entry.offset for entry in slot_entries(self.engine, slot)}
            for piece in self.updater.state_pieces(slot):
                start = offsets[piece.spec.name] + piece.start
                state_arrays[slot][piece.state : piece.state + piece.size] = values[start : start + piece.size]
        self.updater.take_state(state_arrays)
        self.updater.step_count = state.step_count
        if self.updater.method is not None:
            self.updater.method.restore(state.progress)

    def update_from(self, gradient: BatchGradient, values: Array) -> StepUpdate:
        """Train one step with ``values``, the averaged gradient of another layout, in place of ``gradient``.

        ``gradient`` is the gradient that this training computed; its arrays are overwritten.
        """
        clipped, pieces = list[Array](), self.engine.pieces()
        for piece in pieces:
            _of(gradient.reduced, piece)[:] = values[piece.span.start : piece.span.stop]
        self.updater.watch = lambda reduced: clipped.append(_in_order(reduced, pieces, values))
        try:
            report = self.engine.step(gradient.totals, lambda: gradient.reduced, 0)
        finally:
            self.updater.watch = None
        self.model._cache = None
        return StepUpdate(report, clipped[0] if clipped else None, self.state())


def slot_name(slot: str) -> str:
    """Return the name that findings use for the optimizer's array ``slot``. Not collective."""
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
    parallel, settings = layout.parallel, dict(task.settings)
    timeout = {"timeout": settings.pop("timeout")} if "timeout" in settings else {}
    with parallel.mesh(comm, **timeout) as mesh:
        config = Config(**{**settings, **parallel.settings()})
        model = task.make_model(mesh.communicator)
        with distribute(model, task.make_optimizer(), parallel.strategy, mesh=mesh, config=config) as sharded:
            yield ObservedTraining(sharded, iter(task.feed(sharded)))


T = TypeVar("T")

AFTER = "gradient after clipping"
COPY = "copy of a parameter"
UNREPEATED = (
    "a race, or random numbers without a seed: this layout gave other numbers when the same training was run again"
)


class TrainingPair:
    """Compare a training on a layout with the same training in one process, which runs on the layout's rank 0.

    Methods are collective over ``comm``.

    Parameters
    ----------
    comm : Communicator
        The layout's ranks.
    layout : Layout
        The layout that is compared.
    training : ObservedTraining
        The training on the layout.
    reference : ObservedTraining or None
        The training in one process on rank 0; None on other ranks.
    rounding : Rounding
        Bounds on rounding errors in the compared numbers.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: Layout,
        training: ObservedTraining,
        reference: ObservedTraining | None,
        rounding: Rounding,
    ) -> None:
        self.comm, self.layout, self.training = comm, layout, training
        self.reference: Any = reference  # used on rank 0 only
        self.rounding, self.tolerance = rounding, rounding.tolerance
        self.largest = 0.0
        self.entries = training.layout.parameters
        self.clips = training.model.config.clip is not None
        self.before = "gradient before clipping" if self.clips else "gradient"
        #: Batch, gradient and update of one process in the step that is compared; only on rank 0.
        self._batch: tuple[Any, Any]
        self._gradient: BatchGradient
        self._update: StepUpdate

    def replay(self, steps: int) -> None:
        """Train ``steps`` steps on the layout and in one process, without comparing them."""
        self.training.train(steps)
        with all_ranks(self.comm, "one process"):
            if self.reference is not None:
                self.reference.train(steps)

    def start(self) -> Finding | None:
        """Compare the initial parameters and optimizer arrays; return the first difference or None."""
        return self._compare_states(self.training.state(), 0)

    def step(self, number: int) -> Finding | None:
        """Train one step on the layout and in one process; return the first difference between them, or None."""
        state = self.training.state()
        if self.tolerance is None and (unlike := self._compare_states(state, number - 1)):
            return unlike
        batch = next(self.training.batches)
        gradient = self.training.gradient(batch)
        located = self._on_first(lambda one: self._compare_gradient(one, gradient, state))
        if located is not None:
            return self._explain_gradient(located.with_finding(step=number), gradient, batch)
        update = self.training.update(batch)
        located = self._on_first(lambda one: self._compare_update(one, gradient, update, state))
        if located is not None:
            return self._owned(located.with_finding(step=number))
        expected: Array = self._on_first(lambda _: self._update.state.parameters)
        bound = self._bound_of_change(expected, state.parameters)
        return self._views(number, Vectors(PARAMETER, update.state.parameters, expected, bound), state.parameters)

    # ------------------------------------------------------------------ comparing

    def _on_first(self, function: Callable[[ObservedTraining], T]) -> T:
        """Call ``function(self.reference)`` on rank 0, and return its result on every rank."""
        result: T = _on_first(self.comm, lambda: function(self.reference))
        return result

    def _compare_states(self, state: TrainingState, number: int) -> Finding | None:
        """Compare parameters and optimizer arrays after ``number`` steps; return the first difference or None."""
        quantity = PARAMETER if number else "start value"
        reason = UNREPEATED if number else "start values that depend on the rank: key them by seed, name and element"
        expected = self._on_first(lambda one: one.state())
        pairs = [self._slot(s, state.slots[s], expected.slots[s], None) for s in sorted(state.slots)]
        located = self._on_first(lambda _: self._first(pairs))
        if located is not None:
            return self._owned(located.with_finding(step=number, diagnosis=reason))
        unlike = self._views(number, Vectors(quantity, state.parameters, expected.parameters, None), None)
        return unlike if unlike is None else replace(unlike, diagnosis=unlike.diagnosis or reason)

    def _compare_gradient(
        self, one: ObservedTraining, gradient: BatchGradient, state: TrainingState
    ) -> LocatedDifference | None:
        self._batch = next(one.batches)
        if self.tolerance is not None:
            one.take_state(state)
        expected = self._gradient = one.gradient(self._batch)
        apart = abs(gradient.loss - expected.loss) / abs(expected.loss) if expected.loss else abs(gradient.loss)
        if not self._same(gradient.loss, expected.loss):
            return LocatedDifference(Finding(0, "loss", found=gradient.loss, expected=expected.loss))
        size = largest(expected.values)
        located = self._first(
            [Vectors(self.before, gradient.values, expected.values, self._bound_of_gradient(size))], backward=True
        )
        if located is None and self.tolerance is not None:
            self.largest = max(self.largest, apart, _apart(gradient.values, expected.values, size))
        return located

    def _compare_update(
        self, one: ObservedTraining, gradient: BatchGradient, update: StepUpdate, state: TrainingState
    ) -> LocatedDifference | None:
        reference = self._gradient
        after = one.update(self._batch) if self.tolerance is None else one.update_from(reference, gradient.values)
        self._update = after
        norms = (update.report.gradient_norm, after.report.gradient_norm)
        if self.clips and not self._same(*norms):
            diagnosis = verdicts.diagnose_norm(*norms, self.rounding, self._counts())
            return _explained(
                LocatedDifference(Finding(0, "gradient norm", found=norms[0], expected=norms[1])), diagnosis
            )
        if self.clips and after.clipped is not None:
            clipped = gradient.values if update.clipped is None else update.clipped
            bound = self._bound(largest(after.clipped))
            if located := self._first([Vectors(AFTER, clipped, after.clipped, bound)]):
                return _explain_clip(located, clipped, gradient.values, after.clipped, self.rounding)
        for slot in sorted(update.state.slots):
            actual, expected, before = (s.slots[slot] for s in (update.state, after.state, state))
            vectors = self._slot(slot, actual, expected, self._bound_of_change(expected, before))
            if located := self._first([vectors]):
                reason = verdicts.diagnose_update(actual[located.indices], before[located.indices], vectors.quantity)
                return located.with_finding(diagnosis=reason)
        return None

    def _same(self, actual: float | None, expected: float | None) -> bool:
        if actual is None or expected is None:
            return actual is expected
        return self.rounding.same(actual, expected)

    def _first(self, pairs: Sequence[Vectors], *, backward: bool = False) -> LocatedDifference | None:
        """Return the first tensor that differs, in the first of ``pairs`` that have any difference, or None.

        With ``backward``, it is the last tensor that differs in that pair.
        """
        for vectors in pairs:
            entries = self.entries if vectors.entries is None else vectors.entries
            masks = [(entry, mask) for entry in entries if (mask := vectors.mask(entry)).any()]
            if masks:
                return difference(vectors, *(masks[-1] if backward else masks[0]), len(masks))
        return None

    def _slot(self, slot: str, actual: Array, expected: Array, bound: float | None) -> Vectors:
        """Return an optimizer array of the layout and of one process, as :class:`Vectors`.

        Its tensors are the parameters, or have sizes of their own if the optimizer keeps arrays of other sizes.
        """
        has_entries = slot not in self.training.updater.optimizer.slots
        return Vectors(
            slot_name(slot), actual, expected, bound, slot_entries(self.training.engine, slot) if has_entries else None
        )

    def _bound(self, size: float) -> float | None:
        return None if self.tolerance is None else self.tolerance * size

    def _bound_of_gradient(self, size: float) -> float | None:
        return None if self.rounding.of_gradients is None else self.rounding.of_gradients * size

    def _bound_of_change(self, after: Array, before: Array) -> float | None:
        """Return the allowed difference of updated values, from the size of the update; None if bits must be equal."""
        if self.tolerance is None:
            return None
        change = largest(after - before)
        rounding = 4 * float(np.finfo(after.dtype).eps) * largest(after)
        return self.tolerance * change + rounding

    def _views(self, number: int, vectors: Vectors, before: Array | None) -> Finding | None:
        """Compare ``vectors``, the parameters as each rank sees them, and each rank's own copy, with one process.

        Return the first difference or None. ``before`` has the parameters before the update; None at the start.
        """
        local = self._first([vectors])
        if local is not None and before is not None:
            reason = verdicts.diagnose_update(vectors.actual[local.indices], before[local.indices], PARAMETER)
            local = local.with_finding(diagnosis=reason)
        if local is None and (name := self.training.unlike_copy(vectors.actual)) is not None:
            reason = "this rank's own copy was not updated as the others were: a message or barrier left out"
            local = LocatedDifference(Finding(0, COPY, name, diagnosis=reason))
        gathered = self.comm.allgather_object(local, "what ranks see")
        different = [rank for rank, located in enumerate(gathered) if located is not None]
        if not different:
            return None
        first: LocatedDifference = gathered[different[0]].with_finding(step=number)
        if len(different) == self.comm.size > 1 and first.indices.size:
            return self._owned(first)
        return replace(first.finding, ranks=tuple(different))

    # ------------------------------------------------------------------ explaining

    def _owned(self, located: LocatedDifference) -> Finding:
        """Return the finding in ``located``; if it names no ranks, add those that update the differing elements."""
        owners = self.training.owners()
        ranks = sorted({int(owner) for owner in owners[located.indices]} - {-1}) if located.of_parameters else []
        return located.finding if located.finding.ranks else replace(located.finding, ranks=tuple(ranks))

    def _explain_gradient(self, located: LocatedDifference, gradient: BatchGradient, batch: Any) -> Finding:
        """Evaluate the batch again, and return the finding in ``located`` with ranks and probable cause added."""
        training, finding = self.training, located.finding
        looked = training.look(batch, finding.tensor)
        if finding.quantity == "loss":
            quiet = training.model.evaluate(*batch)
            grains = self.comm.allgather_object(gradient.grains, "losses of grains")
            known = {} if self.layout.parallel.sample_parts > 1 else _losses(grains)
            return self._on_first(
                lambda one: self._explain_loss(one, finding, (gradient, looked.gradient), quiet, known)
            )
        expected = self._on_first(lambda one: one.look(self._batch, finding.tensor))
        computed = self.comm.allgather_object(self._compare_parts(looked, expected), "gradients of micro-batches")
        diagnosis: Diagnosis = self._on_first(lambda _: self._explain_values(gradient, looked, expected, computed))
        wrong = tuple(one.rank for one in computed if one is not None and one.grains)
        if wrong:
            return _explained(located.with_finding(ranks=wrong, role="computed by"), diagnosis).finding
        return self._owned(_explained(located.with_finding(role="owned by"), diagnosis))

    def _explain_loss(
        self,
        one: ObservedTraining,
        finding: Finding,
        gradients: tuple[BatchGradient, BatchGradient],
        quiet: Any,
        known: Any,
    ) -> Finding:
        gradient, again = gradients
        expected, mean = self._gradient, one.model.evaluate(*self._batch)
        evidence = verdicts.LossEvidence(
            first=gradient.loss,
            again=again.loss,
            expected=expected.loss,
            quiet=quiet[0] / quiet[1],
            quiet_expected=mean[0] / mean[1],
            weight=gradient.totals.weight,
            weight_expected=expected.totals.weight,
            grains=known,
            grains_expected=expected.grains,
            rounding=self.rounding,
        )
        axes = self.training.engine.grid.axes
        replicas = {axes.group(rank, ("pipeline", "tensor", "context")) for rank in evidence.wrong_ranks}
        role = "computed by" if all(len(ranks) == 1 for ranks in replicas) else "computed by one of"
        finding = replace(finding, ranks=tuple(sorted({r for ranks in replicas for r in ranks})), role=role)
        return _explained(LocatedDifference(finding), verdicts.diagnose_loss(evidence, self._counts())).finding

    def _compare_parts(self, looked: TensorParts, reference: TensorParts) -> RankGradients | None:
        """Compare this rank's gradients of micro-batches, for one tensor, with one process; None if there are none."""
        parts = looked.parts if self.layout.parallel.sample_parts == 1 else {}
        shared = sorted(parts.keys() & reference.parts.keys())
        if not shared:
            return None
        # If all parts are within this bound, their sum is within the tolerance.
        weight = reference.gradient.totals.weight
        bound = self._bound(largest(reference.gradient.values) * weight / len(reference.parts))
        wrong: dict[PartKey, tuple[Array, Array]] = {}
        for key in shared:
            actual, expected = parts[key], self.training.part_of(key[2], reference.parts[key])
            if actual.tobytes() != expected.tobytes() and (bound is None or not largest(actual - expected) <= bound):
                wrong[key] = actual, expected
        a, b = [actual for actual, _ in wrong.values()], [expected for _, expected in wrong.values()]
        size = max(map(largest, b), default=0.0)
        apart = max((_apart(x, y, size) for x, y in wrong.values()), default=0.0)
        grains = tuple(sorted({grain for grain, _, _ in wrong}))
        return RankGradients(self.comm.rank, grains, self.rounding.factor(a, b) if wrong else None, apart)

    def _explain_values(
        self, gradient: BatchGradient, looked: TensorParts, alone: TensorParts, computed: list[RankGradients | None]
    ) -> Diagnosis:
        expected = self._gradient
        vectors = Vectors("", gradient.values, expected.values, self._bound_of_gradient(largest(expected.values)))
        different = [entry for entry in self.entries if vectors.mask(entry).any()]

        def named(values: Array) -> dict[str, Array]:
            return {entry.spec.name: values[entry.span.start : entry.span.stop] for entry in different}

        uses = {name: [name, *(e.spec.name for e in tied)] for name, tied in self.training.layout.uses.items()}
        evidence = verdicts.GradientEvidence(
            actual=named(gradient.values),
            again=named(looked.gradient.values),
            expected=named(expected.values),
            owner_sums=named(looked.owner_sums),
            uses={
                n: {use: alone.uses[use] / expected.totals.weight for use in names if use in alone.uses}
                for n, names in uses.items()
            },
            computed=[one for one in computed if one is not None],
            tensors=sum(e.spec.optimized and e.spec.size > 0 for e in self.entries),
            rounding=self.rounding,
        )
        return verdicts.diagnose_gradient(evidence, self._counts())

    def _counts(self) -> dict[str, int]:
        """Return numbers by which a sum may have been divided by mistake, such as ``{"ranks": 4}``. Not collective."""
        scalars, accumulate = self.training.engine.scalars, self.training.model.config.accumulate
        counts = {"grains": scalars.count, "samples": scalars.samples, "micro-batches of a grain": accumulate}
        return self.layout.group_sizes() | {name: count for name, count in counts.items() if count > 1}


def _explained(located: LocatedDifference, diagnosis: Diagnosis) -> LocatedDifference:
    return located.with_finding(diagnosis=diagnosis.cause, seen=diagnosis.pattern)


def _explain_clip(
    located: LocatedDifference, clipped: Array, before: Array, expected: Array, rounding: Rounding
) -> LocatedDifference:
    indices = located.indices
    diagnosis = verdicts.diagnose_clipped(clipped[indices], before[indices], expected[indices], rounding)
    factors = [rounding.factor([values], [before], keep_one=True) for values in (clipped, expected)]
    if None in factors:
        return _explained(located, diagnosis)
    # All elements were clipped by one factor, but not by the factor of one process.
    return _explained(LocatedDifference(Finding(0, "clip factor", found=factors[0], expected=factors[1])), diagnosis)


def _apart(actual: Array, expected: Array, size: float) -> float:
    return largest(actual - expected) / size if size else 0.0


def _losses(grains: list[dict[int, float]]) -> dict[int, tuple[float, int]]:
    return {grain: (loss, rank) for rank, known in enumerate(grains) for grain, loss in known.items()}


#: A function ``progress(layout, step)`` that is called on rank 0 at the start (``step`` 0) and after every step.
Progress = Callable[[str, int], None]


class ReferenceTrace(NamedTuple):
    """Hold what a training in one process computed.

    ``steps`` has the loss, the gradient norm and the hashes of all tensors for the start and for each step (loss and
    norm are None for the start). ``sha256`` is the hash of the final parameters. ``rounding`` bounds rounding errors,
    for the training's dtype and length of sums. ``layers_depend`` is True if a layer declares that its bits depend on
    the size of tensor or context groups.
    """

    rounding: Rounding
    steps: list[tuple[float | None, float | None, dict[Key, bytes]]]
    sha256: str
    seconds: float
    layers_depend: bool


def compare_layouts(
    make_model: Callable[[Communicator], Any],
    batches: Sequence[tuple[Any, Any]] | Feed,
    layouts: Sequence[str | Layout],
    *,
    make_optimizer: Callable[[], Any] = lambda: SGD(lr=0.01),
    comm: Any = None,
    steps: int | None = None,
    tolerance: float | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Run the same training on several layouts; for each, name the first number that differs from one process.

    Collective over ``comm``. After every step the loss, the gradient norm and hashes of parameters (as each rank sees
    them) and optimizer arrays are compared with one process that computes in the same tiles. If something differs, the
    training is run once more up to that step, and all that it computes is compared in order, from loss to parameters.
    If one process cannot compute in these tiles, all that each step computes is compared, within a tolerance.

    Parameters
    ----------
    make_model : callable
        ``make_model(comm)`` returns a new model; ``comm`` are the layout's ranks, for models that communicate.
    batches : sequence of (x, y), or callable
        Global batches, the same on every rank; or a function: ``batches(model)`` yields this rank's part of each.
    layouts : sequence of str
        Names such as "2", "zero3*4", "pipeline=2, data=2", "tensor=2"; docs/verify.md explains them.
    make_optimizer : callable
        Returns a new optimizer; the default is plain SGD.
    comm : mpi4py communicator, Communicator, "self" or None
        Each layout runs on the first ranks of ``comm``. With "self" the ranks of a layout are threads of this process,
        without MPI. None means all ranks of the job, or "self" if no launcher has started several ranks.
    steps : int or None
        Number of steps to compare; None for all of a sequence of batches.
    tolerance : float or None
        Relative difference allowed for layouts whose tiles one process cannot compute, such as groups of 3 ranks. None
        computes it from the dtype and the length of sums: 16 epsilon for every doubling of the length. With ``wire``
        gradients may differ by 2^-7 more for each time that they are rounded.
    progress : callable or None
        ``progress(layout, step)`` is called on rank 0, with ``step`` 0 if the start values agree, and after each step
        that agrees.
    **settings
        Settings of :class:`~mpizero.Config`: ``micro_batch``, ``clip``, ...; and ``timeout`` of the mesh.

    Returns
    -------
    Report
        The verdicts on all layouts, the same on every rank.

    Raises
    ------
    ConfigError
        If a layout's name is not understood, or the layout needs more ranks than ``comm`` has.

    Examples
    --------
    >>> import mpizero as mz
    >>> batch = mz.data.digits().samples(range(8))
    >>> mz.testing.compare_layouts(lambda comm: mz.nn.MLP(64, [4], 10), [batch], ["zero3*2"], comm="self").agrees
    True
    """
    task = _task(make_model, batches, make_optimizer, steps, settings)
    parsed = [Layout.parse(layout) if isinstance(layout, str) else layout for layout in layouts]
    chosen = each_once(parsed, task.settings.get("tiles"))
    comm = default_world() if comm is None else comm
    with nullcontext() if comm is None or comm == "self" else communicator_of(comm) as world:
        tell = progress if progress is not None and (world is None or world.rank == 0) else _silent
        return _compare(task, chosen, world, tolerance, tell)


def _task(
    make_model: Any, batches: Any, make_optimizer: Any, steps: int | None, settings: Mapping[str, Any]
) -> TrainingTask:
    if callable(batches):
        if steps is None:
            raise ConfigError("steps: say how many to compare, where batches is a function")
        return TrainingTask(make_model, make_optimizer, batches, steps, settings)
    count = len(batches) if steps is None else min(steps, len(batches))
    return TrainingTask(make_model, make_optimizer, _samples_of_rank(batches), count, settings)


def _samples_of_rank(batches: Sequence[tuple[Any, Any]]) -> Feed:
    """Return a function ``feed(model)`` that yields this rank's samples of each of the global batches ``batches``."""

    def feed(model: Model) -> Iterator[tuple[Any, Any]]:
        group = model.batch_group
        for x, y in batches:
            tree = SampleTree.of(x=x, y=y)
            count = tree.count()
            local = Grains(count, model.grain_size(count)).samples_of(group.rank, group.size)
            yield slab_of(model).of(tree.cut(local))

    return feed


def _compare(
    task: TrainingTask, layouts: Sequence[Layout], world: Communicator | None, tolerance: float | None, tell: Progress
) -> Report:
    for layout in layouts:
        if world is not None and layout.ranks > world.size:
            raise ConfigError(f"layout {str(layout)!r} needs {layout.ranks} ranks, this job has {world.size}")
    traces: dict[str, ReferenceTrace] = {}
    verdicts = list[Verdict]()
    for layout in [ONE_PROCESS.resolve_tiles(task.settings.get("tiles")), *layouts]:
        if (key := str(layout.alone.parallel.tiles)) not in traces:
            with _named(layout):
                traces[key] = _on_first(world, partial(record, task, layout.alone, tell))
        trace = traces[key]
        if not verdicts:
            verdicts.append(Verdict("one process", 1, task.steps, trace.sha256, trace.seconds))
            continue
        rounding = trace.rounding
        split = layout.parallel.tensor * layout.parallel.context > 1
        if layout.rounds(task.settings.get("accumulate", 1)) or (split and trace.layers_depend):
            rounding = replace(rounding, tolerance=rounding.of_sums if tolerance is None else tolerance)
        if tolerance is not None:
            rounding = replace(rounding, roundings=0)
        comparison = LayoutComparison(task, layout, trace, rounding, tell)
        with _named(layout):
            verdicts.append(_run(comparison, world))
    return Report(tuple(verdicts))


@contextmanager
def _named(layout: Layout) -> Iterator[None]:
    """Add the layout's name to a :class:`ConfigError` of the ``with`` block, unless it is one process without tiles."""
    try:
        yield
    except ConfigError as error:
        if layout == ONE_PROCESS:
            raise
        raise ConfigError(f"layout {str(layout)!r}: {error}") from error


def _silent(layout: str, step: int) -> None:
    """Do nothing; used in place of a progress function on ranks other than 0, and if there is none."""


def _on_first(world: Communicator | None, function: Callable[[], Any]) -> Any:
    return function() if world is None else from_rank_0(world, function)


def _run(comparison: LayoutComparison, world: Communicator | None) -> Verdict:
    """Compare one layout on its ranks, and return the verdict on every rank of ``world``."""
    ranks = comparison.layout.ranks
    if world is None:
        return run_in_threads(ranks, comparison.run)[0]
    members = world.split(int(world.rank >= ranks), name=str(comparison.layout))
    with all_ranks(world, str(comparison.layout)):
        verdict = comparison.run(members) if world.rank < ranks else None
    result: Verdict = world.broadcast_object(verdict)
    members.close()
    return result


def record(task: TrainingTask, alone: Layout = ONE_PROCESS, tell: Progress = _silent) -> ReferenceTrace:
    """Train in one process, and return the numbers and hashes that layouts with the same tiles are compared with.

    Not collective. ``alone`` is the layout of the one process. ``tell("one process", step)`` is called after each step,
    and with ``step`` 0 before the first one.
    """
    started = time.monotonic()
    with placed(task, "self", alone) as training:
        steps, grains = [], 1
        terms = float(max((side for e in training.layout.parameters for side in e.spec.shape), default=1))
        for number in range(task.steps + 1):
            training.train(min(number, 1))
            steps.append(_observed(training))
            grains = max(grains, training.engine.scalars.count)
            terms = max(terms, training.engine.scalars.samples, *(r.weight for r in [training.model.last_step] if r))
            tell("one process", number)
        roundings = 0 if training.engine.config.wire is None else grains.bit_length()  # of grains, and at every level
        rounding = Rounding(str(np.dtype(training.engine.dtype)), terms, roundings=roundings)
        sha256, reasons = training.model.parameters_sha256(), layer_reasons(training.model.wrapped_model)
        return ReferenceTrace(rounding, steps, sha256, time.monotonic() - started, bool(reasons))


def _observed(training: ObservedTraining) -> tuple[float | None, float | None, dict[Key, bytes]]:
    report = training.model.last_step
    scalars = (None, None) if report is None else (report.loss, report.gradient_norm)
    return (*scalars, training.digests())


class LayoutComparison(NamedTuple):
    """Compare one layout with one process: bit by bit, or within a tolerance if ``rounding`` has one.

    ``trace`` is the training in one process. ``tell(layout, step)`` is called on rank 0 like ``progress`` of
    :func:`compare_layouts`.
    """

    task: TrainingTask
    layout: Layout
    trace: ReferenceTrace
    rounding: Rounding
    tell: Progress

    def run(self, comm: Communicator) -> Verdict:
        """Train on the layout and return the verdict. Collective over ``comm``, which has the layout's ranks."""
        started = time.monotonic()
        how = self._exact if self.rounding.tolerance is None else self._rounded
        steps, sha256, largest, finding = how(comm)
        seconds = time.monotonic() - started
        name, ranks = str(self.layout), self.layout.ranks
        tile_counts = self.layout.alone.parallel.parallel_layout().wanted_virtual_ranks
        tiles = tiles_setting(tile_counts) if max(tile_counts.values()) > 1 else ""
        return Verdict(name, ranks, steps, sha256, seconds, self.rounding.tolerance, largest, finding, tiles)

    def _tell(self, comm: Communicator, step: int) -> None:
        if comm.rank == 0:
            self.tell(str(self.layout), step)

    def _exact(self, comm: Communicator) -> tuple[int, str, float, Finding | None]:
        """Train as users do and compare hashes; at the first difference, train again up to that step to explain it.

        Return the number of steps that agreed, the hash of the final parameters, 0 as the largest tolerated difference,
        and the first difference or None.
        """
        wrong = None
        with placed(self.task, comm, self.layout) as training:
            for number in range(self.task.steps + 1):
                training.train(min(number, 1))
                wrong = self._unlike(training, number)
                if wrong is not None:
                    break
                self._tell(comm, number)
            sha256 = training.model.parameters_sha256()
        if wrong is None:
            return self.task.steps, sha256, 0.0, None
        return max(0, wrong.step - 1), sha256, 0.0, self._look(comm, wrong.step) or wrong

    def _unlike(self, training: ObservedTraining, number: int) -> Finding | None:
        """Return the first difference after step ``number``, found on any rank; None if there is none. Collective."""
        loss, norm, digests = self.trace.steps[number]
        observed = _observed(training)
        local: Finding | None = None
        if repr(observed[0]) != repr(loss):
            local = Finding(number, "loss", found=observed[0], expected=loss, diagnosis=UNREPEATED)
        elif self.task.settings.get("clip") is not None and repr(observed[1]) != repr(norm):
            local = Finding(number, "gradient norm", found=observed[1], expected=norm, diagnosis=UNREPEATED)
        elif key := next((key for key, value in digests.items() if observed[2].get(key) != value), None):
            local = Finding(number, *key, diagnosis=UNREPEATED)
        elif name := training.unlike_copy(training.engine.global_view.vector()):
            local = Finding(number, "copy of a parameter", name, diagnosis=UNREPEATED)
        gathered = training.engine.grid.world.allgather_object(local, "hashes")
        different = [rank for rank, finding in enumerate(gathered) if finding is not None]
        return replace(gathered[different[0]], ranks=tuple(different)) if different else None

    def _look(self, comm: Communicator, step: int) -> Finding | None:
        """Train again from the start to step ``step``, and compare everything that this step computes. Collective.

        Return the first difference; None if the second training does not differ.
        """
        with self._pair(comm) as pair:
            if not step:
                return pair.start()
            pair.replay(step - 1)
            return pair.step(step)

    def _rounded(self, comm: Communicator) -> tuple[int, str, float, Finding | None]:
        """Compare all that every step computes, within the tolerance, with one process.

        Before each step, the one process copies the layout's parameters and optimizer arrays. Return the number of
        steps that agreed, the hash of the final parameters, the largest tolerated difference, and the first difference
        that exceeds the tolerance or None.
        """
        finding, done = None, 0
        with self._pair(comm) as pair:
            for number in range(self.task.steps + 1):
                finding = pair.step(number) if number else pair.start()
                if finding is not None:
                    break
                done = number
                self._tell(comm, number)
            return done, pair.training.model.parameters_sha256(), pair.largest, finding

    @contextmanager
    def _pair(self, comm: Communicator) -> Iterator[TrainingPair]:
        alone = placed(self.task, "self", self.layout.alone) if comm.rank == 0 else nullcontext()
        with placed(self.task, comm, self.layout) as training, alone as reference:
            yield TrainingPair(comm, self.layout, training, reference, self.rounding)
