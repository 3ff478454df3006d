"""Keep a model class and an optimizer class for each strategy: the interface older than :func:`~mpizero.distribute`.

These classes use the same engine: :class:`ShardedModelBase` is a :class:`~mpizero.sharding.Model` that takes a
:class:`~mpizero.ShardingConfig` and has more members. Each subclass names a row of the placement table
(``sharding/config.py``) or fixes the size of some parallel axes. A reader of the library may skip this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import IO, Any, ClassVar, Self

from mpizero import checkpoint, nn
from mpizero._util.names import explains
from mpizero.comm.agreement import agree_equal, all_ranks, collective, recorded
from mpizero.errors import ConfigError, SharedMemoryError, UnsupportedError
from mpizero.sharding import state_dict
from mpizero.sharding.config import Config, Placement, ShardingConfig, placement, ranks_of
from mpizero.sharding.mesh import ORDER, Mesh
from mpizero.sharding.model import Model
from mpizero.sharding.optimizer import ShardedOptimizer
from mpizero.sharding.parameter_access import in_private_memory
from mpizero.sharding.partition import ParallelLayout, blocks_of
from mpizero.sharding.saved_attributes import opened_alike
from mpizero.types import Array

#: The strategies by ZeRO stage.
ZERO_STAGES = ("ddp", "zero1", "zero2", "zero3")


@explains
class ShardedModelBase(Model):
    """Distribute a model by the strategy that a subclass names; this class has more methods than :class:`Model`.

    Parameters
    ----------
    wrapped_model : BlockModel or BlackBoxModel
        The model to train. This model is never changed: the sharded model holds the parameters.
    config : ShardingConfig or Config
        The settings, and the ranks unless ``mesh`` is given.
    mesh : Mesh, optional
        The ranks. None: those of ``config``, which must then be a :class:`~mpizero.ShardingConfig`.
    optimizer : optimizer, ShardedOptimizer or None
        As for :class:`Model`.

    The constructor raises the errors of :class:`Model`, and TypeError if the configuration is None or of a wrong type.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.ZeRO1Model(mz.nn.MLP(2, [4], 2), mz.ShardingConfig(comm="self")) as model:
    ...     isinstance(model, mz.ShardedModelBase), model.parameter_count, list(model.named_parameters())[:1]
    (True, 22, ['hidden.0.linear.weight'])
    """

    strategy: ClassVar[str]

    def __init__(self, wrapped_model: Any, config: Config, *, optimizer: Any = None, mesh: Mesh | None = None) -> None:
        mesh = mesh or self.__dict__.get("_mesh") or ranks_of(type(self), config)
        super().__init__(wrapped_model, config, mesh, self.strategy, optimizer=optimizer)

    @property
    def _kind(self) -> str:
        return self.strategy

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _call(self) -> str:
        return f"{type(self).__name__}(model, config, optimizer=mz.AdamW(lr=1e-3))"

    # ------------------------------------------------------------------ hooks

    def _on_before_initialize_sharding(self) -> None:
        """Do nothing; a subclass may override this to run code before parameters are distributed."""

    def _initialize_sharding(self) -> None:
        """Check that all ranks passed equal arguments, and distribute the parameters."""
        super()._place()

    def _update_local_shard_from_full(self, values: Array) -> None:
        """Set the parameters to ``values``, a 1-D array of the whole model; each rank copies only its own ranges."""
        super()._fill(values)

    def _place(self) -> None:
        self._on_before_initialize_sharding()
        self._initialize_sharding()

    def _fill(self, values: Array) -> None:
        self._update_local_shard_from_full(values)

    # ------------------------------------------------------------------ parameters

    @property
    def sharding_configuration(self) -> Config:
        """The same as :attr:`config`."""
        return self._config

    @property
    def local_parameter_shard(self) -> Array:
        """A copy of the parameters that this rank owns: the values of all ranges of :attr:`owned`, concatenated."""
        return self._engine.store.owned_values()

    @property
    def shard_start(self) -> int:
        """The start of the first range of :attr:`owned`; 0 if there is none."""
        return self.owned[0].start if self.owned else 0

    @property
    def shard_size(self) -> int:
        """The number of parameter elements that this rank owns."""
        return self._engine.store.shard.size

    def invalidate_cache(self) -> None:
        """Drop the cached copy of the gathered parameters, because parameters have changed. Not collective."""
        self._cache = None

    @recorded
    def get_parameters(self) -> Array:
        """Return a copy of all parameters of the model as a 1-D array in declared order, on every rank."""
        return self.gather_full_parameters().copy()

    @recorded
    def with_parameters(self, values: Array) -> Self:
        """Return a new sharded model with the same wrapped model and the given parameters, without an optimizer.

        ``values`` are all parameters as a 1-D array, as for :meth:`set_parameters`. Integer arrays are copied from this
        model.
        """
        values = self._checked("with_parameters", values)
        copy = self._twin(self._wrapped)
        copy._engine.integers.copy_from(self._engine.integers)
        copy._fill(values)
        return copy

    # ------------------------------------------------------------------ copies

    @recorded
    def clone(self) -> Self:
        """Return a sharded model with the same configuration and communicator and its own copy of the parameters.

        The clone has no optimizer: bind one with ``set_model``, or use :meth:`deep_copy`.
        """
        copy = self._twin(self._wrapped)
        copy._engine.store.copy_from(self._engine.store)
        return copy

    @recorded
    def deep_copy(self) -> Self:
        """Return a copy of this sharded model with copies of the parameters, wrapped model, optimizer and its state.

        ``train`` makes the same steps on the copy as on the original.
        """
        copy, engine = self._twin(deepcopy(self._wrapped)), self._engine
        shared = copy._engine.grid.node.size - engine.grid.node.size
        if shared > 0:
            reason = SharedMemoryError("the original does so")
            copy._open_engine = in_private_memory(copy._engine, copy._parallel_layout, reason)
        elif shared < 0:
            copy.close()
            raise SharedMemoryError("deep_copy: the nodes have no shared memory for a second model; save and load it")
        copy._engine.store.copy_from(engine.store)
        state_dict.copy_state(engine, copy._engine)
        if self._optimizer is not None:
            copy._optimizer = self._optimizer.for_copy(copy)
        return copy

    def _twin(self, wrapped: Any) -> Self:
        """Return a new sharded model of the same class around ``wrapped``, with initial parameters. Collective.

        Subclasses override this if their constructors take other arguments.
        """
        twin = type(self).__new__(type(self))
        twin._is_copy, twin._mesh = True, self._mesh
        twin.__init__(wrapped, self._config)  # type: ignore[misc]
        if self._mean_every:
            twin._become_local(self._mean_every)
        return twin

    # ------------------------------------------------------------------ saving and loading

    @collective
    def serialize(self) -> bytes:
        """Return parameters and optimizer state as the bytes of an HDF5 file, the same on every rank."""
        return checkpoint.to_bytes(self._checkpoint_arrays(), self._checkpoint_attributes(), self._mesh.communicator)

    @recorded
    def deserialize(self, data: bytes) -> None:
        """Load the bytes that ``serialize`` returned, the same on every rank; errors are as for :meth:`load_model`."""
        with opened_alike(self._mesh.communicator, "deserialize", data) as reader:
            self._restore_arrays(reader)

    @collective
    def save_state(self, file: IO[bytes]) -> None:
        """Write the bytes of :meth:`serialize` to an open binary file on rank 0; other ranks' ``file`` is ignored."""
        data = self.serialize()
        with all_ranks(self._mesh.communicator):
            if self.rank == 0:
                file.write(data)
                file.flush()

    @collective
    def load_state(self, file: IO[bytes]) -> None:
        """Load the bytes that ``save_state`` wrote; every rank passes an open binary file that contains them."""
        with all_ranks(self._mesh.communicator):
            data = file.read()
        self.deserialize(data)

    # ------------------------------------------------------------------ the wrapped model

    @property
    def default_loss_function(self) -> Any:
        """The loss layer of the wrapped model; None for a black box, whose function computes the loss itself."""
        return getattr(self._wrapped, "loss", None) if hasattr(self._wrapped, "blocks") else None

    @collective
    def feature_importance(self) -> dict[str, float]:
        """Return the importance of each input feature by its name, computed by the wrapped model. Collective.

        Raises
        ------
        NotImplementedError
            If the wrapped model has no ``feature_importance(params)``.
        """
        function = self._delegate("feature_importance")
        result: dict[str, float] = function(self._bound_parameters())
        return result

    @property
    def active_feature_indices(self) -> tuple[int, ...]:
        """Indices of the input features that the wrapped model uses.

        Reading is not collective. Setting is collective, and every rank must set the same indices.
        """
        indices: Sequence[int] = self._delegate("active_feature_indices")
        return tuple(indices)

    @active_feature_indices.setter
    @collective
    def active_feature_indices(self, indices: Sequence[int]) -> None:
        chosen = tuple(int(i) for i in indices)
        agree_equal(self._mesh.communicator, lambda: {"active_feature_indices": chosen}, "active_feature_indices")
        self._replace_wrapped(self._delegate("with_active_features")(chosen))

    def is_feature_used(self, index: int) -> bool:
        """Tell whether the wrapped model uses input feature number ``index``. Not collective."""
        return index in self.active_feature_indices

    @property
    def supports_jit_compilation(self) -> bool:
        """Tell whether the wrapped model has the method that :meth:`jit_compile` needs. Not collective."""
        return hasattr(self._wrapped, "compile_predictor")

    def export_computation_graph(self) -> dict[str, Any]:
        """Return the wrapped model's computation graph as a dictionary that can be written as JSON. Not collective.

        Raises
        ------
        NotImplementedError
            If the wrapped model has no ``export_computation_graph()``.
        """
        graph: dict[str, Any] = self._delegate("export_computation_graph")()
        return graph

    @collective
    def jit_compile(self) -> Callable[[Array], Array]:
        """Return a compiled function from inputs to predictions. Collective.

        The function keeps a copy of the current parameters, so later training does not change its predictions.

        Raises
        ------
        NotImplementedError
            If the wrapped model has no ``compile_predictor(params)``.
        """
        function = self._delegate("compile_predictor")
        compiled: Callable[[Array], Array] = function(self._bound_parameters())
        return compiled

    def _delegate(self, name: str) -> Any:
        if not hasattr(self._wrapped, name):
            raise UnsupportedError(
                f"{type(self._wrapped).__name__} has no {name!r}: a wrapped model that offers it makes this work"
            )
        return getattr(self._wrapped, name)

    def _replace_wrapped(self, wrapped: Any) -> None:
        if blocks_of(self._wrapped) != blocks_of(wrapped):
            raise ConfigError("the new model's parameters differ from the old one's in name or shape")
        self._wrapped = wrapped
        self._engine.exchange_model(wrapped)

    def _bound_parameters(self) -> dict[str, Any]:
        """Gather all parameters and return them in the form that the wrapped model expects. Collective.

        A model of blocks expects a nested dictionary for each block, a black box expects arrays by name.
        """
        named = self.named_parameters()
        return nn.bind(self._wrapped, named) if hasattr(self._wrapped, "blocks") else named


