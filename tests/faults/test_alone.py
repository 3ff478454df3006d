"""A rank that makes a model alone waits for nobody for ever: the construction belongs to the supervised life.

Every test starts mpiexec itself; see jobs.py for other launchers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.jobs import SOON, launchers, run_job

PROGRAM = Path(__file__).with_name("programs") / "alone_program.py"

if not launchers():
    pytest.skip("no mpiexec beside the interpreter or on PATH", allow_module_level=True)


@pytest.fixture
def job(launcher, tmp_path):
    def run(kind, ranks=3, timeout=30.0):
        return run_job(launcher, tmp_path, [PROGRAM, kind, tmp_path, timeout], ranks)

    return run


@pytest.mark.parametrize("kind", ["end", "exit", "late"])
def test_ranks_that_end_while_one_makes_a_model_end_the_job_soon(job, kind):
    ended = job(kind)
    assert ended.status == 70, ended.err
    assert ended.seconds < 2 * SOON
    assert len(ended.said) == 1, ended.err
    assert re.search(
        r"left early: the program has ended here, but rank 0 is making the communicator 'world' with it at "
        r"alone_program.py:\d+ in main",
        ended.said[0],
    )


@pytest.mark.parametrize("kind", ["before_mpi", "before_mpi_3"])
def test_ranks_that_end_before_they_start_mpi_end_the_job_that_would_wait_for_them_there(job, kind):
    ended = job(kind)
    assert ended.status in ((70,) if kind == "before_mpi" else (70, 3)), ended.err
    assert ended.seconds < 2 * SOON
    text = r"the program has ended here, but rank \d starts MPI, which takes all ranks, at alone_program.py:\d+ in "
    assert ended.status == 3 or (len(ended.said) == 1 and re.search(text, ended.said[0])), ended.err


@pytest.mark.parametrize(
    ("kind", "doing"), [("work", "at work"), ("barrier", "in Barrier of COMM_WORLD"), ("part", "at work")]
)
def test_the_timeout_counts_from_the_construction_and_tells_where_the_others_are(job, kind, doing):
    ended = job(kind, timeout=2.0)
    assert ended.status == 76, ended.err
    report = "\n".join(ended.said)
    missing = "rank 2" if kind == "part" else "ranks 1-2"
    assert re.search(
        rf"stuck: making the communicator 'world' has lasted .* \(timeout 2 s\): {missing} not in it", report
    )
    assert re.search(r"rank 0: in making the communicator 'world' for .* at alone_program.py:\d+ in main", report)
    assert re.search(rf"rank 2: {doing} at alone_program.py:\d+ in ", report)


def test_a_rank_that_fails_before_it_makes_its_model_ends_the_job_at_once(job):
    ended = job("raise")
    assert ended.status == 70, ended.err
    assert ended.err.count("Traceback") == 1
    assert ended.said[-1].endswith("ValueError: planted")


def test_a_rank_that_never_had_mpizero_is_missed_after_the_timeout(job):
    ended = job("stranger", timeout=2.0)
    assert ended.status != 0
    assert "ValueError: planted" in ended.err
    if ended.status == 76:  # else the launcher has noticed that a process has failed
        assert "nothing known of ranks 1-2 (without mpizero, or on another node)" in "\n".join(ended.said)
