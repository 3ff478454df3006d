"""The strategies by name: each is one row of the placement table."""

from __future__ import annotations

from typing import Any

from mpizero.comm.inmemory import InMemoryCommunicator
from mpizero.errors import ConfigError
from mpizero.names import explains
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.model.base import ShardedModelBase
from mpizero.parallel.model.optimizers import (
    DDPOptimizer,
    FSDPOptimizer,
    ShardedOptimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpizero.parallel.placement import placement


class DDPModel(ShardedModelBase):
    """Parameters, gradients and optimizer state replicated: one copy a node, or a rank with private memory."""

    strategy = "ddp"


class ZeRO1Model(ShardedModelBase):
    """Optimizer state sharded, parameters and gradients replicated (Rajbhandari et al. 2020, P_os).

    Traffic is that of DDP: a reduce-scatter of gradients and an all-gather of parameters.
    """

    strategy = "zero1"


class ZeRO2Model(ShardedModelBase):
    """Optimizer state and gradients sharded; no rank ever holds a full averaged gradient (ibid., P_os+g)."""

    strategy = "zero2"


class ZeRO3Model(ShardedModelBase):
    """Parameters, gradients and optimizer state sharded (ibid., P_os+g+p).

    Each unit is gathered just before its forward and its backward and released right after. On a single node with
    shared memory the window is the shard, and nothing is gathered.
    """

    strategy = "zero3"


class FSDPModel(ZeRO3Model):
    """ZeRO-3 by its other name: fully sharded data parallel."""

    strategy = "fsdp"


MODELS: dict[str, tuple[type[ShardedModelBase], type[ShardedOptimizer]]] = {
    "ddp": (DDPModel, DDPOptimizer),
    "zero1": (ZeRO1Model, ZeRO1Optimizer),
    "zero2": (ZeRO2Model, ZeRO2Optimizer),
    "zero3": (ZeRO3Model, ZeRO3Optimizer),
    "fsdp": (FSDPModel, FSDPOptimizer),
}


@explains
def distribute(
    model: Any, optimizer: Any, *, strategy: str = "zero2", config: ShardingConfig | None = None, comm: Any = None
) -> tuple[ShardedModelBase, ShardedOptimizer]:
    """Place a model and its optimizer over the ranks of a communicator.

    Collective over the communicator.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        What is trained.
    optimizer : optimizer
        A library optimizer, or any object with an elementwise ``update(params, grads, state)``.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}
        The row of the placement table.
    config : ShardingConfig or None
        How the ranks work together; None takes the defaults over ``comm``.
    comm : mpi4py communicator, InMemoryCommunicator, "self" or None
        The ranks, as :class:`ShardingConfig` takes them; only without ``config``, which has its own.

    Returns
    -------
    model : ShardedModelBase
        Ready to train.
    optimizer : ShardedOptimizer
        Bound to the model.
    """
    if config is not None and comm is not None:
        raise ConfigError("give either config (with its own comm) or comm, not both")
    placement(strategy)
    config = config if config is not None else ShardingConfig(comm=comm)
    model_class, optimizer_class = MODELS[strategy]
    sharded = optimizer_class(optimizer, config)
    wrapped = model_class(model, config)
    sharded.set_model(wrapped)
    return wrapped, sharded


__all__ = [
    "MODELS",
    "DDPModel",
    "FSDPModel",
    "InMemoryCommunicator",
    "ZeRO1Model",
    "ZeRO2Model",
    "ZeRO3Model",
    "distribute",
]
