"""Call the user's callbacks and validation metrics during a run on all ranks, and raise their errors on all ranks.

:class:`Callback` defines the methods that a run calls; a callback may also be of another class with some of them.
:class:`CallbackRounds` calls one method of all callbacks, and afterwards exchanges errors and requests to stop between
ranks. :class:`UserMetrics` computes the user's own validation metrics, with the same bits on any number of ranks.
:class:`TensorBoard` is a callback that the library provides.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mpizero._util.checks import require, whole
from mpizero._util.names import nearest, shown
from mpizero._util.pytree import SampleTree, map_arrays
from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_on_call, all_ranks, raise_on_all, record_call
from mpizero.data.batches import slab_of
from mpizero.errors import ArgumentError, CollectiveError, ConfigError, DataError, StateError, UnsupportedError
from mpizero.layout import Grains
from mpizero.nn.layer import add_location
from mpizero.sharding import StepReport
from mpizero.types import Array

#: Names of the methods that a run calls.
HOOKS = ("on_step", "on_validation", "on_checkpoint", "on_end")
#: Names of the methods by which a run saves and restores the state of a callback.
STATE = ("state_dict", "load_state_dict")


class Callback:
    """Define the methods that a training run calls; a subclass overrides those that it needs.

    A callback may also be an object of another class with some of these methods. Every method is called on every rank,
    for all callbacks in the order of the list, and after the same steps. After the calls of one method, the ranks check
    by one small message that all have made the same collective calls and raised no error. So a method may

    - read ``trainer.step``, ``trainer.figures``, ``trainer.model`` and its own files,
    - call collective methods of ``trainer.model`` and of communicators, if it does so on every rank in the same order;
      a method of the model that only some ranks call is an error that names the lines,
    - do something on one rank only (``if trainer.rank == 0``), such as writing to a file; the other ranks wait for it,
    - set parameters by the model's collective methods, but not train the model; a resumed run equals an uninterrupted
      one only if the method makes the same change after the same step,
    - call ``trainer.stop(reason)`` on any rank to end the run on all ranks after this step,
    - raise an exception: then all ranks end with an error that names the line that raised it.

    Attributes
    ----------
    state_name : str
        Name under which a checkpoint stores the return value of :meth:`state_dict`; if it is empty, the class's name.
        If several callbacks of one class have a state, each needs another name.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x = np.linspace(0.0, 1.0, 8).reshape(8, 1)
    >>> source = mz.data.ArraySource(x, 2 * x)
    >>> line = mz.nn.MLP(1, [], 1, task="regression", dtype="float64")
    >>> class StopBelow(mz.Callback):
    ...     def on_step(self, trainer, report):
    ...         if report.loss < 0.1:
    ...             trainer.stop("the loss is low enough")
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     arguments = {"optimizer": mz.Adam(lr=0.1), "steps": 500, "global_batch": 8, "progress": False}
    ...     with mz.Trainer(line, source, config, **arguments, callbacks=[StopBelow()]) as trainer:
    ...         trainer.fit().stopped
    'the loss is low enough (a callback on rank 0)'
    """

    state_name: str = ""

    def on_step(self, trainer: Any, report: StepReport) -> None:
        """Handle the end of a step; ``trainer.figures`` has the metrics that are written of it."""

    def on_validation(self, trainer: Any, figures: Mapping[str, float | None]) -> None:
        """Handle the end of a validation; ``figures`` are the metrics by name, equal on all ranks."""

    def on_checkpoint(self, trainer: Any, path: str) -> None:
        """Handle a complete checkpoint in the folder ``path``; an asynchronous save completes during later steps."""

    def on_end(self, trainer: Any, result: Any) -> None:
        """Handle the end of a run; ``result`` is a TrainingResult, or None if the run was stopped to be resumed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state as a dict of JSON values; a checkpoint stores the dict of rank 0."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned before the run was interrupted. Called on every rank."""


