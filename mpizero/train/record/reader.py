"""Read what a run has recorded: the lines of its metrics, and its events by visit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mpizero._util.checks import home_path
from mpizero.errors import DataError
from mpizero.train.record.events import (
    EVENTS,
    KINDS,
    METRICS,
    RESULT,
    SUPERSEDED,
    CheckpointWrite,
    MemoryCount,
    PhaseSeconds,
    PipelineTimetable,
    RunEvent,
    SkippedStep,
    VisitEnd,
    VisitStart,
)
from mpizero.train.record.json_forms import is_step

Event = TypeVar("Event", bound=RunEvent)


#: What a reader of a damaged file can do.
_WAY_OUT = "take the line out of a copy of the run's folder to read the rest"


@dataclass(frozen=True)
class VisitRecords:
    """Hold the events of one visit, which is one start or resume of a run.

    Attributes
    ----------
    number : int
        Number of the visit, from 0.
    events : tuple of RunEvent
        All events, in order.
    """

    number: int
    events: tuple[RunEvent, ...]

    @property
    def start(self) -> VisitStart | None:
        """The description of the training; None if it is missing."""
        return next(iter(self._all(VisitStart)), None)

    @property
    def memory(self) -> MemoryCount | None:
        """The counted memory; None if the visit had no step."""
        return next(iter(self._all(MemoryCount)), None)

    @property
    def phases(self) -> tuple[PhaseSeconds, ...]:
        """The measured steps, in order."""
        return self._all(PhaseSeconds)

    @property
    def timetables(self) -> tuple[PipelineTimetable, ...]:
        """The timetables of the measured steps; empty without a pipeline."""
        return self._all(PipelineTimetable)

    @property
    def checkpoints(self) -> tuple[CheckpointWrite, ...]:
        """The checkpoints that were written, in order; some may have been removed since."""
        return self._all(CheckpointWrite)

    @property
    def skipped(self) -> tuple[SkippedStep, ...]:
        """The skipped steps, in order."""
        return self._all(SkippedStep)

    @property
    def end(self) -> VisitEnd | None:
        """The end; None while the run trains, and if it was killed."""
        return next(reversed(self._all(VisitEnd)), None)

    def _all(self, kind: type[Event]) -> tuple[Event, ...]:
        return tuple(event for event in self.events if isinstance(event, kind))


@dataclass(frozen=True)
class RunRecords:
    """Hold what a run has recorded.

    Attributes
    ----------
    folder : Path
        The run's folder.
    steps : tuple of dict
        The lines of the metrics, one a step.
    superseded : tuple of dict
        The lines of steps that were repeated after a resume, as they were the first time.
    visits : tuple of VisitRecords
        The events by visit; empty for runs of earlier versions, which have none.
    result : dict or None
        The result of a run that has ended well, else None.
    """

    folder: Path
    steps: tuple[dict[str, Any], ...]
    superseded: tuple[dict[str, Any], ...]
    visits: tuple[VisitRecords, ...]
    result: dict[str, Any] | None


def read_run(folder: str | Path) -> RunRecords:
    """Read what the run in ``folder`` has recorded; it may be training meanwhile. Not collective.

    Raises
    ------
    DataError
        If there is no such folder, if it is no run's folder, or if a line is damaged; the message names the file and
        the line. The last line may be cut.
    """
    root = home_path(folder)
    if not root.is_dir():
        raise DataError(f"{root}: {'not a folder' if root.exists() else 'no such folder'}; give the folder of a run")
    if not any((root / name).is_file() for name in (METRICS, EVENTS)):
        raise DataError(
            f"{root}: not the folder of a run, which has a file {METRICS} or {EVENTS}; checkpoint.folder = "
            '"run/checkpoints" makes it "run"'
        )
    result = [line for _, line in _lines(root / RESULT)]
    return RunRecords(
        root,
        tuple(_steps(root / METRICS)),
        tuple(line for _, line in _lines(root / SUPERSEDED, strict=False) if is_step(line.get("step"))),
        _visits(root / EVENTS),
        result[-1] if result else None,
    )


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in _lines(path):
        if not is_step(line.get("step")):
            raise DataError(f"{path}, line {number}: damaged: no number of a step; {_WAY_OUT}")
        yield line


class VisitEvents:
    """Collect events by visit."""

    def __init__(self) -> None:
        self._events: dict[int, list[RunEvent]] = {}
        self._ranks: dict[int, int] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the event of a line of JSON; of a later version's kinds nothing is added.

        Raises
        ------
        ValueError
            If it is damaged: a value is missing or of another form, or its ranks are not those of the visit.
        """
        if (kind := KINDS.get(str(line.get("kind")))) is None:
            return
        event = kind.of(line)
        if event.by_rank is not None and self._ranks.setdefault(event.visit, event.by_rank) != event.by_rank:
            raise ValueError(f"it has {event.by_rank} ranks, the visit has {self._ranks[event.visit]}")
        self._events.setdefault(event.visit, []).append(event)

    @property
    def visits(self) -> tuple[VisitRecords, ...]:
        """The visits, in order."""
        return tuple(VisitRecords(number, tuple(events)) for number, events in sorted(self._events.items()))


def _visits(path: Path) -> tuple[VisitRecords, ...]:
    found = VisitEvents()
    for number, line in _lines(path):
        try:
            found.add(line)
        except ValueError as error:
            kind = str(line.get("kind"))
            raise DataError(f"{path}, line {number}: damaged event {kind!r}: {error}; {_WAY_OUT}") from None
    return found.visits


def _lines(path: Path, *, strict: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the values of each line; nothing if there is no such file.

    A last line without its end is left out, because it may be in the writing. If not ``strict``, damaged lines are
    left out, too: a resume moves cut lines to the superseded ones.
    """
    try:
        lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    for number, line in enumerate(lines[:-1], start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            yield number, found
        elif strict:
            raise DataError(f"{path}, line {number}: damaged: no object of JSON: {line[:40]!r}; {_WAY_OUT}")
