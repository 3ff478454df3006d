"""Compare measured with planned memory and messages of each rank: ``mpizero bench memory`` of a layout or a CONFIG.

:func:`measure_steps` measures this rank in training steps, and :func:`table_rows` compares every rank with the plan.
:func:`measure_layout` uses both for the built-in model and the layouts in a :class:`LayoutRequest` (options
``--pipeline``, ``--tensor``, ``--context``), and :func:`measure_config` for a configuration's model (``CONFIG``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product, repeat
from typing import Any

import numpy as np

from mpizero import nn, optim
from mpizero._util.checks import whole
from mpizero._util.settings import check_option
from mpizero.comm import Communicator, ProcessGrid
from mpizero.comm.agreement import all_ranks
from mpizero.comm.mesh import group_buffers
from mpizero.data import batches
from mpizero.layout.flat import FlatLayout
from mpizero.optim.elementwise import state_size, with_copies
from mpizero.sharding import Config, Model, distribute
from mpizero.sharding.config import placement
from mpizero.sharding.partition import blocks_of
from mpizero.tools.bench.machine import node_leaders, ranks_per_node
from mpizero.tools.bench.strategies import CacheMeter, MemoryRequest, idle_size, require_room, watch
from mpizero.tools.plan.command import PlanRequest, plan
from mpizero.tools.plan.plan import RankPlan, TrainingPlan
from mpizero.train.config.build import (
    build_mesh,
    build_model,
    build_optimizer,
    build_settings,
    build_source,
    model_and_sample,
    users_modules,
    with_batch,
)
from mpizero.train.config.schema import RunConfig
from mpizero.train.config.sections import STRATEGIES, ParallelSection
from mpizero.train.machine import proportional
from mpizero.types import Array

#: Kinds of memory that have a column of their own; the rest of what a rank holds is in the column "buffers".
PARTS = ("parameters", "gradients", "optimizer state", "activations")
_BUFFERS = ("buffers", "exchange buffers", "group buffers")


@dataclass(frozen=True)
class RankRow:
    """Hold the memory and messages of one rank, measured and planned; sizes are in bytes.

    Attributes
    ----------
    rank : int
        The rank's number in the world.
    here : dict of str to int
        The rank's coordinate on every axis of the process grid.
    held, planned : dict of str to int
        Bytes by kind of memory ("parameters", "gradients", "optimizer state", "activations", "buffers"): counted at
        allocation, and predicted by the plan.
    pss_at_rest, pss_in_step : int
        How much larger the rank's proportional set size is after training than before. ``pss_at_rest`` is measured
        after freed memory has been returned to the system, ``pss_in_step`` before. So ``pss_in_step`` includes the
        memory that the activations, working arrays and messages of a step took.
    planned_working : int
        Largest number of bytes that the plan predicts, in addition to ``planned``, for working arrays of blocks and
        messages during a step.
    sent, planned_sent : int
        Bytes that the rank sends to other ranks in a step: counted in the last step, and planned.
    messages, planned_messages : int
        Number of messages that the rank sends in a step: counted in the last step, and planned.
    """

    rank: int
    here: dict[str, int]
    held: dict[str, int]
    planned: dict[str, int]
    pss_at_rest: int
    pss_in_step: int
    planned_working: int
    sent: int
    planned_sent: int
    messages: int
    planned_messages: int


def measure_steps(
    comm: Communicator,
    placed: Callable[[], AbstractContextManager[Model]],
    feed: Callable[[Model], Iterator[tuple[Any, Any]]],
    steps: int,
) -> dict[str, Any]:
    """Train one step to warm up and ``steps`` steps, and return what was measured on this rank.

    Collective over ``comm``. ``placed()`` makes the sharded model in a ``with`` block, ``feed(model)`` yields this
    rank's samples of each step. Keys of the result are "here" (coordinates on the axes of the process grid), "held"
    (bytes by kind of memory), "pss" (growth of the proportional set size at rest and in a step), "sent" (bytes and
    messages of the last step), "parameters" (their number) and "node" (world rank of the first rank on the same node).
    """
    node, before = node_leaders(comm)[comm.rank], idle_size(comm)
    with placed() as sharded:
        grid, engine = sharded._engine.grid, sharded._engine
        cache = watch(engine) if engine.block_model else CacheMeter()
        stream = feed(sharded)
        sharded.train(*next(stream))  # stages tell each other the shapes of messages once
        for _ in range(steps):
            x, y = next(stream)
            sent = _sent(grid)
            sharded.train(x, y)
        now = _sent(grid)
        comm.barrier("bench")
        in_step = proportional()
        return {
            "here": grid.coordinates._asdict(),
            "held": {**engine.memory.kinds(), **group_buffers(grid), "activations": cache.peak},
            "pss": (idle_size(comm) - before, in_step - before),
            "sent": [b - a for a, b in zip(sent, now, strict=True)],
            "parameters": sharded.parameter_count,
            "node": node,
        }


def table_rows(measured: Sequence[dict[str, Any]], plan: TrainingPlan) -> tuple[RankRow, ...]:
    """Return one row for each rank, with its measured and its planned figures. Not collective.

    ``measured`` has what :func:`measure_steps` returned on every rank. Activations are left out if the plan lacks them,
    or if another library allocates them, because :class:`CacheMeter` does not count those.
    """
    rows = tuple(_row(measurement, planned) for measurement, planned in zip(measured, plan.by_rank, strict=True))
    for row in rows if plan.not_counted or plan.unseen else ():
        for sizes in (row.held, row.planned):
            del sizes["activations"]
    return rows


def _row(measured: dict[str, Any], plan: RankPlan) -> RankRow:
    (sent, messages), (at_rest, in_step) = measured["sent"], measured["pss"]
    planned = {part: size.per_rank for part, size in plan.memory.items()}
    return RankRow(
        rank=plan.rank,
        here=measured["here"],
        held=_by_part(measured["held"]),
        planned=_by_part(planned),
        pss_at_rest=at_rest,
        pss_in_step=in_step,
        planned_working=planned.get("working arrays", 0) + planned.get("messages", 0),
        sent=sent,
        planned_sent=plan.bytes_sent,
        messages=messages,
        planned_messages=plan.messages,
    )


def _by_part(sizes: dict[str, int]) -> dict[str, int]:
    return {**{part: sizes.get(part, 0) for part in PARTS}, "buffers": sum(sizes.get(part, 0) for part in _BUFFERS)}


def _sent(grid: ProcessGrid) -> tuple[int, int]:
    counters = [communicator.counters for communicator in (grid.world, *grid.communicators)]
    return sum(c.bytes_sent for c in counters), sum(c.messages for c in counters)


#: Layers and attention heads of the model; a pipeline with more chunks, or a larger tensor group, raises them.
LAYOUT_LAYERS, HEADS = 8, 8
SEQUENCE = 128
_COLUMNS = (
    ("", "parameters"),
    ("", "gradients"),
    ("optimizer", "state"),
    ("", "buffers"),
    ("all", "at rest"),
    ("PSS", "at rest"),
    ("acti-", "vations"),
    ("all", "in a step"),
    ("PSS", "in a step"),
    ("sent", "a step"),
    ("messages", "a step"),
)
#: Most bytes per parameter, six float32: value, gradient, a micro-batch's gradient, two moments, one partial sum.
_WORST_LAYOUT_BYTES = 24


@dataclass(frozen=True)
class LayoutRequest:
    """Describe the model, layout and steps to measure.

    Attributes
    ----------
    memory : MemoryRequest
        The number of parameters, the strategies, whether the ranks of a node share memory, and the number of steps.
    layout : ParallelSection
        How the model is split over ranks. Its strategy is ignored: each strategy in :attr:`memory` is measured.
    micro_batches : int
        Number of micro-batches, of one sample each, that a replica computes in a step.
    """

    memory: MemoryRequest
    layout: ParallelSection
    micro_batches: int

    def __post_init__(self) -> None:
        """Raise ConfigError for a number of micro-batches below 1."""
        check_option("--micro-batches", self.micro_batches, whole(1))

    def model(self, parameters: int) -> nn.GPT:
        """Return a GPT that has at least ``parameters`` parameters and that the layout can split.

        Not collective.
        """
        layers = max(LAYOUT_LAYERS, self.layout.chunks)
        heads = self.layout.tensor * math.ceil(HEADS / self.layout.tensor)
        width = math.sqrt(parameters / (12 * layers))
        return nn.GPT(
            dim=heads * max(1, math.ceil(width / heads)), layers=layers, heads=heads, sequence=SEQUENCE, seed=1
        )


@dataclass(frozen=True)
class LayoutTable:
    """Hold what was measured and planned on all ranks for one strategy with shared or private memory.

    Attributes
    ----------
    memory : str
        "shared" if the ranks of a node share memory, else "private".
    strategy, layout : str
        The strategy's name, as in the configuration; a description of the parallel layout.
    parameters : int
        Number of parameters of the whole model.
    training : str
        A description of the model, the optimizer and the batch.
    not_counted : str
        Why the plan has no activations and working arrays; "" if it has them.
    rows : tuple of RankRow
        One row of the table for each rank.
    """

    memory: str
    strategy: str
    layout: str
    parameters: int
    training: str
    not_counted: str
    rows: tuple[RankRow, ...]


def measure_layout(
    request: LayoutRequest, comm: Communicator, tell: Callable[[str], None] = lambda line: None
) -> list[LayoutTable]:
    """Train with every requested strategy and kind of memory, and return one table for each, on rank 0.

    Other ranks get an empty list. Collective over ``comm``. On rank 0, ``tell`` is called with a line of text before
    each run.
    """
    wanted, layout = request.memory, request.layout
    with all_ranks(comm):
        copies = comm.size // (layout.pipeline * layout.tensor) if False in wanted.shared else 2
        require_room(wanted.parameters, _WORST_LAYOUT_BYTES * copies * wanted.parameters, comm.size)
        model, small = request.model(wanted.parameters), request.model(1)
    tables = list[LayoutTable]()
    for shared, strategy in product(wanted.shared, wanted.strategies):
        parallel = replace(layout, strategy=strategy, share_node_memory=shared)
        run, before = (_LayoutRun(request, parallel, comm, chosen) for chosen in (model, small))
        tables += _tables(run, wanted.steps, before, tell)
    return tables


def _tables(
    run: _LayoutRun | _ConfigRun, steps: int, before: _LayoutRun | _ConfigRun | None, tell: Callable[[str], None]
) -> list[LayoutTable]:
    """Measure and plan the layout of ``run``; return a list with its table (on rank 0; else an empty one). Collective.

    Before that, one step of the layout of ``before``, unless it is None, loads libraries and kernels, and allocates the
    buffers that every run needs.
    """
    comm, layout = run.comm, run.parallel.describe(run.comm.size)
    memory = "shared" if run.parallel.share_node_memory else "private"
    if comm.rank == 0:
        tell(f"{layout}, {memory} memory, {comm.size} ranks")
    if before is not None:
        before.measure(1)
    measured = comm.allgather_object(run.measure(steps), "bench")
    tables = []
    with all_ranks(comm):
        if comm.rank == 0:
            count = measured[0]["parameters"]
            training, planned = run.plan(count, ranks_per_node([measurement["node"] for measurement in measured]))
            lacking = planned.not_counted or ("another library keeps them" if planned.unseen else "")
            rows = table_rows(measured, planned)
            tables.append(LayoutTable(memory, run.parallel.strategy, layout, count, training, lacking, rows))
    return tables


@dataclass(frozen=True)
class _LayoutRun:
    """Train a built-in model with the strategy, and with the shared or private memory, that ``parallel`` gives."""

    request: LayoutRequest
    parallel: ParallelSection
    comm: Communicator
    model: nn.GPT

    @property
    def config(self) -> Config:
        """Settings with which each replica computes one grain (a fixed slice of the global batch) per step.

        The grain has ``request.micro_batches`` micro-batches of one sample each.
        """
        return Config(micro_batch=1, accumulate=self.request.micro_batches, **self.parallel.settings())

    def measure(self, steps: int) -> dict[str, Any]:
        """Train, and return what :func:`measure_steps` measured on this rank. Collective."""

        @contextmanager
        def placed() -> Iterator[Model]:
            strategy, adamw = self.parallel.strategy, optim.AdamW(lr=1e-4)
            with (
                self.parallel.mesh(self.comm) as mesh,
                distribute(self.model, adamw, strategy, mesh=mesh, config=self.config) as sharded,
            ):
                yield sharded

        def feed(sharded: Model) -> Iterator[tuple[Array, Array]]:
            yield from repeat(_samples(self.model, self.request.micro_batches, sharded._engine.grid.coordinates.data))

        return measure_steps(self.comm, placed, feed, steps)

    def plan(self, parameters: int, together: int | None) -> tuple[str, TrainingPlan]:
        """Return a description and the plan of this training, with ``together`` ranks on each node. Not collective."""
        x, y = _samples(self.model, 1, 0)
        planned = TrainingPlan(
            model=self.model,
            optimizer=optim.AdamW(lr=1e-4),
            config=self.config,
            mesh=self.parallel.mesh("self"),
            row=placement(self.parallel.strategy),
            parallel_layout=self.parallel.parallel_layout(),
            ranks=self.comm.size,
            ranks_per_node=together,
            global_batch=self.request.micro_batches * self.parallel.axes_of(self.comm.size).data,
            x=x,
            y=y,
        )
        batch = f"{self.request.micro_batches} micro-batches of 1 x {SEQUENCE} tokens a replica"
        return f"GPT with {parameters:,} float32 parameters, AdamW, {batch}", planned


def _samples(model: nn.GPT, count: int, replica: int) -> tuple[Array, Array]:
    """Return random token ids and targets of ``count`` samples, the same on all ranks of replica ``replica``."""
    ids = np.random.default_rng(replica).integers(0, model.vocabulary, (count, model.sequence + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def layout_report(tables: Sequence[LayoutTable]) -> str:
    """Return the results as tables for people, in MB (10^6 bytes).

    Not collective.
    """
    return "\n\n".join("\n".join(_lines(table)) for table in tables)


def _lines(table: LayoutTable) -> Iterator[str]:
    yield f"{table.layout}, {table.memory} memory: {table.training}; MB a rank"
    yield f"{'':28}" + "".join(f"{first:>11}" for first, _ in _COLUMNS)
    yield f"{'rank p t d c':28}" + "".join(f"{second:>11}" for _, second in _COLUMNS)
    for row in table.rows:
        where = " ".join(map(str, (f"{row.rank:4}", *row.here.values())))
        most = sum(row.planned.values()) + row.planned_working
        yield f"{where:20}counted " + _columns(row.held, (row.pss_at_rest, row.pss_in_step), row.sent, row.messages)
        yield f"{'':20}planned " + _columns(row.planned, (None, most), row.planned_sent, row.planned_messages)
    counted = PARTS[:-1] if table.not_counted else PARTS
    far = {p: max(abs(row.held[p] - row.planned[p]) / max(row.planned[p], 1) for row in table.rows) for p in counted}
    worst = ", ".join(f"{part} {100 * fraction:.2f} %" for part, fraction in far.items())
    if table.not_counted:
        yield f"neither counted nor planned: arrays of the model's own passes ({table.not_counted})"
    yield f"largest difference between counted and planned: {worst}"


def _columns(sizes: dict[str, int], pss: tuple[int | None, int], sent: int, messages: int) -> str:
    """Format the columns of one line of the table.

    ``sizes`` has bytes by kind of memory, ``pss`` the growth of the proportional set size in bytes at rest (None leaves
    the column empty) and in a step. ``sent`` and ``messages`` are the numbers of bytes and messages sent in a step.
    """
    activations = sizes.get("activations")
    rest = sum(sizes.values()) - (activations or 0)
    parts = (*(sizes[part] for part in PARTS[:3]), sizes["buffers"], rest, pss[0])
    moving = (activations, None if activations is None else rest + activations, pss[1], sent)
    cells = "".join(f"{'' if size is None else f'{size / 1e6:.3f}':>11}" for size in (*parts, *moving))
    return f"{cells}{messages:11}"


def layout_json(tables: Sequence[LayoutTable]) -> str:
    """Return the results as JSON, for programs.

    Not collective.
    """
    return json.dumps({"benchmark": "memory", "layouts": [asdict(table) for table in tables]})


def measure_config(
    config: RunConfig,
    strategies: Sequence[str] | None,
    shared: Sequence[bool],
    steps: int,
    comm: Communicator,
    tell: Callable[[str], None] = lambda line: None,
) -> list[LayoutTable]:
    """Train a configuration's model with every strategy and kind of memory, and return one table for each, on rank 0.

    Other ranks get an empty list. Collective over ``comm``. On rank 0, ``tell`` is called with a line of text before
    each run. If ``strategies`` is None, all are measured, or only the configuration's own if it splits the model.
    """
    config.parallel.check_ranks(comm.size)
    names = strategies or ((config.parallel.strategy,) if config.parallel.splits_model else STRATEGIES)
    tables = list[LayoutTable]()
    with users_modules(config):
        with all_ranks(comm):
            source, validation = build_source(config)
            config = with_batch(config, source)
        for number, (share, strategy) in enumerate(product(shared, names)):
            shard_nodes = config.parallel.shard_nodes if placement(strategy).shard_parameters else None
            parallel = replace(config.parallel, strategy=strategy, share_node_memory=share, shard_nodes=shard_nodes)
            run = _ConfigRun(replace(config, parallel=parallel), (source, validation), comm)
            tables += _tables(run, steps, None if number else run, tell)
    return tables


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the size of a checkpoint of a configuration's model: its parameters and the optimizer's arrays.

    Not collective.
    """
    with users_modules(config):
        _, model, _, _ = model_and_sample(config)
    specs = [entry.spec for entry in FlatLayout.build(blocks_of(model)).parameters]
    optimizer = with_copies(build_optimizer(config), ema=config.train.ema, masters=config.train.wire_parameters)
    elements: int = sum(spec.size + state_size(optimizer, spec) for spec in specs)
    return int(elements * np.dtype(model.dtype).itemsize)


