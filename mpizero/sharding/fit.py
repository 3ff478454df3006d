"""Run the loop of ``optimizer.optimize``: epochs of training steps, validation, early stopping.

:func:`run_loop` trains with given :class:`OptimizationOptions`. :class:`BestParameters` keeps a copy of the parameters
of the best epoch, sharded like those of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero._util.checks import fraction, number, require, whole
from mpizero._util.names import explains
from mpizero._util.pytree import SampleTree
from mpizero._util.text import notice
from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_arrays, agree_equal, all_ranks
from mpizero.errors import ArgumentError, ConfigError, DataError, NonFiniteError
from mpizero.layout import Grains
from mpizero.sharding.parameter_access import gather_owned
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.data.source import Source
    from mpizero.sharding.model import Model
    from mpizero.sharding.optimizer import ShardedOptimizer


@explains
@dataclass(frozen=True, kw_only=True)
class OptimizationOptions:
    """Configure the loop of :meth:`ShardedOptimizer.optimize`.

    Parameters
    ----------
    epochs : int
        Number of passes over the training samples. An epoch ends with the step that uses the last of its samples; if
        the batch size does not divide their number, that step also uses the first samples of the next epoch.
    batch_size : int
        Number of samples in a global batch; all training samples if there are fewer.
    validation : float
        Fraction of the samples that is kept for validation, in [0, 1); 0 validates on the training samples.
    patience : int or None
        Number of epochs without improvement after which training stops; None never stops early.
    minimum_improvement : float
        A validation loss is an improvement if it is less than the best one minus this number.
    seed : int
        Seed of the order of samples.
    restore_best : bool
        Whether the model ends with the parameters of its best epoch; otherwise it keeps those of the last.

    Examples
    --------
    >>> import mpizero as mz
    >>> options = mz.OptimizationOptions(epochs=3, batch_size=4, patience=2)
    >>> options.validation, options.restore_best
    (0.1, True)
    >>> mz.OptimizationOptions(validation=1.0)
    Traceback (most recent call last):
    mpizero.errors.ConfigError: validation=1.0: expected a finite number >= 0 and < 1
    """

    epochs: int = 10
    batch_size: int = 32
    validation: float = 0.1
    patience: int | None = None
    minimum_improvement: float = 0.0
    seed: int = 0
    restore_best: bool = True

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a value is out of range."""
        for name in ("epochs", "batch_size", "patience"):
            if (value := getattr(self, name)) is not None:
                require(name, value, whole(1))
        require("validation", self.validation, fraction)
        require("minimum_improvement", self.minimum_improvement, number())


@dataclass(frozen=True)
class OptimizationResult:
    """Hold the results of ``optimize``.

    Attributes
    ----------
    history : tuple of dict
        A dictionary for each epoch, with the keys ``epoch``, ``loss`` (mean over its steps), ``validation_loss``, and
        ``accuracy`` if the model predicts one score for each class.
    best_epoch : int
        Number of the best epoch, counted from 0.
    best_loss : float
        Validation loss of the best epoch.
    best : BestParameters
        The parameters after the best epoch; each rank may hold only a part.
    steps : int
        Number of training steps.
    stopped_early : bool
        Whether the last ``patience`` epochs did not improve the validation loss, so that training stopped after them.
        It is also true if no further epochs would have followed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(8, 2, dtype=np.float32), np.array([0, 1] + [0] * 6)
    >>> options = mz.OptimizationOptions(epochs=3, batch_size=4, validation=0.25)
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), mz.AdamW(lr=0.1)) as model:
    ...     result = model.optimizer.optimize((x, y), options)
    >>> result.steps, len(result.history), result.stopped_early
    (5, 3, False)
    >>> result.best_parameters.size
    22
    """

    history: tuple[dict[str, float], ...]
    best_epoch: int
    best_loss: float
    best: BestParameters = field(repr=False, compare=False)
    steps: int
    stopped_early: bool

    @property
    def best_parameters(self) -> Array:
        """The parameters of the whole model after the best epoch, as a 1-D array in declared order.

        With ZeRO-3, FSDP and models split over ranks, each rank may keep only its part of them. The first access is
        then collective over the model's ranks, and must come before the model is closed. With the other strategies
        every rank has all parameters.
        """
        return self.best.gathered()


