"""Record the spans of time of one rank by phase, while tracing is on; free of cost while it is off."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple

#: The phase of the calls of communicators; their detail is a :class:`CommunicatorCall`.
MESSAGE = "message"
_NOTHING = nullcontext()


class CommunicatorCall(NamedTuple):
    """Describe a call of a communicator.

    Attributes
    ----------
    communicator : str
        Its name.
    operation, tag : str
        For example "allgatherv" and "gather".
    sequence : int
        Number of the collective, the same on all ranks of the communicator.
    """

    communicator: str
    operation: str
    tag: str
    sequence: int

    def __str__(self) -> str:
        """Name it as the watchdog does."""
        return f"{self.operation} {self.tag!r} on {self.communicator!r}"


class TimeSpan(NamedTuple):
    """Hold the start and end of a phase in seconds of ``time.monotonic()``, and a detail."""

    phase: str
    detail: Any
    start: float
    stop: float


class Timeline:
    """Collect the spans of one rank in the order in which they end; those of one thread are nested or disjoint.

    Attributes
    ----------
    on : bool
        Whether spans are recorded.
    """

    __slots__ = ("_spans", "on")

    def __init__(self) -> None:
        self.on = False
        self._spans: list[TimeSpan] = []

    def span(self, phase: str, detail: Any = "") -> AbstractContextManager[object]:
        """Record the time of a block."""
        return _Open(self, phase, detail) if self.on else _NOTHING

    def begin(self) -> float:
        """Return the time, for :meth:`end`, or 0 while nothing is recorded.

        For frequent operations: while off, the two cost a tenth of a microsecond, a third of :meth:`span`.
        """
        return monotonic() if self.on else 0.0

    def end(self, phase: str, detail: Any, begun: float) -> None:
        """Record a span that began when :meth:`begin` was called."""
        if self.on:
            self.add(phase, detail, begun)

    def add(self, phase: str, detail: Any, start: float) -> None:
        """Record a span that ends now."""
        self._spans.append(TimeSpan(phase, detail, start, monotonic()))

    def take(self) -> list[TimeSpan]:
        """Return the spans recorded since the last call."""
        found, self._spans = self._spans, []
        return found


class _Open:
    """Record a span as a context manager."""

    __slots__ = ("_detail", "_phase", "_start", "_timeline")

    def __init__(self, timeline: Timeline, phase: str, detail: Any) -> None:
        self._timeline, self._phase, self._detail = timeline, phase, detail

    def __enter__(self) -> None:
        self._start = monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timeline.add(self._phase, self._detail, self._start)
