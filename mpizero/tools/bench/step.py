"""Time real training steps by phase, and compare with the least time a phase should take: ``mpizero bench step``.

:func:`write_trace` writes the traced steps in the JSON trace-event format that Perfetto and chrome://tracing open, one
row a rank. :func:`measure_step` trains, every other step with tracing, and returns :class:`StepTimes`. The least
times are computed from what ``mpizero plan`` counts for the same training, and from the measured speeds of the machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpizero._util.checks import whole
from mpizero._util.numbers import Measurement
from mpizero._util.settings import check_option
from mpizero._util.text import columns
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks, from_rank_0
from mpizero.comm.communicator import MESSAGE, TimeSpan
from mpizero.data import batches
from mpizero.errors import ConfigError
from mpizero.sharding.diagnostics import (
    ALL_PHASES,
    PhaseSpan,
    StepSpans,
    clock_offset,
    leaders,
    phases_of,
    spans_of,
    traced,
    waited,
    waits,
)
from mpizero.tools.bench.machine import node_leaders, ranks_per_node, slowest
from mpizero.tools.doctor import counted
from mpizero.tools.plan.command import PlanRequest, plan
from mpizero.tools.plan.time import Machine
from mpizero.train.config.build import build
from mpizero.train.config.schema import RunConfig
from mpizero.train.setup import RunSetup

_MICROSECONDS = 1e6


def write_trace(path: str, ranks: Sequence[Sequence[StepSpans]], coordinates: Sequence[Mapping[str, int]]) -> None:
    """Write a trace of all traced steps of all ranks to a file.

    Parameters
    ----------
    path : str
        The file to write; an existing file is replaced.
    ranks : sequence of sequences of StepSpans
        The traced steps of every rank, with times in seconds of rank 0's clock.
    coordinates : sequence of mappings
        For every rank, its coordinates on the axes of the process grid, by name of the axis.
    """
    events = [*_rows(coordinates), *_events(ranks)]
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")


def _rows(coordinates: Sequence[Mapping[str, int]]) -> Iterator[dict[str, Any]]:
    """Yield the events that name the trace's rows, one row a rank, in the order of the ranks."""
    yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "mpizero"}}
    sizes = {axis: max(of_rank[axis] for of_rank in coordinates) for axis in coordinates[0]}
    for rank, of_rank in enumerate(coordinates):
        label = ", ".join(f"{axis} {number}" for axis, number in of_rank.items() if sizes[axis])
        name = f"rank {rank}" + (f" ({label})" if label else "")
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}}


def _events(ranks: Sequence[Sequence[StepSpans]]) -> Iterator[dict[str, Any]]:
    began = min(step.start for steps in ranks for step in steps)
    latest = waits(ranks)
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            yield _event(rank, f"step {number}", "step", (step.start - began, step.stop - began), {})
            for span in step.spans:
                times = (span.start - began, span.stop - began)
                more = {"waited_us": waited(span, latest) * _MICROSECONDS} if span.phase == MESSAGE else {}
                yield _event(rank, _title(span), span.phase, times, more)


def _title(span: PhaseSpan) -> str:
    if span.phase == MESSAGE or not span.name:
        return span.name or span.phase
    return span.name if span.phase == "schedule" else f"{span.phase}: {span.name}"


def _event(rank: int, name: str, phase: str, times: tuple[float, float], more: Mapping[str, float]) -> dict[str, Any]:
    start, stop = (seconds * _MICROSECONDS for seconds in times)
    event = {"ph": "X", "pid": 0, "tid": rank, "name": name, "cat": phase, "ts": start, "dur": stop - start}
    return {**event, "args": dict(more)} if more else event


