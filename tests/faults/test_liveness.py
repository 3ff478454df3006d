"""A job ends when a rank is missed, and never for being slow, stopped, partly done, or on a poor machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest

from tests.faults.jobs import pids

PROGRAM = "programs/liveness_program.py"
ALONE = "programs/alone_program.py"


def check_good(ended):
    assert (ended.status, ended.err) == (0, "")


def check_early(ended, reason):
    assert ended.status != 0, ended.err
    assert re.search(f"left early: the program has ended here, but {reason}", "\n".join(ended.said)), ended.err


# ---------------------------------------------------------------------------------------------- what cannot be had


def test_a_python_without_memory_files_sees_who_leaves(job):
    check_early(
        job("old_libc_and_a_rank_leaves"), r"rank 0 waits in barrier #\d+ 'gradients' .* at liveness_program.py"
    )


@pytest.mark.parametrize("kind", ["old_libc_and_nowhere_to_write", "one_rank_without_a_board"])
def test_what_only_helps_to_find_faults_ends_no_run(job, kind):
    ended = job(kind)
    assert ended.status == 0, ended.err
    lines = ended.err.splitlines()
    assert len(lines) <= 1, ended.err
    assert all(line.startswith("mpizero: stuck or missing ranks may not be noticed here: ") for line in lines)


# ---------------------------------------------------------------------------------------------- some of the ranks


def test_a_rank_that_leaves_one_of_overlapping_parts_is_missed_there(job):
    check_early(job("overlapping_parts", ranks=3), r"rank 1 waits in barrier #\d+ 'one more' of 'part'")


def test_a_stuck_model_on_some_of_the_ranks_ends_the_job_with_the_line_of_who_is_missing(job):
    ended = job("part_stalls", ranks=3)
    assert ended.status == 76, ended.err
    report = "\n".join(ended.said)
    assert re.search(r"stuck: \w+ #\d+ .*: rank 2 not in it", report), ended.err
    assert re.search(r"rank 2: at work at liveness_program.py:\d+ in part_stalls", report), ended.err
    assert "rank 0" not in re.sub(r"^.*?\] ", "", report, flags=re.MULTILINE)


def test_ranks_whose_model_is_done_may_leave_long_before_the_others(job):
    check_good(job("part_ends_first", ranks=5))


def test_bad_input_of_a_part_ends_the_job_with_one_line_and_its_status(job):
    ended = job("part_is_refused", ranks=4)
    assert ended.status == 78, ended.err
    (line,) = ended.said
    assert "ConfigError: planted (liveness_program.py:" in line


# ---------------------------------------------------------------------------------------------- the end of a program


@pytest.mark.parametrize("kind", ["other_program_at_the_end", "closed_doors"])
def test_a_rank_may_work_alone_at_the_end_for_as_long_as_it_likes(job, kind):
    check_good(job(kind))


def test_a_message_that_nobody_can_send_any_more_is_noticed(job):
    check_early(job("waits_for_a_message"), "rank 0 waits for a message at .*, and nobody is at work any more")


# ---------------------------------------------------------------------------------------------- a stopped job


def test_a_job_that_was_stopped_for_longer_than_its_timeout_goes_on(job, tmp_path):
    def stop(launcher):
        found = [*pids(tmp_path), launcher.pid]
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(9.0)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)
        time.sleep(1.0)
        (tmp_path / "finish").touch()

    ended = job("stopped_job", ranks=3, meanwhile=stop)  # Open MPI's launcher says that it hands on a signal
    assert (ended.status, ended.said) == (0, []), ended.err


# ---------------------------------------------------------------------------------------------- files


def test_a_disk_from_which_no_more_bytes_come_is_reported_after_the_timeout(job):
    ended = job("files", environment={"MPIZERO_FAULT": "save.write:1:10:sleep"})
    assert ended.status == 76, ended.err
    report = "\n".join(ended.said)
    assert re.search(r"stuck: allgather_object #\d+ 'checkpoint outcome' .*: rank 1 not in it", report), ended.err
    assert re.search(r"rank 1: writing .*saved.*, 32 bytes so far, the last .* s ago at ", report), ended.err


# ---------------------------------------------------------------------------------------------- one makes a model alone


@pytest.mark.parametrize(("kind", "ranks"), [("exit", 3), ("late", 2)])
def test_ranks_that_end_while_one_makes_a_model_end_the_job_soon(job, kind, ranks):
    ended = job(kind, 30.0, ranks=ranks, program=ALONE)
    assert ended.status == 70, ended.err
    assert len(ended.said) == 1, ended.err
    assert re.search(
        r"left early: the program has ended here, but rank 0 is making the communicator 'world' with it at "
        r"alone_program.py:\d+ in main",
        ended.said[0],
    )


def test_ranks_that_end_before_they_start_mpi_end_the_job_that_would_wait_for_them_there(job):
    ended = job("before_mpi", 30.0, program=ALONE)
    assert ended.status == 70, ended.err
    text = r"the program has ended here, but rank \d starts MPI, which takes all ranks, at alone_program.py:\d+ in "
    assert len(ended.said) == 1, ended.err
    assert re.search(text, ended.said[0]), ended.err


@pytest.mark.parametrize(("kind", "doing"), [("barrier", "in Barrier of COMM_WORLD"), ("part", "at work")])
def test_the_timeout_counts_from_the_construction_and_tells_where_the_others_are(job, kind, doing):
    ended = job(kind, 3.0, ranks=3, program=ALONE)
    assert ended.status == 76, ended.err
    report = "\n".join(ended.said)
    missing = "rank 2" if kind == "part" else "ranks 1-2"
    assert re.search(
        rf"stuck: making the communicator 'world' has lasted .* \(timeout 3 s\): {missing} not in it", report
    )
    assert re.search(r"rank 0: in making the communicator 'world' for .* at alone_program.py:\d+ in main", report)
    assert re.search(rf"rank 2: {doing} at alone_program.py:\d+ in ", report)


def test_a_rank_that_never_had_mpizero_is_missed_after_the_timeout(job):
    ended = job("stranger", 2.0, program=ALONE)
    assert ended.status != 0
    assert "ValueError: planted" in ended.err
    if ended.status == 76:  # else the launcher has noticed that a process has failed
        assert "nothing known of rank 1 (without mpizero, or on another node)" in "\n".join(ended.said)