def check_callbacks(callbacks: object) -> tuple[Any, ...]:
    """Check the argument ``callbacks`` of ``Trainer``, and return it as a tuple. Not collective.

    Raises
    ------
    ArgumentError
        If a callback is a class, a function, or an object without a method that a run calls; or if the states of two
        callbacks have the same name (:func:`state_name`). The message says what to pass instead.
    """
    if isinstance(callbacks, str | bytes | Mapping) or not isinstance(callbacks, Iterable):
        raise ArgumentError(f"Trainer: callbacks={callbacks!r:.80}: expected a list of objects")
    result = tuple(callbacks)
    for number, one in enumerate(result):
        what = f"Trainer: callbacks[{number}]"
        if isinstance(one, type):
            raise ArgumentError(f"{what} is the class {one.__name__}: give an object, {one.__name__}(...)")
        for name in dir(one):
            if name.startswith("on_") and name not in HOOKS and callable(getattr(one, name, None)):
                raise ArgumentError(
                    f"{what}, {type(one).__name__}: {name} is never called{nearest(name, HOOKS)}; a run calls "
                    f"{', '.join(HOOKS)}"
                )
        if not any(overrides(one, name) for name in HOOKS):
            raise ArgumentError(
                f"{what} is a {type(one).__name__} without any of {', '.join(HOOKS)}: derive a class from mz.Callback"
            )
        if overrides(one, STATE[0]) != overrides(one, STATE[1]):
            raise ArgumentError(f"{what}, {type(one).__name__}: has only one of {' and '.join(STATE)}; define both")
    _check_state_names(result)
    return result


def _check_state_names(callbacks: Sequence[Any]) -> None:
    """Raise ArgumentError if two callbacks save their states under one name, so that they could be swapped."""
    first: dict[str, int] = {}
    for number, one in enumerate(callbacks):
        if not overrides(one, STATE[0]):
            continue
        what, name = f"Trainer: callbacks[{number}], {type(one).__name__}", getattr(one, "state_name", "")
        if not isinstance(name, str):
            raise ArgumentError(f"{what}: state_name = {name!r:.80}: expected a string")
        if (other := first.setdefault(state_name(one), number)) != number:
            raise ArgumentError(
                f"{what}: a checkpoint could not tell its state from that of callbacks[{other}], both are called "
                f"{shown(state_name(one))}: give each an attribute state_name of its own"
            )


def overrides(callback: object, name: str) -> bool:
    """Return whether a callback defines the method ``name`` itself, rather than inherit it from :class:`Callback`."""
    method = getattr(callback, name, None)
    return callable(method) and getattr(method, "__func__", None) is not getattr(Callback, name)


def state_name(callback: object) -> str:
    """Return the name under which a checkpoint stores a callback's state: its ``state_name``, or its class's name."""
    return getattr(callback, "state_name", "") or type(callback).__name__


