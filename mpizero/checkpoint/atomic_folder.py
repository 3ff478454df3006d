"""Replace a folder atomically: work under a temporary name, make it durable, rename."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from mpizero.checkpoint.format.manifest import MANIFEST_NAME, STATE_NAME
from mpizero.checkpoint.format.skeleton import Skeleton
from mpizero.errors import CheckpointError, CheckpointIOError
from mpizero.faults import inject

#: A save in progress, or what a killed one left: ``.tmp-<name>.<host>.<pid>``.
TEMPORARY = ".tmp-"
#: A step folder that is being removed.
DELETED = ".tmp-del-"
#: A replaced checkpoint, for the moment between two renames where the file system cannot exchange folders.
REPLACED = ".old-"

#: Seconds for which a temporary folder of another host is left alone: its lock may not be seen here.
SPARED = 24 * 3600.0

#: Names of step folders: the number has as many digits as fit 64 bits.
STEP_NAME = r"step_[0-9]{8,18}"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
#: Bytes that are written out at once, and the flags of Linux for it: wait before, write, wait after.
_SYNCED, _SYNC_AND_WAIT = 32 * 1024 * 1024, 1 | 2 | 4


@dataclass(frozen=True)
class LockedFolder:
    """Describe a temporary folder that will become ``target``; its lock tells other runs that it is in use."""

    target: str
    path: str
    lock: int
    replace: bool

    @property
    def state(self) -> str:
        """Path of the state file."""
        return os.path.join(self.path, STATE_NAME)


def create_locked_folder(target: str, replace: bool) -> LockedFolder:
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
    path = _make_temporary(os.path.join(parent, f"{TEMPORARY}{name}.{_here()}"))
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try_lock(lock)
    except BaseException:
        os.rmdir(path)
        raise
    return LockedFolder(target, path, lock, replace)


def _here() -> str:
    return f"{socket.gethostname()}.{os.getpid()}"


def _make_temporary(path: str) -> str:
    """Make an empty folder of this name, or of the next one where a container had the same host and process."""
    number = 1
    while True:
        name = path if number == 1 else f"{path}-{number}"
        with suppress(FileExistsError):
            os.mkdir(name)
            return name
        number += 1


def _check_target(target: str, replace: bool) -> None:
    if not os.path.lexists(target):
        return
    if not os.path.isdir(target):
        raise CheckpointError("exists and is not a folder: choose another name")
    with os.scandir(target) as entries:
        names = {entry.name for entry in entries}
    if not names:
        return  # rename takes the place of an empty folder
    if not names <= {MANIFEST_NAME, STATE_NAME}:
        raise CheckpointError("is a folder with other files in it, so it is not replaced: choose another name")
    if not replace:
        raise CheckpointError("exists already and is never overwritten: choose another folder, or resume from it")


def fill_file(path: str, skeleton: Skeleton) -> None:
    """Make a file of the final size with HDF5's structure in it; a full disk shows before the work.

    Not collective: rank 0 only. Room is not reserved: that would hold up all ranks on file systems in memory, and a
    disk that fills up meanwhile shows in the writes.
    """
    space = os.statvfs(os.path.dirname(path))
    if space.f_bavail * space.f_frsize < skeleton.nbytes:
        free = space.f_bavail * space.f_frsize
        raise OSError(errno.ENOSPC, f"{skeleton.nbytes} bytes are needed, {free} are free", path)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        try:
            os.ftruncate(file, skeleton.nbytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        for offset, data in skeleton.structure:
            write_at(file, memoryview(data), offset, path)
    finally:
        os.close(file)


def commit(folder: LockedFolder, manifest: bytes, state: int) -> None:
    """Write the manifest, make everything durable, and give the folder its name.

    Not collective: rank 0 only. ``state`` is the state file, open. Where this raises, what was at the target is there.
    """
    inject("save.manifest")
    path = os.path.join(folder.path, MANIFEST_NAME)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        write_at(file, memoryview(manifest), 0, path)
        os.fsync(file)
        os.fsync(folder.lock)
        # Both stay open meanwhile: so a number stands for one file on any file system.
        written = {STATE_NAME: os.fstat(state), MANIFEST_NAME: os.fstat(file)}
        inject("save.commit")
        _give_name(folder, written)
    finally:
        os.close(file)
    for old in (folder.path, _path_of_replaced(folder.target)):
        shutil.rmtree(old, ignore_errors=True)  # committed: what cannot be removed now, the next save removes


def _give_name(folder: LockedFolder, written: Mapping[str, os.stat_result]) -> None:
    """Put the folder in the target's place durably, with these files in it, or leave all as it was."""
    target, old_path = folder.target, _path_of_replaced(folder.target)
    with ExitStack() as undo:
        if not (folder.replace and os.path.lexists(target)):
            os.rename(folder.path, target)  # fails where something stands that was not there at the start
            undo.callback(os.rename, target, folder.path)
        elif _exchange(folder.path, target):
            undo.callback(_exchange, folder.path, target)
        else:
            os.rename(target, old_path)
            undo.callback(os.rename, old_path, target)
            os.rename(folder.path, target)
            undo.callback(os.rename, target, folder.path)
        for name, expected in written.items():
            _check_in_place(os.path.join(target, name), expected)
        sync_folder(os.path.dirname(target))
        undo.pop_all()


