"""Write the folder of a checkpoint: it appears whole or not at all, and an error on one rank is raised on every rank.

:func:`agreed` and :func:`on_root` run a step of a save or load, which then succeeds or fails on all ranks alike.
:func:`create_locked_folder` makes a hidden folder beside the target, :func:`fill_file` makes the state file in it, and
:func:`commit` adds the manifest, syncs the folder to disk and renames it to the target. The lock on the hidden folder
distinguishes a save in progress from the leftovers of a killed one, which :func:`remove_leftovers` removes.

:func:`store_directly` is the back end "direct": every rank writes its values into the HDF5 file by system calls,
without HDF5. :func:`join_parts` combines the checksums of what the ranks have written into those of whole blocks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, NoReturn, Self, TypeVar

import numpy as np

from mpizero._util.faults import inject
from mpizero._util.numbers import crc32
from mpizero.checkpoint.format import (
    BLOCK,
    MANIFEST_NAME,
    STATE_NAME,
    LocalArray,
    Skeleton,
    Table,
    block_count,
    crc32_shifted,
    cut,
)
from mpizero.comm.communicator import Communicator
from mpizero.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointIOError,
    CheckpointMissingError,
    CheckpointVersionError,
    CollectiveError,
    ConfigError,
    DataError,
    MpizeroError,
    PeerFailure,
    RemoteError,
)
from mpizero.types import Array

#: Names that stand for error classes in messages between ranks; other subclasses of CheckpointError are "checkpoint".
_KINDS: dict[str, type[MpizeroError]] = {
    "missing": CheckpointMissingError,
    "io": CheckpointIOError,
    "damaged": CheckpointDamagedError,
    "version": CheckpointVersionError,
    "checkpoint": CheckpointError,
    "config": ConfigError,
    "data": DataError,
    "foreign": RemoteError,
}


class PortableError(NamedTuple):
    """Describe an exception in a form that can be sent to other ranks.

    ``kind`` is the name of the error's class in :data:`_KINDS`, ``code`` the errno or 0.
    """

    kind: str
    code: int
    message: str


def portable_error(error: Exception) -> PortableError:
    """Convert an exception to a :class:`PortableError`, which can be sent to other ranks. Not collective."""
    if isinstance(error, CheckpointError):
        kind = next((kind for kind, known in _KINDS.items() if type(error) is known), "checkpoint")
        return PortableError(kind, getattr(error, "errno", 0) or 0, str(error))
    if isinstance(error, ConfigError | DataError):
        return PortableError("config" if isinstance(error, ConfigError) else "data", 0, str(error))
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno else str(error)
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return PortableError("missing" if error.errno == errno.ENOENT else "io", error.errno or 0, where + reason)
    return PortableError("foreign", 0, f"{type(error).__name__}: {error}")


def _raise(portable: PortableError, text: str) -> NoReturn:
    error = _KINDS[portable.kind](text)
    if isinstance(error, OSError):
        error.errno = portable.code or None
    raise error


class CapturedError:
    """Catch the exception that a ``with`` block raises, so that :func:`raise_first` can then raise it on every rank.

    Errors of a broken communicator are not caught, because they could not be sent to other ranks.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, CollectiveError | PeerFailure):
            return False
        self.error = error
        return True

    @property
    def portable(self) -> PortableError | None:
        """The description of the caught exception, to be sent to other ranks; None if no exception was caught."""
        return None if self.error is None else portable_error(self.error)


def raise_first(errors: Sequence[PortableError | None], prefix: str, local_error: Exception | None = None) -> None:
    """Raise the error of the lowest rank that has an error; do nothing if no rank has one.

    ``errors`` holds the error of each rank, gathered from all ranks. ``local_error`` is the exception of this rank. The
    message begins with ``prefix``. If ``local_error`` is an unexpected error (neither about files, checkpoints, data
    nor configuration), this rank raises it itself, with its traceback. Not collective.
    """
    for rank, error in enumerate(errors):
        if error is None:
            continue
        if local_error is not None and portable_error(local_error).kind == "foreign":
            raise local_error
        where = f"[rank {rank}] " if len(errors) > 1 else ""
        _raise(error, f"{prefix}: {where}{error.message}")


