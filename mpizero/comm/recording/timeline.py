"""Record when the phases of a rank's work begin and end, while tracing is on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, NamedTuple

#: Name of the phase of communicator calls; the detail of such a span is a :class:`CommunicatorCall`.
MESSAGE = "message"
_NOTHING = nullcontext()


class CommunicatorCall(NamedTuple):
    """Describe a call of a communicator; used as the ``detail`` of a :class:`TimeSpan`.

    Attributes
    ----------
    communicator : str
        Name of the communicator.
    operation, tag : str
        The call and its label, for example "allgatherv" and "gather".
    sequence : int
        Number of the collective, the same on all ranks of the communicator.
    """

    communicator: str
    operation: str
    tag: str
    sequence: int

    def __str__(self) -> str:
        """Return operation, tag and communicator as text."""
        return f"{self.operation} {self.tag!r} on {self.communicator!r}"


class TimeSpan(NamedTuple):
    """Hold the name of a phase of work, a detail (any object), and start and end in seconds of ``time.monotonic()``."""

    phase: str
    detail: Any
    start: float
    stop: float


class Timeline:
    """Collect the time spans of one rank, in the order in which they end. Spans of one thread are nested or disjoint.

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
        """Return a context manager that records its block as a time span; it does nothing while ``on`` is false."""
        return _Open(self, phase, detail) if self.on else _NOTHING

    def begin(self) -> float:
        """Return the current time, to be passed to :meth:`end`; 0 while ``on`` is false.

        For frequent operations: while ``on`` is false, :meth:`begin` and :meth:`end` together take a tenth of a
        microsecond, a third of the time of :meth:`span`.
        """
        return monotonic() if self.on else 0.0

    def end(self, phase: str, detail: Any, begun: float) -> None:
        """Record a span from ``begun``, the result of :meth:`begin`, until now; do nothing while ``on`` is false."""
        if self.on:
            self.add(phase, detail, begun)

    def add(self, phase: str, detail: Any, start: float) -> None:
        """Record a span from ``start``, in seconds of ``time.monotonic()``, until now, also while ``on`` is false."""
        self._spans.append(TimeSpan(phase, detail, start, monotonic()))

    def take(self) -> list[TimeSpan]:
        """Return the spans recorded since the last call of this method, and forget them."""
        found, self._spans = self._spans, []
        return found


class _Open:
    """Record the time of a ``with`` block as a span of ``timeline``."""

    __slots__ = ("_detail", "_phase", "_start", "_timeline")

    def __init__(self, timeline: Timeline, phase: str, detail: Any) -> None:
        self._timeline, self._phase, self._detail = timeline, phase, detail

    def __enter__(self) -> None:
        self._start = monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._timeline.add(self._phase, self._detail, self._start)
