"""Nobody fails alone, nobody waits for the dead: each fault ends the whole job soon, and is explained once."""

from __future__ import annotations

import re

import pytest

PROGRAM = "program.py"
RUNNER = ("-m", "mpi4py")


def check_failed(ended, tracebacks):
    assert ended.status != 0, ended.err
    assert ended.err.count("Traceback") == tracebacks, ended.err


@pytest.fixture(autouse=True)
def _no_file_of_the_job_is_left(tmp_path):
    yield
    assert not [*tmp_path.glob("mpizero-*")]


# ---------------------------------------------------------------------------------------------- errors of one rank


@pytest.mark.parametrize(
    ("fault", "ranks", "victim", "runner"),
    [
        ("raise_before_mpi", 2, 1, ()),
        ("raise_in_setup", 3, 2, ()),
        ("raise", 3, 2, ()),
        ("chain", 2, 0, RUNNER),
        ("thread", 2, 0, ()),
        ("atexit", 2, 1, ()),
    ],
)
def test_an_error_on_one_rank_ends_all_with_its_traceback(job, fault, ranks, victim, runner):
    ended = job(fault, victim, ranks=ranks, runner=runner)
    check_failed(ended, tracebacks=1)
    assert ended.said
    assert all(line.startswith(f"[rank {victim}/{ranks} ") for line in ended.said)
    assert ended.said[-1].endswith("ValueError: planted")
    if fault == "raise":
        assert ended.said[0].endswith("at step 5, phase forward:")


def test_an_error_in_a_thread_of_the_program_is_the_programs(job):
    ended = job("go_on_after_an_error_in_a_thread_of_the_program", 1)
    assert ended.status == 0, ended.err
    assert ended.err.count("Exception in thread host's:") == ended.err.count("Traceback") == 2


def test_a_killed_rank_ends_all_and_the_survivors_add_no_traceback_although_sums_are_on_their_way(job):
    check_failed(job("kill_amid_sums", 1, ranks=3), tracebacks=0)


def test_an_interrupt_of_one_rank_ends_all(job):
    ended = job("interrupt", 1)
    check_failed(ended, tracebacks=1)
    assert ended.said[-1] == ended.said[0].partition("]")[0] + "] KeyboardInterrupt"


def test_an_interrupt_of_the_launcher_ends_all(job):
    ended = job("interrupt_the_launcher", 1, interrupt=True)
    assert ended.status != 0
    assert ended.err.count("Traceback") <= 1


# ---------------------------------------------------------------------------------------------- leaving early


def test_a_rank_that_leaves_early_ends_all_and_says_who_waits_where(job):
    ended = job("exit_0", 0, ranks=3)
    check_failed(ended, tracebacks=0)
    assert any(re.search(r"left early: .* waits in barrier #\d+ 'gradients' .* at program.py:\d+ in train", line)
               for line in ended.said), ended.err  # fmt: skip


def test_a_rank_that_leaves_early_ends_all_although_sums_are_on_their_way(job):
    check_failed(job("exit_0_amid_sums", 1), tracebacks=0)


def test_a_rank_that_asks_for_a_bad_status_ends_all_even_while_they_compute(job):
    ended = job("leave_while_the_others_compute", 1)
    check_failed(ended, tracebacks=0)
    assert "left early: the program has ended here, but with exit status 3, and the others go on" in ended.said[0]


def test_a_rank_that_leaves_early_is_missed_in_a_collective_of_the_users_own(job):
    ended = job("leave_past_our_communicators", 1)
    check_failed(ended, tracebacks=0)
    assert "left early" in ended.said[0]
    assert "waits in Barrier of COMM_WORLD at program.py:" in ended.said[0]


@pytest.mark.parametrize(
    ("fault", "ranks", "victim", "runner"),
    [
        ("watched", 2, 1, RUNNER),
        ("end_with_finalize", 2, 1, ()),
        ("go_on_after_a_caught_exit", 2, 1, ()),  # and rank 0 has something left to do
        ("end_of_part_of_the_ranks", 4, 3, ()),  # while others still work together
    ],
)
def test_a_good_end_is_silent(job, fault, ranks, victim, runner):
    ended = job(fault, victim, ranks=ranks, runner=runner)
    assert (ended.status, ended.out, ended.err) == (0, "", "")