@contextmanager
def agreed(comm: Communicator, prefix: str) -> Iterator[None]:
    """Run the ``with`` block on every rank; if it fails on one, raise the lowest failing rank's error on every rank.

    Collective over ``comm``. The message consists of ``prefix``, the failing rank and the reason. The other ranks raise
    the same class of error, whereas ``comm.agreement.all_ranks`` raises ``RemoteError`` there. So a program that loads
    a missing file can catch ``FileNotFoundError`` on every rank. An unexpected error, which is neither about files,
    checkpoints, data nor configuration, is raised with its traceback on the rank where it occurred, and as
    ``RemoteError`` on other ranks.
    """
    with CapturedError() as captured:
        yield
    raise_first(comm.allgather_object(captured.portable, tag="checkpoint outcome"), prefix, captured.error)


T = TypeVar("T")


def on_root(
    comm: Communicator, prefix: str, function: Callable[[], T], before: Callable[[], object] | None = None
) -> T:
    """Call ``function`` on rank 0 and return its result on every rank, or raise the same error on every rank.

    Collective over ``comm``: one all-gather of pickled objects. Every rank calls ``before`` first. An error that
    ``before`` raises on any rank is raised on every rank, too. Error messages begin with ``prefix``.
    """
    result: T | None = None
    with CapturedError() as captured:
        if before is not None:
            before()
        if comm.rank == 0:
            result = function()
    gathered = comm.allgather_object((captured.portable, result), tag="checkpoint")
    raise_first([error for error, _ in gathered], prefix, captured.error)
    shared: T = gathered[0][1]
    return shared


#: Prefix of the folder of a save in progress, or of a killed save: ``.tmp-<name>.<host>.<pid>``.
TEMPORARY = ".tmp-"
#: Prefix of a replaced checkpoint between two renames, on file systems that cannot exchange two folders in one step.
REPLACED = ".old-"


#: Prefix of a step folder that is being removed.
DELETED = ".tmp-del-"


@dataclass(frozen=True)
class LockedFolder:
    """Describe a temporary folder that :func:`commit` renames to ``target``; its lock keeps other runs away.

    ``path`` is the folder, ``lock`` the descriptor of the open, locked folder, and ``replace`` says whether ``target``
    may be replaced.
    """

    target: str
    path: str
    lock: int
    replace: bool

    @property
    def state(self) -> str:
        """Path of the state file ``state.h5`` in the temporary folder."""
        return os.path.join(self.path, STATE_NAME)


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


def create_locked_folder(
    target: str, replace: bool, check_target: Callable[[str, bool], None] = _check_target
) -> LockedFolder:
    """Check that ``target`` may be written, remove leftovers of killed saves, and make a locked temporary folder.

    ``check_target(target, replace)`` raises an error if what is at ``target`` may not be replaced. Not collective: rank
    0 only.

    Raises
    ------
    CheckpointError
        If another run is writing ``target``, or ``target`` exists and may not be replaced.
    OSError
        If the folder cannot be made.
    """
    parent, name = os.path.split(target)
    if not name:
        raise CheckpointError("the root folder cannot be a checkpoint")
    make_folders(parent)
    remove_leftovers(parent, name)
    check_target(target, replace)
    path = _make_temporary(os.path.join(parent, f"{TEMPORARY}{name}.{_host_and_process()}"))
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try_lock(lock)
    except BaseException:
        os.rmdir(path)
        raise
    return LockedFolder(target, path, lock, replace)


def _host_and_process() -> str:
    return f"{socket.gethostname()}.{os.getpid()}"


def _make_temporary(path: str) -> str:
    """Make an empty folder, at the first of ``path``, ``path-2``, ``path-3``, ... that does not exist; return its path.

    Two containers can have the same host name and process ID, so the first path may be taken.
    """
    number = 1
    while True:
        name = path if number == 1 else f"{path}-{number}"
        with suppress(FileExistsError):
            os.mkdir(name)
            return name
        number += 1


