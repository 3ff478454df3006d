"""Files that need no name, in memory where there is room: for boards and for what faulthandler writes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator


def scratch_folders() -> Iterator[str]:
    """Yield where small files may be made: in memory, then where this process keeps temporary files, if anywhere."""
    yield "/dev/shm"
    with contextlib.suppress(OSError):  # nothing that can be written
        yield tempfile.gettempdir()


@contextlib.contextmanager
def anonymous_file() -> Iterator[int]:
    """Open an empty file that is gone when it is closed.

    Not collective. A Python that was built against a glibc before 2.27 has no ``os.memfd_create``.

    Raises
    ------
    OSError
        If there is nowhere to make one.
    """
    with contextlib.ExitStack() as stack:
        yield _open(stack)


def _open(stack: contextlib.ExitStack) -> int:
    if (create := getattr(os, "memfd_create", None)) is not None:
        with contextlib.suppress(OSError):  # a kernel older than the C library
            file: int = create("mpizero")
            stack.callback(os.close, file)
            return file
    for folder in scratch_folders():
        with contextlib.suppress(OSError):
            return stack.enter_context(tempfile.TemporaryFile(dir=folder)).fileno()
    raise OSError("no folder for a temporary file")
