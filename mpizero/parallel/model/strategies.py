"""Define a model class and an optimizer class for each data-parallel strategy."""

from __future__ import annotations

from typing import Any

from mpizero._util.names import explains
from mpizero.errors import ConfigError
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.model.base import ShardedModelBase
from mpizero.parallel.model.optimizers import ShardedOptimizer
from mpizero.parallel.placement import placement


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
    model: Any, optimizer: Any, *, strategy: str = "zero2", config: ShardingConfig | None = None, comm: Any = None
) -> ShardedModelBase:
    """Make a sharded model and its optimizer on the ranks of a communicator.

    Collective over the communicator.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The model to train.
    optimizer : optimizer, ShardedOptimizer or None
        A library optimizer, any object with an elementwise ``update(params, grads, state)``, or a sharded optimizer.
        None: plain SGD with ``config.learning_rate``.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}
        Which of parameters, gradients and optimizer state are sharded.
    config : ShardingConfig or None
        The ranks and how they work together; None takes the default settings over ``comm``.
    comm : mpi4py communicator, InMemoryCommunicator, "self" or None
        The ranks, as :class:`ShardingConfig` takes them. Must be None if ``config`` is given, which has a ``comm``.

    Returns
    -------
    model : ShardedModelBase
        The model, ready to train. Its attribute ``optimizer`` is the sharded optimizer. The model also unpacks as the
        pair ``model, optimizer``, which earlier versions returned.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 2, np.float32), np.array([0, 1] * 2)
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), mz.AdamW(lr=0.1), strategy="zero2", comm="self") as model:
    ...     losses = [model.train(x, y) for _ in range(5)]
    ...     model.metadata().strategy, model.optimizer.step_count
    ('ZeRO-2', 5)
    >>> losses[-1] < losses[0]
    True
    """
    if config is not None and comm is not None:
        raise ConfigError("give either config (with its own comm) or comm, not both")
    placement(strategy)
    return _MODELS[strategy](model, config if config is not None else ShardingConfig(comm=comm), optimizer=optimizer)
