"""Share the status of the ranks of a node before they have a communicator, in a file with one slot for each rank.

[Note: startup board] A status board (:mod:`.status_board`) is opened by ranks that make a communicator together, so it
cannot show which ranks fail to make one. The startup board can show this: each rank of a job opens it when it imports
mpizero, without the other ranks. It lasts until a communicator joins all ranks of the job, or all ranks have ended. It
is read and written as a file, not mapped: so a full file system raises an error, and does not kill the process by a
signal. A killed job leaves a file of a few KB, which ``mpizero doctor --clean`` removes.
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
#: Written instead of a slot's length when the rank has closed its slot.
_GONE = 2**32 - 1


class StartupBoard:
    """Read and write the file with the status slots of this job's ranks on this node.

    A status slot is a dictionary that a rank writes about itself.

    Parameters
    ----------
    name : str
        Name of the job: the same on all ranks of the node, and different for every other job.
    rank, size : int
        World rank of this process and number of ranks of the job, as the launcher tells them.
    folder : str
        Folder of the file, the same on all ranks of a node; it should be in memory.

    Raises
    ------
    OSError
        If the file cannot be opened.
    """

    def __init__(self, name: str, rank: int, size: int, folder: str) -> None:
        self._rank, self._size = rank, size
        self._gone = False
        self._closing = threading.Lock()  # the number of a file that is closed may mean another one
        self._path = os.path.join(folder, f"mpizero-startup-{os.getuid()}-{name}")
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_uid != os.getuid():
            os.close(self._file)
            raise PermissionError(f"{self._path} is another user's")

    def write(self, slot: Slot) -> None:
        """Replace this rank's status slot; a slot that is too long is not written. One thread at a time may call it."""
        data = encode({name: value for name, value in slot.items() if name != "records"})
        with self._closing:
            if self._file >= 0 and not self._gone and len(data) <= _SLOT - _HEADER.size:
                os.pwrite(self._file, _HEADER.pack(len(data)) + data, _SLOT * self._rank)

    def read(self) -> dict[int, Slot]:
        """Return the last status slot of every other rank that has written one and has not closed it, by rank."""
        found: dict[int, Slot] = {}
        with self._closing:
            length = os.fstat(self._file).st_size if self._file >= 0 else 0
            for rank in range(min(self._size, -(-length // _SLOT))):
                if rank != self._rank and (slot := self._read_one(rank)) is not None:
                    found[rank] = slot
        return found

    def all_started(self) -> bool:
        """Tell whether every rank of the job has written a slot to this file; ranks that have ended count too."""
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
        """Return True on the first rank of the node that calls this, else False.

        The rank that gets True reports why the job ends.
        """
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
        """Mark this rank's slot as closed, and close the file; a second call does nothing.

        The file is removed if no other rank of the node is working any more, or in any case with ``remove``.
        """
        with self._closing, contextlib.suppress(OSError):
            self._gone = True
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
    """Tell whether the rank of this node that wrote ``slot`` is running and has not reached the end of its program."""
    return slot["state"] == "working" and Path(f"/proc/{slot['pid']}").exists()


def open_startup_board(
    name: str, rank: int, size: int, folder: str, warn_once: Callable[[BaseException], None]
) -> StartupBoard | None:
    """Open the startup board of a job; return None if the job's ``name`` is "", or if the board cannot be opened.

    In the second case ``warn_once`` is called with the error.
    """
    try:
        return StartupBoard(name, rank, size, folder) if name else None
    except OSError as error:
        warn_once(error)
        return None