@dataclass(frozen=True)
class StepRequest:
    """Describe the steps to measure.

    Attributes
    ----------
    steps : int
        Number of traced steps, which alternate with as many steps without tracing.
    warm_up : int
        Number of steps before the measured steps.
    machine : Machine or None
        The measured speed of the machine, from which the least time of each phase is computed; None computes none.
    trace : str or None
        The file to write a trace of the traced steps to; None writes none.
    """

    steps: int = 10
    warm_up: int = 3
    machine: Machine | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers of steps out of range, and a trace file in a folder that does not exist."""
        check_option("--steps", self.steps, whole(1))
        check_option("--warm-up", self.warm_up, whole())
        if self.trace is not None and not Path(self.trace).parent.is_dir():
            raise ConfigError(f"--trace {self.trace}: {Path(self.trace).parent} is no folder")


@dataclass(frozen=True)
class PhaseTime:
    """Hold the measured seconds of one phase of a step, and ``floor``, the least that it should take.

    ``seconds`` is None for a phase that never happened; ``floor`` is 0 if it is not known.
    """

    seconds: Measurement | None
    floor: float

    @property
    def median(self) -> float:
        """Return the median of the seconds; 0 for a phase that never happened."""
        return 0.0 if self.seconds is None else self.seconds.median


@dataclass(frozen=True)
class StepTimes:
    """Hold the times of steps and of their phases on every rank.

    Attributes
    ----------
    described : str
        A description of the training.
    steps : int
        Number of traced steps.
    plain, watched : Measurement
        Seconds of a step on its slowest rank, without and with tracing; the two kinds of steps alternate.
    ranks : tuple of dict of str to PhaseTime
        For every rank, the seconds of each phase, by name. The phases of one traced step add up to its seconds.
    coordinates : tuple of dict
        The coordinates of every rank on the axes of the process grid.
    slowest : int
        The rank with the least waiting time: the other ranks wait for it.
    recordings : dict of str to str
        How rank 0 has computed each block, and the update, in the last step: "repeated" from a recording, or called by
        Python, as in the attribute ``recordings`` of :class:`mpizero.sharding.ModelMetadata`.
    """

    described: str
    steps: int
    plain: Measurement
    watched: Measurement
    ranks: tuple[dict[str, PhaseTime], ...]
    coordinates: tuple[dict[str, int], ...]
    slowest: int
    recordings: dict[str, str]


def measure_step(
    request: StepRequest, config: RunConfig, comm: Communicator, tell: Callable[[str], None] = lambda line: None
) -> StepTimes:
    """Train some steps, every other one with tracing, and return the times on every rank.

    Collective over ``comm``. On rank 0, ``tell`` is called with a line of text when the model is built and warmed up.
    Only the trace, if one is requested, is written to a file.
    """
    config.parallel.check_ranks(comm.size)
    floors = _floors(request, config, comm)
    with build(config, comm) as setup:
        grid = setup.model._engine.grid
        several = [c for c in (grid.world, *grid.communicators) if c.size > 1]
        first, offset = leaders(several, grid.world), clock_offset(comm)
        plain, watched, spans = _train(request, setup, tell)
        local = tuple(StepSpans(a + offset, b + offset, spans_of(taken, offset, first)) for a, b, taken in spans)
        ranks: list[tuple[StepSpans, ...]] = comm.allgather_object(local, "bench step")
        coordinates = tuple(comm.allgather_object(grid.coordinates._asdict(), "bench step"))
        described, recordings = setup.described(), setup.model._engine.recordings()
    latest = waits(ranks)
    tables = [[phases_of(step, latest) for step in steps] for steps in ranks]
    phases = tuple(_phases(table, floors[rank] if floors else {}) for rank, table in enumerate(tables))
    last = min(range(comm.size), key=lambda rank: phases[rank]["waiting"].median)
    with all_ranks(comm):
        if comm.rank == 0 and request.trace is not None:
            write_trace(request.trace, ranks, coordinates)
    seconds = Measurement.of(plain), Measurement.of(watched)
    return StepTimes(described, request.steps, *seconds, phases, coordinates, last, recordings)


def _floors(request: StepRequest, config: RunConfig, comm: Communicator) -> Sequence[dict[str, float]] | None:
    """Plan the training on rank 0, and return the least seconds of each phase, for every rank. Collective.

    Return None if the request has no machine, or the plan has no such seconds.
    """
    if request.machine is None:
        return None
    per_node = ranks_per_node(node_leaders(comm))

    def least() -> Sequence[dict[str, float]] | None:
        floors = plan(config, PlanRequest(comm.size, per_node, machine=request.machine)).floors
        return None if floors is None else floors.by_rank

    return from_rank_0(comm, least, "bench step")


def _train(
    request: StepRequest, setup: RunSetup, tell: Callable[[str], None]
) -> tuple[list[float], list[float], list[tuple[float, float, list[TimeSpan]]]]:
    """Train; return the seconds of each untraced and of each traced step, and the phases of traced steps. Collective.

    The third list has, for every traced step, its start, its end and its spans (each the name, start and end of one
    phase), by this rank's clock.
    """
    train, model, comm = setup.loop, setup.model, setup.comm
    total = request.warm_up + 2 * request.steps
    stream = batches(setup.source, model, train.global_batch, seed=train.seed, steps=total)
    plain, watched, spans = list[float](), list[float](), list[tuple[float, float, list[TimeSpan]]]()
    for number, (x, y) in enumerate(stream):
        if number == request.warm_up and comm.rank == 0:
            tell(f"{setup.described()}; {request.steps} steps of each kind")
        traces = number >= request.warm_up and (number - request.warm_up) % 2 == 1
        comm.barrier("bench step")
        start = time.monotonic()
        with traced(model._engine) if traces else nullcontext() as timeline:
            model.train(x, y)
        stop = time.monotonic()
        if timeline is not None:
            spans.append((start, stop, timeline.take()))
        took = slowest(comm, stop - start)
        if number >= request.warm_up:
            (watched if traces else plain).append(took)
    return plain, watched, spans


def _phases(table: Sequence[dict[str, float]], floors: dict[str, float]) -> dict[str, PhaseTime]:
    result = {}
    for phase in ALL_PHASES:
        values = [step[phase] for step in table]
        result[phase] = PhaseTime(Measurement.of(values) if any(values) else None, floors.get(phase, 0.0))
    return result


def report(times: StepTimes) -> str:
    """Format the times as a table for people. Not collective."""
    plain, watched = times.plain, times.watched
    head = (
        f"{times.described}\n{counted(times.steps, 'step')}, the slowest rank's: {plain.median * 1e3:.3f} ms "
        f"({plain.least * 1e3:.3f}-{plain.most * 1e3:.3f}), {watched.median * 1e3:.3f} ms "
        f"({watched.least * 1e3:.3f}-{watched.most * 1e3:.3f}) when watched\n{_recorded(times.recordings)}"
    )
    chosen = sorted({0 if times.slowest else len(times.ranks) - 1, times.slowest})
    floors = any(phase.floor for phase in times.ranks[0].values())
    rows = [["ms a step", *(cell for rank in chosen for cell in _heads(times, rank, floors=floors))]]
    for name in ALL_PHASES:
        phases = [times.ranks[rank][name] for rank in chosen]
        if any(phase.median or phase.floor for phase in phases):
            rows.append([name, *(cell for phase in phases for cell in _cells(phase, floors=floors))])
    sums = [_sum(times.ranks[rank]) for rank in chosen]
    rows.append(["all", *(cell for phase in sums for cell in _cells(phase, floors=floors))])
    return f"{head}\n\n{columns(rows)}"


def _recorded(recordings: dict[str, str]) -> str:
    """Say how many of a step's blocks and updates are repeated from recordings, and how the others are computed."""
    called = {name: how for name, how in recordings.items() if how != "repeated"}
    counts = f"{len(recordings) - len(called)} of {len(recordings)}"
    return "; ".join([f"repeated from recordings: {counts}", *(f"{name}: {how}" for name, how in called.items())])