class _ConfigRun:
    """Measure one layout of a configuration's model over ``comm``; ``sources`` are training and validation data."""

    def __init__(self, config: RunConfig, sources: tuple[Any, Any], comm: Communicator) -> None:
        self.config, self.sources, self.comm, self.parallel = config, sources, comm, config.parallel

    def measure(self, steps: int) -> dict[str, Any]:
        """Train, and return what :func:`measure_steps` measured on this rank. Collective."""
        config, train = self.config, self.config.train

        @contextmanager
        def placed() -> Iterator[Model]:
            with all_ranks(self.comm):
                model = build_model(config, *self.sources)
            with (
                build_mesh(config, self.comm) as mesh,
                distribute(
                    model, build_optimizer(config), self.parallel.strategy, mesh=mesh, config=build_settings(config)
                ) as sharded,
            ):
                sharded.reserve(train.global_batch)
                yield sharded

        def feed(sharded: Model) -> Iterator[tuple[Any, Any]]:
            return iter(batches(self.sources[0], sharded, train.global_batch, seed=train.seed))

        return measure_steps(self.comm, placed, feed, steps)

    def plan(self, parameters: int, together: int | None) -> tuple[str, TrainingPlan]:
        """Return a description and the plan of this training, with ``together`` ranks on each node. Not collective."""
        config, planned = self.config, plan(self.config, PlanRequest(self.comm.size, together)).training
        model = f"{config.model.described} with {parameters:,} {np.dtype(planned.model.dtype).name} parameters"
        grains = planned.grains.described(config.train.accumulate)
        return f"{model}, {config.optimizer.name}, {config.train.global_batch} samples a step in {grains}", planned
