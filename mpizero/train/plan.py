"""Implement ``mpizero plan``: predict memory, messages and time of a training without starting its ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from mpizero import nn
from mpizero._util.checks import positive, whole
from mpizero.errors import ConfigError
from mpizero.layout import Simulation
from mpizero.nn.models import unfrozen
from mpizero.planning import TrainingPlan
from mpizero.planning.machine_file import Machine
from mpizero.planning.time_floors import TimeFloors
from mpizero.sharding.config import placement
from mpizero.sharding.partition import blocks_of
from mpizero.train.config.build import build_optimizer, build_sharding, model_and_sample
from mpizero.train.config.checks import check_option, optional
from mpizero.train.config.components import VectorMethodSection
from mpizero.train.config.schema import Config

if TYPE_CHECKING:
    from mpizero.comm import Communicator

#: Prefixes of units that a number of bytes may have.
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
#: A stage with more than this many times the mean work of all stages gets a warning.
_UNEVEN_WORK = 1.25
#: Floating-point operations per second of a rank, if neither ``--gflops`` nor ``--machine`` is given.
DEFAULT_RATE = 5e10


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as "64e9", "64G", "64 GB" or "60GiB".

    Not collective.

    Raises
    ------
    ConfigError
        If the text is not a number of bytes.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([kMGT]?i?)B?\s*", text)
    try:
        if match and (size := float(match[1]) * UNITS[match[2]]) >= 1:
            return int(size)
    except (KeyError, ValueError, OverflowError):
        pass
    raise ConfigError(f"--memory-per-node {text}: must be a number of bytes, for example 64e9, 64GB or 60GiB")


@dataclass(frozen=True)
class PlanRequest:
    """Hold the arguments of ``mpizero plan``.

    Attributes
    ----------
    ranks : int
        Number of ranks that the training would have.
    ranks_per_node : int or None
        Number of ranks on each node; None puts all ranks on one node.
    memory_per_node : int or None
        Memory of a node in bytes; None sets no limit.
    rate : float
        Floating-point operations per second of one rank; ignored if ``machine`` is given, which has a measured rate.
    machine : Machine or None
        Measured speeds of a machine, from which the plan predicts seconds; None predicts none.
    """

    ranks: int
    ranks_per_node: int | None = None
    memory_per_node: int | None = None
    rate: float = DEFAULT_RATE
    machine: Machine | None = None

    @property
    def together(self) -> int:
        """Number of ranks on a node."""
        return min(self.ranks_per_node or self.ranks, self.ranks)

    def __post_init__(self) -> None:
        """Raise :class:`ConfigError` for numbers out of range."""
        check_option("--ranks", self.ranks, whole(1))
        check_option("--ranks-per-node", self.ranks_per_node, optional(whole(1)))
        check_option("--gflops", self.rate / 1e9, positive)

    def message(self, nbytes: int) -> float:
        """Return the seconds that a message of ``nbytes`` bytes takes between pipeline stages; 0 without a machine."""
        if self.machine is None:
            return 0.0
        return self.machine.seconds("one to one", nbytes, self.machine.longest_way(self.ranks, self.together))


def plan(config: Config, request: PlanRequest) -> PlannedRun:
    """Plan the training that a configuration describes, in this process alone.

    The data are opened only for a multi-layer perceptron, whose numbers of inputs and outputs are taken from them.

    Raises
    ------
    ConfigError, DataError
        For every error in configuration or data for which the training itself would raise it.
    """
    config.parallel.check_ranks(request.ranks)
    if request.machine is not None and isinstance(config.optimizer, VectorMethodSection):
        raise config.optimizer.reject("name", "plan --machine expects no seconds of it: what a step computes varies")
    config, model, x, y = model_and_sample(config)
    parallel = config.parallel
    sharding = build_sharding(config, cast("Communicator", "self"))  # whose ranks are never asked for
    training = TrainingPlan(
        model=model,
        optimizer=build_optimizer(config),
        config=sharding,
        loss_scale=sharding.loss_scale(None) is not None,
        row=placement(parallel.strategy),
        parallel_layout=parallel.parallel_layout(),
        ranks=request.ranks,
        ranks_per_node=request.ranks_per_node,
        global_batch=config.train.global_batch,
        x=x,
        y=y,
        rate=request.rate if request.machine is None else request.machine.rate(request.together),
        message=request.message,
    )
    return PlannedRun(config, request, training)


@dataclass(frozen=True)
class PlannedRun:
    """Hold a planned training, and derive from it warnings, seconds and whether it fits into memory.

    Attributes
    ----------
    config : Config
        Configuration of the planned training.
    request : PlanRequest
        The number of ranks, the nodes and the machine of the plan.
    training : TrainingPlan
        Memory, messages and work of every rank.
    """

    config: Config
    request: PlanRequest
    training: TrainingPlan

    @cached_property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model; tied parameters count once."""
        blocks = blocks_of(self.training.model).values()
        return sum(spec.size for specs in blocks for spec in specs if spec.tied is None)

    @property
    def simulation(self) -> Simulation | None:
        """Simulated timetable of the pipeline; None without a pipeline."""
        return self.training.simulation

    @cached_property
    def floors(self) -> TimeFloors | None:
        """The predicted seconds of every rank; None without ``machine``, or if a layer's operations are not known."""
        machine = self.request.machine
        counted = all(rank.operations is not None for rank in self.training.by_rank)
        return None if machine is None or not counted else TimeFloors(self.training, machine, self.request.together)

    @cached_property
    def missing(self) -> int:
        """Number of bytes by which the fullest node exceeds ``memory_per_node``; 0 if it fits or there is no limit."""
        limit = self.request.memory_per_node
        return 0 if limit is None else max(0, max(self.training.node_bytes.values()) - limit)

    @property
    def refusal(self) -> str:
        """Error message that says why the training does not fit, and which settings would help."""
        nodes = self.training.node_bytes
        node = max(nodes, key=lambda n: nodes[n])
        return (
            f"does not fit: node {node} needs {nodes[node]:,} bytes, --memory-per-node allows "
            f"{self.request.memory_per_node:,}, {self.missing:,} too few; {self._help}"
        )

    @property
    def _help(self) -> str:
        """Name the settings by which the training would take less memory."""
        ways = []
        fullest = max(self.training.by_rank, key=lambda plan: plan.bytes)
        part = max(fullest.memory, key=lambda name: fullest.memory[name].mine)
        if part in ("activations", "working arrays") and self.config.train.micro_batch != 1:
            ways.append("a smaller train.micro_batch")
        if part == "activations" and not getattr(self.config.model, "activation_checkpointing", True):
            ways.append("model.activation_checkpointing = true")
        if not self.training.row.shard_parameters and part not in ("activations", "working arrays"):
            ways.append('a higher stage of parallel.strategy (up to "zero3")')
        ways.append("more nodes, or more stages or tensor parts")
        return f"its fullest rank holds most in {part}: " + ", ".join(ways)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about legal settings that are rarely useful, each with advice."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        training = self.training
        if (lacking := training.not_counted or training.unseen) and self.request.memory_per_node is not None:
            yield f"what is not counted must fit --memory-per-node, too: {lacking}"
        if isinstance(self.config.optimizer, VectorMethodSection):
            yield f"the small messages of {self.config.optimizer.name}'s dot products are not counted: they vary"
        axes, grains = training.axes, training.grains
        if idle := training.idle:
            who = f"{axes.data} {'ranks' if axes.size == axes.data else 'replicas'}"
            yield (
                f"ranks {_listed(idle)} have nothing to compute: {who} share {grains.count} grains; give a smaller "
                "train.micro_batch or train.accumulate, or a larger train.global_batch"
            )
        if axes.pipeline > 1:
            yield from self._pipeline_warnings()
        if training.places.uneven:
            yield (
                "nodes have unequal numbers of a data group's ranks, so no memory is shared; choose --ranks as a "
                "multiple of --ranks-per-node"
            )
        elif axes.tensor > 1 and not training.places.inside_nodes("tensor"):
            yield (
                "tensor groups reach over nodes, and every layer waits for their messages; "
                'parallel.order = "pipeline,data,tensor" puts them on neighbouring ranks'
            )

        if (machine := self.request.machine) is not None:
            yield from self._machine_warnings(machine)

    def _machine_warnings(self, machine: Machine) -> Iterator[str]:
        train, model, nodes = self.config.train, self.training.model, len(self.training.node_bytes)
        dtype = np.dtype(model.dtype).name
        if self.training.ranks > 1 and not machine.messages:
            yield "the machine file was measured on one rank: messages are expected to take no time"
        elif nodes > machine.nodes == 1:
            yield "the machine file was measured on one node: messages between nodes are expected to take as inside"
        if (machine.threads, machine.dtype) != (train.threads, dtype):
            yield (
                f"the machine file was measured with {machine.threads} threads a rank in {machine.dtype}, this "
                f"training has {train.threads} and {dtype}"
            )
        if isinstance(unfrozen(model), nn.GPT):
            mine = (self.training.training.step.largest * model.sequence, model.dim)
            found = next(((p.rows, p.inner) for p in machine.products if p.linear), mine)
            if found != mine:
                yield (
                    f"the machine file's products have {found[0]} rows and {found[1]} features, this training's "
                    f"{mine[0]} and {mine[1]}: mpizero bench machine CONFIG.toml measures its own"
                )

    def _pipeline_warnings(self) -> Iterator[str]:
        training = self.training
        micro, stages = self.training.micro_batches, training.axes.pipeline
        if training.row.shard_parameters:
            yield (
                f"a pipeline with zero3 gathers every unit for every pass, {2 * micro} times a step or more; "
                'parallel.strategy = "zero1" gathers once'
            )
        simulation = self.simulation
        assert simulation is not None
        if micro < stages:
            yield (
                f"{micro} micro-batches cannot keep {stages} stages busy: the bubble is "
                f"{100 * simulation.bubble_share:.0f} %; give a smaller train.micro_batch or fewer replicas"
            )
        if (padded := simulation.schedule.micro_batches) > micro:
            yield (
                f"{simulation.schedule.name} pads {micro} micro-batches to {padded}: choose train.global_batch and "
                f"train.micro_batch so that a replica's number of micro-batches is a multiple of {stages}"
            )
        mean = sum(simulation.busy) / stages
        if max(simulation.busy) > _UNEVEN_WORK * mean:
            stage = simulation.busy.index(max(simulation.busy))
            yield (
                f"stage {stage} has {max(simulation.busy) / mean:.2f} times the mean work of a stage; fewer stages or "
                "other parallel.cuts may balance it"
            )


def _listed(ranks: Sequence[int]) -> str:
    """Format ascending numbers as text with runs joined, for example "0, 2 to 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)
