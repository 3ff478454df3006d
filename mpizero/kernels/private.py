"""Keep machine code in folders and files that only this user can write.

[Note: who may write] Root may do anything anyway, so what belongs to root is trusted like the user's own. The folder
itself and the files in it must be nobody else's, and writable for nobody else. Above it, a user who may write can put
another folder in its place, but only one of theirs, which is refused; so project folders that a group shares are fine
there, and so is a sticky ``/tmp``. A folder that all users may write without that bit is not, and neither is a link of
another user's, which leads where they like.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LINKS = 40
_ANOTHER = "set MPIZERO_CACHE_DIR to a folder that only you can write"


class UnsafeFolderError(PermissionError):
    """Raised for a folder that others can write; names it, what is wrong, and how to mend it."""

    def __init__(self, path: str, wrong: str, remedy: str) -> None:
        super().__init__(f"{path} {wrong}")
        self.remedy = remedy


def foreign(found: os.stat_result) -> str:
    """Say why others could have written a file or folder; "" if only this user or root could."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        who = "all users" if found.st_mode & stat.S_IWOTH else f"group {found.st_gid}"
        return f"can be written by {who} (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def make_folder(root: Path, name: str) -> Path:
    """Return the folder ``name`` in ``root``; makes what is missing, for this user only.

    Raises
    ------
    UnsafeFolderError
        Others can write one of the two, or exchange them.
    OSError
        They cannot be made.
    """
    for folder in (*reversed(root.parents), root, root / name):
        if not folder.is_dir():
            with suppress(FileExistsError):
                folder.mkdir(0o700)
        if folder in (root, root / name):
            require_private(folder)
    return root / name


def require_private(folder: Path) -> None:
    """Raise :class:`UnsafeFolderError` unless only this user and root can write a folder."""
    *above, (path, found) = _way(folder)
    for step, parent in above:
        _require_way(step, parent)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if wrong := foreign(found):
        remedy = _ANOTHER
        if found.st_uid == os.geteuid():  # what lies in it may be theirs: closing it is not enough
            remedy = f"rm -r {shlex.quote(path)} (it is compiled again)"
        raise UnsafeFolderError(path, wrong, remedy)


def own_folder(base: Path, name: str) -> Path:
    """Return a folder of this user's alone in ``base``, a place for all: the same one for every process of the node.

    Others may have taken the name, and any number of names like it; a free one is found then, and the
    first in the order of names that is this user's counts, so that processes which look at the same time agree.

    Raises
    ------
    OSError
        There can be none.
    """
    for step, parent in _way(base):
        _require_way(step, parent)
    if _first_own(base, name) is None:
        with suppress(FileExistsError):
            os.mkdir(base / name, 0o700)
    if _first_own(base, name) is None:
        mkdtemp(prefix=f"{name}-", dir=base)
    if (found := _first_own(base, name)) is None:
        raise PermissionError(errno.EACCES, "a folder made here can be written by others", str(base))
    return found


def _first_own(base: Path, name: str) -> Path | None:
    for taken in sorted(os.listdir(base)):
        if taken == name or taken.startswith(f"{name}-"):
            with suppress(FileNotFoundError):
                found = os.lstat(base / taken)
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not foreign(found):
                    return base / taken
    return None


def _require_way(path: str, found: os.stat_result) -> None:
    """Raise unless what leads to a folder can be trusted; see [Note: who may write]."""
    if stat.S_ISLNK(found.st_mode):
        if found.st_uid not in (0, os.geteuid()):
            raise UnsafeFolderError(path, f"is a link of user {found.st_uid}", _ANOTHER)
    elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UnsafeFolderError(path, "can be written by all users and has no sticky bit", _ANOTHER)


def _way(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every folder and link on the way to a folder, the folder itself last."""
    place, links = "/", 0
    rest = list(reversed(Path(os.path.abspath(path)).parts[1:]))
    yield place, os.lstat(place)
    while rest:
        name = rest.pop()
        step = os.path.dirname(place) if name == ".." else os.path.join(place, name)
        found = os.lstat(step)
        yield step, found
        if not stat.S_ISLNK(found.st_mode):
            place = step
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = os.readlink(step)
        place = "/" if target.startswith("/") else place
        rest += [part for part in reversed(target.split("/")) if part not in ("", ".")]
