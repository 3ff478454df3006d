"""Open files that are not trusted: only regular files, and with a limit on the size of a file that is read whole."""

from __future__ import annotations

import errno
import os
import stat

from mpizero.errors import ArgumentError, CheckpointError


def open_regular(path: str) -> int:
    """Open a file for reading and return its descriptor; raise CheckpointError unless it is a regular file, no link."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise CheckpointError(f"{path}: not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path}: not a regular file")
    return file


def path_of(folder: str | os.PathLike[str]) -> str:
    """Return the path ``folder`` as a string; raise :class:`ArgumentError` if it is not a path."""
    if not isinstance(folder, str | os.PathLike):
        raise ArgumentError(f"the folder of a checkpoint is a path, a string or pathlib.Path; got {folder!r:.80}")
    return os.fspath(folder)


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the bytes of a regular file that has at most ``limit`` bytes.

    Raises
    ------
    CheckpointError
        If ``path`` is a link or not a regular file, or the file has more than ``limit`` bytes.
    OSError
        If the file cannot be opened or read.
    """
    name = os.fspath(path)
    with os.fdopen(open_regular(name), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{name}: more than {limit} bytes, which is the most that is read")
    return data
