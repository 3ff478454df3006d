"""Construct and close a sharded model, which holds a wrapped model, a configuration and the engine that trains it."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from mpizero._util.checks import require, whole
from mpizero._util.names import check_names, explains, not_here
from mpizero._util.pytree import SampleTree
from mpizero._util.text import notice
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks, check_call, collective
from mpizero.comm.startup import agree_to_start
from mpizero.errors import ArgumentError, CheckpointError, SharedMemoryError, StateError
from mpizero.layout import Span
from mpizero.layout.flat import FlatLayout, joined
from mpizero.parallel.batch.step_scalars import Totals
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.engine import Engine
from mpizero.parallel.model.private_fallback import check_movable, in_private_memory
from mpizero.parallel.partition.blocks import blocks_of
from mpizero.parallel.partition.description import describe_model
from mpizero.parallel.partition.model_checks import check_model, check_own_modules
from mpizero.parallel.partition.parallel_layout import ParallelLayout
from mpizero.parallel.partition.tiles import misfits
from mpizero.parallel.placement import Placement, placement
from mpizero.parallel.step_report import BadSteps, SkippedSteps, StepReport
from mpizero.types import Array

T = TypeVar("T")


class Pending(NamedTuple):
    """Hold a computed gradient that has not been applied to the parameters yet.

    ``totals`` are loss and weight of the global batch. ``reduced`` is the averaged gradient; None if it is not yet
    summed over the ranks. ``sent`` is the counter of sent bytes before the gradient was computed. ``calls`` counts the
    gradients computed since the last step.
    """

    totals: Totals
    reduced: Array | None
    sent: int
    calls: int = 1


@explains
class ShardedCore(ABC):
    """Construct, describe and close a sharded model.

    Construction, and every method that is not marked otherwise, is collective over ``config.comm``. The model holds
    windows and communicators: close it, or use it as a context manager.

    Parameters
    ----------
    wrapped_model : BlockModel or BlackBoxModel
        The model to train. It is never changed: the sharded model holds the parameters.
    config : ShardingConfig
        The ranks and how they work together.

    Raises
    ------
    TypeError
        If an argument is None or of a wrong type.
    """

    strategy: ClassVar[str]
    #: Name of the strategy in the metadata; None takes the name in the table of strategies.
    label: ClassVar[str | None] = None
    #: Pipeline, tensor and context parallelism of the model; None for data parallelism alone.
    _parallel_layout: ParallelLayout | None = None
    #: The sharded optimizer that is bound to the model.
    _optimizer: Any = None
    #: Whether this is a copy of a sharded model, so that its wrapped model has been compared between ranks already.
    _is_copy = False

    def __init__(self, wrapped_model: Any, config: ShardingConfig) -> None:
        if not isinstance(config, ShardingConfig):
            raise ArgumentError(f"{type(self).__name__} needs a ShardingConfig, got {config!r}")
        self._wrapped, self._config = wrapped_model, config
        self._which = config.number_model()
        check_call(config.communicator, "make a model", self._which)
        self._engine: Engine | None = None
        self._pending: Pending | None = None
        self._cache: Array | None = None
        self._mean_every = 0
        self.last_step: StepReport | None = None
        self._skipped = SkippedSteps(config.bad_steps)
        self._on_before_initialize_sharding()
        self._initialize_sharding()

    if not TYPE_CHECKING:  # where it would hide what is misspelt

        def __getattr__(self, name: str) -> Any:
            """Raise :class:`AttributeError` for what is not there."""
            raise not_here(self, name)

    # ------------------------------------------------------------------ hooks

    def _on_before_initialize_sharding(self) -> None:  # noqa: B027  (a hook that most need not)
        """Do nothing; a subclass may override this to run code before parameters are distributed."""

    def _on_before_close(self) -> None:  # noqa: B027
        """Do nothing; a subclass may override this to run code before the engine is closed. Collective."""

    def _initialize_sharding(self) -> None:
        """Check that all ranks passed equal arguments, and make the engine, which distributes the parameters."""
        agree_to_start(self._config.communicator, self._plans)
        check_own_modules(self._config.communicator, self._wrapped)
        self._config.communicator.run_deferred_closes()
        self._engine = Engine(self._wrapped, self._config, self._placement, self._parallel_layout)
        if self._config.tiles is not None and not self._is_copy and self._engine.prints_notices:
            for reason in misfits(self._engine.partitioned.parallel_layout):
                notice(f"{reason}, so results agree with other layouts only within rounding")
        if self._engine.assigned_in_advance and not self._is_copy and self._engine.prints_notices:
            notice(f"grain_assignment='dynamic' has no effect here: {self._engine.assigned_in_advance}")

    def _with_room(self, step: Callable[[Engine], T]) -> T:
        """Return ``step(engine)``; if its gradients do not fit into shared memory, move the model out of it and retry.

        After that every rank keeps its own copy of the model in memory that it does not share.
        """
        try:
            return step(self.engine)
        except SharedMemoryError as error:  # raised on all ranks alike, before anything was computed
            engine = self.engine
            check_movable(engine, error)
            self._engine = None  # the model counts as closed if a rank has no room for a copy of its own either
            self._engine = in_private_memory(engine, self._parallel_layout, error)
            self._engine.asked = engine.asked
            return step(self.engine)

    def _stepped(self, report: StepReport) -> None:
        """Store the report of a step; if it was skipped, warn or raise as ``config.bad_steps`` says. Not collective."""
        self.last_step = report
        self.invalidate_cache()
        self._skipped.see(report, speaks=self.engine.grid.world.rank == 0)

    @collective
    def reserve(self, global_batch: int) -> None:
        """Allocate the shared memory that steps on ``global_batch`` samples need, before the first step.

        Without this call the first step allocates it. If a node has too little shared memory, the model is moved out of
        it: every rank keeps its own copy from then on, and rank 0 prints a notice. A model can be moved only while its
        optimizer has made no step and loaded no state, so call this before a checkpoint is loaded.

        Raises
        ------
        SharedMemoryError
            If there is too little shared memory, and the optimizer has state already.
        """
        with all_ranks(self._config.communicator):
            require("reserve: global_batch", global_batch, whole(1, of=" of samples"))
        self._with_room(lambda engine: engine.reserve(global_batch))

    def count_skipped_steps(self, policy: BadSteps) -> None:
        """From now on treat skipped steps as ``policy`` says, in place of ``config.bad_steps``. Not collective."""
        self._skipped = SkippedSteps(policy)

    def _plans(self) -> dict[str, Any]:
        """Return all values that must be equal on all ranks, by name; subclasses add to them. Not collective."""
        if self._wrapped is None:
            raise ArgumentError(f"{type(self).__name__} needs a model, got None")
        check_model(self._wrapped)
        blocks = blocks_of(self._wrapped)
        check_names(joined(block, spec.name) for block, specs in blocks.items() for spec in specs)
        plans: dict[str, Any] = {"strategy": self.strategy, "ShardingConfig": self._config.comparable()}
        if self._is_copy:
            return plans
        grain = {"the samples of a default grain": self._config.grain_rule(self._wrapped).efficient}
        return {**plans, **describe_model(self._wrapped, blocks), **grain}

    def _update_local_shard_from_full(self, values: Array) -> None:
        """Set the parameters to ``values``, a 1-D array of the whole model; each rank copies only its own ranges."""
        self.engine.whole.fill(values)
        self.engine.begin_average()
        self.invalidate_cache()

    def _callers(self) -> tuple[Communicator, str]:
        """Return the ranks that must make the same collective calls, and the name of this model in error messages.

        Not collective.
        """
        _ = self.loadable_engine
        return self._config.communicator, self._which

    def _check_call(self, operation: str) -> None:
        """Raise ``CollectiveMismatch`` if a rank's next collective call is not the method ``operation``. Collective.

        Methods that are collective only in some cases call this.
        """
        comm, which = self._callers()
        check_call(comm, f"{type(self).__name__}.{operation}", which)

    # ------------------------------------------------------------------ properties (not collective)

    @property
    def _placement(self) -> Placement:
        """The row of the placement table for this model's strategy: which state is sharded, and in which units."""
        return placement(self.strategy)

    @property
    def parallel_layout(self) -> ParallelLayout | None:
        """The way in which the model is split over ranks; None if every rank computes the whole model."""
        return self._parallel_layout

    @property
    def shards_parameters(self) -> bool:
        """Tell whether parameters are sharded by the strategy or split over ranks, even if the ranks share memory."""
        return self._parallel_layout is not None or self._placement.shard_parameters

    @property
    def keeps_copies(self) -> bool:
        """True if each rank trains a copy of its own, as :class:`LocalSGDOptimizer` does."""
        return bool(self._mean_every)

    @property
    def batch_group(self) -> Communicator:
        """The communicator over whose ranks a global batch is divided; pass it to ``data.batches`` as ``group``.

        It has all ranks also where each rank trains a copy of its own (:class:`LocalSGDOptimizer`).
        """
        return self._config.communicator if self._mean_every else self.engine.grid.batch

    def grain_size(self, global_batch: int, samples: tuple[Any, Any] | None = None) -> int:
        """Return the number of samples of a full grain, for a global batch of ``global_batch`` samples.

        Not collective. Where ``config.micro_batch`` is None it depends on the model, and loading a checkpoint with
        optimizer state may change it. For a model of PyTorch or JAX it depends on the shapes of samples, too, which the
        first batch tells, or ``samples``; other models ignore these.

        Parameters
        ----------
        global_batch : int
            Number of samples.
        samples : tuple or None
            Samples and targets ``(x, y)`` such as every rank will train on, of which only shapes and types count; there
            may be none, as in ``x[:0]``. Every rank gives them, or none does.

        Raises
        ------
        ArgumentError
            If ``samples`` is no pair.
        DataError
            If arrays in it have different numbers of samples.
        """
        engine = self.loadable_engine
        if samples is not None:
            if not isinstance(samples, tuple) or len(samples) != 2:
                raise ArgumentError(f"grain_size: samples is a tuple (x, y), got {type(samples).__name__}")
            tree = SampleTree.of(x=samples[0], y=samples[1])
            tree.count()
            if not tree.uncut:
                engine.complete_grain_rule(*tree.cut(slice(0, 0)))
        return engine.grain_rule.grain_size(global_batch)

    @property
    def engine(self) -> Engine:
        """The engine, which trains the model.

        Raises
        ------
        RuntimeError
            If the model or its configuration is closed.
        CheckpointError
            If loading a checkpoint has failed half-way, so that some parameters have old values and some new ones.
        """
        engine = self.loadable_engine
        if engine.half_loaded is not None:
            raise CheckpointError(f"this {type(self).__name__} is {engine.half_loaded}")
        return engine

    @property
    def loadable_engine(self) -> Engine:
        """The engine, even if loading a checkpoint has failed half-way: for loading a checkpoint again."""
        if self._engine is not None and not self._engine.config.holds(self._engine.grid):
            raise StateError(
                f"the configuration of this {type(self).__name__} is closed, and the communicators are freed that the "
                "model works with: close the model first, or make both in one with statement, the configuration first"
            )
        if self._engine is None:
            raise StateError(
                f"this {type(self).__name__} is closed and its memory is freed: make a new one, and save or read "
                "parameters before close() or the end of its with block"
            )
        return self._engine

    @property
    def wrapped_model(self) -> Any:
        """The model that was passed to the constructor."""
        return self._wrapped

    @property
    def config(self) -> ShardingConfig:
        """The configuration that was passed to the constructor."""
        return self._config

    @property
    def sharding_configuration(self) -> ShardingConfig:
        """The same as :attr:`config`."""
        return self._config

    @property
    def layout(self) -> FlatLayout:
        """Names, shapes and offsets of all parameters of the whole model, the same on every rank."""
        return self.engine.whole.layout

    @property
    def rank(self) -> int:
        """The number of this rank in ``config.comm``."""
        return self._config.communicator.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in ``config.comm``, also if several of them hold one replica together."""
        return self._config.communicator.size

    @property
    def parameter_count(self) -> int:
        """The number of parameter elements of the whole model."""
        return self.engine.whole.parameter_count

    @property
    def owned(self) -> tuple[Span, ...]:
        """The range of each unit's parameters that this rank owns by the shard rule.

        Ranges count elements of the flat vector of all parameters of this rank's pipeline stage and tensor part.
        """
        return self.engine.store.share.spans

    @property
    def local_parameter_shard(self) -> Array:
        """A copy of the parameters that this rank owns: the values of all ranges of :attr:`owned`, concatenated."""
        store = self.engine.store
        return np.concatenate([store.values[:0], *(store.owned(unit.index) for unit in store.layout.units)])

    @property
    def shard_start(self) -> int:
        """The start of the first range of :attr:`owned`; 0 if there is none."""
        return self.owned[0].start if self.owned else 0

    @property
    def shard_size(self) -> int:
        """The number of parameter elements that this rank owns."""
        return self.engine.store.share.size

    @property
    def default_loss_function(self) -> Any:
        """The loss layer of the wrapped model; None for a black box, whose function computes the loss itself."""
        return getattr(self._wrapped, "loss", None) if hasattr(self._wrapped, "blocks") else None

    def invalidate_cache(self) -> None:
        """Drop the kept copy of the gathered parameters, because parameters have changed. Not collective."""
        self._cache = None

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """Commit an asynchronous save that is still running, and free windows; a second call does nothing."""
        if self._engine is None:
            return
        if self._engine.config.holds(self._engine.grid):  # else its communicators are freed already
            self._check_call("close")
        self._free()

    def _free(self) -> None:
        """Close the model without checking that all ranks call ``close`` now. Collective."""
        if self._engine is None:
            return
        try:
            self._on_before_close()
        finally:
            engine, self._engine = self._engine, None
            self._pending = self._cache = None
            engine.close()

    def __enter__(self) -> Self:
        """Return this model. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the model; after an exception, postpone that until all ranks make a model or close ``config``."""
        if error is None:
            self.close()
        elif self._engine is not None:  # the other ranks may not have raised
            self._engine.grid.world.defer_close(self._free)
