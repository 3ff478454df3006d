"""Share the status of the ranks of a node without MPI, and read the stacks of the threads of this process.

Each rank writes a dictionary about itself, its status record. A :class:`StatusTable` is for ranks that have a
communicator, a :class:`StartupTable` for those that have none yet. A record names the source line that the main thread
runs; :func:`current_frame` and :func:`all_stacks` find this line.

[Note: status table] The file of a status table is in shared memory. All ranks of the node map this file. It is unlinked
as soon as all ranks have opened it, so even a killed job leaves no file behind. Reading and writing a table need no
MPI, so a daemon thread can do both while a collective hangs or the program ends.

[Note: startup table] A status table is opened by ranks that make a communicator together, so it cannot show which ranks
fail to make one. The startup table can show this: each rank of a job opens it when it imports mpizero, without the
other ranks. The startup table exists until a communicator of all ranks of the job is made, or all ranks have ended. The
table is read and written as a file, not mapped: so a full file system raises an error, and does not kill the process by
a signal. A killed job leaves a file of a few KB, which ``mpizero doctor --clean`` removes.

[Note: no frames] Code must not walk the frames of another thread by ``f_back``: that thread keeps running, and CPython
3.11 has been seen to return freed memory as a frame. Instead ``faulthandler`` is used, which writes all stacks as text
in one call, during which no other thread runs.

[Note: no collection] ``sys._current_frames`` creates objects while it holds a lock of the interpreter, so a garbage
collection may begin inside of it (CPython issue 106883, fixed in later releases). If a finalizer then lets another
thread run, and that thread starts or ends a thread or calls the same function, the two threads wait for each other: a
deadlock. If another thread runs, frames may also be freed while ``sys._current_frames`` reads them. So the garbage
collector is switched off while this function runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import json
import mmap
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from mpizero._util.text import Line, is_users

StatusRecord = dict[str, Any]


_RECORD = 32768
_HEADER = struct.Struct("<II")  # version (odd while being written), length
_REPORTER = struct.Struct("<I")
#: Offset and length, in the page before the records, of the key that :meth:`StatusTable.request_records` writes.
_REQUEST, _KEY = 64, 32


class StatusTable:
    """Hold one status record for each rank of a node, and store which of these ranks reports why the job ends.

    A record is a dictionary that a rank writes about itself: the time, its source line, and its calls in progress.

    Parameters
    ----------
    ranks : sequence of int
        World ranks that share this status table.
    rank : int
        World rank of this process, which writes only its own record.
    path : str or None
        File made by :meth:`create_file`; None makes a status table of this process alone, in its own memory.
    """

    def __init__(self, ranks: Sequence[int], rank: int, path: str | None) -> None:
        self.ranks = tuple(ranks) if path else (rank,)
        self.rank = rank
        self._index = self.ranks.index(rank)
        self._version = 0
        size = _RECORD * (len(self.ranks) + 1)
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC) if path else -1
        self._map: mmap.mmap | bytearray = mmap.mmap(self._file, size) if path else bytearray(size)

    @staticmethod
    def create_file(ranks: int) -> str | None:
        """Create a file with room for the records of ``ranks`` ranks; return its path.

        Return None if no folder has enough space.

        Not collective.
        """
        import tempfile

        for folder in scratch_folders():
            with contextlib.suppress(OSError):
                file, path = tempfile.mkstemp(prefix="mpizero-status-", dir=folder)
                try:
                    # Allocated, not sparse: a full file system is an error here and not a SIGBUS later.
                    os.posix_fallocate(file, 0, _RECORD * (ranks + 1))
                except OSError:
                    os.unlink(path)
                    raise
                finally:
                    os.close(file)
                return path
        return None

    def write(self, record: StatusRecord) -> None:
        """Replace this rank's status record; parts of it that do not fit are left out. Not collective.

        The oldest records of calls are left out first, and then the entries of "marks" (numbers and hashes of calls)
        for communicators made long ago. One thread at a time may call this method.
        """
        data, progress = encode(record), list(record.get("marks", {}).items())
        while len(data) > _RECORD - _HEADER.size and "records" in record:  # the oldest calls
            left = {key: calls[len(calls) // 4 + 1 :] for key, calls in record["records"].items()}
            record = (
                record | {"records": left}
                if any(left.values())
                else {k: v for k, v in record.items() if k != "records"}
            )
            data = encode(record)
        while len(data) > _RECORD - _HEADER.size and progress:  # the counts of communicators made long ago
            progress = progress[: len(progress) // 2]
            data = encode(record | {"marks": dict(progress)})
        data = data[: _RECORD - _HEADER.size]
        start = _RECORD * (self._index + 1)
        self._version += 2
        _HEADER.pack_into(self._map, start, self._version - 1, len(data))
        self._map[start + _HEADER.size : start + _HEADER.size + len(data)] = data
        _HEADER.pack_into(self._map, start, self._version, len(data))

    def read(self) -> dict[int, StatusRecord]:
        """Return the last status record of every rank that has written one, by rank. Not collective."""
        records = ((rank, self.read_one(rank)) for rank in self.ranks)
        return {rank: record for rank, record in records if record is not None}

    def read_one(self, rank: int) -> StatusRecord | None:
        """Return the last status record of one rank of the node; None if it has written none. Not collective."""
        start = _RECORD * (self.ranks.index(rank) + 1)
        for _ in range(100):
            version, length = _HEADER.unpack_from(self._map, start)
            data = self._map[start + _HEADER.size : start + _HEADER.size + length]
            if version == 0:
                return None
            if version % 2 == 0 and _HEADER.unpack_from(self._map, start)[0] == version:
                with contextlib.suppress(ValueError):
                    record: StatusRecord = json.loads(data)
                    return record
        return None

    def request_records(self, key: str) -> None:
        """Ask all ranks of the table to add their last calls on a communicator to their next status records.

        Not collective. ``key`` identifies the communicator, see :class:`.CommunicatorEntry`.
        """
        self._map[_REQUEST : _REQUEST + _KEY] = key.encode().ljust(_KEY, b"\0")

    def requested_key(self) -> str:
        """Return the key last passed to :meth:`request_records` on any rank; "" if there is none. Not collective."""
        return bytes(self._map[_REQUEST : _REQUEST + _KEY]).rstrip(b"\0").decode(errors="replace")

    def become_reporter(self) -> bool:
        """Return True on the first rank of the node that calls this, else False. Not collective.

        The rank that gets True reports why the job ends.
        """
        with contextlib.ExitStack() as unlock:
            if self._file >= 0:
                fcntl.lockf(self._file, fcntl.LOCK_EX, _REPORTER.size)
                unlock.callback(fcntl.lockf, self._file, fcntl.LOCK_UN, _REPORTER.size)
            (holder,) = _REPORTER.unpack_from(self._map, 0)
            if holder == 0:
                _REPORTER.pack_into(self._map, 0, self.rank + 1)
            return holder in (0, self.rank + 1)

    def close(self) -> None:
        """Close the file; the mapped memory stays valid. Not collective."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def encode(records: Mapping[Any, Any]) -> bytes:
    """Encode one status record (a rank's dictionary about itself), or a mapping from ranks to records, as compact JSON.

    Not collective.
    """
    return json.dumps(records, separators=(",", ":")).encode()


