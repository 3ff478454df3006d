"""Build pipeline schedules, simulate them to find their times, and show them as text.

A model is cut into *chunks* (contiguous runs of its blocks), and a batch into micro-batches. A :class:`Schedule`
assigns each chunk to a stage, and gives each stage a *program*, a sequence of instructions. A stage runs its program in
order, and sends messages without blocking. Before a stage runs an instruction, it waits for the messages that the
instruction needs. :func:`simulate` simulates all stages in one process, with given costs: an instruction starts when
its messages have arrived.

The backward pass of a chunk has two halves: the *input half* computes the gradient of the chunk's input, the *weight
half* the gradients of its weights. In every schedule the backward passes of a chunk, and its weight halves, come in
ascending order of the micro-batches, because the sum over grains (``layout/sum_tree.py``) adds gradients in this order.

Each schedule is a generator of one stage's instructions. The generators take the same four arguments: the number of the
stage, the number of stages, the number of micro-batches, and the number of chunks on each stage (``virtual``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, isfinite
from typing import NamedTuple

from mpizero._util.checks import is_whole
from mpizero.errors import ConfigError, ScheduleError

FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_INPUT = "backward_input"
BACKWARD_WEIGHTS = "backward_weights"


class Instruction(NamedTuple):
    """Describe one computation of one chunk on one micro-batch: a forward pass, a backward pass, or half of one.

    A backward pass has two halves: the input half computes the gradient of the chunk's input, the weight half computes
    the gradients of its weights.

    A forward pass needs the output of the previous chunk, and sends the chunk's output to the next chunk. A backward
    pass (or its input half alone) needs the chunk's forward pass and the input gradient of the next chunk, and sends
    the chunk's input gradient to the previous chunk. A weight half needs the input half of the same backward pass, and
    sends nothing.

    Attributes
    ----------
    kind : str
        "forward", "backward" (both halves), "backward_input" (the input half) or "backward_weights" (the weight half).
    chunk : int
        Number of the chunk, counted from the model's input.
    micro : int
        Number of the micro-batch.

    Examples
    --------
    >>> import mpizero as mz
    >>> backward = mz.layout.Instruction("backward", chunk=0, micro=2)
    >>> print(backward)
    backward of chunk 0, micro-batch 2
    >>> [str(needed) for needed in backward.needs(chunks=2)]
    ['forward of chunk 0, micro-batch 2', 'backward_input of chunk 1, micro-batch 2']
    """

    kind: str
    chunk: int
    micro: int

    def __str__(self) -> str:
        """Return kind, chunk and micro-batch as text for error messages."""
        return f"{self.kind} of chunk {self.chunk}, micro-batch {self.micro}"

    def needs(self, chunks: int) -> tuple[Instruction, ...]:
        """Return the instructions that must be complete before this one starts.

        ``chunks`` is the number of chunks of the whole model. The returned tuple never contains a whole backward pass,
        only one of its halves; a whole backward pass completes both halves (see :attr:`does`).
        """
        kind, chunk, micro = self
        if kind == BACKWARD_WEIGHTS:
            return (Instruction(BACKWARD_INPUT, chunk, micro),)
        if kind == FORWARD:
            return (Instruction(FORWARD, chunk - 1, micro),) if chunk else ()
        forward = Instruction(FORWARD, chunk, micro)
        return (forward,) if chunk == chunks - 1 else (forward, Instruction(BACKWARD_INPUT, chunk + 1, micro))

    @property
    def does(self) -> tuple[Instruction, ...]:
        """The instructions that this one completes: both halves if it is a whole backward pass, otherwise itself."""
        if self.kind != BACKWARD:
            return (self,)
        _, chunk, micro = self
        return Instruction(BACKWARD_INPUT, chunk, micro), Instruction(BACKWARD_WEIGHTS, chunk, micro)


@dataclass(frozen=True)
class Schedule:
    """Hold the programs of all stages; made by :func:`build_schedule`.

    Attributes
    ----------
    name : str
        One of :data:`SCHEDULES`.
    stages, chunks : int
        Number of stages, and number of chunks on all stages together.
    micro_batches : int
        Number of micro-batches. If a schedule needs a multiple of the number of stages, empty micro-batches are added
        at the end, and this number includes them.
    stage_of : tuple of int
        The stage of every chunk. Chunks are numbered from the model's input.
    programs : tuple of tuple of Instruction
        The instructions of every stage, in order.

    Examples
    --------
    >>> import mpizero as mz
    >>> schedule = mz.layout.build_schedule("1f1b", stages=2, micro_batches=3)
    >>> [f"{step.kind[0]}{step.micro}" for step in schedule.programs[0]]  # forward and backward passes of stage 0
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    >>> schedule.caches()
    (2, 1)
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    stage_of: tuple[int, ...]
    programs: tuple[tuple[Instruction, ...], ...]

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the indices of a stage's chunks, in ascending order."""
        return tuple(chunk for chunk, owner in enumerate(self.stage_of) if owner == stage)

    def caches(self) -> tuple[int, ...]:
        """Return, for every stage, the most activation caches that it holds at the same time.

        An activation cache is what the forward pass of one chunk on one micro-batch keeps for its backward pass. The
        cache lives from the start of the forward pass to the end of the backward pass (or of its weight half).
        """
        return tuple(round(peak) for peak in self.peaks([1.0] * self.chunks))

    def peaks(self, sizes: Sequence[float], deferred: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return, for every stage, the largest total size of the activation caches that it holds at the same time.

        An activation cache is what the forward pass of one chunk on one micro-batch keeps for its backward pass.

        Parameters
        ----------
        sizes : sequence of float
            For every chunk, the size of its cache for one micro-batch, in any unit.
        deferred : sequence of float, optional
            For every chunk, the size of what is kept of a cache from the end of the input half to the end of the
            weight half; ``sizes`` by default.

        Returns
        -------
        tuple of float
            One size for each stage, in the unit of ``sizes``.
        """
        left = sizes if deferred is None else deferred
        peaks = []
        for program in self.programs:
            size = peak = 0.0
            for kind, chunk, _ in program:
                if kind == FORWARD:
                    size += sizes[chunk]
                elif kind == BACKWARD:
                    size -= sizes[chunk]
                else:
                    size += left[chunk] - sizes[chunk] if kind == BACKWARD_INPUT else -left[chunk]
                peak = max(peak, size)
            peaks.append(peak)
        return tuple(peaks)


def gpipe(stage: int, _stages: int, micro_batches: int, _virtual: int) -> Iterator[Instruction]:
    """Yield the instructions of one stage: all forward passes, then all backward passes.

    Huang et al. 2019, GPipe, section 2.2.
    """
    for kind in (FORWARD, BACKWARD):
        for micro in range(micro_batches):
            yield Instruction(kind, stage, micro)


def one_forward_one_backward(stage: int, stages: int, micro_batches: int, _virtual: int) -> Iterator[Instruction]:
    """Yield the instructions of one stage: ``stages - 1 - stage`` forward passes, then forward and backward in turn.

    The order is the schedule 1F1B: Narayanan et al. 2019, PipeDream, section 3.2, with a flush at the end of the batch
    (Narayanan et al. 2021, Efficient large-scale language model training, section 2.2.1). A stage holds activations of
    at most ``stages - stage`` micro-batches.
    """
    micros = range(micro_batches)
    forwards = [Instruction(FORWARD, stage, micro) for micro in micros]
    return _alternate(stages - 1 - stage, forwards, [Instruction(BACKWARD, stage, micro) for micro in micros])


def interleaved(stage: int, stages: int, micro_batches: int, virtual: int) -> Iterator[Instruction]:
    """Yield the instructions of one stage with ``virtual`` chunks, in the order of interleaved 1F1B.

    Narayanan et al. 2021, Efficient large-scale language model training, section 2.2.2. A stage computes one chunk for
    ``stages`` micro-batches before it goes to its next chunk. ``micro_batches`` is a multiple of ``stages``. Chunk
    ``c`` is on stage ``c % stages``.
    """
    forwards, backwards = [], []
    for first in range(0, micro_batches, stages):
        group = range(first, first + stages)
        forwards += [Instruction(FORWARD, k * stages + stage, micro) for k in range(virtual) for micro in group]
        backwards += [
            Instruction(BACKWARD, k * stages + stage, micro) for k in reversed(range(virtual)) for micro in group
        ]
    return _alternate(2 * (stages - 1 - stage) + (virtual - 1) * stages, forwards, backwards)


def zero_bubble(stage: int, stages: int, micro_batches: int, _virtual: int) -> Iterator[Instruction]:
    """Yield the instructions of one stage: 1F1B, with each weight half delayed by ``stage`` micro-batches.

    Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.2 (ZB-H1). A backward pass is cut into an input half
    (gradient of the stage's input) and a weight half (gradients of the weights). The later a stage is in the pipeline,
    the fewer forward passes it does before its first backward pass, and the more weight halves it delays to the end,
    where it would otherwise wait. So every stage holds activations of at most ``stages`` micro-batches, like the first
    stage of 1F1B.
    """
    ahead = min(micro_batches, stages - 1 - stage)
    for micro in range(ahead):
        yield Instruction(FORWARD, stage, micro)
    for micro in range(micro_batches):
        if micro + ahead < micro_batches:
            yield Instruction(FORWARD, stage, micro + ahead)
        yield Instruction(BACKWARD_INPUT, stage, micro)
        if micro >= stage:
            yield Instruction(BACKWARD_WEIGHTS, stage, micro - stage)
    for micro in range(max(micro_batches - stage, 0), micro_batches):
        yield Instruction(BACKWARD_WEIGHTS, stage, micro)


def zero_bubble_v(stage: int, stages: int, micro_batches: int, _virtual: int) -> Iterator[Instruction]:
    """Yield the instructions of one stage in the V-shaped zero-bubble schedule: two chunks on each stage.

    Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 6 (ZB-V), in the order of PyTorch's
    ``ScheduleZBVZeroBubble``. Once a stage has started, it never waits if forward pass, input half and weight half take
    the same time and there are at least ``2 * stages - 1`` micro-batches.

    A micro-batch first passes the stages in ascending order (down the V), through chunk ``stage`` of each stage. Then
    the micro-batch passes the stages in descending order (up the V), through chunk ``2 * stages - 1 - stage``. So stage
    0 computes the loss, and the last stage passes the output of its first chunk to its second chunk. A stage holds at
    most ``2 * stages`` activation caches (one per chunk and micro-batch). A chunk has half as many blocks as a stage of
    1F1B, so these caches take as much memory as those of the first stage of 1F1B.

    With fewer than ``2 * stages - 1`` micro-batches, the schedule is that of ``2 * stages - 1`` micro-batches without
    the instructions of the missing ones.
    """
    down, up = _Chunk(stage), _Chunk(2 * stages - 1 - stage)
    enough = max(micro_batches, 2 * stages - 1)
    program = _v_program(stage, stages, enough, down, up)
    return (instruction for instruction in program if instruction.micro < micro_batches)


class _Chunk:
    """Make the instructions of one chunk: :meth:`next` returns the one of a given kind for the next micro-batch.

    Attributes
    ----------
    chunk : int
        Number of the chunk.
    made : Counter
        How many instructions of each kind have been returned so far.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.made: Counter[str] = Counter()

    def next(self, kind: str) -> Instruction:
        self.made[kind] += 1
        return Instruction(kind, self.chunk, self.made[kind] - 1)


def _v_program(stage: int, stages: int, micro_batches: int, down: _Chunk, up: _Chunk) -> Iterator[Instruction]:
    for _ in range(2 * (stages - stage) - 1):  # until the first micro-batch comes up the V
        yield down.next(FORWARD)
    for _ in range(stage):
        yield up.next(FORWARD)
        yield down.next(FORWARD)
    for _ in range(stages - stage):  # until the first gradient comes up the other side
        yield up.next(FORWARD)
        yield up.next(BACKWARD_INPUT)
        yield up.next(BACKWARD_WEIGHTS)
    while up.made[FORWARD] < micro_batches:
        if down.made[FORWARD] < micro_batches:
            yield down.next(FORWARD)
        yield down.next(BACKWARD_INPUT)
        yield down.next(BACKWARD_WEIGHTS)
        yield up.next(FORWARD)
        yield up.next(BACKWARD_INPUT)
        yield up.next(BACKWARD_WEIGHTS)
    for _ in range(stage):  # gradients first: other stages wait for them
        yield down.next(BACKWARD_INPUT)
        yield up.next(BACKWARD_INPUT)
    for _ in range(stages - stage):
        yield down.next(BACKWARD_INPUT)
        yield down.next(BACKWARD_WEIGHTS)
    for chunk in (up, down):
        while chunk.made[BACKWARD_WEIGHTS] < micro_batches:
            yield chunk.next(BACKWARD_WEIGHTS)


def _alternate(ahead: int, forwards: list[Instruction], backwards: list[Instruction]) -> Iterator[Instruction]:
    """Yield ``ahead`` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for position, backward in enumerate(backwards):
        yield from forwards[ahead + position : ahead + position + 1]
        yield backward


def fuse(program: Iterable[Instruction], stage_of: tuple[int, ...]) -> Iterator[Instruction]:
    """Yield a stage's instructions with whole backward passes in place of pairs of halves that gain no time.

    An input half and the weight half that directly follows it become one backward pass if no other stage waits for the
    input gradient: if the chunk is the first of the model, or if the previous chunk is on the same stage. ``stage_of``
    holds the stage of every chunk.
    """
    pending: Instruction | None = None
    for instruction in program:
        if pending is not None:
            if instruction == pending._replace(kind=BACKWARD_WEIGHTS):
                instruction = pending._replace(kind=BACKWARD)
            else:
                yield pending
            pending = None
        chunk = instruction.chunk
        if instruction.kind == BACKWARD_INPUT and (chunk == 0 or stage_of[chunk - 1] == stage_of[chunk]):
            pending = instruction
        else:
            yield instruction
    if pending is not None:
        yield pending


class _ScheduleRow(NamedTuple):
    """Describe one schedule: its generator and the numbers of chunks and micro-batches that it accepts.

    Attributes
    ----------
    program : callable
        The generator of one stage's instructions, called with (stage, stages, micro-batches, chunks per stage).
    virtual : callable
        Tells whether a number of chunks per stage is allowed.
    wanted : str
        Text for the error message: the allowed numbers of chunks per stage.
    shape : callable
        Returns the stage of every chunk, called with (stages, chunks per stage).
    padded : bool
        Whether the number of micro-batches is padded to a multiple of the number of stages.
    """

    program: Callable[[int, int, int, int], Iterator[Instruction]]
    virtual: Callable[[int], bool] = lambda virtual: virtual == 1
    wanted: str = "1"
    shape: Callable[[int, int], tuple[int, ...]] = lambda stages, virtual: tuple(range(stages)) * virtual
    padded: bool = False


_ROWS = {
    "gpipe": _ScheduleRow(gpipe),
    "1f1b": _ScheduleRow(one_forward_one_backward),
    "interleaved": _ScheduleRow(
        interleaved, lambda virtual: virtual >= 2, "at least 2 (with 1 it is the schedule '1f1b')", padded=True
    ),
    "zero_bubble": _ScheduleRow(zero_bubble),
    "zero_bubble_v": _ScheduleRow(
        zero_bubble_v,
        lambda virtual: virtual in {1, 2},
        "2 (or 1, the default: it always has two chunks a stage)",
        lambda stages, _: (*range(stages), *reversed(range(stages))),
    ),
}
#: Names of the schedules.
SCHEDULES = tuple(_ROWS)
#: The most chunks into which a model is cut.
MOST_CHUNKS = 1 << 16


def chunk_stages(name: str, stages: int, virtual: int = 1) -> tuple[int, ...]:
    """Return the stage of every chunk, in the order of the chunks from the model's input.

    Parameters
    ----------
    name : str
        Name of the schedule, one of :data:`SCHEDULES`.
    stages : int
        Number of stages.
    virtual : int
        Number of chunks on each stage. "interleaved" needs two or more. "zero_bubble_v" always has two, also with
        ``virtual=1``. All other schedules need one chunk.

    Raises
    ------
    ConfigError
        If the name is unknown, or the schedule does not allow this number of stages or of chunks.

    Examples
    --------
    >>> from mpizero.layout import chunk_stages
    >>> chunk_stages("interleaved", 2, 3), chunk_stages("zero_bubble_v", 2)
    ((0, 1, 0, 1, 0, 1), (0, 1, 1, 0))
    """
    if name not in _ROWS:
        raise ConfigError(f"unknown schedule {name!r}; expected one of {', '.join(SCHEDULES)}")
    row = _ROWS[name]
    _require_positive(name, "stages", stages)
    _require_positive(name, "virtual stages", virtual)
    if not row.virtual(virtual):
        raise ConfigError(f"schedule {name!r} cannot have {virtual} virtual stages; expected {row.wanted}")
    if stages * virtual > MOST_CHUNKS:
        raise ConfigError(f"{stages} stages with {virtual} chunks each: expected at most {MOST_CHUNKS:,} chunks")
    return row.shape(stages, virtual)


@lru_cache(maxsize=64, typed=True)
def build_schedule(name: str, stages: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """Build a schedule and check by simulation that it can be run; the schedules built last are cached.

    Parameters
    ----------
    name : str
        Name of the schedule, one of :data:`SCHEDULES`.
    stages, micro_batches : int
        Number of stages and of micro-batches. "interleaved" adds empty micro-batches up to a multiple of the number of
        stages.
    virtual : int
        Number of chunks on each stage, as in :func:`chunk_stages`.

    Raises
    ------
    ConfigError
        If the name is unknown, or the schedule does not allow one of the three numbers.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.layout.build_schedule("gpipe", 2, 4).caches(), mz.layout.build_schedule("1f1b", 2, 4).caches()
    ((4, 4), (2, 1))
    >>> mz.layout.build_schedule("2f2b", 2, 4)
    Traceback (most recent call last):
    mpizero.errors.ConfigError: unknown schedule '2f2b'; expected one of gpipe, 1f1b, interleaved, ...
    """
    stage_of = chunk_stages(name, stages, virtual)
    _require_positive(name, "micro-batches", micro_batches)
    row = _ROWS[name]
    micros = -(-micro_batches // stages) * stages if row.padded else micro_batches
    schedule = Schedule(
        name,
        stages,
        len(stage_of),
        micros,
        stage_of,
        tuple(tuple(fuse(row.program(stage, stages, micros, virtual), stage_of)) for stage in range(stages)),
    )

    simulate(schedule, Costs.uniform(schedule.chunks))
    return schedule


def _require_positive(name: str, what: str, value: object) -> None:
    if not is_whole(value, 1):
        raise ConfigError(f"schedule {name!r} cannot have {value!r} {what}; expected a whole number >= 1")


@dataclass(frozen=True)
class Costs:
    """Hold the seconds that each chunk takes for one micro-batch, and the latency of messages.

    Attributes
    ----------
    forward, backward_input, backward_weights : tuple of float
        For each chunk, the seconds of a forward pass, of the input half of a backward pass (gradient of the chunk's
        input) and of its weight half (gradients of the weights). A whole backward pass takes the sum of both halves.
    latency : float
        Seconds from the end of an instruction until its message has arrived at another stage.

    Raises
    ------
    ConfigError
        If the three tuples have different lengths, or a number is negative or not finite.

    Examples
    --------
    >>> import mpizero as mz
    >>> costs = mz.layout.Costs.uniform(2, forward=1.0, backward_input=1.0, backward_weights=0.5)
    >>> costs.seconds(mz.layout.Instruction("backward", chunk=0, micro=0))
    1.5
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weights: tuple[float, ...]
    latency: float = 0.0

    def __post_init__(self) -> None:
        """Raise :class:`ConfigError` if the tuples have different lengths, or a number is negative or not finite."""
        rows = {name: getattr(self, name) for name in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS)}
        if len(set(map(len, rows.values()))) > 1:
            lengths = ", ".join(f"{len(row)} for {name}" for name, row in rows.items())
            raise ConfigError(f"costs of {lengths} were given; expected one a chunk for each")
        for name, row in (*rows.items(), ("latency", (self.latency,))):
            for chunk, seconds in enumerate(row):
                if not isfinite(seconds) or seconds < 0:
                    raise ConfigError(f"the cost {name}[{chunk}] is {seconds!r}; expected finite seconds >= 0")

    @classmethod
    def uniform(
        cls,
        chunks: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weights: float = 1.0,
        latency: float = 0.0,
    ) -> Costs:
        """Make the costs of ``chunks`` chunks that all take the same seconds; see the class for the arguments."""
        return cls((forward,) * chunks, (backward_input,) * chunks, (backward_weights,) * chunks, latency)

    def seconds(self, instruction: Instruction) -> float:
        """Return the seconds that an instruction takes, without the latency of its message."""
        chunk = instruction.chunk
        if instruction.kind == FORWARD:
            return self.forward[chunk]
        if instruction.kind == BACKWARD_INPUT:
            return self.backward_input[chunk]
        if instruction.kind == BACKWARD_WEIGHTS:
            return self.backward_weights[chunk]
        return self.backward_input[chunk] + self.backward_weights[chunk]


class TimedInstruction(NamedTuple):
    """Hold one instruction with its start and its end, in seconds since the start of the simulation.

    Attributes
    ----------
    instruction : Instruction
        The instruction.
    start, end : float
        Seconds from the start of the simulation to the start and to the end of the instruction.

    Examples
    --------
    >>> from mpizero.layout import Costs, build_schedule, simulate
    >>> found = simulate(build_schedule("1f1b", stages=2, micro_batches=4), Costs.uniform(2))
    >>> last = found.events[0][-1]
    >>> str(last.instruction), last.start, last.end
    ('backward of chunk 0, micro-batch 3', 13.0, 15.0)
    """

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Hold the times of a simulated run of a schedule; made by :func:`simulate`.

    Attributes
    ----------
    schedule : Schedule
        The schedule that was simulated.
    events : tuple of tuple of TimedInstruction
        The instructions of every stage, in order.

    Examples
    --------
    >>> from mpizero.layout import Costs, build_schedule, simulate
    >>> found = simulate(build_schedule("1f1b", stages=2, micro_batches=4), Costs.uniform(2))
    >>> found.makespan, found.bubble, found.bubble_share
    (15.0, 3.0, 0.2)
    """

    schedule: Schedule
    events: tuple[tuple[TimedInstruction, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first instruction of any stage to the end of the last one."""
        return max(events[-1].end for events in self.events)

    @property
    def busy(self) -> tuple[float, ...]:
        """For every stage, the seconds in which it computes."""
        return tuple(sum(event.end - event.start for event in events) for events in self.events)

    @property
    def idle(self) -> tuple[float, ...]:
        """For every stage, the share of the makespan in which it does not compute, 0 to 1."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Seconds lost by waiting: the makespan minus the computing time of the busiest stage."""
        return self.makespan - max(self.busy)

    @property
    def bubble_share(self) -> float:
        """The bubble divided by the makespan, 0 to 1: the idle share of the busiest stage."""
        return self.bubble / self.makespan if self.makespan else 0.0

    @property
    def gaps(self) -> tuple[float, ...]:
        """For every stage, the seconds that it waits from the start of its first to the end of its last instruction.

        The papers on zero-bubble schedules count only this waiting time, and not the time before a stage's first or
        after its last instruction.
        """
        spans = (events[-1].end - events[0].start for events in self.events)
        return tuple(span - busy for span, busy in zip(spans, self.busy, strict=True))

    @property
    def caches(self) -> tuple[int, ...]:
        """For every stage, the most activation caches (one per chunk and micro-batch) that exist at the same time."""
        return self.schedule.caches()


def simulate(schedule: Schedule, costs: Costs, present: int | None = None) -> Simulation:
    """Simulate a schedule: compute when each instruction starts and ends, and check that no stage waits for ever.

    Parameters
    ----------
    schedule : Schedule
        The schedule to simulate.
    costs : Costs
        Seconds that each chunk takes.
    present : int, optional
        Number of micro-batches that have samples. The micro-batches after them only pad the schedule: their
        instructions send messages, but take no time. By default all micro-batches have samples.

    Raises
    ------
    ConfigError
        If ``costs`` and ``schedule`` have different numbers of chunks.
    ScheduleError
        If an instruction is missing, repeated, unknown or on the wrong stage; if the backward passes of a chunk are not
        in ascending order of the micro-batches; or if stages wait for each other for ever.

    Examples
    --------
    >>> from mpizero.layout import Costs, build_schedule, simulate
    >>> [simulate(build_schedule(name, 4, 8), Costs.uniform(4)).bubble for name in ("gpipe", "1f1b", "zero_bubble")]
    [9.0, 9.0, 3.0]
    """
    if len(costs.forward) != schedule.chunks:
        raise ConfigError(f"costs of {len(costs.forward)} chunks were given, but the schedule has {schedule.chunks}")
    _check_work(schedule)
    _check_retirement(schedule)
    return Simulation(schedule, _run(schedule, costs, schedule.micro_batches if present is None else present))


def _check_work(schedule: Schedule) -> None:
    """Raise :class:`ScheduleError` if an instruction is missing, repeated, unknown or not on the stage of its chunk."""
    work = (schedule.chunks, schedule.micro_batches)
    done: set[Instruction] = set()
    for stage, program in enumerate(schedule.programs):
        for instruction in program:
            kind, chunk, micro = instruction
            if kind not in {FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS}:
                raise ScheduleError(f"{_where(schedule, stage)}: unknown instruction {kind!r}")
            if not 0 <= chunk < work[0] or not 0 <= micro < work[1] or schedule.stage_of[chunk] != stage:
                raise ScheduleError(f"{_where(schedule, stage)}: {instruction} is not this stage's work")
            for part in instruction.does:
                if part in done:
                    raise ScheduleError(f"{_where(schedule, stage)}: {part} is done twice")
                done.add(part)
    for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS):
        for chunk in range(schedule.chunks):
            for micro in range(schedule.micro_batches):
                if (part := Instruction(kind, chunk, micro)) not in done:
                    raise ScheduleError(f"{_where(schedule, schedule.stage_of[chunk])}: {part} is missing")


