"""Start a job under mpiexec, and see it end; MPIZERO_MPIEXEC may name several launchers: "MPIEXEC PYTHON;..."."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass

from scripts.harness import jobs
from scripts.harness.jobs import ROOT

#: Seconds for all ranks to be gone after the fault, on a machine that is busy with others, and for a whole case.
SOON, LIMIT = jobs.LAST, 60.0
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **dict.fromkeys(jobs.ALLOWED, "1")}


def launchers():
    """Pairs of mpiexec and the Python that goes with it."""
    return [(mpi.mpiexec, mpi.python) for mpi in jobs.launchers()]


@dataclass
class Ended:
    """What is left of a job."""

    status: int
    out: str
    err: str
    seconds: float  # from the fault, or the start, until the last rank was gone

    @property
    def said(self):
        """What was written by ranks, without the lines of the launcher and of MPI_Abort."""
        lines = self.err.splitlines()
        return [line for line in lines if line.startswith("[rank ") or re.match(r"\w+Error: ", line)]


def small_shared_memory(size):
    """Return a command that gives what it runs a /dev/shm of its own, of ``size``; None where that is not allowed."""
    namespace = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-rm"]
    within = [*namespace, "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh"]
    try:
        tried = subprocess.run([*within, "true"], capture_output=True, check=False)
    except OSError:
        return None
    return within if tried.returncode == 0 else None


def interrupt(job):
    job.process.send_signal(signal.SIGINT)


def run_job(launcher, folder, command, ranks=2, environment=(), within=(), when="ready-*", meanwhile=None, limit=LIMIT):
    """Run ``command`` (a list: program and arguments) on ``ranks`` ranks, and leave no process behind.

    ``within`` is a command that runs the launcher, such as :func:`small_shared_memory`. ``meanwhile`` is called with
    the job when all ranks have made a file of the pattern ``when``; the end is counted from there or from the fault.
    """
    started = [time.time()]

    def ready(job):
        if len(list(folder.glob(when))) < ranks:
            return False
        started.append(time.time())
        meanwhile(job)
        return True

    ended = jobs.run(
        [*within, *jobs.Mpi(*launcher).command(ranks, command)],
        limit, folder, dict(environment), cwd=folder, meanwhile=meanwhile and ready,
    )  # fmt: skip
    faults = [float(path.name.removeprefix("fault-")) for path in folder.glob("fault-*")]
    seconds = ended.gone - min(faults, default=started[-1])
    print(f"{' '.join(map(str, command[1:]))}, {ranks} ranks: all gone after {seconds:.2f} s")  # shown by pytest -rP
    assert not ended.late, f"not ended after {limit} s: {ended.out}\n{ended.err}"
    assert not ended.strays, "ranks were left behind"
    return Ended(ended.status, ended.out, ended.err, seconds)
