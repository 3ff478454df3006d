"""Write a file that appears only when it is complete."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mpizero.checkpoint.atomic_folder import TEMPORARY, sync_folder
from mpizero.errors import ConfigError, MpizeroError


@contextmanager
def new_file(path: str | os.PathLike[str], replace: bool) -> Iterator[str]:
    """Yield a temporary path beside ``path``; at the end sync the file there to disk and rename it to ``path``.

    The ``with`` block must write a file at the temporary path. If the block raises, the temporary file is removed.

    Raises
    ------
    ConfigError
        If ``path`` exists and ``replace`` is False, or if ``path`` is a folder.
    """
    target = os.path.abspath(os.fspath(path))
    if os.path.isdir(target):
        raise ConfigError(f"{target}: is a folder; give the name of a file")
    parent, name = os.path.split(target)
    check_free(target, replace)
    temporary = os.path.join(parent, f"{TEMPORARY}{name}.{socket.gethostname()}.{os.getpid()}")
    try:
        yield temporary
        handle = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        check_free(target, replace)
        os.rename(temporary, target)
    except BaseException as error:
        if isinstance(error, OSError) and not isinstance(error, MpizeroError) and error.filename is None:
            error.filename = target  # a full disk does not say of which file
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(parent)


def check_free(target: str, replace: bool) -> None:
    """Raise :class:`ConfigError` if ``target`` exists and ``replace`` is False."""
    if os.path.lexists(target) and not replace:
        raise ConfigError(f"{target}: exists; choose another name, or --force to replace it")