# ---------------------------------------------------------------------------------------------- all ranks at once


@pytest.mark.parametrize(
    ("fault", "function", "runner"),
    [("config_error_everywhere", "fail_together", RUNNER), ("config_error_before_communicator", "<module>", ())],
)
def test_bad_input_is_one_line_for_the_job_and_its_own_exit_status(job, fault, function, runner):
    ended = job(fault, 1, runner=runner)
    check_failed(ended, tracebacks=0)
    assert ended.status == 78
    words = r"ConfigError: \[optimizer\] lr = nan: must be a finite number > 0"
    assert re.fullmatch(rf"{words} \(program.py:\d+ in {function}\)", *ended.said)


def test_bad_input_keeps_its_traceback_where_the_user_asks_for_it(job):
    ended = job("config_error_everywhere", 1, environment={"MPIZERO_TRACEBACK": "1"})
    check_failed(ended, tracebacks=1)
    assert ended.status == 78


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("data_error", ["at step 5, phase forward:", "DataError: planted (program.py: in raise_data_error)"]),
        ("data_error_in_setup", ["DataError: planted (program.py: in <module>)"]),  # others make a communicator
        ("agreed_data_error", ["DataError: planted (program.py: in fail_together)"]),
    ],
)
def test_bad_input_of_one_rank_ends_all_with_its_line_and_status(job, fault, told):
    ended = job(fault, 1, ranks=3)
    check_failed(ended, tracebacks=0)
    assert ended.status == 65
    assert [re.sub(r"^\[rank .*?\] |\d+(?= in )", "", line) for line in ended.said] == told


def test_an_error_in_an_agreed_section_has_the_traceback_of_the_rank_that_raised(job):
    ended = job("agreed_error", 1)
    check_failed(ended, tracebacks=1)
    assert all(line.startswith("[rank 1/2 ") for line in ended.said)


def test_a_bug_on_all_ranks_has_one_traceback_of_the_first_node(job):
    ended = job("bug_everywhere", 1, 2, ranks=4)
    check_failed(ended, tracebacks=1)
    assert all(re.match(r"\[rank [01]/4 node0\]", line) for line in ended.said)


# ---------------------------------------------------------------------------------------------- stuck


def test_a_stuck_collective_names_the_missing_rank_and_every_line(job):
    ended = job("sleep", 1, ranks=3)
    check_failed(ended, tracebacks=0)
    assert ended.status == 76
    report = "\n".join(ended.said)
    assert re.search(r"stuck: barrier #6 'gradients' of 'world' has lasted .*: rank 1 not in it", report)
    assert re.search(r"rank 0: in barrier #6 .* at program.py:\d+ in train \(step 5, phase forward\)", report)
    assert re.search(r"rank 1: at work at program.py:\d+ in <lambda>", report)
    assert report.count("stuck:") == 1


def test_a_common_folder_shows_the_lines_of_other_nodes(job):
    ended = job("sleep", 1, 1)
    check_failed(ended, tracebacks=0)
    report = "\n".join(ended.said)
    assert "rank 1 not in it" in report
    assert re.search(r"rank 1 on \S+: at work at program.py:\d+ in <lambda>", report)


@pytest.mark.parametrize("fault", ["stop", "lock"])
def test_a_rank_that_cannot_run_python_is_reported_silent(job, fault):
    ended = job(fault, 1)
    check_failed(ended, tracebacks=0)
    assert ended.status == 76
    assert re.search(r"rank 1: silent for .* \(stopped, or holding the interpreter lock\)", "\n".join(ended.said))
    if fault == "lock":  # a signal makes it write its stacks all the same
        assert re.search(r"program.py\", line \d+ in hold_the_lock", ended.err)


def test_when_all_ranks_hold_the_lock_a_timer_ends_them_with_their_stacks(job):
    ended = job("all_hold_the_lock", 1)  # it counts processor time, of which a busy machine gives little
    assert ended.status != 0
    assert re.search(r"program.py\", line \d+ in main", ended.err)
