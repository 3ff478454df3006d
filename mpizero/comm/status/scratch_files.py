"""Make temporary files for status boards and for the output of faulthandler, in memory if there is room."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def scratch_folders() -> Iterator[str]:
    """Yield the folders to try for small temporary files: /dev/shm, then Python's folder for them, if there is one."""
    yield "/dev/shm"
    import tempfile

    with contextlib.suppress(OSError):  # nothing that can be written
        yield tempfile.gettempdir()


@contextlib.contextmanager
def anonymous_file() -> Iterator[int]:
    """Open an empty temporary file for a ``with`` block, yield its descriptor, and remove it at the end of the block.

    The file is made by ``os.memfd_create``, or in one of :func:`scratch_folders` if that does not work.

    Raises
    ------
    OSError
        If the file cannot be made in any folder.
    """
    with contextlib.ExitStack() as stack:
        yield _open(stack)


def _open(stack: contextlib.ExitStack) -> int:
    if (create := getattr(os, "memfd_create", None)) is not None:
        with contextlib.suppress(OSError):  # a kernel older than the C library
            file: int = create("mpizero")
            stack.callback(os.close, file)
            return file
    import tempfile

    for folder in scratch_folders():
        with contextlib.suppress(OSError):
            return stack.enter_context(tempfile.TemporaryFile(dir=folder)).fileno()
    raise OSError("no folder for a temporary file")
