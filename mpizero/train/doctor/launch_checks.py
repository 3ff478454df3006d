"""Compare ranks, nodes and threads with what the launcher and Slurm have set in the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from mpizero._util.launch import Launch
from mpizero.comm import Communicator
from mpizero.train import machine
from mpizero.train.doctor.check_result import CheckResult, counted
from mpizero.train.stopping import Limit, slurm_limit

T = TypeVar("T")


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def check_launch(comm: Communicator, threads: int, environment: Mapping[str, str]) -> CheckResult:
    """Compare MPI's ranks and nodes with the launcher's and Slurm's. Collective over ``comm``."""
    own = Launch.of(environment)
    every = comm.allgather_object((own, machine.host()))
    nodes, slurm_nodes = len({host for _, host in every}), _number(environment, "SLURM_JOB_NUM_NODES")
    tasks = _number(environment, "SLURM_NTASKS") if own.name.startswith("mpiexec") else None
    text = f"{own.name or 'no launcher'}: {counted(comm.size, 'rank')} on {counted(nodes, 'node')}"
    moved = [(rank, launch) for rank, (launch, _) in enumerate(every) if launch.rank not in (None, rank)]
    if moved:
        rank, launch = moved[0]
        text += f"; MPI's rank {rank} is the launcher's {launch.rank}"
        return CheckResult("launch", "warn", text, "do not mix launchers: messages that name ranks mean MPI's")
    if slurm_nodes is not None and slurm_nodes != nodes:
        text += f"; Slurm has given {counted(slurm_nodes, 'node')}"
        return CheckResult("launch", "warn", text, "start the ranks with srun, or with an mpiexec that knows Slurm")
    if tasks is not None and tasks != comm.size and "SLURM_STEP_ID" not in environment:
        text += f"; Slurm has given {counted(tasks, 'task')}"
        return CheckResult("launch", "warn", text, "start as many ranks as the job has tasks, or ask for as many tasks")
    return CheckResult("launch", "ok", text)


def check_threads(comm: Communicator, threads: int, environment: Mapping[str, str]) -> CheckResult:
    """Compare the ranks' numbers of threads with each other and with the CPUs of a Slurm task. Collective."""
    name = "threads"
    if wrong := difference(comm.allgather_object(threads)):
        return CheckResult(
            name, "FAIL", wrong, "export the same OMP_NUM_THREADS to all ranks, or results differ in bits"
        )
    given = _number(environment, "SLURM_CPUS_PER_TASK")
    text = f"{counted(threads, 'thread')} a rank"
    if given is not None and given != threads:
        advice = f"export OMP_NUM_THREADS={given}; srun of Slurm 22.05 and later also needs --cpus-per-task={given}"
        return CheckResult(name, "warn", f"{text}, but Slurm has given {counted(given, 'CPU')} a task", advice)
    if "OMP_NUM_THREADS" not in environment:
        return CheckResult(name, "ok", f"{text}, as OMP_NUM_THREADS is not set")
    return CheckResult(name, "ok", text)


def check_time(comm: Communicator, threads: int, environment: Mapping[str, str]) -> CheckResult:
    """Report how much time the Slurm job has left. Collective over ``comm``."""
    limit: Limit | None = comm.broadcast_object(slurm_limit(environment) if comm.rank == 0 else None)
    if limit is not None:
        return CheckResult(
            "time limit", "ok", f"{limit.left / 60:.0f} min left ({limit.source}); training saves before"
        )
    if environment.get("SLURM_JOB_ID"):
        advice = "give train.time_limit if there is one, or training cannot save before it"
        return CheckResult("time limit", "warn", "Slurm does not say when the job ends", advice)
    return CheckResult("time limit", "ok", "none seen: not a Slurm job")


def difference(values: Sequence[T]) -> str:
    """Describe the first rank whose value differs from rank 0's, with both values; "" if all are equal.

    Not collective. ``values`` has one entry for each rank.
    """
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    return "" if other is None else f"rank 0 has {values[0]}, rank {other} has {values[other]}"


CHECKS: Sequence[Callable[[Communicator, int, Mapping[str, str]], CheckResult]] = (
    check_launch,
    check_threads,
    check_time,
)