class DDPOptimizer(ShardedOptimizer):
    """Replicate the optimizer state: one copy on each node, of which each rank of the node updates a part.

    Arguments and members are those of :class:`ShardedOptimizer`.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     with mz.DDPModel(mz.nn.MLP(2, [4], 2), config, optimizer=mz.AdamW(lr=0.1)) as model:
    ...         print(type(model.optimizer).__name__, sorted(model.optimizer.state_dict()["state"]))
    DDPOptimizer ['exp_avg', 'exp_avg_sq']
    """

    strategies = ("ddp",)


class DDPModel(ShardedModelBase):
    """Replicate parameters, gradients and optimizer state: one copy per node, or per rank if ranks share no memory.

    Construction and members are those of :class:`ShardedModelBase`.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 2, np.float32), np.array([0, 1] * 2)
    >>> with mz.DDPModel(mz.nn.MLP(2, [4], 2), mz.ShardingConfig(comm="self"), optimizer=mz.SGD(0.5)) as model:
    ...     losses = [model.train(x, y) for _ in range(5)]
    ...     model.metadata().replicated
    ('parameters', 'gradients', 'optimizer state')
    >>> losses[-1] < losses[0]
    True
    """

    strategy = "ddp"
    _optimizer_class = DDPOptimizer


class ZeRO1Optimizer(ShardedOptimizer):
    """Shard the optimizer state over all ranks.

    Arguments and members are those of :class:`ShardedOptimizer`.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     with mz.ZeRO1Model(mz.nn.MLP(2, [4], 2), config, optimizer=mz.AdamW(lr=0.1)) as model:
    ...         print(type(model.optimizer).__name__, sorted(model.optimizer.state_dict()["state"]))
    ZeRO1Optimizer ['exp_avg', 'exp_avg_sq']
    """

    strategies = ("zero1",)


