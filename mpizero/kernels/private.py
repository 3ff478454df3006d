"""Check and make folders of machine code, to which only this user may be able to write.

[Note: who may write] Files and folders of root are trusted like the user's own, because root may do anything anyway.
The folder of machine code and the files in it must belong to this user or root, and nobody else may be able to write to
them. For the folders above it the rules are weaker. Somebody who can write to one of them could replace the folder of
machine code, but only by a folder that belongs to them, which is then not accepted. So the folders above it may be
project folders that a group can write, or ``/tmp`` with its sticky bit. They may not be folders that all users can
write and that have no sticky bit, and no symbolic link of another user may be on the path, because it may lead
anywhere.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LINKS = 40
_ANOTHER = "set MPIZERO_CACHE_DIR to a folder that only you can write"


class UnsafeFolderError(PermissionError):
    """Raised for a folder to which other users can write.

    Attributes
    ----------
    remedy : str
        What the user can do about it. (The message of the exception says what is wrong.)
    """

    def __init__(self, path: str, wrong: str, remedy: str) -> None:
        super().__init__(f"{path} {wrong}")
        self.remedy = remedy


def foreign(found: os.stat_result) -> str:
    """Return the reason why other users could have written a file or folder; "" if only this user or root could.

    ``found`` is the status of the file or folder.
    """
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        who = "all users" if found.st_mode & stat.S_IWOTH else f"group {found.st_gid}"
        return f"can be written by {who} (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def make_folder(root: Path, name: str) -> Path:
    """Return the path of the folder ``name`` in ``root``, after making all folders of the path that are missing.

    Only this user can read and write the folders made.

    Raises
    ------
    UnsafeFolderError
        If other users can write to ``root`` or to the folder, or replace one of them.
    OSError
        If a folder cannot be made.
    """
    for folder in (*reversed(root.parents), root, root / name):
        if not folder.is_dir():
            with suppress(FileExistsError):
                folder.mkdir(0o700)
        if folder in (root, root / name):
            require_private(folder)
    return root / name


def require_private(folder: Path) -> None:
    """Raise :class:`UnsafeFolderError` if other users than this one and root can write to a folder or replace it."""
    *above, (path, found) = _way(folder)
    for step, parent in above:
        _require_way(step, parent)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if wrong := foreign(found):
        remedy = _ANOTHER
        if found.st_uid == os.geteuid():  # what lies in it may be theirs: closing it is not enough
            import shlex

            remedy = f"rm -r {shlex.quote(path)} (it is compiled again)"
        raise UnsafeFolderError(path, wrong, remedy)


def own_folder(base: Path, name: str) -> Path:
    """Return the path of a folder in ``base`` (a folder for all users, such as /tmp) that only this user can write.

    The folder is made if there is none yet. All processes of this user on a node get the same folder. If another user
    has a folder called ``name``, this user's folder is called ``name-`` and random letters. If this user has several
    such folders, the first one in alphabetical order is returned, so that processes that run at the same time agree.

    Raises
    ------
    OSError
        If such a folder cannot be made.
    """
    for step, parent in _way(base):
        _require_way(step, parent)
    if _first_own(base, name) is None:
        with suppress(FileExistsError):
            os.mkdir(base / name, 0o700)
    if _first_own(base, name) is None:
        from tempfile import mkdtemp

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
    """Raise :class:`UnsafeFolderError` if a folder or link on the path to a folder is unsafe.

    ``found`` is the status of the folder or link. [Note: who may write] says what is safe.
    """
    if stat.S_ISLNK(found.st_mode):
        if found.st_uid not in (0, os.geteuid()):
            raise UnsafeFolderError(path, f"is a link of user {found.st_uid}", _ANOTHER)
    elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UnsafeFolderError(path, "can be written by all users and has no sticky bit", _ANOTHER)


def _way(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path, status) of every folder and symbolic link on the path to a folder, from / to the folder itself."""
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
