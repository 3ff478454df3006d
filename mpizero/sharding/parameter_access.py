"""Construct and close a sharded model, read and set its parameters, and describe it.

:class:`ParameterAccess` holds a wrapped model, a configuration and the engine that trains it. If the first step does
not find enough shared memory, this class moves the model to memory that ranks do not share (:func:`in_private_memory`).
The class also reads and sets the parameters: as one 1-D array, or as named arrays. :func:`describe` says what is
replicated, what is sharded, and how many bytes a rank stores and sends. The functions at the end of the module gather
values of all parameter elements, or arrays of optimizer state, of the whole model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar

import numpy as np

from mpizero._util.checks import number_array, require, whole
from mpizero._util.names import check_names, nearest, no_attribute
from mpizero._util.pytree import SampleTree
from mpizero._util.text import notice
from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_arrays, agree_on_call, all_ranks, check_call, collective, recorded
from mpizero.comm.reduce import gather_spans
from mpizero.comm.startup import agree_to_start
from mpizero.errors import ArgumentError, CheckpointError, ConfigError, LayoutError, SharedMemoryError, StateError
from mpizero.layout import Span
from mpizero.layout.flat import FlatLayout, ParameterUse, by_global_name, joined
from mpizero.nn.layer import start_value
from mpizero.optim.elementwise import state_size, state_specs, tensor_state_size
from mpizero.sharding.batch import Totals
from mpizero.sharding.config import Config, Placement, ShardingConfig, placement
from mpizero.sharding.engine import Engine
from mpizero.sharding.exactness import exactness
from mpizero.sharding.mesh import Mesh
from mpizero.sharding.params import Shard, UpdatePiece, warn_private
from mpizero.sharding.partition import (
    ParallelLayout,
    blocks_of,
    check_distinct_modules,
    check_model,
    describe_model,
    incompatible_axes,
)
from mpizero.sharding.step_report import SkippedSteps, StepReport
from mpizero.sharding.update import Updater
from mpizero.types import Array

T = TypeVar("T")


class Pending(NamedTuple):
    """Hold a computed gradient that has not been applied to the parameters yet.

    ``totals`` are loss and weight of the global batch. ``reduced`` is the averaged gradient; None if it is not yet
    summed over the ranks. ``sent`` is the number of bytes that this rank had sent before it computed the
    gradient. ``calls`` counts the gradients computed since the last step.
    """

    totals: Totals
    reduced: Array | None
    sent: int
    calls: int = 1


class ParameterAccess:
    """Construct, describe and close a sharded model, read and set its parameters.

    Every method that is not marked otherwise is collective over the ranks of the mesh. The parameters of the
    constructor are those of :class:`Model`.

    Raises
    ------
    TypeError
        If the model is None or of a wrong type.
    """

    #: What the last training step did; None before it.
    last_step: StepReport | None = None
    #: The sharded optimizer that is bound to the model.
    _optimizer: Any = None
    #: Whether this is a copy of a sharded model, so that its wrapped model has been compared between ranks already.
    _is_copy = False
    #: Number of steps between two averages where each rank trains a copy of its own; else 0.
    _mean_every = 0
    _pending: Pending | None = None
    #: The gathered parameters, kept until they change.
    _cache: Array | None = None
    #: The engine; None once the model is closed.
    _open_engine: Engine | None = None

    def __init__(
        self,
        wrapped_model: Any,
        config: Config,
        mesh: Mesh,
        strategy: str,
        *,
        parallel_layout: ParallelLayout | None = None,
        optimizer: Any = None,
        owns_mesh: bool = False,
    ) -> None:
        self._optimizer = optimizer  # until it is bound
        self._wrapped, self._config, self._mesh = wrapped_model, config, mesh
        self._strategy, self._parallel_layout, self._owns_mesh = strategy, parallel_layout, owns_mesh
        self._which = mesh.number_model()
        self._rank, self._world_size = mesh.rank, mesh.size
        check_call(mesh.communicator, "make a model", self._which)
        self._skipped = SkippedSteps(config.bad_steps)
        self._place()
        unbound, self._optimizer = self._optimizer, None
        if unbound is not None:
            try:
                unbound.set_model(self)
            except BaseException:
                self._engine.grid.world.defer_close(self._free)  # the other ranks may not have raised
                raise

    if not TYPE_CHECKING:  # a type checker would accept every misspelt name

        def __getattr__(self, name: str) -> Any:
            """Raise :class:`AttributeError`; if PyTorch has an attribute ``name``, the message names the equivalent."""
            raise no_attribute(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise :class:`ArgumentError`, which names the methods that take samples."""
        raise ArgumentError(
            "a sharded model is not called: model.predict(x), model.evaluate(x, y) or model.train(x, y)"
        )

    def __reduce__(self) -> NoReturn:
        """Raise :class:`ArgumentError`: a process holds only a part of a sharded model, which cannot be pickled."""
        raise ArgumentError("a sharded model is not pickled or copied: model.save_model(path), on all ranks, saves it")

    def _place(self) -> None:
        """Check that all ranks passed equal arguments, and make the engine, which distributes the parameters."""
        comm = self._mesh.communicator
        agree_to_start(comm, self._plans)
        check_distinct_modules(comm, self._wrapped)
        comm.run_deferred_closes()
        engine = Engine(self._wrapped, self._mesh, self._config, self._placement, self._parallel_layout)
        self._open_engine = engine
        if self._config.tiles is not None and not self._is_copy and engine.prints_notices:
            for reason in incompatible_axes(engine.partitioned.parallel_layout):
                notice(f"{reason}, so results agree with other layouts only within rounding")
        if engine.assigned_in_advance and not self._is_copy and engine.prints_notices:
            notice(f"grain_assignment='dynamic' has no effect here: {engine.assigned_in_advance}")

    def _with_private_fallback(self, step: Callable[[Engine], T]) -> T:
        """Return ``step(engine)``; if gradients do not fit into shared memory, move the model out and try again.

        After the move every rank keeps its own copy of the model in private memory.
        """
        try:
            return step(self._engine)
        except SharedMemoryError as error:  # raised on all ranks alike, before anything was computed
            engine = self._engine
            check_movable(engine, error)
            self._open_engine = None  # the model counts as closed if a rank has no room for a copy of its own either
            self._open_engine = in_private_memory(engine, self._parallel_layout, error)
            self._open_engine.step_arguments = engine.step_arguments
            return step(self._open_engine)

    def _stepped(self, report: StepReport) -> None:
        """Store the report of a step; if it was skipped, warn or raise as ``config.bad_steps`` says. Not collective."""
        self.last_step, self._cache = report, None
        self._skipped.see(report, speaks=self._engine.grid.world.rank == 0)

    @collective
    def reserve(self, global_batch: int) -> None:
        """Allocate the shared memory that steps on ``global_batch`` samples need, before the first step.

        Without this call the first step allocates the memory. If a node has too little shared memory, the model is
        moved to private memory: every rank keeps its own copy from then on, and rank 0 prints a notice. A model can be
        moved only while its optimizer has made no step and loaded no state, so call this before a checkpoint is loaded.

        Raises
        ------
        SharedMemoryError
            If there is too little shared memory, and the optimizer has state already.
        """
        with all_ranks(self._mesh.communicator):
            require("reserve: global_batch", global_batch, whole(1, of=" of samples"))
        self._with_private_fallback(lambda engine: engine.reserve(global_batch))

    def _plans(self) -> dict[str, Any]:
        """Return all values that must be equal on all ranks, by name; :class:`Model` adds to them. Not collective."""
        split: dict[str, Any] = {}
        if self._parallel_layout is not None:
            _ = self._parallel_layout.axes_of(self.world_size)  # or an error
            stage, _ = self._placement.zero_stage, self._parallel_layout.chunks
            split = {"the parallel layout": {**self._parallel_layout.comparable(), "zero_stage": stage}}
        if self._wrapped is None:
            raise ArgumentError(f"{self._name} needs a model, got None")
        check_model(self._wrapped)
        _ = self._mesh.axes  # or an error for sizes that do not make the number of ranks
        if self._parallel_layout is None and self._mesh.splits_model:
            raise ConfigError(f"{self._name} does not split a model: give this mesh to mz.distribute")
        blocks = blocks_of(self._wrapped)
        check_names(joined(block, spec.name) for block, specs in blocks.items() for spec in specs)
        # Ranks of different meshes have models of different kinds: the setting is named, not what follows from it.
        ranks = {} if isinstance(self._config, ShardingConfig) else {"Mesh": self._mesh.comparable()}
        settings = self._config.comparable() | ({} if ranks else self._mesh.comparable())
        plans: dict[str, Any] = {**ranks, "strategy": self._kind, **split, type(self._config).__name__: settings}
        if self._is_copy:
            return plans
        grain = {"the samples of a default grain": self._config.grain_rule(self._wrapped).efficient}
        return {**plans, **describe_model(self._wrapped, blocks), **grain}

    def _fill(self, values: Array) -> None:
        """Set the parameters to ``values``, a 1-D array of the whole model; each rank copies only its own ranges."""
        self._engine.global_view.fill(values)
        self._engine.begin_copies()
        self._cache = None

    def _callers(self) -> tuple[Communicator, str]:
        """Return the ranks that must make the same collective calls, and the name of this model in error messages.

        Not collective.
        """
        _ = self._loadable_engine
        return self._mesh.communicator, self._which

    def _check_call(self, operation: str) -> None:
        """Raise ``CollectiveMismatch`` if a rank's next collective call is not the method ``operation``. Collective.

        Methods that are collective only in some cases call this method.
        """
        comm, which = self._callers()
        check_call(comm, f"{type(self).__name__}.{operation}", which)

    # ------------------------------------------------------------------ properties (not collective)

    @property
    def _placement(self) -> Placement:
        """The :class:`Placement` of this model's strategy: which state is sharded, and in which units."""
        return placement(self._strategy)

    @property
    def _kind(self) -> str:
        """The strategy, or "hybrid" if the model is split over ranks."""
        return self._strategy if self._parallel_layout is None else "hybrid"

    @property
    def _label(self) -> str:
        """The strategy's name in :meth:`Model.metadata`."""
        return self._placement.strategy if self._parallel_layout is None else "3D-Parallelism (Hybrid)"

    @property
    def _name(self) -> str:
        """The name of this model in error messages."""
        return f"{type(self).__name__} ({self._strategy}{'' if self._parallel_layout is None else ', split'})"

    @property
    def _shards_parameters(self) -> bool:
        """True if parameters are sharded by the strategy or split over ranks, even if the ranks share memory."""
        return self._parallel_layout is not None or self._placement.shard_parameters

    @property
    def batch_group(self) -> Communicator:
        """The communicator over whose ranks a global batch is divided; pass it to ``data.batches`` as ``group``.

        With :class:`LocalSGDOptimizer`, where each rank trains its own copy of the model, it is the communicator of all
        ranks of the mesh.
        """
        return self._mesh.communicator if self._mean_every else self._engine.grid.batch

    def grain_size(self, global_batch: int, samples: tuple[Any, Any] | None = None) -> int:
        """Return the number of samples of a full grain, for a global batch of ``global_batch`` samples.

        Not collective. If ``config.micro_batch`` is None, the size depends on the model, and loading a checkpoint with
        optimizer state may change it. For a PyTorch or JAX model it also depends on the shapes of samples, which are
        taken from ``samples`` or from the first training batch; other models ignore ``samples``.

        Parameters
        ----------
        global_batch : int
            Number of samples.
        samples : tuple or None
            Samples and targets ``(x, y)`` like those of the training. Only shapes and types are used, so that empty
            arrays such as ``x[:0]`` suffice. All ranks pass samples, or none does.

        Raises
        ------
        ArgumentError
            If ``samples`` is not a pair.
        DataError
            If arrays in ``samples`` have different numbers of samples.
        """
        engine = self._loadable_engine
        if samples is not None:
            if not isinstance(samples, tuple) or len(samples) != 2:
                raise ArgumentError(f"grain_size: samples is a tuple (x, y), got {type(samples).__name__}")
            tree = SampleTree.of(x=samples[0], y=samples[1])
            tree.count()
            if not tree.uncut:
                engine.complete_grain_rule(*tree.cut(slice(0, 0)))
        return engine.grain_rule.grain_size(global_batch)

    @property
    def _engine(self) -> Engine:
        """The engine, which trains the model.

        Raises
        ------
        RuntimeError
            If the model or its configuration is closed.
        CheckpointError
            If loading a checkpoint has failed half-way, so that some parameters have old values and some new ones.
        """
        engine = self._loadable_engine
        if engine.partially_loaded is not None:
            raise CheckpointError(f"this {self._name} is {engine.partially_loaded}")
        return engine

    @property
    def _loadable_engine(self) -> Engine:
        """The engine, even if loading a checkpoint has failed half-way: for loading a checkpoint again."""
        engine = self._open_engine
        if engine is None:
            raise StateError(
                f"this {self._name} is closed and its memory is freed: make a new one, and save or read parameters "
                "before close() or the end of its with block"
            )
        if not engine.grid.is_open:
            raise StateError(
                f"the Mesh (or ShardingConfig) of this {self._name} is closed, and its communicators are freed: close "
                "the model first, or make both in one with statement, the model last"
            )
        return engine

    @property
    def wrapped_model(self) -> Any:
        """The model that was passed to the constructor."""
        return self._wrapped

    @property
    def mesh(self) -> Mesh:
        """The ranks that train the model."""
        return self._mesh

    @property
    def config(self) -> Config:
        """The settings that were passed to the constructor."""
        return self._config

    @property
    def rank(self) -> int:
        """The rank of this process in the mesh."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of all ranks in the mesh (not of replicas, which several ranks may hold together)."""
        return self._world_size

    @property
    def parameter_count(self) -> int:
        """The number of parameter elements of the whole model."""
        return self._engine.global_view.parameter_count

    @property
    def owned(self) -> tuple[Span, ...]:
        """For each unit, the range of its parameters that this rank owns: its shard.

        Ranges are in elements of the flat vector of all parameters of this rank's pipeline stage and tensor part. The
        shards of a unit on the ranks of a data group are equally long, up to one element.
        """
        return self._engine.store.shard.spans

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """Commit an asynchronous save that is still running, and free windows; a second call does nothing."""
        engine = self._open_engine
        if engine is None:
            return
        if engine.grid.is_open:  # else its communicators are freed already
            self._check_call("close")
        self._free()

    def _free(self) -> None:
        """Close the model without checking that all ranks call ``close`` now. Collective."""
        engine, self._open_engine = self._open_engine, None
        if engine is not None:
            self._pending = self._cache = None
            engine.close()
            self._mesh.drop_model(last_closes=self._owns_mesh)

    def __enter__(self) -> Self:
        """Return this model. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the model (collective); after an exception, only when all ranks next create one or close the mesh."""
        if error is None:
            self.close()
        elif self._open_engine is not None:  # the other ranks may not have raised
            self._open_engine.grid.world.defer_close(self._free)

    # ------------------------------------------------------------------ parameters

    @recorded
    def gather_full_parameters(self) -> Array:
        """Return all parameters of the model as a read-only 1-D array in declared order, on every rank.

        Until parameters change, further calls return the same array object.
        """
        view = self._engine.global_view
        # A rank that forgot its cache alone must not gather alone.
        cached = agree_on_call(self._mesh.communicator, (self._cache is not None,))[:, 0]
        if self._cache is None or not cached.all():
            self._cache = view.vector()
            self._cache.flags.writeable = False
        return self._cache

    @recorded
    def set_parameters(self, values: Array) -> None:
        """Set all parameters from a 1-D array in declared order, which must be the same on every rank.

        A moving average (``ShardingConfig(ema=...)``) begins anew from these values. Optimizer state and the residuals
        of gradient compression are kept, so a program may change parameters between steps, to clip them to bounds, say.

        Raises
        ------
        LayoutError
            If the array does not have one element for each parameter element of the model.
        ConfigError
            If ranks pass different values. The message names the first rank and parameter that differ.
        """
        self._fill(self._checked("set_parameters", values))

    def _checked(self, operation: str, values: Array) -> Array:
        array = np.empty(0)

        def named() -> dict[str, Array]:
            nonlocal array
            if isinstance(values, Mapping):
                raise LayoutError(
                    f"one vector of all parameters is taken, got a {type(values).__name__} by name: use load_named"
                )
            vector = number_array(values, "the vector of all parameters", complex=False)
            array = vector.astype(self._engine.dtype, copy=False)
            if array.shape != (self.parameter_count,):
                raise LayoutError(
                    f"got {array.size} values in an array of shape {array.shape}; the model has {self.parameter_count} "
                    f"parameters and takes an array of shape ({self.parameter_count},)"
                )
            return {_called(e): vector[e.span.start : e.span.stop] for e in self._engine.global_view.layout.parameters}

        agree_arrays(self._mesh.communicator, operation, named)
        return array

    @recorded
    def named_parameters(self) -> dict[str, Array]:
        """Return copies of all parameters and integer arrays of the whole model by name, on every rank."""
        return self._engine.global_view.named(self.gather_full_parameters()) | self._engine.integers.all_values()

    @recorded
    def load_named(self, arrays: Mapping[str, Array]) -> None:
        """Set all parameters from arrays by name: a dictionary or an open ``.npz``, the same on every rank.

        Integer arrays that ``arrays`` contains are set, too. Moving average and optimizer state are treated as in
        :meth:`set_parameters`.

        Raises
        ------
        LayoutError
            If names or shapes differ from the model's.
        ConfigError
            If ranks pass different arrays. The message names the first rank and parameter that differ.
        """
        values = np.empty(self.parameter_count, self._engine.dtype)
        integers: dict[str, Array] = {}
        agree_arrays(self._mesh.communicator, "load_named", lambda: self._arrange(arrays, values, integers))
        self._engine.integers.set(integers)
        self._fill(values)

    def _arrange(self, arrays: Mapping[str, Array], values: Array, integers: dict[str, Array]) -> dict[str, Array]:
        """Check arrays by name, and copy them into ``values``, a 1-D array of the whole model. Not collective.

        Integer arrays are added to ``integers``. Return all checked arrays by the names that error messages use.
        """
        entries = {entry.spec.name: entry for entry in self._engine.global_view.layout.parameters}
        if not isinstance(arrays, Mapping):
            raise LayoutError(
                f"load_named takes arrays by name, got {type(arrays).__name__}: for one vector use set_parameters"
            )
        specs = by_global_name(self._engine.integers.specs)
        missing, unknown = sorted(entries.keys() - arrays.keys()), sorted(arrays.keys() - entries.keys() - specs.keys())
        if missing or unknown:
            hint = nearest(unknown[0], missing or entries) if unknown else ""
            raise LayoutError(f"parameters do not match the model: missing {missing[:5]}, unknown {unknown[:5]}{hint}")
        checked = {}
        for name, entry in entries.items():
            array = number_array(arrays[name], f"parameter {name!r}", complex=entry.spec.complex)
            if array.shape != entry.spec.shape:
                raise LayoutError(f"parameter {name!r} has shape {array.shape}, the model's has {entry.spec.shape}")
            entry.spec.view(values[entry.span.start : entry.span.stop])[...] = array
            checked[_called(entry)] = array
        for name, spec in specs.items():
            if name in arrays:
                integers[name] = checked[f"integer array {name!r}"] = start_value(name, spec, arrays[name])
        return checked

    @collective
    def parameters_sha256(self) -> str:
        """Return the SHA-256, in hexadecimal, of the bytes of all parameters of the model in declared order.

        The bytes of integer arrays follow those of the parameters. Only one unit at a time is gathered, to save memory.
        """
        digest = hashlib.sha256()
        for values in self._engine.global_view.units():
            digest.update(values.tobytes())
        for array in self._engine.integers.all_values().values():
            digest.update(array.tobytes())
        return digest.hexdigest()


