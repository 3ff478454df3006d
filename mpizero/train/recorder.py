"""Record the events of a run in its folder: start of a session, memory, durations of phases, checkpoints, the end.

:class:`RunRecorder` writes the events. For the durations it traces single steps of the running training
(:class:`StepTracer`). Beside the measured memory of each rank and the measured timetable of the pipeline it records the
planned ones (:class:`SessionPlan`).
"""

from __future__ import annotations

import os
import socket
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.communicator import MESSAGE, TimeSpan
from mpizero.comm.mesh import group_buffers
from mpizero.data import Source
from mpizero.errors import ConfigError
from mpizero.layout import AXES, Costs, Grains, Instruction, Simulation, simulate
from mpizero.layout.schedules import FORWARD
from mpizero.sharding import StepReport
from mpizero.sharding.config import placement
from mpizero.sharding.diagnostics import Call, StepSpans, clock_offset, entered, leaders, phases_of, spans_of, traced
from mpizero.sharding.partition import ParallelLayout
from mpizero.train.events import (
    CheckpointWrite,
    MemoryCount,
    PhaseSeconds,
    PipelineCell,
    PipelineTimetable,
    RunEvent,
    SessionEnd,
    SessionStart,
    SkippedStep,
)
from mpizero.train.machine import library_versions, machine, peak_resident
from mpizero.train.run_folder import RunFolder, RunFolderError, SavedCheckpoint
from mpizero.train.setup import RunSetup, TrainingResult, finite
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.tools.plan.plan import TrainingPlan


#: Number, within a session, of the first traced step: by then kernels are compiled, and memory has been touched.
FIRST_TRACED = 4
#: Least distance of two traced steps, and approximate largest number of traced steps of a run.
APART, MOST_TRACED = 100, 20


