"""Compare one layout with one process step by step, and explain the first difference.

[Note: following] Some layouts with tensor or context groups add in another order than any process can, such as groups
of 3 ranks, and an optimizer such as Adam amplifies the rounding differences from step to step. For these layouts the
one process takes over the layout's parameters and optimizer arrays before every step, and updates them with the
layout's gradient. So rounding differences do not accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from mpizero._util.text import Rounding, largest
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.train.verify import diagnosis
from mpizero.train.verify.diagnosis import Diagnosis, RankGradients
from mpizero.train.verify.layouts import Layout
from mpizero.train.verify.training import (
    PARAMETER,
    BatchGradient,
    ObservedTraining,
    PartKey,
    StepUpdate,
    TensorParts,
    TrainingState,
    slot_name,
)
from mpizero.train.verify.vectors import LocatedDifference, Vectors, difference
from mpizero.train.verify.verdicts import Finding
from mpizero.types import Array

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
        How much rounding may change the numbers.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: Layout,
        training: ObservedTraining,
        reference: ObservedTraining | None,
        rounding: Rounding,
    ) -> None:
        self.comm, self.layout, self.training, self.reference = comm, layout, training, reference
        self.rounding, self.tolerance = rounding, rounding.tolerance
        self.largest = 0.0
        self.entries = training.layout.parameters
        self.clips = training.model.config.clip is not None
        self.before = "gradient before clipping" if self.clips else "gradient"
        #: Batch, gradient and update of one process in the step that is compared; only on rank 0.
        self._batch: tuple[Any, Any] = (None, None)
        self._gradient: BatchGradient | None = None
        self._update: StepUpdate | None = None

    def replay(self, steps: int) -> None:
        """Train ``steps`` steps on the layout and in one process, without comparing them."""
        self.training.train(steps)
        with all_ranks(self.comm, "one process"):
            if self.reference is not None:
                self.reference.train(steps)

    def start(self) -> Finding | None:
        """Compare the start values, and return the first difference; None if there is none."""
        return self._compare_states(self.training.state(), 0)

    def step(self, number: int) -> Finding | None:
        """Train one step on the layout and in one process; return the first difference in what it computes, or None."""
        state = self.training.state()
        if self.tolerance is None and (unlike := self._compare_states(state, number - 1)):
            return unlike
        batch = self.training.batch()
        mine = self.training.gradient(batch)
        found = self._on_first(lambda one: self._compare_gradient(one, mine, state))
        if found is not None:
            return self._explain_gradient(found.told(step=number), mine, batch)
        update = self.training.update(batch)
        found = self._on_first(lambda one: self._compare_update(one, mine, update, state))
        if found is not None:
            return self._owned(found.told(step=number))
        expected: Array = self._on_first(lambda _: self._after().state.parameters)
        bound = self._bound_of_change(expected, state.parameters)
        return self._views(number, Vectors(PARAMETER, update.state.parameters, expected, bound), state.parameters)

    # ------------------------------------------------------------------ comparing

    def _on_first(self, function: Callable[[ObservedTraining], T]) -> T:
        """Call ``function(self.reference)`` on rank 0, and return its result on every rank."""
        value: Any = None
        with all_ranks(self.comm, "one process"):
            if self.reference is not None:
                value = function(self.reference)
        result: T = self.comm.broadcast_object(value)
        return result

    def _compare_states(self, mine: TrainingState, number: int) -> Finding | None:
        """Compare parameters and optimizer arrays after ``number`` steps; return the first difference or None."""
        quantity = PARAMETER if number else "start value"
        reason = UNREPEATED if number else "start values that depend on the rank: key them by seed, name and element"
        theirs = self._on_first(lambda one: one.state())
        pairs = [self._slot(s, mine.slots[s], theirs.slots[s], None) for s in sorted(mine.slots)]
        found = self._on_first(lambda _: self._first(pairs))
        if found is not None:
            return self._owned(found.told(step=number, diagnosis=reason))
        unlike = self._views(number, Vectors(quantity, mine.parameters, theirs.parameters, None), None)
        return unlike if unlike is None else replace(unlike, diagnosis=unlike.diagnosis or reason)

    def _compare_gradient(
        self, one: ObservedTraining, mine: BatchGradient, state: TrainingState
    ) -> LocatedDifference | None:
        self._batch = one.batch()
        if self.tolerance is not None:
            one.take_state(state)
        theirs = self._gradient = one.gradient(self._batch)
        apart = abs(mine.loss - theirs.loss) / abs(theirs.loss) if theirs.loss else abs(mine.loss)
        if not self._same(mine.loss, theirs.loss):
            return LocatedDifference(Finding(0, "loss", found=mine.loss, expected=theirs.loss))
        size = largest(theirs.values)
        found = self._first([Vectors(self.before, mine.values, theirs.values, self._bound(size))], backward=True)
        if found is None and self.tolerance is not None:
            self.largest = max(self.largest, apart, _apart(mine.values, theirs.values, size))
        return found

    def _compare_update(
        self, one: ObservedTraining, mine: BatchGradient, update: StepUpdate, state: TrainingState
    ) -> LocatedDifference | None:
        theirs = self._gradient
        assert theirs is not None
        after = one.update(self._batch) if self.tolerance is None else one.update_from(theirs, mine.values)
        self._update = after
        norms = (update.report.gradient_norm, after.report.gradient_norm)
        if self.clips and not self._same(*norms):
            told = diagnosis.of_norm(*norms, self.rounding, self._counts())
            return _explained(LocatedDifference(Finding(0, "gradient norm", found=norms[0], expected=norms[1])), told)
        if self.clips and after.clipped is not None:
            clipped = mine.values if update.clipped is None else update.clipped
            bound = self._bound(largest(after.clipped))
            if found := self._first([Vectors(AFTER, clipped, after.clipped, bound)]):
                return _explain_clip(found, clipped, mine.values, after.clipped, self.rounding)
        for slot in sorted(update.state.slots):
            seen, expected, before = (s.slots[slot] for s in (update.state, after.state, state))
            vectors = self._slot(slot, seen, expected, self._bound_of_change(expected, before))
            if found := self._first([vectors]):
                reason = diagnosis.of_update(seen[found.places], before[found.places], vectors.quantity)
                return found.told(diagnosis=reason)
        return None

    def _after(self) -> StepUpdate:
        assert self._update is not None
        return self._update

    def _same(self, found: float | None, expected: float | None) -> bool:
        if found is None or expected is None:
            return found is expected
        return self.rounding.same(found, expected)

    def _first(self, pairs: Sequence[Vectors], *, backward: bool = False) -> LocatedDifference | None:
        """Return the first tensor in which one of ``pairs`` differs, or None; with ``backward``, the last one."""
        for vectors in pairs:
            entries = self.entries if vectors.entries is None else vectors.entries
            masks = [(entry, mask) for entry in entries if (mask := vectors.mask(entry)).any()]
            if masks:
                return difference(vectors, *(masks[-1] if backward else masks[0]), len(masks))
        return None

    def _slot(self, slot: str, found: Array, expected: Array, bound: float | None) -> Vectors:
        """Return the values of optimizer arrays; arrays as long as the parameters lie where the parameters lie."""
        own = slot not in self.training.updater.optimizer.slots
        return Vectors(slot_name(slot), found, expected, bound, self.training.entries_of(slot) if own else None)

    def _bound(self, size: float) -> float | None:
        return None if self.tolerance is None else self.tolerance * size

    def _bound_of_change(self, after: Array, before: Array) -> float | None:
        """Return by how much updated values may differ, from the size of their change; None if bits must be equal."""
        if self.tolerance is None:
            return None
        change = largest(after - before)
        rounding = 4 * float(np.finfo(after.dtype).eps) * largest(after)
        return self.tolerance * change + rounding

    def _views(self, number: int, vectors: Vectors, before: Array | None) -> Finding | None:
        """Compare the parameters that each rank sees, and its own copies; return the first difference or None."""
        mine = self._first([vectors])
        if mine is not None and before is not None:
            reason = diagnosis.of_update(vectors.found[mine.places], before[mine.places], PARAMETER)
            mine = mine.told(diagnosis=reason)
        if mine is None and (name := self.training.unlike_copy(vectors.found)) is not None:
            reason = "this rank's own copy was not updated as the others were: a message or barrier left out"
            mine = LocatedDifference(Finding(0, COPY, name, diagnosis=reason))
        everyone = self.comm.allgather_object(mine, "what ranks see")
        different = [rank for rank, found in enumerate(everyone) if found is not None]
        if not different:
            return None
        first: LocatedDifference = everyone[different[0]].told(step=number)
        if len(different) == self.comm.size > 1 and first.places.size:
            return self._owned(first)
        return replace(first.finding, ranks=tuple(different))

    # ------------------------------------------------------------------ explaining

    def _owned(self, found: LocatedDifference) -> Finding:
        """Return the finding; if it names no ranks yet, add the ranks that update the differing elements."""
        owners = self.training.owners()
        ranks = sorted({int(owner) for owner in owners[found.places]} - {-1}) if found.of_parameters else []
        return found.finding if found.finding.ranks else replace(found.finding, ranks=tuple(ranks))

    def _explain_gradient(self, found: LocatedDifference, mine: BatchGradient, batch: Any) -> Finding:
        """Evaluate the batch again, and add ranks and probable cause to the finding ``found``."""
        training, finding = self.training, found.finding
        looked = training.look(batch, finding.tensor)
        if finding.quantity == "loss":
            quiet = training.model.evaluate(*batch)
            grains = self.comm.allgather_object(mine.grains, "losses of grains")
            known = {} if self.layout.parallel.context > 1 else _losses(grains)
            return self._on_first(lambda one: self._explain_loss(one, finding, (mine, looked.gradient), quiet, known))
        theirs = self._on_first(lambda one: one.look(self._batch, finding.tensor))
        computed = self.comm.allgather_object(self._compare_parts(looked, theirs), "gradients of micro-batches")
        told: Diagnosis = self._on_first(lambda _: self._explain_values(mine, looked, theirs, computed))
        wrong = tuple(one.rank for one in computed if one is not None and one.grains)
        if wrong:
            return _explained(found.told(ranks=wrong, role="computed by"), told).finding
        return self._owned(_explained(found.told(role="owned by"), told))

    def _explain_loss(
        self, one: ObservedTraining, finding: Finding, seen: tuple[BatchGradient, BatchGradient], quiet: Any, known: Any
    ) -> Finding:
        mine, again = seen
        theirs, mean = self._gradient, one.model.evaluate(*self._batch)
        assert theirs is not None
        found = diagnosis.LossEvidence(
            first=mine.loss,
            again=again.loss,
            expected=theirs.loss,
            quiet=quiet[0] / quiet[1],
            quiet_expected=mean[0] / mean[1],
            weight=mine.totals.weight,
            weight_expected=theirs.totals.weight,
            grains=known,
            grains_expected=theirs.grains,
            rounding=self.rounding,
        )
        replicas = {self.training.replica_of(rank) for rank in found.wrong_ranks}
        role = "computed by" if all(len(ranks) == 1 for ranks in replicas) else "computed by one of"
        finding = replace(finding, ranks=tuple(sorted({r for ranks in replicas for r in ranks})), role=role)
        return _explained(LocatedDifference(finding), diagnosis.of_loss(found, self._counts())).finding

    def _compare_parts(self, looked: TensorParts, theirs: TensorParts) -> RankGradients | None:
        """Compare this rank's micro-batch gradients of a tensor with one process; None if it has none to compare."""
        parts = looked.parts if self.layout.parallel.context == 1 else {}
        shared = sorted(parts.keys() & theirs.parts.keys())
        if not shared:
            return None
        # If all parts are within this bound, their sum is within the tolerance.
        weight = theirs.gradient.totals.weight
        bound = self._bound(largest(theirs.gradient.values) * weight / len(theirs.parts))
        wrong: dict[PartKey, tuple[Array, Array]] = {}
        for key in shared:
            found, expected = parts[key], self.training.part_of(key[2], theirs.parts[key])
            if found.tobytes() != expected.tobytes() and (bound is None or not largest(found - expected) <= bound):
                wrong[key] = found, expected
        a, b = [found for found, _ in wrong.values()], [expected for _, expected in wrong.values()]
        size = max(map(largest, b), default=0.0)
        apart = max((_apart(x, y, size) for x, y in wrong.values()), default=0.0)
        grains = tuple(sorted({grain for grain, _, _ in wrong}))
        return RankGradients(self.comm.rank, grains, self.rounding.factor(a, b) if wrong else None, apart)

    def _explain_values(
        self, mine: BatchGradient, looked: TensorParts, alone: TensorParts, computed: list[RankGradients | None]
    ) -> Diagnosis:
        theirs = self._gradient
        assert theirs is not None
        vectors = Vectors("", mine.values, theirs.values, self._bound(largest(theirs.values)))
        different = [entry for entry in self.entries if vectors.mask(entry).any()]

        def named(values: Array) -> dict[str, Array]:
            return {entry.spec.name: values[entry.span.start : entry.span.stop] for entry in different}

        uses = {name: [name, *(e.spec.name for e in tied)] for name, tied in self.training.layout.uses.items()}
        seen = diagnosis.GradientEvidence(
            found=named(mine.values),
            again=named(looked.gradient.values),
            expected=named(theirs.values),
            own=named(looked.own),
            uses={
                n: {use: alone.uses[use] / theirs.totals.weight for use in names if use in alone.uses}
                for n, names in uses.items()
            },
            computed=[one for one in computed if one is not None],
            tensors=sum(e.spec.optimized and e.spec.size > 0 for e in self.entries),
            rounding=self.rounding,
        )
        return diagnosis.of_gradient(seen, self._counts())

    def _counts(self) -> dict[str, int]:
        """Return the numbers by which a sum may have been divided, by name of what they count. Not collective."""
        scalars, accumulate = self.training.engine.scalars, self.training.model.config.accumulate
        counts = {"grains": scalars.count, "samples": scalars.samples, "micro-batches of a grain": accumulate}
        return self.layout.group_sizes() | {name: count for name, count in counts.items() if count > 1}


def _explained(found: LocatedDifference, told: Diagnosis) -> LocatedDifference:
    return found.told(diagnosis=told.cause, seen=told.seen)


def _explain_clip(
    found: LocatedDifference, clipped: Array, before: Array, expected: Array, rounding: Rounding
) -> LocatedDifference:
    places = found.places
    told = diagnosis.of_clipped(clipped[places], before[places], expected[places], rounding)
    factors = [rounding.factor([values], [before], keep_one=True) for values in (clipped, expected)]
    if None in factors:
        return _explained(found, told)
    # All elements were clipped by one factor, but not by the factor of one process.
    return _explained(LocatedDifference(Finding(0, "clip factor", found=factors[0], expected=factors[1])), told)


def _apart(found: Array, expected: Array, size: float) -> float:
    return largest(found - expected) / size if size else 0.0


def _losses(grains: list[dict[int, float]]) -> dict[int, tuple[float, int]]:
    return {grain: (loss, rank) for rank, known in enumerate(grains) for grain, loss in known.items()}
