"""Define the classes of sharded models and optimizers, a pair for each strategy, and ``distribute``, which makes them.

The data-parallel strategies come first: each class is a name for one row of the placement table
(``sharding/config.py``), and one engine executes all rows. The classes after ``distribute`` also split a model over
ranks: by blocks (pipeline), matrices (tensor), sequences (context), or several of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from mpizero._util.names import explains
from mpizero.errors import ConfigError
from mpizero.sharding.config import Config, Placement, ShardingConfig, placement, ranks_and_settings, ranks_of
from mpizero.sharding.mesh import ORDER, SPLITTING, Mesh
from mpizero.sharding.model import ShardedModelBase
from mpizero.sharding.optimizer import ShardedOptimizer
from mpizero.sharding.partition import ParallelLayout


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
    optimizer_class = DDPOptimizer


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
    optimizer_class = ZeRO1Optimizer


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
    optimizer_class = ZeRO2Optimizer


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
    optimizer_class = ZeRO3Optimizer


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
    optimizer_class = FSDPOptimizer


_MODELS: dict[str, type[ShardedModelBase]] = {
    model.strategy: model for model in (DDPModel, ZeRO1Model, ZeRO2Model, ZeRO3Model, FSDPModel)
}


@explains
def distribute(
    model: Any,
    optimizer: Any,
    strategy: str = "zero2",
    *,
    mesh: Mesh | None = None,
    config: Config | None = None,
    comm: Any = None,
) -> ShardedModelBase:
    """Shard a model and its optimizer over the ranks of a mesh, and split the model as the mesh says.

    Collective over the ranks.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The model to train.
    optimizer : optimizer, ShardedOptimizer or None
        A library optimizer, any object with an elementwise ``update(params, grads, state)``, or a sharded optimizer;
        for a TorchModel also ``torch.optim.SGD``, ``Adam`` or ``AdamW`` of its module, with their groups. None: plain
        SGD with ``config.learning_rate``.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}
        Which of parameters, gradients and optimizer state are sharded over the replicas.
    mesh : Mesh or None
        The ranks, and how many pipeline stages, tensor and context ranks split the model. None takes all ranks that the
        launcher has started, or those of a ShardingConfig; closing the model then closes what was made for them.
    config : Config or ShardingConfig or None
        The settings; None takes the defaults.
    comm : mpi4py communicator, InMemoryCommunicator, "self" or None
        Short for ``mesh=Mesh(comm)``.

    Returns
    -------
    model : ShardedModelBase
        The model, ready to train. Its attribute ``optimizer`` is the sharded optimizer.

    Raises
    ------
    ConfigError
        If the strategy is unknown, ranks are given twice, ranks differ in a setting, or ``cuts`` are set without a
        pipeline.
    GridError
        If the product of the sizes of the mesh is not the number of ranks.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 2, np.float32), np.array([0, 1] * 2)
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), mz.AdamW(lr=0.1), "zero2", comm="self") as model:
    ...     losses = [model.train(x, y) for _ in range(5)]
    ...     model.metadata().strategy, model.optimizer.step_count
    ('ZeRO-2', 5)
    >>> losses[-1] < losses[0]
    True
    >>> def held(comm):
    ...     with mz.Mesh(comm, pipeline=2) as mesh, mz.distribute(mz.nn.MLP(4, [6], 2), mz.AdamW(), mesh=mesh) as model:
    ...         return model.metadata().held_count, model.parameter_count
    >>> mz.testing.run_in_threads(2, held)
    [(30, 44), (14, 44)]
    """
    if comm is not None and (mesh is not None or isinstance(config, ShardingConfig)):
        raise ConfigError("give comm, or mesh=..., or a ShardingConfig, which has a comm of its own: only one of them")
    placement(strategy)
    optimizer = getattr(model, "taken_over", _unchanged)(optimizer)
    owns = mesh is None and not isinstance(config, ShardingConfig)
    mesh, config = ranks_and_settings(Mesh(comm) if comm is not None else mesh, config)
    if config.cuts is not None and mesh.pipeline == 1:
        raise ConfigError(f"cuts={list(config.cuts)} need a pipeline; the mesh has pipeline=1: mz.Mesh(pipeline=...)")
    if not mesh.splits_model:
        made = _MODELS[strategy](model, config, optimizer=optimizer, mesh=mesh)
    else:
        sizes = {f"{axis}_parallel_size": getattr(mesh, axis) for axis in (*SPLITTING, "data")}
        stage = ZERO_STAGES.index("zero3" if strategy == "fsdp" else strategy)
        made = HybridShardedModel(
            model, config, **sizes, order=mesh.order or ORDER, zero_stage=stage, optimizer=optimizer, mesh=mesh
        )
    made._owns_mesh = owns
    return made


def _unchanged(optimizer: Any) -> Any:
    return optimizer


#: Names of the strategies, by ZeRO stage.
ZERO_STAGES = ("ddp", "zero1", "zero2", "zero3")


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
    """Split a model over a grid of pipeline x tensor x data x context ranks; subclasses fix some of the sizes.

    Parameters
    ----------
    wrapped_model : BlockModel
        The model to train.
    config : ShardingConfig
        The ranks and how they work together.
    parallel_layout : ParallelLayout
        Numbers of pipeline stages, tensor ranks, replicas and context ranks, the schedule of the pipeline, and the
        first blocks of its stages.
    zero_stage : {0, 1, 2, 3}
        What the ranks of a data group shard. 0: nothing (DDP); 1: optimizer state; 2: also gradients; 3: also
        parameters.
    optimizer : optimizer, ShardedOptimizer or None
        As in :class:`ShardedModelBase`.
    mesh : Mesh, optional
        As in :class:`ShardedModelBase`.
    """

    _parallel_layout: ParallelLayout
    optimizer_class: ClassVar[type[ShardedOptimizer]] = HybridShardedOptimizer

    def __init__(
        self,
        wrapped_model: Any,
        config: Config,
        parallel_layout: ParallelLayout,
        zero_stage: int,
        optimizer: Any = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._parallel_layout, self.zero_stage = parallel_layout, zero_stage
        super().__init__(wrapped_model, config, optimizer=optimizer, mesh=mesh)

    @property
    def _placement(self) -> Placement:
        if isinstance(self.zero_stage, bool) or self.zero_stage not in range(len(ZERO_STAGES)):
            raise ConfigError(f"zero_stage={self.zero_stage!r}: expected 0 (DDP), 1, 2 or 3")
        return placement(ZERO_STAGES[self.zero_stage])

    def _plans(self) -> dict[str, Any]:
        """Return all values that must be equal on all ranks, by name; raise ConfigError for sizes that do not fit."""
        _ = self._parallel_layout.axes(self.world_size), self._placement, self._parallel_layout.chunks
        plans = super()._plans()
        parallel_layout = {**self._parallel_layout.comparable(), "zero_stage": self.zero_stage}
        first: dict[str, Any] = {name: plans.pop(name) for name in ("Mesh", "strategy") if name in plans}
        return {**first, "the parallel layout": parallel_layout, **plans}

    def become_local(self, every: int) -> None:
        """Raise ConfigError, because local SGD needs the whole model on every rank."""
        raise ConfigError(
            f"{type(self).__name__} cannot train by local steps: a rank holds only its part of the model; use a "
            "data-parallel model with LocalSGDOptimizer"
        )

    def _twin(self, wrapped: Any) -> Self:
        twin = type(self).__new__(type(self))  # past constructors that turn their arguments into this layout
        twin._is_copy, twin._owns_mesh = True, self._owns_mesh
        ModelParallelBase.__init__(twin, wrapped, self._config, self._parallel_layout, self.zero_stage, mesh=self._mesh)
        return twin


@explains
class HybridShardedModel(ModelParallelBase):
    """Combine pipeline, tensor, context and data parallelism, with any ZeRO stage over the data group.

    Each rank stores and computes the blocks of its stage, split over its tensor group. All ranks get losses and
    metrics. An error inside a layer is raised on all ranks, and the model is unchanged. Layers that are split over
    ranks are an exception: while one rank raises, the others wait for it inside the layer, so an error that is not
    caught ends the job. A DataError is safe in them, because all ranks of a tensor group find it in the same samples.

    Parameters
    ----------
    wrapped_model : BlockModel
        The model to train.
    config : ShardingConfig
        The ranks and how they work together.
    pipeline_parallel_size, tensor_parallel_size : int
        Number of pipeline stages, and number of ranks over which a layer is split.
    data_parallel_size : int
        Number of replicas; -1 takes all remaining ranks.
    zero_stage : {0, 1, 2, 3}
        What the replicas shard, as in :class:`ModelParallelBase`.
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
    label: ClassVar[str | None] = "3D-Parallelism (Hybrid)"

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
    """Split the matrices of every layer over a tensor group; with more ranks, several groups are replicas.

    Parameters
    ----------
    wrapped_model : BlockModel
        The model to train.
    config : ShardingConfig
        The ranks and how they work together.
    tensor_parallel_size : int or None
        Number of ranks in a tensor group; None takes all ranks.
    zero_stage : {0, 1, 2, 3}
        What the replicas shard, as in :class:`ModelParallelBase`.
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
    label: ClassVar[str | None] = "TensorParallel"

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
        The ranks and how they work together.
    pipeline_parallel_size : int or None
        Number of stages; None takes all ranks.
    schedule, virtual_stages, cuts, costs
        As in :class:`HybridShardedModel`.
    zero_stage : {0, 1, 2, 3}
        What the replicas shard, as in :class:`ModelParallelBase`.
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
    label: ClassVar[str | None] = "PipelineParallel"

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
    """Return the settings of the pipeline: those given, and those of ``config`` for None. Not collective."""
    given = {"schedule": schedule, "virtual_stages": virtual_stages, "cuts": cuts, "costs": costs}
    return {name: getattr(config, name, None) if value is None else value for name, value in given.items()}