def check_movable(engine: Engine, error: SharedMemoryError) -> None:
    """Check that :func:`in_private_memory` can move everything that ``engine`` holds.

    Collective over all ranks. It is called after ``error``, for lack of shared memory, was raised on all of them.

    Raises
    ------
    SharedMemoryError
        If the optimizer has made a step or loaded a state, or compression has residuals. State and residuals cannot be
        moved, because the ranks of a node share one copy of them.
    """
    updater = engine.updater
    used = np.array([(updater is not None and not updater.fresh) or engine.exchange.owes], np.int8)
    engine.grid.world.allreduce(used, "max", "private memory")
    if used[0]:
        raise SharedMemoryError(
            f"{error}; or call reserve(global_batch) once, before the first step and before a checkpoint is loaded: "
            "then every rank keeps its own copy where memory is short. Parameters and state are unchanged"
        ) from error


def in_private_memory(engine: Engine, parallel_layout: ParallelLayout | None, error: SharedMemoryError) -> Engine:
    """Close ``engine``, and return a new engine in which every rank keeps its own copy of the model.

    Collective over all ranks, all of which have raised ``error`` and passed :func:`check_movable`. Parameters, integer
    arrays, step number and loss scale are copied. The optimizer is bound to the new engine.

    [Note: a move in the first step] Construction checks how much shared memory is free, but does not know the batch,
    whose grains decide how many flat gradients DDP and ZeRO-1 store. Other jobs may also take memory of the node
    meanwhile. Without this move a job in a container, or beside another job, would fail in its first step although it
    can train in private memory.
    """
    updater, units = engine.updater, engine.layout.units
    values, version = [engine.store.owned(unit.index).copy() for unit in units], engine.store.version
    engine.close()
    warn_private(engine.grid.world, str(error))
    made = Engine(engine.model, engine.mesh, engine.config, engine.placement, parallel_layout, private=True)
    for unit, saved in zip(units, values, strict=True):
        made.store.owned(unit.index)[:] = saved
    made.integers.copy_from(engine.integers)
    made.store.all_gather()
    made.store.version = version
    made.step_number, made.grain_rule = engine.step_number, engine.grain_rule
    if updater is not None:
        made.bind(updater.optimizer)
        made.exchange.compress(engine.exchange.compression)
        made.bound_updater.watch = updater.watch
    made.scalars.watch, made.loss_scale = engine.scalars.watch, engine.loss_scale
    return made