def open_status_table(rank: int, hosts: Mapping[int, str], allgather: Callable[[Any], list[Any]]) -> StatusTable:
    """Open the status table of this rank's node; if that fails, open a status table of this process alone.

    A status table is shared memory in which each rank of a node writes a dictionary about itself. Collective over the
    ranks of ``hosts``, which has the names of the hosts by world rank. ``allgather`` takes a picklable object and
    returns the list of all these ranks' objects, in the order of ``hosts``.
    """
    ranks = [other for other, name in hosts.items() if name == hosts[rank]]
    path = StatusTable.create_file(len(ranks)) if rank == ranks[0] else None
    shared = allgather(path)[list(hosts).index(ranks[0])]
    try:
        status_table = StatusTable(ranks, rank, shared)
    except (OSError, ValueError):  # the same host name, but another file system (containers)
        status_table = StatusTable(ranks, rank, None)
    allgather(None)  # everyone has it open
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return status_table


_STARTUP_RECORD = 16384
_STARTUP_HEADER = struct.Struct("<I")  # length
#: Written instead of a record's length when the rank has closed its record.
_GONE = 2**32 - 1


class StartupTable:
    """Read and write the file with the status records of this job's ranks on this node.

    A status record is a dictionary that a rank writes about itself.

    Parameters
    ----------
    name : str
        Name of the job: the same on all ranks of the node, and different for every other job.
    rank, size : int
        World rank of this process and number of ranks of the job, as the launcher tells them.
    folder : str
        Folder of the file, the same on all ranks of a node; it should be in a file system in memory.

    Raises
    ------
    OSError
        If the file cannot be opened.
    """

    def __init__(self, name: str, rank: int, size: int, folder: str) -> None:
        self._rank, self._size = rank, size
        self._gone = False
        self._closing = threading.Lock()  # the descriptor of a closed file may be that of another file
        self._path = os.path.join(folder, f"mpizero-startup-{os.getuid()}-{name}")
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_uid != os.getuid():
            os.close(self._file)
            raise PermissionError(f"{self._path} is another user's")

    def write(self, record: StatusRecord) -> None:
        """Replace this rank's status record, unless it is too long. One thread at a time may call this method."""
        data = encode({name: value for name, value in record.items() if name != "records"})
        with self._closing:
            if self._file >= 0 and not self._gone and len(data) <= _STARTUP_RECORD - _STARTUP_HEADER.size:
                os.pwrite(self._file, _STARTUP_HEADER.pack(len(data)) + data, _STARTUP_RECORD * self._rank)

    def read(self) -> dict[int, StatusRecord]:
        """Return, by rank, the last status records of all other ranks that have not closed the table."""
        records: dict[int, StatusRecord] = {}
        with self._closing:
            length = os.fstat(self._file).st_size if self._file >= 0 else 0
            for rank in range(min(self._size, -(-length // _STARTUP_RECORD))):
                if rank != self._rank and (record := self._read_one(rank)) is not None:
                    records[rank] = record
        return records

    def all_started(self) -> bool:
        """Tell whether every rank of the job has written a record to this file, including ranks that have ended."""
        none = bytes(_STARTUP_HEADER.size)
        with self._closing:
            ranks = range(self._size if self._file >= 0 else 0)
            records = [os.pread(self._file, _STARTUP_HEADER.size, _STARTUP_RECORD * rank) for rank in ranks]
        return all(record not in (b"", none) for record in records)

    def _read_one(self, rank: int) -> StatusRecord | None:
        for _ in range(100):  # it may be written at this moment
            data = os.pread(self._file, _STARTUP_RECORD, _STARTUP_RECORD * rank)
            (length,) = _STARTUP_HEADER.unpack_from(data.ljust(_STARTUP_HEADER.size, b"\0"))
            if length in (0, _GONE):
                return None
            with contextlib.suppress(ValueError):
                record: StatusRecord = json.loads(data[_STARTUP_HEADER.size : _STARTUP_HEADER.size + length])
                return record
        return None

    def become_reporter(self) -> bool:
        """Return True on the first rank of the node that calls this, else False.

        The rank that gets True reports why the job ends.
        """
        with self._closing:
            if self._file < 0:
                return True
            start = _STARTUP_RECORD * self._size
            fcntl.lockf(self._file, fcntl.LOCK_EX, _STARTUP_HEADER.size, start)
            try:
                (holder,) = _STARTUP_HEADER.unpack(
                    os.pread(self._file, _STARTUP_HEADER.size, start) or bytes(_STARTUP_HEADER.size)
                )
                if holder == 0:
                    os.pwrite(self._file, _STARTUP_HEADER.pack(self._rank + 1), start)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, _STARTUP_HEADER.size, start)
            return holder in (0, self._rank + 1)

    def close(self, *, remove: bool = False) -> None:
        """Mark this rank's record as closed, and close the file; a second call does nothing.

        The file is removed if no other rank of the node is working any more; with ``remove`` it is always removed.
        """
        with self._closing, contextlib.suppress(OSError):
            self._gone = True
            if self._file >= 0:
                os.pwrite(self._file, _STARTUP_HEADER.pack(_GONE), _STARTUP_RECORD * self._rank)
        alone = not any(map(is_working, self.read().values()))
        with self._closing:
            file, self._file = self._file, -1
            if file >= 0:
                if remove or alone:
                    with contextlib.suppress(OSError):
                        os.unlink(self._path)
                os.close(file)


def is_working(record: StatusRecord) -> bool:
    """Tell whether the rank that wrote the status record ``record`` runs, and has not reached its program's end.

    The rank is on this node. A status record is a dictionary that a rank writes about itself.
    """
    return record["state"] == "working" and Path(f"/proc/{record['pid']}").exists()


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) .*:")
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')

_SUPERVISION_FOLDERS = tuple(str(Path(__file__).resolve().parents[1] / folder) + os.sep for folder in ("comm", "guard"))

#: Held while the garbage collector is off.
_LOOKING = threading.Lock()


def current_frame(thread: int) -> FrameType | None:
    """Return the innermost frame of the thread whose ``threading.get_ident()`` is ``thread``; None if there is none.

    The caller must not read the frame's ``f_back``, see [Note: no frames]. See also [Note: no collection].
    """
    with _LOOKING:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if enabled:
                gc.enable()


def all_stacks() -> dict[int, list[Line]]:
    """Return the stack of every thread, innermost line first, by the thread's ``threading.get_ident()``.

    At most 100 threads are returned, and at most 100 lines of each: the limits of ``faulthandler``. The result is empty
    if no temporary file can be made.
    """
    text = ""
    with contextlib.suppress(OSError), anonymous_file() as file:
        faulthandler.dump_traceback(file)
        text = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
    stacks: dict[int, list[Line]] = {}
    lines: list[Line] = []
    for row in text.splitlines():
        if thread := _THREAD.fullmatch(row):
            lines = stacks[int(thread[1], 16)] = []
        elif line := _LINE.fullmatch(row):
            lines.append(Line(line[1], int(line[2]), line[3]))
    return stacks


def innermost_line(frame: FrameType | None) -> list[Line]:
    """Return the current line of ``frame`` as a stack of one line; an empty list if ``frame`` is None.

    Callers use this stack if the result of :func:`all_stacks` is empty.
    """
    return [] if frame is None else [Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)]


