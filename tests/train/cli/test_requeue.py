"""`mpizero requeue`, which ends a batch script: what runs again, what does not, and why not.

Slurm's answers are planted here; scripts/test_slurm.sh asks a real Slurm.
"""

from __future__ import annotations

import os

import pytest

from mpizero.cli.main import main
from mpizero.comm.startup import one_process
from mpizero.errors import ConfigError
from mpizero.train import stopping
from mpizero.train.stopping import JobState


@pytest.fixture
def slurm(tmp_path, monkeypatch, capsys):
    """A job whose sessions end as a test says; each returns why the job is not put into the queue, or ""."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text('[model]\nname = "gpt"\n[data]\ntext = "stdlib"\n')

    class Slurm:
        name = ""
        folder, state, job, restarts, queued = tmp_path / "run", JobState("RUNNING", "None", 4000.0), "7", 0, 0

        def saved(self, step, checkpoints="run/checkpoints"):
            (tmp_path / checkpoints / f"step_{step:08d}").mkdir(parents=True)

        def ended(self, status, *arguments, config="config.toml"):
            monkeypatch.setenv("SLURM_JOB_ID", self.job)
            monkeypatch.setenv("SLURM_RESTART_COUNT", str(self.restarts))
            before = self.queued
            again = main(["requeue", str(status), *arguments, config], comm=one_process()) == 0
            assert again == (self.queued > before)
            self.restarts += again
            told = capsys.readouterr().err
            return told.partition("not requeued: ")[2].strip() if "not requeued" in told else ""

    found = Slurm()

    def requeue(job):
        assert job == (found.name or found.job)
        found.queued += 1

    monkeypatch.setattr(stopping, "state_of_job", lambda job: found.state)
    monkeypatch.setattr(stopping, "requeue", requeue)
    return found


def test_what_was_saved_runs_again_as_long_as_it_goes_on(slurm):
    for step in (20, 40, 60):
        slurm.saved(step)
        assert slurm.ended(75) == ""
    assert slurm.queued == 3
    assert slurm.ended(0) == ""
    assert slurm.queued == 3
    assert not (slurm.folder / stopping.NOTE).exists()


@pytest.mark.parametrize(("state", "status"), [("COMPLETING", 75), ("CANCELLED", 143), ("gone", 70)])
def test_a_job_that_was_cancelled_stays_so_whatever_its_ranks_could_save(slurm, state, status):
    slurm.saved(20)
    slurm.state = JobState(state, "None", 4000.0)
    assert f"the job is {state} for Slurm: it was cancelled" in slurm.ended(status)


def test_a_job_that_has_used_up_its_time_was_not_cancelled(slurm):
    slurm.saved(20)
    slurm.state = JobState("COMPLETING", "TimeLimit", 14400.0)
    assert slurm.ended(75) == ""


@pytest.mark.parametrize("folder", ["other/checkpoints", "other", "{}/elsewhere/checkpoints"])
def test_checkpoints_are_looked_for_where_the_training_has_saved_them(slurm, tmp_path, folder):
    folder = folder.format(tmp_path)
    for step in (20, 40, 60):
        slurm.saved(step, folder)
        assert slurm.ended(75, "--set", f"checkpoint.folder={folder}") == ""
    assert not slurm.folder.exists(), "nothing is left in a folder of another run"


def test_a_run_of_a_program_is_named_by_its_folder(slurm, tmp_path):
    for step in (20, 40):
        slurm.saved(step)
        assert slurm.ended(75, config="run") == ""
    assert slurm.ended(75, config="run") == "it has ended twice at the same checkpoint (step 40)"


def test_members_of_an_ensemble_go_on_if_one_of_them_does(slurm):
    slurm.saved(20, "run/member_0000/checkpoints")
    slurm.saved(10, "run/member_0001/checkpoints")
    assert slurm.ended(75) == ""
    slurm.saved(30, "run/member_0001/checkpoints")
    assert slurm.ended(75) == ""
    assert "ended twice at the same checkpoint" in slurm.ended(75)


def test_a_failure_runs_again_once_for_each_checkpoint(slurm):
    assert slurm.ended(137) == ""
    assert slurm.ended(137) == "it has ended twice at the same checkpoint (no checkpoint)"
    slurm.job, slurm.restarts = "8", 0  # submitted anew, when the cause was mended
    assert slurm.ended(137) == ""
    slurm.saved(20)
    assert slurm.ended(137) == ""
    slurm.saved(40)
    assert slurm.ended(75) == ""
    assert slurm.ended(137) == "", "the session before has ended well"
    assert "at the same checkpoint (step 40)" in slurm.ended(137)


@pytest.mark.parametrize(("steps", "used"), [((1, 2, 3), 600.0), ((300, 800, 2000), 60.0)])
def test_visits_that_are_asked_to_stop_at_once_do_not_go_on_for_ever(slurm, steps, used):
    """As where the signal comes before the end of the job by as much as the job is long."""
    slurm.state = JobState("RUNNING", "None", used)
    for step in steps[:2]:
        slurm.saved(step)
        assert slurm.ended(75) == ""
    slurm.saved(steps[2])
    assert "3 sessions in a row were asked to stop at once: the job's time (Slurm: --time)" in slurm.ended(75)


def test_a_visit_that_goes_on_makes_up_for_those_that_did_not(slurm):
    for step in (1, 2, 20, 21, 22):
        slurm.saved(step)
        assert slurm.ended(75) == ""


@pytest.mark.parametrize("status", [65, 78])
def test_bad_input_does_not_run_again_even_if_it_cannot_be_read(slurm, status):
    assert slurm.ended(status, config="none.toml") == "it would fail again"


def test_a_step_to_go_back_to_a_limit_of_restarts_and_a_stop_by_file_are_ends(slurm):
    slurm.saved(20)
    slurm.restarts = 3
    assert "submit without it" in slurm.ended(75, "--resume-from", "10")
    assert slurm.ended(75, "--max-restarts", "3") == "3 restarts are the limit"
    (slurm.folder / "STOPPED").touch()
    assert "run/STOP" in slurm.ended(75)


def test_a_job_of_another_batch_system_is_only_decided_about(slurm, tmp_path, monkeypatch):
    """The batch script puts it into the queue; its restarts are counted here, under the name that it keeps."""

    def asked(job, *arguments):
        return main(["requeue", "75", "--job", job, *arguments, "config.toml"], comm=one_process())

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for step in (20, 40):
        slurm.saved(step)
        assert asked("9.1", "--max-restarts", "2") == 0
    slurm.saved(60)
    assert asked("9.1", "--max-restarts", "2") == 1, "2 restarts are the limit"
    assert asked("9.1") == 0
    assert asked("9.1") == 1, "no newer checkpoint"
    assert asked("9.2") == 0
    assert slurm.queued == 0


def test_a_task_of_an_array_is_not_the_whole_array(slurm, monkeypatch):
    """One of an array's tasks has the number of the array as its own, by which Slurm's commands mean all tasks."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    slurm.name = "7_2"
    slurm.saved(20)
    assert slurm.ended(75) == ""
    asked = []
    stopping.slurm_limit(dict(os.environ), lambda job: asked.append(job) or "1:00")
    assert asked == ["7_2"]


