"""Online jobs and ensembles under the launchers: nothing that was accepted is lost, nobody waits for the failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np

import mpizero as mz
from mpizero.testing import run_in_threads
from tests.faults.conftest import FOLDER
from tests.faults.jobs import ENVIRONMENT, ROOT, run_job

PROGRAM = "programs/online_program.py"


def test_the_example_trains_on_all_samples_of_its_solvers(launcher, tmp_path):
    ended = run_job(launcher, tmp_path, [ROOT / "examples" / "online" / "heat.py", "--simulations", "16"], 4)
    assert ended.status == 0, ended.err
    assert ended.out.startswith("2 steps, loss "), ended.out


def test_slow_producers_end_well_although_trainers_wait_longer_than_their_timeout(job):
    ended = job("slow", ranks=4)
    assert (ended.status, ended.out, ended.err) == (0, "trained 40\n", "")


def test_a_producer_that_raises_ends_the_job_after_the_trainers_if_they_drain(job):
    ended = job("drains", ranks=4)
    assert ended.status != 0
    assert "FloatingPointError: the solver has diverged" in ended.err
    assert ended.out == "trained 30\n"


def test_a_killed_producer_of_a_spool_loses_no_accepted_sample_and_goes_on_when_started_again(tmp_path):
    def command(first, count):
        return [sys.executable, str(FOLDER / PROGRAM), "spool", str(tmp_path), str(first), str(count)]

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
        with mz.data.spool_source(comm, tmp_path / "spool", like=like, producers=1, timeout=60.0) as source:
            return [int(one.x[0]) for one in source.next_batch(100_000)]

    trained = run_in_threads(1, train)[0]
    assert set(accepted) <= set(trained)
    assert len(trained) == len(set(trained)) <= len(accepted) + 1  # one may be on the disk and not accepted yet
    assert trained == sorted(trained)


def test_the_members_beside_one_that_raises_end_well_if_asked_to(job, tmp_path):
    ended = job("continue", ranks=4, program="programs/ensemble_program.py")
    assert ended.status != 0
    assert "FloatingPointError: diverged" in ended.err
    found = json.loads((tmp_path / "run" / "ensemble.json").read_text())["members"]
    assert [(one["status"], one.get("result")) for one in found] == [("complete", {"ranks": 2}), ("failed", None)]
