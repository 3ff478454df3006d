"""No rank of a test job is left behind: run real jobs and look at how they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.jobs import Ended, launchers, run_job


def run_tests(folder: Path, ranks: int, source: str, patience: int = 1) -> Ended:
    """Run ``source`` as a test module on ``ranks`` ranks; a job that hangs is an error."""
    if not launchers():
        pytest.skip("no mpiexec beside the interpreter or on PATH")
    (folder / "conftest.py").write_text('pytest_plugins = ["mpizero.testing.plugin"]\n')
    (folder / "test_job.py").write_text(
        "import pytest\nfrom mpi4py import MPI\npytestmark = pytest.mark.mpi\n" + source
    )
    options = ["--with-mpi", "-q", "-p", "no:cacheprovider", "-o", f"mpi_patience={patience}"]
    options += ["--color=no"]  # Open MPI gives ranks a terminal
    return run_job(launchers()[0], folder, ["-m", "mpi4py", "-m", "pytest", *options, folder], ranks, limit=300)


@pytest.mark.slow
def test_a_test_that_fails_on_one_rank_fails_on_all_with_its_traceback_and_the_next_ones_run(tmp_path):
    ended = run_tests(
        tmp_path,
        3,
        "def test_all_fail(world):\n    assert world.rank == 9\n"
        "def test_one_fails(world):\n    assert world.rank != 1, 'only here'\n"
        "def test_one_skips(world):\n    if world.rank == 0:\n        pytest.skip('not here')\n"
        "def test_both_fail(world):\n    assert world.rank == 0, f'on {world.rank}'\n"
        "@pytest.fixture\ndef wrong(world):\n    yield\n    assert world.rank != 2, 'torn down'\n"
        "def test_ends_badly(wrong):\n    pass\n"
        "def test_the_last(world):\n    assert world.allgather_object(world.rank) == [0, 1, 2]\n",
        patience=120,
    )
    assert ended.status != 0
    assert ended.out.count("4 failed, 2 passed, 1 error") == 3, "every rank has printed its summary"
    assert "FAILED test_job.py::test_one_fails - [rank 1] AssertionError: only here" in ended.out
    assert ended.out.count("assert world.rank != 1, 'only here'") == 3
    assert "rank 0: passed, rank 1: failed, rank 2: passed" in ended.out
    assert "rank 0: skipped, rank 1: passed, rank 2: passed" in ended.out
    assert ended.out.count("AssertionError: on 1") >= 3
    assert ended.out.count("AssertionError: on 2") >= 3
    assert "ERROR test_job.py::test_ends_badly - [rank 2] AssertionError: torn down" in ended.out


@pytest.mark.slow
def test_ranks_blocked_in_the_failed_test_do_not_hang_and_its_summary_is_printed(tmp_path):
    ended = run_tests(
        tmp_path, 2, "def test_one_fails(world):\n    assert world.rank != 1, 'only here'\n    world.barrier()\n"
    )
    assert ended.status != 0
    assert "test_one_fails failed on rank 1, and others have not ended it 1 s (mpi_patience) later" in ended.err
    assert "assert world.rank != 1, 'only here'" in ended.out
    assert "FAILED test_job.py::test_one_fails - AssertionError: only here" in ended.out
    assert "1 failed in" in ended.out


@pytest.mark.slow
def test_a_skip_on_one_rank_of_a_test_that_blocks_the_others_does_not_hang(tmp_path):
    source = "@pytest.mark.skipif('MPI.COMM_WORLD.rank == 0', reason='not here')\ndef test_one(world):\n    pass\n"
    ended = run_tests(tmp_path, 2, source)
    assert ended.status != 0
    assert "ERROR test_job.py::test_one" in ended.out
    assert "test_one skipped on rank 0, and others have not ended it 1 s (mpi_patience) later" in ended.out


@pytest.mark.slow
def test_a_rank_that_leaves_the_session_does_not_leave_the_others_waiting(tmp_path):
    ended = run_tests(
        tmp_path,
        2,
        "def test_one_leaves(world):\n    if world.rank == 1:\n        pytest.exit('enough', 3)\n    world.barrier()\n",
    )
    assert ended.status != 0
    assert "[rank 1] pytest has ended here with status 3, and other ranks still run" in ended.err
    assert "enough" in ended.out


@pytest.mark.slow
def test_ranks_that_collect_different_tests_do_not_start_and_each_says_why(tmp_path):
    ended = run_tests(
        tmp_path,
        2,
        "if MPI.COMM_WORLD.rank == 1:\n    import no_such_module\ndef test_common(world):\n    world.barrier()\n",
        patience=120,
    )
    assert ended.status != 0
    assert ended.out.count("collected different tests (rank 0: 1 tests, 0 errors, rank 1: 0 tests, 1 errors)") == 2
    assert "No module named 'no_such_module'" in ended.out


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
