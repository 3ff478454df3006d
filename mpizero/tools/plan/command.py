"""Implement ``mpizero plan``: predict memory, messages and time of a training without starting its ranks.

:func:`plan` plans the training of a configuration for the ranks and the machine in a :class:`PlanRequest`. The
:class:`PlannedRun` that it returns derives warnings and seconds, and whether the training fits into memory.
:func:`report` formats the plan as text for people, :func:`as_json` as JSON for programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpizero import nn
from mpizero._util.checks import positive, whole
from mpizero._util.settings import check_option, optional
from mpizero._util.text import PREFIXES, aligned, amount, columns
from mpizero.errors import ConfigError
from mpizero.guard.reports import rank_ranges
from mpizero.layout import Simulation
from mpizero.layout.schedules import timetable
from mpizero.nn.models import unfrozen
from mpizero.sharding.config import placement
from mpizero.sharding.exactness import exactness
from mpizero.sharding.partition import blocks_of
from mpizero.tools.doctor import counted
from mpizero.tools.plan.plan import PARTS, RankPlan, TrainingPlan
from mpizero.tools.plan.time import Machine, TimeFloors
from mpizero.tools.plan.traffic import PURPOSES
from mpizero.train.config.build import build_optimizer, build_settings, model_and_sample
from mpizero.train.config.schema import RunConfig
from mpizero.types import BlockModel

if TYPE_CHECKING:
    pass


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


def plan(config: RunConfig, request: PlanRequest) -> PlannedRun:
    """Plan the training that a configuration describes, in this process alone.

    The data are opened, except for a GPT that is trained by a stochastic optimizer.

    Raises
    ------
    ConfigError, DataError
        For every error in configuration or data that the training itself would raise.
    """
    config.parallel.check_ranks(request.ranks)
    if request.machine is not None and config.optimizer.kind.needs_vectors:
        raise config.optimizer.reject("name", "plan --machine expects no seconds of it: what a step computes varies")
    config, model, x, y = model_and_sample(config)
    parallel = config.parallel
    settings = build_settings(config)
    training = TrainingPlan(
        model=model,
        optimizer=build_optimizer(config),
        config=settings,
        mesh=parallel.mesh("self"),  # its number of ranks is never used
        loss_scale=settings.loss_scale(None) is not None,
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
    config : RunConfig
        Configuration of the planned training.
    request : PlanRequest
        The number of ranks, the nodes and the machine of the plan.
    training : TrainingPlan
        Memory, messages and work of every rank.
    """

    config: RunConfig
    request: PlanRequest
    training: TrainingPlan

    @cached_property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model; tied parameters count once."""
        blocks = blocks_of(self.training.model).values()
        return sum(spec.size for specs in blocks for spec in specs if spec.tied is None)

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
        """Error message that says why the training does not fit into memory, and which settings would help."""
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
        part = max(fullest.memory, key=lambda name: fullest.memory[name].per_rank)
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
        if self.config.optimizer.kind.needs_vectors:
            yield f"the small messages of {self.config.optimizer.name}'s dot products are not counted: they vary"
        axes, grains = training.axes, training.grains
        if idle := training.idle:
            ranks = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in rank_ranges(idle))
            who = f"{axes.data} {'ranks' if axes.size == axes.data else 'replicas'}"
            yield (
                f"ranks {ranks} have nothing to compute: {who} share {grains.count} grains; give a smaller "
                "train.micro_batch or train.accumulate, or a larger train.global_batch"
            )
        if axes.pipeline > 1:
            yield from self._pipeline_warnings()
        if training.planned_ranks.uneven:
            yield (
                "nodes have unequal numbers of a data group's ranks, so no memory is shared; choose --ranks as a "
                "multiple of --ranks-per-node"
            )
        elif axes.tensor > 1 and not training.planned_ranks.inside_nodes("tensor"):
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
            needed = (self.training.training.step.largest * model.sequence, model.dim)
            measured = next(((p.rows, p.inner) for p in machine.products if p.linear), needed)
            if measured != needed:
                yield (
                    f"the machine file's products have {measured[0]} rows and {measured[1]} features, this training's "
                    f"{needed[0]} and {needed[1]}: mpizero bench machine CONFIG.toml measures its own"
                )

    def _pipeline_warnings(self) -> Iterator[str]:
        training = self.training
        micro, stages = training.micro_batches, training.axes.pipeline
        if training.row.shard_parameters:
            yield (
                f"a pipeline with zero3 gathers every unit for every pass, {2 * micro} times a step or more; "
                'parallel.strategy = "zero1" gathers once'
            )
        simulation = training.simulation
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


#: The most columns that a printed timetable has.
_COLUMNS = 150


def report(plan: PlannedRun, *, with_timetable: bool = False) -> str:
    """Format the plan as text for people; add the pipeline's timetable if ``with_timetable``."""
    parts = [_head(plan), _memory(plan), _messages(plan), _work(plan)]
    if plan.floors is not None:
        parts.append(_seconds(plan, plan.floors))
    if with_timetable and (simulation := plan.training.simulation) is not None:
        parts.append(timetable(simulation, None if _short(simulation) else simulation.makespan / _COLUMNS))
    parts += [f"warning: {warning}" for warning in plan.warnings]
    return "\n\n".join(parts)


