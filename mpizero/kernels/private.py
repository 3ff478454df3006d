"""Check and make folders for machine code that only this user can write.

[Note: who may write] Files and folders of root are trusted like the user's own, because root may do anything anyway.
The folder itself and the files in it must belong to this user or root, and nobody else may write to them. For the
folders above it the rules are weaker. Somebody who can write to one of them could replace the folder by another, but
only by a folder of their own, which is then not accepted. So project folders that a group can write are allowed there,
and also ``/tmp`` with its sticky bit. Not allowed is a folder that all users can write and that has no sticky bit, or a
symbolic link of another user, which may lead anywhere.
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
    """Raised for a folder that others can write; the message says what is wrong, ``remedy`` what to do about it."""

    def __init__(self, path: str, wrong: str, remedy: str) -> None:
        super().__init__(f"{path} {wrong}")
        self.remedy = remedy


def foreign(found: os.stat_result) -> str:
    """Return the reason why others could have written a file or folder; "" if only this user or root could."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        who = "all users" if found.st_mode & stat.S_IWOTH else f"group {found.st_gid}"
        return f"can be written by {who} (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def make_folder(root: Path, name: str) -> Path:
    """Return the folder ``name`` in ``root``; make missing folders, which only this user can read and write.

    Raises
    ------
    UnsafeFolderError
        Others can write to one of the two folders, or replace it.
    OSError
        A folder cannot be made.
    """
    for folder in (*reversed(root.parents), root, root / name):
        if not folder.is_dir():
            with suppress(FileExistsError):
                folder.mkdir(0o700)
        if folder in (root, root / name):
            require_private(folder)
    return root / name


def require_private(folder: Path) -> None:
    """Raise :class:`UnsafeFolderError` unless only this user and root can write to a folder or replace it."""
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
    """Return a folder in ``base`` (a folder of all users, such as /tmp) that only this user can write.

    All processes of this user on a node get the same folder. If another user has taken the name ``name``, a folder
    with a similar name is made. Of several folders that belong to this user, the first in the order of names is
    returned, so that processes which look at the same time agree.

    Raises
    ------
    OSError
        No such folder can be made.
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
    """Raise an error unless a folder or link on the path to a folder is safe; see [Note: who may write]."""
    if stat.S_ISLNK(found.st_mode):
        if found.st_uid not in (0, os.geteuid()):
            raise UnsafeFolderError(path, f"is a link of user {found.st_uid}", _ANOTHER)
    elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UnsafeFolderError(path, "can be written by all users and has no sticky bit", _ANOTHER)


def _way(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every folder and symbolic link on the path to a folder, with its status; the folder itself comes last."""
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