def fill_file(path: str, skeleton: Skeleton) -> None:
    """Make the state file at its final size, with the HDF5 structure in ``skeleton`` but without the values of arrays.

    Raises ``CheckpointIOError`` if the disk has too little free space. The space is not reserved, because reserving it
    on a file system in memory (tmpfs) would make all ranks wait. If the disk fills up later, writes fail. Not
    collective: rank 0 only.
    """
    space = os.statvfs(os.path.dirname(path))
    if space.f_bavail * space.f_frsize < skeleton.nbytes:
        free = space.f_bavail * space.f_frsize
        error = CheckpointIOError(
            f"{path}: {os.strerror(errno.ENOSPC)}: {skeleton.nbytes} bytes are needed, {free} are free"
        )
        error.errno = errno.ENOSPC
        raise error
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        try:
            os.ftruncate(file, skeleton.nbytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        for offset, data in skeleton.structure:
            write_at(file, memoryview(data), offset, path)


def commit(folder: LockedFolder, manifest: bytes, state: int) -> None:
    """Write the manifest into the temporary folder, sync it to disk, and rename the folder to its target.

    ``state`` is the descriptor of the open state file, which has been synced already. If this function raises, the
    target is as it was before. Not collective: rank 0 only.
    """
    inject("save.manifest")
    path = os.path.join(folder.path, MANIFEST_NAME)
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        write_at(file, memoryview(manifest), 0, path)
        os.fsync(file)
        os.fsync(folder.lock)
        # Both files stay open: so no file system can give their inode numbers to other files before they are compared.
        written = {STATE_NAME: os.fstat(state), MANIFEST_NAME: os.fstat(file)}
        inject("save.commit")
        _give_name(folder, written)
    for old in (folder.path, _path_of_replaced(folder.target)):
        shutil.rmtree(old, ignore_errors=True)  # committed: what cannot be removed now, the next save removes


def _give_name(folder: LockedFolder, written: Mapping[str, os.stat_result]) -> None:
    """Rename the temporary folder to its target, check its files, and sync the parent folder; on error rename back.

    ``written`` holds the ``os.fstat`` result of each file that was written, by file name.
    """
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
            _check_same_file(os.path.join(target, name), expected)
        sync_folder(os.path.dirname(target))
        undo.pop_all()


#: Arguments of ``renameat2``: paths are relative to the working directory, and the two names are exchanged.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(first: str, second: str) -> bool:
    """Exchange the names of two files or folders atomically; return False if the system cannot do this, else True."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), first)


def _check_same_file(path: str, written: os.stat_result) -> None:
    """Raise CheckpointError unless the file at ``path`` is the file with the ``os.fstat`` result ``written``.

    Another host may have removed the file, because it took the temporary folder for a leftover of a killed save.
    """
    try:
        with opened(path, os.O_RDONLY) as file:
            status = os.fstat(file)
    except OSError as error:
        message = f"{path}: {error.strerror}, after it was written: did another job remove it?"
        raise CheckpointIOError(error.errno, message, path) from None
    if not os.path.samestat(status, written) or status.st_size != written.st_size:
        raise CheckpointError(f"{path}: is not the file that was written: does another job save to the same folder?")


def _path_of_replaced(target: str) -> str:
    return os.path.join(os.path.dirname(target), REPLACED + os.path.basename(target))


def standing(target: str) -> str:
    """Return the path at which the checkpoint ``target`` is: ``target``, or a hidden path beside it.

    A save that replaces ``target`` first renames it to ``.old-<name>``. This path is returned if the save was killed
    then.

    Raises :class:`CheckpointError` if the hidden path is a link, because no save makes links.
    """
    old_path = _path_of_replaced(target)
    if os.path.lexists(target) or not os.path.isdir(old_path):
        return target
    if os.path.islink(old_path):
        raise CheckpointError(f"{target}: does not exist, and {old_path} is a link, which is not followed")
    return old_path


def discard(folder: LockedFolder) -> None:
    """Remove the temporary folder, if it was not renamed, and release its lock. Not collective: rank 0 only."""
    with suppress(OSError):
        # After an exchange of names, this path may hold the checkpoint that was to be replaced.
        if os.path.samestat(os.lstat(folder.path), os.fstat(folder.lock)):
            shutil.rmtree(folder.path, ignore_errors=True)
    os.close(folder.lock)


#: Names of step folders: the number has as many digits as fit 64 bits.
STEP_NAME = r"step_[0-9]{8,18}"


def remove_leftovers(parent: str | os.PathLike[str], name: str = "") -> None:
    """Remove the hidden folders of the checkpoint ``name`` and of all steps that killed processes left in ``parent``.

    No checkpoint is lost: if a killed save has renamed ``name`` to a hidden name and not replaced it yet, this function
    renames it back. The folder of a save in progress is locked and stays. On some file systems locks are not visible on
    other hosts, so a folder of another host stays for :data:`SPARED` seconds after the last change in it. If ``parent``
    does not exist, nothing is done. Not collective: rank 0 only.

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
    """Remove the hidden folder ``path``, unless another run may be using it; return False if it is locked, else True.

    ``ours`` says that a lock on the folder would be visible to this process, so an unlocked folder is not in use.
    """
    with suppress(OSError), opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        locked = try_lock(folder)
        if locked is False:
            return False
        if (ours and locked) or not _is_recent(path):
            shutil.rmtree(path, ignore_errors=True)
    return True  # also where it is gone meanwhile, or not a folder of ours


#: Seconds for which a temporary folder of another host is not removed: its lock may be invisible on this host.
SPARED = 24 * 3600.0


def _is_recent(path: str) -> bool:
    """Tell whether something in a folder changed in the last :data:`SPARED` seconds; True also on a system error."""
    try:
        with os.scandir(path) as entries:
            dates = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return _time_in(os.path.dirname(path)) - max(dates, default=os.stat(path).st_mtime) < SPARED
    except OSError:
        return True


def _time_in(parent: str) -> float:
    """Return the time in seconds of the clock that dates files in ``parent``; it may be a file server's clock."""
    probe = os.path.join(parent, f"{DELETED}step_00000000.{_host_and_process()}")
    os.mkdir(probe)
    try:
        return os.stat(probe).st_mtime
    finally:
        os.rmdir(probe)


def try_lock(folder: int) -> bool | None:
    """Lock an open folder, given by its descriptor, until it is closed; tell whether this succeeded.

    Returns False if the folder is locked already, and None if the file system has no locks.
    """
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_folder(path: str) -> bool:
    """Remove a step folder: rename it to a hidden name, then delete it; return False if it did not exist, else True.

    Raises
    ------
    OSError
        If the folder, or something in it, could not be removed. If it was renamed, the next :func:`remove_leftovers`
        removes the rest.
    """
    inject("save.prune")
    parent, name = os.path.split(path)
    hidden = os.path.join(parent, f"{DELETED}{name}.{_host_and_process()}")
    try:
        # A folder whose files cannot be removed is not renamed either: it stays a whole checkpoint.
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
            shutil.rmtree(hidden)  # a second try raises the reason, if something is left
    return True


def make_folders(path: str) -> None:
    """Make a folder and its missing parent folders, and sync them to disk, so that they survive a power failure."""
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


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Sync a folder to disk, so that the names of its files survive a power failure."""
    with opened(os.path.realpath(path), os.O_RDONLY | os.O_DIRECTORY) as folder:
        os.fsync(folder)


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """Open a file or folder that is not a link, yield its descriptor to a ``with`` block, and close it."""
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def write_at(file: int, data: memoryview, offset: int, path: str) -> None:
    """Write all bytes of ``data`` at byte ``offset`` of the file descriptor ``file``; errors name ``path``."""
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(file, data[done:], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None


#: Bytes of one ``sync_file_range`` call, and its flags: wait for earlier writes, write, wait for these writes.
_SYNCED, _SYNC_AND_WAIT = 32 * 1024 * 1024, 1 | 2 | 4


def sync_range(file: int, offset: int, nbytes: int, advance: Callable[[int], object]) -> None:
    """Make the system write bytes ``offset:offset + nbytes`` of a file from its cache to disk, 32 MiB at a time.

    After each part ``advance`` is called with its number of bytes, so that progress is seen: one long ``fsync`` would
    look like a hang. ``fsync`` must still follow to make the file durable. On systems other than Linux nothing is done.
    """
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return
    for start in range(offset, offset + nbytes, _SYNCED):
        size = min(_SYNCED, offset + nbytes - start)
        if function(file, ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_SYNC_AND_WAIT)) != 0:
            return  # fsync says why
        advance(size)


class PieceSums(NamedTuple):
    """Hold the CRC32s of bytes ``start:stop`` of an array, one for each checksummed block that these bytes overlap."""

    path: str
    start: int
    stop: int
    checksums: tuple[int, ...]


def checksums(arrays: Sequence[LocalArray]) -> list[PieceSums]:
    """Return the checksums of the ranges of elements that this rank writes, computed from memory. Not collective."""
    sums = []
    for array in arrays:
        for first, values in array.pieces:
            data, begin = as_bytes(values), first * values.itemsize
            parts = cut(begin, begin + len(data))
            crcs = tuple(crc32(data[start - begin : stop - begin]) for start, stop in parts)
            if crcs:
                sums.append(PieceSums(array.path, begin, begin + len(data), crcs))
    return sums


class WritingStopped(Exception):  # noqa: N818 - a request, not a mistake
    """Raised by :func:`write_pieces` when it stops between two blocks because ``stopped()`` returned True."""


def as_bytes(values: Array) -> memoryview:
    """Return a view of the bytes of a one-dimensional contiguous array. Not collective."""
    return values.view(np.uint8).data


def store_directly(
    comm: Communicator, file: str, arrays: Sequence[LocalArray], offsets: Mapping[str, int], prefix: str
) -> list[PieceSums]:
    """Write the elements of every rank into ``file`` and sync it to disk; return the checksums of this rank's elements.

    ``offsets`` holds the first byte of each array in the file. Collective over ``comm``: all ranks succeed, or all
    raise the same error, whose message begins with ``prefix``.
    """
    with agreed(comm, prefix), comm.trace.transfer(f"writing {file}") as advance:
        return write_pieces(open_state(file), file, arrays, offsets, advance)


def open_state(file: str) -> int:
    """Open an existing state file for :func:`write_pieces`, and return its descriptor. Not collective."""
    return os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def write_pieces(
    handle: int,
    file: str,
    arrays: Sequence[LocalArray],
    offsets: Mapping[str, int],
    advance: Callable[[int], object] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[PieceSums]:
    """Write the elements of this rank into an open file and sync it to disk; return the checksums of these elements.

    Not collective, and without MPI. ``handle`` is the descriptor from :func:`open_state`, which this function closes,
    and ``file`` is the path for error messages. ``offsets`` holds the first byte of each array in the file. The
    checksum of each block is computed from memory just before the block is written, so readers detect any later damage.
    ``advance`` is called with the number of bytes of each block after the block was written, and of each range after
    the range was synced to disk. ``stopped`` is called before each block; if it returns True, writing ends.

    Raises
    ------
    WritingStopped
        If ``stopped()`` returned True.
    OSError
        If writing fails. The error names the file and the array.
    """
    sums = []
    try:
        for array in arrays:
            for first, values in array.pieces:
                data, begin = as_bytes(values), first * values.itemsize
                checksums = []
                for start, stop in cut(begin, begin + len(data)):
                    if stopped():
                        raise WritingStopped
                    part = data[start - begin : stop - begin]
                    inject("save.write", handle)
                    checksums.append(crc32(part))
                    write_at(handle, part, offsets[array.path] + start, f"{file}: array {array.path!r}")
                    advance(len(part))
                if checksums:
                    sums.append(PieceSums(array.path, begin, begin + len(data), tuple(checksums)))
        inject("save.sync", handle)
        for piece in sums:
            sync_range(handle, offsets[piece.path] + piece.start, piece.stop - piece.start, advance)
        os.fsync(handle)
    finally:
        os.close(handle)
    return sums


def join_parts(table: Table, gathered: Sequence[Sequence[PieceSums]]) -> dict[str, tuple[int, ...]]:
    """Combine the checksums of the pieces of all ranks into the CRC32s of whole blocks, by array path. Not collective.

    ``table`` holds the shape and element type of every array. ``gathered`` holds, for each rank, the checksums of the
    pieces (ranges of elements) that the rank has written.
    """
    pieces: dict[str, list[PieceSums]] = {path: [] for path in table}
    for listed in gathered:
        for piece in listed:
            pieces[piece.path].append(piece)
    joined = {}
    for path, (shape, dtype) in table.items():
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        blocks = [0] * block_count(size)
        for piece in pieces[path]:
            for (start, stop), crc in zip(cut(piece.start, piece.stop), piece.checksums, strict=True):
                block = start // BLOCK
                blocks[block] ^= crc32_shifted(crc, min((block + 1) * BLOCK, size) - stop)
        joined[path] = tuple(blocks)
    return joined
