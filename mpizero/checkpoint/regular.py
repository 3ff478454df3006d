"""Small files that somebody else may have made, in memory: only regular ones, of bounded size."""

from __future__ import annotations

import os

from mpizero.checkpoint.reader import open_regular
from mpizero.errors import CheckpointError


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the bytes of a regular file, ``limit`` at most; no link is followed, no pipe waited for. Not collective.

    Raises
    ------
    CheckpointError
        Something else than a regular file, or a longer one.
    OSError
        It cannot be opened or read.
    """
    name = os.fspath(path)
    with os.fdopen(open_regular(name), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{name}: more than {limit} bytes, which is the most that is read")
    return data
