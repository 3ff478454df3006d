"""What starts the jobs of these tests: each is an mpiexec of its own; see jobs.py for other launchers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.jobs import launchers, run_job

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=launchers(), ids=lambda pair: pair[0])
def launcher(request):
    return request.param


@pytest.fixture
def job(launcher, tmp_path, request):
    """Run the module's ``PROGRAM`` on ranks, and leave no process behind whatever happens."""

    def run(kind, *words, ranks=2, runner=(), environment=(), program=request.module.PROGRAM, **options):
        command = [*runner, FOLDER / program, kind, tmp_path, *words]
        return run_job(launcher, tmp_path, command, ranks, environment=environment, **options)

    return run
