"""Start a job under an MPI, as plain processes or as threads, see how it ends, and leave no process of it behind.

Every process of a job has a variable of the environment with a value of that job only, so those are found that a
launcher which was killed has left. A rank gives a value back by :func:`answer`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The root of this checkout.
ROOT = Path(__file__).resolve().parents[2]
#: Environment variable of all processes of a job.
MARK = "MPIZERO_JOB_OF_A_SCRIPT"
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
#: What Open MPI wants where root starts it, and more ranks than there are cores.
ALLOWED = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: What a line begins with that gives a value back.
ANSWER = "the answer is "
#: Seconds within which the processes of a job must end after its launcher; seconds that a job has if nothing is said.
LAST, LIMIT = 15.0, 3600.0
#: The kernel's flag PF_KTHREAD, in the ninth field of /proc/PID/stat.
KERNEL_THREAD = 0x00200000


@dataclass(frozen=True)
class Mpi:
    """Hold the launcher of an MPI library, and the Python interpreter whose mpi4py uses that library.

    ``python`` may have words before the interpreter: "env NAME=value python".
    """

    mpiexec: str
    python: str = sys.executable

    def command(self, ranks: int, program: Sequence[object], victim: int = -1, wrapper: str = "") -> list[str]:
        """Return the command that starts ``program`` on ``ranks`` ranks.

        If ``victim`` is a rank, this rank is started by ``wrapper``, a line of bash. In it, ``"$@"`` is the program,
        and ``$$`` is the process id that the program gets by ``exec``.
        """
        plain = [*shlex.split(self.python), *map(str, program)]
        if victim < 0:
            return [self.mpiexec, "-n", str(ranks), *plain]
        wrapped = ["bash", "-c", wrapper, "victim", *plain]
        parts = ((victim, plain), (1, wrapped), (ranks - victim - 1, plain))
        return [self.mpiexec, *[word for n, words in parts if n for word in (":", "-n", str(n), *words)][1:]]


def beside(python: str, program: str = "mpiexec") -> str:
    """Return the path of ``program`` in the folder of the interpreter ``python``; if it is not there, its bare name."""
    own = Path(python).with_name(program)
    return str(own) if own.exists() else program


def launchers(given: Sequence[str] | None = None) -> list[Mpi]:
    """Return the launchers that options "MPIEXEC PYTHON" name, or MPIZERO_MPIEXEC, or the one beside this Python."""
    entries = given or [entry for entry in os.environ.get("MPIZERO_MPIEXEC", "").split(";") if entry]
    if entries:
        return [Mpi(*entry.split(maxsplit=1)) for entry in entries]
    found = shutil.which(beside(sys.executable))
    return [Mpi(found)] if found else []


def add_mpis(options: argparse.ArgumentParser) -> None:
    """Add the options that name an MPI library and maybe a second one."""
    options.add_argument(
        "--mpiexec", default=beside(sys.executable), help="first MPI's launcher (default: %(default)s)"
    )
    options.add_argument("--python", default=sys.executable, help="its interpreter; or 'env NAME=value python'")
    options.add_argument("--second-mpiexec", help="launcher of another MPI")
    options.add_argument("--second-python", help="interpreter for the other MPI")


def mpis_of(args: argparse.Namespace) -> dict[str, Mpi]:
    """Return the MPI libraries that these options name: "first", and maybe "second"."""
    found = {"first": Mpi(args.mpiexec, args.python)}
    if args.second_mpiexec:
        found["second"] = Mpi(args.second_mpiexec, args.second_python or sys.executable)
    return found


def environment_of(threads: int | None = 1) -> dict[str, str]:
    """Return this process's environment, changed so that BLAS has ``threads`` and Python imports this checkout.

    With None the threads of BLAS stay as they are.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = ({} if threads is None else dict.fromkeys(THREADS, str(threads))) | dict.fromkeys(ALLOWED, "1")
    return os.environ | fixed | {"PYTHONPATH": os.pathsep.join(paths)}


