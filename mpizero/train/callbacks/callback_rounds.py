"""Call the callbacks of a run on all ranks, and agree on errors and on requests to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_on_call, raise_on_all, record_call
from mpizero.errors import CollectiveError, StateError
from mpizero.train.callbacks.callback import HOOKS, overrides, restore_state, saved_state
from mpizero.types import Array

T = TypeVar("T")


def agree_after(comm: Communicator, what: str, error: Exception | None, *, wanted: bool = False) -> Array:
    """Check after calls of users' functions that all ranks have made the same collective calls, and raised no error.

    Collective over ``comm``: one message of 32 bytes a rank. ``what`` names the functions in reports, ``error`` is what
    they have raised on this rank. Return the ``wanted`` of all ranks.

    Raises
    ------
    Exception
        ``error`` itself, on the ranks that have one; RemoteError on the others.
    CollectiveMismatch
        If ranks have called different collective methods of their models.
    """
    record_call(comm, f"the end of {what}")
    try:
        told = agree_on_call(comm, (error is not None, wanted))
    except CollectiveError:
        if error is not None:  # which is why this rank has not called what the others have
            raise error from None
        raise
    if told[:, 0].any():
        raise_on_all(comm, error, what)
    return told[:, 1]


class CallbackRounds:
    """Call one method of all callbacks at a time.

    Parameters
    ----------
    callbacks : sequence
        The callbacks, of the same classes on every rank.
    model : ShardedModelBase
        The model that is trained. Its communicator compares the calls of the ranks.
    """

    def __init__(self, callbacks: Sequence[Any], model: Any) -> None:
        self._callbacks, self._model = callbacks, model
        self._called = {name: [one for one in callbacks if overrides(one, name)] for name in HOOKS}
        self._running = self._wanted = ""
        #: The reason for which a callback has stopped the run; "" if none has. The same on every rank.
        self.reason = ""

    def stop(self, reason: str) -> None:
        """Ask that all ranks end the run after this step; called by a callback. Not collective."""
        if not self._running:
            raise StateError(
                "trainer.stop is for the methods of callbacks, after which ranks agree on it; elsewhere, make a file "
                "STOP in the run's folder, or send SIGUSR1"
            )
        self._wanted = self._wanted or str(reason) or "a callback"

    def call(self, hook: str, *arguments: Any) -> None:
        """Call the method ``hook`` of all callbacks that have it, with ``arguments``. Collective if any has it.

        Raises
        ------
        Exception
            What a callback has raised, on the ranks on which it did; RemoteError on the others.
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
        """Return the states of rank 0's callbacks by name. Collective if there are callbacks; errors as :meth:`call`.

        A checkpoint has one state, of which rank 0's logger knows more than the others.
        """
        if not self._callbacks:
            return {}
        found = self._agreed("the callbacks' state_dict", lambda: saved_state(self._callbacks))[0]
        states: dict[str, Any] = self._comm.broadcast_object(found, tag="states of callbacks")
        return states

    def restore_state(self, saved: Mapping[str, Any]) -> list[str]:
        """Give every callback its saved state; return messages about what is missing or left.

        Collective if there are callbacks; errors as :meth:`call`: one may not take what another version has saved.
        """
        if not self._callbacks:
            return restore_state((), saved)
        return self._agreed("the callbacks' load_state_dict", lambda: restore_state(self._callbacks, saved))[0]

    @property
    def _comm(self) -> Communicator:
        comm: Communicator = self._model.config.communicator
        return comm

    def _agreed(self, what: str, call: Callable[[], T]) -> tuple[T, Array]:
        """Return what ``call`` returns, and which ranks want to stop; errors as :meth:`call`. Collective."""
        try:
            found = call()
        except Exception as error:  # the report about a mismatch then shows it
            agree_after(self._comm, what, error)
            raise
        return found, agree_after(self._comm, what, None, wanted=bool(self._wanted))

    def _call(self, hook: str, arguments: Sequence[Any]) -> None:
        step = self._model.engine.step_number
        self._running = hook
        try:
            for one in self._called[hook]:
                getattr(one, hook)(*arguments)
                if self._model.engine.step_number != step:
                    raise StateError(f"{type(one).__name__}.{hook} has trained the model: only the trainer may do that")
        finally:
            self._running = ""
