"""Map files into memory, and arrays that lie contiguously in them; read ahead around what is used."""

from __future__ import annotations

import errno
import faulthandler
import mmap
import os
import resource
import stat
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from mpizero.comm.startup import available_memory
from mpizero.data.source import Indices
from mpizero.errors import DataError
from mpizero.types import Array

T = TypeVar("T")

#: Bytes that are read ahead together.
REGION = 4 << 20
#: Least bytes of neighbouring rows that are read by a call of the system, which costs no page fault for each page.
RUN = 1 << 20
#: Code that reads pages; a block would be a view.
_READERS = """
def rows(array, where): return array[where]
def block(array, where): return array[where].copy()
"""
#: Most files that a process asks for: with more, programs that close all of them take long.
MOST_FILES = 1 << 16


def room_in_memory() -> int:
    """Return how many bytes of data may be kept in memory: half of what the job may still take. Not collective."""
    return (available_memory() or 0) // 2


def on_own_disk(path: str) -> bool:
    """Tell whether a file is on a disk of this machine, whose pages nothing but a lack of memory drops. Not collective.

    File systems that are not on one block device (NFS, Lustre, tmpfs) have devices with the major number 0.
    """
    return os.major(os.stat(path).st_dev) != 0


def with_more_files(path: str, opened: Callable[[], T]) -> T:
    """Return what ``opened`` returns, which opens ``path``; raise the limit of open files if it is reached.

    Raises
    ------
    DataError
        If more files are open than the system lets this process have.
    """
    try:
        return opened()
    except (OSError, DataError) as error:
        if not _too_many(error):
            raise
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    try:
        return opened()
    except (OSError, DataError) as error:
        if not _too_many(error):
            raise
    raise DataError(
        f"{path}: too many open files, this process may have {soft}: raise the limit in the job's script (ulimit -n, "
        f"at most {'any number' if hard == resource.RLIM_INFINITY else hard} here), or join files"
    )


def _too_many(error: Exception) -> bool:
    return getattr(error, "errno", None) == errno.EMFILE or os.strerror(errno.EMFILE) in str(error)


class FileState(NamedTuple):
    """Hold a file's size, and when its contents were changed: a file with other ones is not the same data."""

    size: int
    changed: int

    @classmethod
    def of(cls, path: str) -> Self | None:
        """Return the state of a file; None of a folder, whose files have states, and of what is not there."""
        try:
            found = os.stat(path)
        except OSError:  # which opening it will tell
            return None
        return None if stat.S_ISDIR(found.st_mode) else cls(found.st_size, found.st_mtime_ns)

    def __str__(self) -> str:
        """Return size and time as text."""
        return f"{self.size} bytes of {datetime.fromtimestamp(self.changed // 10**9):%Y-%m-%d %H:%M:%S}"