class ZeRO1Model(ShardedModelBase):
    """Shard the optimizer state, replicate parameters and gradients (Rajbhandari et al. 2020, P_os).

    A step sends as many bytes as with DDP: both reduce-scatter gradients; then ZeRO-1 all-gathers updated parameters,
    and DDP all-gathers summed gradients.

    Construction and members are those of :class:`ShardedModelBase`.

    Examples
    --------
    >>> import mpizero as mz
    >>> def shards(comm):
    ...     with mz.ShardingConfig(comm=comm) as config, mz.ZeRO1Model(mz.nn.MLP(3, [5], 2), config) as model:
    ...         return model.metadata().sharded
    >>> mz.testing.run_in_threads(2, shards)[0]
    ('optimizer state',)
    """

    strategy = "zero1"
    _optimizer_class = ZeRO1Optimizer


class ZeRO2Optimizer(ShardedOptimizer):
    """Shard the optimizer state over all ranks, for models with sharded gradients.

    Arguments and members are those of :class:`ShardedOptimizer`.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     with mz.ZeRO2Model(mz.nn.MLP(2, [4], 2), config, optimizer=mz.AdamW(lr=0.1)) as model:
    ...         print(type(model.optimizer).__name__, sorted(model.optimizer.state_dict()["state"]))
    ZeRO2Optimizer ['exp_avg', 'exp_avg_sq']
    """

    strategies = ("zero2",)


