"""Format errors as text, write the report of a rank that ends its job, and find shared memory left by killed jobs.

Reports name ranks as ranges, such as "ranks 0-2", and end with the source line of the user's code. :func:`write_stderr`
writes a report in one piece, and :func:`await_delivery` waits until the launcher has read it. :func:`leftovers` finds
shared-memory files that no process uses: an error message on missing memory counts their bytes, and
``mpizero doctor --clean`` removes them.

[Note: unused files] The kernel grants a write lease on a file only if no process has it open or mapped, in any
container, running or stopped. A process that opens the file later has to wait until the lease is released. So a file
can be removed safely while it is leased. If the kernel grants no leases, the file is kept.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import signal
import stat
import termios
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from mpizero._util.text import printable, shows_all, users_line


def describe_error(error: BaseException) -> str:
    """Return one line with the class and text of an error, followed by the lines in its attribute ``details``, if any.

    The first line ends with the source line of the innermost user code in the traceback, if there is one, and the
    error's notes.
    """
    first = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no further description'}"
    line = users_line(error.__traceback__)
    if line is not None and str(line) not in first:
        first = f"{first} ({line})"
    first = "; ".join([first, *getattr(error, "__notes__", ())])
    return "\n".join([first, *getattr(error, "details", ())])


def user_message(error: BaseException) -> str:
    """Return the text to print for an error of this package: the text from :func:`describe_error`.

    If the environment variable MPIZERO_TRACEBACK is set, and is not "0", the text is the whole traceback.
    """
    return format_error(error, error.__traceback__) if shows_all() else describe_error(error)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks as text, such as "rank 3" or "ranks 0-2, 5"; ``ranks`` are in ascending order."""
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in rank_ranges(ranks))
    return f"rank{'s' if len(ranks) != 1 else ''} {text}"


def rank_ranges(ranks: Iterable[int]) -> list[list[int]]:
    """Return the ranges of consecutive ranks, each as its first and last rank; ``ranks`` are in ascending order."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ranges


def ranks_by_text(texts: Iterable[tuple[int, str]]) -> dict[str, str]:
    """Return, by text, which ranks have this text ("ranks 0-2"); ``texts`` are pairs (rank, text) in rank order."""
    by_text: dict[str, list[int]] = {}
    for rank, text in texts:
        by_text.setdefault(text, []).append(rank)
    return {text: ranks_text(ranks) for text, ranks in by_text.items()}


def by_ranks(texts: Sequence[str]) -> str:
    """Return each different text with its ranks, such as "0.1 on ranks 0-2, 0.2 on rank 3"; rank i has ``texts[i]``."""
    return ", ".join(f"{text} on {ranks}" for text, ranks in ranks_by_text(enumerate(texts)).items())


def format_error(error: BaseException, trace: TracebackType | None) -> str:
    """Return the formatted traceback ``trace`` of an error.

    If errors are chained, only the first header says "Traceback", and the others say "Frames". So a log contains the
    word "Traceback" once for each failure.
    """
    text = "".join(traceback.format_exception(type(error), error, trace))
    head, first, rest = text.partition("Traceback (most recent call last)")
    return head + first + rest.replace("Traceback (most recent call last)", "Frames (most recent call last)")


def write_stderr(text: str) -> None:
    """Write a text to standard error in one piece, so that lines of ranks do not mix; escape control characters."""
    data = memoryview(printable(text, keep="\n\t").encode())
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


#: Most seconds to wait until the report is read from this rank's pipe, and for the launcher to print it.
_DELIVERY, _FORWARDING = 1.0, 0.1


def await_delivery() -> None:
    """Wait until the launcher has read this rank's output to standard error, and 0.1 s more for it to print the output.

    Waits for 1.1 s at most. MPICH's mpiexec drops output that it has not read when a rank aborts: without this wait one
    traceback in six was lost on a busy machine.
    """
    limit, unread = time.monotonic() + _DELIVERY, array.array("i", [0])
    with contextlib.suppress(OSError):
        while stat.S_ISFIFO(os.fstat(2).st_mode) and time.monotonic() < limit:
            fcntl.ioctl(2, termios.FIONREAD, unread)
            if not unread[0]:
                break
            time.sleep(0.002)
    time.sleep(_FORWARDING)


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
    unused = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(folder).iterdir()):
            if path.name.startswith(_PREFIXES) and (nbytes := _user_file_bytes(path)) is not None:
                with _unused(path) as why:
                    if why is not None:
                        unused.append(Leftover(str(path), nbytes, why or _too_young(path, age)))
    return unused


def session_folders(folder: str | None = None, age: float = AGE) -> list[Leftover]:
    """Return the session folders that killed Open MPI launchers of this user have left on this host.

    ``folder`` is the folder of temporary files; None is Python's default. The attribute ``spared`` of a returned
    session folder is set if the use of a file in it cannot be determined, or if the folder was changed less than
    ``age`` seconds ago.
    """
    import tempfile

    top = Path(folder or tempfile.gettempdir()) / f"ompi.{os.uname().nodename}.{os.getuid()}"
    unused = []
    with contextlib.suppress(OSError):
        for path in sorted(top.glob("pid.*")):
            number = path.name.removeprefix("pid.")
            if stat.S_ISDIR(path.lstat().st_mode) and path.lstat().st_uid == os.getuid() and number.isdecimal():
                files = [file for file in path.rglob("*") if stat.S_ISREG(file.lstat().st_mode)]
                states = [_state(file) for file in files]
                if Path(f"/proc/{number}").exists() or None in states:
                    continue
                nbytes = sum(512 * file.lstat().st_blocks for file in files)
                unused.append(Leftover(str(path), nbytes, next(filter(None, states), "") or _too_young(path, age)))
    return unused


def remove_leftovers(candidates: Sequence[Leftover]) -> tuple[list[Leftover], list[Leftover]]:
    """Remove those of ``candidates`` that may be removed; return the removed and the kept ones as two lists.

    Each file is checked again before it is removed. The attribute ``spared`` of each kept one says why it was kept.
    """
    import shutil

    gone: list[Leftover] = []
    spared: list[Leftover] = []
    for leftover in candidates:
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
    """Return the end of an error message: how much shared memory the files of killed jobs still occupy.

    Only files that may be removed are counted; the text is "" if there are none.
    """
    removable = [leftover for leftover in leftovers() if not leftover.spared]
    if not removable:
        return ""
    size = sum(leftover.nbytes for leftover in removable)
    files = f"{len(removable)} file{'s' * (len(removable) > 1)}"
    return f"; {size} bytes of it are held by {files} of killed jobs of yours: `mpizero doctor --clean` removes them"


def _user_file_bytes(path: Path) -> int | None:
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
