"""The file ``STOP`` in a run's folder: whoever may write there may end the run, with its state saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

#: Seconds between two looks: a file system that serves a thousand jobs is not asked at every step.
INTERVAL = 1.0


class StopFile:
    """Look for a file now and then; for one rank, which tells the others.

    Parameters
    ----------
    path : Path
        The file. What is in it does not matter.
    clock : callable, optional
        Seconds of a clock that never goes back.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._next = float("-inf")

    def reason(self) -> str:
        """Return why the run was asked to stop, "" while it was not.

        Not collective.
        """
        now = self._clock()
        if now < self._next:
            return ""
        self._next = now + INTERVAL
        return f"the file {self._path}" if self._path.exists() else ""