def _short(simulation: Simulation) -> bool:
    """Tell whether the pipeline's timetable fits on a line if its shortest instruction is one column wide."""
    shortest = min(end - start for events in simulation.events for _, start, end in events if end > start)
    return simulation.makespan / shortest <= _COLUMNS / 4


def _head(plan: PlannedRun) -> str:
    training, config = plan.training, plan.config
    grains, nodes = training.grains, len(training.node_bytes)
    where = f"on {nodes} node{'s' if nodes > 1 else ''}"
    if config.parallel.splits_model:
        where = f"{training.ranks} ranks {where}"
    return (
        f"{config.model.described} with {plan.parameter_count:,} {np.dtype(training.model.dtype).name} parameters, "
        f"{config.optimizer.name}; "
        f"{config.parallel.describe(training.ranks)}; {where}\n"
        f"{training.global_batch} samples a step in {grains.described(config.train.accumulate)}"
        f"{'' if config.train.wire is None else f', whose sums are rounded to {config.train.wire}'}\n"
        f"results: {exactness(training.tiles, training.within_rounding)}"
    )


class _Row(NamedTuple):
    """Hold one line of a table: the rank with the largest sum of ``sizes`` on a stage and for some parts of the model.

    ``parts`` has the first and the last number of neighbouring parts that have the same ``sizes``. A part is what one
    tensor and context rank holds; parts are numbered by tensor rank, then context rank.
    """

    stage: int
    parts: tuple[int, int]
    rank: RankPlan
    sizes: Mapping[str, int]


def _rows(plan: PlannedRun, sizes_of: Callable[[RankPlan], Mapping[str, int]]) -> list[_Row]:
    """Find, for each stage and part (what a tensor and context rank holds), the rank with the largest sum of sizes.

    ``sizes_of`` returns the sizes of a rank. Neighbouring parts of a stage with equal sizes become one line of the
    table.
    """
    largest: dict[tuple[int, int], RankPlan] = {}
    for rank in plan.training.by_rank:
        kind = (
            rank.coordinates.pipeline,
            rank.coordinates.tensor * plan.training.axes.context + rank.coordinates.context,
        )
        if kind not in largest or sum(sizes_of(rank).values()) > sum(sizes_of(largest[kind]).values()):
            largest[kind] = rank
    rows: list[_Row] = []
    for (stage, part), rank in sorted(largest.items()):
        row = _Row(stage, (part, part), rank, sizes_of(rank))
        if rows and (rows[-1].stage, rows[-1].sizes) == (stage, row.sizes):
            rows[-1] = rows[-1]._replace(parts=(rows[-1].parts[0], part))
        else:
            rows.append(row)
    return rows


