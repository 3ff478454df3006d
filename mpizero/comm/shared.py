"""Allocate memory that the ranks of a node share, by MPI windows."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from typing import cast

import numpy as np
from mpi4py import MPI

from mpizero.comm.leftovers import SHARED_FOLDER, taken_by_leftovers
from mpizero.comm.transport import SharedMemory
from mpizero.errors import SharedMemoryError
from mpizero.types import Array

#: Windows start on a cache line.
ALIGNMENT = 64
#: Bytes that must stay free in the folder of windows, for what MPI adds to each.
RESERVE = 1 << 20
_ZEROS = "/dev/zero"
#: Seconds to wait for a group that allocates memory.
_LOCK_WAIT = 30.0


def free_space(folder: str = SHARED_FOLDER) -> int | None:
    """Return the bytes that windows may still take, or None where the system does not tell. Not collective.

    Unused parts of sparse files do not count as free: Open MPI's queues are sparse at first.
    """
    promised = RESERVE
    try:
        status = os.statvfs(folder)
        for file in os.scandir(folder):
            with contextlib.suppress(OSError):  # removed meanwhile
                found = file.stat(follow_symlinks=False)
                promised += max(0, found.st_size - 512 * found.st_blocks)
    except OSError:
        return None
    unlimited = status.f_blocks == 0
    return None if unlimited else max(0, status.f_bavail * status.f_frsize - promised)


@contextlib.contextmanager
def _one_at_a_time(first: bool) -> Iterator[None]:
    """Let one group of the node allocate at a time. Not collective; ``first`` is the rank that locks for its group.

    [Note: one at a time] Memory that one group has found free must not be taken by another group before the first has
    allocated it: Open MPI checks again, on one rank, and if that rank finds too little the others wait for ever. All
    ranks of the group are in here already, so the group that holds the lock finishes. The folder itself is locked, so
    that no lock file remains. A group that cannot lock it, or waits for too long, goes on: each page is written before
    it is used.
    """
    file = -1
    if first:
        with contextlib.suppress(OSError):
            file = os.open(SHARED_FOLDER, os.O_RDONLY | os.O_CLOEXEC)
            limit = time.monotonic() + _LOCK_WAIT
            while time.monotonic() < limit:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(1e-3)
    try:
        yield
    finally:
        if file >= 0:
            os.close(file)


def _take(memory: Array) -> OSError | None:
    """Zero ``memory``, so that all of its pages are allocated; return the error if that fails. Not collective.

    [Note: pages] A store to a page for which there is no room ends the process with SIGBUS. Where the kernel itself
    writes there, for a read from /dev/zero, the call fails instead: with EFAULT. The error is returned and not
    raised, since the other ranks wait for the result.
    """
    done = 0
    try:
        file = os.open(_ZEROS, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < memory.size:
                if (read := os.readv(file, [memory[done:].data])) == 0:
                    raise OSError(errno.ENODATA, "it ends, so it is not the device", _ZEROS)
                done += read
        finally:
            os.close(file)
    except OSError as error:
        return error
    return None


class MpiSharedMemory(SharedMemory):
    """Share a window of ``nbytes`` that the first rank of ``comm`` allocates and all of them map.

    Collective over ``comm``, whose ranks share memory. The window lies in a passive epoch for its whole life, as
    ``Win.Sync`` demands. Each rank zeroes one part, so that pages are spread over the memory of the ranks' sockets, and
    are all allocated when the constructor returns.

    Raises
    ------
    SharedMemoryError
        On all ranks, if there is not enough memory; nothing stays allocated then.
    """

    def __init__(self, comm: MPI.Intracomm, nbytes: int, name: str) -> None:
        rank = comm.Get_rank()
        self._window, self.buffer = MPI.WIN_NULL, np.empty(0, np.uint8)
        _agree_on_size(comm, nbytes, name)
        with _one_at_a_time(rank == 0):
            self._check(comm, free_space() if rank == 0 else None, nbytes, name)
            self._window = self._allocate(comm, nbytes, name)
            memory, _ = self._window.Shared_query(0)
            whole = np.frombuffer(cast("memoryview", memory), np.uint8)
            # Every process maps the window at the same distance from a page, so one offset aligns it for all.
            offset = np.array(-whole.ctypes.data % ALIGNMENT, np.int64)
            comm.Bcast([offset, 1, MPI.INT64_T], 0)
            self.buffer = whole[int(offset) : int(offset) + nbytes]
            part = -(-nbytes // comm.Get_size() // 4096) * 4096
            self._window.Lock_all(MPI.MODE_NOCHECK)
            failure = _take(self.buffer[rank * part : (rank + 1) * part])
            taken = np.array(failure is None, np.int32)
            comm.Allreduce(MPI.IN_PLACE, [taken, 1, MPI.INT32_T], MPI.MIN)
        if not taken:
            self.close()
            full = failure is None or failure.errno == errno.EFAULT
            reasons = comm.allgather("" if full else f"rank {rank} of its {comm.Get_size()} cannot zero it: {failure}")
            if reasons := list(filter(None, reasons)):
                raise SharedMemoryError(f"a window of {nbytes} bytes for {name!r} failed: {reasons[0]}")
            self._check(comm, 0 if rank == 0 else None, nbytes, name)
        self._window.Sync()
        comm.Barrier()
        self._window.Sync()

    @staticmethod
    def _check(comm: MPI.Intracomm, room: int | None, nbytes: int, name: str) -> None:
        """Raise on all ranks if the first one finds too little room."""
        reason = None
        if room is not None and room < nbytes:
            reason = (
                f"a window of {nbytes} bytes for {name!r} does not fit: {SHARED_FOLDER} has {free_space()} bytes left "
                f"on {MPI.Get_processor_name()}{taken_by_leftovers()}; enlarge it (in a container --shm-size), use "
                "fewer ranks per node, or share_node_memory=False"
            )
        if reason := comm.bcast(reason, 0):
            raise SharedMemoryError(reason)

    @staticmethod
    def _allocate(comm: MPI.Intracomm, nbytes: int, name: str) -> MPI.Win:
        reason = ""
        try:
            size = nbytes + ALIGNMENT if comm.Get_rank() == 0 else 0
            window = MPI.Win.Allocate_shared(size, 1, MPI.INFO_NULL, comm)
        except MPI.Exception as error:
            reason, window = str(error), MPI.WIN_NULL
        failed = np.array(bool(reason), np.int32)
        comm.Allreduce(MPI.IN_PLACE, [failed, 1, MPI.INT32_T], MPI.MAX)
        if failed:
            raise SharedMemoryError(f"a window of {nbytes} bytes for {name!r} failed: {reason or 'on another rank'}")
        return window

    def synchronize(self) -> None:
        """Order this rank's loads and stores to the window. Not collective; ranks are ordered by a barrier."""
        self._window.Sync()

    def close(self) -> None:
        """Free the window, ``buffer`` becomes empty; a second call does nothing. Collective over its communicator."""
        self.buffer = np.empty(0, np.uint8)
        if self._window != MPI.WIN_NULL and not MPI.Is_finalized():
            self._window.Unlock_all()
            self._window.Free()
        self._window = MPI.WIN_NULL


def _agree_on_size(comm: MPI.Intracomm, nbytes: int, name: str) -> None:
    figures = np.array([nbytes, -nbytes], np.int64)
    comm.Allreduce(MPI.IN_PLACE, [figures, 2, MPI.INT64_T], MPI.MAX)
    most, least = int(figures[0]), -int(figures[1])
    if most != least:
        raise SharedMemoryError(f"ranks of {name!r} ask for windows of {least} to {most} bytes; they must agree")