class ZeRO2Model(ShardedModelBase):
    """Shard optimizer state and gradients (Rajbhandari et al. 2020, P_os+g).

    No rank ever holds a full averaged gradient.

    Construction and members are those of :class:`ShardedModelBase`.

    Examples
    --------
    >>> import mpizero as mz
    >>> def shards(comm):
    ...     with mz.ShardingConfig(comm=comm) as config, mz.ZeRO2Model(mz.nn.MLP(3, [5], 2), config) as model:
    ...         return model.metadata().sharded
    >>> mz.testing.run_in_threads(2, shards)[0]
    ('gradients', 'optimizer state')
    """

    strategy = "zero2"
    _optimizer_class = ZeRO2Optimizer


class ZeRO3Optimizer(ShardedOptimizer):
    """Shard the optimizer state over all ranks, for models with sharded gradients and parameters.

    Arguments and members are those of :class:`ShardedOptimizer`.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     with mz.ZeRO3Model(mz.nn.MLP(2, [4], 2), config, optimizer=mz.AdamW(lr=0.1)) as model:
    ...         print(type(model.optimizer).__name__, sorted(model.optimizer.state_dict()["state"]))
    ZeRO3Optimizer ['exp_avg', 'exp_avg_sq']
    """

    strategies = ("zero3", "fsdp")


