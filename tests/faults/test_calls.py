"""A rank that is asked for another operation than the others ends the job with both, under shared windows too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.faults.jobs import SOON, launchers, run_job

PROGRAM = Path(__file__).with_name("programs") / "operations_program.py"

if not launchers():
    pytest.skip("no mpiexec beside the interpreter or on PATH", allow_module_level=True)


@pytest.fixture(params=launchers(), ids=lambda pair: pair[0])
def job(request, tmp_path):
    return lambda odd, usual, strategy, memory, ranks: run_job(
        request.param, tmp_path, [PROGRAM, odd, usual, strategy, json.dumps(memory), tmp_path], ranks
    )


@pytest.mark.parametrize(
    ("odd", "usual", "strategy", "memory", "ranks"),
    [
        ("compute_gradients", "train", "zero2", {}, 4),
        ("close", "train", "zero3", {"check_every": 1}, 2),
        ("evaluate", "train", "zero3", {"share_node_memory": False}, 4),
        ("ShardingConfig.close", "parameters_sha256", "ddp", {"ranks_per_node": 2}, 4),
        ("train", "check_integrity", "zero2", {"halves": True}, 4),
    ],
)
def test_another_operation_on_one_rank_ends_the_job_with_both_lines(job, odd, usual, strategy, memory, ranks):
    ended = job(odd, usual, strategy, memory, ranks)
    assert ended.status == 76, ended.err
    assert ended.seconds < SOON, ended.err
    reports = [line for line in ended.said if "CollectiveMismatch: " in line]
    assert len(reports) == 1, ended.err
    line = r" at operations_program.py:\d+ in <lambda>"
    assert re.search(rf"ranks? [0-9, -]+: \w+\.{usual}{line}; rank \d: (\w+\.)?{odd}{line}", reports[0]), ended.err


def test_parameters_that_differ_end_the_job_with_the_rank_and_the_name(job):
    ended = job("set_parameters", "set_parameters", "zero2", {}, 3)
    assert ended.status == 78, ended.err
    assert re.search(r"set_parameters: parameter '[\w.]+' of rank 2 is not that of rank 0: int64", ended.err), ended.err