def _name(plan: PlannedRun, row: _Row) -> str:
    axes, (first, last) = plan.training.axes, row.parts
    names = [f"stage {row.stage}"] if axes.pipeline > 1 else []
    if axes.tensor * axes.context > 1:
        several = f"{first} to {last}" if first < last else str(first)
        split = " x ".join(axis for axis in ("tensor", "context") if getattr(axes, axis) > 1)
        shared = "domain" if plan.config.parallel.domain else split
        names.append(f"{shared} part {several}")
    return ", ".join(names)


def _memory(plan: PlannedRun) -> str:
    rows = _rows(plan, lambda rank: {part: size.per_rank for part, size in rank.memory.items()})
    text = _table(plan, "memory of the fullest rank", rows, PARTS)
    nodes, windows, untried = plan.training.node_bytes, plan.training.node_windows, plan.training.not_counted
    node = max(nodes, key=lambda n: nodes[n])
    lacking = f"{unseen}, " if (unseen := plan.training.unseen) else ""
    lacking += "Python and its libraries; activations and working arrays were found by trying one block of each kind"
    if untried:
        lacking = f"arrays of the model's own passes ({untried}); Python and its libraries"
    if plan.config.train.device != "cpu":
        text += "\n" + _table(plan, "on the GPU of the fullest rank", _rows(plan, lambda r: r.device_memory), PARTS)
        text += (
            "\nranks that share a GPU add up; not counted there: CUDA itself, memory that CuPy keeps, operands in 16 "
            "bits, and that attention takes more scores at once than the block that was tried"
        )
    fullest = f"{amount(nodes[node])}B, of it {amount(windows[node])}B in shared windows (/dev/shm)"
    return f"{text}\nfullest node ({node}): {fullest}\nnot counted: {lacking}"


def _messages(plan: PlannedRun) -> str:
    rows = _rows(plan, lambda rank: {purpose: sent.bytes for purpose, sent in rank.sent.items()})
    text = _table(plan, "bytes that the busiest rank sends a step", rows, PURPOSES, messages=True)
    return f"{text}\nall ranks together {amount(sum(rank.bytes_sent for rank in plan.training.by_rank))}B"


def _work(plan: PlannedRun) -> str:
    training = plan.training
    lines = [_operations(plan)]
    if (simulation := training.simulation) is not None:
        fractions = ", ".join(f"{100 * fraction:.1f} %" for fraction in simulation.idle)
        caches = ", ".join(map(str, simulation.caches))
        lines.append(
            f"{simulation.schedule.name} with {training.micro_batches} micro-batches a replica: bubble "
            f"{100 * simulation.bubble_share:.1f} % of the step; stages idle {fractions}; caches held {caches}"
        )
    return "\n".join(lines)


def _operations(plan: PlannedRun) -> str:
    every = [rank.operations for rank in plan.training.by_rank]
    if any(work is None for work in every):
        blocks = isinstance(plan.training.model, BlockModel)
        reason = "a layer does not count its operations (operations(shape) of mpizero.nn.Layer)"
        return f"work: not known, {reason if blocks else plan.training.not_counted}"
    counts = [work or 0 for work in every]
    most, simulation, rate = max(counts), plan.training.simulation, plan.training.rate
    seconds = most / rate if simulation is None else simulation.makespan
    source = "--gflops" if plan.request.machine is None else "--machine"
    return (
        f"work a step: {amount(sum(counts))}FLOP, the busiest rank {amount(most)}FLOP; at {rate / 1e9:.4g} GFLOP/s a "
        f"rank ({source}) products alone take {seconds:.3g} s"
    )


def _seconds(plan: PlannedRun, floors: TimeFloors) -> str:
    """Format the predicted time of a step and of its phases on the slowest rank; ``floors`` has the seconds by rank."""
    machine, rank = floors.machine, floors.slowest
    parts = floors.by_rank[rank]
    total = sum(parts.values())
    rows = [[phase, f"{1e3 * taken:.3f}", f"{100 * taken / total:.1f} %"] for phase, taken in parts.items() if taken]
    return (
        f"expected step on {machine.host} as measured {machine.date} by {counted(machine.ranks, 'rank')}: "
        f"{1e3 * total:.4g} ms, {plan.training.global_batch / total:.4g} samples/s; the slowest rank ({rank}), ms\n"
        f"{columns([*rows, ['all', f'{1e3 * total:.3f}', '']])}\n"
        "not counted: what layers do besides products (norms, activations, softmax), and Python between them"
    )