class ZeRO3Model(ShardedModelBase):
    """Shard parameters, gradients and optimizer state (Rajbhandari et al. 2020, P_os+g+p).

    Each unit is gathered just before its forward and its backward pass, and released right after. On a single node with
    shared memory all ranks read the parameters in one shared window, and nothing is gathered.

    Construction and members are those of :class:`ShardedModelBase`.

    Examples
    --------
    >>> import mpizero as mz
    >>> def shard_sizes(comm):
    ...     with mz.ShardingConfig(comm=comm) as config, mz.ZeRO3Model(mz.nn.MLP(3, [5], 2), config) as model:
    ...         return model.shard_size, model.parameter_count
    >>> mz.testing.run_in_threads(2, shard_sizes)
    [(16, 32), (16, 32)]
    """

    strategy = "zero3"
    _optimizer_class = ZeRO3Optimizer


class FSDPOptimizer(ZeRO3Optimizer):
    """The same as :class:`ZeRO3Optimizer`, under another name.

    Arguments and members are those of :class:`ShardedOptimizer`.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     with mz.FSDPModel(mz.nn.MLP(2, [4], 2), config, optimizer=mz.AdamW(lr=0.1)) as model:
    ...         print(type(model.optimizer).__name__, sorted(model.optimizer.state_dict()["state"]))
    FSDPOptimizer ['exp_avg', 'exp_avg_sq']
    """


class FSDPModel(ZeRO3Model):
    """The same as :class:`ZeRO3Model`, under the name that PyTorch uses (fully sharded data parallel).

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.FSDPModel(mz.nn.MLP(3, [5], 2), mz.ShardingConfig(comm="self")) as model:
    ...     model.metadata().strategy, model.metadata().zero_stage
    ('FSDP', 3)
    """

    strategy = "fsdp"
    _optimizer_class = FSDPOptimizer


class HybridShardedOptimizer(ShardedOptimizer):
    """Update a model that is split over ranks: each rank updates only ranges of its own stage and tensor part.

    Arguments and members are those of :class:`ShardedOptimizer`.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     model = mz.HybridShardedModel(mz.nn.MLP(2, [4], 2), config, optimizer=mz.HybridShardedOptimizer(mz.AdamW()))
    ...     with model:
    ...         type(model.optimizer).__name__, model.optimizer.step_count
    ('HybridShardedOptimizer', 0)
    """

    strategies = ("hybrid", "tensor", "pipeline")


