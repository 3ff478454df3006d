"""Train, evaluate and describe a sharded model: the base class of all sharded models."""

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
    """Hold the result of ``evaluate``, over the samples of all ranks.

    Attributes
    ----------
    loss_sum : float
        Sum of the losses.
    weight : float
        Total weight of the samples; their number if every sample has the weight 1.
    correct : int or None
        Number of correct predictions; None unless the prediction has one score for each class.
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
        """Return the share of correct predictions; None if they are not counted or there are no samples."""
        return None if self.correct is None or not self.weight else self.correct / self.weight


@explains
class ShardedModelBase(ManualGradients):
    """Place the parameters, gradients and optimizer state of a model over the ranks of ``config.comm``.

    Construction, and every method that is not marked otherwise, is collective over ``config.comm``. The model holds
    windows and communicators: close it, or use it as a context manager. A closed model raises RuntimeError. When a call
    fails on one rank, every rank raises (RemoteError reports the error of another rank), and the model is unchanged.
    For layers that are split over ranks, :class:`HybridShardedModel` says which errors end the job instead.

    Parameters
    ----------
    wrapped_model : BlockModel or BlackBoxModel
        The model to train. It is never changed: the sharded model holds the parameters.
    config : ShardingConfig
        The ranks and how they work together.
    optimizer : optimizer, ShardedOptimizer or None
        Updates the parameters: a library optimizer, any object with an elementwise ``update(params, grads, state)``, or
        a sharded optimizer that is bound to no model yet. None: plain SGD with ``config.learning_rate``, until
        ``set_model`` of a sharded optimizer binds that one.

    Raises
    ------
    TypeError
        If model or configuration is None or of a wrong type, or the optimizer is not gradient-based.
    ConfigError
        If ranks give different models, configurations or optimizers, or the optimizer belongs to another configuration
        or strategy.
    """

    #: Class of the sharded optimizer that is made of a plain optimizer.
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
        """Return everything that must be equal on all ranks, by name, with the optimizer's settings. Not collective.

        A plain optimizer is wrapped in a sharded optimizer here.
        """
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
            If the model has none; then plain SGD with ``config.learning_rate`` trains it.
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

    def is_updated_by(self, optimizer: ShardedOptimizer) -> bool:
        """Return whether ``optimizer`` is the one that was bound to this model last. Not collective."""
        return self._optimizer is optimizer

    def _take_optimizer(self, optimizer: ShardedOptimizer) -> None:
        """Store the sharded optimizer that has been bound to this model. Not collective."""
        self._optimizer = optimizer
        self.tell_unread()

    def __iter__(self) -> Iterator[Any]:
        """Yield the model and its optimizer: ``model, optimizer = mz.distribute(...)``. Not collective."""
        return iter((self, self.optimizer))

    def __getitem__(self, index: int) -> Any:
        """Return the model for 0 and its optimizer for 1, so that ``mz.distribute(...)[0]`` works. Not collective."""
        return tuple(self)[index]

    @recorded
    def train(self, x: Any, y: Any, *, epoch: int = 0) -> float:
        """Train one step on this rank's samples of the global batch; return the mean loss over the whole global batch.

        The global batch consists of the samples of rank 0, then those of rank 1, and so on; a rank may have none. With
        ``auto_sync_gradients=False`` no parameter is updated: the gradient stays pending until
        ``synchronize_gradients`` and the optimizer's ``step`` are called.

        Parameters
        ----------
        x, y : array, or tree of arrays
            This rank's samples of the global batch, samples on the first axis of every array. Tuples, lists,
            dictionaries and dataclasses of arrays are cut and redistributed over ranks like one array. A rank without
            samples passes empty arrays of the same types.
        epoch : int
            Passed to functions and layers as ``run.epoch``; nothing else depends on it. The same on all ranks.

        Raises
        ------
        DataError
            If the batches of the ranks do not fit together; names the rank, the array, and how the two differ.
        NonFiniteError
            After too many skipped steps in a row, as the configuration's ``bad_steps`` says.
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
        """Print a notice on rank 0 that plain SGD trains this model. Not collective."""
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
        """Evaluate the samples of all ranks without training; return losses and correct predictions.

        The result has ``loss`` and ``accuracy``, and unpacks as ``loss_sum, weight, correct``.
        """
        return Evaluation(*(self._evaluate_alone(x, y) if self._mean_every else self.engine.evaluate(x, y)))

    def predict(self, x: Any) -> Any:
        """Return the predictions for this rank's ``x``; ranks may pass different numbers of samples.

        Collective if parameters are sharded (ZeRO-3, FSDP) or layers are split over ranks, even if the ranks share
        memory. Otherwise each rank may call it alone.
        """
        if self.shards_parameters:
            self._check_call("predict")
        return self.engine.runner.predict(x)

    @collective
    def check_integrity(self) -> None:
        """Check parameters and optimizer state for damaged memory: compare all copies, and the last hash if any.

        With ``config.check_every`` the model does this by itself every so many steps.

        Raises
        ------
        IntegrityError
            On every rank, if values have changed outside of training; names tensor, elements and rank.
        """
        self.engine.integrity.check()

    def metadata(self) -> ModelMetadata:
        """Describe where parameters, gradients and state are, and how many bytes are held and sent. Not collective."""
        sent = self.last_step.bytes_sent if self.last_step is not None else 0
        return describe(self.engine, self._config, sent, self.label)
