"""Plan a training: predict memory, messages, work and idle time of every rank without running the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mpizero._util.checks import writes_in_place
from mpizero._util.pytree import SampleTree
from mpizero.layout import Axes, Coordinates, Costs, Grains, Simulation, build_schedule, simulate
from mpizero.optim.elementwise import averaging
from mpizero.planning.activation_memory import StageActivations
from mpizero.planning.block_trial import TrialSample
from mpizero.planning.byte_counts import Sent
from mpizero.planning.model_part import ModelPart
from mpizero.planning.planned_grid import PlannedGrid, PlannedRanks
from mpizero.planning.planned_training import PlannedTraining
from mpizero.planning.rank_memory import MemoryBytes, RankMemory
from mpizero.planning.step_batches import StepBatches
from mpizero.planning.traffic import RankTraffic
from mpizero.sharding.config import Placement, ShardingConfig, assigns_waves, claims_grains, scratch_use
from mpizero.sharding.partition import ParallelLayout, in_tiles, within_rounding
from mpizero.sharding.whole_tensors import TensorPlan
from mpizero.types import BlockModel, Run


def _takes_no_time(nbytes: int) -> float:
    return 0.0


@dataclass(frozen=True)
class RankPlan:
    """Hold what one rank keeps in memory, sends and computes in a step.

    Attributes
    ----------
    rank : int
        The rank's number in the world.
    here : Coordinates
        The rank's coordinates on the axes of parallelism.
    node : int
        The number of the rank's node.
    memory : dict of str to MemoryBytes
        Memory on the host, by part ([Note: held bytes] in ``planning/rank_memory.py``).
    device_memory : dict of str to int
        Bytes on the rank's GPU, by part; empty without a GPU.
    sent : dict of str to Sent
        Bytes and messages that the rank sends in a step, by purpose.
    samples, micro_batches : int
        Number of samples and of micro-batches that the rank computes in a step.
    operations : int or None
        The rank's floating-point operations in a step; None if a layer does not count its operations.
    caches : int
        Largest number of caches that the rank holds at once. There is one cache for each chunk and micro-batch.
    """

    rank: int
    here: Coordinates
    node: int
    memory: dict[str, MemoryBytes]
    device_memory: dict[str, int]
    sent: dict[str, Sent]
    samples: int
    micro_batches: int
    operations: int | None
    caches: int

    @property
    def bytes(self) -> int:
        """All bytes of the rank's host memory, including an equal share of each shared window."""
        return sum(held.mine for held in self.memory.values())

    @property
    def bytes_sent(self) -> int:
        """All bytes that the rank sends in a step."""
        return sum(sent.bytes for sent in self.sent.values())

    @property
    def messages(self) -> int:
        """Number of all messages that the rank sends in a step."""
        return sum(sent.messages for sent in self.sent.values())


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Predict memory, messages and work of every rank of a training.

    To do so, only single blocks of the model run, one of each kind ([Note: trials] in ``planning/block_trial.py``). Of
    a black box, and of blocks that cannot run alone, the plan has what the library allocates and sends, and
    :attr:`not_counted` says what it lacks.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The model to be trained.
    optimizer : optimizer
        Any optimizer that :func:`mpizero.optim.elementwise.adapt` accepts.
    config : ShardingConfig
        The settings; the communicator is not used.
    row : Placement
        The strategy's row of the placement table.
    parallel_layout : ParallelLayout
        Sizes of the axes, schedule and cuts.
    ranks : int
        Number of ranks in the job.
    ranks_per_node : int or None
        Number of ranks on a real node; None puts all ranks on one node.
    global_batch : int
        Samples in a step. Each rank is assumed to start with those that :func:`mpizero.data.batches` gives it.
    x, y : array, or tree of arrays
        Inputs and targets of at least one sample.
    loss_scale : bool
        Whether the training has a loss scale.
    rate : float
        Floating-point operations per second of a rank, for the simulated pipeline.
    message : callable
        Function that returns the seconds that a message of the given number of bytes takes from one stage to the next.
    tries : bool
        Whether blocks run. Without it the plan has :meth:`allocated` and :attr:`simulation` only, at once.

    Raises
    ------
    GridError, ConfigError
        The errors that the training itself would raise. They are raised when an attribute is first read that depends on
        the wrong setting.
    """

    model: Any
    optimizer: Any
    config: ShardingConfig
    row: Placement
    parallel_layout: ParallelLayout = field(default_factory=ParallelLayout)
    ranks: int
    ranks_per_node: int | None = None
    global_batch: int
    x: Any
    y: Any
    loss_scale: bool = False
    rate: float = 1.0
    message: Callable[[int], float] = _takes_no_time
    tries: bool = True

    @cached_property
    def axes(self) -> Axes:
        """Sizes and order of the axes of parallelism."""
        return self.parallel_layout.axes(self.ranks)

    @cached_property
    def tiled_layout(self) -> ParallelLayout:
        """The parallel layout with the tiles in which the model computes on it."""
        return in_tiles(self.parallel_layout, self.config.tiles, self.model)

    @property
    def tiles(self) -> dict[str, int]:
        """The number of tiles in which layers compute along the axes "tensor" and "context"."""
        return self.tiled_layout.all_tiles

    @cached_property
    def within_rounding(self) -> tuple[str, ...]:
        """Why results have not the bits of one process with the same tiles; empty if they have."""
        compression, accumulate = self.config.gradient_compression, self.config.accumulate
        return within_rounding(self.tiled_layout, self.model, compression, accumulate, self.optimizer)

    @cached_property
    def places(self) -> PlannedRanks:
        """The nodes of all ranks, which also give each rank's groups."""
        return PlannedRanks.build(
            self.axes,
            ranks_per_node=self.ranks_per_node,
            simulated=self.config.ranks_per_node,
            share=self.config.share_node_memory,
        )

    @cached_property
    def grains(self) -> Grains:
        """The grains of a global batch."""
        return self.config.grain_rule(self.model, (self.x, self.y)).grains(self.global_batch)

    @cached_property
    def training(self) -> PlannedTraining:
        """The parts of the plan that are equal for all ranks."""
        row = self.row.in_contexts(self.axes.context)
        waves = assigns_waves(row, self.config, self.axes.data * self.axes.context)
        by_block = isinstance(self.model, BlockModel)
        scratch = scratch_use(self.config, self.axes.pipeline, by_block=by_block)
        return PlannedTraining(
            row=row,
            config=self.config,
            optimizer=averaging(self.optimizer, self.config.ema),
            step=StepBatches(self.grains, self.config.accumulate, waves, scratch, self._claims_grains),
            itemsize=np.dtype(self.model.dtype).itemsize,
            sample_bytes=tuple(leaf[:1].nbytes for leaf in SampleTree.of(x=self.x, y=self.y).leaves),
            loss_scale=self.loss_scale,
            by_block=by_block,
            in_place=writes_in_place(self.model),
        )

    @property
    def _claims_grains(self) -> bool:
        model_ranks = self.ranks // self.axes.data
        return claims_grains(self.row.in_contexts(self.axes.context), self.config, self.places.grid(0), model_ranks)

    @cached_property
    def by_rank(self) -> tuple[RankPlan, ...]:
        """The plans of all ranks."""
        return tuple(self._plan(rank) for rank in range(self.ranks))

    def allocated(self, rank: int) -> tuple[dict[str, MemoryBytes], dict[str, int]]:
        """Return the memory of one rank by part, on the host and on its GPU, as in :class:`RankPlan`. Not collective.

        Without ``tries`` it has no activations, working arrays, messages and group buffers.
        """
        traffic = self.traffic(rank)
        holdings = RankMemory(traffic, self._flow(traffic))
        device = holdings.device()
        if not self.tries:
            device = {part: size for part, size in device.items() if part not in ("activations", "working arrays")}
        return holdings.parts(), device

    def traffic(self, rank: int) -> RankTraffic:
        """Return the object that computes one rank's messages. Not collective."""
        if rank not in self._traffic:
            grid = self.places.grid(rank)
            part = self.part(grid)
            self._traffic[rank] = RankTraffic(self.training, part, grid, self._tensors_of(part, grid))
        return self._traffic[rank]

    def _tensors_of(self, part: ModelPart, grid: PlannedGrid) -> TensorPlan:
        """Return the owners of whole tensors of a part, computed once for all ranks with equal parts and nodes."""
        key = (id(part), grid.nodes)
        if key not in self._tensor_plans:
            replicated = not self.training.row.shard_optimizer
            self._tensor_plans[key] = TensorPlan.of(
                self.training.optimizer, part.layout, grid.nodes, replicated=replicated
            )
        return self._tensor_plans[key]

    @cached_property
    def _tensor_plans(self) -> dict[tuple[int, Any], TensorPlan]:
        return {}

    @cached_property
    def _traffic(self) -> dict[int, RankTraffic]:
        return {}

    @cached_property
    def not_counted(self) -> str:
        """Why activations, working arrays and operations are not known; "" if they are."""
        return self.traffic(0).part.untried

    @cached_property
    def unseen(self) -> str:
        """The memory that known activations and working arrays lack, in words; "" if none."""
        return self.traffic(0).part.unseen

    def _plan(self, rank: int) -> RankPlan:
        traffic = self.traffic(rank)
        holdings, part = RankMemory(traffic, self._flow(traffic)), traffic.part
        samples = sum(traffic.jobs)
        work = (
            None
            if part.operations is None
            else sum(part.work(chunk).total for chunk in part.partitioned.chunks) * samples
        )
        return RankPlan(
            rank=rank,
            here=traffic.grid.here,
            node=rank // (self.ranks_per_node or self.ranks),
            memory=holdings.parts(),
            device_memory=holdings.device(),
            sent=traffic.sent(),
            samples=samples,
            micro_batches=sum(size > 0 for size in traffic.jobs),
            operations=work,
            caches=holdings.flow.figures.caches,
        )

    # ------------------------------------------------------------------ parts

    @cached_property
    def _flows(self) -> dict[tuple[Any, ...], StageActivations]:
        return {}

    def _flow(self, traffic: RankTraffic) -> StageActivations:
        """Return the memory of the micro-batches of the rank whose messages are given.

        It is computed once for all ranks with the same stage, tensor rank, context rank and micro-batches.
        """
        _, tensor, _, context = traffic.grid.here
        key = (traffic.part.partitioned.stage, tensor, context, traffic.jobs)
        if key not in self._flows:
            self._flows[key] = StageActivations(traffic.part, traffic.jobs, traffic.program)
        return self._flows[key]

    @cached_property
    def _parts(self) -> dict[tuple[int, ...], ModelPart]:
        return {}

    def part(self, grid: PlannedGrid) -> ModelPart:
        """Return the part of the model on the stage, tensor rank and context rank of ``grid``. Not collective.

        It is computed once for all ranks that have the same part.
        """
        stage, tensor, _, context = grid.here
        if (tensor, context) not in self._parts:
            sample = TrialSample(self.x, self.y, Run(training=True, seed=getattr(self.model, "seed", 0)))
            minimum = self.config.minimum_parameter_group_size
            first = next(iter(self._parts.values()), None)
            self._parts[tensor, context] = ModelPart.build(
                self.model, grid, self.tiled_layout, sample, self.training.row, minimum,
                known=None if first is None else first.even_trials(max(1, self.training.step.largest)),
                tries=self.tries,
            )  # fmt: skip
        if (stage, tensor, context) not in self._parts:
            self._parts[stage, tensor, context] = self._parts[tensor, context].on(stage)
        return self._parts[stage, tensor, context]

    # ------------------------------------------------------------------ pipeline and nodes

    @cached_property
    def simulation(self) -> Simulation | None:
        """The simulated pipeline of the first replica; None without a pipeline.

        If a layer does not count its operations, work is estimated from the sizes of blocks instead: one operation for
        each element of a parameter and each sample, in the forward pass and in each half of the backward pass.
        """
        if self.axes.pipeline == 1:
            return None
        jobs, layout = self.micro_batches, self.parallel_layout
        schedule = build_schedule(layout.schedule, self.axes.pipeline, jobs, layout.virtual_stages)
        return simulate(schedule, self._costs(self.traffic(0).part), present=jobs)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of the first replica, which has the most."""
        return len(self.traffic(0).jobs)

    def _costs(self, part: ModelPart) -> Costs:
        samples = self.training.step.largest / self.rate
        if part.operations is None or not any(work.total for work in part.operations.values()):
            specs = {name: block.specs() for name, block in part.partitioned.split.blocks.items()}
            sizes = tuple(
                samples * sum(s.size for name in names for s in specs[name]) for names in part.partitioned.cuts
            )
            return Costs(sizes, sizes, sizes)
        work = [part.work(chunk) for chunk in range(len(part.partitioned.cuts))]
        borders, most = range(len(part.partitioned.cuts) - 1), self.training.step.largest
        return Costs(
            tuple(samples * chunk.forward for chunk in work),
            tuple(samples * chunk.backward_input for chunk in work),
            tuple(samples * chunk.backward_weights for chunk in work),
            latency=max(self.message(part.output(chunk, most).nbytes) for chunk in borders) if self.tries else 0.0,
        )

    @cached_property
    def node_bytes(self) -> dict[int, int]:
        """For each node, the bytes of host memory: the private arrays of its ranks, and each shared window once."""
        found: dict[int, float] = {}
        for plan in self.by_rank:
            own = sum(held.private + held.shared / held.sharers for held in plan.memory.values())
            found[plan.node] = found.get(plan.node, 0.0) + own
        return {node: round(size) for node, size in found.items()}

    @cached_property
    def node_windows(self) -> dict[int, int]:
        """For each node, the bytes of shared windows, for which /dev/shm must have room."""
        found: dict[int, float] = {}
        for plan in self.by_rank:
            found[plan.node] = found.get(plan.node, 0.0) + sum(h.shared / h.sharers for h in plan.memory.values())
        return {node: round(size) for node, size in found.items()}

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks that compute no samples in a step."""
        return tuple(plan.rank for plan in self.by_rank if not plan.samples)