class ModelParallelBase(ShardedModelBase):
    """Split a model over a grid of pipeline x tensor x data x context ranks; subclasses fix the size of some axes.

    Parameters
    ----------
    wrapped_model : BlockModel
        The model to train.
    config : ShardingConfig
        The ranks, and the settings of the training.
    parallel_layout : ParallelLayout
        Numbers of pipeline stages, tensor ranks, replicas and context ranks, the schedule of the pipeline, and the
        first blocks of its stages.
    zero_stage : {0, 1, 2, 3}
        The state that the ranks of a data group shard. 0: none (DDP); 1: optimizer state; 2: also gradients; 3: also
        parameters.
    optimizer : optimizer, ShardedOptimizer or None
        As in :class:`ShardedModelBase`.
    mesh : Mesh, optional
        As in :class:`ShardedModelBase`.
    """

    _optimizer_class = HybridShardedOptimizer

    def __init__(
        self,
        wrapped_model: Any,
        config: Config,
        parallel_layout: ParallelLayout,
        zero_stage: int,
        optimizer: Any = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.zero_stage, mesh = zero_stage, mesh or ranks_of(type(self), config)
        split: Any = {"parallel_layout": parallel_layout, "optimizer": optimizer}
        Model.__init__(self, wrapped_model, config, mesh, self.strategy, **split)

    @property
    def _placement(self) -> Placement:
        if isinstance(self.zero_stage, bool) or self.zero_stage not in range(len(ZERO_STAGES)):
            raise ConfigError(f"zero_stage={self.zero_stage!r}: expected 0 (DDP), 1, 2 or 3")
        return placement(ZERO_STAGES[self.zero_stage])

    def _twin(self, wrapped: Any) -> Self:
        twin = type(self).__new__(type(self))  # past constructors that turn their arguments into this layout
        twin._is_copy, layout = True, self._parallel_layout
        assert layout is not None
        ModelParallelBase.__init__(twin, wrapped, self._config, layout, self.zero_stage, mesh=self._mesh)
        return twin


@explains
class HybridShardedModel(ModelParallelBase):
    """Combine pipeline, tensor, context and data parallelism, with any ZeRO stage over the data group.

    Each rank stores and computes the blocks of its stage, split over its tensor group. All ranks get losses and
    metrics. The constructor also raises the errors of :class:`Model`.

    Parameters
    ----------
    wrapped_model : BlockModel
        The model to train.
    config : ShardingConfig
        The ranks, and the settings of the training.
    pipeline_parallel_size, tensor_parallel_size : int
        Number of pipeline stages, and number of ranks over which a layer is split.
    data_parallel_size : int
        Number of replicas; -1 takes all remaining ranks.
    zero_stage : {0, 1, 2, 3}
        The state that replicas shard, as in :class:`ModelParallelBase`.
    schedule, virtual_stages, cuts, costs
        As for :class:`~mpizero.Config`; None takes those of ``config``.
    order : str
        Order in which ranks are assigned to the axes, slowest axis first. With "pipeline,data,tensor" the ranks of a
        tensor group have consecutive numbers.
    context_parallel_size : int
        Number of ranks over which a sequence is split.
    optimizer : optimizer, ShardedOptimizer or None
        As in :class:`ShardedModelBase`.
    mesh : Mesh, optional
        As in :class:`ShardedModelBase`.

    Raises
    ------
    ValueError
        On all ranks: GridError if the product of the sizes is not the number of ranks; ConfigError if there are more
        stages than blocks, the schedule is unknown, or a layer cannot be split over that many ranks.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
    >>> def train(comm):
    ...     with mz.ShardingConfig(comm=comm, micro_batch=1) as config:
    ...         ways = {"pipeline_parallel_size": 2, "zero_stage": 2, "optimizer": mz.AdamW(lr=0.1)}
    ...         with mz.HybridShardedModel(mz.nn.MLP(4, [4], 2), config, **ways) as model:
    ...             group = model.batch_group  # the two replicas
    ...             part = slice(2 * group.rank, 2 * group.rank + 2)
    ...             model.train(x[part], y[part])
    ...             return model.metadata().group_sizes, model.parameters_sha256()
    >>> results = mz.testing.run_in_threads(4, train)
    >>> results[0][0], len({sha256 for _, sha256 in results})
    ({'pipeline': 2, 'tensor': 1, 'data': 2, 'context': 1}, 1)
    """

    strategy: ClassVar[str] = "hybrid"
    _label = "3D-Parallelism (Hybrid)"

    def __init__(
        self,
        wrapped_model: Any,
        config: Config,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = -1,
        *,
        zero_stage: int = 1,
        schedule: str | None = None,
        virtual_stages: int | None = None,
        order: str = ORDER,
        context_parallel_size: int = 1,
        cuts: Sequence[int] | None = None,
        costs: Sequence[float] | None = None,
        optimizer: Any = None,
        mesh: Mesh | None = None,
    ) -> None:
        parallel_layout = ParallelLayout(
            pipeline=pipeline_parallel_size,
            tensor=tensor_parallel_size,
            data=data_parallel_size,
            context=context_parallel_size,
            order=order,
            **_pipeline_settings(config, schedule, virtual_stages, cuts, costs),
        )
        super().__init__(wrapped_model, config, parallel_layout, zero_stage, optimizer, mesh)


@explains
class TensorParallelModel(ModelParallelBase):
    """Split the matrices of every layer over a tensor group; if there are more ranks, each group of them is a replica.

    Parameters
    ----------
    wrapped_model : BlockModel
        The model to train.
    config : ShardingConfig
        The ranks, and the settings of the training.
    tensor_parallel_size : int or None
        Number of ranks in a tensor group; None takes all ranks.
    zero_stage : {0, 1, 2, 3}
        The state that replicas shard, as in :class:`ModelParallelBase`.
    optimizer : optimizer, ShardedOptimizer or None
        As in :class:`ShardedModelBase`.

    Examples
    --------
    >>> import mpizero as mz
    >>> def held(comm):
    ...     with mz.ShardingConfig(comm=comm) as config, mz.TensorParallelModel(mz.nn.MLP(4, [6], 2), config) as model:
    ...         return model.metadata().held_count, model.parameter_count
    >>> mz.testing.run_in_threads(2, held)
    [(23, 44), (23, 44)]
    """

    strategy: ClassVar[str] = "tensor"
    _label = "TensorParallel"

    def __init__(
        self,
        wrapped_model: Any,
        config: ShardingConfig,
        tensor_parallel_size: int | None = None,
        *,
        zero_stage: int = 0,
        optimizer: Any = None,
    ) -> None:
        size = _all_ranks_of(config) if tensor_parallel_size is None else tensor_parallel_size
        super().__init__(wrapped_model, config, ParallelLayout(tensor=size), zero_stage, optimizer)


@explains
class PipelineParallelModel(ModelParallelBase):
    """Split the blocks of a model over pipeline stages; with more ranks than stages, several pipelines are replicas.

    Parameters
    ----------
    wrapped_model : BlockModel
        The model to train.
    config : ShardingConfig
        The ranks, and the settings of the training.
    pipeline_parallel_size : int or None
        Number of stages; None takes all ranks.
    schedule, virtual_stages, cuts, costs
        As in :class:`HybridShardedModel`.
    zero_stage : {0, 1, 2, 3}
        The state that replicas shard, as in :class:`ModelParallelBase`.
    optimizer : optimizer, ShardedOptimizer or None
        As in :class:`ShardedModelBase`.

    Examples
    --------
    >>> import mpizero as mz
    >>> def held(comm):
    ...     with mz.ShardingConfig(comm=comm) as own, mz.PipelineParallelModel(mz.nn.MLP(4, [6], 2), own) as model:
    ...         return model.metadata().held_count, model.parameter_count
    >>> mz.testing.run_in_threads(2, held)
    [(30, 44), (14, 44)]
    """

    strategy: ClassVar[str] = "pipeline"
    _label = "PipelineParallel"

    def __init__(
        self,
        wrapped_model: Any,
        config: ShardingConfig,
        pipeline_parallel_size: int | None = None,
        *,
        schedule: str | None = None,
        virtual_stages: int | None = None,
        cuts: Sequence[int] | None = None,
        costs: Sequence[float] | None = None,
        zero_stage: int = 0,
        optimizer: Any = None,
    ) -> None:
        size = _all_ranks_of(config) if pipeline_parallel_size is None else pipeline_parallel_size
        pipeline = _pipeline_settings(config, schedule, virtual_stages, cuts, costs)
        parallel_layout = ParallelLayout(pipeline=size, **pipeline)
        super().__init__(wrapped_model, config, parallel_layout, zero_stage, optimizer)


def _all_ranks_of(config: ShardingConfig) -> int:
    return ranks_of(ModelParallelBase, config).size


def _pipeline_settings(config: Any, schedule: Any, virtual_stages: Any, cuts: Any, costs: Any) -> dict[str, Any]:
    """Return the settings of the pipeline: the arguments, with None replaced by ``config``'s. Not collective."""
    settings = {"schedule": schedule, "virtual_stages": virtual_stages, "cuts": cuts, "costs": costs}
    return {name: getattr(config, name, None) if value is None else value for name, value in settings.items()}