def _check_retirement(schedule: Schedule) -> None:
    """Raise :class:`ScheduleError` if backward passes (or halves) of a chunk are not in order of the micro-batches."""
    last: dict[tuple[str, int], int] = {}
    for stage, program in enumerate(schedule.programs):
        for instruction in program:
            for kind, chunk, micro in instruction.does:
                if kind != FORWARD and last.get((kind, chunk), -1) > micro:
                    raise ScheduleError(
                        f"{_where(schedule, stage)}: {instruction} comes after that of micro-batch "
                        f"{last[kind, chunk]}; backwards must retire in ascending order of the micro-batches"
                    )
                last[kind, chunk] = micro


def _run(schedule: Schedule, costs: Costs, present: int) -> tuple[tuple[TimedInstruction, ...], ...]:
    """Compute the start and end of every instruction; return them for every stage, in order.

    Each stage in turn runs instructions until it has to wait; this is repeated until all stages have run all of their
    instructions. If no stage can run before then, raise :class:`ScheduleError`. Instructions of micro-batches from
    number ``present`` on take no time.
    """
    ends: dict[Instruction, float] = {}
    events: list[list[TimedInstruction]] = [[] for _ in schedule.programs]
    going = True
    while going:
        going = False
        for stage, program in enumerate(schedule.programs):
            done = events[stage]
            while len(done) < len(program):
                instruction = program[len(done)]
                needed = instruction.needs(schedule.chunks)
                if any(need not in ends for need in needed):
                    break
                start = done[-1].end if done else 0.0
                for need in needed:
                    away = schedule.stage_of[need.chunk] != stage
                    start = max(start, ends[need] + costs.latency * away)
                end = start + (costs.seconds(instruction) if instruction.micro < present else 0.0)
                done.append(TimedInstruction(instruction, start, end))
                ends.update(dict.fromkeys(instruction.does, end))
                going = True
    if stuck := list(_stuck(schedule, events, ends)):
        raise ScheduleError(f"schedule {schedule.name!r} cannot be run: {'; '.join(stuck)}")
    return tuple(map(tuple, events))


