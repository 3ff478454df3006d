"""Share the status of the ranks of a node before they have a communicator: a file with one slot for each rank.

[Note: a roll] A board (:mod:`.board`) is opened by ranks that make a communicator together, so it cannot say who does
not come to make it. The roll can: each rank of a job that imports mpizero opens it on its own, and it lasts until all
ranks of the job have met, or have gone. It is read and written as a file, not mapped: a full file system is an error
then, not a signal. What a killed job leaves is a few KB, which ``mpizero doctor --clean`` removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from mpizero.comm.status.status_board import Slot, encode

_SLOT = 16384
_HEADER = struct.Struct("<I")  # length
#: Instead of a length: the rank has been here.
_GONE = 2**32 - 1


class StartupBoard:
    """The slots of the ranks of this node and job.

    Parameters
    ----------
    name : str
        The job's, the same on all ranks of the node and of no other job.
    rank, size : int
        As the launcher tells them.
    folder : str
        In memory, the same on all ranks of a node.

    Raises
    ------
    OSError
        Where the file cannot be had.
    """

    def __init__(self, name: str, rank: int, size: int, folder: str) -> None:
        self._rank, self._size = rank, size
        self._left = False
        self._closing = threading.Lock()  # the number of a file that is closed may mean another one
        self._path = os.path.join(folder, f"mpizero-roll-{os.getuid()}-{name}")
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_uid != os.getuid():
            os.close(self._file)
            raise PermissionError(f"{self._path} is another user's")

    def write(self, slot: Slot) -> None:
        """Replace this rank's slot. Not collective; one thread at a time."""
        data = encode({name: value for name, value in slot.items() if name != "records"})
        with self._closing:
            if self._file >= 0 and not self._left and len(data) <= _SLOT - _HEADER.size:
                os.pwrite(self._file, _HEADER.pack(len(data)) + data, _SLOT * self._rank)

    def read(self) -> dict[int, Slot]:
        """Return the last slot of every other rank that has written one. Not collective."""
        found: dict[int, Slot] = {}
        with self._closing:
            length = os.fstat(self._file).st_size if self._file >= 0 else 0
            for rank in range(min(self._size, -(-length // _SLOT))):
                if rank != self._rank and (slot := self._read_one(rank)) is not None:
                    found[rank] = slot
        return found

    def all_started(self) -> bool:
        """Tell whether every rank of the job has written a slot, also if it has gone. Not collective."""
        none = bytes(_HEADER.size)
        with self._closing:
            ranks = range(self._size if self._file >= 0 else 0)
            slots = [os.pread(self._file, _HEADER.size, _SLOT * rank) for rank in ranks]
        return all(slot not in (b"", none) for slot in slots)

    def _read_one(self, rank: int) -> Slot | None:
        for _ in range(100):  # it may be written at this moment
            data = os.pread(self._file, _SLOT, _SLOT * rank)
            (length,) = _HEADER.unpack_from(data.ljust(_HEADER.size, b"\0"))
            if length in (0, _GONE):
                return None
            with contextlib.suppress(ValueError):
                slot: Slot = json.loads(data[_HEADER.size : _HEADER.size + length])
                return slot
        return None

    def claim(self) -> bool:
        """Tell whether this rank is the first of the node to ask. Not collective."""
        with self._closing:
            if self._file < 0:
                return True
            start = _SLOT * self._size
            fcntl.lockf(self._file, fcntl.LOCK_EX, _HEADER.size, start)
            try:
                (holder,) = _HEADER.unpack(os.pread(self._file, _HEADER.size, start) or bytes(_HEADER.size))
                if holder == 0:
                    os.pwrite(self._file, _HEADER.pack(self._rank + 1), start)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, _HEADER.size, start)
            return holder in (0, self._rank + 1)

    def close(self, *, remove: bool = False) -> None:
        """Strike this rank off, and write no more; the last one at work removes the file, as does ``remove``.

        A second call does nothing. Not collective.
        """
        with self._closing, contextlib.suppress(OSError):
            self._left = True
            if self._file >= 0:
                os.pwrite(self._file, _HEADER.pack(_GONE), _SLOT * self._rank)
        alone = not any(map(is_working, self.read().values()))
        with self._closing:
            file, self._file = self._file, -1
            if file >= 0:
                if remove or alone:
                    with contextlib.suppress(OSError):
                        os.unlink(self._path)
                os.close(file)


def is_working(slot: Slot) -> bool:
    """Tell whether the rank that has written ``slot`` on this node still has something to do. Not collective."""
    return slot["state"] == "working" and Path(f"/proc/{slot['pid']}").exists()


def open_startup_board(
    name: str, rank: int, size: int, folder: str, warn_once: Callable[[BaseException], None]
) -> StartupBoard | None:
    """Open the roll of a job; None, with a complaint, where it cannot be had, and None for a job without a name."""
    try:
        return StartupBoard(name, rank, size, folder) if name else None
    except OSError as error:
        warn_once(error)
        return None
