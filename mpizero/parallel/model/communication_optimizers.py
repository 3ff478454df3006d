"""Send fewer bytes: compressed gradients, or averaged parameters every few steps (local SGD, Stich 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero import optim
from mpizero._util.checks import require, whole
from mpizero.comm.agreement import recorded
from mpizero.comm.reduce import codec_of
from mpizero.errors import ConfigError
from mpizero.parallel.config import ShardingConfig, check_bucket
from mpizero.parallel.model.fit import OptimizationOptions
from mpizero.parallel.model.optimizers import ShardedOptimizer

if TYPE_CHECKING:
    from mpizero.parallel.model.base import ShardedModelBase


class GradientCompressionOptimizer(ShardedOptimizer):
    """Update from compressed gradients with error feedback.

    When bound, the optimizer makes the model compress the gradients that are sent between nodes, or between ranks if
    they share no memory, as ``ShardingConfig(gradient_compression=compression)`` does. Ranks that share memory send
    nothing. With top-k and int8, the part of a gradient that a message leaves out is kept and added to the next
    gradient (see ``mpizero.comm.reduce``). Every strategy and communicator can be used. Binding another
    optimizer to the model ends the compression. With compression, results on different numbers of ranks or nodes are
    no longer equal to the bit.

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

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
    >>> def bytes_sent(comm, optimizer):
    ...     with mz.ShardingConfig(comm=comm, share_node_memory=False) as config:
    ...         with mz.DDPModel(mz.nn.MLP(4, [64], 2), config, optimizer=optimizer) as model:
    ...             part = slice(2 * comm.rank, 2 * comm.rank + 2)
    ...             model.train(x[part], y[part])
    ...             return model.last_step.bytes_sent
    >>> packed = mz.testing.run_in_threads(2, lambda comm: bytes_sent(
    ...     comm, mz.GradientCompressionOptimizer(mz.AdamW(), compression="int8")))
    >>> packed[0] < 0.7 * mz.testing.run_in_threads(2, lambda comm: bytes_sent(comm, mz.AdamW()))[0]
    True
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
        _check_elementwise(self)
        self.compression = compression

    def comparable(self, model: ShardedModelBase) -> dict[str, Any]:
        """Return all settings that must be equal on all ranks, by name, including the compression. Not collective."""
        check_bucket(model.config.bucket_mb, self.compression)
        return super().comparable(model) | {"compression": self.compression}

    def _bind(self, model: ShardedModelBase) -> None:
        super()._bind(model)
        model.engine.exchange.compress(self.compression)


class LocalSGDOptimizer(ShardedOptimizer):
    """Train one copy of the model on each rank's batches, and average the copies every ``every`` steps.

    The mean is a tree sum over ranks, so it has the same bits on every rank. Unlike with the sharded strategies, the
    result depends on the number of ranks. The optimizer must be bound to a ``DDPModel``. From then on each rank has its
    own parameters and optimizer state. ``train`` returns the mean loss over the batches of all ranks. ``evaluate``
    computes each rank's samples with the parameters of that rank, and sums over all ranks. A checkpoint holds the mean
    of the parameters, and the optimizer state of rank 0.

    Parameters
    ----------
    wrapped_optimizer : optimizer
        As in :class:`ShardedOptimizer`.
    config : ShardingConfig or None
        As in :class:`ShardedOptimizer`.
    every : int
        Number of steps between two averages.

    Raises
    ------
    ConfigError
        If ``every`` is less than 1, the wrapped optimizer needs the gradient of all samples, or, when it is bound, the
        configuration has an ``ema``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(2, dtype=np.float32), np.array([0, 1])
    >>> def train(comm):
    ...     with mz.ShardingConfig(comm=comm) as config:
    ...         local = mz.LocalSGDOptimizer(mz.SGD(lr=0.5), every=2)
    ...         with mz.DDPModel(mz.nn.MLP(2, [], 2), config, optimizer=local) as model:
    ...             part = slice(comm.rank, comm.rank + 1)
    ...             for _ in range(4):
    ...                 model.train(x[part], y[part])
    ...             return model.metadata().averaged_every, model.parameters_sha256()
    >>> first, second = mz.testing.run_in_threads(2, train)
    >>> first[0], first == second  # just averaged
    (2, True)
    """

    strategies = ("ddp",)

    def __init__(self, wrapped_optimizer: Any, config: ShardingConfig | None = None, *, every: int = 8) -> None:
        super().__init__(wrapped_optimizer, config)
        _check_elementwise(self)
        self.every = require("every", every, whole(1))

    def comparable(self, model: ShardedModelBase) -> dict[str, Any]:
        """Return all settings that must be equal on all ranks, by name, including ``every``. Not collective."""
        if model.config.ema is not None:
            raise ConfigError(
                f"ShardingConfig(ema={model.config.ema}) with LocalSGDOptimizer: each rank trains a copy of its own, "
                "so there is no one average; leave ema out"
            )
        return super().comparable(model) | {"every": self.every}

    def _bind(self, model: ShardedModelBase) -> None:
        model.become_local(self.every)
        super()._bind(model)

    @recorded
    def average_parameters(self) -> None:
        """Set the parameters of every rank to the mean over all ranks, now. Collective."""
        self.model.average_parameters()


def _check_elementwise(optimizer: ShardedOptimizer) -> None:
    """Raise ``ConfigError`` if the wrapped optimizer needs the exact gradient of all samples. Not collective."""
    if optimizer.wrapped_optimizer.needs_vectors:
        name = type(optimizer.wrapped_optimizer).__name__
        raise ConfigError(
            f"{type(optimizer).__name__}({name}()): {name} needs the exact gradient of all samples, which its ranks do "
            "not have: give it to a model directly, optimizer=..."
        )