def _table(plan: PlannedRun, title: str, rows: Sequence[_Row], names: Sequence[str], *, messages: bool = False) -> str:
    """Format a table of bytes, in a unit that suits the largest number; ``messages`` adds a column of their counts."""
    present = [name for name in names if any(name in row.sizes for row in rows)]
    largest = max(sum(row.sizes.values()) for row in rows)
    scale, prefix = next(((s, p) for s, p in PREFIXES if largest >= 10 * s), PREFIXES[-1])
    digits = 0 if scale == 1.0 else 1
    lines = [["", "rank", *present, "all", *["messages"] * messages]]
    for row in rows:
        sizes = [*(row.sizes.get(name, 0) for name in present), sum(row.sizes.values())]
        cells = [f"{size / scale:,.{digits}f}" for size in sizes]
        lines.append([_name(plan, row), str(row.rank.rank), *cells, *[f"{row.rank.messages:,}"] * messages])
    text = aligned(lines) if any(line[0] for line in lines) else aligned([line[1:] for line in lines], ())
    return "\n".join([f"{title}, {prefix}B", *text])


def as_json(plan: PlannedRun) -> str:
    """Format the plan as one line of JSON for programs."""
    return json.dumps(dict(_entries(plan)), allow_nan=False)


def _entries(plan: PlannedRun) -> Iterator[tuple[str, Any]]:
    training = plan.training
    yield "parameter_count", plan.parameter_count
    yield "axes", dict(training.axes.sizes)
    if plan.config.parallel.domain:
        yield "domain", list(plan.config.parallel.domain)
    yield "strategy", plan.config.parallel.strategy
    yield "tiles", training.tiles
    yield "within_rounding", list(training.within_rounding)
    yield "grains", {"count": training.grains.count, "samples": training.grains.size}
    yield "ranks", [_rank(rank) for rank in training.by_rank]
    nodes, windows = training.node_bytes, training.node_windows
    yield "nodes", [{"node": n, "bytes": nodes[n], "window_bytes": windows[n]} for n in sorted(nodes)]
    yield "not_counted", training.not_counted or None
    yield "unseen", training.unseen or None
    yield "pipeline", _pipeline(plan)
    yield "expected", _expected(plan)
    yield "idle_ranks", list(training.idle)
    yield "warnings", list(plan.warnings)
    yield "memory_per_node", plan.request.memory_per_node
    yield "fits", not plan.missing


def _expected(plan: PlannedRun) -> dict[str, Any] | None:
    if (floors := plan.floors) is None:
        return None
    total = sum(floors.by_rank[floors.slowest].values())
    rates = {"seconds": total, "samples_per_second": plan.training.global_batch / total, "rank": floors.slowest}
    return {**rates, "ranks": list(floors.by_rank)}


def _rank(rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "node": rank.node,
        **rank.coordinates._asdict(),
        "bytes": rank.bytes,
        "memory": {part: size._asdict() for part, size in rank.memory.items()},
        "device_memory": rank.device_memory,
        "bytes_sent": rank.bytes_sent,
        "messages": rank.messages,
        "sent": {purpose: sent._asdict() for purpose, sent in rank.sent.items()},
        "samples": rank.samples,
        "micro_batches": rank.micro_batches,
        "operations": rank.operations,
        "caches": rank.caches,
    }


def _pipeline(plan: PlannedRun) -> dict[str, Any] | None:
    if (simulation := plan.training.simulation) is None:
        return None
    return {
        "schedule": simulation.schedule.name,
        "micro_batches": plan.training.micro_batches,
        "seconds": simulation.makespan,
        "bubble_share": simulation.bubble_share,
        "idle": list(simulation.idle),
        "caches": list(simulation.caches),
    }
