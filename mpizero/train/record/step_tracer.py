"""Trace single steps of a running training, and tell where every rank's time went."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.communicator import MESSAGE, TimeSpan
from mpizero.layout import Instruction
from mpizero.sharding.diagnostics import Call, StepSpans, clock_offset, entered, leaders, phases_of, spans_of, traced
from mpizero.train.record.events import PipelineCell
from mpizero.types import Array


class TracedStep(NamedTuple):
    """Hold where the time of a step went on one rank; times are in seconds of rank 0's clock.

    Attributes
    ----------
    start, stop : float
        When the step began and ended.
    phases : dict of str to float
        Seconds by phase, which add up to those of the step.
    cells : list of PipelineCell
        The instructions of the rank's pipeline stage; empty without a pipeline.
    """

    start: float
    stop: float
    phases: dict[str, float]
    cells: list[PipelineCell]


class StepTracer:
    """Trace steps of a model. Construction is collective over its ranks, and messages are sent through ``comm``."""

    def __init__(self, engine: Any, comm: Communicator) -> None:
        grid = engine.grid
        several = [c for c in (grid.world, *grid.communicators) if c.size > 1]
        self._engine, self._comm, self._first = engine, comm, leaders(several, grid.world)
        self._taken: tuple[float, float, list[TimeSpan]] = (0.0, 0.0, [])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Trace the step of the ``with`` block. Not collective by itself."""
        with traced(self._engine) as timeline:
            start = time.monotonic()
            yield
            stop = time.monotonic()
        self._taken = (start, stop, timeline.take())

    def collect(self) -> list[TracedStep]:
        """Return where the time of the last traced step went on every rank. Collective."""
        start, stop, spans = self._taken
        offset = clock_offset(self._comm)
        own = StepSpans(start + offset, stop + offset, spans_of(spans, offset, self._first))
        phases = phases_of(own, self._latest(own))
        cells = pipeline_cells(spans, self._engine.grid.here.pipeline, offset)
        found = TracedStep(own.start, own.stop, {name: taken for name, taken in phases.items() if taken}, cells)
        return list(self._comm.allgather_object(found, "step tracer"))

    def _latest(self, own: StepSpans) -> dict[Call, float]:
        """Return, for every collective of this rank, the time at which the last rank entered it. Collective."""
        latest = entered(own)
        groups: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for (name, leader, number), start in latest.items():
            groups.setdefault((name, leader), []).append((number, start))
        packed = {
            group: (np.array([n for n, _ in calls]), np.array([s for _, s in calls])) for group, calls in groups.items()
        }
        everyone: Sequence[dict[tuple[str, int], tuple[Array, Array]]] = self._comm.allgather_object(packed, "tracer")
        for theirs in everyone:
            for group, (numbers, starts) in theirs.items():
                if group not in groups:
                    continue
                for number, start in zip(numbers.tolist(), starts.tolist(), strict=True):
                    call = (*group, number)
                    if start > latest.get(call, start):
                        latest[call] = start
        return latest


def pipeline_cells(spans: Sequence[TimeSpan], stage: int, offset: float) -> list[PipelineCell]:
    """Return the instructions of a stage; each begins when it has received what it needs from other stages."""
    messages = (s for s in spans if s.phase == MESSAGE and s.detail.operation == "irecv")
    received = sorted(s.stop for s in messages if s.detail.communicator == "pipeline")
    found = []
    for phase, detail, start, stop in spans:
        if phase == "schedule" and isinstance(detail, Instruction):
            place = bisect_left(received, stop)
            begun = max(start, received[place - 1]) if place else start
            found.append(PipelineCell(stage, detail.chunk, detail.micro, detail.kind, begun + offset, stop + offset))
    return found
