"""Define the events that a run records in ``events.jsonl``: one class for each kind, from and to a line of JSON.

A visit is one start or resume of a run. Lists "by rank" have one entry for each rank, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Self, get_origin, get_type_hints

from mpizero.train.record.json_forms import LATEST, fits, plain

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
        Number of the visit, from 0.
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
        found: dict[str, Any] = {}
        for one in fields(cls):
            if one.name in values:
                value = values[one.name]
                if not fits(value, _HINTS[cls][one.name]) or (one.name == "time" and abs(value) > LATEST):
                    raise ValueError(f"{one.name} is {_shortened(value)}")
                found[one.name] = value
            elif one.default is MISSING and one.default_factory is MISSING:
                raise ValueError(f"{one.name} is missing")
        return cls(**found)


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
class VisitStart(RunEvent):
    """Describe the training at the start of a visit, whose first step is the one after ``step``.

    Attributes
    ----------
    steps : int
        Number of the run's last step.
    superseded : int
        Number of steps after ``step`` that a visit before had done already: their lines of metrics are superseded.
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
    """Hold the memory of every rank after the first step of a visit.

    Attributes
    ----------
    counted : dict of str to list of int
        Bytes of host memory by part, by rank, counted where they are allocated. The parts are those of
        :attr:`VisitStart.planned` that exist between steps. Of memory that ranks share, each counts an equal part.
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
            _check_known(one, _PLACE, "found has")


@dataclass(frozen=True, kw_only=True)
class VisitEnd(RunEvent):
    """Describe the end of a visit.

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
        Seconds of the visit.
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
_PLACE = {"rank": int, "start": int, "stop": int, "tensor": str}
_LAYOUT = {"global_batch": int, "grains": int, "grain_size": int, "chunks": list[dict[str, Any]]}
#: The class of each kind of event.
KINDS: dict[str, type[RunEvent]] = {
    one.kind: one
    for one in (VisitStart, MemoryCount, PhaseSeconds, PipelineTimetable, CheckpointWrite, SkippedStep, VisitEnd)
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