def _sum(phases: dict[str, PhaseTime]) -> PhaseTime:
    seconds, floor = sum(phase.median for phase in phases.values()), sum(phase.floor for phase in phases.values())
    return PhaseTime(Measurement(seconds, seconds, seconds), floor)


def _heads(times: StepTimes, rank: int, *, floors: bool) -> list[str]:
    name = f"rank {rank}" + (" (slowest)" if rank == times.slowest and len(times.ranks) > 1 else "")
    return [name, "range", "floor", "x"] if floors else [name, "range"]


def _cells(phase: PhaseTime, *, floors: bool) -> list[str]:
    seconds, span = phase.seconds, ""
    if seconds is not None and seconds.least < seconds.most:
        span = f"{seconds.least * 1e3:.3f}-{seconds.most * 1e3:.3f}"
    cells = [f"{phase.median * 1e3:.3f}", span]
    if floors:
        ratio = f"{phase.median / phase.floor:.2f}" if phase.floor else ""
        cells += [f"{phase.floor * 1e3:.3f}" if phase.floor else "", ratio]
    return cells


def as_json(times: StepTimes) -> str:
    """Format the times as one line of JSON. Not collective."""
    document: dict[str, Any] = {
        "benchmark": "step",
        "training": times.described,
        "steps": times.steps,
        "seconds": asdict(times.plain),
        "seconds_watched": asdict(times.watched),
        "slowest": times.slowest,
        "recordings": times.recordings,
        "ranks": [
            {"rank": rank, **times.coordinates[rank], "phases": {name: asdict(phase) for name, phase in phases.items()}}
            for rank, phases in enumerate(times.ranks)
        ],
    }
    return json.dumps(document, allow_nan=False)
