"""Node-shared memory over MPI windows."""

from __future__ import annotations

import os
from typing import cast

import numpy as np
from mpi4py import MPI

from mpizero.comm.transport import SharedMemory
from mpizero.errors import SharedMemoryError

#: Windows start on a cache line.
ALIGNMENT = 64
#: Where most MPIs keep windows, and what must stay free in it for the MPI library's own queues.
SHARED_FOLDER = "/dev/shm"
RESERVE = 1 << 20


def free_space(folder: str = SHARED_FOLDER) -> int | None:
    """Tell how many bytes of shared memory are left, or None where the system does not say. Not collective."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


class MpiSharedMemory(SharedMemory):
    """A window of ``nbytes`` that the first rank of ``comm`` allocates and all of them map.

    Collective over ``comm``, whose ranks share memory. The window lies in a passive epoch for its whole life, as
    ``Win.Sync`` demands. Each rank zeroes one part, so that pages are spread over the memory of the ranks' sockets.

    Raises
    ------
    SharedMemoryError
        On all ranks alike, before anything is allocated, if the memory is not there: touching a window that does not
        fit kills the process with SIGBUS.
    """

    def __init__(self, comm: MPI.Intracomm, nbytes: int, name: str) -> None:
        rank = comm.Get_rank()
        self._check_space(comm, nbytes, name)
        self._window = self._allocate(comm, nbytes, name)
        memory, _ = self._window.Shared_query(0)
        whole = np.frombuffer(cast("memoryview", memory), np.uint8)
        # Every process maps the window at the same distance from a page, so one offset aligns it for all.
        offset = np.array(-whole.ctypes.data % ALIGNMENT, np.int64)
        comm.Bcast([offset, 1, MPI.INT64_T], 0)
        self.buffer = whole[int(offset) : int(offset) + nbytes]
        part = -(-nbytes // comm.Get_size() // 4096) * 4096
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.buffer[rank * part : (rank + 1) * part] = 0
        self._window.Sync()
        comm.Barrier()
        self._window.Sync()

    @staticmethod
    def _check_space(comm: MPI.Intracomm, nbytes: int, name: str) -> None:
        # The first rank looks for all: the others could see another figure a moment later.
        free = free_space() if comm.Get_rank() == 0 else None
        figures = np.array([-1 if free is None else free, nbytes, -nbytes], np.int64)
        comm.Allreduce(MPI.IN_PLACE, [figures, 3, MPI.INT64_T], MPI.MAX)
        room, most, least = int(figures[0]), int(figures[1]), -int(figures[2])
        if most != least:
            raise SharedMemoryError(f"ranks of {name!r} ask for windows of {least} to {most} bytes; they must agree")
        if 0 <= room < nbytes + RESERVE:
            raise SharedMemoryError(
                f"a window of {nbytes} bytes for {name!r} does not fit: {SHARED_FOLDER} has {room} bytes left on "
                f"{MPI.Get_processor_name()}; remove leftovers of killed jobs there, enlarge it, use fewer ranks per "
                "node, or share_node_memory=False"
            )

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
