"""Define the methods that a training run calls, and check objects that have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpizero._util.names import nearest, shown
from mpizero.errors import ArgumentError, ConfigError
from mpizero.sharding import StepReport

#: Names of the methods that a run calls.
HOOKS = ("on_step", "on_validation", "on_checkpoint", "on_end")
#: Names of the methods by which a run saves and restores the state of a callback.
STATE = ("state_dict", "load_state_dict")


class Callback:
    """Define what a training run calls. Override what you need; an object of another class with some of them will do.

    Every method is called on every rank, for all callbacks in the order of the list, and after the same steps. After
    each round of calls the ranks compare what they did, with one small message. So a method may

    - read ``trainer.step``, ``trainer.figures``, ``trainer.model`` and its own files,
    - call collective methods of ``trainer.model`` and of communicators, if it does so on every rank in the same order;
      a method of the model that only some ranks call is an error that names the lines,
    - do something on one rank only (``if trainer.rank == 0``), such as writing to a file; the other ranks wait for it,
    - set parameters by the model's collective methods, but not train the model; as on any change between steps, a
      resumed run equals an uninterrupted one only if the method does the same after the same step,
    - ask by ``trainer.stop(reason)`` on any rank that all ranks end the run after this step,
    - raise an exception: all ranks end, with the line that raised it.

    Attributes
    ----------
    state_name : str
        Name under which a checkpoint keeps the state of :meth:`state_dict`; if it is empty, the class's name. Of
        several callbacks of one class that have a state, each needs its own.

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
        """Do something after each step; ``report`` is the step's, and ``trainer.figures`` its line of metrics."""

    def on_validation(self, trainer: Any, figures: Mapping[str, float | None]) -> None:
        """Do something after each validation; ``figures`` are its results by name, equal on all ranks."""

    def on_checkpoint(self, trainer: Any, path: str) -> None:
        """Do something when a checkpoint is complete; ``path`` is its folder. Asynchronous ones end in later steps."""

    def on_end(self, trainer: Any, result: Any) -> None:
        """Do something at the end of a run; ``result`` is its result, None if the run was asked to stop and saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values that every checkpoint keeps; those of rank 0 are saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the values that :meth:`state_dict` returned before the run was interrupted. Called on every rank."""


def check_callbacks(callbacks: object) -> tuple[Any, ...]:
    """Return the callbacks as a tuple. Not collective.

    Raises
    ------
    ArgumentError
        If one is a class, a function, or an object without a method that a run calls; or if the states of two have the
        same name in checkpoints. The message says what to give.
    """
    if isinstance(callbacks, str | bytes | Mapping) or not isinstance(callbacks, Iterable):
        raise ArgumentError(f"Trainer: callbacks={callbacks!r:.80}: expected a list of objects")
    found = tuple(callbacks)
    for number, one in enumerate(found):
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
    _check_state_names(found)
    return found


def _check_state_names(callbacks: Sequence[Any]) -> None:
    """Raise ArgumentError if two states have the same name: in another order, callbacks would swap them."""
    first: dict[str, int] = {}
    for number, one in enumerate(callbacks):
        if not overrides(one, STATE[0]):
            continue
        what, given = f"Trainer: callbacks[{number}], {type(one).__name__}", getattr(one, "state_name", "")
        if not isinstance(given, str):
            raise ArgumentError(f"{what}: state_name = {given!r:.80}: expected a string")
        if (other := first.setdefault(state_name(one), number)) != number:
            raise ArgumentError(
                f"{what}: a checkpoint could not tell its state from that of callbacks[{other}], both are called "
                f"{shown(state_name(one))}: give each an attribute state_name of its own"
            )


def overrides(callback: object, name: str) -> bool:
    """Tell whether a callback has a method of its own of this name, other than the empty one of its base class."""
    method = getattr(callback, name, None)
    return callable(method) and getattr(method, "__func__", None) is not getattr(Callback, name)


def state_name(callback: object) -> str:
    """Return the name under which a checkpoint keeps the state of a callback: its own, else that of its class."""
    return getattr(callback, "state_name", "") or type(callback).__name__


def saved_state(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the states of all callbacks that have one, by name. Not collective.

    Raises
    ------
    ConfigError
        If a state is no dictionary of JSON values; the message names the callback and the key.
    """
    found: dict[str, Any] = {}
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
        found[name] = state
    return found


def restore_state(callbacks: Sequence[Any], saved: Mapping[str, Any]) -> list[str]:
    """Give every callback its saved state; return a message for each state that is missing or that nobody takes.

    Not collective.
    """
    told = []
    takers = {state_name(one): one for one in callbacks if overrides(one, STATE[1])}
    for name, one in takers.items():
        if name in saved:
            one.load_state_dict(saved[name])
        else:
            told.append(f"callback {name} has no state in the checkpoint: it begins anew")
    told += [
        f"the checkpoint's state of callback {name} is left out: there is no such callback now"
        for name in saved
        if name not in takers
    ]
    return told