@pytest.mark.parametrize(
    "note",
    ["", "[]", '{"job": "7", "status": 75, "restarts": "a"}', '{"job": "7", "status": 75, "steps": [1]}', "[" * 100000],
)
def test_a_damaged_note_is_none(slurm, note):
    slurm.saved(20)
    (slurm.folder / stopping.NOTE).write_text(note)
    assert slurm.ended(137) == ""


def test_outside_of_a_job_there_is_nothing_to_put_into_the_queue(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set: .* needs --job NAME"):
        main(["requeue", "75", str(tmp_path)], comm=one_process())


def squeue(folder, line):
    (folder / "squeue").write_text(f"#!/bin/sh\n{line}\n")
    (folder / "squeue").chmod(0o755)


def test_a_slurm_that_does_not_answer_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="squeue: .*submit the job again"):
        stopping.state_of_job("7")
    squeue(tmp_path, "echo slurm_load_jobs error: Invalid job id >&2; exit 1")
    with pytest.raises(ConfigError, match="Invalid job id: submit the job again"):
        stopping.state_of_job("7")


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("RUNNING|None|1-00:00:07", JobState("RUNNING", "None", 86407.0)),
        ("COMPLETING|TimeLimit|1:01", JobState("COMPLETING", "TimeLimit", 61.0)),
        ("COMPLETING|None|INVALID", JobState("COMPLETING", "None")),
        ("", JobState("gone")),
    ],
)
def test_what_slurm_says_of_a_job(monkeypatch, tmp_path, answer, state):
    squeue(tmp_path, f"echo '{answer}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stopping.state_of_job("7") == state
