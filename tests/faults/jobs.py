"""Start a job under mpiexec in a session of its own, and see it end.

MPIZERO_MPIEXEC names other launchers than the one beside this interpreter or on PATH: "MPIEXEC PYTHON", several
separated by ";".
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Seconds until a job that hangs is ended: fewer than its programs sleep where they would not end by themselves.
LIMIT = 90.0
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def launchers():
    """Pairs of mpiexec and the Python that goes with it."""
    if given := os.environ.get("MPIZERO_MPIEXEC"):
        pairs = [entry.split() for entry in given.split(";")]
        return [(pair[0], pair[1] if len(pair) > 1 else sys.executable) for pair in pairs]
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    return [(found, sys.executable)] if found else []


@dataclass
class Ended:
    """What is left of a job."""

    status: int
    out: str
    err: str

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


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids(folder):
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def run_job(
    launcher, folder, command, ranks=2, interrupt=False, environment=(), within=(), meanwhile=None, limit=LIMIT
):
    """Run ``command`` (a list: program and arguments) on ``ranks`` ranks, and leave no process behind.

    ``within`` is a command that runs the launcher, such as :func:`small_shared_memory`. ``meanwhile`` is called with
    the launcher's process when all ranks have made the file ``ready-RANK``.
    """
    mpiexec, python = launcher
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        process = subprocess.Popen(
            [*within, mpiexec, "-n", str(ranks), python, *map(str, command)],
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            env=os.environ | ENVIRONMENT | dict(environment),
            cwd=folder,
            start_new_session=True,
        )
        try:
            if interrupt:
                wait_for(lambda: (folder / "ready").exists())
                process.send_signal(signal.SIGINT)
            if meanwhile is not None:
                wait_for(lambda: len(list(folder.glob("ready-*"))) == ranks)
                meanwhile(process)
            status = process.wait(limit)
            wait_for(lambda: not any(map(alive, pids(folder))))
        finally:
            for pid in (process.pid, *pids(folder)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    err = re.sub(r"(?m)^mpizero: kernels: .* are not compiled yet .*\n", "", (folder / "err").read_text())
    return Ended(status, (folder / "out").read_text(), err)


def wait_for(condition):
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit, "ranks were left behind"
        time.sleep(0.01)
