"""Call functions one after the other in a background thread, some calls ahead of their results' use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Return the results of ``make(0)``, ``make(1)`` and so on, in order, computed in one background thread.

    The thread is at most ``depth`` calls ahead of :meth:`next`. ``make`` must not call MPI. An error of ``make`` is
    raised by the :meth:`next` that would have returned its result.

    Parameters
    ----------
    make : callable
        Called with the number of the result.
    depth : int
        Number of results that are computed, or being computed, before they are asked for.
    count : int or None
        Number of results; None if there is no end.
    """

    def __init__(self, make: Callable[[int], T], depth: int, count: int | None) -> None:
        self._make, self._depth, self._count = make, depth, count
        self._started = 0
        self._waiting: deque[Future[T]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mpizero-read-ahead")
        self._fill()

    def _fill(self) -> None:
        while len(self._waiting) < self._depth and (self._count is None or self._started < self._count):
            self._waiting.append(self._thread.submit(self._make, self._started))
            self._started += 1

    def next(self) -> T:
        """Return the next result; wait until it is computed. Not collective."""
        result = self._waiting.popleft().result()
        self._fill()
        return result

    def close(self) -> None:
        """End the thread, after the call that it is in; results not asked for are lost. Not collective."""
        self._waiting.clear()
        self._count = 0
        self._thread.shutdown(wait=True, cancel_futures=True)
