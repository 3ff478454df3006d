"""No rank of a test job is left behind: run real jobs and look at how they end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = 'pytest_plugins = ["mpizero.testing.plugin"]\n'


def run_job(folder: Path, ranks: int, source: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run ``source`` as a test module on ``ranks`` ranks; return how it ended and after how many seconds."""
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert launcher is not None, "the tests need an mpiexec"
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_job.py").write_text("import pytest, time\npytestmark = pytest.mark.mpi\n" + source)
    options = ["--with-mpi", "-q", "-p", "no:cacheprovider", "-o", "mpi_patience=1", "-o", "faulthandler_timeout=30"]
    command = [launcher, "-n", str(ranks), sys.executable, "-m", "pytest", *options, str(folder)]
    started = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, cwd=folder)
    return ended, time.monotonic() - started


def test_equal_outcomes_let_the_job_go_on(tmp_path):
    ended, _ = run_job(
        tmp_path,
        2,
        "def test_all_fail(world):\n    assert world.rank == 9\n"
        "def test_a_fresh_world_follows(world):\n    assert world.allgather_object(world.rank) == [0, 1]\n",
    )
    assert ended.returncode != 0
    assert ended.stdout.count("1 failed, 1 passed") == 2


def test_the_rank_that_fails_alone_speaks_and_all_end(tmp_path):
    ended, _ = run_job(
        tmp_path,
        3,
        "def test_one_fails(world):\n    assert world.rank != 1, 'only here'\n"
        "def test_never_reached(world):\n    time.sleep(60)\n",
    )
    assert ended.returncode != 0
    assert "[rank 1] test_job.py::test_one_fails has several outcomes" in ended.stderr
    assert "rank 0: passed, rank 1: failed, rank 2: passed" in ended.stderr
    assert "only here" in ended.stderr


def test_ranks_blocked_in_the_failed_test_do_not_hang(tmp_path):
    ended, seconds = run_job(
        tmp_path, 2, "def test_one_fails(world):\n    assert world.rank != 1, 'only here'\n    world.barrier()\n"
    )
    assert ended.returncode != 0
    assert "others have not ended it 1 s later" in ended.stderr
    assert seconds < 45


def test_ranks_that_collect_different_tests_do_not_start(tmp_path):
    ended, _ = run_job(
        tmp_path,
        2,
        "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    def test_extra(world):\n        world.barrier()\n"
        "def test_common(world):\n    world.barrier()\n",
    )
    assert ended.returncode != 0
    assert "collected different tests (rank 0: 1 tests, 0 errors, rank 1: 2 tests, 0 errors)" in ended.stderr


@pytest.mark.mpi
def test_each_test_has_a_world_of_its_own(world, request):
    assert world.name == request.node.name
    assert world.trace.started == 0


@pytest.mark.mpi
def test_random_numbers_differ_between_ranks_and_repeat(world, rng):
    import numpy as np

    drawn = world.allgather_object(rng.integers(2**62))
    assert len(set(drawn)) == world.size
    assert drawn[world.rank] == np.random.default_rng([51, world.rank]).integers(2**62)
