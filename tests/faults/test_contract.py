"""Ranks that call different collectives or operations are named at once, with both lines, before a weight is touched.

What is compared is specified over threads (tests/comm/supervision, tests/parallel/model); here whole jobs end by it.
"""

from __future__ import annotations

import re

import pytest

PROGRAM = "programs/contract_program.py"


def check_named(ended, first, other, statuses=(76,)):
    """One report, by one rank, with both calls at their lines; status 76."""
    assert ended.status in statuses, ended.err
    assert "Traceback" not in ended.err
    reports = [line for line in ended.said if "CollectiveMismatch: " in line]
    assert len(reports) == 1, ended.err
    line = r" at contract_program.py:\d+ in [\w<>]+"
    assert re.search(rf"differs between ranks: ranks? [0-9, -]+: {first}{line}; rank \d+: {other}{line}", reports[0]), (
        ended.err
    )


A, B = r"allreduce 'a' float64\[3\] sum", r"allreduce 'b' float64\[3\] sum"


@pytest.mark.parametrize(
    ("kind", "ranks", "other"), [("order", 3, B), ("order_at_the_end", 2, B), ("extra", 3, r"barrier 'one more'")]
)
def test_ranks_that_call_different_collectives_are_named_with_both_lines(job, kind, ranks, other):
    check_named(job(kind, ranks=ranks), A, other)


@pytest.mark.parametrize(
    ("kind", "debug", "first", "other"),
    [
        ("count", "", r"allgather 'x' float64\[3\]", r"allgather 'x' float64\[4\]"),
        ("dtype", "collectives", r"allreduce 'x' float64\[3\] sum", r"allreduce 'x' float32\[3\] sum"),
    ],
)
def test_what_mpi_itself_refuses_ends_in_the_same_report(job, kind, debug, first, other):
    """Some libraries end the process when a message is too long, past Python; the launcher then chooses the status."""
    ended = job(kind, environment={"MPIZERO_DEBUG": debug})
    assert ended.status == 76 or (ended.status != 0 and not debug)
    check_named(ended, first, other, statuses=(ended.status,))


def test_debug_mode_compares_the_blocks_of_an_exchange(job):
    ended = job("blocks", environment={"MPIZERO_DEBUG": "collectives"})
    assert ended.status == 76
    assert "rank 0 sends 1 elements to rank 1, which expects 2" in ended.err


def test_no_weight_changes_after_calls_in_another_order(job, tmp_path):
    check_named(job("engine"), A, B)
    assert sorted(path.name for path in tmp_path.glob("same-*")) == ["same-0-True", "same-1-True"]


def test_a_rank_that_ends_well_amid_a_step_is_missed_while_the_others_compute_it(job):
    ended = job("leave_while_the_others_train")
    assert ended.status == 70
    assert re.search(
        r"left early: .* rank 0 is in training step 2 of '.*' at contract_program.py:\d+ in loss", ended.err
    )


def test_below_thread_level_multiple_a_mismatch_ends_the_job_all_the_same(job):
    ended = job("operation", environment={"MPI4PY_RC_THREAD_LEVEL": "serialized"})
    # MPICH's mpiexec may see the rank first that is ended by signal 9, and then tells that.
    check_named(ended, r"allreduce .* sum", r"broadcast .* root 0", statuses=(76, 9))


@pytest.mark.parametrize(
    ("odd", "usual", "ranks"), [("compute_gradients", "train", 2), ("train", "check_integrity", 4)]
)
def test_another_operation_on_one_rank_ends_the_job_under_shared_windows_and_in_a_part(job, odd, usual, ranks):
    check_named(job("another_operation", odd, usual, ranks=ranks), rf"\w+\.{usual}", rf"(\w+\.)?{odd}")


def test_an_unknown_debug_mode_is_refused(job):
    ended = job("order", ranks=1, environment={"MPIZERO_DEBUG": "colectives"})
    assert ended.status == 78
    assert "MPIZERO_DEBUG='colectives': expected \"collectives\"" in ended.err
