"""The events that trainings write, on threads of this process and over MPI."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import NonFiniteError, RemoteError
from mpizero.testing import parallel_assert, run_in_threads
from mpizero.train import recorder
from mpizero.train.events import read_run
from mpizero.train.run_folder import RunFolder, RunFolderError

#: Parts of a rank's memory that a plan of a run has.
PLANNED = ("parameters", "gradients", "optimizer state", "buffers", "exchange buffers")


def samples(bad=()):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 6)).astype(np.float32)
    x[list(bad)] = np.inf
    return mz.data.ArraySource(x, rng.integers(0, 3, 64))


def trainer(folder, comm="self", *, source=None, bad_steps=None, pipeline=1, **settings):
    given = {} if bad_steps is None else {"bad_steps": bad_steps}
    mesh, config = mz.Mesh(comm, pipeline=pipeline), mz.Config(micro_batch=2, **given)
    chosen = {"steps": 9, "global_batch": 16, "every": 4, "progress": False, "run": folder, **settings}
    model, optimizer = mz.nn.MLP(6, [8, 8, 8], 3), mz.AdamW(1e-2)
    return mz.Trainer(model, source or samples(), config, mesh=mesh, optimizer=optimizer, **chosen)


class Stop(mz.Callback):
    """Asks for a stop after a step, as a signal does."""

    def on_step(self, trainer, report):
        if trainer.step == 5 and trainer.rank == trainer.world_size - 1:
            trainer._loop.stop.listen(lambda: "a test")


@pytest.fixture(scope="module")
def stopped_and_resumed(tmp_path_factory):
    """The records of a run of 2 stages x 2 replicas, asked to stop and resumed on one rank, and its result."""
    folder = tmp_path_factory.mktemp("run")

    def work(comm):
        layout = {"pipeline": 2, "strategy": "zero1", "asynchronous": True}
        with trainer(folder, comm, callbacks=[Stop()], **layout) as one, pytest.raises(mz.Preempted):
            one.fit()

    run_in_threads(4, work)
    with trainer(folder) as one:
        result = one.resume()
    return read_run(folder), result


def test_every_visit_tells_what_trains_where(stopped_and_resumed):
    run, result = stopped_and_resumed
    first, second = (visit.start for visit in run.sessions)
    assert (first.step, first.steps, first.ranks, first.strategy) == (0, 9, 4, "zero1")
    assert (second.step, second.ranks, second.strategy) == (6, 1, "zero2")
    assert first.parameter_count == result.parameter_count
    assert (first.nodes, len(first.hosts)) == ([0] * 4, 1)
    assert (first.coordinates["pipeline"], first.coordinates["data"]) == ([0, 0, 1, 1], [0, 1, 0, 1])
    layout = {"pipeline": 2, "data": 2, "schedule": "1f1b", "zero_stage": 1, "grains": 8, "grain_size": 2}
    assert layout.items() <= first.layout.items()
    assert [chunk["stage"] for chunk in first.layout["chunks"]] == [0, 1]
    assert first.config["train"]["global_batch"] == 16
    assert first.config["optimizer"]["name"] == "AdamW"
    assert first.versions["numpy"] == np.__version__
    assert {"mpi", "hdf5", "blas"} <= first.versions.keys()
    assert first.machine["cores"] >= 1


def test_the_plan_of_every_rank_is_what_is_counted_then(stopped_and_resumed):
    for visit in stopped_and_resumed[0].sessions:
        counted, planned = visit.memory.counted, visit.start.planned
        assert visit.start.not_planned == ""
        assert {part: planned.get(part) for part in PLANNED} == {part: counted.get(part) for part in PLANNED}
        assert visit.memory.step == visit.start.step + 1
        assert all(size > 1e6 for size in visit.memory.resident)


def test_the_phases_of_every_rank_add_up_to_its_step(stopped_and_resumed):
    first, second = (visit.phases for visit in stopped_and_resumed[0].sessions)
    (traced,) = first
    assert (traced.step, second) == (recorder.FIRST_TRACED, ())  # the second session has but three steps
    assert {"forward", "backward", "optimizer", "waiting"} <= traced.phases.keys()
    for rank, seconds in enumerate(traced.seconds):
        assert math.isclose(sum(phase[rank] for phase in traced.phases.values()), seconds, abs_tol=1e-5)
    assert len(traced.reading) == 4


def test_the_timetable_has_every_instruction_as_planned_and_as_measured(stopped_and_resumed):
    (timetable,) = stopped_and_resumed[0].sessions[0].timetables
    assert (timetable.schedule, timetable.costs) == ("1f1b", "operations")
    planned, measured = ({cell[:4] for cell in cells} for cells in (timetable.planned, timetable.measured))
    assert planned == measured
    assert len(measured) == len(timetable.measured) == 2 * 2 * 4  # stages, passes, micro-batches of a replica
    forward = [cell.end - cell.start for cell in timetable.planned if cell.work == "forward"]
    assert sum(forward) / len(forward) == pytest.approx(1, abs=1e-3)
    cells = {cell[:4]: cell for cell in timetable.measured}
    for micro in range(4):
        assert cells[1, 1, micro, "forward"].start >= cells[0, 0, micro, "forward"].start
        assert cells[0, 0, micro, "backward"].end >= cells[1, 1, micro, "backward"].start


def test_checkpoints_and_ends_are_told(stopped_and_resumed):
    run, result = stopped_and_resumed
    first, second = run.sessions
    told = [(one.step, one.path, one.beside) for visit in run.sessions for one in visit.checkpoints]
    assert told == [(step, f"checkpoints/step_{step:08d}", step == 4) for step in (4, 6, 8, 9)]
    kept = run.folder / told[-1][1]
    assert second.checkpoints[-1].bytes == sum(file.stat().st_size for file in kept.iterdir())
    assert (first.end.reason, first.end.message, first.end.step) == ("stopped", "a test", 6)
    assert (second.end.reason, second.end.step, second.end.loss) == ("done", 9, result.loss)
    assert second.end.parameters_sha256 == run.result["parameters_sha256"] == result.parameters_sha256
    assert [line["step"] for line in run.steps] == list(range(1, 10))


def test_a_traced_step_changes_no_bit(stopped_and_resumed, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "FIRST_TRACED", 100)
    with trainer(tmp_path) as one:
        assert one.fit().parameters_sha256 == stopped_and_resumed[1].parameters_sha256
    assert read_run(tmp_path).sessions[0].phases == ()


def test_a_skipped_step_tells_rank_and_tensor_before_the_error_that_ends_the_run(tmp_path):
    def work(comm):
        with trainer(tmp_path, comm, source=samples(range(64)), bad_steps=mz.BadSteps(limit=2)) as one:
            one.fit()

    with pytest.raises(NonFiniteError):
        run_in_threads(2, work)
    (visit,) = read_run(tmp_path).sessions
    assert [one.step for one in visit.skipped] == [1, 2]
    assert visit.skipped[0].found[0]["rank"] == 0
    assert visit.skipped[0].found[0].keys() == {"rank", "tensor", "start", "stop"}
    assert (visit.end.reason, visit.end.error, visit.end.step) == ("failed", "NonFiniteError", 2)
    assert "skipped 2 steps in a row" in visit.end.message


def test_an_event_that_cannot_be_written_ends_the_run_on_every_rank(tmp_path, monkeypatch):
    write, errors = RunFolder.write_event, []

    def refuse(folder, event):
        if event["kind"] == "phases":
            raise RunFolderError(f"run folder {folder.root}: events cannot be written: no space left")
        write(folder, event)

    monkeypatch.setattr(RunFolder, "write_event", refuse)

    def work(comm):
        try:
            with trainer(tmp_path, comm, every=0) as one:
                one.fit()
        except (RunFolderError, RemoteError) as error:
            errors.append((comm.rank, type(error)))
            raise

    with pytest.raises((RunFolderError, RemoteError), match="no space left"):
        run_in_threads(2, work)
    assert sorted(errors, key=str) == [(0, RunFolderError), (1, RemoteError)]
    assert read_run(tmp_path).sessions[0].end.error == "RunFolderError"
    assert not (tmp_path / "run_complete").exists()


@pytest.mark.mpi
def test_processes_tell_where_their_time_goes(world, tmp_path):
    shared = Path(world.broadcast_object(str(tmp_path)))
    with trainer(shared, world, steps=4, every=0, strategy="zero3") as one:
        one.fit()
    (visit,) = read_run(shared).sessions
    (traced,) = visit.phases
    sums = np.sum(list(traced.phases.values()), axis=0)
    parallel_assert(world, [one.kind for one in visit.events] == ["start", "memory", "phases", "checkpoint", "end"])
    parallel_assert(world, np.allclose(sums, traced.seconds, atol=1e-5), f"{sums} {traced.seconds}")
    parallel_assert(world, visit.start.ranks == len(visit.memory.resident) == world.size)


def test_a_stop_that_has_saved_is_no_failure_where_its_event_cannot_be_written(tmp_path, monkeypatch):
    write = recorder.RunFolder.write_event

    def full(folder, event):
        if event["kind"] == "end":
            raise recorder.RunFolderError("no space left on device")
        write(folder, event)

    monkeypatch.setattr(recorder.RunFolder, "write_event", full)
    with trainer(tmp_path, callbacks=[Stop()]) as one, pytest.raises(mz.Preempted):
        one.fit()
    monkeypatch.undo()
    with trainer(tmp_path) as one:
        assert one.resume().steps == 9


def test_a_resume_tells_how_many_steps_are_done_again(tmp_path):
    class Fault(mz.Callback):
        def on_step(self, trainer, report):
            if trainer.step == 7:
                raise RuntimeError("killed")

    with trainer(tmp_path, callbacks=[Fault()]) as one, pytest.raises(RuntimeError):
        one.fit()
    with trainer(tmp_path) as one:
        one.resume()
    run = read_run(tmp_path)
    assert [visit.start.superseded for visit in run.sessions] == [0, 2]
    assert [line["step"] for line in run.superseded] == [5, 6]
