"""Look for the file ``STOP`` in a run's folder, which a user creates to make the run save its state and end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

#: Seconds between two checks, so that a shared file system is not asked at every step.
INTERVAL = 1.0


class StopFile:
    """Check at most once a second whether a file exists; used on one rank, which tells the other ranks.

    Parameters
    ----------
    path : Path
        The file. Its content does not matter.
    clock : callable, optional
        Returns the seconds of a monotonic clock.
    report : callable, optional
        Called with a message when the check fails for the first time; training continues.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, report: Callable[[str], object] = warnings.warn
    ) -> None:
        self._path, self._clock, self._report = path, clock, report
        self._next, self._warned = float("-inf"), False

    def reason(self) -> str:
        """Return the reason to stop, which names the file, if the file exists; else "". Between checks, return ""."""
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
