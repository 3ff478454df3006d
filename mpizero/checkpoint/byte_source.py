"""Read bytes of ``state.h5``, from the file or from a copy in memory."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod

from mpizero.checkpoint.format.regular_files import open_regular
from mpizero.errors import CheckpointDamagedError, CheckpointError


class ByteSource(ABC):
    """Define how readers of a checkpoint get the bytes of ``state.h5``."""

    @abstractmethod
    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes that begin at ``offset``."""

    @abstractmethod
    def close(self) -> None:
        """Close the file or release the memory; a second call does nothing."""


class FileByteSource(ByteSource):
    """Read ``state.h5`` from a regular file; the constructor checks that the file has ``nbytes`` bytes."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self._file = open_regular(path)
        if (found := os.fstat(self._file).st_size) != nbytes:
            self.close()
            raise CheckpointDamagedError(f"{path}: {found} bytes instead of {nbytes}: truncated or damaged")
        with contextlib.suppress(OSError):  # advice only: read far ahead of pieces that fit a core's cache
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes that begin at ``offset``."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._file, [view[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.path) from None
            if not count:
                raise CheckpointError(f"{self.path}: ends at byte {offset + done}: truncated meanwhile")
            done += count

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class MemoryByteSource(ByteSource):
    """Read ``state.h5`` from a copy of the file in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes that begin at ``offset``."""
        view[:] = self._data[offset : offset + len(view)]

    def close(self) -> None:
        """Release the reference to the copy in memory."""
        self._data = memoryview(b"")
