"""Name the data-parallel strategies: a model and an optimizer for each row of the placement table."""

from __future__ import annotations

from typing import Any

from mpizero.errors import ConfigError
from mpizero.names import explains
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.model.base import ShardedModelBase
from mpizero.parallel.model.optimizers import ShardedOptimizer
from mpizero.parallel.placement import placement


class DDPOptimizer(ShardedOptimizer):
    """Replicate the state: one copy a node, each rank updating its part of it."""

    strategies = ("ddp",)


class ZeRO1Optimizer(ShardedOptimizer):
    """Shard the state over all ranks."""

    strategies = ("zero1",)


class ZeRO2Optimizer(ShardedOptimizer):
    """Shard the state over all ranks, beside sharded gradients."""

    strategies = ("zero2",)


class ZeRO3Optimizer(ShardedOptimizer):
    """Shard the state over all ranks, beside sharded gradients and parameters."""

    strategies = ("zero3", "fsdp")


class FSDPOptimizer(ZeRO3Optimizer):
    """Do what :class:`ZeRO3Optimizer` does, by its other name."""


class DDPModel(ShardedModelBase):
    """Replicate parameters, gradients and optimizer state: one copy a node, or a rank with private memory."""

    strategy = "ddp"
    optimizer_class = DDPOptimizer


class ZeRO1Model(ShardedModelBase):
    """Shard the optimizer state, replicate parameters and gradients (Rajbhandari et al. 2020, P_os).

    Traffic is that of DDP: a reduce-scatter of gradients and an all-gather of parameters.
    """

    strategy = "zero1"
    optimizer_class = ZeRO1Optimizer


class ZeRO2Model(ShardedModelBase):
    """Shard optimizer state and gradients; no rank ever holds a full averaged gradient (ibid., P_os+g)."""

    strategy = "zero2"
    optimizer_class = ZeRO2Optimizer


class ZeRO3Model(ShardedModelBase):
    """Shard parameters, gradients and optimizer state (ibid., P_os+g+p).

    Each unit is gathered just before its forward and its backward and released right after. On a single node with
    shared memory the window is the shard, and nothing is gathered.
    """

    strategy = "zero3"
    optimizer_class = ZeRO3Optimizer


class FSDPModel(ZeRO3Model):
    """Do what :class:`ZeRO3Model` does, by its other name: fully sharded data parallel."""

    strategy = "fsdp"
    optimizer_class = FSDPOptimizer


_MODELS: dict[str, type[ShardedModelBase]] = {
    model.strategy: model for model in (DDPModel, ZeRO1Model, ZeRO2Model, ZeRO3Model, FSDPModel)
}


@explains
def distribute(
    model: Any, optimizer: Any, *, strategy: str = "zero2", config: ShardingConfig | None = None, comm: Any = None
) -> ShardedModelBase:
    """Place a model and its optimizer over the ranks of a communicator.

    Collective over the communicator.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        What is trained.
    optimizer : optimizer, ShardedOptimizer or None
        A library optimizer, any object with an elementwise ``update(params, grads, state)``, or a sharded optimizer.
        None leaves plain SGD with ``config.learning_rate``.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}
        The row of the placement table.
    config : ShardingConfig or None
        How the ranks work together; None takes the defaults over ``comm``.
    comm : mpi4py communicator, InMemoryCommunicator, "self" or None
        The ranks, as :class:`ShardingConfig` takes them; only without ``config``, which has its own.

    Returns
    -------
    model : ShardedModelBase
        Ready to train; its ``optimizer`` is the sharded optimizer. It unpacks as ``model, optimizer``, which earlier
        versions returned.
    """
    if config is not None and comm is not None:
        raise ConfigError("give either config (with its own comm) or comm, not both")
    placement(strategy)
    return _MODELS[strategy](model, config if config is not None else ShardingConfig(comm=comm), optimizer=optimizer)
