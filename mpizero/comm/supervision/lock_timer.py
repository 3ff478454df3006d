"""End a process in which a thread holds Python's interpreter lock too long, by a kernel timer that needs no lock.

[Note: processor time] A timer on the wall clock would end every job that was stopped and resumed, because the thread
that restarts the timer did not run meanwhile. So this timer counts the processor time of the main thread, which does
not advance in a stopped process. It does not notice a thread that sleeps while it holds the lock; the watchdogs of the
other ranks notice such a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import signal
import sys
import threading
import time
from typing import Any, TextIO

from mpizero.comm.supervision.process_setting import ProcessSetting

#: A signal above those that C libraries and debuggers use.
_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 11


class _Event(ctypes.Structure):
    """Define the C structure ``struct sigevent``: what a timer does when it expires."""

    _fields_ = (("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("how", ctypes.c_int), ("_", ctypes.c_byte * 48))


class _Times(ctypes.Structure):
    """Define the C structure ``struct itimerspec``: when a timer expires."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "first", "first_ns"))


class LockTimer:
    """Write the stacks of all threads to ``file`` and kill the process if :meth:`restart` is not called in time.

    The timer runs from the first :meth:`restart` on, and counts the processor time of the main thread. It needs Linux
    and a signal that no other code handles; otherwise it does nothing.
    """

    def __init__(self, file: TextIO | int) -> None:
        self._library: Any = None
        self._timer = ctypes.c_void_p()
        main = threading.main_thread().ident
        if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) < 8 or main is None:
            return
        with contextlib.suppress(ValueError, OSError, AttributeError, RuntimeError):
            if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
                return
            library = _with_timers()
            leave = _stacks_to().hold(file)
            clock = ctypes.c_int(time.pthread_getcpuclockid(main))
            event = _Event(None, _SIGNAL, 0)
            if library.timer_create(clock, ctypes.byref(event), ctypes.byref(self._timer)) == 0:
                self._library, self._leave = library, leave
            else:
                leave()

    def restart(self, seconds: float) -> None:
        """Make the timer expire after ``seconds`` of processor time of the main thread, counted from now."""
        if self._library is not None:
            whole = int(seconds)
            times = _Times(0, 0, whole, max(1, int((seconds - whole) * 1e9)))
            self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)

    def close(self) -> None:
        """Delete the timer; a second call does nothing."""
        library, self._library = self._library, None
        if library is not None:
            library.timer_delete(self._timer)
            self._leave()


@functools.cache
def _stacks_to() -> ProcessSetting[TextIO | int]:
    """Return where the signal writes stacks: the file of the newest timer, after which it does its default, to end."""

    def register(file: TextIO | int) -> None:
        faulthandler.register(_SIGNAL, file=file, all_threads=True, chain=True)

    return ProcessSetting(register, lambda: faulthandler.unregister(_SIGNAL))


def _with_timers() -> Any:
    """Return the C library that contains the function ``timer_create``; before glibc 2.34 that is librt."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "timer_create") else ctypes.CDLL("librt.so.1")