def _stuck(schedule: Schedule, events: list[list[TimedInstruction]], ends: dict[Instruction, float]) -> Iterator[str]:
    """Yield an error text for every stage that has not ended: its next instruction, and the instruction missing for it.

    ``events`` holds the instructions of every stage that have run, and ``ends`` the end of each of them in seconds.
    """
    for stage, program in enumerate(schedule.programs):
        if len(events[stage]) == len(program):
            continue
        instruction = program[len(events[stage])]
        need = next(need for need in instruction.needs(schedule.chunks) if need not in ends)
        owner = schedule.stage_of[need.chunk]
        whose = "that is later in its own program" if owner == stage else f"on stage {owner}"
        yield f"stage {stage} waits in the {instruction}, for the {need}, {whose}"


def _where(schedule: Schedule, stage: int) -> str:
    return f"schedule {schedule.name!r}, stage {stage}"


def bubble_formula(name: str, stages: int, micro_batches: int, virtual: int, costs: Costs) -> float:
    """Compute a schedule's bubble (seconds lost by waiting) by the closed formula of its paper.

    In the table, s is the number of stages, m the number of micro-batches and v the number of chunks on each stage. F,
    B and W are the seconds that a stage takes for one micro-batch with all its chunks: F for the forward pass, B for
    the input half and W for the weight half of the backward pass.

    ============= ================================ ====================================================================
    gpipe         (s-1)(F+B+W)                     Huang et al. 2019, GPipe, section 2.3: (s-1)/(m+s-1) of the makespan
    1f1b          (s-1)(F+B+W)                     Narayanan et al. 2021, section 2.2.1
    interleaved   (s-1)(F+B+W)/v                   Narayanan et al. 2021, section 2.2.2
    zero_bubble   (s-1)(F+B-W)                     Qi et al. 2023, section 2.3, for m >= s, W <= F and W <= B. In
                                                   other cases (s-1)(F+B) - min(m-1, s-1) min(F, B, W), which was
                                                   found with the simulator, not in the paper. No schedule has a
                                                   bubble below (s-1)F; with at most s caches none is below (s-1)B
    zero_bubble_v (s-1)F/2                         Qi et al. 2023, section 6, for m >= 2s-1 and F = B = W; in other
                                                   cases a lower bound. The paper says 0, because it counts from the
                                                   start of each stage; here time counts from the start of stage 0
    ============= ================================ ====================================================================

    Parameters
    ----------
    name : str
        Name of the schedule.
    stages, micro_batches, virtual : int
        The numbers s, m and v.
    costs : Costs
        Seconds of each chunk. F, B and W are the sums over all chunks, divided by s. The formulas hold where all
        stages take the same time and messages have no latency.

    Returns
    -------
    float
        The bubble in seconds. The bubble's share of the makespan is ``bubble / (m * (F + B + W) + bubble)``.

    Raises
    ------
    ConfigError
        If there is no formula for ``name``.

    Examples
    --------
    >>> from mpizero.layout import Costs, bubble_formula
    >>> bubble_formula("1f1b", stages=4, micro_batches=8, virtual=1, costs=Costs.uniform(4))
    9.0
    """
    forward, inputs, weights = (
        sum(row) / stages for row in (costs.forward, costs.backward_input, costs.backward_weights)
    )
    delay = stages - 1
    match name:
        case "gpipe" | "1f1b":
            return delay * (forward + inputs + weights)
        case "interleaved":
            return delay * (forward + inputs + weights) / virtual
        case "zero_bubble":
            return delay * (forward + inputs) - min(micro_batches - 1, delay) * min(forward, inputs, weights)
        case "zero_bubble_v":
            return delay * forward / 2
    raise ConfigError(f"there is no formula for the schedule {name!r}")


