"""Catch the signals by which schedulers ask a job to stop, so that it can save its state first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType

#: SIGUSR1 and SIGUSR2 are a batch system's early warnings; with SIGTERM schedulers and launchers ask a job to end.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2)
#: Those that stay with a program that handles them itself, as submitit does. Not SIGUSR1: MPI libraries handle it.
_LEFT_ALONE = (signal.SIGUSR2,)
Handler = Callable[[int, FrameType | None], object] | int | None


class StopSignals(AbstractContextManager["StopSignals"]):
    """Record stop signals inside a ``with`` block; an inner ``with`` block of the same object has no effect.

    The handler only stores the name of the first signal; the program is not interrupted. Python allows signal handlers
    in the main thread only, so nothing is recorded if another thread enters the block. A SIGUSR2 that the program
    handles itself is left to it, and so is a signal for which it sets a handler inside of the block. A fork of the
    process, such as a worker of a pool, which its parent ends by SIGTERM, behaves as without the block.

    Parameters
    ----------
    caught : sequence of signal
        The signals to record.
    """

    def __init__(self, caught: Sequence[signal.Signals] = SIGNALS) -> None:
        self._name, self._depth, self._caught, self._process = "", 0, caught, os.getpid()
        self._previous: dict[int, Handler] = {}

    def __enter__(self) -> StopSignals:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in self._caught:
                if not _is_taken(number):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._note:  # else set by the program meanwhile
                _restore(number, handler)
        self._previous.clear()

    @property
    def name(self) -> str:
        """Name of the first signal that was caught; "" if there was none."""
        return self._name

    def reason(self, rank: int) -> str:
        """Return the reason to stop, such as "SIGTERM on rank 3"; "" if no signal was caught. ``rank`` is this rank."""
        return f"{self._name} on rank {rank}" if self._name else ""

    def ignore(self) -> None:
        """Ignore stop signals from now on, also after the ``with`` block; called when the process is about to exit.

        Not collective.
        """
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._name = self._name or signal.Signals(number).name
        else:
            _restore(number, self._previous.get(number))
            signal.raise_signal(number)


def _restore(number: int, handler: Handler) -> None:
    signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _is_taken(number: signal.Signals) -> bool:
    """Tell whether a signal is left to the program, which handles it in Python, or in C as ``faulthandler`` does."""
    if number not in _LEFT_ALONE or signal.getsignal(number) is not signal.SIG_DFL:
        return number in _LEFT_ALONE
    try:
        with open("/proc/self/status") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)
