"""Run MPI jobs in which something fails, each with a time limit, and kill all processes that they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.jobs import ENVIRONMENT, alive

#: Environment variable of all processes of a job, with a value that belongs to this job only.
MARK = "MPIZERO_TORTURE"
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
#: Seconds within which the processes of a job must end after its launcher.
LAST = 15.0


@dataclass(frozen=True)
class Mpi:
    """Hold the launcher (``mpiexec``) of an MPI library, and the Python interpreter whose mpi4py uses that library."""

    name: str
    mpiexec: str
    python: str

    def command(self, ranks: int, program: Sequence[str], victim: int = -1, wrapper: str = "") -> list[str]:
        """Return the command that starts ``program`` on ``ranks`` ranks.

        If ``victim`` is a rank, this rank is started by ``wrapper``, a line of bash. In it, ``"$@"`` is the program,
        and ``$$`` is the process id that the program gets by ``exec``.
        """
        plain = [self.python, *program]
        if victim < 0:
            return [self.mpiexec, "-n", str(ranks), *plain]
        parts = []
        for count, words in (
            (victim, plain),
            (1, ["bash", "-c", wrapper, "victim", *plain]),
            (ranks - victim - 1, plain),
        ):
            if count:
                parts += [":", "-n", str(count), *words]
        return [self.mpiexec, *parts[1:]]


@dataclass
class Ended:
    """Hold the end of a job.

    ``status`` is the exit status, ``out`` and ``err`` the output, ``strays`` the number of processes that were left,
    and ``late`` says whether the job was killed because it took too long.
    """

    status: int
    out: str
    err: str
    seconds: float
    strays: int
    late: bool


class Job:
    """Find and kill the processes of a running job: those whose environment has the job's mark."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self.process, self._mark = process, f"{MARK}={mark}".encode()

    def processes(self) -> dict[int, int]:
        """Return the rank of each living process of the job by process id; -1 for launchers and tracers."""
        found = {}
        for entry in os.scandir("/proc"):
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                environment = Path(entry.path, "environ").read_bytes().split(b"\0")
                if self._mark in environment and alive(int(entry.name)):
                    ranks = [v.partition(b"=")[2] for v in environment if v.split(b"=")[0].decode() in RANKS]
                    found[int(entry.name)] = int(ranks[0]) if ranks else -1
        return found

    def kill(self, whom: str) -> None:
        """Kill processes by SIGKILL; ``whom`` is "launcher", "all" (all ranks) or "rank N"."""
        if whom == "launcher":
            self.process.send_signal(signal.SIGKILL)
            return
        for pid, rank in self.processes().items():
            if rank >= 0 and whom in ("all", f"rank {rank}"):
                _kill(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run(
    command: Sequence[str],
    folder: Path,
    limit: float,
    meanwhile: Callable[[Job], bool] = lambda job: True,
    variables: dict[str, str] | None = None,
) -> Ended:
    """Run a job until it ends or ``limit`` seconds have passed, and return how it ended.

    ``meanwhile(job)`` is called every few milliseconds until it returns True. The files of output are in ``folder``.
    ``variables`` are further environment variables. Processes that are left are counted and killed.
    """
    mark = uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    environment = os.environ | ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1", MARK: mark} | (variables or {})
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        job, late = Job(process, mark), False
        try:
            done = False
            while process.poll() is None and not late:
                done = done or meanwhile(job)
                time.sleep(0.002 if not done else 0.01)
                late = time.monotonic() - started > limit
            if late:
                process.kill()
            status, seconds = process.wait(), time.monotonic() - started
            left = _wait_for_the_rest(job)
        finally:
            for pid in job.processes():
                _kill(pid)
            process.wait()
    texts = [(folder / name).read_text(errors="replace") for name in ("out", "err")]
    return Ended(status, *texts, seconds, left, late)


def _wait_for_the_rest(job: Job) -> int:
    limit = time.monotonic() + LAST
    while (left := len(job.processes())) and time.monotonic() < limit:
        time.sleep(0.02)
    return left