#: The letter of each kind of instruction in timetables; PyTorch's pipelining uses the same letters.
LETTERS = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHTS: "W"}


def label(simulation: Simulation, instruction: Instruction) -> str:
    """Return an instruction's short name, such as ``F3b``: the letter of its kind, its micro-batch, and its chunk.

    ``F3b`` is the forward pass of micro-batch 3 (counted from 0) through the second chunk of its stage. The last letter
    is left out if every stage has one chunk.
    """
    kind, chunk, micro = instruction
    schedule = simulation.schedule
    name = f"{LETTERS[kind]}{micro}"
    if schedule.chunks == schedule.stages:
        return name
    index = schedule.stage_of[:chunk].count(schedule.stage_of[chunk])
    return f"{name}{'abcdefghijklmnopqrstuvwxyz'[index % 26]}"


def timetable(simulation: Simulation, unit: float | None = None) -> str:
    """Return a text table with one row per stage and one column per time unit, with headings and a legend.

    A column shows the instruction that runs at the middle of the column's time unit, or a dot if none runs.

    Parameters
    ----------
    simulation : Simulation
        The simulated run to show.
    unit : float, optional
        Seconds per column. By default the longest unit of which the durations of all instructions are multiples, among
        1, 1/2, 1/3 and 1/4 of the shortest duration; if none of these fits, the shortest duration.

    Raises
    ------
    ConfigError
        If ``unit`` is not positive.
    """
    if unit is not None and not unit > 0:
        raise ConfigError(f"a timetable cannot have columns of {unit!r} seconds; expected more than 0")
    step = unit or _unit(simulation)
    columns = ceil(simulation.makespan / step - 1e-9)
    rows = [_row(simulation, stage, step, columns) for stage in range(simulation.schedule.stages)]
    width = max((len(cell) for row in rows for cell in row), default=1)
    digits = len(str(len(rows) - 1))
    body = [
        f"stage {stage:>{digits}} | {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for stage, row in enumerate(rows)
    ]
    return "\n".join([*_head(simulation, step), *body, *_legend(simulation)])


