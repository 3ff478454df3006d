"""Requests to stop early, taken by signal handlers that only set a flag and agreed by all ranks once a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum
from types import FrameType, TracebackType

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.transport import Request

#: Slurm's early warning, and the request to end of schedulers and launchers.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class Verdict(IntEnum):
    """What all ranks do after a step; of several wishes the largest wins."""

    GO_ON = 0
    STOP = 1
    FAIL = 2


class StopRequests(AbstractContextManager["StopRequests"]):
    """Catch stop signals inside a ``with`` block, and let all ranks of ``comm`` agree on what they mean.

    The answer of one small reduction, started before a step and read after it, is the same on every rank, so all save
    the same step. A signal that arrives during a step counts after the next one.

    Parameters
    ----------
    comm : Communicator
        Used for nothing else while a question is open.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._wish = Verdict.GO_ON
        self._name: str | None = None
        self._buffer = np.zeros(1, dtype=np.int64)
        self._question: Request | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python refuses handlers
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    @property
    def signal_name(self) -> str | None:
        """The signal that this rank has caught."""
        return self._name

    def fail(self) -> None:
        """Ask every rank to stop with an error after the next agreed step.

        Not collective.
        """
        self._wish = Verdict.FAIL

    def ask(self) -> None:
        """Start asking every rank for its wish.

        Collective over the communicator.
        """
        self._buffer[0] = self._wish
        self._question = self._comm.iallreduce(self._buffer, op="max", tag="stop requests")

    def answer(self) -> Verdict:
        """Return the largest wish of all ranks at the time of :meth:`ask`.

        Collective over the communicator.
        """
        if self._question is None:
            raise RuntimeError("answer() needs a question: call ask() first")
        self._question.wait()
        self._question = None
        return Verdict(int(self._buffer[0]))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._name = signal.Signals(number).name
        self._wish = max(self._wish, Verdict.STOP)