def run_loop(optimizer: ShardedOptimizer, data: Any, options: OptimizationOptions) -> OptimizationResult:
    """Run the loop of ``optimizer.optimize`` and return its result. Collective."""
    model, config = optimizer.model, optimizer.config
    comm = model.mesh.communicator
    if optimizer.wrapped_optimizer.needs_vectors:
        name = type(optimizer.wrapped_optimizer).__name__
        raise ConfigError(
            f"optimize: {name} needs all samples in every step, not batches of some: use mz.minimize or mz.Trainer"
        )
    from mpizero.data import batches

    train, valid = _same_data(comm, data, options)
    agree_equal(comm, lambda: {"the options of optimize": options}, "optimize")
    batch = min(options.batch_size, len(train))
    stream, steps = batches(train, model, batch, options.seed), 0
    history: list[dict[str, float]] = []
    best, best_epoch, snapshot = math.nan, 0, BestParameters(model)
    for epoch in range(options.epochs):
        losses = []
        while stream.consumed < (epoch + 1) * len(train):
            with all_ranks(comm):  # reading may fail on one rank
                x, y = next(stream)
            losses.append(model.train(x, y, epoch=stream.epoch))
            steps += 1
            if not config.auto_sync_gradients:
                optimizer.step()
        record = {"epoch": epoch, "loss": float(np.mean(losses)), **_validated(optimizer, valid)}
        history.append(record)
        _look_at(record, losses, optimizer, known=math.isfinite(best))
        if not math.isfinite(best) or record["validation_loss"] < best - options.minimum_improvement:
            best, best_epoch = record["validation_loss"], epoch
            snapshot.take()
        optimizer.note_stall(options.patience is not None and epoch - best_epoch >= options.patience)
        if stop := optimizer.should_early_stop():
            break
    if not math.isfinite(best):
        raise _nothing_finite(len(history), history[-1])
    if options.restore_best and best_epoch != len(history) - 1:
        snapshot.give_back()
    return OptimizationResult(tuple(history), best_epoch, best, snapshot, steps, stop)


def _look_at(record: dict[str, float], losses: list[float], optimizer: ShardedOptimizer, *, known: bool) -> None:
    """Print a notice on rank 0 if the validation loss of an epoch is infinite or NaN. Not collective.

    ``record`` is the epoch's entry in :attr:`OptimizationResult.history`, and ``losses`` are the training losses of its
    steps. ``known`` says whether any earlier validation loss was finite.

    Raises
    ------
    NonFiniteError
        If all losses of this epoch and all earlier validation losses are infinite or NaN.
    """
    loss, config = record["validation_loss"], optimizer.config
    if math.isfinite(loss):
        return
    if not known and not np.isfinite(losses).any():
        raise _nothing_finite(int(record["epoch"]) + 1, record)
    if config.bad_steps.warn and optimizer.model.rank == 0:
        notice(f"optimize: the validation loss of epoch {record['epoch']} is {loss:g}, which is no improvement")


def _nothing_finite(epochs: int, record: dict[str, float]) -> NonFiniteError:
    return NonFiniteError(
        f"optimize: no validation loss of {epochs} epoch(s) was finite; in the last one it was "
        f"{record['validation_loss']:g}, and the training loss {record['loss']:g}: look at the samples of both, or "
        "lower the learning rate"
    )


#: The most bytes of each array of training data that are compared between ranks: those of evenly chosen samples.
_COMPARED = 1 << 24


