"""Doctor's look at launch and GPUs: ranks that do not see each other, other threads or tasks than Slurm gave, time."""

from __future__ import annotations

import json

import pytest

from mpizero._util.launch import Launch, ranks_of_node
from mpizero.errors import ExitStatus
from mpizero.testing import run_in_threads
from mpizero.tools import doctor
from mpizero.tools.doctor import check_gpu, check_launch, check_threads, check_time
from mpizero.train import machine
from mpizero.train.stopping import Limit

STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}


def hydra(rank, **more):
    return {"PMI_SIZE": "4", "PMI_RANK": str(rank), **more}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, ("", None, None)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, ("", None, None)),  # a batch script
        (STEP | {"SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "3"}, ("srun --mpi=pmix", 8, 3)),
        (STEP | {"SLURM_MPI_TYPE": "pmi2", "PMI_SIZE": "8", "PMI_RANK": "3"}, ("srun --mpi=pmi2", 8, 3)),
        (STEP, ("srun", 8, 3)),
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, ("mpiexec of MPICH's kind", 4, 2)),
        # Slurm has started the daemons of these two.
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"} | hydra(2), ("mpiexec of MPICH's kind", 4, 2)),
        (OMPI | {"SLURM_PROCID": "0"}, ("mpiexec of Open MPI", 4, 2)),
    ],
)
def test_the_environment_tells_who_started_the_ranks(environment, launch):
    found = Launch.of(environment)
    assert (found.name, found.size, found.rank) == launch


def looked_at(check, ranks, environment, threads=1):
    """Return rank 0's finding; ``environment`` and ``threads`` may depend on the rank."""

    def work(comm):
        own = environment(comm.rank) if callable(environment) else environment
        return check(comm, threads(comm.rank) if callable(threads) else threads, own)

    return run_in_threads(ranks, work)[0]


def test_the_launcher_tells_how_many_ranks_of_a_node_come_before_this_one():
    assert ranks_of_node({"MPI_LOCALRANKID": "3", "SLURM_LOCALID": "0", "PMI_RANK": "7"}) == 4
    assert ranks_of_node({"PMI_RANK": "70", "PMI_SIZE": "80"}) == 1, "its node may have few of these ranks"


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (lambda rank: hydra(3 - rank), "MPI's rank 0 is the launcher's 3"),
        (lambda rank: hydra(rank, SLURM_JOB_NUM_NODES="2"), "4 ranks on 1 node; Slurm has given 2 nodes"),
        (lambda rank: hydra(rank, SLURM_NTASKS="8"), "Slurm has given 8 tasks"),
    ],
)
def test_a_launch_that_does_not_fit_slurm_is_named(environment, text):
    found = looked_at(check_launch, 4, environment)
    assert found.status == "warn"
    assert text in found.text
    assert found.remedy


@pytest.mark.parametrize(
    "environment",
    [
        {},
        hydra,
        lambda rank: hydra(rank, SLURM_NTASKS="4", SLURM_JOB_NUM_NODES="1"),
        lambda rank: hydra(rank, SLURM_NTASKS="1", SLURM_STEP_ID="0"),  # of the step that holds MPICH's daemons
        lambda rank: {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": str(rank)},
    ],
)
def test_a_launch_that_fits_is_fine(environment):
    assert looked_at(check_launch, 4, environment).status == "ok"


def test_ranks_with_other_threads_fail_for_they_compute_other_bits():
    found = looked_at(check_threads, 4, {}, lambda rank: (1, 1, 2, 3)[rank])
    assert (found.status, found.text) == ("FAIL", "rank 0 has 1, rank 2 has 2")


def test_threads_are_compared_with_the_cpus_of_a_task():
    assert looked_at(check_threads, 2, {"SLURM_CPUS_PER_TASK": "4"}, 4).status == "ok"
    found = looked_at(check_threads, 2, {"SLURM_CPUS_PER_TASK": "4"}, 1)
    assert (found.status, found.text) == ("warn", "1 thread a rank, but Slurm has given 4 CPUs a task")
    assert "OMP_NUM_THREADS=4" in found.remedy


def test_the_time_limit_is_told(monkeypatch):
    assert looked_at(check_time, 2, {}).status == "ok"
    monkeypatch.setattr(doctor, "slurm_limit", lambda environment: None)
    assert looked_at(check_time, 2, {"SLURM_JOB_ID": "1"}).status == "warn"
    monkeypatch.setattr(doctor, "slurm_limit", lambda environment: Limit("Slurm's", 600))
    assert looked_at(check_time, 2, {"SLURM_JOB_ID": "1"}).text == "10 min left (Slurm's); training saves before"


@pytest.mark.parametrize("command", [["doctor", "--json"], ["train", "tiny.toml"]])
@pytest.mark.slow
def test_ranks_that_think_they_are_alone_are_told_so(mpizero, monkeypatch, command):
    """As under srun without --mpi: eight processes, and each could train the whole model in the same folder."""
    for name, value in (STEP | {"SLURM_PROCID": "0"}).items():
        monkeypatch.setenv(name, value)
    outcome = mpizero(0, *command, status=ExitStatus.CONFIG)
    told = json.loads(outcome.out)["checks"][0] if command[0] == "doctor" else {"text": outcome.err}
    assert "srun has started 8 processes, but each sees 1" in told["text"]
    assert "srun --mpi=pmix" in told.get("remedy", outcome.err)
    assert not (mpizero.folder / "run").exists()


def test_doctor_tells_how_many_ranks_share_a_gpu_or_why_none_can(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: (2, ["cupy", "numba_cuda"]))
    monkeypatch.setattr(machine, "devices", lambda: (2, ""))
    for finding in run_in_threads(3, lambda comm: check_gpu(comm, 1)):
        assert finding.status == "ok"
        assert "2 ranks a GPU" in finding.text
        assert "through the host's memory: these ranks are threads of one process" in finding.text
    monkeypatch.setattr(machine, "why_through_host", lambda comm, place: "")
    assert "go from GPU to GPU" in run_in_threads(2, lambda comm: check_gpu(comm, 1))[0].text
    monkeypatch.setattr(machine, "devices", lambda: (0, "no package cupy"))
    for finding in run_in_threads(3, lambda comm: check_gpu(comm, 1)):
        assert finding.status == "warn"
        assert "rank 0 has no package cupy" in finding.remedy