def _check_in_place(path: str, written: os.stat_result) -> None:
    """Raise unless the file that was written is there: another host may have taken the save for a leftover."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        told = f"{path}: {error.strerror}, after it was written: did another job remove it?"
        raise CheckpointIOError(error.errno, told, path) from None
    try:
        found = os.fstat(file)
    finally:
        os.close(file)
    if not os.path.samestat(found, written) or found.st_size != written.st_size:
        raise CheckpointError(f"{path}: is not the file that was written: does another job save to the same folder?")


def _path_of_replaced(target: str) -> str:
    return os.path.join(os.path.dirname(target), REPLACED + os.path.basename(target))


def standing(target: str) -> str:
    """Return the path of the checkpoint of ``target``: the hidden one, if a save was killed between two renames.

    Not collective. A link there is refused: no save has made it.
    """
    old_path = _path_of_replaced(target)
    if os.path.lexists(target) or not os.path.isdir(old_path):
        return target
    if os.path.islink(old_path):
        raise CheckpointError(f"{target}: does not exist, and {old_path} is a link, which is not followed")
    return old_path


def discard(folder: LockedFolder) -> None:
    """Remove the temporary folder, if it is still there, and its lock. Not collective: rank 0 only."""
    with suppress(OSError):
        # What stands there may be the checkpoint that this one should have replaced.
        if os.path.samestat(os.lstat(folder.path), os.fstat(folder.lock)):
            shutil.rmtree(folder.path, ignore_errors=True)
    os.close(folder.lock)


def remove_leftovers(parent: str | os.PathLike[str], name: str = "") -> None:
    """Remove what killed saves and removals left in the folder ``parent``: of ``name``, and of any step.

    Not collective: rank 0 only. No checkpoint is touched; where there is no folder, nothing is done. A save in progress
    is locked; but locks are not seen by other hosts on every file system, so that another host's folder is spared for
    :data:`SPARED` after the last change in it.

    Raises
    ------
    CheckpointError
        If another run is writing ``name`` at this moment.
    """
    names = f"{STEP_NAME}|{re.escape(name)}" if name else STEP_NAME
    unfinished = re.compile(rf"{re.escape(TEMPORARY)}(del-)?({names})\.(.+)\.([^.]+)")
    for entry in sorted(os.listdir(parent)) if os.path.isdir(parent) else ():
        if not (match := unfinished.fullmatch(entry)):
            continue
        removal, of, host, process = match.groups()
        ours = bool(removal) or host == socket.gethostname()  # any run may remove what another began to remove
        if not _remove_if_unused(os.path.join(parent, entry), ours) and of == name:
            raise CheckpointError(f"another run (host {host}, process {process}) is writing it at this moment")
    old_path = os.path.join(parent, REPLACED + name)
    if name and os.path.isdir(old_path) and not os.path.islink(old_path):
        target = os.path.join(parent, name)
        if os.path.lexists(target):
            shutil.rmtree(old_path)
        else:
            os.rename(old_path, target)


def _remove_if_unused(path: str, ours: bool) -> bool:
    """Remove a leftover unless it may be in use; false if it certainly is."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True  # gone meanwhile, or not a folder of ours
    try:
        locked = try_lock(folder)
        if locked is False:
            return False
        if (ours and locked) or not _is_recent(path):
            shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(folder)


def _is_recent(path: str) -> bool:
    """Tell whether something in a folder has changed lately; true also where that cannot be told."""
    try:
        with os.scandir(path) as entries:
            dates = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return _time_in(os.path.dirname(path)) - max(dates, default=os.stat(path).st_mtime) < SPARED
    except OSError:
        return True


def _time_in(parent: str) -> float:
    """Return the time by which the files of a folder are dated: a file server's clock need not be this host's."""
    probe = os.path.join(parent, f"{DELETED}step_00000000.{_here()}")
    os.mkdir(probe)
    try:
        return os.stat(probe).st_mtime
    finally:
        os.rmdir(probe)


def try_lock(folder: int) -> bool | None:
    """Lock an open folder until it is closed; false if another process holds it, None where locks do not exist."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_folder(path: str) -> bool:
    """Take a step folder out of sight in one rename, then remove it; false if it was gone.

    Not collective.

    Raises
    ------
    OSError
        It could not be removed; or not all of it, which the next :func:`remove_leftovers` tries again.
    """
    inject("save.prune")
    parent, name = os.path.split(path)
    hidden = os.path.join(parent, f"{DELETED}{name}.{_here()}")
    try:
        # What could only be half removed is not hidden: no other run shall find it incomplete.
        if not os.access(path, os.W_OK | os.X_OK) and os.path.lexists(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        os.rename(path, hidden)
    except FileNotFoundError:
        return False
    try:
        sync_folder(parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        with suppress(FileNotFoundError):
            shutil.rmtree(hidden)  # says why there is something left
    return True


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


def sync_range(file: int, offset: int, nbytes: int, advance: Callable[[int], object]) -> None:
    """Write a range out piece by piece, where the system can (Linux); ``advance`` is told the bytes of each.

    Not collective. ``fsync`` must follow: this makes no file durable, but on a slow disk that is one call for all that
    memory held back, in which nobody could tell slow from stuck.
    """
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return
    for start in range(offset, offset + nbytes, _SYNCED):
        size = min(_SYNCED, offset + nbytes - start)
        if function(file, ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_SYNC_AND_WAIT)) != 0:
            return  # fsync says why
        advance(size)


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
