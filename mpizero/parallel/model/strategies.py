"""Define a model class and an optimizer class for each data-parallel strategy."""

from __future__ import annotations

from typing import Any

from mpizero.errors import ConfigError
from mpizero.names import explains
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.model.base import ShardedModelBase
from mpizero.parallel.model.optimizers import ShardedOptimizer
from mpizero.parallel.placement import placement


class DDPOptimizer(ShardedOptimizer):
    """Replicate the optimizer state: one copy on each node, of which each rank of the node updates a part."""

    strategies = ("ddp",)


class ZeRO1Optimizer(ShardedOptimizer):
    """Shard the optimizer state over all ranks."""

    strategies = ("zero1",)


class ZeRO2Optimizer(ShardedOptimizer):
    """Shard the optimizer state over all ranks, for models with sharded gradients."""

    strategies = ("zero2",)


class ZeRO3Optimizer(ShardedOptimizer):
    """Shard the optimizer state over all ranks, for models with sharded gradients and parameters."""

    strategies = ("zero3", "fsdp")


class FSDPOptimizer(ZeRO3Optimizer):
    """The same as :class:`ZeRO3Optimizer`, under another name."""


class DDPModel(ShardedModelBase):
    """Replicate parameters, gradients and optimizer state: one copy per node, or per rank if ranks share no memory."""

    strategy = "ddp"
    optimizer_class = DDPOptimizer


class ZeRO1Model(ShardedModelBase):
    """Shard the optimizer state, replicate parameters and gradients (Rajbhandari et al. 2020, P_os).

    A step sends as many bytes as with DDP: both reduce-scatter gradients; then ZeRO-1 all-gathers updated parameters,
    and DDP all-gathers summed gradients.
    """

    strategy = "zero1"
    optimizer_class = ZeRO1Optimizer


class ZeRO2Model(ShardedModelBase):
    """Shard optimizer state and gradients (Rajbhandari et al. 2020, P_os+g).

    No rank ever holds a full averaged gradient.
    """

    strategy = "zero2"
    optimizer_class = ZeRO2Optimizer


class ZeRO3Model(ShardedModelBase):
    """Shard parameters, gradients and optimizer state (Rajbhandari et al. 2020, P_os+g+p).

    Each unit is gathered just before its forward and its backward pass, and released right after. On a single node with
    shared memory all ranks read the parameters in one shared window, and nothing is gathered.
    """

    strategy = "zero3"
    optimizer_class = ZeRO3Optimizer


class FSDPModel(ZeRO3Model):
    """The same as :class:`ZeRO3Model`, under the name that PyTorch uses (fully sharded data parallel)."""

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
    """
    if config is not None and comm is not None:
        raise ConfigError("give either config (with its own comm) or comm, not both")
    placement(strategy)
    return _MODELS[strategy](model, config if config is not None else ShardingConfig(comm=comm), optimizer=optimizer)
