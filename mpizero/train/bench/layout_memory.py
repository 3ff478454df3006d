"""Compare measured with planned memory and messages of each rank: ``mpizero bench memory --pipeline``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product, repeat
from typing import Any

import numpy as np

from mpizero import nn, optim
from mpizero._util.checks import whole
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.planning import TrainingPlan
from mpizero.sharding import HybridShardedModel, ShardedModelBase, ShardingConfig
from mpizero.sharding.config import placement
from mpizero.train.bench.memory_rows import PARTS, RankRow, measure_steps, ranks_per_node, table_rows
from mpizero.train.bench.strategy_memory import MemoryRequest, require_room
from mpizero.train.config.checks import check_option
from mpizero.train.config.components import ParallelSection
from mpizero.types import Array

#: Layers and attention heads of the model; a pipeline with more chunks, or a larger tensor group, raises them.
LAYERS, HEADS = 8, 8
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
_WORST_BYTES = 24


@dataclass(frozen=True)
class LayoutRequest:
    """Describe the model, layout and steps to measure.

    Attributes
    ----------
    memory : MemoryRequest
        The number of parameters, the strategies, whether the ranks of a node share memory, and the number of steps.
    layout : ParallelSection
        How the model is split over ranks. Its strategy is ignored: each strategy of :attr:`memory` is measured.
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
        layers = max(LAYERS, self.layout.chunks)
        heads = self.layout.tensor * math.ceil(HEADS / self.layout.tensor)
        width = math.sqrt(parameters / (12 * layers))
        return nn.GPT(
            dim=heads * max(1, math.ceil(width / heads)), layers=layers, heads=heads, sequence=SEQUENCE, seed=1
        )