def _called(entry: ParameterUse) -> str:
    return f"parameter {entry.spec.name!r}"


@dataclass(frozen=True)
class ModelMetadata:
    """Describe how a model is distributed, and how many bytes this rank stores and sends.

    Attributes
    ----------
    strategy : str
        "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "TensorParallel", "PipelineParallel" or "3D-Parallelism (Hybrid)".
    zero_stage : int
        What the ranks of a data group shard. 0: nothing; 1: optimizer state; 2: also gradients; 3: also parameters.
    is_distributed : bool
        Whether the model has more than one rank.
    world_size, rank : int
        Number of ranks in the mesh, and number of this rank.
    group_sizes, group_ranks : dict of str to int
        For each of the axes "pipeline", "tensor", "data" and "context": the number of ranks along it, and this rank's
        number on it.
    tiles : dict of str to int
        For each of the axes "tensor" and "context": the number of tiles in which layers compute along it.
    within_rounding : tuple of str
        Why results agree with one process only within rounding; empty if they have the bits of one process with the
        same tiles.
    bits : str
        "every CPU" if only this library computes, so that the bits do not depend on the type of CPU (with fused
        multiply-adds); else "this CPU, because " and what else computes.
    recordings : dict of str to str
        How this rank has computed the last step's passes of each block, and its "update": "repeated" from a recording,
        "called" by Python, or "called: " and why it is not recorded. Empty for a functional model, but for "update".
    recording_bytes : int
        Bytes of the arrays that recordings of blocks keep from step to step.
    averaged_every : int
        Number of steps from one averaging to the next if each rank trains its own copy (:class:`LocalSGDOptimizer`);
        else 0.
    nodes, ranks_per_node : int
        Number of groups of ranks that share memory (within this rank's data group), and number of ranks in each.
    replicated, sharded : tuple of str
        Which of "parameters", "gradients" and "optimizer state" every node keeps whole (every rank if ranks share no
        memory), and which of them are sharded over the ranks.
    parameter_count, trainable_count : int
        Number of parameter elements of the whole model, and of those that an optimizer trains.
    held_count : int
        Number of parameter elements of this rank's stage and tensor part, including copies of parameters that other
        stages own. In data parallelism this is the whole model.
    bytes_on_rank : dict of str to int
        Bytes in host memory by kind: this rank's private arrays, and its equal share of its node's windows. The kinds
        are those of ``formula_bytes``, "buffers" (gathered units, scratch for frozen gradients), and "exchange buffers"
        (messages; with the default ``bucket_mb`` at most 4 MiB for float32, 6 with compression, 8 for float64, for
        models of any size).
    bytes_on_device : dict of str to int
        Bytes by kind on this rank's GPU ("parameters", "gradients", "optimizer state", "buffers"); empty without a GPU.
    bytes_on_node : dict of str to int
        Bytes in host memory by kind on the whole node: its windows, and the private arrays of its ranks, assuming that
        each has as much as this rank.
    formula_bytes : dict of str to float
        Bytes by kind ("parameters", "gradients", "optimizer state", "residuals") that the strategy needs on a rank with
        one grain, on host and GPU together. Buffers are not counted.
    peak_bytes : int
        The most bytes that this rank has held at the same time.
    bytes_sent_last_step : int
        Bytes that this rank sent to other ranks in the last training step.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), mz.AdamW(), "zero3") as model:
    ...     found = model.metadata()
    >>> found.strategy, found.sharded, found.parameter_count
    ('ZeRO-3', ('parameters', 'gradients', 'optimizer state'), 22)
    >>> found.formula_bytes["optimizer state"]  # two arrays of 22 float32
    176.0
    """

    strategy: str
    zero_stage: int
    is_distributed: bool
    world_size: int
    rank: int
    group_sizes: dict[str, int]
    group_ranks: dict[str, int]
    tiles: dict[str, int]
    within_rounding: tuple[str, ...]
    bits: str
    recordings: dict[str, str]
    recording_bytes: int
    averaged_every: int
    nodes: int
    ranks_per_node: int
    replicated: tuple[str, ...]
    sharded: tuple[str, ...]
    parameter_count: int
    trainable_count: int
    held_count: int
    bytes_on_rank: dict[str, int]
    bytes_on_device: dict[str, int]
    bytes_on_node: dict[str, int]
    formula_bytes: dict[str, float]
    peak_bytes: int
    bytes_sent_last_step: int

    @property
    def exactness(self) -> str:
        """A text that says what results equal ("the bits of one process with tiles=8"), or why only within rounding."""
        if self.averaged_every and self.is_distributed:
            return f"no other number of ranks ({self.world_size} copies are averaged every {self.averaged_every} steps)"
        return exactness(self.tiles, self.within_rounding)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can hold."""
        return asdict(self)


def describe(engine: Engine, mesh: Mesh, label: str, bytes_sent: int, averaged_every: int) -> ModelMetadata:
    """Collect the metadata of a model from its engine. Not collective.

    ``mesh`` is that of the model; with local SGD, ``engine.mesh`` has only one rank. ``label`` is the strategy's name.
    ``bytes_sent`` is the number of bytes that this rank sent in the last step. ``averaged_every`` is the value of that
    field of the result.
    """
    placement, grid, memory = engine.placement, engine.grid, engine.memory
    flags = {
        "parameters": placement.shard_parameters and (grid.shard_group.size > 1 or grid.inter_node.size == 1),
        "gradients": placement.shard_gradients,
        "optimizer state": placement.shard_optimizer,
    }
    per_node = {
        kind: memory.shared_bytes[kind] + memory.private_bytes[kind] * grid.node.size
        for kind in sorted({*memory.shared_bytes, *memory.private_bytes})
    }
    return ModelMetadata(
        strategy=label,
        zero_stage=placement.zero_stage,
        is_distributed=mesh.size > 1,
        world_size=mesh.size,
        rank=mesh.rank,
        group_sizes=dict(grid.axes.sizes),
        group_ranks=grid.coordinates._asdict(),
        tiles=engine.partitioned.parallel_layout.virtual_ranks,
        within_rounding=engine.within_rounding,
        bits=engine.bits,
        recordings=engine.recordings(),
        recording_bytes=engine.runner.blocks.bytes,
        averaged_every=averaged_every,
        nodes=grid.inter_node.size,
        ranks_per_node=grid.node.size,
        replicated=tuple(kind for kind, sharded in flags.items() if not sharded),
        sharded=tuple(kind for kind, sharded in flags.items() if sharded),
        parameter_count=engine.global_view.parameter_count,
        trainable_count=sum(entry.spec.size for entry in engine.global_view.layout.parameters if entry.spec.optimized),
        held_count=engine.layout.size,
        bytes_on_rank=memory.kinds(),
        bytes_on_device=engine.compute_device.allocated_bytes(),
        bytes_on_node=per_node,
        formula_bytes=_formula(engine),
        peak_bytes=memory.peak_bytes,
        bytes_sent_last_step=bytes_sent,
    )


def _formula(engine: Engine) -> dict[str, float]:
    """Compute the bytes by kind that the strategy needs on one rank.

    [Note: memory formulas] Let P be the number of parameter elements on this stage and tensor part (for gradients only
    those that are not frozen, for optimizer state only those that an optimizer trains), b the bytes of an element, and
    s the number of state arrays. Let n be the number of ranks of the data group, and L that of a node (1 if ranks share
    no memory), and g the number of groups of nodes that each keep all parameters (1 without ``shard_nodes``). On each
    rank, parameters need P*b*g/n if they are sharded and P*b/L if not; gradients need P*b/n if they
    are summed in rounds and P*b if not; state needs s*P*b/n if it is sharded and s*P*b/L if not. Compression with error
    feedback also keeps residuals, 2*P*b/L if state is not sharded. If state is sharded, a rank keeps no residuals for
    its own ranges: with d ranks in the inter-node group, residuals need 2*P*b/L*(1 - 1/d). Here P is the number of
    gradient elements that are compressed. The state of whole tensors is divided over the n ranks with every strategy,
    as evenly as is possible without cutting tensors.
    """
    placement, grid = engine.placement, engine.grid
    item, n, local = engine.dtype.itemsize, grid.data.size, grid.node.size
    every = tensors = 0
    if engine.updater is not None:
        optimizer, specs = engine.updater.optimizer, [entry.spec for entry in engine.layout.parameters]
        every = sum(state_size(optimizer, spec) for spec in specs)
        tensors = sum(tensor_state_size(optimizer, spec) for spec in specs)
    changed = sum(entry.spec.size for entry in engine.layout.parameters if entry.spec.trainable)
    feedback = {}
    if engine.exchange.feedback:
        nodes = grid.inter_node.size
        packed = engine.layout.gradient_size - sum(span.size for span in engine.exchange.exact)
        feedback["residuals"] = 2 * packed * item / local * (1 if engine.exchange.replicated else 1 - 1 / nodes)
    return feedback | {
        "parameters": engine.layout.size * item / (n / len(grid.shard_groups) if placement.shard_parameters else local),
        "gradients": changed * item / (n if placement.in_rounds else 1),
        "optimizer state": (every - tensors) * item / (n if placement.shard_optimizer else local) + tensors * item / n,
    }


def gather_pieces(engine: Engine, dtype: Any, values: Callable[[UpdatePiece], Any]) -> Array:
    """Gather one number for each parameter element of the whole model, from the ranks that own the elements.

    Return the same 1-D array in declared order on every rank. Elements of frozen and averaged parameters are 0.
    Collective over the world.

    Parameters
    ----------
    engine : Engine
        Engine of the model, with a bound optimizer.
    dtype : dtype
        Element type of the result.
    values : callable
        Called with each :class:`UpdatePiece` (a range of one parameter) that this rank owns. It returns the numbers for
        this range: an array as long as the range, or one number for all of it.
    """
    full = np.zeros(engine.layout.size, dtype)
    for piece in engine.pieces():
        full[piece.span.start : piece.span.stop] = values(piece)
    return _gathered(engine, full)


def gather_owned(engine: Engine, owned: Array) -> Array:
    """Gather one number for each parameter element of the whole model, from the ranks that own the elements.

    Return the same 1-D array in declared order on every rank. Collective over the world.

    Parameters
    ----------
    engine : Engine
        Engine of the model.
    owned : 1-D array
        This rank's numbers: one for each element of the ranges that it owns, one range after the other.
    """
    full, shard = np.empty(engine.layout.size, owned.dtype), engine.store.shard
    for span, offset in zip(shard.spans, shard.offsets, strict=True):
        full[span.start : span.stop] = owned[offset : offset + span.size]
    return _gathered(engine, full)


def slot_entries(engine: Engine, slot: str) -> tuple[ParameterUse, ...]:
    """Return where each array of one ``slot`` of the optimizer state lies in the vector of :func:`gather_slot`.

    A slot, such as "exp_avg", has one array for each parameter.
    Elementwise state has the offsets of its parameters in the flat vector of the whole model; state arrays of whole
    tensors follow one another. Not collective. The engine must have a bound optimizer.
    """
    optimizer = engine.bound_updater.optimizer
    pairs = [(e, state_specs(optimizer, e.spec).get(slot)) for e in engine.global_view.layout.parameters]
    if slot in optimizer.slots:
        return tuple(entry for entry, spec in pairs if spec is not None)
    return FlatLayout.build({"": [spec for _, spec in pairs if spec is not None]}, one_unit=True).parameters


def gather_slot(engine: Engine, slot: str) -> Array:
    """Gather the arrays of one ``slot`` of the optimizer state, such as "exp_avg", as one vector on every rank.

    The vector has the arrays of the whole model.
    :func:`slot_entries` says where each array lies; elements that belong to no array are 0. Collective over the world.
    """
    updater = engine.bound_updater
    if slot not in updater.optimizer.slots:
        return _gathered_tensors(engine, slot)

    def values(piece: UpdatePiece) -> Array | int:
        array = updater.state_of(slot, piece)
        return array if array.size else 0  # a whole tensor has state of its own

    return gather_pieces(engine, engine.dtype, values)


def _gathered_tensors(engine: Engine, slot: str) -> Array:
    updater, world = engine.bound_updater, engine.grid.world
    pieces = [piece for piece in updater.state_pieces(slot) if engine.global_view.writes(piece.spec)]
    local = np.concatenate([np.empty(0, engine.dtype), *(updater.state_of(slot, piece) for piece in pieces)])
    names = world.allgather_object([piece.spec.name for piece in pieces], "whole tensors")
    entries = {entry.spec.name: entry for entry in slot_entries(engine, slot)}
    gathered = np.empty(sum(entry.spec.size for entry in entries.values()), engine.dtype)
    counts = [sum(entries[name].spec.size for name in of_rank) for of_rank in names]
    world.allgatherv(local, gathered, counts, slot)
    full, offset = np.empty_like(gathered), 0
    for entry in (entries[name] for of_rank in names for name in of_rank):
        full[entry.span.start : entry.span.stop] = gathered[offset : offset + entry.spec.size]
        offset += entry.spec.size
    return full


def _gathered(engine: Engine, full: Array) -> Array:
    """Gather an array from the ranks that own its ranges; return it in the order of the whole model. Collective.

    ``full`` has one element for each parameter element of this rank's data group. Only the ranges that this rank owns
    are valid before the call.
    """
    layout, data = engine.layout, engine.grid.data
    spans = [Shard(layout, rank, data.size).spans for rank in range(data.size)]
    gather_spans(data, [full[s.start : s.stop] for s in spans[data.rank]], full, spans)
    return engine.global_view.assemble(full)


def checked_state(engine: Engine, updater: Updater, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``state_dict()`` by descriptive names; raise LayoutError if they do not fit."""
    if absent := {"step_count", "state"}.difference(state):
        raise LayoutError(f"state has no {sorted(absent)}; pass what state_dict() has returned")
    slots, progress, method = state["state"], state.get("progress"), updater.method
    if set(slots) != set(updater.state):
        raise LayoutError(f"state has slots {sorted(slots)}, the optimizer's are {sorted(updater.state)}")
    valid = progress is None
    if method is not None:  # most optimizers have none
        from mpizero.optim.minimizers import is_progress

        valid = is_progress(progress)
    if not valid:
        raise LayoutError(f"progress is {progress!r:.60}, expected {method and 'that of state_dict()'}")
    checked = {"the step count": int(state["step_count"]), "the progress": progress}
    for slot, arrays in sorted(slots.items()):
        for spec in (entry.spec for entry in slot_entries(engine, slot)):
            if spec.name not in arrays or np.shape(arrays[spec.name]) != spec.shape:
                raise LayoutError(f"state {slot!r} has no array {spec.name!r} of shape {spec.shape}")
            checked[f"{slot!r} of parameter {spec.name!r}"] = arrays[spec.name]
    return checked