class RunRecorder:
    """Record the events of one session (one start or resume) of a run; rank 0 writes them.

    Methods are collective over the run's ranks unless they say otherwise. If an event cannot be written, methods raise
    RunFolderError on rank 0, and RemoteError on the other ranks.

    Parameters
    ----------
    setup : RunSetup
        Model, data and settings of the run.
    folder : RunFolder
        Folder of the run, open on rank 0.
    comm : Communicator
        The ranks of the job; used between steps only.
    environment : mapping
        Environment variables, of which ``SLURM_JOB_ID`` is recorded.
    """

    def __init__(self, setup: RunSetup, folder: RunFolder, comm: Communicator, environment: Mapping[str, str]) -> None:
        self._setup, self._folder, self._comm, self._environment = setup, folder, comm, environment
        self._session, self._begun, self._first = -1, time.monotonic(), 0
        self._apart = max(APART, -(-setup.loop.steps // MOST_TRACED))
        self._tracer: StepTracer | None = None
        self._plan: SessionPlan | None = None

    def begin(self, step: int, superseded: int) -> None:
        """Record the start of a session after ``step`` steps.

        ``superseded`` is the number of steps that this session repeats; only its value on rank 0 is used.
        """
        setup, comm, engine = self._setup, self._comm, self._setup.model._engine
        self._first = step
        hosts = comm.allgather_object(socket.gethostname(), "record")
        names = list(dict.fromkeys(hosts))
        nodes = [names.index(host) for host in hosts]
        plan = SessionPlan(setup.model, setup.strategy, setup.loop.global_batch, nodes, setup.source)
        planned = comm.allgather_object((engine.grid.coordinates._asdict(), *plan.memory(comm.rank)), "record")
        with all_ranks(comm):
            if comm.rank == 0:
                self._session = self._folder.continue_events()
                self._put(
                    SessionStart(
                        step=step,
                        steps=setup.loop.steps,
                        superseded=superseded,
                        described=setup.described(),
                        model=type(setup.model.wrapped_model).__name__,
                        strategy=setup.strategy,
                        parameter_count=setup.model.parameter_count,
                        unit="tokens" if setup.record.task == "language" else "samples",
                        ranks=comm.size,
                        nodes=nodes,
                        hosts=names,
                        coordinates=_by_rank([coordinates for coordinates, *_ in planned]),
                        layout=self._layout(),
                        config={"train": asdict(setup.loop), "checkpoint": asdict(setup.checkpoints)}
                        | setup.record.settings,
                        versions=library_versions(),
                        machine=machine(
                            setup.model.config.threads,
                            setup.model.config.device,
                            self._environment.get("SLURM_JOB_ID", ""),
                            engine.bits,
                        ),
                        planned=_by_rank([host for _, host, *_ in planned]),
                        planned_device=_by_rank([device for *_, device, _ in planned]),
                        not_planned=next((why for *_, why in planned if why), ""),
                    )
                )
        self._plan, self._tracer = plan, StepTracer(engine, comm)

    def traces(self, step: int) -> bool:
        """Return whether the step with the number ``step`` is traced; equal on all ranks. Not collective."""
        done = step - self._first - FIRST_TRACED
        return done >= 0 and done % self._apart == 0

    def tracing(self, step: int) -> AbstractContextManager[None]:
        """Return a context manager that traces the training step with the number ``step`` if :meth:`traces` is true.

        Not collective; the training step inside of it is.
        """
        if not self.traces(step) or self._tracer is None:
            return nullcontext()
        return self._tracer.step()

    def stepped(self, step: int, report: StepReport, reading: float) -> None:
        """Record, after a step, whether it was skipped, memory after the first step, and durations of a traced step.

        ``reading`` is the number of seconds in which the samples of the step were read. Most steps have no event; then
        no message is sent.
        """
        if report.skipped is not None:
            non_finite = [
                {"rank": one.rank, "tensor": one.tensor, "start": one.start, "stop": one.stop}
                for one in report.non_finite
            ]
            scale, following = report.loss_scale, report.next_loss_scale
            self._record(SkippedStep(step=step, found=non_finite, loss_scale=scale, next_loss_scale=following))
        if step == self._first + 1:
            self._record(self._memory(step))
        if self.traces(step):
            self._record_phases(step, reading)

    def saved(self, saved: SavedCheckpoint) -> None:
        """Record the checkpoint ``saved``, which is complete."""
        with all_ranks(self._comm):
            if self._comm.rank == 0:
                path, seconds = Path(saved.path), round(saved.seconds, 6)
                try:
                    nbytes = sum(file.stat().st_size for file in path.iterdir())
                except OSError:
                    self._folder.check()  # names the run's folder if that has gone
                    raise
                where = os.path.relpath(path, self._folder.root)
                self._put(CheckpointWrite(**saved._asdict() | {"path": where, "bytes": nbytes, "seconds": seconds}))

    def done(self, result: TrainingResult) -> None:
        """Record on rank 0 that the run is complete. Not collective."""
        digest, message = result.parameters_sha256, result.stopped
        self._end(
            SessionEnd(step=result.steps, reason="done", message=message, loss=result.loss, parameters_sha256=digest)
        )

    def stopped(self, step: int, loss: float | None, reason: str) -> None:
        """Record on rank 0 that the run was asked to stop after ``step``; ignore errors of writing. Not collective."""
        with suppress(RunFolderError):  # the state is saved: a full disk must not make a failure of it
            self._end(SessionEnd(step=step, reason="stopped", message=reason, loss=finite(loss)))

    def failed(self, step: int, loss: float | None, error: BaseException) -> None:
        """Record on rank 0 that ``error`` has ended the session; ignore errors of writing. Not collective."""
        message, kind = str(error), type(error).__name__
        with suppress(Exception):  # the job ends with the error itself
            self._end(SessionEnd(step=step, reason="failed", message=message, error=kind, loss=finite(loss)))

    # ------------------------------------------------------------------ what is recorded

    def _end(self, event: SessionEnd) -> None:
        if self._comm.rank == 0 and self._session >= 0:
            self._put(replace(event, seconds=round(time.monotonic() - self._begun, 3)))

    def _record(self, event: RunEvent) -> None:
        with all_ranks(self._comm):
            if self._comm.rank == 0:
                self._put(event)

    def _put(self, event: RunEvent) -> None:
        self._folder.write_event(replace(event, time=round(time.time(), 3), visit=self._session).to_dict())

    def _layout(self) -> dict[str, Any]:
        setup, engine = self._setup, self._setup.model._engine
        metadata, parallel_layout = setup.model.metadata(), engine.partitioned.parallel_layout
        grains = Grains(setup.loop.global_batch, setup.model.grain_size(setup.loop.global_batch))
        return setup.layout() | {
            "order": [axis for axis in engine.grid.axes.order if axis in AXES],
            "virtual_stages": parallel_layout.virtual_stages if engine.grid.axes.pipeline > 1 else 1,
            "zero_stage": metadata.zero_stage,
            "global_batch": setup.loop.global_batch,
            "grains": grains.count,
            "grain_size": grains.size,
            "accumulate": setup.model.config.accumulate,
            "tiles": metadata.tiles,
            "ranks_per_node": metadata.ranks_per_node,
            "shard_nodes": engine.mesh.shard_nodes,
            "exactness": metadata.exactness,
            "chunks": [
                {"stage": stage, "blocks": list(blocks)}
                for stage, blocks in zip(parallel_layout.chunks, engine.partitioned.cuts, strict=True)
            ],
        }

    def _memory(self, step: int) -> MemoryCount:
        engine = self._setup.model._engine
        counted = {part: size for part, size in engine.memory.kinds().items() if size}
        counted |= {part: size for part, size in group_buffers(engine.grid).items() if size}
        local = (counted, engine.compute_device.allocated_bytes(), engine.memory.peak_bytes, peak_resident())
        gathered = self._comm.allgather_object(local, "record")
        return MemoryCount(
            step=step,
            counted=_by_rank([host for host, *_ in gathered]),
            device=_by_rank([device for _, device, *_ in gathered]),
            peak=[int(peak) for *_, peak, _ in gathered],
            resident=[int(size) for *_, size in gathered],
        )

    def _record_phases(self, step: int, reading: float) -> None:
        """Record the durations of the phases of a traced step, and the timetable of a pipeline."""
        assert self._tracer is not None
        ranks, waits = self._tracer.collect(), self._comm.allgather_object(reading, "record")
        with all_ranks(self._comm):
            if self._comm.rank == 0:
                self._put(
                    PhaseSeconds(
                        step=step,
                        seconds=[_short(rank.stop - rank.start) for rank in ranks],
                        reading=[_short(seconds) for seconds in waits],
                        phases=_by_rank([{name: _short(t) for name, t in rank.phases.items()} for rank in ranks]),
                    )
                )
                if (timetable := self._timetable(step, ranks)) is not None:
                    self._put(timetable)

    def _timetable(self, step: int, ranks: Sequence[TracedStep]) -> PipelineTimetable | None:
        assert self._plan is not None
        engine, first = self._setup.model._engine, min(rank.start for rank in ranks)
        first_replica = [
            rank
            for number, rank in enumerate(ranks)
            if {engine.grid.axes.coordinates(number)._asdict()[axis] for axis in AXES if axis != "pipeline"} == {0}
        ]
        measured = [
            cell._replace(start=_short(cell.start - first), end=_short(cell.end - first))
            for rank in first_replica
            for cell in rank.cells
        ]
        if not measured:
            return None
        costs, planned = self._plan.timetable(engine.runner, 1 + max(cell.micro for cell in measured))
        schedule = engine.partitioned.parallel_layout.schedule
        return PipelineTimetable(step=step, schedule=schedule, costs=costs, planned=planned, measured=measured)


def _short(seconds: float) -> float:
    return round(seconds, 7)


def _by_rank(ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Convert dicts, one for each rank, to one dict of lists by rank; a list has 0 for a rank without that name."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: [rank.get(name, 0) for rank in ranks] for name in names}


class TracedStep(NamedTuple):
    """Hold the durations of the phases of a step on one rank; times are in seconds of rank 0's clock.

    Attributes
    ----------
    start, stop : float
        Times at which the step began and ended.
    phases : dict of str to float
        Duration of each phase; the sum of all is the duration of the step.
    cells : list of PipelineCell
        The instructions that the rank's pipeline stage has executed; empty without a pipeline.
    """

    start: float
    stop: float
    phases: dict[str, float]
    cells: list[PipelineCell]


class StepTracer:
    """Trace training steps of a model; messages about them are sent by ``comm``.

    Construction is collective over the model's ranks.
    """

    def __init__(self, engine: Any, comm: Communicator) -> None:
        grid = engine.grid
        several = [c for c in (grid.world, *grid.communicators) if c.size > 1]
        self._engine, self._comm, self._first = engine, comm, leaders(several, grid.world)
        self._taken: tuple[float, float, list[TimeSpan]] = (0.0, 0.0, [])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Trace the training step in the ``with`` block. Not collective; the training step is."""
        with traced(self._engine) as timeline:
            start = time.monotonic()
            yield
            stop = time.monotonic()
        self._taken = (start, stop, timeline.take())

    def collect(self) -> list[TracedStep]:
        """Return the durations of the phases of the last traced step on every rank. Collective."""
        start, stop, spans = self._taken
        offset = clock_offset(self._comm)
        local_spans = StepSpans(start + offset, stop + offset, spans_of(spans, offset, self._first))
        phases = phases_of(local_spans, self._latest(local_spans))
        cells = pipeline_cells(spans, self._engine.grid.coordinates.pipeline, offset)
        traced = TracedStep(
            local_spans.start, local_spans.stop, {name: taken for name, taken in phases.items() if taken}, cells
        )
        return list(self._comm.allgather_object(traced, "step tracer"))

    def _latest(self, local_spans: StepSpans) -> dict[Call, float]:
        """Return, for every collective call of this rank, the time at which the last rank entered it. Collective."""
        latest = entered(local_spans)
        groups: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for (name, leader, number), start in latest.items():
            groups.setdefault((name, leader), []).append((number, start))
        packed = {
            group: (np.array([n for n, _ in calls]), np.array([s for _, s in calls])) for group, calls in groups.items()
        }
        gathered: Sequence[dict[tuple[str, int], tuple[Array, Array]]] = self._comm.allgather_object(packed, "tracer")
        for theirs in gathered:
            for group, (numbers, starts) in theirs.items():
                if group not in groups:
                    continue
                for number, start in zip(numbers.tolist(), starts.tolist(), strict=True):
                    call = (*group, number)
                    if start > latest.get(call, start):
                        latest[call] = start
        return latest


def pipeline_cells(spans: Sequence[TimeSpan], stage: int, offset: float) -> list[PipelineCell]:
    """Return the traced instructions of a stage, each without the time in which it waits for the messages it needs.

    ``offset``, in seconds, is added to all times.
    """
    messages = (s for s in spans if s.phase == MESSAGE and s.detail.operation == "irecv")
    received = sorted(s.stop for s in messages if s.detail.communicator == "pipeline")
    cells = []
    for phase, detail, start, stop in spans:
        if phase == "schedule" and isinstance(detail, Instruction):
            index = bisect_left(received, stop)
            begun = max(start, received[index - 1]) if index else start
            cells.append(PipelineCell(stage, detail.chunk, detail.micro, detail.kind, begun + offset, stop + offset))
    return cells


class SessionPlan:
    """Plan the memory of each rank of a run, and the timetable of its pipeline. Not collective.

    For the plan no block of the model is executed, because that could take as long as many steps, and would call user
    code unexpectedly. So the plan has the memory that the library allocates, but lacks that of activations, which the
    plan of ``mpizero plan`` includes.

    Parameters
    ----------
    model : Model
        The sharded model with its optimizer.
    strategy : str
        Name of the strategy.
    global_batch : int
        Number of samples in a step.
    nodes : sequence of int
        For each rank, the number of its node.
    source : Source or OnlineSource
        The training samples. One sample is read if the plan depends on its shape.
    """

    def __init__(self, model: Any, strategy: str, global_batch: int, nodes: Sequence[int], source: Any) -> None:
        self._model, self._strategy, self._global_batch = model, strategy, global_batch
        self._nodes, self._source = nodes, source

    @cached_property
    def _training(self) -> TrainingPlan:
        from mpizero.tools.plan.plan import TrainingPlan  # a run without a folder records no plan

        config, parallel_layout = self._model.config, self._model._parallel_layout or ParallelLayout()
        together = self._nodes.count(0)
        if list(self._nodes) != [rank // together for rank in range(len(self._nodes))]:
            raise ConfigError("nodes have different numbers of ranks, or their ranks do not follow one another")
        x, y = np.zeros((1, 1)), np.zeros((1, 1))
        # The operations of stages and the bytes of shared samples depend on what a sample is.
        if (parallel_layout.pipeline > 1 or config.grain_assignment == "dynamic") and isinstance(self._source, Source):
            x, y = self._source.samples(np.arange(1))
        return TrainingPlan(
            model=self._model.wrapped_model,
            optimizer=self._model.optimizer.wrapped_optimizer,
            config=config,
            mesh=self._model.mesh,
            loss_scale=config.loss_scale(None) is not None,
            row=placement(self._strategy),
            parallel_layout=parallel_layout,
            ranks=len(self._nodes),
            ranks_per_node=together,
            global_batch=self._global_batch,
            x=x,
            y=y,
            tries=False,
        )

    def memory(self, rank: int) -> tuple[dict[str, int], dict[str, int], str]:
        """Return planned bytes by name on a rank's host and GPU, and an error message if there is no plan, else ""."""
        try:
            host, device = self._training.allocated(rank)
        except Exception as error:  # of a model that a plan cannot read: no reason not to train it
            return {}, {}, f"{type(error).__name__}: {error}"
        return {part: size.per_rank for part, size in host.items()}, device, ""

    def timetable(self, runner: Any, micro_batches: int) -> tuple[str, list[PipelineCell]]:
        """Return the planned timetable of a pipeline: ``costs`` and ``planned`` of :class:`PipelineTimetable`.

        ``runner`` executes the pipeline; ``micro_batches`` is the number of micro-batches of the first replica.
        """
        costs, simulation = "operations", None
        with suppress(Exception):  # as above
            simulation = self._training.simulation if self._training.micro_batches == micro_batches else None
        if simulation is None or not simulation.makespan:
            schedule = runner.schedule(micro_batches)
            costs, simulation = "equal", simulate(schedule, Costs.uniform(schedule.chunks), present=micro_batches)
        return costs, _cells(simulation, micro_batches)


def _cells(simulation: Simulation, micro_batches: int) -> list[PipelineCell]:
    cells = [
        PipelineCell(stage, done.chunk, done.micro, done.kind, start, end)
        for stage, timed in enumerate(simulation.events)
        for done, start, end in timed
        if done.micro < micro_batches
    ]
    forward = [cell.end - cell.start for cell in cells if cell.work == FORWARD]
    unit = sum(forward) / len(forward) or 1.0
    return [cell._replace(start=round(cell.start / unit, 4), end=round(cell.end / unit, 4)) for cell in cells]
