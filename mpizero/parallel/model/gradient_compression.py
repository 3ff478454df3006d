"""An optimizer that has gradients travel compressed, whatever the model's configuration says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero import optim
from mpizero.comm.calls import recorded
from mpizero.comm.reduce.codecs import codec_of
from mpizero.errors import ConfigError
from mpizero.parallel.config import ShardingConfig, check_bucket
from mpizero.parallel.model.fit import OptimizationOptions
from mpizero.parallel.model.optimizers import ShardedOptimizer

if TYPE_CHECKING:
    from mpizero.parallel.model.base import ShardedModelBase


class GradientCompressionOptimizer(ShardedOptimizer):
    """Any optimizer, fed by gradients that travel in fewer bytes, with error feedback.

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
        config: ShardingConfig,
        *,
        compression: str = "topk:0.01",
        options: OptimizationOptions | None = None,
        loss_scale: optim.DynamicLossScale | None = None,
    ) -> None:
        super().__init__(wrapped_optimizer, config, options=options, loss_scale=loss_scale)
        if codec_of(compression) is None:
            raise ConfigError("compression=None: expected 'topk:SHARE', 'int8', 'bf16' or 'fp16'")
        check_bucket(config.bucket_mb, compression)
        self.compression = compression

    @recorded
    def set_model(self, model: ShardedModelBase) -> None:
        """Bind to a model and compress its gradients from now on. Collective over the model's ranks.

        Raises
        ------
        ConfigError
            If the model has another configuration, or ranks bind different optimizers or compressions.
        """
        super().set_model(model)
        model.engine.exchange.compress(self.compression)

    @property
    def _agreed(self) -> dict[str, Any]:
        return {"compression": self.compression}
