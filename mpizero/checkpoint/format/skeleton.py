"""Build an HDF5 file without the values of its arrays in memory, so that libhdf5 never writes to a disk."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.checkpoint.format.alignment import ALIGNMENT
from mpizero.checkpoint.format.table import Table

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

#: Name and version of the format, which are attributes of the HDF5 file's root.
FORMAT = "mpizero-checkpoint"
VERSION = 1
MARKS: Mapping[str, Any] = {"format": np.bytes_(FORMAT), "version": np.int64(VERSION)}


@dataclass(frozen=True)
class Skeleton:
    """Describe an HDF5 file of ``nbytes`` bytes without the values of its arrays.

    ``offsets`` holds the first byte of every array by path; it is 0 for an array without elements. ``structure`` holds
    all bytes outside the arrays as pairs of (first byte, content): what HDF5 itself wrote, and zeros where it wrote
    nothing.
    """

    nbytes: int
    offsets: dict[str, int]
    structure: tuple[tuple[int, bytes], ...]


class SeekableFile(io.RawIOBase):
    """Implement the position and seeking of a file object of ``nbytes`` bytes, as h5py needs them."""

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._position = 0

    def seekable(self) -> bool:
        """Return True, because h5py asks whether it can seek."""
        return True

    def readable(self) -> bool:
        """Return True, because h5py asks whether it can read."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position in the file, and return it in bytes from the start of the file."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        return self._position

    def tell(self) -> int:
        """Return the position in bytes from the start of the file."""
        return self._position


class _Recording(SeekableFile):
    """Record the writes to a file in memory.

    The bytes of arrays are never written, so they take no memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[int, bytes]] = []

    def writable(self) -> bool:
        return True

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
        """Return the content of each range (first byte, number of bytes); bytes that were never written are zeros.

        The ranges must be disjoint and ascending.
        """
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
    """Return the ranges of a file of ``nbytes`` bytes that no extent covers.

    Ranges and extents are (first byte, number of bytes).
    """
    found, end = [], 0
    for start, length in sorted(extents):
        if start > end:
            found.append((end, start - end))
        end = max(end, start + length)
    if nbytes > end:
        found.append((end, nbytes - end))
    return found


def build(table: Table, alignment: int = ALIGNMENT, marks: Mapping[str, Any] = MARKS) -> Skeleton:
    """Build the HDF5 file with one contiguous dataset for each array of ``table``, without the values of the arrays.

    Equal arguments give equal bytes. Arrays of at least ``alignment`` bytes start at a multiple of ``alignment``.
    ``marks`` are the attributes of the file's root group. The datasets are allocated early and never filled, so that
    HDF5 writes only its own structure. The ``v110`` file format has checksums of that structure, and every HDF5 from
    1.10 on can read it.

    [Note: two alignments] HDF5 aligns every object whose size reaches one threshold, be it an array or a part of HDF5's
    structure. With a large alignment for all objects there would be a gap after each small object. Therefore the small
    arrays are added first, with an alignment of 64 bytes. Then the file is opened again with ``alignment`` as threshold
    and alignment, and the arrays of at least ``alignment`` bytes are added. So no gap is larger than the array after
    it.
    """
    import h5py

    record = _Recording()
    wide = [] if alignment == ALIGNMENT else [path for path in sorted(table) if _nbytes(*table[path]) >= alignment]
    with _opened(record, "w", 1, ALIGNMENT) as file:
        group = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
        group.set_obj_track_times(False)  # HDF5 1.10 writes the date into groups unless told not to
        for name in _groups(table):
            h5py.h5g.create(file.id, name.encode(), lcpl=_link(name), gcpl=group)
        offsets = _add_datasets(file, table, sorted(table.keys() - set(wide)))
        for name, value in marks.items():
            file.attrs.create(name, value)
    if wide:
        with _opened(record, "r+", alignment, alignment) as file:
            offsets |= _add_datasets(file, table, wide)
    extents = ((offsets[path], _nbytes(*table[path])) for path in table)
    ranges = gaps(record.nbytes, extents)
    structure = zip((start for start, _ in ranges), record.regions(ranges), strict=True)
    return Skeleton(record.nbytes, offsets, tuple(structure))


def _opened(record: _Recording, mode: str, threshold: int, interval: int) -> Any:
    import h5py

    bounds: dict[str, Any] = {"alignment_threshold": threshold, "alignment_interval": interval}
    return h5py.File(record, mode, libver=("v110", "v110"), **bounds)


def _add_datasets(file: Any, table: Table, paths: Iterable[str]) -> dict[str, int]:
    """Create the datasets ``paths`` in the given order; return the first byte of each in the file, by path."""
    import h5py

    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_layout(h5py.h5d.CONTIGUOUS)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    create.set_obj_track_times(False)
    offsets = {}
    for path in paths:
        shape, dtype = table[path]
        space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
        dataset = h5py.h5d.create(file.id, path.encode(), h5py.h5t.py_create(dtype), space, create, _link(path))
        offsets[path] = dataset.get_offset() or 0
    return offsets


def _link(path: str) -> Any:
    """Return the HDF5 link creation properties for a path: a name that is not ASCII is marked as UTF-8."""
    import h5py

    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_char_encoding(h5py.h5t.CSET_ASCII if path.rpartition("/")[2].isascii() else h5py.h5t.CSET_UTF8)
    return link


def _groups(paths: Iterable[str]) -> list[str]:
    """Return the path of every HDF5 group that contains arrays, outer groups before inner ones."""
    parts = (path.split("/") for path in paths)
    return sorted({"/".join(names[:depth]) for names in parts for depth in range(1, len(names))})


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def hdf5_version() -> str:
    """Return the version of the HDF5 library; "missing" without h5py."""
    try:
        import h5py
    except ImportError:
        return "missing"
    return str(h5py.version.hdf5_version)
