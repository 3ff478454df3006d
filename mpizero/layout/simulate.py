"""Simulate a pipeline schedule in one process: check that it can be run, and compute its times from given costs.

In the simulation every stage runs its program in order. A message is sent without blocking as soon as its instruction
ends, and an instruction waits for the messages that it needs.
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
    """Hold the seconds that each chunk takes for one micro-batch: forward pass, input half, weight half.

    Attributes
    ----------
    forward, backward_input, backward_weights : tuple of float
        Seconds, one number for each chunk. A whole backward pass takes the sum of its halves.
    latency : float
        Seconds from the end of an instruction until its message is at another stage.

    Raises
    ------
    ConfigError
        If the three have different lengths, or a number is negative or not finite.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weights: tuple[float, ...]
    latency: float = 0.0

    def __post_init__(self) -> None:
        """Raise :class:`ConfigError` for times that are not allowed."""
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
        """Make costs that are the same for all chunks."""
        return cls((forward,) * chunks, (backward_input,) * chunks, (backward_weights,) * chunks, latency)

    def seconds(self, instruction: Instruction) -> float:
        """Return the seconds that an instruction takes."""
        chunk = instruction.chunk
        if instruction.kind == FORWARD:
            return self.forward[chunk]
        if instruction.kind == BACKWARD_INPUT:
            return self.backward_input[chunk]
        if instruction.kind == BACKWARD_WEIGHTS:
            return self.backward_weights[chunk]
        return self.backward_input[chunk] + self.backward_weights[chunk]


class TimedInstruction(NamedTuple):
    """Hold one instruction and the seconds at which it starts and ends."""

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
    """

    schedule: Schedule
    events: tuple[tuple[TimedInstruction, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first instruction of any stage to the end of the last one."""
        return max(events[-1].end for events in self.events)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds for which every stage computes."""
        return tuple(sum(event.end - event.start for event in events) for events in self.events)

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the makespan for which every stage does not compute, 0 to 1."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Seconds lost by waiting: the makespan minus the work of the stage with the most work."""
        return self.makespan - max(self.busy)

    @property
    def bubble_share(self) -> float:
        """The bubble's share of the makespan, 0 to 1: the idle share of the stage with the most work."""
        return self.bubble / self.makespan if self.makespan else 0.0

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds that every stage waits between the start of its first and the end of its last instruction.

        The papers on zero-bubble schedules count only this waiting time, because a stage that starts later may end
        later.
        """
        spans = (events[-1].end - events[0].start for events in self.events)
        return tuple(span - busy for span, busy in zip(spans, self.busy, strict=True))

    @property
    def caches(self) -> tuple[int, ...]:
        """For every stage, the largest number of activation caches (one per chunk and micro-batch) held at once."""
        return self.schedule.caches()


def simulate(schedule: Schedule, costs: Costs, present: int | None = None) -> Simulation:
    """Simulate a schedule and check that it can be run.

    Parameters
    ----------
    schedule : Schedule
        The schedule to simulate.
    costs : Costs
        Times of each chunk.
    present : int, optional
        Number of micro-batches that have samples. The others only pad the schedule: they send their messages and take
        no time. By default all micro-batches have samples.

    Raises
    ------
    ConfigError
        If the number of costs is not the number of chunks.
    ScheduleError
        If an instruction is missing, repeated, unknown or on the wrong stage; if backward passes do not end in
        ascending order of the micro-batches; or if stages wait for each other for ever.
    """
    if len(costs.forward) != schedule.chunks:
        raise ConfigError(f"costs of {len(costs.forward)} chunks were given, but the schedule has {schedule.chunks}")
    _check_work(schedule)
    _check_retirement(schedule)
    return Simulation(schedule, _run(schedule, costs, schedule.micro_batches if present is None else present))


def _check_work(schedule: Schedule) -> None:
    """Raise an error unless every instruction is done exactly once, on the stage of its chunk."""
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
    """Raise an error unless the backward passes of each chunk, and their halves, come in order of the micro-batches."""
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
    """Run every stage until it has to wait, again and again, until all stages have ended or none can go on."""
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
    """Yield a text for every stage that waits for ever, naming the instruction that it waits for."""
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

    With s stages, m micro-batches, v chunks a stage and, for one micro-batch on the whole stage, F seconds for the
    forward, B for the input half and W for the weight half of the backward:

    ============= ================================ ====================================================================
    gpipe         (s-1)(F+B+W)                     Huang et al. 2019, GPipe, section 2.3: the share (s-1)/(m+s-1)
    1f1b          (s-1)(F+B+W)                     Narayanan et al. 2021, section 2.2.1
    interleaved   (s-1)(F+B+W)/v                   Narayanan et al. 2021, section 2.2.2
    zero_bubble   (s-1)(F+B-W)                     Qi et al. 2023, section 2.3, for m >= s, W <= F and W <= B. Beyond:
                                                   (s-1)(F+B) - min(m-1, s-1) min(F, B, W), found with the simulator;
                                                   no schedule has less than (s-1)F, nor than (s-1)B with s caches
    zero_bubble_v (s-1)F/2                         Qi et al. 2023, section 6, for m >= 2s-1 and F = B = W. The paper
                                                   has 0, as it counts from each stage's own start; here the bubble
                                                   counts from the first stage's. Otherwise a lower bound
    ============= ================================ ====================================================================

    Parameters
    ----------
    name : str
        Name of the schedule.
    stages, micro_batches, virtual : int
        s, m and v.
    costs : Costs
        F, B and W are computed as means over the stages. The formulas hold for equal stages and no latency.

    Returns
    -------
    float
        Seconds, as :attr:`Simulation.bubble`; the share of the makespan is ``bubble / (m (F+B+W) + bubble)``.

    Raises
    ------
    ConfigError
        On an unknown name.
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
