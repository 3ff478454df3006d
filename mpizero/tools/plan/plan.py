"""Plan a training: predict memory, messages, work and idle time of every rank without running the training.

:class:`TrainingPlan` plans all ranks, :class:`RankPlan` one, and :class:`RankMemory` its memory, part by part: what the
engine allocates, and the arrays of a step.

[Note: allocated bytes] The parts in :data:`PARTS` up to "exchange buffers" are those that
:class:`mpizero.sharding.params.Memory` counts in a run, and agree with its counts to the byte. These parts are
private arrays, and shared windows in whole pages. "group buffers" are the message buffers or the window of a tensor or
context group. The other parts exist only during a step. "activations" are the most bytes that blocks keep for their
backward passes. "working arrays" are the bytes needed in addition while a block runs, at the moment of most memory.
"messages" are the additional bytes of a pipeline stage's messages in flight.

If layers compute on GPUs, activations and working arrays are on the GPU. The GPU then also has copies of the parameters
and of one unit's gradients; or of all gradients, if a rank is alone in its data group and ``optimizer_device`` is not
"cpu". If the update runs on the GPU, it also has the optimizer state and the update's buffers. The host's working
arrays are then only the buffer for copies between host and GPU and, if gradients stay on the GPU but the update runs on
the host, the reduced gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.checks import writes_in_place
from mpizero._util.pytree import SampleTree
from mpizero.comm.reduce import IN_FLIGHT
from mpizero.data.source import Slab
from mpizero.kernels.gpu import STAGING
from mpizero.layout import Axes, Coordinates, Costs, Grains, Simulation, build_schedule, simulate
from mpizero.layout.fields import Cut
from mpizero.optim.elementwise import EMA, tensor_state_size, with_copies
from mpizero.sharding.config import (
    Config,
    Placement,
    assigns_rounds,
    check_shard_nodes,
    check_wire,
    keeps_gradients_on_device,
    round_buffer_sizes,
    schedules_dynamically,
    scratch_use,
)
from mpizero.sharding.device import gradient_offsets
from mpizero.sharding.device_update import buffer_sizes, updates_on_device
from mpizero.sharding.exactness import within_rounding
from mpizero.sharding.grad_reduce import largest_block, residual_sizes
from mpizero.sharding.mesh import Mesh
from mpizero.sharding.params import UNIT_BUFFERS, paged
from mpizero.sharding.partition import ParallelLayout, averaged_names, resolve_tiles
from mpizero.sharding.whole_tensors import TensorPlan
from mpizero.tools.plan.counts import (
    FieldExtents,
    PlannedGrid,
    PlannedRanks,
    PlannedTraining,
    Sent,
    StepBatches,
    window_bytes,
)
from mpizero.tools.plan.memory import ModelPart, StageActivations, TrialSample, field_extents
from mpizero.tools.plan.traffic import RankTraffic
from mpizero.types import BlockModel, Run

#: The parts of a rank's memory, in the order in which they are shown.
PARTS = (
    "parameters",
    "gradients",
    "samples",
    "optimizer state",
    "residuals",
    "buffers",
    "exchange buffers",
    "group buffers",
    "activations",
    "working arrays",
    "messages",
)


class MemoryBytes(NamedTuple):
    """Hold the bytes of one part of a rank's memory.

    Attributes
    ----------
    private : int
        Bytes of arrays that only this rank has.
    shared : int
        Bytes of a window that ``sharers`` ranks share.
    sharers : int
        Number of ranks that share the window. (In a sum of several windows ``sharers`` is the least common multiple of
        the windows' numbers of ranks, and ``shared`` is scaled so that ``shared / sharers`` is one rank's share of all
        windows.)
    """

    private: int = 0
    shared: int = 0
    sharers: int = 1

    @property
    def per_rank(self) -> int:
        """The private bytes, and this rank's equal share of the window."""
        return self.private + self.shared // self.sharers

    def __add__(self, other: object) -> MemoryBytes:
        """Return the memory of both operands: sums of their private bytes, and of this rank's shares of windows."""
        if not isinstance(other, MemoryBytes):
            return NotImplemented
        sharers = lcm(self.sharers, other.sharers)
        scaled = (sharers // each.sharers * each.shared for each in (self, other))
        return MemoryBytes(self.private + other.private, sum(scaled), sharers)


@dataclass(frozen=True)
class RankMemory:
    """Compute the memory of one rank.

    Attributes
    ----------
    traffic : RankTraffic
        The rank's part of the model, and its messages.
    flow : StageActivations
        The memory that the rank's micro-batches need.
    """

    traffic: RankTraffic
    flow: StageActivations

    def parts(self) -> dict[str, MemoryBytes]:
        """Return the rank's memory on the host by part, without empty parts. Not collective."""
        peaks = self.flow.peaks
        working = self._host_work if self._on_device else peaks.most - peaks.saved + self._copied
        sizes = {
            "parameters": self._parameters(),
            "gradients": MemoryBytes() if self._keeps_gradients else self._gradients(),
            "samples": self._samples(),
            "optimizer state": MemoryBytes(0 if self._updates_on_device else self._state() * self._item),
            "residuals": self._residuals(),
            "buffers": self._buffers(),
            "exchange buffers": MemoryBytes(self._exchange_buffers()),
            "group buffers": self._group_buffers(),
            "activations": MemoryBytes(0 if self._on_device else peaks.saved),
            "working arrays": MemoryBytes(working),
            "messages": MemoryBytes(peaks.total - peaks.most),
        }
        return {part: size for part, size in sizes.items() if size.private or size.shared}

    def device(self) -> dict[str, int]:
        """Return the bytes that the rank holds on its GPU, by part; an empty dict without a GPU. Not collective."""
        if not self._on_device:
            return {}
        layout, peaks = self.traffic.part.layout, self.flow.peaks
        sizes = {"optimizer state": self._state() * self._item} if self._updates_on_device else {}
        buffers = self._frozen if self._keeps_gradients else self._update_buffers() if self._updates_on_device else 0
        gradients = max((gradient_offsets(unit)[1] for unit in layout.units), default=0) * self._item
        sizes |= {"buffers": buffers} if buffers else {}
        return sizes | {
            "parameters": (layout.largest_gathered if self.traffic.sharded else layout.size) * self._item,
            "gradients": self._gradients().private if self._keeps_gradients else gradients,
            "activations": peaks.saved,
            "working arrays": peaks.most - peaks.saved,
        }

    @property
    def _copied(self) -> int:
        """Bytes of the copy of all parameters that a functional model needs if parameters are sharded; otherwise 0."""
        traffic = self.traffic
        copies = traffic.sharded and not traffic.training.by_block and any(traffic.jobs)
        return traffic.part.layout.size * self._item if copies else 0

    @property
    def _on_device(self) -> bool:
        return self.traffic.training.config.device != "cpu"

    @property
    def _keeps_gradients(self) -> bool:
        """Tell whether the gradients of all units stay on the GPU until the update."""
        return keeps_gradients_on_device(self.traffic.training.config, self.traffic.grid.data.size)

    @property
    def _host_work(self) -> int:
        """The host bytes of the buffer for copies to the GPU, and of the reduced gradient.

        The reduced gradient is only counted if gradients stay on the GPU while the optimizer runs on the host.
        """
        fetched = self._keeps_gradients and not self._updates_on_device
        return STAGING + (self.traffic.part.layout.gradient_size * self._item if fetched else 0)

    def _update_buffers(self) -> int:
        norms, replicated = self.traffic.training.optimizer.needs_tensor_norms, not self.traffic.sharded
        return sum(buffer_sizes(self.traffic.updated, self._item, norms=norms, full=replicated)) * self._item

    @property
    def _updates_on_device(self) -> bool:
        return updates_on_device(self.traffic.training.config, self.traffic.training.optimizer)

    # ------------------------------------------------------------------ what the engine allocates

    @property
    def _item(self) -> int:
        return self.traffic.training.itemsize

    def _shared(self, *sizes: int) -> MemoryBytes:
        """Return the memory of arrays that the node's ranks share: one window, each array in whole pages.

        ``sizes`` are the arrays' bytes. If the node has one rank, the arrays are private.
        """
        sharers = self.traffic.grid.node.size
        if sharers == 1:
            return MemoryBytes(sum(sizes))
        return MemoryBytes(0, sum(paged(size) for size in sizes), sharers)

    def _parameters(self) -> MemoryBytes:
        shards, grid = self.traffic.part.shards, self.traffic.grid
        if not self.traffic.sharded:
            return self._shared(shards.layout.size * self._item)
        return self._shared(sum(shards.shards[rank].size for rank in grid.held_ranks) * self._item)

    def _gradients(self) -> MemoryBytes:
        """Return the memory of gradients: rows (gradient vectors) or, in rounds, a reduce-scatter buffer and a stack.

        A row is an array that holds a gradient or a partial sum. A reduce-scatter buffer holds the gradients that the
        node's ranks computed for one or two units. The stack keeps partial sums from round to round. In both cases the
        buffer in which gradients of micro-batches are added is included, or with rows the scratch array for one block's
        gradients.
        """
        traffic, shards = self.traffic, self.traffic.part.shards
        step, grid = traffic.training.step, traffic.grid
        if not step.in_rounds:
            plan = step.rows_plan(grid)
            rows = self._shared(step.rows(grid) * grid.node.size * paged(shards.layout.gradient_size * self._item))
            uses = plan.folds[grid.order_index].uses_scratch or (step.scratch == "micro-batches" and any(traffic.jobs))
            added = largest_block(shards.layout) * self._item if uses else 0
            return rows._replace(private=rows.private + (added if step.scratch else self._folded))
        slots = round_buffer_sizes(shards.layout, grid.data.size, in_place=traffic.training.in_place)
        buffer = self._shared(*[grid.node.size * paged(size * self._item) for size in slots])
        stack = step.round_plan(grid).rows * sum(shards.gradients[grid.data.rank]) * self._item
        return buffer._replace(private=buffer.private + stack + self._folded)

    def _samples(self) -> MemoryBytes:
        """Return the memory of the samples that the node's ranks share if they take grains dynamically."""
        training = self.traffic.training
        nbytes = training.step.dynamic_bytes(self.traffic.grid, training.sample_bytes)
        return self._shared(nbytes) if nbytes else MemoryBytes()

    @property
    def _folded(self) -> int:
        """The bytes of the buffer in which the gradients of a grain's micro-batches are added; 0 if there is none."""
        several = self.traffic.training.step.accumulate > 1 and any(self.traffic.jobs)
        return self.traffic.part.layout.gradient_size * self._item if several else 0

    def _state(self) -> int:
        """Return the number of elements in this rank's optimizer state."""
        optimizer, tensors, rank = self.traffic.training.optimizer, self.traffic.tensors, self.traffic.grid.data.rank
        in_tensors = self.traffic.updated_in_tensors
        elementwise = len(optimizer.slots) * (self.traffic.updated - in_tensors)
        specs = (tensors.tensors[number].spec for number in tensors.owned(rank))
        average = EMA in optimizer.slots
        return elementwise + average * in_tensors + sum(tensor_state_size(optimizer, spec) for spec in specs)

    def _residuals(self) -> MemoryBytes:
        """Return the memory of the residuals of gradient compression, of the last step and of the current one.

        A residual is what compression left out of a message.
        """
        traffic = self.traffic
        totals = [sum(of_units) for of_units in traffic.compressed]
        replicated = not traffic.training.row.shard_optimizer
        sizes = residual_sizes(totals, traffic.grid.inter_node.rank, traffic.training.codec, replicated=replicated)
        return MemoryBytes(2 * sum(sizes) * self._item)

    def _buffers(self) -> MemoryBytes:
        """Return the memory of gathered units, and of the buffer for gradients of frozen parameters (never read)."""
        units = MemoryBytes()
        if self.traffic.sharded:
            units = self._shared(*[self.traffic.part.layout.largest_gathered * self._item] * UNIT_BUFFERS)
        return units._replace(private=units.private + (0 if self._keeps_gradients else self._frozen))

    @property
    def _frozen(self) -> int:
        return self.traffic.part.layout.largest_frozen * self._item

    def _exchange_buffers(self) -> int:
        """Return the bytes of the buffers for messages of gradients.

        The gradients are sent in segments (ranges of elements); each segment in flight has buffers of its own.
        """
        reductions, replications = self.traffic.reductions, self.traffic.replications()
        segments = [segment for cost in reductions for segment in cost.buffers]  # those of parameters need no buffers
        first = [segment for cost in replications for segment in cost.buffers]
        numbered = [segments[number::IN_FLIGHT] for number in range(IN_FLIGHT)]
        numbered[0] = numbered[0] + first
        return sum(max(sizes) for sharing in numbered for sizes in zip(*sharing, strict=True))

    def _group_buffers(self) -> MemoryBytes:
        """Return the memory that tensor and context group keep for their calls: windows, or message buffers."""
        total = MemoryBytes()
        for group, calls in self.traffic.calls:
            if group.shares_memory:
                total += MemoryBytes(0, window_bytes(calls, group.size), group.size)
                continue
            buffers: Counter[str] = Counter()
            for call in calls:
                buffers |= Counter(call.message_buffers(group.rank, group.size))
            total += MemoryBytes(sum(buffers.values()))
        return total


def _takes_no_time(nbytes: int) -> float:
    return 0.0  # no lambda: plans are sent to other processes


@dataclass(frozen=True)
class RankPlan:
    """Hold what one rank keeps in memory, sends and computes in a step.

    Attributes
    ----------
    rank : int
        The rank's number in the world.
    coordinates : Coordinates
        The rank's coordinates on the axes of parallelism.
    node : int
        The number of the rank's node.
    memory : dict of str to MemoryBytes
        Memory on the host, by part ([Note: allocated bytes] in ``tools/plan/plan.py``).
    device_memory : dict of str to int
        Bytes on the rank's GPU, by part; empty without a GPU.
    sent : dict of str to Sent
        Bytes and messages that the rank sends in a step, by purpose.
    samples, micro_batches : int
        Number of samples and of micro-batches that the rank computes in a step.
    operations : int or None
        The rank's floating-point operations in a step; None if a layer does not count its operations.
    caches : int
        The most caches that the rank holds at the same time. A cache is what the forward pass of one micro-batch
        through one chunk keeps for the backward pass.
    """

    rank: int
    coordinates: Coordinates
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
        return sum(size.per_rank for size in self.memory.values())

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

    For that, only single blocks of the model run, one of each kind ([Note: trials] in ``tools/plan/memory.py``). For
    a functional model, and for blocks that cannot run alone, the plan has only what the library itself allocates and
    sends, and :attr:`not_counted` says why.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The model to be trained.
    optimizer : optimizer
        Any optimizer that :func:`mpizero.optim.elementwise.adapt` accepts.
    config : Config
        The settings.
    row : Placement
        Which of parameters, gradients and optimizer state the strategy shards.
    parallel_layout : ParallelLayout
        Sizes of the axes, schedule and cuts.
    ranks : int
        Number of ranks in the job.
    ranks_per_node : int or None
        Number of ranks on a real node; None puts all ranks on one node.
    mesh : Mesh or None
        Whether ranks share memory, and how many ranks a simulated node has; no communicator is used. None means the
        mesh of ``config``, if that is a ShardingConfig, else the defaults.
    global_batch : int
        Samples in a step. Each rank is assumed to start with the samples that :func:`mpizero.data.batches` gives it.
    x, y : array, or tree of arrays
        Inputs and targets of at least one sample.
    loss_scale : bool
        Whether the training has a loss scale.
    rate : float
        Floating-point operations per second of a rank, for the simulated pipeline.
    message : callable
        Function that returns the seconds that a message of the given number of bytes takes from one stage to the next.
    tries : bool
        Whether blocks run. If not, only :meth:`allocated` and :attr:`simulation` can be used; they take little time.

    Raises
    ------
    GridError, ConfigError
        The errors that the training itself would raise. They are raised when an attribute that depends on the wrong
        setting is first read.
    """

    model: Any
    optimizer: Any
    config: Config
    row: Placement
    parallel_layout: ParallelLayout = field(default_factory=ParallelLayout)
    ranks: int
    ranks_per_node: int | None = None
    mesh: Mesh | None = None
    global_batch: int
    x: Any
    y: Any
    loss_scale: bool = False
    rate: float = 1.0
    message: Callable[[int], float] = _takes_no_time
    tries: bool = True
    _tensor_plans: dict[tuple[int, Any], TensorPlan] = field(default_factory=dict, init=False, compare=False)
    _traffic: dict[int, RankTraffic] = field(default_factory=dict, init=False, compare=False)
    _flows: dict[tuple[Any, ...], StageActivations] = field(default_factory=dict, init=False, compare=False)
    _parts: dict[tuple[int, ...], ModelPart] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def axes(self) -> Axes:
        """Sizes and order of the axes of parallelism."""
        return self.parallel_layout.axes_of(self.ranks)

    @cached_property
    def tiled_layout(self) -> ParallelLayout:
        """The parallel layout, with the number of tiles in which the model is computed on each axis."""
        return resolve_tiles(self.parallel_layout, self.config.tiles, self.model)

    @property
    def tiles(self) -> dict[str, int]:
        """The number of tiles in which layers compute along the axes "tensor" and "context"."""
        return self.tiled_layout.virtual_ranks

    @cached_property
    def within_rounding(self) -> tuple[str, ...]:
        """Reasons why results differ from one process with the same tiles by rounding; empty if bits are equal."""
        compression, accumulate = self.config.gradient_compression, self.config.accumulate
        return within_rounding(self.tiled_layout, self.model, compression, accumulate, self.optimizer)

    @cached_property
    def planned_ranks(self) -> PlannedRanks:
        """The ranks of the planned job: on which node each is, and its groups."""
        mesh = self.mesh or getattr(self.config, "mesh", None) or Mesh()
        check_shard_nodes(self.row, mesh)
        return PlannedRanks.build(
            self.axes,
            ranks_per_node=self.ranks_per_node,
            simulated=mesh.ranks_per_node,
            share=mesh.share_node_memory,
            shard_nodes=mesh.shard_nodes,
        )

    @cached_property
    def grains(self) -> Grains:
        """The grains of a global batch."""
        return self.config.grain_rule(self.model, (self.x, self.y)).grains(self.global_batch)

    @cached_property
    def training(self) -> PlannedTraining:
        """The parts of the plan that are equal for all ranks."""
        check_wire(self.config, np.dtype(self.model.dtype), self.axes.context, averaged_names(self.model))
        row = self.row.in_contexts(self.axes.context)
        in_rounds = assigns_rounds(row, self.config, self.axes.data * self.axes.context)
        dynamic = schedules_dynamically(row, self.config, self.planned_ranks.grid(0), self.ranks // self.axes.data)
        by_block = isinstance(self.model, BlockModel)
        scratch = scratch_use(self.config, self.axes.pipeline, by_block=by_block)
        return PlannedTraining(
            row=row,
            config=self.config,
            optimizer=with_copies(self.optimizer, ema=self.config.ema, masters=self.config.wire_parameters),
            step=StepBatches(self.grains, self.config.accumulate, in_rounds, scratch, dynamic),
            itemsize=np.dtype(self.model.dtype).itemsize,
            sample_bytes=tuple(leaf[:1].nbytes for leaf in SampleTree.of(x=self.x, y=self.y).leaves),
            loss_scale=self.loss_scale,
            by_block=by_block,
            in_place=writes_in_place(self.model),
        )

    @cached_property
    def by_rank(self) -> tuple[RankPlan, ...]:
        """The plans of all ranks."""
        return tuple(self._plan(rank) for rank in range(self.ranks))

    def allocated(self, rank: int) -> tuple[dict[str, MemoryBytes], dict[str, int]]:
        """Return the memory of one rank by part, on the host and on its GPU, as in :class:`RankPlan`. Not collective.

        If ``tries`` is False, activations, messages and group buffers are left out, and the working arrays of blocks.
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
            grid = self.planned_ranks.grid(rank)
            part = self.part(grid)
            self._traffic[rank] = RankTraffic(self._training_on(grid), part, grid, self._tensors_of(part, grid))
        return self._traffic[rank]

    def _training_on(self, grid: PlannedGrid) -> PlannedTraining:
        """Return :attr:`training`; with a domain, its bytes of samples are those of the parts on ``grid``'s rank."""
        if not (domain := self.parallel_layout.domain):
            return self.training
        tree = SampleTree.of(**dict(zip("xy", Slab(Cut(domain), grid.context.rank).of((self.x, self.y)), strict=True)))
        # What ranks tell each other of a field, as in check_slabs of sharding/batch.py: checksum, samples, extents.
        described = sum(8 * (2 + len(domain)) for leaf in tree.leaves if leaf.ndim > len(domain))
        sizes = tuple(leaf[:1].nbytes for leaf in tree.leaves)
        return replace(self.training, sample_bytes=sizes, slab_bytes=described)

    def _tensors_of(self, part: ModelPart, grid: PlannedGrid) -> TensorPlan:
        """Return which ranks update the tensors of ``part`` that the optimizer updates as a whole.

        The result is cached, and used for all ranks that hold the same part of the model and whose data groups are
        divided among nodes in the same way.
        """
        key = (id(part), grid.nodes)
        if key not in self._tensor_plans:
            replicated = not self.training.row.shard_optimizer
            optimizer = self.training.optimizer
            self._tensor_plans[key] = TensorPlan.of(optimizer, part.layout, grid.nodes, replicated=replicated)
        return self._tensor_plans[key]

    @cached_property
    def not_counted(self) -> str:
        """Why activations, working arrays and operations are not known; "" if they are."""
        return self.traffic(0).part.untried

    @cached_property
    def unseen(self) -> str:
        """Description of memory that the planned activations and working arrays do not include; "" if none."""
        return self.traffic(0).part.unseen

    def _plan(self, rank: int) -> RankPlan:
        traffic = self.traffic(rank)
        holdings, part = RankMemory(traffic, self._flow(traffic)), traffic.part
        samples = sum(traffic.jobs)
        work = sum(part.work(chunk).total for chunk in part.partitioned.chunks) * samples
        return RankPlan(
            rank=rank,
            coordinates=traffic.grid.coordinates,
            node=rank // (self.ranks_per_node or self.ranks),
            memory=holdings.parts(),
            device_memory=holdings.device(),
            sent=traffic.sent,
            samples=samples,
            micro_batches=sum(size > 0 for size in traffic.jobs),
            operations=None if part.operations is None else work,
            caches=holdings.flow.peaks.caches,
        )

    # ------------------------------------------------------------------ parts

    def _flow(self, traffic: RankTraffic) -> StageActivations:
        """Return the memory that the rank of ``traffic``, which has its messages, needs for its micro-batches.

        The result is computed once for all ranks with the same stage, tensor rank, context rank and micro-batches.
        """
        _, tensor, _, context = traffic.grid.coordinates
        key = (traffic.part.partitioned.stage, tensor, context, traffic.jobs)
        if key not in self._flows:
            self._flows[key] = StageActivations(traffic.part, traffic.jobs, traffic.program)
        return self._flows[key]

    def part(self, grid: PlannedGrid) -> ModelPart:
        """Return the part of the model on the stage, tensor rank and context rank of ``grid``. Not collective.

        The part is computed once for all ranks that have the same part.
        """
        stage, tensor, _, context = grid.coordinates
        if (tensor, context) not in self._parts:
            sample = self._sample
            minimum = self.config.minimum_parameter_group_size
            first = next(iter(self._parts.values()), None)
            self._parts[tensor, context] = ModelPart.build(
                self.model, grid, self.tiled_layout, sample, self.training.row, minimum,
                known=None if first is None else first.even_trials(max(1, self.training.step.largest)),
                extents=self._extents if self.tries else None, tries=self.tries,
            )  # fmt: skip
        if (stage, tensor, context) not in self._parts:
            self._parts[stage, tensor, context] = self._parts[tensor, context].on(stage)
        return self._parts[stage, tensor, context]

    @property
    def _sample(self) -> TrialSample:
        return TrialSample(self.x, self.y, Run(training=True, seed=getattr(self.model, "seed", 0)))

    @cached_property
    def _extents(self) -> FieldExtents | None:
        """The extents of the fields in the model; None without a domain."""
        axes = len(self.parallel_layout.domain)
        return field_extents(self.model, axes, self._sample) if axes else None

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
            counts = (sum(s.size for name in names for s in specs[name]) for names in part.partitioned.cuts)
            sizes = tuple(samples * size for size in counts)
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
        return self._by_node(lambda size: size.private + size.shared / size.sharers)

    @cached_property
    def node_windows(self) -> dict[int, int]:
        """For each node, the bytes of shared windows, for which /dev/shm must have room."""
        return self._by_node(lambda size: size.shared / size.sharers)

    def _by_node(self, size: Callable[[MemoryBytes], float]) -> dict[int, int]:
        totals: dict[int, float] = {}
        for plan in self.by_rank:
            totals[plan.node] = totals.get(plan.node, 0.0) + sum(map(size, plan.memory.values()))
        return {node: round(total) for node, total in totals.items()}

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks that compute no samples in a step."""
        return tuple(plan.rank for plan in self.by_rank if not plan.samples)
