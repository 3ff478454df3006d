"""Define the events that a run records in ``events.jsonl``, read them again, and show a run's progress.

Each kind of event is one class, from and to a line of JSON (:class:`RunEvent`). A session is one start or resume of a
run. Lists "by rank" have one entry for each rank, in order. Anybody may have written a line: the functions at the head
tell whether its values have the forms that a reader computes with. :func:`read_run` reads the lines of a run's metrics,
and its events by session. :class:`Progress` is what rank 0 shows meanwhile: a bar on a terminal, few lines in a log
file.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, NamedTuple, Self, TextIO, TypeVar, get_args, get_origin, get_type_hints

from mpizero._util.checks import home_path
from mpizero._util.text import printable
from mpizero.errors import DataError

#: Numbers of larger magnitude are taken for damage, or for values that are not finite: a few of them have no sum.
LARGEST = 1e300
#: The last time that has a date in all systems' calendars, in seconds since 1970.
LATEST = 1e11


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number that can be added to others. Not collective."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_step(value: Any) -> bool:
    """Tell whether a value is the number of a step. Not collective."""
    return type(value) is int and 0 <= value < 2**63


def fits(value: Any, hint: Any) -> bool:
    """Tell whether a value has the type ``hint``: plain types, None, unions, lists and dictionaries with texts as keys.

    Whole numbers have at most 64 bits; ``Any`` is any value. Not collective.
    """
    if hint is Any:
        return True
    if isinstance(hint, UnionType):
        return any(fits(value, part) for part in get_args(hint))
    origin, parts = get_origin(hint), get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(fits(one, parts[0]) for one in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(fits(one, parts[1]) for one in value.values())
    if hint is float:
        return is_number(value) and math.isfinite(value)
    if hint is int:
        return type(value) is int and abs(value) < 2**63
    return isinstance(value, hint)


def plain(value: Any, non_finite: Callable[[float], Any] = str) -> Any:
    """Return ``value`` in JSON values: other objects as text, infinite and NaN numbers as ``non_finite`` returns them.

    Not collective.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(part, non_finite) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(part, non_finite) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return non_finite(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


#: Names of files in the run's folder: of events, of metrics, of metrics of repeated steps, and of the result.
EVENTS, METRICS = "events.jsonl", "metrics.jsonl"
SUPERSEDED, RESULT = "metrics.superseded.jsonl", "run_complete"


class PipelineCell(NamedTuple):
    """Hold one instruction of a pipeline's timetable.

    Attributes
    ----------
    stage, chunk, micro : int
        Numbers of the stage, of the chunk of the model, and of the micro-batch.
    work : str
        "forward", "backward", or a half of it: "backward_input" or "backward_weights".
    start, end : float
        When the stage computes it.
    """

    stage: int
    chunk: int
    micro: int
    work: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Hold what every event has.

    Attributes
    ----------
    time : float
        When it was recorded, in seconds since 1970.
    visit : int
        Number of the session, which is the start of the run (0) or one of its resumes (1, 2, ...).
    step : int
        Number of steps done.
    """

    kind: ClassVar[str] = ""

    time: float = 0.0
    visit: int = 0
    step: int = 0

    @property
    def by_rank(self) -> int | None:
        """Number of ranks of which it has numbers; None if it has none of ranks."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values by name. Not collective."""
        return {"kind": self.kind} | {one.name: plain(getattr(self, one.name)) for one in fields(self)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Make the event from JSON values by name; unknown names are ignored. Not collective.

        Raises
        ------
        ValueError
            If a value is missing or of another type.
        """
        arguments: dict[str, Any] = {}
        for one in fields(cls):
            if one.name in values:
                value = values[one.name]
                if not fits(value, _HINTS[cls][one.name]) or (one.name == "time" and abs(value) > LATEST):
                    raise ValueError(f"{one.name} is {_shortened(value)}")
                arguments[one.name] = value
            elif one.default is MISSING and one.default_factory is MISSING:
                raise ValueError(f"{one.name} is missing")
        return cls(**arguments)


def _check_by_rank(ranks: int, lists: Mapping[str, Any], kind: type = float) -> None:
    """Raise ValueError, which names the list, if one of them is not ``ranks`` numbers of the type ``kind``."""
    for name, values in lists.items():
        if not fits(values, list[kind]) or len(values) != ranks:  # type: ignore[valid-type]
            raise ValueError(f"{name} is no list of {ranks} numbers: {_shortened(values)}")


def _check_known(values: Mapping[str, Any], hints: Mapping[str, Any], whose: str) -> None:
    """Raise ValueError, which names the value, if one of those in ``hints`` is there and has another type."""
    for name, hint in hints.items():
        if name in values and not fits(values[name], hint):
            raise ValueError(f"{whose} {name} = {_shortened(values[name])}")


@dataclass(frozen=True, kw_only=True)
class SessionStart(RunEvent):
    """Describe the training at the start of a session, whose first step is the one after ``step``.

    Attributes
    ----------
    steps : int
        Number of the run's last step.
    superseded : int
        Number of steps after ``step`` that a session before had done already: their lines of metrics are superseded.
    described : str
        One line about model, layout and data.
    model, strategy : str
        Name of the model's class; name of the strategy, such as "zero2".
    parameter_count : int
        Number of parameter elements of the whole model.
    unit : str
        Unit of the speeds in the metrics, "tokens" or "samples".
    ranks : int
        Number of ranks.
    nodes : list of int
        By rank, the number of its node.
    hosts : list of str
        The name of each node's host.
    coordinates : dict of str to list of int
        For each axis of parallelism, by rank, the rank's coordinate on it.
    layout : dict
        Sizes of the axes by name, ``order``, ``schedule`` (None without a pipeline), ``virtual_stages``,
        ``zero_stage``, ``global_batch``, ``grains``, ``grain_size``, ``accumulate``, ``tiles``, ``ranks_per_node``
        (those that share memory), ``exactness`` (what results are equal to) and ``chunks``: of each chunk its
        ``stage`` and ``blocks``.
    config : dict of dict
        The settings by section and name.
    versions : dict of str to str
        Versions of mpizero and the libraries that it uses.
    machine : dict
        ``processor``, ``cores`` that rank 0 may use, ``threads`` a rank, ``device``, ``job`` (Slurm's number, or "").
    planned : dict of str to list of int
        Planned bytes of host memory by part, by rank, as ``mpizero plan`` computes them; empty if there is no plan.
    planned_device : dict of str to list of int
        The same of GPUs.
    not_planned : str
        What the plan lacks and why; "" if it lacks nothing.
    """

    kind: ClassVar[str] = "start"

    steps: int
    superseded: int = 0
    described: str = ""
    model: str = ""
    strategy: str
    parameter_count: int
    unit: str = "samples"
    ranks: int
    nodes: list[int]
    hosts: list[str]
    coordinates: dict[str, list[int]]
    layout: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, Any]
    machine: dict[str, Any]
    planned: dict[str, list[int]] = field(default_factory=dict)
    planned_device: dict[str, list[int]] = field(default_factory=dict)
    not_planned: str = ""

    @property
    def by_rank(self) -> int:
        """Number of ranks of which it has numbers."""
        return self.ranks

    def __post_init__(self) -> None:
        """Raise ValueError if a list by rank is none."""
        _check_by_rank(self.ranks, {"nodes": self.nodes} | self.coordinates | self.planned | self.planned_device, int)
        _check_known(self.layout, _LAYOUT, "layout has")
        if not all(0 <= node < len(self.hosts) for node in self.nodes):
            raise ValueError(f"nodes names a node without a host: {self.nodes[:8]}, {len(self.hosts)} hosts")


@dataclass(frozen=True, kw_only=True)
class MemoryCount(RunEvent):
    """Hold the memory of every rank after the first step of a session.

    Attributes
    ----------
    counted : dict of str to list of int
        Bytes of host memory by part, by rank, counted where they are allocated. The parts are those of
        :attr:`SessionStart.planned` that exist between steps. Of memory that ranks share, each counts an equal part.
    device : dict of str to list of int
        The same of GPUs.
    peak : list of int
        By rank, the most bytes that were counted at once.
    resident : list of int
        By rank, the largest resident size of the process so far; shared pages count in full on each rank.
    """

    kind: ClassVar[str] = "memory"

    counted: dict[str, list[int]]
    device: dict[str, list[int]] = field(default_factory=dict)
    peak: list[int]
    resident: list[int]

    @property
    def by_rank(self) -> int:
        """Number of ranks of which it has numbers."""
        return len(self.peak)

    def __post_init__(self) -> None:
        """Raise ValueError if a list by rank is none."""
        _check_by_rank(len(self.peak), {"peak": self.peak, "resident": self.resident} | self.counted | self.device, int)


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds(RunEvent):
    """Hold the seconds of one step by phase and rank.

    Attributes
    ----------
    seconds : list of float
        By rank, the seconds of the step. They are the sum of those of the phases.
    reading : list of float
        By rank, the seconds before the step in which its samples were read or waited for.
    phases : dict of str to list of float
        For each phase, by rank, its seconds. "waiting" is waiting for other ranks in any phase, "other" no phase.
    """

    kind: ClassVar[str] = "phases"

    seconds: list[float]
    reading: list[float]
    phases: dict[str, list[float]]

    @property
    def by_rank(self) -> int:
        """Number of ranks of which it has numbers."""
        return len(self.seconds)

    def __post_init__(self) -> None:
        """Raise ValueError if a list by rank is none."""
        _check_by_rank(len(self.seconds), {"seconds": self.seconds, "reading": self.reading} | self.phases)


@dataclass(frozen=True, kw_only=True)
class PipelineTimetable(RunEvent):
    """Hold the timetable of one step of the first replica's pipeline: as planned, and as measured.

    Attributes
    ----------
    schedule : str
        Name of the schedule.
    costs : str
        The planned cells' costs: "operations" of the chunks' blocks, or "equal" costs of all chunks and passes.
    planned : list of PipelineCell
        The schedule, in units of a mean forward pass of a chunk.
    measured : list of PipelineCell
        The step, in seconds since it began. A cell begins when what it needs from another stage has arrived.
    """

    kind: ClassVar[str] = "timetable"

    schedule: str
    costs: str = "equal"
    planned: list[PipelineCell]
    measured: list[PipelineCell]

    def __post_init__(self) -> None:
        """Make cells of lists; raise ValueError for a list that is none."""
        for name in ("planned", "measured"):
            try:
                cells = [PipelineCell(*cell) for cell in getattr(self, name)]
            except TypeError:
                raise ValueError(f"{name} has a cell that is none") from None
            for cell in cells:
                if not all(fits(value, _CELL[field]) for field, value in cell._asdict().items()) or cell.stage < 0:
                    raise ValueError(f"{name} has a cell that is none: {_shortened(list(cell))}")
            object.__setattr__(self, name, cells)


@dataclass(frozen=True, kw_only=True)
class CheckpointWrite(RunEvent):
    """Describe a checkpoint that was written, that of ``step``.

    Attributes
    ----------
    path : str
        Its path relative to the run's folder.
    bytes : int
        Bytes of its files.
    seconds : float
        Seconds from its beginning until it was complete; ``beside`` training, steps were done meanwhile.
    beside : bool
        Whether a thread wrote it during the next steps.
    best : bool
        Whether it was the best so far.
    """

    kind: ClassVar[str] = "checkpoint"

    path: str
    bytes: int
    seconds: float
    beside: bool = False
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class SkippedStep(RunEvent):
    """Describe why a step was skipped. The message about it is in the step's line of metrics, or in the last event.

    Attributes
    ----------
    found : list of dict
        For each grain with a value that was not finite: ``rank``, ``tensor``, and the range ``start`` to ``stop`` of
        its samples in the global batch.
    loss_scale, next_loss_scale : float
        The loss scale of this step and of the next.
    """

    kind: ClassVar[str] = "skipped"

    found: list[dict[str, Any]]
    loss_scale: float = 1.0
    next_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError if the rank or the samples of a value are none."""
        for one in self.found:
            _check_known(one, _RANGE_FIELDS, "found has")


@dataclass(frozen=True, kw_only=True)
class SessionEnd(RunEvent):
    """Describe the end of a session.

    Attributes
    ----------
    reason : str
        "done" if the run has ended, "stopped" if it goes on with a resume, "failed" after an error.
    message : str
        What has stopped it or ended it before its last step, or the error's message.
    error : str
        The error's class; "" without one.
    loss : float or None
        Loss of the last step; None without one, and if it was not finite.
    parameters_sha256 : str
        SHA-256 of all parameters; "" if they were not hashed.
    seconds : float
        Seconds of the session.
    """

    kind: ClassVar[str] = "end"

    reason: str
    message: str = ""
    error: str = ""
    loss: float | None = None
    parameters_sha256: str = ""
    seconds: float = 0.0


#: The types of a cell's values, and of those values of a skipped step and of a layout that readers compute with.
_CELL = get_type_hints(PipelineCell)
_RANGE_FIELDS = {"rank": int, "start": int, "stop": int, "tensor": str}
_LAYOUT = {"global_batch": int, "grains": int, "grain_size": int, "chunks": list[dict[str, Any]]}
#: The class of each kind of event.
KINDS: dict[str, type[RunEvent]] = {
    one.kind: one
    for one in (SessionStart, MemoryCount, PhaseSeconds, PipelineTimetable, CheckpointWrite, SkippedStep, SessionEnd)
}


def _shortened(value: Any) -> str:
    """Return a value as a short text; whole numbers that have too many digits for one are told as such."""
    try:
        return repr(value) if isinstance(value, str) and len(value) < 40 else str(value)[:40]
    except ValueError:
        return "a number of thousands of digits"


def _hint(hint: Any) -> Any:
    """Return the type that is asked of a field in JSON; of numbers in lists the event itself tells which is none."""
    numbers = (list[int], list[float], list[PipelineCell], dict[str, list[int]], dict[str, list[float]])
    return get_origin(hint) if hint in numbers else hint


#: For each event, the types of its fields by name.
_HINTS = {event: {name: _hint(hint) for name, hint in get_type_hints(event).items()} for event in KINDS.values()}
Event = TypeVar("Event", bound=RunEvent)
#: What a reader of a damaged file can do.
_WAY_OUT = "take the line out of a copy of the run's folder to read the rest"


@dataclass(frozen=True)
class SessionRecords:
    """Hold the events of one session, which is one start or resume of a run.

    Attributes
    ----------
    number : int
        Number of the session, from 0.
    events : tuple of RunEvent
        All events, in order.
    """

    number: int
    events: tuple[RunEvent, ...]

    @property
    def start(self) -> SessionStart | None:
        """The description of the training; None if it is missing."""
        return next(iter(self._all(SessionStart)), None)

    @property
    def memory(self) -> MemoryCount | None:
        """The counted memory; None if the session had no step."""
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
    def end(self) -> SessionEnd | None:
        """The end; None while the run trains, and if it was killed."""
        return next(reversed(self._all(SessionEnd)), None)

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
    sessions : tuple of SessionRecords
        The events by session; empty for runs of earlier versions, which have none.
    result : dict or None
        The result of a run that has ended well, else None.
    """

    folder: Path
    steps: tuple[dict[str, Any], ...]
    superseded: tuple[dict[str, Any], ...]
    sessions: tuple[SessionRecords, ...]
    result: dict[str, Any] | None


def read_run(folder: str | Path) -> RunRecords:
    """Read what the run in ``folder`` has recorded; it may be training meanwhile. Not collective.

    Raises
    ------
    DataError
        If there is no such folder, if it is no run's folder, or if a line is damaged; the message names the file and
        the line. The last line may be truncated.
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
        _sessions(root / EVENTS),
        result[-1] if result else None,
    )


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in _lines(path):
        if not is_step(line.get("step")):
            raise DataError(f"{path}, line {number}: damaged: no number of a step; {_WAY_OUT}")
        yield line


class SessionEvents:
    """Collect events by session."""

    def __init__(self) -> None:
        self._events: dict[int, list[RunEvent]] = {}
        self._ranks: dict[int, int] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the event of a line of JSON; of a later version's kinds nothing is added.

        Raises
        ------
        ValueError
            If it is damaged: a value is missing or of another form, or its ranks are not those of the session.
        """
        if (kind := KINDS.get(str(line.get("kind")))) is None:
            return
        event = kind.of(line)
        if event.by_rank is not None and self._ranks.setdefault(event.visit, event.by_rank) != event.by_rank:
            raise ValueError(f"it has {event.by_rank} ranks, the session has {self._ranks[event.visit]}")
        self._events.setdefault(event.visit, []).append(event)

    @property
    def sessions(self) -> tuple[SessionRecords, ...]:
        """The sessions, in order."""
        return tuple(SessionRecords(number, tuple(events)) for number, events in sorted(self._events.items()))


def _sessions(path: Path) -> tuple[SessionRecords, ...]:
    events = SessionEvents()
    for number, line in _lines(path):
        try:
            events.add(line)
        except ValueError as error:
            kind = str(line.get("kind"))
            raise DataError(f"{path}, line {number}: damaged event {kind!r}: {error}; {_WAY_OUT}") from None
    return events.sessions


def _lines(path: Path, *, strict: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the values of each line; nothing if there is no such file.

    A last line without its end is left out, because it may be in the writing. If not ``strict``, damaged lines are
    left out, too: a resume moves truncated lines to the superseded ones.
    """
    try:
        lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    for number, line in enumerate(lines[:-1], start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield number, value
        elif strict:
            raise DataError(f"{path}, line {number}: damaged: no object of JSON: {line[:40]!r}; {_WAY_OUT}")


#: Seconds between two lines if the output is not a terminal: at least the first number, then a twentieth of the run's
#: time so far, but no more than the second. A day has about 360 lines. The first and the last step are always shown.
LEAST_SECONDS, MOST_SECONDS = 10.0, 300.0


class Progress:
    """Show the progress of training steps on one output stream.

    Parameters
    ----------
    steps : int
        Number of the last step.
    active : bool
        Whether to show anything; true on rank 0 only.
    stream : TextIO, optional
        The output stream. Default: standard error, because standard output is for the result.
    """

    def __init__(self, steps: int, *, active: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._steps, self._active, self._started, self._next = steps, active, time.monotonic(), float("-inf")
        self._bar: Any = None

    def begin(self, done: int = 0) -> None:
        """Start the bar if the stream is a terminal; ``done`` is the number of steps that an earlier run has made."""
        if self._active and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._steps, initial=done, file=self._stream, unit="step", dynamic_ncols=True)

    def step(self, step: int, metrics: dict[str, str]) -> None:
        """Show that step ``step`` is done, with its ``metrics``: texts by name."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.set_postfix(metrics, refresh=False)
            self._bar.update(1)
            return
        now = time.monotonic()
        if now >= self._next or step == self._steps:
            self._next = now + min(MOST_SECONDS, max(LEAST_SECONDS, (now - self._started) / 20))
            self._write(f"step {step}/{self._steps}  " + "  ".join(f"{k} {v}" for k, v in metrics.items()))

    def say(self, message: str) -> None:
        """Write a message as one line, above the bar if there is one; its control characters are escaped."""
        if self._active:
            self._write(f"mpizero: {printable(message)}")

    def close(self) -> None:
        """End the bar, which stays visible."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, line: str) -> None:
        try:
            if self._bar is not None:
                self._bar.write(line, file=self._stream)
            else:
                self._stream.write(line + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            # A closed terminal must not end a training run.
            self._active = False


def byte_progress(total: int, label: str, stream: TextIO | None = None) -> Any:
    """Return a progress bar that counts bytes if ``stream`` is a terminal, else shows nothing: a tqdm.

    Parameters
    ----------
    total : int
        Number of bytes at the end.
    label : str
        Text before the bar.
    stream : TextIO, optional
        The output stream. Default: standard error.
    """
    from tqdm import tqdm

    shape: dict[str, Any] = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, "leave": False}
    return tqdm(total=total, desc=label, file=stream or sys.stderr, disable=None, **shape)
