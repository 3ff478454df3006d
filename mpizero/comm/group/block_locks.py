"""Let the ranks of a node, processes or threads, lock blocks of common memory without MPI."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks


class BlockLocks:
    """Lock numbered blocks, one rank of a node at a time; the constructor is collective over ``node``.

    [Note: locks] A lock is one byte of a file, which every rank has opened for itself (an open file description lock of
    Linux). So a thread that may not call MPI can lock, ranks that are threads exclude each other too, and the kernel
    frees the locks of a process that dies: nobody waits for it. The file has no name after the constructor.
    """

    def __init__(self, node: Communicator) -> None:
        self._file = -1
        path = ""
        with all_ranks(node, "block locks"):
            if node.rank == 0:
                import tempfile

                first, path = tempfile.mkstemp(prefix="mpizero-locks-")
                os.close(first)
        path = node.broadcast_object(path, tag="block locks")
        try:
            with all_ranks(node, "block locks"):
                self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        finally:
            if node.rank == 0:
                with suppress(OSError):
                    os.unlink(path)

    @contextmanager
    def hold(self, block: int) -> Iterator[None]:
        """Hold the lock of a block during the ``with`` block. Not collective."""
        self._set(fcntl.F_WRLCK, block)
        try:
            yield
        finally:
            self._set(fcntl.F_UNLCK, block)

    def _set(self, kind: int, block: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi", kind, os.SEEK_SET, block, 1, 0))

    def close(self) -> None:
        """Close the file; a second call does nothing. Not collective."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
