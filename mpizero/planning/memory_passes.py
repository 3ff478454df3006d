"""Count the bytes that one rank reads and writes in a step to sum, check and update.

[Note: least passes] A row is an array that holds a gradient or a partial sum. Every row of a sum is counted as read
once, and every result as written once. A sum that a fused update uses at once is not written. Copies into and out of
message buffers are not counted here; they are part of the time of the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpizero.layout.sum_tree import Program
from mpizero.optim.elementwise import tensor_state_size
from mpizero.planning.traffic import RankTraffic
from mpizero.sharding.config import fuses_update
from mpizero.sharding.whole_tensors import tensor_cost


class PassBytes(NamedTuple):
    """Hold the bytes that one pass over memory reads, and the bytes that it writes."""

    read: int = 0
    written: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written together."""
        return self.read + self.written


@dataclass(frozen=True)
class StepPasses:
    """Compute the passes over memory of one rank in a step.

    Attributes
    ----------
    traffic : RankTraffic
        The rank's part of the model, and its messages.
    """

    traffic: RankTraffic

    @property
    def _item(self) -> int:
        return self.traffic.training.itemsize

    def _pass(self, elements: int, reads: int, writes: int) -> PassBytes:
        return PassBytes(elements * reads * self._item, elements * writes * self._item)

    @property
    def _held(self) -> int:
        """Number of gradient elements that this rank's stage has."""
        return sum(unit.gradients for unit in self.traffic.part.layout.units)

    @property
    def _owned(self) -> int:
        """Number of gradient elements that this rank owns; it computes their sums over all ranks."""
        return sum(self.traffic.part.shards.gradients[self.traffic.grid.data.rank])

    @property
    def _group(self) -> int:
        """Number of gradient elements that this rank and its peers own; for these it sums the gradients of its node."""
        gradients = self.traffic.part.shards.gradients
        return sum(sum(gradients[rank]) for rank in self.traffic.grid.peer_ranks)

    @property
    def fused(self) -> bool:
        """Tell whether the last sum of gradients and the update are one pass.

        In waves, the update reads the sum of all grains from the stack of partial sums.
        """
        training, partitioned = self.traffic.training, self.traffic.part.partitioned
        return fuses_update(
            training.optimizer,
            norm=training.needs_norm,
            ties=partitioned.has_shared_parameters,
            peers=self.traffic.grid.peers.size,
            waves=training.step.waves,
        )

    # ------------------------------------------------------------------ by phase

    def local_sums(self) -> list[PassBytes]:
        """Return the passes that check each micro-batch's gradients, and those that add gradients within the rank.

        Not collective.
        """
        present = sum(size > 0 for size in self.traffic.jobs)
        found = [self._pass(self._held, 1, 0)] * present
        step = self.traffic.training.step
        if step.accumulate > 1:
            grains = -(-present // step.accumulate)
            if step.waves or step.scratch is None:
                found += [self._pass(self._held, 1, 1)] * 2 * grains  # into the partial sum, and out of it
            found += [self._pass(self._held, 2, 1)] * (present - grains)
        if not step.waves:
            folds = step.rows_plan(self.traffic.grid).folds[self.traffic.grid.place].folds
            found += [self._pass(self._held, 2, 1)] * sum(len(fold.targets) for fold in folds)
        return found

    def reduction(self) -> list[PassBytes]:
        """Return the passes that sum over ranks. Not collective.

        The last sum is left out if the update is fused with it.
        """
        return list(self._waves() if self.traffic.training.step.waves else self._rows())

    def _rows(self) -> Iterator[PassBytes]:
        plan = self.traffic.training.step.rows_plan(self.traffic.grid)
        if self.traffic.grid.peers.size > 1:
            yield from self._folded(self._group, plan.group_programs[self.traffic.grid.peers.rank])
        if not self.fused:
            yield self._pass(self._owned, _rows_read(plan.root), 1)

    def _waves(self) -> Iterator[PassBytes]:
        for wave in self.traffic.training.step.wave_plan(self.traffic.grid).waves:
            if self.traffic.grid.peers.size > 1:
                yield from self._folded(self._group, wave.group_programs[self.traffic.grid.peers.rank])
            for merge in wave.merges:
                yield self._pass(self._owned, _rows_read(merge.program), 1)
        if not self.fused:
            yield self._pass(self._owned, 1, 1)  # divided by the weight

    def _folded(self, elements: int, programs: Sequence[Program]) -> Iterator[PassBytes]:
        for program in programs:
            yield self._pass(elements, _rows_read(program), 1)

    def optimizer(self) -> list[PassBytes]:
        """Return one entry: the bytes of norm and update together, and of the last sum if it is fused.

        Not collective. Of whole tensors it counts one pass over values and state; :func:`tensor_work` has the rest.
        """
        training, tensors = self.traffic.training, self.traffic.tensors
        arrays = 1 + len(training.optimizer.slots)
        rows = 1
        if self.fused and not training.step.waves:
            rows = _rows_read(training.step.rows_plan(self.traffic.grid).root)
        gradients = self._owned if training.row.shard_optimizer else self._group
        elementwise = self.traffic.updated - self.traffic.updated_in_tensors
        found = [self._pass(gradients, rows, 0), self._pass(elementwise, arrays, arrays)]
        for spec in (tensors.tensors[number].spec for number in tensors.owned(self.traffic.grid.data.rank)):
            found.append(self._pass(spec.size + tensor_state_size(training.optimizer, spec), 1, 1))
        if training.needs_norm:
            found.append(self._pass(self._owned, 1, 0))
        return [PassBytes(sum(p.read for p in found), sum(p.written for p in found))]


def tensor_work(traffic: RankTraffic) -> int:
    """Return the floating-point operations by which a rank updates its whole tensors. Not collective."""
    tensors, optimizer = traffic.tensors, traffic.training.optimizer
    owned = (tensors.tensors[number].spec.shape for number in tensors.owned(traffic.grid.data.rank))
    return sum(tensor_cost(optimizer, shape) for shape in owned)


def _rows_read(program: Program) -> int:
    """Return how many arrays the instructions ``program``, which sum gradients in the order of a tree, read."""
    return sum(code != -1 for code in program)
