"""Make temporary files, in memory where there is room: for status boards and for the output of faulthandler."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator


def scratch_folders() -> Iterator[str]:
    """Yield the folders for small files: one in memory, then the folder of temporary files, if there is one."""
    yield "/dev/shm"
    with contextlib.suppress(OSError):  # nothing that can be written
        yield tempfile.gettempdir()


@contextlib.contextmanager
def anonymous_file() -> Iterator[int]:
    """Open an empty file that is removed when it is closed.

    A Python that was built against a glibc before 2.27 has no ``os.memfd_create``.

    Raises
    ------
    OSError
        If no folder allows it.
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
