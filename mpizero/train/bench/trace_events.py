"""Write traced steps in the JSON trace-event format that Perfetto and chrome://tracing open, one row a rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpizero.comm.communicator import MESSAGE
from mpizero.sharding.diagnostics import PhaseSpan, StepSpans, waited, waits

_MICROSECONDS = 1e6


def write_trace(path: str, ranks: Sequence[Sequence[StepSpans]], places: Sequence[Mapping[str, int]]) -> None:
    """Write a trace of all traced steps of all ranks to a file.

    Parameters
    ----------
    path : str
        The file to write; an existing file is replaced.
    ranks : sequence of sequences of StepSpans
        The traced steps of every rank, with times in seconds of rank 0's clock.
    places : sequence of mappings
        For every rank, its coordinates on the axes of the process grid, by name of the axis.
    """
    events = [*_rows(places), *_events(ranks)]
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")


def _rows(places: Sequence[Mapping[str, int]]) -> Iterator[dict[str, Any]]:
    """Yield the events that name the trace's rows, one row a rank, in the order of the ranks."""
    yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "mpizero"}}
    sizes = {axis: max(place[axis] for place in places) for axis in places[0]}
    for rank, place in enumerate(places):
        here = ", ".join(f"{axis} {number}" for axis, number in place.items() if sizes[axis])
        name = f"rank {rank}" + (f" ({here})" if here else "")
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}}


def _events(ranks: Sequence[Sequence[StepSpans]]) -> Iterator[dict[str, Any]]:
    began = min(step.start for steps in ranks for step in steps)
    latest = waits(ranks)
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            yield _event(rank, f"step {number}", "step", (step.start - began, step.stop - began), {})
            for mark in step.spans:
                times = (mark.start - began, mark.stop - began)
                more = {"waited_us": waited(mark, latest) * _MICROSECONDS} if mark.phase == MESSAGE else {}
                yield _event(rank, _title(mark), mark.phase, times, more)


def _title(mark: PhaseSpan) -> str:
    if mark.phase == MESSAGE or not mark.name:
        return mark.name or mark.phase
    return mark.name if mark.phase == "schedule" else f"{mark.phase}: {mark.name}"


def _event(rank: int, name: str, phase: str, times: tuple[float, float], more: Mapping[str, float]) -> dict[str, Any]:
    start, stop = (seconds * _MICROSECONDS for seconds in times)
    event = {"ph": "X", "pid": 0, "tid": rank, "name": name, "cat": phase, "ts": start, "dur": stop - start}
    return {**event, "args": dict(more)} if more else event
