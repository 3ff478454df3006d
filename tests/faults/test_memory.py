"""A node with little shared memory, as a container has: whoever does not fit keeps its own copy, and trains on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.jobs import LIMIT, ROOT, small_shared_memory
from tests.faults.programs.memory_program import trained

PROGRAM = "programs/memory_program.py"


@pytest.fixture
def crowded(job):
    def run(mode, hidden, ranks, size="64m"):
        if (within := small_shared_memory(size)) is None:
            pytest.skip("mounting a file system of our own is not allowed here")
        return job(mode, hidden, ranks=ranks, within=within)

    return run


def test_on_32_MB_every_strategy_trains_to_the_hash_of_one_process(crowded):
    hidden = 21_000  # 2.9 MB of parameters; rows of gradients of one-sample grains: 5 or 4 a rank
    ended = crowded("strategies", hidden, 2, "32m")  # MPI takes 10 MB of them
    assert ended.status == 0, ended.err
    told = [line.split() for line in ended.out.splitlines()]
    expected = {"None": trained(None, "ddp", hidden, None)[0], "1": trained(None, "ddp", hidden, 1)[0]}
    assert len(told) == 6
    assert {(micro, digest) for _, micro, digest, _ in told} == set(expected.items())
    sharing = {(strategy, micro): int(count) for strategy, micro, _, count in told}
    alone = sum(count == 1 for count in sharing.values())
    assert sharing["ddp", "1"] == sharing["zero1", "1"] == 1  # the first step found out; reserve() did
    assert ended.err.count("every rank keeps its own copy") == alone
    assert ended.err.count("/dev/shm has ") == ended.err.count("(in a container --shm-size)") == alone


def test_two_groups_of_one_node_do_not_take_the_same_memory(crowded):
    hidden = 22_000  # two ranks need 5 rows each beside the parameters: 34 MB a group
    ended = crowded("two_groups", hidden, 4)
    assert ended.status == 0, ended.err
    told = [line.split() for line in ended.out.splitlines()]
    assert len(told) == 4
    assert {digest for _, _, digest, _ in told} == {trained(None, "ddp", hidden, 1)[0]}
    assert any(int(count) == 1 for *_, count in told)


def test_models_that_all_ranks_leave_by_an_error_leave_no_memory_and_no_communicators(crowded):
    hidden = 5_000  # 0.7 MB of parameters, and as much of gradients a rank
    ended = crowded("trials", hidden, 2)
    assert ended.status == 0, ended.err
    *trials, end = ended.out.split("\n")[:-1]
    sizes, communicators = zip(*(map(int, line.split()) for line in trials), strict=True)
    model = 4 * 35 * hidden
    assert len(sizes) == 12
    assert max(sizes[6:]) <= max(sizes[2:6]) + model // 2
    assert max(communicators[6:]) == max(communicators[2:6])
    assert int(end) <= max(sizes) - model
    assert "keeps its own copy" not in ended.err


def test_a_model_that_one_rank_leaves_by_an_error_ends_the_job_with_its_traceback(crowded):
    ended = crowded("alone", 100, 2)
    assert ended.status != 0
    assert ended.err.count("Traceback") == 1
    assert "[rank 1/2" in ended.err
    assert "FloatingPointError: diverged here" in ended.err


def test_ranks_train_under_a_limit_that_one_process_exceeds_with_the_same_bits(launcher):
    size = ["--width", "384", "--layers", "24", "--samples", "8", "--steps", "2", "--ranks", "2", "--limit-mb", "50"]
    command = [sys.executable, ROOT / "scripts" / "memory_limit.py", *size, "--launcher", " ".join(launcher)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3 * LIMIT, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "bytes wanted" in ended.stdout
    assert "more ranks" in ended.stdout
