"""Time writing and reading one file, of which every rank writes and reads its own part."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from mpizero._util.text import Measurement
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.layout import Partition
from mpizero.planning.machine_file import FileSpeed
from mpizero.train.bench.rounds import together

#: Most bytes that one call of the system writes or reads.
_PIECE = 64 * 1024 * 1024
_WRITE, _READ, _AGAIN = "write with fsync", "read", "read from memory"


def write_part(path: Path, data: memoryview, start: int) -> None:
    """Write ``data`` into a file at byte offset ``start``, and flush it to the disk. Not collective."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(file, data[done : done + _PIECE], start + done)
        os.fsync(file)
    finally:
        os.close(file)


def read_part(path: Path, room: memoryview, start: int) -> None:
    """Fill the buffer ``room`` with the bytes of a file from byte offset ``start`` on. Not collective."""
    file = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(room):
            if not (count := os.preadv(file, [room[done : done + _PIECE]], start + done)):
                raise OSError(f"{path} ends before the {start + len(room)} bytes that are read")
            done += count
    finally:
        os.close(file)


def drop_cached(path: Path) -> None:
    """Ask the system to drop a file that is flushed to the disk from the page cache. Not collective."""
    file = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


class FileBenchmark:
    """Time writing and reading one file of ``nbytes`` bytes, of which every rank writes and reads its own part.

    The file lies in a new folder inside ``folder``, and is removed after every repetition. Construction and
    :meth:`measure` are collective over ``comm``.
    """

    def __init__(self, comm: Communicator, nbytes: int, folder: str) -> None:
        self.comm, self.nbytes = comm, nbytes
        with all_ranks(comm):
            made = tempfile.mkdtemp(prefix=".bench-machine-", dir=folder) if comm.rank == 0 else ""
        self.folder = Path(comm.broadcast_object(made, tag="bench"))
        self.path = self.folder / "file"
        part = Partition(nbytes, comm.size).shard(comm.rank)
        self.start = part.start
        self.data = np.random.default_rng(comm.rank).bytes(part.stop - part.start)
        self.room = bytearray(len(self.data))
        self.values: dict[str, list[float]] = {_WRITE: [], _READ: [], _AGAIN: []}

    def measure(self) -> None:
        """Time one write, one read from the disk and one read from the page cache, and remove the file. Collective."""
        failure: list[OSError] = []

        def tried(work: Callable[[], None]) -> None:
            try:
                if not failure:
                    work()
            except OSError as error:  # raised later: the other ranks still wait at the end of the measurement
                failure.append(error)

        write = partial(write_part, self.path, memoryview(self.data), self.start)
        read = partial(read_part, self.path, memoryview(self.room), self.start)
        for name, work in ((_WRITE, write), (_READ, read), (_AGAIN, read)):
            if name == _READ:
                tried(partial(drop_cached, self.path))
            self.values[name].append(together(self.comm, partial(tried, work)))
            with all_ranks(self.comm):
                if failure:
                    raise failure[0]
        if self.comm.rank == 0:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the new folder with the file, on rank 0. Not collective, so it may be called after an error."""
        if self.comm.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def figures(self) -> tuple[FileSpeed, ...]:
        """Return the measured seconds of the write and of both reads. Not collective."""
        return tuple(FileSpeed(name, self.nbytes, Measurement.of(values)) for name, values in self.values.items())
