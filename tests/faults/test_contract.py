"""Ranks that call different collectives are named at once, with both lines, before a weight is touched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.jobs import SOON, launchers, run_job

PROGRAM = Path(__file__).with_name("programs") / "contract_program.py"

if not launchers():
    pytest.skip("no mpiexec beside the interpreter or on PATH", allow_module_level=True)


@pytest.fixture(params=launchers(), ids=lambda pair: pair[0])
def job(request, tmp_path):
    return lambda kind, ranks=2, **environment: run_job(
        request.param, tmp_path, [PROGRAM, kind, tmp_path], ranks, environment=environment
    )


def check_named(ended, first, other, statuses=(76,)):
    """One report, by one rank, with both calls at their lines; status 76."""
    assert ended.status in statuses, ended.err
    assert ended.seconds < SOON, ended.err
    assert "Traceback" not in ended.err
    reports = [line for line in ended.said if "CollectiveMismatch: " in line]
    assert len(reports) == 1, ended.err
    line = r" at contract_program.py:\d+ in \w+"
    pattern = rf"of 'world' differs between ranks: ranks? 0[^:]*: {first}{line}; rank \d+: {other}{line}"
    assert re.search(pattern, reports[0]), ended.err


@pytest.mark.parametrize(
    ("kind", "ranks", "first", "other"),
    [
        ("order", 3, r"allreduce 'a' float64\[3\] sum", r"allreduce 'b' float64\[3\] sum"),
        ("order_at_the_end", 2, r"allreduce 'a' float64\[3\] sum", r"allreduce 'b' float64\[3\] sum"),
        ("operation", 2, r"allreduce float64\[3\] sum", r"broadcast float64\[3\] root 0"),
        ("extra", 4, r"allreduce 'a' float64\[3\] sum", r"barrier 'one more'"),
    ],
)
def test_ranks_that_call_different_collectives_are_named_with_both_lines(job, kind, ranks, first, other):
    check_named(job(kind, ranks), first, other)


@pytest.mark.parametrize(
    ("kind", "first", "other"),
    [
        ("count", r"allgather 'x' float64\[3\]", r"allgather 'x' float64\[4\]"),
        ("dtype", r"allreduce 'x' float64\[3\] sum", r"allreduce 'x' float32\[3\] sum"),
    ],
)
@pytest.mark.parametrize("debug", ["", "collectives"])
def test_what_mpi_itself_refuses_ends_in_the_same_report(job, kind, first, other, debug):
    """Some libraries end the process when a message is too long, past Python; the launcher then chooses the status."""
    ended = job(kind, MPIZERO_DEBUG=debug)
    assert ended.status == 76 or (ended.status != 0 and not debug)
    ended.status = 76
    check_named(ended, first, other)


def test_debug_mode_compares_the_blocks_of_an_exchange(job):
    ended = job("blocks", MPIZERO_DEBUG="collectives")
    assert ended.status == 76
    assert "rank 0 sends 1 elements to rank 1, which expects 2" in ended.err


def test_names_in_the_order_of_a_set_are_seen(job):
    ended = job("order_of_a_set", 4)
    assert ended.status == 76
    assert re.search(r"allreduce 'layer\d+.weight' float64\[3\] sum at contract_program.py", ended.err)
    assert ended.err.count("CollectiveMismatch: ") == 1


def test_no_weight_changes_after_calls_in_another_order(job, tmp_path):
    ended = job("engine", 2)
    check_named(ended, r"allreduce 'a' float64\[3\] sum", r"allreduce 'b' float64\[3\] sum")
    assert sorted(path.name for path in tmp_path.glob("same-*")) == ["same-0-True", "same-1-True"]


def test_a_missing_rank_is_named_with_its_line_and_that_of_those_who_wait(job):
    ended = job("missing", 3)
    assert ended.status == 76
    assert ended.seconds < SOON
    report = "\n".join(ended.said)
    assert "rank 2 not in it" in report
    assert re.search(
        r"rank 0: in allreduce #2 'a' of 'world' for .* s at contract_program.py:\d+ in reduce_all", report
    )
    assert re.search(r"rank 2: at work at contract_program.py:\d+ in missing", report)
    assert report.count("stuck:") == 1


def test_a_rank_that_ends_well_amid_a_step_is_missed_while_the_others_compute_it(job):
    ended = job("leave_while_the_others_train")
    assert ended.status == 70
    assert ended.seconds < SOON
    assert re.search(
        r"left early: .* rank 0 is in training step 2 of '.*' at contract_program.py:\d+ in loss", ended.err
    )


def test_below_thread_level_multiple_a_mismatch_ends_the_job_all_the_same(job):
    ended = job("operation", MPI4PY_RC_THREAD_LEVEL="serialized")
    # MPICH's mpiexec may see the rank first that is ended by signal 9, and then tells that.
    check_named(ended, r"allreduce .* sum", r"broadcast .* root 0", statuses=(76, 9))


def test_an_unknown_debug_mode_is_refused(job):
    ended = job("order", MPIZERO_DEBUG="colectives")
    assert ended.status == 78
    assert "MPIZERO_DEBUG='colectives': expected \"collectives\"" in ended.err