def file_states(paths: Iterable[str]) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of each path that is a file. Not collective."""
    states = ((os.path.basename(path), FileState.of(path)) for path in paths)
    return [(name, *state) for name, state in states if state is not None]


def check_named_once(paths: Iterable[str]) -> None:
    """Raise DataError if two of the paths are one file, whose samples would be in training and in validation, too."""
    seen: dict[str, str] = {}
    for path in paths:
        earlier = seen.setdefault(os.path.realpath(path), path)
        if earlier is not path:
            also = f" (as {earlier})" if earlier != path else ""
            raise DataError(
                f"{path}{also}: the same file is given twice: its samples would count twice, and be in training and in "
                "validation; name it once"
            )


def check_unchanged(path: str, before: FileState | None) -> None:
    """Raise DataError if a file that is opened again is not as it was ``before``."""
    now = FileState.of(path)
    if before is not None and now is not None and now != before:
        raise _changed(path, before, now)


def _changed(path: str, before: FileState, now: FileState) -> DataError:
    return DataError(
        f"{path}: it has changed since the source was made, from {before} to {now}: leave files alone while they "
        "are read, or write new ones under other names, and make the source again"
    )


class MappedFile:
    """Map a file into memory, read-only, once for all arrays in it.

    [Note: bus errors] A page that is gone when it is read, of a file that was made shorter, ends the process by SIGBUS.
    So size and time of change are compared before every access. Python reports the process that is still killed in
    between: its report lists the names of code, and one of them is the file's.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = with_more_files(path, lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        weakref.finalize(self, os.close, self._file)
        found = os.fstat(self._file)
        self.size, self._state = found.st_size, FileState(found.st_size, found.st_mtime_ns)
        self.memory = with_more_files(path, lambda: mmap.mmap(self._file, self.size, access=mmap.ACCESS_READ))
        self.bytes: Array = np.frombuffer(self.memory, np.uint8)
        named: dict[str, Any] = {}
        exec(compile(_READERS, f"<mapped {path}>", "exec"), named)
        self._rows: Callable[[Array, Any], Array] = named["rows"]
        self._block: Callable[[Array, Any], Array] = named["block"]
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            with suppress(OSError, ValueError):  # without a standard error there is no report
                faulthandler.enable(sys.__stderr__)

    def read(self, array: Array, where: Any) -> Array:
        """Return a copy of some elements of an array in the file; raise DataError if the file has changed."""
        self.check()
        return self._rows(array, where) if isinstance(where, np.ndarray) else self._block(array, where)

    def read_into(self, memory: Array, offset: int) -> None:
        """Fill ``memory``, an array of bytes, from byte ``offset`` of the file on, by calls of the system."""
        done = 0
        self.check()
        while done < memory.size:
            if not (read := os.preadv(self._file, [memory[done:].data], offset + done)):
                raise self._shorter()
            done += read

    def check(self) -> None:
        """Raise DataError if the file is not as it was when it was mapped: it may be what another run writes."""
        found = os.fstat(self._file)
        if found.st_size < self.size:
            raise self._shorter()
        if (now := FileState(found.st_size, found.st_mtime_ns)) != self._state:
            raise _changed(self.path, self._state, now)

    def _shorter(self) -> DataError:
        return DataError(
            f"{self.path}: it has become shorter while it was used: {os.fstat(self._file).st_size} bytes, {self.size} "
            "before; write new files and rename them, but leave alone what is read"
        )


class MappedArray:
    """Present an array in a mapped file.

    [Note: read ahead] Shuffled rows are pages at random places, which a disk reads many times slower than neighbouring
    ones. Where the array fits into memory beside everything else, all of it will be read in an epoch and kept by the
    page cache. So the first access to a region asks the kernel for the whole region.
    """

    def __init__(
        self, file: MappedFile, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], *, by_columns: bool = False
    ) -> None:
        self.file, self._offset = file, offset
        self.shape, self.ndim, self.dtype = shape, len(shape), dtype
        self._array: Array = np.ndarray(shape, dtype, file.memory, offset, order="F" if by_columns else "C")
        self._page = offset - offset % mmap.ALLOCATIONGRANULARITY  # regions begin at a page
        self._first = offset - self._page
        self._row = self._array.nbytes // shape[0]
        end = self._first + self._array.nbytes
        by_rows = not by_columns or self.ndim == 1  # otherwise no row lies in one place
        self._run = max(1, -(-RUN // max(1, self._row))) if by_rows else shape[0] + 1
        self._unread = np.full(-(-end // REGION), by_rows and end <= room_in_memory())

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.file.path

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, where: Any) -> Array:
        """Return the rows of an array of indices, or the elements of a tuple of slices."""
        if isinstance(where, np.ndarray) and where.size >= self._run and (np.diff(where) == 1).all():
            return self._read_run(int(where[0]), where.size)
        if self._unread.any():
            self._read_ahead(where if isinstance(where, np.ndarray) else np.arange(where[0].start, where[0].stop))
        return self.file.read(self._array, where)

    def _read_run(self, first: int, count: int) -> Array:
        """Return ``count`` rows from row ``first`` on."""
        found = np.empty((count, *self.shape[1:]), self.dtype)
        self.file.read_into(found.reshape(-1).view(np.uint8), self._offset + first * self._row)
        return found

    def _read_ahead(self, rows: Indices) -> None:
        starts = self._first + rows * self._row
        touched = np.unique([starts // REGION, (starts + self._row - 1) // REGION])
        for region in touched[self._unread[touched]].tolist():
            size = min(REGION, self._first + self._array.nbytes - region * REGION)
            self.file.memory.madvise(mmap.MADV_WILLNEED, self._page + region * REGION, size)
            self._unread[region] = False
