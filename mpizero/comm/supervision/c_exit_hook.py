"""Run a function when a library ends the process by C's ``exit()``, which Python's hooks do not notice.

MPICH calls ``exit()`` when a message of a blocking collective is too long for its buffer, whatever error handler is
set. Functions that are registered by C's ``atexit`` still run then, and the supervision's thread is still alive.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable


class CExitHook:
    """Call ``function`` if C's ``exit()`` is called before :meth:`close`.

    Does nothing if the C library cannot register such functions. The hook must be closed before the interpreter ends,
    because ``function`` is Python code.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._called)
        self._owner = ctypes.create_string_buffer(1)  # its address marks the entry as ours, to be removed again
        self._remove: Callable[..., object] | None = None
        with contextlib.suppress(AttributeError, OSError, TypeError):
            library = ctypes.CDLL(None)
            self._remove = library["__cxa_finalize"]
            library["__cxa_atexit"](self._callback, None, ctypes.byref(self._owner))

    def _called(self, _: object) -> None:
        if self._function is not None:
            self._function()

    def close(self) -> None:
        """Unregister the function; a second call does nothing."""
        self._function = None
        remove, self._remove = self._remove, None
        if remove is not None:
            remove(ctypes.byref(self._owner))