def describe_stack(stack: Sequence[Line]) -> str:
    """Return a stack as text: its innermost line of user code, and its innermost line outside the supervision.

    The supervision is the code of mpizero's packages ``comm`` and ``guard``.
    """
    inner = next((line for line in stack if not line.file.startswith(_SUPERVISION_FOLDERS)), None)
    outer = next((line for line in stack if is_users(line.file)), None)
    lines = [outer] if inner is outer else [outer, inner]
    return " > ".join(str(line) for line in lines if line is not None)


def scratch_folders() -> Iterator[str]:
    """Yield the folders to try for small temporary files: /dev/shm, then the one of :mod:`tempfile` if it has one."""
    yield "/dev/shm"
    import tempfile

    with contextlib.suppress(OSError):  # nothing that can be written
        yield tempfile.gettempdir()


def anonymous_file() -> IO[bytes]:
    """Return an empty temporary file, which is removed when it is closed.

    The file is made by ``os.memfd_create``, or in one of :func:`scratch_folders` if that does not work.

    Raises
    ------
    OSError
        If the file cannot be made in any folder.
    """
    with contextlib.suppress(OSError, AttributeError):  # a kernel or a Python older than this C library
        return os.fdopen(os.memfd_create("mpizero"), "r+b", buffering=0)
    import tempfile

    for folder in scratch_folders():
        with contextlib.suppress(OSError):
            return tempfile.TemporaryFile(dir=folder)
    raise OSError("no folder for a temporary file")
