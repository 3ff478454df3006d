"""The HDF5 file without its values: laid out in memory, so that libhdf5 never touches the disk."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.checkpoint.table import Table

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

#: What the root of the HDF5 file says it is.
FORMAT = "mpizero-checkpoint"
VERSION = 1
#: Every object of the file starts at a multiple of this many bytes, so that arrays can be mapped into memory.
ALIGNMENT = 64


@dataclass(frozen=True)
class Skeleton:
    """Where everything lies in a file of ``nbytes`` bytes.

    ``offsets`` gives the first byte of every array (0 for an array without elements), ``structure`` the bytes between
    the arrays: all that HDF5 itself wrote, zeros where it wrote nothing.
    """

    nbytes: int
    offsets: dict[str, int]
    structure: tuple[tuple[int, bytes], ...]


class _Recording(io.RawIOBase):
    """A file in memory that keeps only what was written; the arrays' room costs nothing."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []
        self.nbytes = 0
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def write(self, data: ReadableBuffer, /) -> int:
        written = bytes(data)
        self.writes.append((self._position, written))
        self._position += len(written)
        self.nbytes = max(self.nbytes, self._position)
        return len(written)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.nbytes - self._position))
        view[:count] = self.regions([(self._position, count)])[0]
        self._position += count
        return count

    def truncate(self, size: int | None = None, /) -> int:
        self.nbytes = self._position if size is None else size
        return self.nbytes

    def regions(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the content of disjoint ascending (first byte, length) ranges, zeros where nothing was written."""
        starts = [start for start, _ in ranges]
        found = [bytearray(length) for _, length in ranges]
        for first, data in self.writes:
            index = max(0, bisect_right(starts, first) - 1)
            while index < len(starts) and starts[index] < first + len(data):
                start, stop = starts[index], starts[index] + len(found[index])
                low, high = max(first, start), min(first + len(data), stop)
                if low < high:
                    found[index][low - start : high - start] = data[low - first : high - first]
                index += 1
        return [bytes(region) for region in found]


def gaps(nbytes: int, extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the (first byte, length) ranges of a file of ``nbytes`` bytes that no extent covers."""
    found, end = [], 0
    for start, length in sorted(extents):
        if start > end:
            found.append((end, start - end))
        end = max(end, start + length)
    if nbytes > end:
        found.append((end, nbytes - end))
    return found


def build(table: Table) -> Skeleton:
    """Lay out one contiguous dataset per array; the same table gives the same bytes.

    Not collective. Datasets are allocated early and never filled, so that only HDF5's own structure is written.
    The ``v110`` format checksums that structure and is read by every HDF5 from 1.10 on.
    """
    import h5py

    record = _Recording()
    offsets: dict[str, int] = {}
    bounds: dict[str, Any] = {"alignment_threshold": 1, "alignment_interval": ALIGNMENT}
    with h5py.File(record, "w", libver=("v110", "v110"), **bounds) as file:
        create, group = h5py.h5p.create(h5py.h5p.DATASET_CREATE), h5py.h5p.create(h5py.h5p.GROUP_CREATE)
        create.set_layout(h5py.h5d.CONTIGUOUS)
        create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        create.set_obj_track_times(False)
        group.set_obj_track_times(False)  # HDF5 1.10 writes the date into groups unless told not to
        for name in _groups(table):
            h5py.h5g.create(file.id, name.encode(), gcpl=group)
        for path in sorted(table):
            shape, dtype = table[path]
            space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
            kind = h5py.h5t.py_create(dtype)
            dataset = h5py.h5d.create(file.id, path.encode(), kind, space, dcpl=create)
            offsets[path] = dataset.get_offset() or 0
        file.attrs.create("format", np.bytes_(FORMAT))
        file.attrs.create("version", np.int64(VERSION))
    extents = ((offsets[path], _nbytes(*table[path])) for path in table)
    ranges = gaps(record.nbytes, extents)
    structure = zip((start for start, _ in ranges), record.regions(ranges), strict=True)
    return Skeleton(record.nbytes, offsets, tuple(structure))


def _groups(paths: Iterable[str]) -> list[str]:
    """Return every group that the arrays lie in, the outer ones first."""
    parts = (path.split("/") for path in paths)
    return sorted({"/".join(names[:depth]) for names in parts for depth in range(1, len(names))})


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
