"""Define ``ShardedModelBase``, the base class of all sharded models, which trains and evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, cast

from mpizero._util.names import explains
from mpizero._util.text import notice
from mpizero.comm.agreement import all_ranks, collective, recorded
from mpizero.errors import StateError
from mpizero.parallel.batch.redistribute import Asked
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.execution.evaluation import Evaluation
from mpizero.parallel.model.manual_gradients import ManualGradients
from mpizero.parallel.model.optimizers import ShardedOptimizer

if TYPE_CHECKING:
    from mpizero.parallel.model.metadata import ModelMetadata


@explains
class ShardedModelBase(ManualGradients):
    """Distribute the parameters, gradients and optimizer state of a model over the ranks of ``config.comm``.

    Construction, and every method that is not marked otherwise, is collective over ``config.comm``. The model holds
    windows and communicators: close it, or use it as a context manager. Methods of a closed model raise RuntimeError.
    When a call fails on one rank, every rank raises (RemoteError reports the error of another rank), and the model is
    unchanged. For layers that are split over ranks, :class:`HybridShardedModel` says which errors end the job instead.

    Parameters
    ----------
    wrapped_model : BlockModel or BlackBoxModel
        The model to train. It is never changed: the sharded model holds the parameters.
    config : ShardingConfig
        The ranks and how they work together.
    optimizer : optimizer, ShardedOptimizer or None
        Updates the parameters: a library optimizer, any object with an elementwise ``update(params, grads, state)``, or
        a sharded optimizer that is bound to no model yet. With None, plain SGD with ``config.learning_rate`` is used
        until a sharded optimizer is bound by its ``set_model``.

    Raises
    ------
    TypeError
        If model or configuration is None or of a wrong type, or the optimizer is not gradient-based.
    ConfigError
        If ranks pass different models, configurations or optimizers, or a sharded optimizer was created with another
        configuration or does not work with this strategy.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.ZeRO1Model(mz.nn.MLP(2, [4], 2), mz.ShardingConfig(comm="self")) as model:
    ...     isinstance(model, mz.ShardedModelBase), model.parameter_count, list(model.named_parameters())[:1]
    (True, 22, ['hidden.0.linear.weight'])
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
        """Return all values that must be equal on all ranks, by name, with the optimizer's settings. Not collective.

        This method also wraps a plain optimizer in a sharded optimizer.
        """
        plans, given = super()._plans(), self._optimizer
        if given is not None and not isinstance(given, ShardedOptimizer):
            given = self._optimizer = self.optimizer_class(given, self._config)
        if given is not None and given.is_bound:
            raise StateError(f"the {type(given).__name__} belongs to another model: give each model its own")
        return {**plans, **({} if given is None else given.comparable(self))}

    @property
    def optimizer(self) -> ShardedOptimizer:
        """The sharded optimizer that is bound to this model. Not collective.

        Raises
        ------
        RuntimeError
            If none is bound (then plain SGD with ``config.learning_rate`` trains the model), or if the optimizer has
            been bound to another model meanwhile.
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
        """Tell whether ``optimizer`` is the sharded optimizer that was last bound to this model. Not collective."""
        return self._optimizer is optimizer

    def _take_optimizer(self, optimizer: ShardedOptimizer) -> None:
        """Store ``optimizer`` as the one that is bound to this model. Not collective."""
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
        ``auto_sync_gradients=False`` only gradients are computed; ``synchronize_gradients`` then sums them over the
        ranks, and the optimizer's ``step`` updates the parameters.

        Parameters
        ----------
        x, y : array, or tree of arrays
            Inputs and targets of this rank's samples. The first axis of every array counts samples. Tuples, lists,
            dictionaries and dataclasses of arrays are cut and redistributed over ranks like one array. A rank without
            samples passes empty arrays of the same types.
        epoch : int
            Passed to the model's functions and layers as ``run.epoch``; it has no other effect. The same on all ranks.

        Raises
        ------
        DataError
            If the ranks' batches do not fit together, for example because arrays differ in type or in the shape of a
            sample. The message names the rank and the array, and says how it differs.
        NonFiniteError
            After too many skipped steps in a row, as ``config.bad_steps`` says.
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
        """Print a notice on rank 0 that plain SGD trains this model, because it has no optimizer. Not collective."""
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
    def evaluate(self, x: Any, y: Any, *, loss: Any = None, ema: bool = False) -> Evaluation:
        """Evaluate the samples of all ranks without training; return losses and correct predictions.

        ``x`` and ``y`` are inputs and targets of this rank's samples; the result is for all ranks together. It has the
        attributes ``loss`` and ``accuracy``, and unpacks as ``loss_sum, weight, correct``. ``loss`` is used instead of
        the model's own loss (not for black boxes); None is the model's own. With ``ema`` the moving average of the
        parameters is used in their place (``ShardingConfig(ema=...)``); they are unchanged afterwards.
        """
        if ema:
            self._check_call("evaluate")
        with self.engine.with_average(use=ema):
            return self._evaluate_alone(x, y, loss) if self._mean_every else self.engine.evaluate(x, y, loss)

    def predict(self, x: Any, *, ema: bool = False) -> Any:
        """Return the predictions for this rank's ``x``; ranks may pass different numbers of samples.

        Collective if parameters are sharded (ZeRO-3, FSDP) or layers are split over ranks, even if the ranks share
        memory. Otherwise each rank may call it alone. With ``ema`` the moving average of the parameters is used in
        their place (``ShardingConfig(ema=...)``), and the call is collective.
        """
        if self.shards_parameters or ema:
            self._check_call("predict")
        if not ema:
            return self.engine.runner.predict(x)
        engine, comm = self.engine, self._config.communicator
        agree = nullcontext() if engine.partitioned.splits_layers else all_ranks(comm)
        with engine.with_average(use=True), agree:
            return engine.runner.predict(x)

    @collective
    def check_integrity(self) -> None:
        """Check parameters and optimizer state for damaged memory.

        Copies on different ranks are compared with each other. Values are compared with their last hash, if one was
        computed since they were last changed on purpose. If ``config.check_every`` > 0, ``train`` calls this by itself.

        Raises
        ------
        IntegrityError
            On every rank, if memory is damaged. The message names the tensor, its elements and the rank.
        """
        self.engine.integrity.check()

    def metadata(self) -> ModelMetadata:
        """Describe how parameters, gradients and optimizer state are distributed, and count bytes. Not collective.

        The bytes are those of this rank: stored, and sent in the last step.
        """
        from mpizero.parallel.model.metadata import describe

        sent = self.last_step.bytes_sent if self.last_step is not None else 0
        return describe(self.engine, self._config, sent, self.label, self._mean_every)
