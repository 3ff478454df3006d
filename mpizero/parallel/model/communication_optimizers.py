"""Send less: gradients in fewer bytes, or parameters every so many steps (local SGD, Stich 2019)."""

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
    """Update from gradients that are sent in fewer bytes, with error feedback.

    From the binding on, the model sends its gradients as ``ShardingConfig(gradient_compression=compression)`` would:
    between nodes, or between ranks with private memory; ranks that share memory send nothing. What a message leaves out
    is kept and goes with the next one (see ``mpizero.comm.reduce.codecs``). Works with a model of any strategy over any
    communicator. Binding another optimizer ends it. Gives up the equality of bits between layouts.

    Parameters
    ----------
    wrapped_optimizer, config, options, loss_scale
        As for every sharded optimizer.
    compression : str
        "topk:SHARE", "int8", "bf16" or "fp16".

    Raises
    ------
    ConfigError
        If there is no such compression, or the configuration has a ``bucket_mb``.
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
        """Return what must be the same on all ranks, the compression too. Not collective."""
        check_bucket(model.config.bucket_mb, self.compression)
        return super().comparable(model) | {"compression": self.compression}

    def _bind(self, model: ShardedModelBase) -> None:
        super()._bind(model)
        model.engine.exchange.compress(self.compression)


class LocalSGDOptimizer(ShardedOptimizer):
    """Train a copy on each rank's own batches, and average the copies every ``every`` steps.

    The mean is a tree sum over ranks, so it has the same bits on every rank; unlike the sharded strategies, the result
    depends on the number of ranks. Optimizer state stays local. Bind it to a ``DDPModel``: from then on each rank has
    private parameters; ``train`` returns the mean loss of all ranks' batches, ``evaluate`` sums over all ranks, each
    with its own parameters, and what is saved is the mean of the parameters with the optimizer state of rank 0.

    Parameters
    ----------
    wrapped_optimizer : optimizer
        As for every sharded optimizer.
    config : ShardingConfig or None
        As for every sharded optimizer.
    every : int
        Steps between two means.
    """

    strategies = ("ddp",)

    def __init__(self, wrapped_optimizer: Any, config: ShardingConfig | None = None, *, every: int = 8) -> None:
        super().__init__(wrapped_optimizer, config)
        self.every = require("every", every, whole(1))

    def comparable(self, model: ShardedModelBase) -> dict[str, Any]:
        """Return what must be the same on all ranks, the number of steps too. Not collective."""
        return super().comparable(model) | {"every": self.every}

    def _bind(self, model: ShardedModelBase) -> None:
        model.become_local(self.every)
        super()._bind(model)

    @recorded
    def average_parameters(self) -> None:
        """Replace every rank's parameters by their mean now. Collective."""
        self.model.average_parameters()
