"""Find shared-memory files that killed jobs have left behind, and make sure that no process uses them.

[Note: unused files] The kernel grants a write lease on a file only if no process has it open or mapped, in any
container, running or stopped. A process that opens the file later has to wait until the lease is released. So a file
can be removed safely while it is leased. If the kernel grants no leases, the file is kept.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

#: Folder in which most MPI libraries keep windows and queues.
SHARED_FOLDER = "/dev/shm"
#: What the names of the shared-memory files of MPI libraries and of mpizero begin with.
_PREFIXES = ("mpich_", "MPI", "vader_segment", "sm_segment", "osc_", "psm_", "psm2_", "ucx_shm", "mpizero-")
#: Seconds since its last change before a file counts as left behind.
AGE = 300.0


class Leftover(NamedTuple):
    """Describe a shared-memory file, or a session folder of Open MPI, that a killed job has left behind.

    Attributes
    ----------
    path : str
        Path of the file or folder.
    nbytes : int
        Bytes of memory or disk that the file or folder occupies.
    spared : str
        The reason why the file or folder is not removed; "" if it may be removed.
    """

    path: str
    nbytes: int
    spared: str


def leftovers(folder: str = SHARED_FOLDER, age: float = AGE) -> list[Leftover]:
    """Return this user's shared-memory files in ``folder`` that are unused, or whose use cannot be determined.

    The attribute ``spared`` of a returned file is set if its use cannot be determined, or if the file was changed less
    than ``age`` seconds ago.
    """
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(folder).iterdir()):
            if path.name.startswith(_PREFIXES) and (nbytes := _mine(path)) is not None:
                with _unused(path) as why:
                    if why is not None:
                        found.append(Leftover(str(path), nbytes, why or _too_young(path, age)))
    return found


def session_folders(folder: str | None = None, age: float = AGE) -> list[Leftover]:
    """Return the session folders that killed Open MPI launchers of this user have left on this host.

    ``folder`` is the folder of temporary files; None is Python's default. The attribute ``spared`` of a returned
    session folder is set if the use of a file in it cannot be determined, or if the folder was changed less than
    ``age`` seconds ago.
    """
    import tempfile

    top = Path(folder or tempfile.gettempdir()) / f"ompi.{os.uname().nodename}.{os.getuid()}"
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(top.glob("pid.*")):
            number = path.name.removeprefix("pid.")
            if stat.S_ISDIR(path.lstat().st_mode) and path.lstat().st_uid == os.getuid() and number.isdecimal():
                files = [file for file in path.rglob("*") if stat.S_ISREG(file.lstat().st_mode)]
                states = [_state(file) for file in files]
                if Path(f"/proc/{number}").exists() or None in states:
                    continue
                nbytes = sum(512 * file.lstat().st_blocks for file in files)
                found.append(Leftover(str(path), nbytes, next(filter(None, states), "") or _too_young(path, age)))
    return found


def remove(found: Sequence[Leftover]) -> tuple[list[Leftover], list[Leftover]]:
    """Remove the found files and folders that may be removed; return the removed and the kept ones as two lists.

    Each file is checked again before it is removed. ``spared`` of the kept ones says why they were kept.
    """
    import shutil

    gone: list[Leftover] = []
    spared: list[Leftover] = []
    for leftover in found:
        path = Path(leftover.path)
        why = leftover.spared
        if not why and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            why = "it could not be removed whole" if path.exists() else ""
        elif not why:
            with _unused(path) as state:
                why = "somebody has opened it" if state is None else state
                if not why:
                    try:
                        path.unlink(missing_ok=True)
                    except OSError as error:
                        why = str(error)
        (spared if why else gone).append(leftover._replace(spared=why))
    return gone, spared


def taken_by_leftovers() -> str:
    """Return the end of an error message that tells how much shared memory killed jobs still occupy.

    Only files that may be removed are counted; the text is "" if there are none.
    """
    removable = [leftover for leftover in leftovers() if not leftover.spared]
    if not removable:
        return ""
    size = sum(leftover.nbytes for leftover in removable)
    files = f"{len(removable)} file{'s' * (len(removable) > 1)}"
    return f"; {size} bytes of it are held by {files} of killed jobs of yours: `mpizero doctor --clean` removes them"


def _mine(path: Path) -> int | None:
    """Return the bytes that a regular file of this user occupies; None if ``path`` is anything else or is gone."""
    try:
        status = path.lstat()
    except OSError:
        return None  # removed meanwhile
    return 512 * status.st_blocks if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() else None


def _too_young(path: Path, age: float) -> str:
    try:
        status = path.lstat()
    except OSError:
        return "it is gone"
    passed = time.time() - _changed(status)
    return "" if passed >= age else f"it was changed {max(0.0, passed):.0f} s ago"


def _changed(status: os.stat_result) -> float:
    return max(status.st_mtime, status.st_ctime)


def _state(path: Path) -> str | None:
    with _unused(path) as why:
        return why


@contextlib.contextmanager
def _unused(path: Path) -> Iterator[str | None]:
    """Hold a lease on a file during the block, if no process uses it ([Note: unused files]).

    Yields "" if the file is unused, None if it is in use or gone, else the reason why this cannot be determined.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        yield f"whether it is in use cannot be told: {error}"
        return
    try:
        yield _leased(file)
    finally:
        os.close(file)  # which releases the lease


def _leased(file: int) -> str | None:
    if not hasattr(fcntl, "F_SETLEASE"):
        return "whether it is in use cannot be told on this system"
    try:
        # The kernel sends a signal when a process opens the file meanwhile: one that does nothing.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return None if error.errno == errno.EAGAIN else f"whether it is in use cannot be told: {error}"
    return ""
