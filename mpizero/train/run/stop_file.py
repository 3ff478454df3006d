"""Look for the file ``STOP`` in a run's folder, by which a user makes the run save its state and end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

#: Seconds between two checks, so that a shared file system is not asked at every step.
INTERVAL = 1.0


class StopFile:
    """Check from time to time whether a file exists; used on one rank, which tells the others.

    Parameters
    ----------
    path : Path
        The file. What is in it does not matter.
    clock : callable, optional
        Returns the seconds of a monotonic clock.
    report : callable, optional
        Is called once with a message if the check fails; training goes on then.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], object] = warnings.warn,
    ) -> None:
        self._path, self._clock, self._report = path, clock, report
        self._next, self._warned = float("-inf"), False

    def reason(self) -> str:
        """Return why the run was asked to stop, "" while it was not."""
        now = self._clock()
        if now < self._next:
            return ""
        self._next = now + INTERVAL
        try:
            self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._report(f"the file {self._path} cannot be looked for: {error.strerror}; training goes on")
            return ""
        return f"the file {self._path}"