def _row(simulation: Simulation, stage: int, step: float, columns: int) -> list[str]:
    cells = ["."] * columns
    for instruction, start, end in simulation.events[stage]:
        for column in range(max(0, ceil(start / step - 0.5 - 1e-9)), columns):
            if (column + 0.5) * step >= end - 1e-9 * step:
                break
            cells[column] = label(simulation, instruction)
    return cells


def _unit(simulation: Simulation) -> float:
    """Return the default time unit of a timetable in seconds.

    The default unit is the longest one of which the durations of all instructions are multiples, among 1, 1/2, 1/3 and
    1/4 of the shortest duration; if none of these fits, it is the shortest duration.
    """
    durations = {end - start for events in simulation.events for _, start, end in events if end > start}
    shortest = min(durations, default=1.0)
    for parts in (1, 2, 3, 4):
        unit = shortest / parts
        if all(abs(duration / unit - round(duration / unit)) < 1e-6 for duration in durations):
            return unit
    return shortest


def _head(simulation: Simulation, step: float) -> list[str]:
    schedule = simulation.schedule
    chunks = "" if schedule.chunks == schedule.stages else f", {schedule.chunks // schedule.stages} chunks each"
    return [
        f"{schedule.name}: {schedule.stages} stages{chunks}, {schedule.micro_batches} micro-batches; "
        f"a column is {step:g} s",
        f"makespan {simulation.makespan:g} s, bubble {simulation.bubble:g} s = {100 * simulation.bubble_share:.1f} %, "
        f"caches held {_list(simulation.caches)}, idle {_list([f'{100 * idle:.1f} %' for idle in simulation.idle])}",
    ]


def _list(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _legend(simulation: Simulation) -> list[str]:
    kinds = {event.instruction.kind for events in simulation.events for event in events}
    names = {
        FORWARD: "F forward",
        BACKWARD: "B backward",
        BACKWARD_INPUT: "I its input half",
        BACKWARD_WEIGHTS: "W its weight half",
    }
    several = simulation.schedule.chunks > simulation.schedule.stages
    letters = ["a, b, ... the stage's first, second, ... chunk"] if several else []
    return [", ".join([*(name for kind, name in names.items() if kind in kinds), *letters, ". waiting"])]
