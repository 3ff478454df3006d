"""Share the status of the ranks of a node in a memory-mapped file that works while MPI is stuck.

[Note: status board] The file is in shared memory. All ranks of the node map it. It is unlinked as soon as all of them
have opened it, so even a killed job leaves no file behind. Reading and writing need no MPI, so a daemon thread can do
both while a collective hangs or the program ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpizero.comm.status.scratch_files import scratch_folders

_SLOT = 32768
_HEADER = struct.Struct("<II")  # version (odd while being written), length
_CLAIM = struct.Struct("<I")
#: Offset and length, in the page before the slots, of the key that :meth:`StatusBoard.request_records` writes.
_ASKED, _KEY = 64, 32

Slot = dict[str, Any]


class StatusBoard:
    """Hold one status slot for each rank of a node, and store which of these ranks reports why the job ends.

    A slot is a dictionary that a rank writes about itself: the time, its source line, and its calls in progress.

    Parameters
    ----------
    ranks : sequence of int
        World ranks that share this status board.
    rank : int
        World rank of this process, which writes only its own slot.
    path : str or None
        File made by :meth:`create_file`; None makes a status board of this process alone, in its own memory.
    """

    def __init__(self, ranks: Sequence[int], rank: int, path: str | None) -> None:
        self.ranks = tuple(ranks) if path else (rank,)
        self.rank = rank
        self._own = self.ranks.index(rank)
        self._version = 0
        size = _SLOT * (len(self.ranks) + 1)
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC) if path else -1
        self._map: mmap.mmap | bytearray = mmap.mmap(self._file, size) if path else bytearray(size)

    @staticmethod
    def create_file(ranks: int) -> str | None:
        """Create a file with room for ``ranks`` slots; return its path, or None if no folder has the room.

        Not collective.
        """
        import tempfile

        for folder in scratch_folders():
            with contextlib.suppress(OSError):
                file, path = tempfile.mkstemp(prefix="mpizero-status-", dir=folder)
                try:
                    # Allocated, not sparse: a full file system is an error here and not a SIGBUS later.
                    os.posix_fallocate(file, 0, _SLOT * (ranks + 1))
                except OSError:
                    os.unlink(path)
                    raise
                finally:
                    os.close(file)
                return path
        return None

    def write(self, slot: Slot) -> None:
        """Replace this rank's status slot; records of calls that do not fit are left out. Not collective.

        One thread at a time may call it.
        """
        data, marks = encode(slot), list(slot.get("marks", {}).items())
        while len(data) > _SLOT - _HEADER.size and "records" in slot:  # the oldest calls
            left = {key: rows[len(rows) // 4 + 1 :] for key, rows in slot["records"].items()}
            slot = slot | {"records": left} if any(left.values()) else {k: v for k, v in slot.items() if k != "records"}
            data = encode(slot)
        while len(data) > _SLOT - _HEADER.size and marks:  # the counts of communicators made long ago
            marks = marks[: len(marks) // 2]
            data = encode(slot | {"marks": dict(marks)})
        data = data[: _SLOT - _HEADER.size]
        start = _SLOT * (self._own + 1)
        self._version += 2
        _HEADER.pack_into(self._map, start, self._version - 1, len(data))
        self._map[start + _HEADER.size : start + _HEADER.size + len(data)] = data
        _HEADER.pack_into(self._map, start, self._version, len(data))

    def read(self) -> dict[int, Slot]:
        """Return the last status slot of every rank that has written one, by rank. Not collective."""
        found = ((rank, self.read_one(rank)) for rank in self.ranks)
        return {rank: slot for rank, slot in found if slot is not None}

    def read_one(self, rank: int) -> Slot | None:
        """Return the last status slot of one rank of the node; None if it has written none. Not collective."""
        return self._read_slot(self.ranks.index(rank))

    def request_records(self, key: str) -> None:
        """Ask all ranks of the board to write their last calls on a communicator into their next slots.

        Not collective. ``key`` identifies the communicator, see :class:`.CommunicatorEntry`.
        """
        self._map[_ASKED : _ASKED + _KEY] = key.encode().ljust(_KEY, b"\0")

    def requested_key(self) -> str:
        """Return the key last passed to :meth:`request_records` on any rank; "" if there is none. Not collective."""
        return bytes(self._map[_ASKED : _ASKED + _KEY]).rstrip(b"\0").decode(errors="replace")

    def _read_slot(self, index: int) -> Slot | None:
        start = _SLOT * (index + 1)
        for _ in range(100):
            version, length = _HEADER.unpack_from(self._map, start)
            data = self._map[start + _HEADER.size : start + _HEADER.size + length]
            if version == 0:
                return None
            if version % 2 == 0 and _HEADER.unpack_from(self._map, start)[0] == version:
                with contextlib.suppress(ValueError):
                    slot: Slot = json.loads(data)
                    return slot
        return None

    def claim(self) -> bool:
        """Return True on the first rank of the node that calls this, else False. Not collective.

        The rank that gets True reports why the job ends.
        """
        with contextlib.ExitStack() as unlock:
            if self._file >= 0:
                fcntl.lockf(self._file, fcntl.LOCK_EX, _CLAIM.size)
                unlock.callback(fcntl.lockf, self._file, fcntl.LOCK_UN, _CLAIM.size)
            (holder,) = _CLAIM.unpack_from(self._map, 0)
            if holder == 0:
                _CLAIM.pack_into(self._map, 0, self.rank + 1)
            return holder in (0, self.rank + 1)

    def close(self) -> None:
        """Close the file; the mapped memory stays valid. Not collective."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def encode(slots: Mapping[Any, Any]) -> bytes:
    """Encode one status slot, or a mapping from ranks to slots, as compact JSON. Not collective."""
    return json.dumps(slots, separators=(",", ":")).encode()


def open_status_board(rank: int, hosts: Mapping[int, str], allgather: Callable[[Any], list[Any]]) -> StatusBoard:
    """Open the status board of this rank's node; if that fails, open a status board of this process alone.

    Collective over the ranks of ``hosts``, which has the names of the hosts by world rank. ``allgather`` takes a
    picklable object and returns the list of all these ranks' objects, in the order of ``hosts``.
    """
    ranks = [other for other, name in hosts.items() if name == hosts[rank]]
    path = StatusBoard.create_file(len(ranks)) if rank == ranks[0] else None
    shared = allgather(path)[list(hosts).index(ranks[0])]
    try:
        status_board = StatusBoard(ranks, rank, shared)
    except (OSError, ValueError):  # the same host name, but another file system (containers)
        status_board = StatusBoard(ranks, rank, None)
    allgather(None)  # everyone has it open
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return status_board