class Job:
    """Start a job, and find and kill its processes: those whose environment has the job's mark.

    ``command`` is started with the variables ``environment`` besides those of :func:`environment_of` for
    ``threads``. ``out`` and ``err`` are files for its output.
    """

    def __init__(
        self, command: Sequence[object], out: Any = None, err: Any = None, environment: Mapping[str, str] | None = None,
        cwd: Path | None = None, threads: int | None = 1,
    ) -> None:  # fmt: skip
        mark = uuid.uuid4().hex
        self._mark = f"{MARK}={mark}".encode()
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment_of(threads) | dict(environment or {}) | {MARK: mark},
            cwd=cwd,
            start_new_session=True,
        )
        self._began = _started(f"/proc/{self.process.pid}")

    def processes(self) -> dict[int, int]:
        """Return the rank of each living process of the job by process id; -1 for launchers and tracers."""
        found = {}
        for entry in os.scandir("/proc"):
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                environment = self._environment(entry.path)
                if self._mark in environment and _alive(entry.path):
                    ranks = [v.partition(b"=")[2] for v in environment if v.split(b"=")[0].decode() in RANKS]
                    found[int(entry.name)] = int(ranks[0]) if ranks else -1
        return found

    def _environment(self, folder: str) -> list[bytes]:
        """Return the environment of a process.

        It is empty for a moment while the process changes from one program to the next, so one that can be the
        job's, and has none, is read again for a while.
        """
        until = time.monotonic() + 0.5
        while not (found := Path(folder, "environ").read_bytes()) and time.monotonic() < until:
            if not _alive(folder) or _started(folder) < self._began:
                break
            time.sleep(0.001)
        return found.split(b"\0")

    def kill(self, whom: str) -> None:
        """Kill processes by SIGKILL; ``whom`` is "launcher", "all" (all ranks) or "rank N"."""
        if whom == "launcher":
            self.process.kill()
            return
        for pid, rank in self.processes().items():
            if rank >= 0 and whom in ("all", f"rank {rank}"):
                _kill(pid)

    def end(self) -> None:
        """Kill what is left of the job, and wait for its first process."""
        if self.process.poll() is None:
            self.process.kill()
        until = time.monotonic() + 10.0
        while (left := self.processes()) and time.monotonic() < until:  # a killed process is there until it has ended
            for pid in left:
                _kill(pid)
            time.sleep(0.002)
        self.process.wait()

    def wait(self, limit: float, meanwhile: Callable[[Job], bool] | None = None) -> bool:
        """Wait until the job ends, or ``limit`` seconds have passed; tell whether it ended.

        ``meanwhile(job)`` is called every few milliseconds until it returns True.
        """
        until = time.monotonic() + limit
        while meanwhile is not None and self.process.poll() is None and time.monotonic() < until:
            meanwhile = None if meanwhile(self) else meanwhile
            time.sleep(0.002)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        return self.process.poll() is not None

    def left(self) -> int:
        """Return the number of processes that do not end within ``LAST`` seconds after the first one."""
        until = time.monotonic() + LAST
        while (count := len(self.processes())) and time.monotonic() < until:
            time.sleep(0.02)
        return count


def _alive(folder: str) -> bool:
    return _stat(folder)[0] not in "ZX"


def _started(folder: str) -> int:
    """Return when a process was started, in ticks since the machine's start; 0 for a thread of the kernel."""
    stat = _stat(folder)
    return 0 if int(stat[6]) & KERNEL_THREAD else int(stat[19])


def _stat(folder: str) -> list[str]:
    return Path(folder, "stat").read_text().rpartition(")")[2].split()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """Hold the end of a job.

    ``status`` is the exit status, ``out`` and ``err`` the output, ``strays`` the number of processes that were left.
    ``late`` says whether the job was killed because it took too long. ``gone`` is the time of the day at which all of
    its processes were gone.
    """

    status: int
    out: str
    err: str
    seconds: float
    strays: int
    late: bool
    gone: float

    @property
    def answer(self) -> Any:
        """The value that the job has given back by :func:`answer`, the last one; None if there is none."""
        lines = [line for line in self.out.splitlines() if ANSWER in line]
        return json.loads(lines[-1].partition(ANSWER)[2]) if lines else None


def answer(value: Any) -> None:
    """Give a value that JSON can hold back to the script that has started this job."""
    print(ANSWER + json.dumps(value), flush=True)


def run(
    command: Sequence[object],
    limit: float = LIMIT,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    meanwhile: Callable[[Job], bool] | None = None,
    at_limit: Callable[[Job], object] | None = None,
    show: bool = False,
    threads: int | None = 1,
) -> Ended:
    """Run a job until it ends or is killed after ``limit`` seconds, and return how it ended.

    ``at_limit(job)`` is called before it is killed. ``folder`` is that of the files of output, "out" and "err"; a
    temporary one for None. With ``show`` standard error is this process's own, in place of being held. ``meanwhile`` is
    as for :meth:`Job.wait`, ``threads`` as for :func:`environment_of`.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="job-"))) if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        out, err = (stack.enter_context((folder / name).open("wb")) for name in ("out", "err"))
        started = time.monotonic()
        job = Job(command, out, None if show else err, environment, cwd, threads)
        try:
            if late := not job.wait(limit, meanwhile):
                at_limit and at_limit(job)
                job.process.kill()
            status, seconds = job.process.wait(), time.monotonic() - started
            strays, gone = 0 if late else job.left(), time.time()
        finally:
            job.end()
        texts = [(folder / name).read_text(errors="replace") for name in ("out", "err")]
    return Ended(status, *texts, seconds, strays, late, gone)


def well(command: Sequence[object], status: Sequence[int] = (0,), limit: float = LIMIT, **more: Any) -> Ended:
    """Run a job; end this script if it takes too long, or ends with another exit status than ``status``."""
    ended, told = run(command, limit, **more), " ".join(map(str, command))
    if ended.late:
        sys.exit(f"{told}: ended by its limit of {limit:g} seconds")
    if ended.status not in status:
        sys.exit(f"{ended.err}\n{told}: exit status {ended.status}")
    return ended


def ranks_of(script: str, mpiexec: str, ranks: int, *words: str) -> Any:
    """Run a script with this Python and the options ``words`` as an MPI job, and return its answer."""
    return well(Mpi(mpiexec).command(ranks, [script, *words])).answer


def in_threads(ranks: int, work: Callable[[Any], Any]) -> list[Any]:
    """Call ``work(comm)`` on ranks that are threads of this process, without MPI; return the results by rank."""
    from mpizero.testing import run_in_threads

    with contextlib.redirect_stderr(io.StringIO()):  # drops the warnings "nodes have 2, 1 ranks"
        return list(run_in_threads(ranks, work))
