"""Set what belongs to the process for several users, who come and go in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ProcessSetting(Generic[Value]):
    """Give a setting of the process the value that the newest of its holders wants, and restore it after the last.

    Parameters
    ----------
    apply : callable
        Sets a value; called under a lock, with the newest holder's value, whenever a holder comes or goes.
    restore : callable
        Sets what was there before the first holder; called when the last one has gone.
    """

    def __init__(self, apply: Callable[[Value], object], restore: Callable[[], object]) -> None:
        self._apply, self._restore = apply, restore
        self._held: dict[object, Value] = {}
        self._lock = threading.RLock()  # a holder may be collected, and so leave, while another one comes

    def hold(self, value: Value) -> Callable[[], None]:
        """Set ``value`` until the function that is returned is called, or a later holder comes. Not collective.

        A second call of that function does nothing.
        """
        key = object()
        with self._lock:
            self._apply(value)
            self._held[key] = value

        def leave() -> None:
            with self._lock:
                if self._held.pop(key, self) is self:
                    return
                if self._held:
                    self._apply(next(reversed(self._held.values())))
                else:
                    self._restore()

        return leave
