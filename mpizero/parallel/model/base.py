"""Train, evaluate and describe a sharded model: the base class of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, cast

from mpizero.comm.calls import collective, recorded
from mpizero.errors import StateError
from mpizero.names import explains
from mpizero.parallel.batch.redistribute import Asked
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.model.manual_gradients import ManualGradients
from mpizero.parallel.model.metadata import ModelMetadata, describe
from mpizero.parallel.model.optimizers import ShardedOptimizer
from mpizero.text import notice


class Evaluation(NamedTuple):
    """Hold what ``evaluate`` has found over all ranks' samples.

    Attributes
    ----------
    loss_sum : float
        Sum of the losses.
    weight : float
        Total weight of the samples; where each counts once, their number.
    correct : int or None
        Number of correct predictions; None where the prediction is not one score a class.
    """

    loss_sum: float
    weight: float
    correct: int | None

    @property
    def loss(self) -> float:
        """Return the mean loss."""
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def accuracy(self) -> float | None:
        """Return the share of correct predictions; None where there is nothing to count."""
        return None if self.correct is None or not self.weight else self.correct / self.weight


@explains
class ShardedModelBase(ManualGradients):
    """Place the parameters, gradients and optimizer state of a model over the ranks of ``config.comm``.

    Construction, and every method that is not marked otherwise, is collective over ``config.comm``. The model holds
    windows and communicators: close it, or use it as a context manager; a closed model raises RuntimeError. When one
    rank's part of a call fails, every rank raises (RemoteError tells of another's error), and the model is as before;
    where layers are split over ranks, :class:`HybridShardedModel` says which errors end the job instead.

    Parameters
    ----------
    wrapped_model : BlockModel or BlackBoxModel
        What is trained. It is never changed; parameters live in the sharded model.
    config : ShardingConfig
        The ranks and how they work together.
    optimizer : optimizer, ShardedOptimizer or None
        Updates the parameters: a library optimizer, any object with an elementwise ``update(params, grads, state)``, or
        a sharded optimizer that no model has yet. None leaves plain SGD with ``config.learning_rate``, until the
        ``set_model`` of a sharded optimizer binds another.

    Raises
    ------
    TypeError
        If model or configuration is None or something else, or the optimizer is not gradient-based.
    ConfigError
        If ranks give different models, configurations or optimizers, or the optimizer belongs to another configuration
        or strategy.
    """

    #: What a plain optimizer is wrapped in.
    optimizer_class: ClassVar[type[ShardedOptimizer]] = ShardedOptimizer

    def __init__(self, wrapped_model: Any, config: ShardingConfig, *, optimizer: Any = None) -> None:
        self._optimizer, self._told_plain = optimizer, False
        super().__init__(wrapped_model, config)
        given, self._optimizer = self._optimizer, None
        if given is not None:
            try:
                given.set_model(self)
            except BaseException:
                self.engine.grid.world.defer_close(self._free)  # the other ranks may not have raised
                raise

    def _plans(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, the optimizer too, which becomes a sharded one. Not collective."""
        plans, given = super()._plans(), self._optimizer
        if given is not None and not isinstance(given, ShardedOptimizer):
            given = self._optimizer = self.optimizer_class(given, self._config)
        if given is not None and given.is_bound:
            raise StateError(f"the {type(given).__name__} belongs to another model: give each model its own")
        return {**plans, **({} if given is None else given.comparable(self))}

    @property
    def optimizer(self) -> ShardedOptimizer:
        """Return the sharded optimizer bound at construction, by ``distribute`` or by ``set_model``. Not collective.

        Raises
        ------
        RuntimeError
            If it has none: plain SGD with ``config.learning_rate`` trains it.
        """
        name, bound = type(self).__name__, self._optimizer
        if bound is None:
            raise StateError(
                f"this {name} has no optimizer: give it one when it is made, {name}(model, config, "
                "optimizer=mz.AdamW(lr=1e-3)), or bind one by its set_model"
            )
        if bound.model is not self:
            raise StateError(f"the {type(bound).__name__} of this {name} has been bound to another model meanwhile")
        return cast("ShardedOptimizer", bound)

    def _take_optimizer(self, optimizer: ShardedOptimizer) -> None:
        """Remember the optimizer that has been bound. Not collective."""
        self._optimizer = optimizer
        self.tell_unread()

    def __iter__(self) -> Iterator[Any]:
        """Yield the model and its optimizer: ``model, optimizer = mz.distribute(...)``. Not collective."""
        return iter((self, self.optimizer))

    def __getitem__(self, index: int) -> Any:
        """Return the model for 0, its optimizer for 1, as ``mz.distribute(...)[0]`` asks. Not collective."""
        return tuple(self)[index]

    @recorded
    def train(self, x: Any, y: Any, *, epoch: int = 0) -> float:
        """Train one step on this rank's samples of the global batch; return the mean loss over all of it.

        Rank r's samples follow rank r-1's; a rank may have none. With ``auto_sync_gradients=False`` nothing is
        updated: the gradient stays pending until ``synchronize_gradients`` and the optimizer's ``step``.

        Parameters
        ----------
        x, y : array, or tree of arrays
            This rank's samples of the global batch, samples on the first axis of every array; tuples, lists,
            dictionaries and dataclasses of arrays are cut and redistributed over ranks like one array. A rank without
            gives empty arrays of the same types.
        epoch : int
            Told to functions and layers as ``run.epoch``; nothing else depends on it. The same on all ranks.

        Raises
        ------
        DataError
            If batches do not fit together, naming rank, array and both.
        NonFiniteError
            After too many skipped steps in a row, by the configuration's ``bad_steps``.
        """
        self._pending, self.engine.asked = None, Asked(epoch)
        if not self._config.auto_sync_gradients:
            totals = self._pend(lambda engine: (engine.local_gradients(x, y), None)).totals
            return totals.mean
        if self._mean_every:
            return self._train_alone(x, y)
        if self._optimizer is None and not self._told_plain:
            self._tell_plain()
        report = self._with_room(lambda engine: engine.train(x, y))
        self._stepped(report)
        return report.loss

    def _tell_plain(self) -> None:
        """Say on rank 0 that plain SGD trains this model. Not collective."""
        self._told_plain = True
        if self.rank != 0:
            return
        unbound = next(iter(self._config.unbound), None)
        forgotten = "" if unbound is None else f"; {type(unbound).__name__} is bound to no model: call its set_model"
        notice(
            f"{type(self).__name__} has no optimizer: plain SGD with learning_rate={self._config.learning_rate} trains "
            f"it (optimizer=... gives it another){forgotten}"
        )

    @recorded
    def evaluate(self, x: Any, y: Any) -> Evaluation:
        """Return loss and correct predictions over all ranks' samples, without training.

        The result has ``loss`` and ``accuracy``, and unpacks as ``loss_sum, weight, correct``.
        """
        return Evaluation(*(self._evaluate_alone(x, y) if self._mean_every else self.engine.evaluate(x, y)))

    def predict(self, x: Any) -> Any:
        """Return the prediction for this rank's ``x``; ranks may ask for different numbers of samples.

        Collective where parameters are sharded (ZeRO-3, FSDP) or layers are split over ranks, whatever memory they
        share; elsewhere each rank may ask alone.
        """
        if self.shards_parameters:
            self._check_call("predict")
        return self.engine.runner.predict(x)

    @collective
    def check_integrity(self) -> None:
        """Compare all copies of parameters and optimizer state, and both with their last hash where one is held.

        ``config.check_every`` does it every so many steps; this is for moments of the caller's choice.

        Raises
        ------
        IntegrityError
            On every rank, if memory has changed by itself: names tensor, elements and rank.
        """
        self.engine.integrity.check()

    def metadata(self) -> ModelMetadata:
        """Return placement and measured figures. Not collective."""
        sent = self.last_step.bytes_sent if self.last_step is not None else 0
        return describe(self.engine, self._config, sent, self.label)