def compared_samples(source: Source) -> dict[str, Any]:
    """Return evenly spaced samples of each array of an :class:`ArraySource`, by its path, for ranks to compare.

    Not collective. The samples are up to 16 MiB of each array. For another source, return an empty dict.
    """
    from mpizero.data.source import ArraySource

    samples = {}
    if isinstance(source, ArraySource):
        for path, array in SampleTree.of(x=source.x, y=source.y).named:
            count = min(len(array), max(1, _COMPARED // max(1, array[:1].nbytes)))
            samples[f"the data ({path})"] = array[np.linspace(0, len(array) - 1, count).astype(np.int64)]
    return samples


def _same_data(comm: Communicator, data: Any, options: OptimizationOptions) -> tuple[Any, Any]:
    """Check that all ranks pass the same data; return the samples for training and those for validation.

    Collective; the first collective of ``optimize``. If the data are arrays, up to 16 MiB of evenly chosen samples of
    each are compared. For other data sources only the number of samples is compared, because reading may take long.
    """
    from mpizero.data.source import ArraySource

    parts: list[Any] = []

    def summary() -> dict[str, Any]:
        source = ArraySource(*data) if isinstance(data, tuple) else data
        parts.extend(source.split(options.validation) if options.validation else (source, source))
        train, valid = map(len, parts)
        if train < 1 or valid < 1:
            raise DataError(f"{len(source)} samples leave {train} to train, {valid} to validate: need both")
        return {"the number of samples": len(source), **compared_samples(source)}

    agree_arrays(comm, "optimize", summary)
    return parts[0], parts[1]


def _validated(optimizer: ShardedOptimizer, valid: Any) -> dict[str, float]:
    """Evaluate the validation samples; return "validation_loss" and, for scores of classes, "accuracy". Collective."""
    from mpizero.data.batches import slab_of

    comm = optimizer.model.mesh.communicator
    group = optimizer.model.batch_group
    part = Grains(len(valid), 1).samples_of(group.rank, group.size)
    with all_ranks(comm):
        x, y = slab_of(optimizer.model).samples(valid, np.arange(part.start, part.stop))
    evaluation = optimizer.model.evaluate(x, y)
    losses = {"validation_loss": evaluation.loss}
    return losses if evaluation.accuracy is None else {**losses, "accuracy": evaluation.accuracy}


class BestParameters:
    """Keep a copy of a model's parameters and integer arrays.

    If a rank cannot read all parameters in its node's memory, because they are sharded over nodes or split over ranks,
    it copies the ranges that it owns, else all parameters. It also copies the integer arrays of its pipeline stage.

    Parameters
    ----------
    model : Model
        The model; the constructor copies its present parameters.
    """

    def __init__(self, model: Model) -> None:
        self._model: Model | None = model
        self.take()

    def take(self) -> None:
        """Replace the copy by the model's present parameters. Not collective."""
        assert self._model is not None
        view = self._model._engine.global_view
        self._whole: Array | None = None if view.gathers else view.vector()
        self._owned: Array | None = self._model._engine.store.owned_values() if view.gathers else None
        self._integers = {name: value.copy() for name, value in self._model._engine.integers.values.items()}

    def give_back(self) -> None:
        """Set the model's parameters and integer arrays to the copy. Collective over the model's ranks."""
        assert self._model is not None
        self._model._engine.integers.set(self._integers)
        if self._owned is None:
            assert self._whole is not None
            self._model.set_parameters(self._whole)
            return
        self._model._engine.store.fill_owned(self._owned)
        self._model._engine.begin_copies()
        self._model._cache = None

    @property
    def nbytes(self) -> int:
        """The size of this rank's copy in bytes."""
        arrays = (self._whole, self._owned, *self._integers.values())
        return sum(values.nbytes for values in arrays if values is not None)

    def gathered(self) -> Array:
        """Return the kept parameters of the whole model, as a 1-D array in declared order.

        The first call is collective over the model's ranks if parameters are sharded or split; later calls are not.
        """
        if self._model is not None and self._model._shards_parameters:
            self._model._check_call("best_parameters")
        if self._whole is None:
            assert self._model is not None
            assert self._owned is not None
            self._whole = gather_owned(self._model._engine, self._owned)
        self._model = self._owned = None
        return self._whole

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: the parameters of the whole model, without the model object.

        Raises
        ------
        TypeError
            If this rank has only a part of the parameters, because :meth:`gathered` was not called yet.
        """
        if self._whole is None:
            raise ArgumentError(
                "the best parameters are spread over the ranks: ask for best_parameters on all of them first"
            )
        return {"_model": None, "_owned": None, "_whole": self._whole, "_integers": self._integers}
