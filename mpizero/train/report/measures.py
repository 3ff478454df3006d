"""Compute what a report tells about ranks: seconds by phase, memory beside its plan, idle time of pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpizero.train.events import MemoryCount, PhaseSeconds, PipelineCell, PipelineTimetable, VisitRecords, VisitStart

#: Name of the phase in which a rank waits for others.
WAITING = "waiting"

#: What a step does in each phase.
MEANINGS = {
    "forward": "forward passes",
    "backward": "backward passes",
    "layers' messages": "messages of tensor and context groups, and between pipeline stages",
    "local sums": "checks and sums of gradients inside a rank",
    "reduction": "sums of gradients over ranks",
    "optimizer": "update of parameters",
    "publication": "updated parameters to all ranks",
    "agreement": "samples to their ranks; losses and norms",
    "other": "none of the others",
    WAITING: "for other ranks, in any phase",
}


class MeanPhases(NamedTuple):
    """Hold mean seconds of the measured steps of a visit.

    Attributes
    ----------
    steps : tuple of int
        The measured steps.
    seconds, reading : list of float
        By rank, seconds of the step, and of reading before it.
    phases : dict of str to list of float
        For each phase, by rank, its seconds; waiting last.
    """

    steps: tuple[int, ...]
    seconds: list[float]
    reading: list[float]
    phases: dict[str, list[float]]

    @property
    def told(self) -> str:
        """Say which steps were measured."""
        if len(self.steps) == 1:
            return f"the one step that was measured (step {self.steps[0]:,})"
        return f"the mean of {len(self.steps)} measured steps ({self.steps[0]:,} to {self.steps[-1]:,})"

    @property
    def waiting(self) -> list[float]:
        """By rank, the share of the step in which it waited."""
        waits = self.phases.get(WAITING, [0.0] * len(self.seconds))
        return [waited / whole if whole else 0.0 for waited, whole in zip(waits, self.seconds, strict=True)]


def mean_phases(measured: Sequence[PhaseSeconds]) -> MeanPhases | None:
    """Return the means of measured steps of one visit; None without any."""
    if not measured:
        return None
    names = dict.fromkeys(name for event in measured for name in event.phases if name != WAITING)
    nothing = [0.0] * len(measured[0].seconds)
    return MeanPhases(
        tuple(event.step for event in measured),
        _mean([event.seconds for event in measured]),
        _mean([event.reading for event in measured]),
        {name: _mean([event.phases.get(name, nothing) for event in measured]) for name in (*names, WAITING)},
    )


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


class MemoryTable(NamedTuple):
    """Hold planned and counted bytes of memory of one kind, by part and rank.

    Attributes
    ----------
    planned, counted : dict of str to list of int
        Bytes by part, by rank.
    """

    planned: Mapping[str, list[int]]
    counted: Mapping[str, list[int]]

    @property
    def compared(self) -> list[str]:
        """The parts that were planned and counted."""
        return [part for part in self.planned if part in self.counted]

    @property
    def only_counted(self) -> list[str]:
        """The parts that were counted and not planned."""
        return [part for part in self.parts if part in self.counted and part not in self.planned]

    @property
    def only_planned(self) -> list[str]:
        """The parts that were planned and not counted, if any were counted."""
        return [part for part in self.parts if self.counted and part not in self.counted]

    def totals(self) -> list[tuple[int, int]]:
        """Return, by rank, the sums of the planned and the counted bytes of the parts that are compared."""
        pairs = [(self.planned[part], self.counted[part]) for part in self.compared]
        ranks = len(pairs[0][0]) if pairs else 0
        return [(sum(p[rank] for p, _ in pairs), sum(c[rank] for _, c in pairs)) for rank in range(ranks)]

    @property
    def parts(self) -> list[str]:
        """All parts of which some rank has any bytes."""
        names = dict.fromkeys((*self.planned, *self.counted))
        return [part for part in names if any(self.planned.get(part, ())) or any(self.counted.get(part, ()))]


def memory_tables(start: VisitStart | None, memory: MemoryCount | None) -> dict[str, MemoryTable]:
    """Return the memory of the host and of GPUs, by "host" and "GPU", where anything is known of it."""
    planned = ({}, {}) if start is None else (start.planned, start.planned_device)
    counted = ({}, {}) if memory is None else (memory.counted, memory.device)
    found = {name: MemoryTable(*both) for name, *both in zip(("host", "GPU"), planned, counted, strict=True)}
    return {name: table for name, table in found.items() if table.parts}


def idle_shares(cells: Sequence[PipelineCell]) -> list[float]:
    """Return the share of a timetable's time in which each stage computes nothing; empty for no cells."""
    if not cells:
        return []
    begin, end = min(cell.start for cell in cells), max(cell.end for cell in cells)
    busy = [0.0] * (1 + max(cell.stage for cell in cells))
    for cell in cells:
        busy[cell.stage] += cell.end - cell.start
    return [1.0 - seconds / (end - begin) if end > begin else 0.0 for seconds in busy]


def timed_ranks(start: VisitStart | None) -> list[int]:
    """Return the ranks whose passes a measured timetable shows, one for each stage: the first ones of every stage."""
    others = [ranks for axis, ranks in start.coordinates.items() if axis != "pipeline"] if start else []
    return [
        rank for rank in range(start.ranks if start else 0) if not any(any(axis[rank : rank + 1]) for axis in others)
    ]


def last_timetable(visits: Sequence[VisitRecords]) -> tuple[VisitStart | None, PipelineTimetable] | None:
    """Return the last measured timetable, and the start of its visit; None without one."""
    return next(((visit.start, visit.timetables[-1]) for visit in reversed(visits) if visit.timetables), None)


def last_with_memory(visits: Sequence[VisitRecords]) -> VisitRecords | None:
    """Return the last visit whose memory was counted, or else planned; None without one."""
    known = [visit for visit in reversed(visits) if memory_tables(visit.start, visit.memory)]
    return next((visit for visit in known if visit.memory), known[0] if known else None)


def last_with_phases(visits: Sequence[VisitRecords]) -> VisitRecords | None:
    """Return the last visit in which a step was measured."""
    return next((v for v in reversed(visits) if v.phases), None)
