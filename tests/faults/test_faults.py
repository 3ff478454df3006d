"""Nobody fails alone, nobody waits for the dead: each fault ends the whole job soon, and is explained once.

Every test starts mpiexec itself, in a session of its own, with a hard limit; see jobs.py for other launchers.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest

from tests.faults.jobs import SOON, launchers, run_job

PROGRAM = Path(__file__).with_name("program.py")

if not launchers():
    pytest.skip("no mpiexec beside the interpreter or on PATH", allow_module_level=True)


@pytest.fixture
def job(launcher, tmp_path):
    """Run one fault, and leave no process behind whatever happens."""

    def run(fault, ranks=2, victim=1, runner=(), per_node=None, interrupt=False):
        command = [*runner, PROGRAM, fault, tmp_path, victim, *([per_node] if per_node else [])]
        return run_job(launcher, tmp_path, command, ranks, interrupt)

    return run


def check_failed(ended, tracebacks):
    assert ended.status != 0, ended.err
    assert ended.seconds < SOON, ended.err
    assert ended.err.count("Traceback") == tracebacks, ended.err


@pytest.fixture(autouse=True)
def _no_file_left_in_shared_memory():
    before = set(Path("/dev/shm").glob("mpizero-*"))
    yield
    left = set(Path("/dev/shm").glob("mpizero-*")) - before
    until = time.monotonic() + SOON
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = {path for path in left if path.exists()}
    assert not {path for path in left if path.exists() and not in_use(path)}  # jobs of other tests have files there


def in_use(path):
    """Whether a process has a file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.readlink() == path:
                return True
    return False


# ---------------------------------------------------------------------------------------------- errors of one rank


@pytest.mark.parametrize(
    ("fault", "ranks", "victim"),
    [
        ("raise_before_mpi", 2, 1),
        ("raise_in_setup", 3, 2),
        ("raise", 2, 0),
        ("raise", 3, 2),
        ("chain", 2, 1),
        ("thread", 3, 0),
        ("atexit", 2, 1),
    ],
)
def test_an_error_on_one_rank_ends_all_with_its_traceback(job, fault, ranks, victim):
    ended = job(fault, ranks, victim)
    check_failed(ended, tracebacks=1)
    assert ended.said
    assert all(line.startswith(f"[rank {victim}/{ranks} ") for line in ended.said)
    assert ended.said[-1].endswith("ValueError: planted")
    if fault == "raise":
        assert ended.said[0].endswith("at step 5, phase forward:")


def test_an_error_in_a_thread_of_the_program_is_the_programs(job):
    ended = job("go_on_after_an_error_in_a_thread_of_the_program")
    assert ended.status == 0, ended.err
    assert ended.err.count("Exception in thread host's:") == ended.err.count("Traceback") == 2


def test_the_runner_of_mpi4py_changes_nothing(job):
    ended = job("raise", runner=("-m", "mpi4py"))
    check_failed(ended, tracebacks=1)
    assert ended.said[-1].endswith("ValueError: planted")


@pytest.mark.parametrize(("fault", "ranks"), [("kill", 2), ("segfault", 3)])
def test_a_killed_rank_ends_all_and_the_survivors_add_no_traceback(job, fault, ranks):
    ended = job(fault, ranks)
    check_failed(ended, tracebacks=0)


@pytest.mark.parametrize(("fault", "ranks", "tracebacks"), [("raise", 3, 1), ("kill", 3, 0), ("exit_0", 2, 0)])
def test_sums_that_are_on_their_way_keep_no_rank_from_ending(job, fault, ranks, tracebacks):
    ended = job(f"{fault}_amid_sums", ranks)
    check_failed(ended, tracebacks)
    if fault == "raise":
        assert ended.said[-1].endswith("ValueError: planted")


def test_an_interrupt_of_one_rank_ends_all(job):
    ended = job("interrupt", ranks=3, victim=2)
    check_failed(ended, tracebacks=1)
    assert ended.said[-1] == ended.said[0].partition("]")[0] + "] KeyboardInterrupt"


def test_an_interrupt_of_the_launcher_ends_all(job):
    ended = job("interrupt_the_launcher", interrupt=True)
    assert ended.status != 0
    assert ended.seconds < SOON
    assert ended.err.count("Traceback") <= 1


# ---------------------------------------------------------------------------------------------- leaving early


@pytest.mark.parametrize(("fault", "ranks", "victim"), [("exit_0", 2, 1), ("exit_0", 3, 0), ("exit_3", 2, 1)])
def test_a_rank_that_leaves_early_ends_all_and_says_who_waits_where(job, fault, ranks, victim):
    ended = job(fault, ranks, victim)
    check_failed(ended, tracebacks=0)
    assert any(re.search(r"left early: .* waits in barrier #\d+ 'gradients' .* at program.py:\d+ in train", line)
               for line in ended.said), ended.err  # fmt: skip


def test_a_rank_that_asks_for_a_bad_status_ends_all_even_while_they_compute(job):
    ended = job("leave_while_the_others_compute")
    check_failed(ended, tracebacks=0)
    assert "left early: the program has ended here, but with exit status 3, and the others go on" in ended.said[0]


def test_a_status_that_was_caught_does_not_count(job):
    ended = job("go_on_after_a_caught_exit")
    assert (ended.status, ended.err) == (0, "")


def test_a_rank_that_leaves_early_is_missed_in_a_collective_of_the_users_own(job):
    ended = job("leave_past_our_communicators")
    check_failed(ended, tracebacks=0)
    assert "left early" in ended.said[0]
    assert "waits in Barrier of COMM_WORLD at program.py:" in ended.said[0]


