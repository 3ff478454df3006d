"""Format errors as text, and write the error report of a rank that ends its job to standard error."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import stat
import termios
import time
import traceback
from collections.abc import Iterable, Sequence
from types import TracebackType

from mpizero._util.text import printable, shows_all, users_line

# Most seconds to wait until the report is read from this rank's pipe, and for the launcher to print it.
_DELIVERY, _FORWARDING = 1.0, 0.1


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
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def ranks_by_text(texts: Iterable[tuple[int, str]]) -> dict[str, str]:
    """Return, for each different text, its ranks as text ("ranks 0-2"); ``texts`` are (rank, text) in rank order."""
    found: dict[str, list[int]] = {}
    for rank, text in texts:
        found.setdefault(text, []).append(rank)
    return {text: ranks_text(ranks) for text, ranks in found.items()}


def by_ranks(texts: Sequence[str]) -> str:
    """Return which ranks have which text, such as "0.1 on ranks 0-2, 0.2 on rank 3"; rank i has ``texts[i]``."""
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


def await_delivery() -> None:
    """Wait until the launcher has read what this rank wrote to standard error, and 0.1 s more for it to print that.

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
