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

from mpizero.comm.requests import Waiting
from mpizero.comm.transport import SharedMemory
from mpizero.errors import SharedMemoryError
from mpizero.guard.reports import SHARED_FOLDER, taken_by_leftovers
from mpizero.types import Array

#: Windows start on a cache line.
ALIGNMENT = 64
#: Bytes of the folder of windows that are kept free, for data that MPI adds to each window.
RESERVE = 1 << 20
_ZEROS = "/dev/zero"
#: Most seconds to wait while another group of the node allocates memory.
_LOCK_WAIT = 30.0


def free_space(folder: str = SHARED_FOLDER) -> int | None:
    """Return how many bytes shared windows may still allocate in ``folder``; None if not known. Not collective.

    Parts of sparse files that are not written yet do not count as free: Open MPI's queues are sparse at first.
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
    """Lock the folder of windows during the block, so that the communicators of a node allocate one after the other.

    Not collective: on the rank of a communicator with ``first=True`` it takes the lock, on the others it does nothing.

    [Note: one at a time] When a group of ranks has found enough free memory, no other group may take this memory before
    the first has allocated it. Otherwise Open MPI, which checks again on one rank, fails there while the other ranks
    wait for ever. All ranks of the group are already in this block, so the group that holds the lock finishes. The
    folder itself is locked, so no lock file can remain. A group that cannot lock the folder, or waits for too long,
    allocates without the lock; :func:`_take` then still detects missing memory.
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

    [Note: pages] If memory is short, a process that stores to a new page of a window is killed by SIGBUS. If the kernel
    writes to the page, during a read from /dev/zero, the read fails with EFAULT instead. So the pages are zeroed by
    such reads. The error is returned and not raised, because the other ranks wait for the result.
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
    """Allocate a window of ``nbytes`` bytes on the first rank of ``comm``, and map it on all ranks of ``comm``.

    Collective over ``comm``, whose ranks share memory. The window is in a passive-target epoch (``Lock_all``) for its
    whole life, as ``Win.Sync`` requires. Each rank zeroes an equal slice of the window. So the pages are spread over
    the memory of the ranks' CPU sockets, and all pages are allocated when the constructor returns.

    Raises
    ------
    SharedMemoryError
        On all ranks, if there is not enough memory; nothing stays allocated then.
    """

    def __init__(self, comm: MPI.Intracomm, nbytes: int, name: str, waiting: Waiting) -> None:
        rank = comm.Get_rank()
        self._window, self.buffer = MPI.WIN_NULL, np.empty(0, np.uint8)
        most, opposite = _largest(comm, waiting, nbytes, -nbytes)
        if most != (least := -opposite):
            raise SharedMemoryError(f"ranks of {name!r} ask for windows of {least} to {most} bytes; they must agree")
        with _one_at_a_time(rank == 0):
            self._check(comm, waiting, free_space() if rank == 0 else None, nbytes, name)
            self._window, self.buffer = self._allocate(comm, waiting, nbytes, name)
            part = -(-nbytes // comm.Get_size() // 4096) * 4096
            self._window.Lock_all(MPI.MODE_NOCHECK)
            failure = _take(self.buffer[rank * part : (rank + 1) * part])
            self._window.Sync()
            (failed,) = _largest(comm, waiting, failure is not None)
        if failed:
            self.close()
            full = failure is None or failure.errno == errno.EFAULT
            reasons = comm.allgather("" if full else f"rank {rank} of its {comm.Get_size()} cannot zero it: {failure}")
            if reasons := list(filter(None, reasons)):
                raise SharedMemoryError(f"a window of {nbytes} bytes for {name!r} failed: {reasons[0]}")
            self._check(comm, waiting, 0 if rank == 0 else None, nbytes, name)
        self._window.Sync()

    @staticmethod
    def _check(comm: MPI.Intracomm, waiting: Waiting, room: int | None, nbytes: int, name: str) -> None:
        """Raise SharedMemoryError on all ranks if ``room`` is below ``nbytes`` on the first rank. Collective.

        ``room`` is the number of free bytes on the first rank, and None on the others, or if it is not known.
        """
        if not any(_largest(comm, waiting, room is not None and room < nbytes)):
            return
        reason = ""
        if comm.Get_rank() == 0:
            reason = (
                f"a window of {nbytes} bytes for {name!r} does not fit: {SHARED_FOLDER} has {free_space()} bytes left "
                f"on {MPI.Get_processor_name()}{taken_by_leftovers()}; enlarge it (in a container --shm-size), use "
                "fewer ranks per node, or share_node_memory=False"
            )
        raise SharedMemoryError(comm.bcast(reason, 0))

    @staticmethod
    def _allocate(comm: MPI.Intracomm, waiting: Waiting, nbytes: int, name: str) -> tuple[MPI.Win, Array]:
        """Allocate a window on the first rank; return it with the bytes that all ranks use. Collective."""
        reason, whole, first = "", np.empty(0, np.uint8), comm.Get_rank() == 0
        try:
            window = MPI.Win.Allocate_shared(nbytes + ALIGNMENT if first else 0, 1, MPI.INFO_NULL, comm)
            memory, _ = window.Shared_query(0)
            whole = np.frombuffer(cast("memoryview", memory), np.uint8)
        except MPI.Exception as error:
            reason, window = str(error), MPI.WIN_NULL
        # Every process maps the window at the same distance from a page, so one offset aligns it for all.
        failed, offset = _largest(comm, waiting, bool(reason), -whole.ctypes.data % ALIGNMENT if first else 0)
        if failed:
            raise SharedMemoryError(f"a window of {nbytes} bytes for {name!r} failed: {reason or 'on another rank'}")
        return window, whole[offset : offset + nbytes]

    def synchronize(self) -> None:
        """Order this rank's loads and stores of the window by ``Win.Sync``. Not collective.

        To see the stores of another rank, both ranks call this before and after a common barrier.
        """
        self._window.Sync()

    def close(self) -> None:
        """Free the window; ``buffer`` becomes empty. A second call does nothing. Collective over the window's ranks."""
        self.buffer = np.empty(0, np.uint8)
        if self._window != MPI.WIN_NULL and not MPI.Is_finalized():
            self._window.Unlock_all()
            self._window.Free()
        self._window = MPI.WIN_NULL


def _largest(comm: MPI.Intracomm, waiting: Waiting, *figures: int) -> list[int]:
    """Return the largest value that each of the integers has on any rank. Collective."""
    largest = np.array(figures, np.int64)
    waiting.allreduce(comm, largest, MPI.MAX)
    return [int(figure) for figure in largest]
