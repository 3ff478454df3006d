"""Measure what the time of a process is spent on, by clocks around methods of the library."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any


class Clock:
    """Add up seconds by part; a part inside of another one is not counted in that one.

    Attributes
    ----------
    seconds : Counter
        The seconds of each part so far.
    outside : str
        The part that time outside of watched methods counts as.
    """

    def __init__(self, outside: str, started: float | None = None) -> None:
        self.outside, self.seconds = outside, Counter[str]()
        self._last = time.monotonic() if started is None else started

    def spend(self, part: str) -> None:
        """Add the time since the last call to ``part``."""
        now = time.monotonic()
        self.seconds[part] += now - self._last
        self._last = now

    def take(self) -> Counter[str]:
        """Return the seconds of each part until now, and begin anew."""
        self.spend(self.outside)
        found, self.seconds = self.seconds, Counter[str]()
        return found

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a function that does as ``function``, and counts as ``part``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.spend(self.outside)
            try:
                return function(*args, **kwargs)
            finally:
                self.spend(part)

        return call

    def watch(self, owner: type, name: str, part: Callable[[Any], str]) -> None:
        """Count calls of the method ``name`` of ``owner`` as ``part(object)``; none of them may contain another."""
        method = getattr(owner, name)

        @wraps(method)
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            return self.timed(method, part(first))(first, *args, **kwargs)

        setattr(owner, name, call)
