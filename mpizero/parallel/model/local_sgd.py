"""Local SGD: ranks train alone and average their parameters every so many steps (Stich 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.comm.calls import recorded
from mpizero.errors import ConfigError
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.model.optimizers import ShardedOptimizer

if TYPE_CHECKING:
    from mpizero.parallel.model.base import ShardedModelBase


class LocalSGDOptimizer(ShardedOptimizer):
    """Every rank trains its own copy on its own batches; every ``every`` steps the copies are averaged.

    The mean is a tree sum over ranks, so it has the same bits on every rank; unlike the sharded strategies, the result
    depends on the number of ranks. Optimizer state stays local. Bind it to a ``DDPModel``: from then on each rank has
    private parameters; ``train`` returns the mean loss of all ranks' batches, ``evaluate`` sums over all ranks, each
    with its own parameters, and what is saved is the mean of the parameters with the optimizer state of rank 0.

    Parameters
    ----------
    wrapped_optimizer : optimizer
        As for every sharded optimizer.
    config : ShardingConfig
        The same as the model's.
    every : int
        Steps between two means.
    """

    strategies = ("ddp",)

    def __init__(self, wrapped_optimizer: Any, config: ShardingConfig, *, every: int = 8) -> None:
        super().__init__(wrapped_optimizer, config)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigError(f"every={every!r}: expected a whole number >= 1")
        self.every = every

    def set_model(self, model: ShardedModelBase) -> None:
        """Give every rank its own copy of the model. Collective over the model's ranks."""
        self._check(model)
        model.become_local(self.every)
        model.engine.bind(self.wrapped_optimizer, self.loss_scale)
        self._model = model
        self.config.unbound.discard(self)

    @property
    def _agreed(self) -> dict[str, Any]:
        return {"every": self.every}

    @recorded
    def average_parameters(self) -> None:
        """Replace every rank's parameters by their mean now. Collective."""
        self.model.average_parameters()
