"""Let other processes ask this one for the stacks of its threads, by a signal that needs no interpreter lock.

The signal is a real-time one. SIGUSR1 and SIGUSR2 belong to the program and to batch systems: a handler of theirs that
is set before, after or while this library works stays in place.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys

#: A signal above those that C libraries and debuggers use, next to that of :mod:`.lock_timer`; 0 where there is none.
_SIGNAL = signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else 0


def show_stacks_when_asked() -> bool:
    """Begin to write the stacks to standard error when :func:`ask` is called for this process; False if it cannot."""
    with contextlib.suppress(ValueError, OSError, AttributeError, RuntimeError):  # a standard error of its own
        if _SIGNAL and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            faulthandler.register(_SIGNAL, file=sys.__stderr__ or 2, all_threads=True)
            return True
    return False


def stop_showing() -> None:
    """End what :func:`show_stacks_when_asked` has begun."""
    faulthandler.unregister(_SIGNAL)


def ask(process: int) -> None:
    """Make a process that shows its stacks when asked write them, even while it is stuck.

    Raises
    ------
    OSError
        If there is no such process.
    """
    os.kill(process, _SIGNAL)