def saved_state(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the states of all callbacks that have one, by name. Not collective.

    Raises
    ------
    ConfigError
        If a state is not a dict of JSON values; the message names the callback and the key.
    """
    states: dict[str, Any] = {}
    for one in callbacks:
        if not overrides(one, STATE[0]):
            continue
        name, state = state_name(one), one.state_dict()
        if not isinstance(state, dict):
            raise ConfigError(f"{name}.state_dict must return a dictionary, it returned a {type(state).__name__}")
        for key, value in state.items():
            try:
                plain = isinstance(key, str) and json.loads(json.dumps(value, allow_nan=False)) == value
            except (TypeError, ValueError):
                plain = False
            if not plain:
                raise ConfigError(
                    f"{name}.state_dict: {shown(key)} is {value!r:.80}: a checkpoint keeps JSON values under names: "
                    "finite numbers, strings, lists and dictionaries of them"
                )
        states[name] = state
    return states


def restore_state(callbacks: Sequence[Any], saved: Mapping[str, Any]) -> list[str]:
    """Load the states of callbacks; return a message for each callback without one, and each state without a callback.

    Not collective.
    """
    messages = []
    takers = {state_name(one): one for one in callbacks if overrides(one, STATE[1])}
    for name, one in takers.items():
        if name in saved:
            one.load_state_dict(saved[name])
        else:
            messages.append(f"callback {name} has no state in the checkpoint: it begins anew")
    messages += [
        f"the checkpoint's state of callback {name} is left out: there is no such callback now"
        for name in saved
        if name not in takers
    ]
    return messages


def agree_after(comm: Communicator, what: str, error: Exception | None, *, wanted: bool = False) -> Array:
    """Check after calls of users' functions that all ranks have made the same collective calls, and raised no error.

    Return an array with the argument ``wanted`` of every rank. Collective over ``comm``: each rank sends one message of
    32 bytes. ``what`` names the functions in error messages, ``error`` is their exception on this rank, or None.
    ``wanted`` says whether this rank requests that the run stops.

    Raises
    ------
    Exception
        ``error`` itself, on ranks where it is not None; RemoteError on the others.
    CollectiveMismatch
        If ranks have called different collective methods of their models.
    """
    record_call(comm, f"the end of {what}")
    try:
        flags = agree_on_call(comm, (error is not None, wanted))
    except CollectiveError:
        if error is not None:  # which is why this rank has not called what the others have
            raise error from None
        raise
    if flags[:, 0].any():
        raise_on_all(comm, error, what)
    return flags[:, 1]


T = TypeVar("T")


class CallbackRounds:
    """Call one method of all callbacks, and raise their errors on all ranks.

    Parameters
    ----------
    callbacks : sequence
        The callbacks, of the same classes on every rank.
    model : Model
        The model that is trained. Its communicator checks that all ranks make the same calls.
    """

    def __init__(self, callbacks: Sequence[Any], model: Any) -> None:
        self._callbacks, self._model = callbacks, model
        self._comm: Communicator = model.mesh.communicator
        self._called = {name: [one for one in callbacks if overrides(one, name)] for name in HOOKS}
        self._running = self._wanted = ""
        #: The reason for which a callback has stopped the run; "" if none has. The same on every rank.
        self.reason = ""

    def stop(self, reason: str) -> None:
        """Request that all ranks end the run after this step; called by a callback. Not collective."""
        if not self._running:
            raise StateError(
                "trainer.stop is for the methods of callbacks, after which ranks agree on it; elsewhere, make a file "
                "STOP in the run's folder, or send SIGUSR1"
            )
        self._wanted = self._wanted or str(reason) or "a callback"

    def call(self, hook: str, *arguments: Any) -> None:
        """Call the method ``hook`` of all callbacks that have it, with ``arguments``. Collective if one of them has it.

        Raises
        ------
        Exception
            The exception of a callback, on the ranks where it was raised; RemoteError on the others.
        CollectiveMismatch
            If ranks have called different collective methods of the model.
        StateError
            If a callback has trained the model.
        """
        if not self._called[hook]:
            return
        wanted = self._agreed(f"the callbacks' {hook}", lambda: self._call(hook, arguments))[1]
        if wanted.any():
            reasons = self._comm.allgather_object(self._wanted, "callbacks stop")
            rank, reason = next((rank, text) for rank, text in enumerate(reasons) if text)
            self.reason, self._wanted = self.reason or f"{reason} (a callback on rank {rank})", ""

    def saved_state(self) -> dict[str, Any]:
        """Return the states of rank 0's callbacks by name. Collective if there are callbacks.

        The states of rank 0 are saved, because callbacks usually write logs on rank 0. Errors of a callback are raised
        as by :meth:`call`.
        """
        if not self._callbacks:
            return {}
        local_states = self._agreed("the callbacks' state_dict", lambda: saved_state(self._callbacks))[0]
        states: dict[str, Any] = self._comm.broadcast_object(local_states, tag="states of callbacks")
        return states

    def restore_state(self, saved: Mapping[str, Any]) -> list[str]:
        """Load the saved state of every callback; return messages about states that are missing or left over.

        Collective if there are callbacks. Errors of a callback are raised as by :meth:`call`.
        """
        if not self._callbacks:
            return restore_state((), saved)
        return self._agreed("the callbacks' load_state_dict", lambda: restore_state(self._callbacks, saved))[0]

    def _agreed(self, what: str, call: Callable[[], T]) -> tuple[T, Array]:
        """Return the result of ``call()``, and for each rank whether it requests a stop. Collective."""
        try:
            result = call()
        except Exception as error:  # the report about a mismatch then shows it
            agree_after(self._comm, what, error)
            raise
        return result, agree_after(self._comm, what, None, wanted=bool(self._wanted))

    def _call(self, hook: str, arguments: Sequence[Any]) -> None:
        step = self._model._engine.step_number
        self._running = hook
        try:
            for one in self._called[hook]:
                getattr(one, hook)(*arguments)
                if self._model._engine.step_number != step:
                    raise StateError(f"{type(one).__name__}.{hook} has trained the model: only the trainer may do that")
        finally:
            self._running = ""


#: Type of a metric: takes the model and samples ``(x, y)``, and returns a sum over them and their weight, or two fields
#: that are summed over samples, space and channels.
Metric = Callable[[Any, tuple[Any, Any]], tuple[Any, Any]]
#: Names in a step's line of metrics that no metric of the user may have.
RESERVED = (
    "step",
    "loss",
    "learning_rate",
    "gradient_norm",
    "bytes_sent",
    "memory",
    "skipped",
    "loss_spike",
    "bucket_mb",
    "validation_loss",
    "perplexity",
    "accuracy",
    "iteration",
    "iterate_loss",
    "largest_gradient",
    "overrides",
)


def taken(name: object) -> bool:
    """Return whether the library itself records a metric of this name. Not collective."""
    return name in RESERVED or (isinstance(name, str) and name.endswith("_per_second"))


def check_metrics(metrics: object) -> dict[str, Metric]:
    """Check the argument ``metrics`` of ``Trainer``, and return it as a dict. Not collective.

    Raises
    ------
    ArgumentError
        If ``metrics`` is not a dict of functions.
    ConfigError
        If a key is the name of a metric of the library, or not an identifier.
    """
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"Trainer: metrics={metrics!r:.80}: expected a dictionary of functions, {{'name': function}}"
        )
    for name, function in metrics.items():
        if not isinstance(name, str) or not name.isidentifier() or taken(name):
            why = "every line of metrics has it already" if taken(name) else "letters, digits and _ make a name"
            raise ConfigError(f"Trainer: metrics: {shown(name)} cannot be the name of a metric: {why}")
        if not callable(function):
            raise ArgumentError(f"Trainer: metrics[{name!r}] is a {type(function).__name__}, not a function")
    return dict(metrics)


class UserMetrics:
    """Sum the user's metrics over the samples of one validation.

    Every metric is called once for each grain (a fixed slice of the global batch), so it gets the same samples on any
    number of ranks. The sums over grains are added exactly (:func:`math.fsum`), so their order does not matter. All
    ranks call a metric equally often, because it may call collective methods of the model, such as ``predict``. A rank
    with fewer grains than another calls the metric with the first grain again, and discards the result.

    A metric may return two fields in place of two numbers. They are summed by spatial tiles
    (:func:`mpizero.nn.domain_sum`), so the sums have the same bits on every cut of space. With a domain numbers are
    refused: they would be sums over a rank's part, in an order that depends on the cut.

    Parameters
    ----------
    metrics : dict
        The functions by name.
    model : Model
        The sharded model that the functions get as their first argument.
    """

    def __init__(self, metrics: Mapping[str, Metric], model: Any) -> None:
        self._metrics, self._model = metrics, model
        self._sums: dict[str, list[tuple[float, float]]] = {name: [] for name in metrics}
        self._domain = model._engine.partitioned.split.domain if math.prod(model.mesh.domain) > 1 else None

    def add(self, source: Any, part: Array, size: int, local_samples: tuple[Any, Any]) -> None:
        """Evaluate all metrics on the samples of ``source`` at the indices ``part``, and add the results to the sums.

        Collective over the model's ranks. ``size`` is the number of samples in a grain, and ``local_samples`` are the
        samples of the grains of ``part`` that this rank evaluates.
        """
        if not self._metrics:
            return
        group, grains = self._model.batch_group, Grains(len(part), size)
        local_grains = grains.assigned(group.rank, group.size)
        rounds = max(len(grains.assigned(rank, group.size)) for rank in range(group.size))
        axes = len(self._model.mesh.domain)
        comm, returned = self._model.mesh.communicator, list[tuple[str, tuple[Any, Any]]]()
        try:
            spare: tuple[Any, Any] = local_samples
            if len(local_grains) < rounds:
                spare = slab_of(self._model).samples(source, part[grains.span(0)])
            for number in range(rounds):
                counts = number < len(local_grains)
                batch = _part(local_samples, number * size, size) if counts else spare
                for name, function in self._metrics.items():
                    pair = _checked(name, function(self._model, batch), cut=bool(axes))
                    if axes:
                        _require_part(name, pair, batch, axes)
                    if counts:
                        returned.append((name, pair))
        except Exception as error:  # the report about a mismatch then shows it
            agree_after(comm, "the metrics", error)
            raise
        agree_after(comm, "the metrics", None)
        with all_ranks(comm, "the metrics"):
            for name, pair in returned:
                self._sums[name].append(self._summed(name, pair))

    def _summed(self, name: str, pair: tuple[Any, Any]) -> tuple[float, float]:
        """Return ``pair`` if it is two numbers; of two fields, return the sums over the parts of all ranks.

        Collective over the domain.
        """
        if isinstance(pair[0], float):
            return pair
        from mpizero.nn.halos import domain_sum  # imported late: few metrics are of fields

        try:
            sums = domain_sum(pair, lambda *tiles: np.array([tile.sum() for tile in tiles]), group=self._domain)
        except Exception as error:
            add_location(error, "metric", name, self._metrics[name])
            raise
        return float(sums[0]), float(sums[1])

    def compute(self) -> dict[str, float | None]:
        """Return the value of every metric: its sum divided by its weight; None if the quotient is not finite.

        Collective over the model's ranks.
        """
        if not self._metrics:
            return {}
        gathered = self._model.batch_group.allgather_object(self._sums, "metrics")
        values: dict[str, float | None] = {}
        for name in self._metrics:
            pairs = [pair for sums in gathered for pair in sums[name]]
            finite = all(math.isfinite(value) for pair in pairs for value in pair)
            total, weight = (_sum(pair[index] for pair in pairs) if finite else math.nan for index in (0, 1))
            value = total / weight if weight and math.isfinite(weight) else math.nan
            values[name] = value if math.isfinite(value) else None
        # All groups of ranks of a split model have computed the same values; all use those of the first rank.
        decided: dict[str, float | None] = self._model.mesh.communicator.broadcast_object(values, tag="metrics")
        return decided


def _sum(values: Iterable[float]) -> float:
    """Return the sum of finite numbers, rounded once; infinity if the sum exceeds the range of a float."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def _part(samples: tuple[Any, Any], start: int, count: int) -> tuple[Any, Any]:
    x, y = (map_arrays(lambda leaf: leaf[start : start + count], values) for values in samples)
    return x, y


#: What a metric returns, with a domain and without one.
_EXPECTED = {
    True: "two arrays (samples, space, channels) of the rank's part of the fields, the values and their weights, which "
    "are summed over the whole fields (of a mean: values, np.ones_like(values))",
    False: "two numbers, the sum over the samples of the batch and their weight (of a mean: the mean times the number "
    "of samples, and that number)",
}


def _checked(name: str, returned: Any, *, cut: bool) -> tuple[Any, Any]:
    """Return what a metric has returned, as two floats or two fields of float64; raise ConfigError for anything else.

    ``cut`` is true if a domain cuts the fields; then two numbers raise the error, too.
    """
    pair: Any = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (None, None)
    fields = [
        value for value in pair if isinstance(value, np.ndarray) and value.ndim > 2 and value.dtype.kind in "biuf"
    ]
    if len(fields) == 2 and (fields[1] >= 0).all():
        return fields[0].astype(np.float64), fields[1].astype(np.float64)
    numbers = [value.item() if getattr(value, "shape", None) == () else value for value in pair]
    if cut or not all(isinstance(value, Real) for value in numbers) or not float(numbers[1]) >= 0:
        raise ConfigError(f"metric {name!r} returned {returned!r:.80}: expected {_EXPECTED[cut]}")
    return float(numbers[0]), float(numbers[1])


def _require_part(name: str, pair: tuple[Array, Array], batch: tuple[Any, Any], axes: int) -> None:
    """Raise DataError if the fields ``pair`` of a metric have other extents of space than this rank's part of samples.

    ``axes`` is the number of axes of space. Summing the fields over the ranks would not reveal the mistake, because the
    ranks' parts fit together to a whole field of another size, too.
    """
    spaces = {leaf.shape[1 : axes + 1] for leaf in SampleTree.of(samples=batch).leaves if leaf.ndim > axes}
    if wrong := [field.shape[1:-1] for field in pair if field.shape[1:-1] not in spaces]:
        raise DataError(
            f"metric {name!r} returned a field of {wrong[0]} positions; this rank's part of the samples has "
            f"{' or '.join(map(str, sorted(spaces)))}: return values and weights at the positions of the part"
        )


class TensorBoard(Callback):
    """Write all numbers of each step and each validation as scalars for TensorBoard, on rank 0 (extra ``tensorboard``).

    After a resume, TensorBoard hides the values that the interrupted run has written for steps that are repeated.

    Parameters
    ----------
    folder : path or None
        Folder of the event files; None means ``tensorboard`` in the run's folder.
    every : int
        Steps whose number is a multiple of ``every`` are written; validations are always written.

    Raises
    ------
    UnsupportedError
        On rank 0, at the first step or validation that is written, if ``tensorboardX`` is not installed; the other
        ranks raise RemoteError.

    Examples
    --------
    >>> import mpizero as mz
    >>> board = mz.TensorBoard("events", every=10)  # for Trainer(..., callbacks=[board])
    >>> isinstance(board, mz.Callback)
    True
    >>> mz.TensorBoard(every=0)
    Traceback (most recent call last):
    mpizero.errors.ConfigError: TensorBoard: every=0: expected a whole number >= 1
    """

    def __init__(self, folder: str | Path | None = None, *, every: int = 1) -> None:
        self._folder = None if folder is None else os.path.abspath(folder)
        self._every = require("TensorBoard: every", every, whole(1))
        self._writer: Any = None

    def on_step(self, trainer: Any, report: StepReport) -> None:
        """Write the metrics of a step."""
        if trainer.rank == 0 and trainer.step % self._every == 0:
            self._write(trainer, trainer.figures)

    def on_validation(self, trainer: Any, figures: Mapping[str, float | None]) -> None:
        """Write the metrics of a validation."""
        if trainer.rank == 0:
            self._write(trainer, figures)

    def on_end(self, trainer: Any, result: Any) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, trainer: Any, metrics: Mapping[str, Any]) -> None:
        if self._writer is None:
            folder = trainer.run / "tensorboard" if self._folder is None else self._folder
            self._writer = _event_writer(str(folder), trainer.step)
        for name, value in metrics.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, trainer.step)


def _event_writer(folder: str, step: int) -> Any:
    """Open an event file; TensorBoard hides values of older files in ``folder`` from ``step`` on."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise UnsupportedError(
            "TensorBoard needs tensorboardX, which is not installed: pip install mpizero[tensorboard]"
        ) from None
    return SummaryWriter(folder, purge_step=step)
