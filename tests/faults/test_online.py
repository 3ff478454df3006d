"""Online jobs under the launchers: nothing that was accepted is lost, and nothing hangs, however producers behave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mpizero as mz
from mpizero.testing import run_in_threads
from tests.faults.jobs import ENVIRONMENT, launchers, run_job

PROGRAM = Path(__file__).with_name("programs") / "online_program.py"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "online" / "heat.py"

if not launchers():
    pytest.skip("no mpiexec beside the interpreter or on PATH", allow_module_level=True)


@pytest.fixture(params=launchers(), ids=lambda pair: pair[0])
def launcher(request):
    return request.param


def test_the_example_trains_on_all_samples_of_its_solvers(launcher, tmp_path):
    ended = run_job(launcher, tmp_path, [EXAMPLE, "--simulations", "40"], 4)
    assert ended.status == 0, ended.err
    assert ended.out.startswith("5 steps, loss "), ended.out


@pytest.mark.parametrize("kind", ["slow", "fast"])
def test_slow_and_fast_producers_end_well_also_where_trainers_wait_longer_than_their_timeout(launcher, tmp_path, kind):
    ended = run_job(launcher, tmp_path, [PROGRAM, kind, tmp_path], 4)
    assert (ended.status, ended.out, ended.err) == (0, "trained 40\n", "")


def test_a_producer_that_raises_ends_the_job(launcher, tmp_path):
    ended = run_job(launcher, tmp_path, [PROGRAM, "raises", tmp_path], 4)
    assert ended.status != 0
    assert "FloatingPointError: the solver has diverged" in ended.err
    assert "trained" not in ended.out


def test_a_producer_that_raises_ends_the_job_after_the_trainers_if_they_drain(launcher, tmp_path):
    ended = run_job(launcher, tmp_path, [PROGRAM, "drains", tmp_path], 4)
    assert ended.status != 0
    assert "FloatingPointError: the solver has diverged" in ended.err
    assert ended.out == "trained 30\n"


def test_a_killed_producer_of_a_spool_loses_no_accepted_sample_and_goes_on_when_started_again(tmp_path):
    def command(first, count):
        return [sys.executable, str(PROGRAM), "spool", str(tmp_path), str(first), str(count)]

    environment = os.environ | ENVIRONMENT
    with subprocess.Popen(command(0, 100_000), stdout=subprocess.PIPE, text=True, env=environment) as process:
        lines = [process.stdout.readline() for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    accepted = [int(line) for line in lines if line.endswith("\n")]
    again = subprocess.run(command(200_000, 3), capture_output=True, text=True, env=environment, timeout=60, check=True)
    accepted += [int(line) for line in again.stdout.split()]

    def train(comm):
        like = (np.zeros(1, np.float32), np.zeros(1, np.float32))
        with mz.data.spool_source(comm, tmp_path / "spool", like=like, producers=1, timeout=20.0) as source:
            return [int(one.x[0]) for one in source.next_batch(100_000)]

    trained = run_in_threads(1, train)[0]
    assert set(accepted) <= set(trained)
    assert len(trained) == len(set(trained)) <= len(accepted) + 1  # one may be on the disk and not accepted yet
    assert trained == sorted(trained)