@pytest.mark.parametrize(
    ("fault", "runner"), [("watched", ("-m", "mpi4py")), ("end_with_finalize", ()), ("end_with_a_tail", ())]
)
def test_a_good_end_is_silent(job, fault, runner):
    ended = job(fault, runner=runner)
    assert (ended.status, ended.out, ended.err) == (0, "", "")


def test_some_ranks_may_end_while_others_still_work_together(job):
    ended = job("end_of_part_of_the_ranks", ranks=4, victim=3)
    assert (ended.status, ended.err) == (0, "")


# ---------------------------------------------------------------------------------------------- all ranks at once


@pytest.mark.parametrize(("fault", "ranks"), [("config_error_everywhere", 3), ("config_error_before_communicator", 2)])
def test_bad_input_is_one_line_for_the_job_and_its_own_exit_status(job, fault, ranks):
    ended = job(fault, ranks)
    check_failed(ended, tracebacks=0)
    assert ended.status == 78
    assert len(ended.said) == 1
    function = "fail_together" if fault == "config_error_everywhere" else "<module>"
    assert re.fullmatch(
        rf"ConfigError: \[optimizer\] lr = nan: must be a finite number > 0 \(program.py:\d+ in {function}\)",
        ended.said[0],
    )


def test_bad_input_keeps_its_traceback_where_the_user_asks_for_it(job, monkeypatch):
    monkeypatch.setenv("MPIZERO_TRACEBACK", "1")
    ended = job("config_error_everywhere")
    check_failed(ended, tracebacks=1)
    assert ended.status == 78


def test_bad_input_is_one_line_under_the_runner_of_mpi4py(job):
    ended = job("config_error_everywhere", runner=("-m", "mpi4py"))
    assert ended.status == 78
    assert len(ended.said) == 1
    assert "ConfigError: [optimizer] lr = nan: must be a finite number > 0 (program.py:" in ended.said[0]


def test_bad_input_of_one_rank_ends_all_with_its_line_and_status(job):
    ended = job("data_error", ranks=3, victim=2)
    check_failed(ended, tracebacks=0)
    assert ended.status == 65
    lines = [re.sub(r"^\[rank .*?\] |\d+(?= in )", "", line) for line in ended.said]
    assert lines == ["at step 5, phase forward:", "DataError: planted (program.py: in raise_data_error)"]


@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (3, 1)])
def test_bad_input_of_one_rank_ends_those_that_are_making_the_first_communicator(job, ranks, victim):
    ended = job("data_error_in_setup", ranks, victim)
    check_failed(ended, tracebacks=0)
    assert ended.status == 65
    assert [re.sub(r"\d+(?= in )", "", line.partition("] ")[2]) for line in ended.said] == [
        "DataError: planted (program.py: in <module>)"
    ]


def test_bad_input_in_an_agreed_section_is_one_line(job):
    ended = job("agreed_data_error")
    check_failed(ended, tracebacks=0)
    assert ended.status == 65
    assert re.fullmatch(r"DataError: planted \(program.py:\d+ in fail_together\)", *ended.said)


def test_an_error_in_an_agreed_section_has_the_traceback_of_the_rank_that_raised(job):
    ended = job("agreed_error", ranks=3, victim=2)
    check_failed(ended, tracebacks=1)
    assert all(line.startswith("[rank 2/3 ") for line in ended.said)


def test_a_bug_on_all_ranks_has_one_traceback(job):
    check_failed(job("bug_everywhere"), tracebacks=1)


def test_ranks_of_other_nodes_let_the_first_one_speak(job):
    ended = job("bug_everywhere", ranks=4, per_node=2)
    check_failed(ended, tracebacks=1)
    assert all(re.match(r"\[rank [01]/4 node0\]", line) for line in ended.said)


# ---------------------------------------------------------------------------------------------- stuck


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stuck_collective_names_the_missing_rank_and_every_line(job, ranks):
    ended = job("sleep", ranks)
    check_failed(ended, tracebacks=0)
    assert ended.status == 76
    report = "\n".join(ended.said)
    assert re.search(r"stuck: barrier #6 'gradients' of 'world' has lasted .*: rank 1 not in it", report)
    assert re.search(r"rank 0: in barrier #6 .* at program.py:\d+ in train \(step 5, phase forward\)", report)
    assert re.search(r"rank 1: at work at program.py:\d+ in <lambda>", report)
    assert report.count("stuck:") == 1


def test_a_common_folder_shows_the_lines_of_other_nodes(job):
    ended = job("sleep", ranks=2, per_node=1)
    check_failed(ended, tracebacks=0)
    report = "\n".join(ended.said)
    assert "rank 1 not in it" in report
    assert re.search(r"rank 1: at work at program.py:\d+ in <lambda>", report)


@pytest.mark.parametrize(("fault", "ranks"), [("stop", 3), ("lock", 2)])
def test_a_rank_that_cannot_run_python_is_reported_silent(job, fault, ranks):
    ended = job(fault, ranks)
    check_failed(ended, tracebacks=0)
    assert ended.status == 76
    assert re.search(r"rank 1: silent for .* \(stopped, or holding the interpreter lock\)", "\n".join(ended.said))
    if fault == "lock":  # a signal makes it write its stacks all the same
        assert re.search(r"program.py\", line \d+ in hold_the_lock", ended.err)


def test_when_all_ranks_hold_the_lock_a_timer_ends_them_with_their_stacks(job):
    ended = job("all_hold_the_lock")  # it counts processor time, of which a busy machine gives little
    assert ended.status != 0
    assert re.search(r"program.py\", line \d+ in main", ended.err)
