"""Send fewer bytes: compressed gradients, or averaged parameters every few steps (local SGD, Stich 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero import optim
from mpizero.comm.calls import recorded
from mpizero.comm.reduce.codecs import codec_of
from mpizero.errors import ConfigError
from mpizero.parallel.config import ShardingConfig, check_bucket
from mpizero.parallel.model.fit import OptimizationOptions
from mpizero.parallel.model.optimizers import ShardedOptimizer
from mpizero.validation import require, whole

if TYPE_CHECKING:
    from mpizero.parallel.model.base import ShardedModelBase


class GradientCompressionOptimizer(ShardedOptimizer):
    """Update from compressed gradients with error feedback.

    When bound, the optimizer makes the model compress its gradient messages, as with
    ``ShardingConfig(gradient_compression=compression)``: between nodes, or between ranks with private memory. Ranks
    that share memory send nothing. The part of a gradient that a message leaves out is kept and added to the next
    gradient (see ``mpizero.comm.reduce.codecs``). It works with a model of any strategy over any communicator. Binding
    another optimizer ends the compression. Results then differ in bits between layouts.

    Parameters
    ----------
    wrapped_optimizer, config, options, loss_scale
        As in :class:`ShardedOptimizer`.
    compression : str
        "topk:SHARE", "int8", "bf16" or "fp16".

    Raises
    ------
    ConfigError
        If the compression is unknown, or the configuration has a ``bucket_mb``.
    """

    def __init__(
        self,
        wrapped_optimizer: Any,
        config: ShardingConfig | None = None,
        *,
        compression: str = "topk:0.01",
        options: OptimizationOptions | None = None,
        loss_scale: optim.DynamicLossScale | None = None,
    ) -> None:
        super().__init__(wrapped_optimizer, config, options=options, loss_scale=loss_scale)
        if codec_of(compression) is None:
            raise ConfigError("compression=None: expected 'topk:SHARE', 'int8', 'bf16' or 'fp16'")
        if config is not None:
            check_bucket(config.bucket_mb, compression)
        self.compression = compression

    def comparable(self, model: ShardedModelBase) -> dict[str, Any]:
        """Return all settings that must be equal on all ranks, by name, the compression among them. Not collective."""
        check_bucket(model.config.bucket_mb, self.compression)
        return super().comparable(model) | {"compression": self.compression}

    def _bind(self, model: ShardedModelBase) -> None:
        super()._bind(model)
        model.engine.exchange.compress(self.compression)


class LocalSGDOptimizer(ShardedOptimizer):
    """Train a private copy of the model on each rank's batches, and average the copies every ``every`` steps.

    The mean is a tree sum over ranks, so it has the same bits on every rank. Unlike with the sharded strategies, the
    result depends on the number of ranks. Each rank keeps its own optimizer state. Bind it to a ``DDPModel``: from then
    on each rank has private parameters. ``train`` returns the mean loss over the batches of all ranks. ``evaluate``
    sums over all ranks, each with its own parameters. A checkpoint holds the mean of the parameters, and the optimizer
    state of rank 0.

    Parameters
    ----------
    wrapped_optimizer : optimizer
        As in :class:`ShardedOptimizer`.
    config : ShardingConfig or None
        As in :class:`ShardedOptimizer`.
    every : int
        Number of steps between two averages.
    """

    strategies = ("ddp",)

    def __init__(self, wrapped_optimizer: Any, config: ShardingConfig | None = None, *, every: int = 8) -> None:
        super().__init__(wrapped_optimizer, config)
        self.every = require("every", every, whole(1))

    def comparable(self, model: ShardedModelBase) -> dict[str, Any]:
        """Return all settings that must be equal on all ranks, by name, ``every`` among them. Not collective."""
        return super().comparable(model) | {"every": self.every}

    def _bind(self, model: ShardedModelBase) -> None:
        model.become_local(self.every)
        super()._bind(model)

    @recorded
    def average_parameters(self) -> None:
        """Average the parameters of all ranks now, and set them on every rank. Collective."""
        self.model.average_parameters()
