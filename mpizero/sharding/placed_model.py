"""Distribute a model over ranks: create the process groups, select this rank's part, allocate its arrays.

:class:`PlacedModel` holds all objects that a training step needs (``sharding/engine.py`` uses them), each created
according to the strategy and the settings. :class:`PartialLoad` describes a model whose arrays contain old and loaded
values, because loading a checkpoint failed half-way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import finalize

import numpy as np

from mpizero._util.checks import writes_in_place
from mpizero.comm.agreement import all_ranks
from mpizero.comm.communicator import Timeline
from mpizero.errors import ConfigError, SharedMemoryError
from mpizero.layout.flat import FlatLayout
from mpizero.nn.arrays import keep_freed_memory
from mpizero.optim.elementwise import DynamicLossScale, LossScaleState, with_copies
from mpizero.sharding.batch import DynamicScheduler, GrainScalars
from mpizero.sharding.config import (
    Config,
    Placement,
    assigned_in_advance,
    assigns_rounds,
    check_shard_nodes,
    check_wire,
    schedules_dynamically,
    scratch_use,
    sent_exactly,
)
from mpizero.sharding.device import ComputeDevice, open_gpu
from mpizero.sharding.exactness import (
    EVERY_CPU,
    SAME,
    bits,
    exactness,
    foreign_arithmetic,
    limit_blas_threads,
    within_rounding,
)
from mpizero.sharding.forward_backward import Runner
from mpizero.sharding.full_params import GlobalView
from mpizero.sharding.grad_reduce import (
    AllReduceBuffer,
    GradientExchange,
    GradientReducer,
    GradientViews,
    ReduceScatterBuffer,
)
from mpizero.sharding.integer_arrays import IntegerState
from mpizero.sharding.integrity import Integrity
from mpizero.sharding.mesh import Mesh
from mpizero.sharding.params import (
    Memory,
    MessageProgress,
    ParameterStore,
    UpdatePiece,
    fits_shared_memory,
    warn_private,
)
from mpizero.sharding.partition import (
    ParallelLayout,
    averaged_names,
    blocks_of,
    optimized_names,
    partition_model,
    resolve_tiles,
)
from mpizero.sharding.pipeline import make_runner
from mpizero.sharding.update import GlobalSums, Updater, UpdateScope
from mpizero.sharding.whole_tensors import TieExchange
from mpizero.types import BlockModel


class PlacedModel:
    """Hold one rank's part of a model: parameters, gradients and optimizer state, sharded as the strategy says.

    Construction, and every public method that is not marked otherwise, is collective over the ranks of ``mesh``.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The whole model.
    mesh : Mesh
        The ranks that train the model.
    config : Config
        The settings.
    placement : Placement
        What the strategy shards.
    parallel_layout : ParallelLayout, optional
        How the model is split over pipeline, tensor and context ranks. None: it is not split.
    device : int, optional
        Number of the node's GPU that this rank computes on, modulo the number of GPUs. None: the rank's number on its
        node. Ignored on the CPU.
    private : bool
        Whether every rank keeps its own copy of replicated arrays, although the ranks of a node could share memory.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        config: Config,
        placement: Placement,
        parallel_layout: ParallelLayout | None = None,
        *,
        device: int | None = None,
        private: bool = False,
    ) -> None:
        contexts = 1 if parallel_layout is None else parallel_layout.sample_parts
        self.model, self.mesh, self.config = model, mesh, config
        self.placement = placement.in_contexts(contexts)
        check_shard_nodes(placement, mesh)
        # Also where the construction fails, or a model is dropped without close().
        self._end_limit = finalize(self, limit_blas_threads(mesh.communicator, config.threads, model, config.device))
        self._end_limit.atexit = False
        self.block_model = isinstance(model, BlockModel)
        if callable(set_config := getattr(model, "set_sharding_config", None)):
            with all_ranks(mesh.communicator, "model's own settings"):
                set_config(config)
        self.compute_device = (
            ComputeDevice() if config.device == "cpu" else open_gpu(mesh.communicator, config, self.block_model, device)
        )
        if self.block_model and not mesh.is_guest:
            keep_freed_memory()
        self.dtype = np.dtype(model.dtype)
        check_wire(config, self.dtype, contexts, averaged_names(model))
        self._find_part(parallel_layout, private=private)
        self._scratch = scratch_use(config, self.grid.pipeline.size, by_block=self.block_model)
        used = {"scratch": self._scratch == "grains", "in_place": writes_in_place(model)}
        if not fits_shared_memory(self.grid, self.layout, self.dtype.itemsize, self.placement, config, **used):
            self._find_part(parallel_layout, private=True)
        try:
            self._take_memory()
        except SharedMemoryError as error:  # on all ranks: another program has taken the memory since the check
            self.memory.close()
            warn_private(self.grid.world, str(error))
            self._find_part(parallel_layout, private=True)
            self._take_memory()
        self.global_view = GlobalView(blocks_of(model), self.store, self.grid)
        #: Whether this rank prints notices about the model; with local SGD, where each rank has an engine of its own
        #: with one rank, only rank 0 of the mesh.
        self.prints_notices = self.grid.world.rank == 0
        self.scalars = GrainScalars(self.grid, self.layout, tuple(blocks_of(model)), self.integers)
        self.global_sums = (
            GlobalSums(self.grid, self.layout, optimized_names(model)) if self.grid.model.size > 1 else None
        )
        self.ties = self._tie_exchange()
        self.runner = self._make_runner()
        self.updater: Updater | None = None
        self.integrity = Integrity(self.grid, self.store, config.check_every)
        self.loss_scale: LossScaleState | None = None
        #: How global batches are cut into grains; a checkpoint may replace it.
        self.grain_rule = config.grain_rule(model)
        #: Set while a failed load has left the model with some old and some new values: it then refuses to be used.
        self.partially_loaded: PartialLoad | None = None
        self._begin_values()

    def _begin_values(self) -> None:
        self.store.begin(self.model)
        with all_ranks(self.grid.world, "start values"):
            self.integers.begin(self.model)

    def _find_part(self, parallel_layout: ParallelLayout | None, *, private: bool) -> None:
        """Set ``grid``, ``partitioned`` and ``layout``: the process groups, and this rank's part of the model.

        With ``private=True``, ranks share no memory.
        """
        axes = None if parallel_layout is None else parallel_layout.axes_of(self.mesh.size)
        self.grid = self.mesh.grid_of(axes, private=private)
        if self.grid.context.size > 1 and self.grid.order != tuple(range(self.grid.data.size)):
            self.grid = self.mesh.grid_of(axes, private=True)  # the parts of a grain must be neighbours in a round
        layout = resolve_tiles(parallel_layout or ParallelLayout(), self.config.tiles, self.model)
        self.partitioned = partition_model(self.model, self.grid, layout, self.compute_device.group)
        self.layout = self._layout_of(self.partitioned.stage)

    @property
    def bound_updater(self) -> Updater:
        """The updater of the bound optimizer, for callers that know that one is bound. Not collective."""
        assert self.updater is not None
        return self.updater

    @property
    def within_rounding(self) -> tuple[str, ...]:
        """Why results differ in bits from one process with the same tiles; empty if they do not. Not collective."""
        optimizer, layout = None if self.updater is None else self.updater.optimizer, self.partitioned.parallel_layout
        return within_rounding(layout, self.model, self.exchange.compression, self.config.accumulate, optimizer)

    @property
    def bits(self) -> str:
        """The CPUs on which the bits are the same: "every CPU", or "this CPU, because" and what else computes."""
        optimizer = None if self.updater is None else self.updater.optimizer
        return bits(foreign_arithmetic(self.model, self.config.device, optimizer))

    @property
    def exactness_suffix(self) -> str:
        """A text to append to a line of output, which says what results are equal to, and on which CPUs.

        The text is "" if they are equal to those of one process without tiles, on every CPU.
        """
        text, bits = exactness(self.partitioned.parallel_layout.virtual_ranks, self.within_rounding), self.bits
        return ("" if text == SAME else f", {text}") + ("" if bits == EVERY_CPU else f", the bits of {bits}")

    def _layout_of(self, stage: int) -> FlatLayout:
        return self.partitioned.layout(
            stage, one_unit=self.placement.one_unit, minimum_unit=self.config.minimum_parameter_group_size
        )

    def _take_memory(self) -> None:
        """Allocate the arrays of parameters and gradients, and create the objects that exchange them between ranks."""
        config, grid, placement = self.config, self.grid, self.placement
        self.memory, self.timeline = Memory(grid.node, MessageProgress()), Timeline()
        self.store = ParameterStore(
            self.layout,
            grid,
            self.memory,
            placement.shard_parameters,
            self.dtype,
            timeline=self.timeline,
            rounded=config.wire_parameters,
        )
        blocks = [block for chunk in self.partitioned.chunks for block in self.partitioned.cuts[chunk]]
        self.integers = self.store.integers = IntegerState(self.model, blocks, grid)
        elements = config.bucket_elements(self.dtype.itemsize)
        self.exchange = GradientExchange(
            self.store,
            placement,
            config.gradient_compression,
            elements=elements,
            exact=sent_exactly(placement, self.partitioned, self.layout, config.wire),
            wire=config.wire,
            ties=self.partitioned.has_shared_parameters,
        )
        self.compute_device.share_gradients(grid.data.size)
        allocator = self.compute_device.allocator(self.memory)
        with all_ranks(grid.world, "buffers"):
            views = GradientViews(self.layout, allocator, self.dtype, self.integers)
        rounds = None
        if assigns_rounds(placement, config, grid.data.size):
            in_place = writes_in_place(self.model)
            rounds = ReduceScatterBuffer(self.store, views, self.exchange, config.accumulate, in_place=in_place)
        dynamic = schedules_dynamically(placement, config, grid, grid.model.size)
        self.scheduler = DynamicScheduler(grid, self.memory) if dynamic else None
        #: Holds flat gradients: with DDP and ZeRO-1 in every step, otherwise only for ``local_gradients``.
        self.all_reduce = AllReduceBuffer(
            self.store,
            allocator,
            views,
            self.exchange,
            config.accumulate,
            by_block=self.block_model,
            scratch=self._scratch,
            shard=None if rounds is None else rounds.first_level,
            scheduler=self.scheduler,
        )
        self.reducer: GradientReducer = rounds or self.all_reduce

    @property
    def assigned_in_advance(self) -> str:
        """Why grains are assigned before a step although the settings ask for ``grain_assignment="dynamic"``, or ""."""
        return assigned_in_advance(self.placement, self.config, self.grid, self.grid.model.size)

    def _tie_exchange(self) -> Callable[[Sequence[UpdatePiece]], TieExchange] | None:
        """Return a function that makes a ``TieExchange`` (adds tied gradients of stages) for this rank's ranges.

        None if this rank's pipeline stage shares no parameter with another stage.
        """
        if not self.partitioned.has_shared_parameters:
            return None
        stages = {use.stage for uses in self.partitioned.uses.values() for use in uses}
        layouts = {
            stage: self.layout if stage == self.partitioned.stage else self._layout_of(stage) for stage in stages
        }
        return partial(TieExchange, self.grid, self.partitioned, layouts)

    def _make_runner(self) -> Runner:
        return make_runner(
            self.partitioned, self.grid, self.store, self.scalars, self.compute_device, self.current_loss_scale
        )

    # ------------------------------------------------------------------ changes

    def bind(self, optimizer: Any, loss_scale: DynamicLossScale | None = None) -> None:
        """Set the model's optimizer, with fresh state; it replaces an earlier optimizer.

        Batches are then cut into grains as the settings say, even if a loaded checkpoint had replaced the grain rule.

        Raises
        ------
        ConfigError
            If a loss scale is given for a functional model: the user's function computes its gradients, so the library
            cannot scale the loss.
        """
        if loss_scale is not None and not self.block_model:
            raise ConfigError("a loss scale needs a model of blocks: a black box computes its own gradient")
        self.loss_scale = None if loss_scale is None else loss_scale.start()
        if self.updater is not None:
            self.updater.release()
        with all_ranks(self.grid.world, first=True):
            self.exchange.compress(self.config.gradient_compression)
            scope = UpdateScope(self.exchange.replicated, not self.reducer.in_rounds, self.global_sums, self.ties)
            wrapped = with_copies(optimizer, ema=self.config.ema, masters=self.config.wire_parameters)
            if wrapped.needs_vectors:
                from mpizero.sharding.vectors import check_vector_method

                check_vector_method(optimizer, self.config, self.model, scaled=loss_scale is not None)
            self.updater = self._make_updater(wrapped, scope)
        self.integrity.watch(self.updater)
        self.grain_rule = self.config.grain_rule(self.model)

    def _make_updater(self, optimizer: Any, scope: UpdateScope) -> Updater:
        """Return an updater for the ranges of the parameters that this rank updates, on the host or on its GPU.

        Raises
        ------
        ConfigError
            If the setting ``optimizer_device`` asks for the GPU, but the optimizer is not one of the library's or
            updates whole tensors.
        """
        if self.config.device != "cpu":
            from mpizero.sharding.device_update import DeviceUpdater, StagedUpdater, updates_on_device

            if updates_on_device(self.config, optimizer):
                kind = DeviceUpdater if self.compute_device.keeps_gradients else StagedUpdater
                on_device: Any = self.compute_device.parameter_provider(self.store)
                return kind(optimizer, self.store, scope, on_device)
        if not optimizer.needs_vectors:
            return Updater(optimizer, self.store, scope)
        from mpizero.sharding.vectors import VectorUpdater

        return VectorUpdater(optimizer, self.store, scope)

    def current_loss_scale(self) -> float:
        """Return the factor by which losses are multiplied before the backward pass, 1.0 by default. Not collective."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def exchange_model(self, model: Any) -> None:
        """Replace the model by ``model``, which must have the same parameters; parameter values are kept."""
        self.model = model
        self.partitioned = partition_model(
            model, self.grid, self.partitioned.parallel_layout, self.compute_device.group
        )
        self.runner = self._make_runner()

    def complete_grain_rule(self, x: Any, y: Any) -> None:
        """Complete the default grain rule of a PyTorch or JAX model, by the work that the model does on samples.

        The grain rule says how global batches are cut into grains.
        Not collective; every rank calls it. The model counts this work from the types of ``x`` and ``y`` and the shapes
        of their samples; the arrays may be empty.
        """
        if self.grain_rule.coarse and self.grain_rule.efficient is None:
            self.grain_rule = replace(self.grain_rule, efficient=self.model.efficient_samples(x, y))

    def reserve(self, samples: int) -> None:
        """Allocate the memory for gradients that a step with ``samples`` samples in its global batch needs."""
        self.reducer.reserve(self.grain_rule.grains(samples).count * self.grid.context.size)

    @property
    def is_initial(self) -> bool:
        """Tell whether parameters and optimizer state still have their initial values. Not collective."""
        fresh = self.updater is None or self.updater.fresh
        return self.store.version == 1 and fresh and self.partially_loaded is None

    def start_over(self) -> None:
        """Reset parameters and optimizer state to their initial values."""
        self._begin_values()
        self.store.version = 1
        self.exchange.forget()
        if self.updater is not None:
            self.updater.reset()
            self.integrity.forget()
        self.grain_rule = self.config.grain_rule(self.model)

    def close(self) -> None:
        """Free the shared windows, and lift this model's limit on BLAS threads."""
        self._end_limit()
        if self.scheduler is not None:
            self.scheduler.close()
        self.memory.close()


@dataclass(frozen=True)
class PartialLoad:
    """List the arrays of a model that may contain old and loaded values, because reading a checkpoint failed half-way.

    ``paths`` are the names of these arrays in the checkpoint, the same on every rank. ``reason`` is the text of this
    rank's error, which may quote the error of another rank.
    """

    paths: frozenset[str]
    reason: str

    def without(self, paths: Iterable[str]) -> PartialLoad | None:
        """Return the description without the arrays ``paths``, now loaded completely; None if no array is left."""
        left = self.paths.difference(paths)
        return PartialLoad(left, self.reason) if left else None

    def __str__(self) -> str:
        """Return the text for error messages: what is wrong, why, and what the user can do."""
        more = f" and {len(self.paths) - 1} more arrays" if len(self.paths) > 1 else ""
        return (
            f"partially loaded: {min(self.paths)}{more} may hold parts of two states, since a checkpoint that had been "
            f"verified could not be read again ({self.reason}): load one whole, with the optimizer's state, by "
            "load_model, load_state or deserialize, or make a new model"
        )
