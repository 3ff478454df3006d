"""Define the events that a run records in ``events.jsonl``, read them again, and show a run's progress.

Each kind of event is a class that is converted to and from a line of JSON (:class:`RunEvent`). A session is one start
or resume of a run. Lists "by rank" have one entry for each rank, in order. A file may be damaged or edited, so the
first functions of this module check the types of its values. :func:`read_run` reads the metrics of a run, and its
events by session. :class:`Progress` shows the progress of a training on rank 0: a bar on a terminal, few lines in a
log file.
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

#: Numbers of larger magnitude are taken for damage, or for values that are not finite: their sums would overflow.
LARGEST = 1e300
#: The last time that has a date in all systems' calendars, in seconds since 1970.
LATEST = 1e11


def is_number(value: Any) -> bool:
    """Return whether a value is an int or float, at most :data:`LARGEST` in magnitude. Not collective."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_step(value: Any) -> bool:
    """Return whether a value can be the number of a step, an int from 0 to 2^63 - 1. Not collective."""
    return type(value) is int and 0 <= value < 2**63


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value has the type ``hint``: a plain type, a union, or a list or dict of these.

    Integers must fit 64 bits; the hint ``Any`` accepts every value. Not collective.
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
    """Convert ``value`` to JSON values: NaN and infinite numbers x become ``non_finite(x)``, other objects text.

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
    """Hold one instruction of a pipeline stage, such as the forward pass of a micro-batch, with its times.

    Attributes
    ----------
    stage, chunk, micro : int
        Numbers of the stage, of the chunk of the model, and of the micro-batch.
    work : str
        "forward", "backward", or a half of the backward pass: "backward_input" or "backward_weights".
    start, end : float
        Times at which the stage begins and ends the instruction.
    """

    stage: int
    chunk: int
    micro: int
    work: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Hold the fields that all kinds of events share; base class of the events.

    Attributes
    ----------
    time : float
        When the event was recorded, in seconds since 1970.
    visit : int
        Number of the session: 0 for the start of the run, 1, 2, ... for its resumes.
    step : int
        Number of training steps done before the event.
    """

    kind: ClassVar[str] = ""

    time: float = 0.0
    visit: int = 0
    step: int = 0

    @property
    def by_rank(self) -> int | None:
        """Number of ranks, for which the event's lists have an item each; None if the event has no such lists."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a dict of JSON values by field name. Not collective."""
        return {"kind": self.kind} | {one.name: plain(getattr(self, one.name)) for one in fields(self)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Make the event from JSON values by field name; unknown names are ignored. Not collective.

        Raises
        ------
        ValueError
            If the value of a field is missing or of another type.
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
    """Raise ValueError, which names the list, if one of ``lists`` is no list of ``ranks`` numbers of type ``kind``."""
    for name, values in lists.items():
        if not fits(values, list[kind]) or len(values) != ranks:  # type: ignore[valid-type]
            raise ValueError(f"{name} is no list of {ranks} numbers: {_shortened(values)}")


def _check_known(values: Mapping[str, Any], hints: Mapping[str, Any], whose: str) -> None:
    """Raise ValueError, which names the key, if a value of ``values`` is not of the type ``hints[key]``."""
    for name, hint in hints.items():
        if name in values and not fits(values[name], hint):
            raise ValueError(f"{whose} {name} = {_shortened(values[name])}")


@dataclass(frozen=True, kw_only=True)
class SessionStart(RunEvent):
    """Describe the training at the start of a session, whose first step has the number ``step + 1``.

    Attributes
    ----------
    steps : int
        Number of the run's last step.
    superseded : int
        Number of steps after ``step`` that an earlier session has done, and that this session repeats.
    described : str
        One line of text about model, layout and data.
    model, strategy : str
        Name of the model's class; name of the ZeRO strategy, such as "zero2".
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
        Sizes of the axes by name, ``order``, ``schedule`` (None without a pipeline), ``virtual_stages``, ``domain`` (a
        list, if there is one; its ranks are numbered by the coordinate ``context``), ``zero_stage``, ``global_batch``,
        ``grains``, ``grain_size``, ``accumulate``, ``tiles``, ``ranks_per_node`` (those that share memory),
        ``shard_nodes`` (number of nodes over which ZeRO-3 shards parameters; None is all), ``exactness`` (a text: which
        other layouts give the same bits) and ``chunks``, a list of dicts with the ``stage`` and the ``blocks`` of each
        chunk.
    config : dict of dict
        The settings of the run, by section and key of the configuration file.
    versions : dict of str to str
        Versions of mpizero and the libraries that it uses.
    machine : dict
        ``processor``, ``cores`` (number that rank 0 may use), ``threads`` (per rank), ``device``, ``job`` (the Slurm
        job's number, or ""), and ``bits`` (as in :class:`~mpizero.train.setup.TrainingResult`).
    planned : dict of str to list of int
        Planned bytes of host memory, such as those of "parameters", by rank, as ``mpizero plan`` computes them; empty
        if there is no plan.
    planned_device : dict of str to list of int
        Planned bytes of GPU memory, in the form of ``planned``.
    not_planned : str
        Message of the error because of which there is no plan; "" if there is a plan.
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
        """Number of ranks, which is the length of the event's lists by rank."""
        return self.ranks

    def __post_init__(self) -> None:
        """Raise ValueError if a list by rank has not one number for each rank, or ``nodes`` or ``layout`` is wrong."""
        _check_by_rank(self.ranks, {"nodes": self.nodes} | self.coordinates | self.planned | self.planned_device, int)
        _check_known(self.layout, _LAYOUT, "layout has")
        if not all(0 <= node < len(self.hosts) for node in self.nodes):
            raise ValueError(f"nodes names a node without a host: {self.nodes[:8]}, {len(self.hosts)} hosts")


@dataclass(frozen=True, kw_only=True)
class MemoryCount(RunEvent):
    """Hold the memory in use on every rank after the first step of a session.

    Attributes
    ----------
    counted : dict of str to list of int
        Bytes of host memory that the library has allocated, by rank. The keys are those of
        :attr:`SessionStart.planned` whose memory exists between steps. Each rank counts an equal share of the memory
        that ranks share.
    device : dict of str to list of int
        Bytes of GPU memory, in the form of ``counted``.
    peak : list of int
        By rank, the largest number of bytes that were allocated at the same time.
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
        """Number of ranks, which is the length of the event's lists by rank."""
        return len(self.peak)

    def __post_init__(self) -> None:
        """Raise ValueError if a list by rank does not have one number for each rank."""
        _check_by_rank(len(self.peak), {"peak": self.peak, "resident": self.resident} | self.counted | self.device, int)


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds(RunEvent):
    """Hold the seconds of one step by phase and rank.

    Attributes
    ----------
    seconds : list of float
        By rank, the duration of the step, which is the sum of the durations of its phases.
    reading : list of float
        By rank, the seconds before the step that were spent reading or waiting for its samples.
    phases : dict of str to list of float
        For each phase, its duration by rank. "waiting" is time spent waiting for other ranks in any phase, "other" is
        time outside of all phases.
    """

    kind: ClassVar[str] = "phases"

    seconds: list[float]
    reading: list[float]
    phases: dict[str, list[float]]

    @property
    def by_rank(self) -> int:
        """Number of ranks, which is the length of the event's lists by rank."""
        return len(self.seconds)

    def __post_init__(self) -> None:
        """Raise ValueError if a list by rank does not have one number for each rank."""
        _check_by_rank(len(self.seconds), {"seconds": self.seconds, "reading": self.reading} | self.phases)


@dataclass(frozen=True, kw_only=True)
class PipelineTimetable(RunEvent):
    """Hold the timetable of one step of the first replica's pipeline: as planned, and as measured.

    Attributes
    ----------
    schedule : str
        Name of the schedule.
    costs : str
        How durations were planned: from the "operations" of the chunks' blocks, or "equal" for all chunks and passes.
    planned : list of PipelineCell
        The planned schedule; the unit of time is a mean forward pass of a chunk.
    measured : list of PipelineCell
        The measured schedule, in seconds since the step began. A cell begins when the message that it needs from
        another stage has arrived.
    """

    kind: ClassVar[str] = "timetable"

    schedule: str
    costs: str = "equal"
    planned: list[PipelineCell]
    measured: list[PipelineCell]

    def __post_init__(self) -> None:
        """Convert lists to :class:`PipelineCell`; raise ValueError if a list has other values than a cell."""
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
    """Describe the checkpoint of ``step``, which was written.

    Attributes
    ----------
    path : str
        Path of the checkpoint relative to the run's folder.
    bytes : int
        Total size of the checkpoint's files.
    seconds : float
        Duration of the save; it includes the steps that were done meanwhile if ``beside`` is true.
    beside : bool
        Whether the save was asynchronous: a thread wrote the checkpoint during the next steps.
    best : bool
        Whether the validation metric was the best so far.
    """

    kind: ClassVar[str] = "checkpoint"

    path: str
    bytes: int
    seconds: float
    beside: bool = False
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class SkippedStep(RunEvent):
    """Describe why a step was skipped; the message about it is in the step's metrics, or in :class:`SessionEnd`.

    Attributes
    ----------
    found : list of dict
        For each grain with a value that was not finite: ``rank``, ``tensor``, and the range ``start`` to ``stop`` of
        the grain's samples in the global batch.
    loss_scale, next_loss_scale : float
        The loss scale of this step and of the next step.
    """

    kind: ClassVar[str] = "skipped"

    found: list[dict[str, Any]]
    loss_scale: float = 1.0
    next_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError if a value in ``found``, such as a rank, has another type."""
        for one in self.found:
            _check_known(one, _RANGE_FIELDS, "found has")


@dataclass(frozen=True, kw_only=True)
class SessionEnd(RunEvent):
    """Describe the end of a session.

    Attributes
    ----------
    reason : str
        "done" if the run is complete, "stopped" if it was asked to stop and can be resumed, "failed" after an error.
    message : str
        Reason for the stop, or for an end before the last step, or the error message; "" if there is none.
    error : str
        Name of the error's class; "" if there was no error.
    loss : float or None
        Loss of the last step; None if there was no step or the loss was not finite.
    parameters_sha256 : str
        SHA-256 of all parameters; "" if they were not hashed.
    seconds : float
        Duration of the session.
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
    """Format a value in at most 40 characters; describe an integer that has too many digits for ``str``."""
    try:
        return repr(value) if isinstance(value, str) and len(value) < 40 else str(value)[:40]
    except ValueError:
        return "a number of thousands of digits"


def _hint(hint: Any) -> Any:
    """Return the type that the JSON value of an event's field must have: ``hint``, or ``list`` or ``dict`` alone.

    Lists of numbers, of cells, or by rank are checked later, in ``__post_init__`` of the event's class.
    """
    numbers = (list[int], list[float], list[PipelineCell], dict[str, list[int]], dict[str, list[float]])
    return get_origin(hint) if hint in numbers else hint


#: For each event, the types of its fields by name.
_HINTS = {event: {name: _hint(hint) for name, hint in get_type_hints(event).items()} for event in KINDS.values()}
Event = TypeVar("Event", bound=RunEvent)
#: Advice to users in error messages about damaged files.
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
        """The session's :class:`SessionStart`; None if it is missing."""
        return next(iter(self._all(SessionStart)), None)

    @property
    def memory(self) -> MemoryCount | None:
        """The session's :class:`MemoryCount`; None if the session had no step."""
        return next(iter(self._all(MemoryCount)), None)

    @property
    def phases(self) -> tuple[PhaseSeconds, ...]:
        """The durations of phases of the traced steps, in order."""
        return self._all(PhaseSeconds)

    @property
    def timetables(self) -> tuple[PipelineTimetable, ...]:
        """The pipeline timetables of the traced steps; empty without a pipeline."""
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
        """The session's :class:`SessionEnd`; None while the run trains, and if it was killed."""
        return next(reversed(self._all(SessionEnd)), None)

    def _all(self, kind: type[Event]) -> tuple[Event, ...]:
        return tuple(event for event in self.events if isinstance(event, kind))


@dataclass(frozen=True)
class RunRecords:
    """Hold the metrics, events and result that a run has recorded in its folder.

    Attributes
    ----------
    folder : Path
        The run's folder.
    steps : tuple of dict
        The metrics of each step.
    superseded : tuple of dict
        The metrics that an earlier session wrote for steps that were repeated after a resume.
    sessions : tuple of SessionRecords
        The events by session; empty if an early version, which recorded no events, has written the run.
    result : dict or None
        The result of the run if it is complete, else None.
    """

    folder: Path
    steps: tuple[dict[str, Any], ...]
    superseded: tuple[dict[str, Any], ...]
    sessions: tuple[SessionRecords, ...]
    result: dict[str, Any] | None


def read_run(folder: str | Path) -> RunRecords:
    """Read the metrics, events and result of the run in ``folder``, which may still be training. Not collective.

    Raises
    ------
    DataError
        If there is no such folder, if it is not the folder of a run, or if a line is damaged; the message names the
        file and the line. A truncated last line is ignored.
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
        """Add the event in a line of JSON; ignore a kind of event that this version does not know.

        Raises
        ------
        ValueError
            If a value is missing or of another type, or the number of ranks differs from that of the session.
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
    """Yield the number and the JSON object of each line of a file; yield nothing if there is no such file.

    A last line without a newline is left out, because it may be incomplete. If ``strict`` is false, damaged lines are
    left out, too: a resume moves truncated lines to the file of superseded metrics.
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
    """Show the progress of training steps on an output stream, as a bar or as lines.

    Parameters
    ----------
    steps : int
        Number of steps of the whole run.
    active : bool
        Whether to write anything; true on rank 0 only.
    stream : TextIO, optional
        The output stream. Default: standard error, because standard output is for the result.
    """

    def __init__(self, steps: int, *, active: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._steps, self._active, self._started, self._next = steps, active, time.monotonic(), float("-inf")
        self._bar: Any = None

    def begin(self, done: int = 0) -> None:
        """Start the bar if the stream is a terminal; ``done`` is the number of steps done before a resume."""
        if self._active and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._steps, initial=done, file=self._stream, unit="step", dynamic_ncols=True)

    def step(self, step: int, metrics: dict[str, str]) -> None:
        """Show that step ``step`` is done; ``metrics`` maps names to formatted values."""
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
        """Finish the progress bar, and leave it visible."""
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
    """Return a tqdm progress bar that counts bytes; it shows nothing if ``stream`` is not a terminal.

    Parameters
    ----------
    total : int
        Total number of bytes.
    label : str
        Text before the bar.
    stream : TextIO, optional
        The output stream. Default: standard error.
    """
    from tqdm import tqdm

    shape: dict[str, Any] = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, "leave": False}
    return tqdm(total=total, desc=label, file=stream or sys.stderr, disable=None, **shape)
