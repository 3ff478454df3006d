"""Compute the least time of each phase of a step on a measured machine.

It is the phase's operations divided by their measured rate, or its bytes divided by the measured bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from mpizero.planning import TrainingPlan
from mpizero.planning.byte_counts import ExchangeCost, Sent
from mpizero.planning.machine_file import Machine
from mpizero.planning.memory_passes import PassBytes, StepPasses, tensor_work
from mpizero.planning.traffic import RankTraffic
from mpizero.sharding.diagnostics import PHASES

#: For each purpose of messages, the measured operation whose times are used; "gather" for the others.
_OPERATIONS = {
    "whole tensors": "one to one",
    "tensor": "allreduce",
    "context": "one to one",
    "ties": "one to one",
    "samples": "exchange",
}


@dataclass(frozen=True)
class TimeFloors:
    """Compute the least seconds of every phase of a step of a planned training.

    Attributes
    ----------
    plan : TrainingPlan
        The plan: what every rank holds, sends and computes.
    machine : Machine
        The measured speeds of the machine.
    ranks_per_node : int
        Number of ranks that share a node's cores and memory.
    """

    plan: TrainingPlan
    machine: Machine
    ranks_per_node: int

    def of(self, rank: int) -> dict[str, float]:
        """Return the least seconds of each phase in :data:`PHASES` on one rank, by phase. Not collective.

        The work of layers that do not count their operations is not included.
        """
        traffic = self.plan.traffic(rank)
        passes, sent = StepPasses(traffic), traffic.sent()
        forward, backward = self._work(traffic)
        products = tensor_work(traffic) / self.machine.rate(self.ranks_per_node)
        found = {
            "forward": forward,
            "backward": backward,
            "layers' messages": self._purposes(sent, "tensor", "context") + self._windows(traffic),
            "local sums": self._passes(passes.local_sums()),
            "reduction": self._passes(passes.reduction()) + self._reduction(traffic, sent),
            "optimizer": self._passes(passes.optimizer()) + products + self._purposes(sent, "whole tensors"),
            "publication": self._publication(traffic),
            "agreement": self._purposes(sent, "samples", "norms", "control"),
            "waiting": self._bubble(traffic),
        }
        return {phase: found[phase] for phase in PHASES}

    @cached_property
    def by_rank(self) -> tuple[dict[str, float], ...]:
        """For every rank, the least seconds of each phase."""
        return tuple(self.of(rank) for rank in range(self.plan.ranks))

    @property
    def slowest(self) -> int:
        """The rank whose phases take longest in total."""
        return max(range(self.plan.ranks), key=lambda rank: sum(self.by_rank[rank].values()))

    # ------------------------------------------------------------------ parts

    def _work(self, traffic: RankTraffic) -> tuple[float, float]:
        part, samples, rate = traffic.part, sum(traffic.jobs), self.machine.rate(self.ranks_per_node)
        work = [part.work(chunk) for chunk in part.partitioned.chunks]
        forward = sum(chunk.forward for chunk in work) * samples
        return forward / rate, sum(chunk.total for chunk in work) * samples / rate - forward / rate

    def _passes(self, passes: Iterable[PassBytes]) -> float:
        alike = Counter(passes).items()
        return sum(n * self.machine.pass_seconds(p.read, p.written, self.ranks_per_node) for p, n in alike)

    def _messages(self, operation: str, sent: Sent) -> float:
        if not sent.messages:
            return 0.0
        where = "all ranks"
        if operation == "one to one":
            where = self.machine.longest_way(self.plan.ranks, self.ranks_per_node)
        return sent.messages * self.machine.seconds(operation, sent.bytes / sent.messages, where)

    def _windows(self, traffic: RankTraffic) -> float:
        """Return the seconds in which tensor and context group copy, sum and wait at barriers in their windows."""
        found = 0.0
        for group, calls in traffic.calls:
            for call, times in calls.items() if group.shares_memory else ():
                copies = call.copies(group.rank, group.size)
                moved = sum(self.machine.pass_seconds(*each, self.ranks_per_node) for each in copies.passes)
                found += times * (moved + copies.barriers * self.machine.seconds("barrier", 0))
        return found

    def _purposes(self, sent: dict[str, Sent], *names: str) -> float:
        return sum(self._messages(_OPERATIONS.get(name, "gather"), sent[name]) for name in names if name in sent)

    def _exchanges(self, operation: str, exchanges: Iterable[ExchangeCost]) -> float:
        alike = Counter(e.sent for e in exchanges).items()
        return sum(count * self._messages(operation, sent) for sent, count in alike)

    def _reduction(self, traffic: RankTraffic, sent: dict[str, Sent]) -> float:
        """Return the seconds of the messages that sum gradients over ranks, and of a node's barriers before sums."""
        rows = self._exchanges("exchange", traffic.reductions()) + self._exchanges("gather", traffic.replications())
        times = 1
        if traffic.training.step.waves:
            waves = traffic.training.step.wave_plan(traffic.grid).waves
            times = len(waves) * len(traffic.part.layout.units)
        return rows + self._purposes(sent, "ties") + times * self._barrier(traffic)

    def _publication(self, traffic: RankTraffic) -> float:
        """Return the seconds of messages that send parameters and gather units, and of one barrier of a node."""
        found = self._exchanges("gather", traffic.publications()) if traffic.training.row.shard_optimizer else 0.0
        return found + self._exchanges("gather", traffic.gathers()) + self._barrier(traffic)

    def _barrier(self, traffic: RankTraffic) -> float:
        return self.machine.seconds("barrier", 0) if traffic.grid.node.size > 1 else 0.0

    def _bubble(self, traffic: RankTraffic) -> float:
        """Return the seconds in which this rank's stage is idle in the simulated pipeline."""
        simulation = self.plan.simulation
        if simulation is None:
            return 0.0
        return simulation.makespan - simulation.busy[traffic.part.partitioned.stage]
