"""Simulate a pipeline schedule in one process: check that it can be run, and compute its times from given costs.

In the simulation every stage runs its program in order. When an instruction ends, its message is sent without blocking
the stage. An instruction starts when the messages that it needs have arrived.

An *input half* is the half of a backward pass that computes the gradient of a chunk's input; a *weight half* is the
half that computes the gradients of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from mpizero.errors import ConfigError, ScheduleError
from mpizero.layout.instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS, FORWARD, Instruction
from mpizero.layout.schedule import Schedule


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
        Its start and its end.

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
        """Seconds lost by waiting: the makespan minus the computing seconds of the busiest stage."""
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
        """For every stage, the largest number of activation caches (one per chunk and micro-batch) held at once."""
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

    Each stage in turn goes on until it has to wait, again and again until all have ended. If no stage can go on before
    that, raise :class:`ScheduleError`. Instructions of micro-batches from number ``present`` on take no time.
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
    """Yield an error text for every stage that has not ended: its next instruction, and what this waits for.

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
        The bubble in seconds. Its share of the makespan is ``bubble / (m * (F + B + W) + bubble)``.

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
