"""Map arrays that lie contiguously in a file into memory, and read ahead around what is used."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from mpizero.data.source import Indices
from mpizero.errors import DataError
from mpizero.types import Array

#: Bytes that are read ahead together.
REGION = 4 << 20
#: Least bytes of neighbouring rows that are read by a call of the system, which costs no page fault for each page.
RUN = 1 << 20


def room_in_memory() -> int:
    """Return how many bytes of data a node may keep in memory: half of what is available. Not collective."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024 // 2


def on_own_disk(path: str) -> bool:
    """Tell whether a file is on a disk of this machine, whose pages nothing but a lack of memory drops. Not collective.

    File systems that are not on one block device (NFS, Lustre, tmpfs) have devices with the major number 0.
    """
    return os.major(os.stat(path).st_dev) != 0


class MappedArray:
    """Map an array in a file into memory, read-only.

    [Note: read ahead] Shuffled rows are pages at random places, which a disk reads many times slower than neighbouring
    ones. Where the array fits into memory beside everything else, all of it will be read in an epoch and kept by the
    page cache. So the first access to a region asks the kernel for the whole region.
    """

    def __init__(self, path: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> None:
        self.path, self._offset = path, offset
        self.shape, self.ndim, self.dtype = shape, len(shape), dtype
        self._array: np.memmap[Any, Any] = np.memmap(path, dtype, "r", offset=offset, shape=shape)
        self._first = offset % mmap.ALLOCATIONGRANULARITY  # the mapping begins at a page
        self._row = self._array.nbytes // shape[0]
        end = self._first + self._array.nbytes
        self._unread = np.full(-(-end // REGION), end <= room_in_memory())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, where: Any) -> Array:
        """Return the rows of an array of indices, or the elements of a tuple of slices."""
        if isinstance(where, np.ndarray) and where.size * self._row >= RUN and (np.diff(where) == 1).all():
            return self._read_run(int(where[0]), where.size)
        if self._unread.any():
            self._read_ahead(where if isinstance(where, np.ndarray) else np.arange(where[0].start, where[0].stop))
        found: Array = self._array[where]
        return found

    def _read_run(self, first: int, count: int) -> Array:
        """Return ``count`` rows from row ``first`` on."""
        found = np.empty((count, *self.shape[1:]), self.dtype)
        memory, done = found.reshape(-1).view(np.uint8), 0
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self._offset + first * self._row)
            while done < memory.size:
                if not (read := file.readinto(memory[done:].data)):
                    raise DataError(f"{self.path}: it has become shorter while it was used")
                done += read
        return found

    def _read_ahead(self, rows: Indices) -> None:
        starts = self._first + rows * self._row
        touched = np.unique([starts // REGION, (starts + self._row - 1) // REGION])
        for region in touched[self._unread[touched]].tolist():
            size = min(REGION, self._first + self._array.nbytes - region * REGION)
            self._array._mmap.madvise(mmap.MADV_WILLNEED, region * REGION, size)  # type: ignore[attr-defined]
            self._unread[region] = False