@dataclass(frozen=True)
class LayoutTable:
    """Hold the figures of all ranks for one strategy with shared or private memory.

    Attributes
    ----------
    memory : str
        "shared" or "private".
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
        require_room(wanted.parameters, _WORST_BYTES * copies * wanted.parameters, comm.size)
        model, small = request.model(wanted.parameters), request.model(1)
    tables = []
    for shared, strategy in product(wanted.shared, wanted.strategies):
        run = _Run(request, replace(layout, strategy=strategy, share_node_memory=shared), comm)
        if comm.rank == 0:
            tell(f"{run.described}, {run.memory} memory, {comm.size} ranks")
        # Libraries, kernels and buffers that every model needs are there before the measurement.
        run.measure(small, 1)
        figures = comm.allgather_object(run.measure(model, wanted.steps), "bench")
        with all_ranks(comm):
            if comm.rank == 0:
                tables.append(run.table(model, figures))
    return tables


@dataclass(frozen=True)
class _Run:
    """Measure one layout with one strategy and with shared or private memory, all of which ``layout`` gives."""

    request: LayoutRequest
    layout: ParallelSection
    comm: Communicator

    @property
    def memory(self) -> str:
        return "shared" if self.layout.share_node_memory else "private"

    @property
    def described(self) -> str:
        return self.layout.describe(self.comm.size)

    def config(self, comm: Communicator | str) -> ShardingConfig:
        """Return settings by which each replica computes one grain a step. Not collective.

        The grain has ``request.micro_batches`` micro-batches of one sample each.
        """
        count = self.request.micro_batches
        share = self.layout.share_node_memory
        return ShardingConfig(comm=comm, micro_batch=1, accumulate=count, share_node_memory=share)

    def measure(self, model: nn.GPT, steps: int) -> dict[str, Any]:
        """Train one step to warm up and ``steps`` steps, and return the figures of this rank. Collective."""

        @contextmanager
        def placed() -> Iterator[ShardedModelBase]:
            sizes = self.layout.arguments()
            with (
                self.config(self.comm) as config,
                HybridShardedModel(model, config, **sizes, optimizer=optim.AdamW(lr=1e-4)) as sharded,
            ):
                yield sharded

        def feed(sharded: ShardedModelBase) -> Iterator[tuple[Array, Array]]:
            yield from repeat(_samples(model, self.request.micro_batches, sharded.engine.grid.here.data))

        return measure_steps(self.comm, placed, feed, steps)

    def table(self, model: nn.GPT, figures: Sequence[dict[str, Any]]) -> LayoutTable:
        """Plan the same training, and return measured and planned figures side by side. Not collective.

        ``figures`` has what :meth:`measure` returned on every rank.
        """
        x, y = _samples(model, 1, 0)
        plan = TrainingPlan(
            model=model,
            optimizer=optim.AdamW(lr=1e-4),
            config=self.config("self"),
            row=placement(self.layout.strategy),
            parallel_layout=self.layout.parallel_layout(),
            ranks=self.comm.size,
            ranks_per_node=ranks_per_node(figures),
            global_batch=self.request.micro_batches * self.layout.axes(self.comm.size).data,
            x=x,
            y=y,
        )
        return LayoutTable(
            memory=self.memory,
            strategy=self.layout.strategy,
            layout=self.described,
            parameters=figures[0]["parameters"],
            training=(
                f"GPT with {figures[0]['parameters']:,} float32 parameters, AdamW, {self.request.micro_batches} "
                f"micro-batches of 1 x {SEQUENCE} tokens a replica"
            ),
            not_counted="",
            rows=table_rows(figures, plan),
        )


def at_rest(held: dict[str, int]) -> int:
    """Add up ``held``, bytes by kind of memory, without activations: what is held between steps. Not collective."""
    return sum(held.values()) - held.get("activations", 0)


def _samples(model: nn.GPT, count: int, replica: int) -> tuple[Array, Array]:
    """Return random token ids and targets of ``count`` samples, the same on all ranks of replica ``replica``."""
    ids = np.random.default_rng(replica).integers(0, model.vocabulary, (count, model.sequence + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def report(tables: Sequence[LayoutTable]) -> str:
    """Return the figures as tables for people, in MB (10^6 bytes).

    Not collective.
    """
    return "\n\n".join("\n".join(_lines(table)) for table in tables)


def _lines(table: LayoutTable) -> Iterator[str]:
    yield f"{table.layout}, {table.memory} memory: {table.training}; MB a rank"
    yield f"{'':28}" + "".join(f"{first:>11}" for first, _ in _COLUMNS)
    yield f"{'rank p t d c':28}" + "".join(f"{second:>11}" for _, second in _COLUMNS)
    for row in table.rows:
        place = " ".join(map(str, (f"{row.rank:4}", *row.here.values())))
        most = sum(row.planned.values()) + row.planned_working
        yield f"{place:20}counted " + _figures(row.held, (row.pss_at_rest, row.pss_in_step), row.sent, row.messages)
        yield f"{'':20}planned " + _figures(row.planned, (None, most), row.planned_sent, row.planned_messages)
    counted = PARTS[:-1] if table.not_counted else PARTS
    far = {p: max(abs(row.held[p] - row.planned[p]) / max(row.planned[p], 1) for row in table.rows) for p in counted}
    worst = ", ".join(f"{part} {100 * share:.2f} %" for part, share in far.items())
    if table.not_counted:
        yield f"neither counted nor planned: arrays of the model's own passes ({table.not_counted})"
    yield f"largest difference between counted and planned: {worst}"


def _figures(held: dict[str, int], pss: tuple[int | None, int], sent: int, messages: int) -> str:
    """Format the columns of one line of the table.

    ``held`` has bytes by kind of memory, ``pss`` the growth of the proportional set size in bytes at rest (None leaves
    the column empty) and in a step. ``sent`` and ``messages`` are the numbers of bytes and messages sent in a step.
    """
    rest, kept = at_rest(held), held.get("activations")
    parts = (*(held[part] for part in PARTS[:3]), held["buffers"], rest, pss[0])
    moving = (kept, None if kept is None else rest + kept, pss[1], sent)
    shown = "".join(f"{'' if size is None else f'{size / 1e6:.3f}':>11}" for size in (*parts, *moving))
    return f"{shown}{messages:11}"


def as_json(tables: Sequence[LayoutTable]) -> str:
    """Return the figures as JSON, for programs.

    Not collective.
    """
    return json.dumps({"benchmark": "memory", "layouts": [asdict(table) for table in tables]})
