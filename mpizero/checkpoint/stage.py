"""Atomic replacement of folders: work under a temporary name, make it durable, rename."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import socket
from dataclasses import dataclass

from mpizero.checkpoint.manifest import MANIFEST_NAME, STATE_NAME
from mpizero.checkpoint.skeleton import Skeleton
from mpizero.errors import CheckpointError
from mpizero.faults import strike

#: A save in progress, or what a killed one left: ``.tmp-<name>.<host>.<pid>``.
TEMPORARY = ".tmp-"
#: A step folder on its way out.
DELETED = ".tmp-del-"
#: A replaced checkpoint, for the moment between two renames where the file system cannot exchange folders.
REPLACED = ".old-"

_STEP = r"step_\d{8,}"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True)
class Stage:
    """A temporary folder that will become ``target``; the lock on it tells other runs that it is in use."""

    target: str
    path: str
    lock: int
    replace: bool

    @property
    def state(self) -> str:
        """Path of the state file."""
        return os.path.join(self.path, STATE_NAME)


def open_stage(target: str, replace: bool) -> Stage:
    """Check that ``target`` may be written, remove leftovers of killed saves, and make an empty locked folder.

    Not collective: rank 0 only.

    Raises
    ------
    CheckpointError
        If the target exists and ``replace`` is false or it is no checkpoint, or if another run is writing it.
    OSError
        If the folder cannot be made.
    """
    parent, name = os.path.split(target)
    if not name:
        raise CheckpointError("the root folder cannot be a checkpoint")
    make_folders(parent)
    remove_leftovers(parent, name)
    _check_target(target, replace)
    path = os.path.join(parent, f"{TEMPORARY}{name}.{socket.gethostname()}.{os.getpid()}")
    os.mkdir(path, 0o700)
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try_lock(lock)
    except BaseException:
        os.rmdir(path)
        raise
    return Stage(target, path, lock, replace)


def _check_target(target: str, replace: bool) -> None:
    if not os.path.lexists(target):
        return
    if not os.path.isdir(target):
        raise CheckpointError("exists and is not a folder: choose another name")
    with os.scandir(target) as entries:
        names = {entry.name for entry in entries}
    if not names:
        return  # rename takes the place of an empty folder
    if not replace:
        raise CheckpointError("exists already and is never overwritten: choose another folder, or resume from it")
    if not names <= {MANIFEST_NAME, STATE_NAME}:
        raise CheckpointError("is a folder with other files in it, so it is not replaced: choose another name")


def fill_file(path: str, skeleton: Skeleton, mode: int = 0o600) -> None:
    """Make a file of the final size with HDF5's structure in it; a full disk shows before the work.

    Not collective: rank 0 only. Room is not reserved: that would hold up all ranks on file systems in memory, and a
    disk that fills up meanwhile shows in the writes.
    """
    space = os.statvfs(os.path.dirname(path))
    if space.f_bavail * space.f_frsize < skeleton.nbytes:
        free = space.f_bavail * space.f_frsize
        raise OSError(errno.ENOSPC, f"{skeleton.nbytes} bytes are needed, {free} are free", path)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        try:
            os.ftruncate(file, skeleton.nbytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        for offset, data in skeleton.structure:
            write_at(file, memoryview(data), offset, path)
    finally:
        os.close(file)


def commit(stage: Stage, manifest: bytes) -> None:
    """Write the manifest, make everything durable, and give the folder its name. Not collective: rank 0 only."""
    strike("save.manifest")
    path = os.path.join(stage.path, MANIFEST_NAME)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_at(file, memoryview(manifest), 0, path)
        os.fsync(file)
    finally:
        os.close(file)
    os.fsync(stage.lock)
    strike("save.commit")
    parent, name = os.path.split(stage.target)
    aside = os.path.join(parent, REPLACED + name)
    if not (stage.replace and os.path.lexists(stage.target)):
        os.rename(stage.path, stage.target)  # fails where something stands that was not there at the start
    elif not _exchange(stage.path, stage.target):
        os.rename(stage.target, aside)
        os.rename(stage.path, stage.target)
    sync_folder(parent)
    for old in (stage.path, aside):
        shutil.rmtree(old, ignore_errors=True)  # committed: what cannot be removed now, the next save removes


def standing(target: str) -> str:
    """Return where the checkpoint of ``target`` stands: aside, if its replacement was killed between two renames."""
    aside = os.path.join(os.path.dirname(target), REPLACED + os.path.basename(target))
    return aside if os.path.isdir(aside) and not os.path.lexists(target) else target


def discard(stage: Stage) -> None:
    """Remove the temporary folder, if it is still there, and its lock. Not collective: rank 0 only."""
    shutil.rmtree(stage.path, ignore_errors=True)
    os.close(stage.lock)


def remove_leftovers(parent: str | os.PathLike[str], name: str = "") -> None:
    """Remove what killed saves and removals left in the folder ``parent``: of ``name``, and of any step.

    Not collective: rank 0 only. No checkpoint is touched; where there is no folder, nothing is done.

    Raises
    ------
    CheckpointError
        If another run is writing ``name`` at this moment.
    """
    names = f"{_STEP}|{re.escape(name)}" if name else _STEP
    unfinished = re.compile(rf"{re.escape(TEMPORARY)}(?:del-)?({names})\..+")
    for entry in sorted(os.listdir(parent)) if os.path.isdir(parent) else ():
        if not (match := unfinished.fullmatch(entry)):
            continue
        if not _remove_if_unused(os.path.join(parent, entry)) and match.group(1) == name:
            host, pid = entry[len(TEMPORARY + name) + 1 :].rsplit(".", 1)
            raise CheckpointError(f"another run (host {host}, process {pid}) is writing it at this moment")
    aside = os.path.join(parent, REPLACED + name)
    if name and os.path.isdir(aside):
        target = os.path.join(parent, name)
        if os.path.lexists(target):
            shutil.rmtree(aside)
        else:
            os.rename(aside, target)


def _remove_if_unused(path: str) -> bool:
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True  # gone meanwhile, or not a folder of ours
    try:
        if not try_lock(folder):
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(folder)


def try_lock(folder: int) -> bool:
    """Lock an open folder until it is closed; false if another process holds it. True where locks do not exist."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def remove_folder(path: str) -> None:
    """Take a step folder out of sight in one rename, then remove it. Not collective."""
    strike("save.prune")
    parent, name = os.path.split(path)
    hidden = os.path.join(parent, f"{DELETED}{name}.{socket.gethostname()}.{os.getpid()}")
    os.rename(path, hidden)
    try:
        sync_folder(parent)
    finally:
        shutil.rmtree(hidden)


def make_folders(path: str) -> None:
    """Make a folder and those above it, each durably. Not collective."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folders(parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    sync_folder(parent)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable. Not collective."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_at(file: int, data: memoryview, offset: int, path: str) -> None:
    """Write all of ``data`` (bytes) at ``offset``; errors name ``path``. Not collective."""
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(file, data[done:], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None


def _exchange(first: str, second: str) -> bool:
    """Exchange two names in one step (Linux); false where kernel or file system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), first)
