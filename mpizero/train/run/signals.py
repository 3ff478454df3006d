"""Note signals that ask a job to stop, from the first moment of a command to its last; they never kill it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType

#: Slurm's early warning, and the request to end of schedulers and launchers.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class StopSignals(AbstractContextManager["StopSignals"]):
    """Note stop signals inside a ``with`` block; a block inside the block changes nothing.

    A handler only keeps the first signal's name: nothing is interrupted but waiting system calls, which Python starts
    again, and a second signal changes nothing. Elsewhere than in the main thread Python allows no handlers: nothing is
    caught there.
    """

    def __init__(self) -> None:
        self._name, self._depth = "", 0
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> StopSignals:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    @property
    def name(self) -> str:
        """The first signal that has come, "" while there is none."""
        return self._name

    def reason(self, rank: int) -> str:
        """Return why ``rank``, which this is, was asked to stop, "" while it was not."""
        return f"{self._name} on rank {rank}" if self._name else ""

    def ignore(self) -> None:
        """Take no notice of stop signals from now on: the process is ending, with the status it has earned.

        Not collective. Stays so after the block, and while Python takes itself apart.
        """
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._name = self._name or signal.Signals(number).name
