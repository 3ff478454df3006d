"""Show a simulated pipeline schedule as text."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from mpizero.errors import ConfigError
from mpizero.layout.instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS, FORWARD, Instruction
from mpizero.layout.simulation import Simulation

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
    place = schedule.stage_of[:chunk].count(schedule.stage_of[chunk])
    return f"{name}{'abcdefghijklmnopqrstuvwxyz'[place % 26]}"


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

    It is the longest unit of which the durations of all instructions are multiples, among 1, 1/2, 1/3 and 1/4 of the
    shortest duration; if none of these fits, it is the shortest duration.
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
