"""Define the format of a checkpoint: its arrays, the layout of its HDF5 file, its checksums and its manifest.

A checkpoint is one HDF5 file of whole arrays, ``state.h5``, and ``manifest.json`` with the attributes, and the offset
and the checksums of every array. :class:`LocalArray` describes an array and the ranges of it that one rank writes;
:func:`merge` makes one table of the arrays that all ranks write. Arrays are cut into blocks of 4 MiB, each with a CRC32
that can be computed from those of its parts, so ranks that share a block verify it without reading it twice.
:func:`build` makes the HDF5 file in memory, without the values of its arrays, so that libhdf5 never writes to a disk.
:func:`encode` returns the bytes of a manifest, and :func:`decode` parses them.

Files that are read are not trusted: only regular files are opened, JSON is parsed strictly and with limits on memory
and nesting, and every number of a manifest is checked. Only :func:`open_regular` and :func:`read_regular` touch files.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import sys
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero._util.checks import is_whole, strict_json
from mpizero._util.names import PATH_LIMIT, PATH_PARTS, fault_of, nested_in, shown
from mpizero._util.numbers import crc32_combine
from mpizero.errors import ArgumentError, CheckpointDamagedError, CheckpointError, CheckpointVersionError, ConfigError
from mpizero.types import Array

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.h5"


#: Name and version of the format, which are attributes of the HDF5 file's root.
FORMAT = "mpizero-checkpoint"
VERSION = 1

#: Type of a table: shape and element type of every array, by path.
Table = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


@dataclass(frozen=True)
class LocalArray:
    """Describe one array of a checkpoint, and the ranges of its elements that one rank writes or reads.

    Parameters
    ----------
    path : str
        Path in the HDF5 file, for example ``"parameters/blocks.0.weight"`` or ``"optimizer/exp_avg/blocks.0.weight"``.
    shape : tuple of int
        Shape of the whole array.
    dtype : numpy.dtype
        Element type, one of :data:`DTYPES`.
    pieces : tuple of (int, numpy.ndarray)
        Ranges of elements of the array flattened in C order. Each piece is the index of its first element and a
        one-dimensional contiguous array of its values. For writing, the pieces of all ranks must be disjoint and make
        up the whole array. For reading, they may be any ranges, and their values are overwritten. A piece of an array
        of complex numbers may be an array of real numbers: its first index then counts real numbers, two for each
        complex element. So two ranks can share an element.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> half = checkpoint.LocalArray("parameters/weight", (2, 3), np.dtype("f4"), ((3, np.ones(3, "f4")),))
    >>> half.path, half.shape, half.pieces[0][0]  # this rank writes elements 3 to 5, another rank the others
    ('parameters/weight', (2, 3), 3)
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: tuple[tuple[int, Array], ...] = ()

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        return prod(self.shape)


def number_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of real and imaginary part of a complex type ``dtype``; return other types unchanged."""
    return np.empty(0, dtype).real.dtype


def numbers_in(dtype: np.dtype[Any]) -> int:
    """Return how many real numbers an element of type ``dtype`` consists of: 2 if it is complex, else 1."""
    return dtype.itemsize // number_of(dtype).itemsize


def check_path(path: object) -> str:
    """Return ``path`` if it may be the name of an array; otherwise raise :class:`CheckpointError`."""
    if fault := fault_of(path, PATH_LIMIT, PATH_PARTS):
        raise CheckpointError(f"array name {shown(path)} is not allowed: it {fault}")
    return str(path)


#: Element types a checkpoint may hold, little-endian; bfloat16 is stored as its bits, in ``<u2``. HDF5 has no complex
#: numbers: they are compounds of the numbers ``r`` and ``i``, as h5py writes and reads them.
DTYPES = ("<f2", "<f4", "<f8", "<c8", "<c16", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8")
#: The most bytes that one array may have; so every sum of sizes stays far below 2**63.
SIZE_LIMIT = 2**56


def check_shape(path: str, shape: Sequence[object], dtype: str) -> tuple[int, ...]:
    """Return ``shape`` as a tuple of ints.

    Raises :class:`CheckpointError` if a checkpoint cannot store an array of this shape and element type.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"array {path!r}: element type {dtype!r:.40} is not one of {', '.join(DTYPES)}")
    if len(shape) > 32:
        raise CheckpointError(f"array {path!r}: {len(shape)} axes, at most 32 are allowed")
    sizes = tuple(int(n) for n in shape if is_whole(n))
    if len(sizes) != len(shape):
        raise CheckpointError(f"array {path!r}: shape {tuple(shape)!r:.80} is not a list of sizes >= 0")
    if prod(max(n, 1) for n in sizes) > SIZE_LIMIT // np.dtype(dtype).itemsize:
        raise CheckpointError(f"array {path!r}: shape {sizes!r:.80} of {dtype} is larger than {SIZE_LIMIT} bytes")
    return sizes


def check_paths(paths: Iterable[str]) -> None:
    """Raise :class:`CheckpointError` if one path would be the HDF5 group of another path, such as ``a`` of ``a/b``."""
    if conflict := nested_in(paths):
        raise CheckpointError(f"array {conflict[0]!r} cannot also be the group of array {conflict[1]!r}")


def check_array(array: LocalArray, writable: bool = False) -> LocalArray:
    """Check ``array``, and return a copy with the shape as a tuple of ints and the type as ``numpy.dtype``.

    The pieces are not copied; with ``writable`` they must be writable arrays. Raises a :class:`CheckpointError` that
    names the array and what is wrong.
    """
    path = check_path(array.path)
    dtype = np.dtype(array.dtype)
    shape = check_shape(path, array.shape, dtype.str)
    size = prod(shape)
    for start, values in array.pieces:
        where = f"array {path!r}, piece at element {start}"
        if not isinstance(values, np.ndarray) or values.ndim != 1 or not values.flags.c_contiguous:
            raise CheckpointError(f"{where}: values must be a one-dimensional contiguous NumPy array")
        if values.dtype not in (dtype, number_of(dtype)):
            raise CheckpointError(f"{where}: values are {values.dtype.str}, the array is {dtype.str}")
        if writable and not values.flags.writeable:
            raise CheckpointError(f"{where}: values to read into must be writable")
        if start < 0 or start + values.size > size * (dtype.itemsize // values.itemsize):
            raise CheckpointError(f"{where}: {values.size} elements do not fit an array of {size}")
    return LocalArray(path, shape, dtype, tuple((int(start), values) for start, values in array.pieces))


@dataclass(frozen=True)
class WriteRanges:
    """Describe which ranges of elements of one array one rank writes, and the shape and type of the whole array.

    ``ranges`` holds (start, stop) indices of real numbers of the array flattened in C order; a complex element counts
    as two of them.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, array: LocalArray) -> WriteRanges:
        """Return the ranges of elements of ``array`` that its pieces hold, without empty ones."""
        sizes = [(start, values.size, numbers_in(values.dtype)) for start, values in array.pieces if values.size]
        ranges = tuple((start * each, (start + size) * each) for start, size, each in sizes)
        return cls(array.path, array.shape, array.dtype.str, ranges)


#: The most arrays that one checkpoint may have.
ARRAY_LIMIT = 65_536


def merge(writes: Sequence[Sequence[WriteRanges]]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and element type of every array, sorted by path, from the ranges of elements that each rank writes.

    ``writes`` holds one sequence for each rank. Raises :class:`CheckpointError` unless each element is written by
    exactly one rank. Every rank calls this function with the same gathered ranges, and gets the same table or the same
    error.
    """
    table: dict[str, tuple[tuple[int, ...], str, int]] = {}
    ranges: dict[str, list[tuple[int, int, int]]] = {}
    for rank, listed in enumerate(writes):
        for write in listed:
            shape, dtype, first = table.setdefault(write.path, (write.shape, write.dtype, rank))
            if (shape, dtype) != (write.shape, write.dtype):
                raise CheckpointError(
                    f"array {write.path!r}: rank {first} has shape {shape} of {dtype}, "
                    f"rank {rank} has {write.shape} of {write.dtype}"
                )
            ranges.setdefault(write.path, []).extend((*span, rank) for span in write.ranges)
    if len(table) > ARRAY_LIMIT:
        raise CheckpointError(f"{len(table)} arrays are more than the {ARRAY_LIMIT} that one checkpoint may hold")
    check_paths(table)
    for path in sorted(table):
        shape, dtype, _ = table[path]
        _check_tiling(path, prod(shape) * numbers_in(np.dtype(dtype)), sorted(ranges[path]))
    return {path: (table[path][0], np.dtype(table[path][1])) for path in sorted(table)}


def _check_tiling(path: str, size: int, ranges: Sequence[tuple[int, int, int]]) -> None:
    end, writer = 0, -1
    for start, stop, rank in ranges:
        if start < end:
            raise CheckpointError(f"array {path!r}: element {start} is written by rank {writer} and by rank {rank}")
        if start > end:
            raise CheckpointError(f"array {path!r}: elements {end} to {start - 1} are written by no rank")
        end, writer = stop, rank
    if end != size:
        raise CheckpointError(f"array {path!r}: elements {end} to {size - 1} are written by no rank")


#: Bytes of one checksummed block of an array; a multiple of every element size.
BLOCK = 4 * 1024 * 1024


def crc32_shifted(crc: int, length: int) -> int:
    """Return what bytes with CRC32 ``crc``, followed by ``length`` other bytes, contribute to the CRC32 of the whole.

    The CRC32 of the whole is the XOR of the contributions of its parts.
    """
    return crc32_combine(crc, 0, length)


def cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut bytes ``start:stop`` of an array at the multiples of 4 MiB; yield (start, stop) of each part in order."""
    while start < stop:
        end = min(stop, (start // BLOCK + 1) * BLOCK)
        yield start, end
        start = end


#: Bytes of a piece that stays in a core's cache from reading to checksumming. With pieces of 256 KiB loading takes 5 to
#: 12 % longer, because of the number of calls; larger pieces are not faster.
_CACHED = 1024 * 1024


def in_cache(part: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Cut a block into parts that fit a core's cache; yield the offset in the block and a view of each part."""
    for start in range(0, len(part), _CACHED):
        yield start, part[start : start + _CACHED]


def block_count(nbytes: int) -> int:
    """Return the number of checksummed blocks of an array of ``nbytes`` bytes."""
    return -(-nbytes // BLOCK)


def judge(length: int, stored: int, segments: Sequence[tuple[int, int, int]]) -> list[bool | None]:
    """Verify segments (ranges of bytes) of one block, which ranks have read, by the CRC32 of the block.

    Ranks may cut a block anywhere, and several ranks may read the same bytes. A segment can be verified if it belongs
    to a sequence of segments that follow each other without a gap and cover the block. It is correct if the CRC32 of
    that sequence is ``stored``.

    Parameters
    ----------
    length : int
        Size of the block in bytes.
    stored : int
        CRC32 of the block as it was written.
    segments : sequence of (start, stop, crc)
        First byte and end of each segment, counted from the start of the block, and the CRC32 of the bytes that were
        read.

    Returns
    -------
    list of bool or None
        For each segment True if it is correct, False if the CRC32 of its sequence is not ``stored``, and None if it
        cannot be verified.
    """
    before = {0: 0}
    for start, stop, crc in sorted(segments):
        if start in before and stop not in before:
            before[stop] = crc32_combine(before[start], crc, stop - start)
    after = {length: 0}
    for start, stop, crc in sorted(segments, key=lambda segment: segment[1], reverse=True):
        if stop in after and start not in after:
            after[start] = crc32_combine(crc, after[stop], length - stop)
    verdicts: list[bool | None] = []
    for start, stop, crc in segments:
        if start in before and stop in after:
            combined = crc32_combine(crc32_combine(before[start], crc, stop - start), after[stop], length - stop)
            verdicts.append(combined == stored)
        else:
            verdicts.append(None)
    return verdicts


#: Every object of the file starts at a multiple of this many bytes, so that arrays can be mapped into memory.
ALIGNMENT = 64
#: The largest alignment that can be chosen: a page. The gaps that alignment leaves between arrays are checksummed too.
ALIGNMENT_LIMIT = 4096


def check_alignment(alignment: int) -> None:
    """Raise :class:`ConfigError` unless ``alignment`` is a power of two from 64 to 4096, in bytes."""
    if not ALIGNMENT <= alignment <= ALIGNMENT_LIMIT or alignment & (alignment - 1):
        raise ConfigError(f"alignment must be a power of two from {ALIGNMENT} to {ALIGNMENT_LIMIT}, got {alignment}")


@dataclass(frozen=True)
class Skeleton:
    """Describe an HDF5 file of ``nbytes`` bytes without the values of its arrays.

    ``offsets`` holds the first byte of every array by path; it is 0 for an array without elements. ``structure`` holds
    all bytes outside the arrays as pairs of (first byte, content): the bytes that HDF5 wrote, and zeros where HDF5
    wrote nothing.
    """

    nbytes: int
    offsets: dict[str, int]
    structure: tuple[tuple[int, bytes], ...]


class SeekableFile(io.RawIOBase):
    """Implement the position and seeking of a file object of ``nbytes`` bytes, as h5py needs them."""

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position in the file, and return it in bytes from the start of the file."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill ``buffer`` with the bytes at the position, advance the position, and return the number of bytes."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.nbytes - self._position))
        self.fill(view[:count])
        self._position += count
        return count

    @abstractmethod
    def fill(self, view: memoryview) -> None:
        """Fill ``view`` with the bytes of the file that begin at the position."""


class _Recording(SeekableFile):
    """Record the writes to a file in memory.

    HDF5 never writes the values of arrays here, so they take no memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[int, bytes]] = []

    def write(self, data: ReadableBuffer, /) -> int:
        written = bytes(data)
        self.writes.append((self._position, written))
        self._position += len(written)
        self.nbytes = max(self.nbytes, self._position)
        return len(written)

    def fill(self, view: memoryview) -> None:
        view[:] = self.regions([(self._position, len(view))])[0]

    def truncate(self, size: int | None = None, /) -> int:
        self.nbytes = self._position if size is None else size
        return self.nbytes

    def regions(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the content of each range (first byte, number of bytes); bytes that were never written are zeros.

        The ranges must be disjoint and ascending.
        """
        starts = [start for start, _ in ranges]
        contents = [bytearray(length) for _, length in ranges]
        for first, data in self.writes:
            index = max(0, bisect_right(starts, first) - 1)
            while index < len(starts) and starts[index] < first + len(data):
                start, stop = starts[index], starts[index] + len(contents[index])
                low, high = max(first, start), min(first + len(data), stop)
                if low < high:
                    contents[index][low - start : high - start] = data[low - first : high - first]
                index += 1
        return [bytes(region) for region in contents]


def gaps(nbytes: int, extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of a file of ``nbytes`` bytes that no extent covers.

    Ranges and extents are (first byte, number of bytes).
    """
    ranges, end = [], 0
    for start, length in sorted(extents):
        if start > end:
            ranges.append((end, start - end))
        end = max(end, start + length)
    if nbytes > end:
        ranges.append((end, nbytes - end))
    return ranges


ROOT_ATTRIBUTES: Mapping[str, Any] = {"format": np.bytes_(FORMAT), "version": np.int64(VERSION)}


def build(table: Table, alignment: int = ALIGNMENT, root_attributes: Mapping[str, Any] = ROOT_ATTRIBUTES) -> Skeleton:
    """Build the HDF5 file with one contiguous dataset for each array of ``table``, without the values of the arrays.

    ``table`` holds the shape and element type of every array. Equal arguments give equal bytes. Arrays of at least
    ``alignment`` bytes start at a multiple of ``alignment``. ``root_attributes`` are the attributes of the file's root
    group. The datasets are allocated early and never filled, so that HDF5 writes only its own structure. The ``v110``
    file format has checksums of that structure, and every HDF5 from 1.10 on can read it.

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
        for name, value in root_attributes.items():
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


def path_of(folder: str | os.PathLike[str]) -> str:
    """Return the path ``folder`` as a string; raise :class:`ArgumentError` if it is not a path."""
    if not isinstance(folder, str | os.PathLike):
        raise ArgumentError(f"the folder of a checkpoint is a path, a string or pathlib.Path; got {folder!r:.80}")
    return os.fspath(folder)


def open_regular(path: str) -> int:
    """Open a file for reading and return its descriptor; raise CheckpointError unless it is a regular file, no link."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise CheckpointError(f"{path}: not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path}: not a regular file")
    return file


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the bytes of a regular file that has at most ``limit`` bytes.

    Raises
    ------
    CheckpointError
        If ``path`` is a link or not a regular file, or the file has more than ``limit`` bytes.
    OSError
        If the file cannot be opened or read.
    """
    name = os.fspath(path)
    with os.fdopen(open_regular(name), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{name}: more than {limit} bytes, which is the most that is read")
    return data


#: The most memory in bytes that parsing may take, and the deepest nesting of dictionaries and lists.
MEMORY_LIMIT, DEPTH_LIMIT = 96 * 1024 * 1024, 32


def parse(data: bytes) -> Any:
    """Parse JSON in UTF-8 and return its value.

    Raises
    ------
    ValueError
        If ``data`` is not JSON, contains a number beyond the range of float64 or a key twice, is nested too deeply, or
        would take too much memory. The message says which, and the caller must add the name of the file.
    """
    if (memory := memory_of(data)) > MEMORY_LIMIT:
        raise ValueError(f"would take {memory} bytes of memory, at most {MEMORY_LIMIT} are allowed")
    if depth_of(value := strict_json(data)) > DEPTH_LIMIT:
        raise ValueError(f"nested more than {DEPTH_LIMIT} levels deep")
    return value


def memory_of(data: bytes) -> int:
    """Return an upper bound on the bytes of memory that parsing ``data`` takes.

    The bound is computed from the numbers of brackets, commas and bytes.
    """
    return 190 * (data.count(b"{") + data.count(b"[")) + 72 * data.count(b",") + 3 * len(data)


def depth_of(value: object) -> int:
    """Return the number of levels of dictionaries, lists and tuples in ``value``.

    The function does not recurse, because a crafted file could exhaust the stack.
    """
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list, tuple))]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def is_count(value: object, least: int = 0) -> bool:
    """Tell whether a value from a file is an int from ``least`` to 2**63 - 1; it is False for bools and for 1.0."""
    return type(value) is int and least <= value < 2**63


def is_number(value: object) -> bool:
    """Tell whether a value from a file is a finite number > 0 within the range of float64."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max  # type: ignore[operator]


#: The largest size of a manifest in bytes; it is checked before the content, which cannot be trusted.
MANIFEST_LIMIT = 32 * 1024 * 1024


@dataclass(frozen=True)
class StoredArray:
    """Describe one array in ``state.h5``.

    ``offset`` is the byte of the file at which the array starts. ``checksums`` holds one CRC32 for each block of
    ``BLOCK`` bytes of the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    checksums: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole array in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """Hold the content of ``manifest.json``.

    ``arrays`` describes the arrays by path. ``state_bytes`` is the size of ``state.h5``, and ``structure`` is the CRC32
    of its bytes outside the arrays.
    """

    attributes: dict[str, Any]
    arrays: dict[str, StoredArray]
    state_bytes: int
    structure: int

    @property
    def table(self) -> Table:
        """Shape and element type of every array, by path."""
        return {path: (array.shape, array.dtype) for path, array in self.arrays.items()}

    @property
    def structure_ranges(self) -> list[tuple[int, int]]:
        """The ranges of ``state.h5`` outside the arrays, as (first byte, number of bytes)."""
        return gaps(self.state_bytes, extents(self.arrays))


def extents(arrays: Mapping[str, StoredArray]) -> Iterable[tuple[int, int]]:
    """Return the range of ``state.h5``, as (first byte, number of bytes), of each array that has elements."""
    return ((array.offset, array.nbytes) for array in arrays.values() if array.nbytes)


def canonical_json(value: object, what: str) -> str:
    """Return ``value`` as JSON text; equal values give equal texts. ``what`` names the value in error messages.

    Raises
    ------
    CheckpointError
        If the value contains anything but dictionaries with string keys, lists, tuples, strings, finite numbers within
        the range of float64, booleans and None, or if it exceeds the limits on nesting and memory that :func:`decode`
        sets.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} cannot be stored as JSON: {error}") from None
    if depth_of(value) > DEPTH_LIMIT:
        raise CheckpointError(f"{what} is nested more than {DEPTH_LIMIT} levels deep")
    if memory_of(data := text.encode()) > MEMORY_LIMIT:
        raise CheckpointError(f"{what} is more than one manifest may hold")
    try:
        parsed = parse(data)
    except ValueError as error:
        raise CheckpointError(f"{what} would not come back from JSON: {error}") from None
    if parsed != _lists(value):
        raise CheckpointError(f"{what} would not come back from JSON unchanged: use string keys")
    return text


def _lists(value: object) -> object:
    """Return ``value`` with all tuples replaced by lists, because JSON text is parsed to lists."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``: one line of JSON, and a second line with the SHA-256 of the first."""
    arrays = {
        path: {
            "dataset": path,
            "shape": list(array.shape),
            "dtype": array.dtype.str,
            "offset": array.offset,
            "crc32": "".join(f"{crc:08x}" for crc in array.checksums),
        }
        for path, array in manifest.arrays.items()
    }
    body = {
        "format": FORMAT,
        "version": VERSION,
        "attributes": manifest.attributes,
        "state": {"file": STATE_NAME, "bytes": manifest.state_bytes, "structure_crc32": f"{manifest.structure:08x}"},
        "block_bytes": BLOCK,
        "arrays": arrays,
    }
    line = canonical_json(body, f"the manifest of {len(arrays)} arrays").encode() + b"\n"
    if len(line) + 80 > MANIFEST_LIMIT:
        raise CheckpointError(f"{len(arrays)} arrays and their attributes are more than one manifest may describe")
    return line + f'{{"sha256":"{hashlib.sha256(line).hexdigest()}"}}\n'.encode()


def decode(data: bytes) -> Manifest:
    """Parse and check the bytes of a manifest, which may be damaged or crafted; the inverse of :func:`encode`.

    Raises
    ------
    CheckpointError
        If something is wrong. The message describes the first problem, and the caller must add the name of the file.
    """
    if len(data) > MANIFEST_LIMIT:
        raise CheckpointError(f"larger than {MANIFEST_LIMIT} bytes")
    end = data.find(b"\n") + 1
    if data[end:] != f'{{"sha256":"{hashlib.sha256(memoryview(data)[:end]).hexdigest()}"}}\n'.encode():
        raise CheckpointDamagedError("damaged: its last line is not the SHA-256 of what stands before it")
    try:
        body = parse(data[:end])
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"not the manifest of a {FORMAT}")
    if not _is(version := body.get("version"), VERSION):
        raise CheckpointVersionError(f"format version {version!r:.40}, this mpizero reads version {VERSION}")
    return _manifest(body)


def _manifest(body: dict[str, Any]) -> Manifest:
    """Convert the parsed JSON of a manifest; raise CheckpointError unless it has exactly the keys of this version."""
    _check_keys(body, {"format", "version", "attributes", "state", "block_bytes", "arrays"}, "the manifest")
    state, arrays, attributes = body["state"], body["arrays"], body["attributes"]
    if not (isinstance(state, dict) and isinstance(arrays, dict) and isinstance(attributes, dict)):
        raise CheckpointError("state, arrays and attributes must be JSON objects")
    _check_keys(state, {"file", "bytes", "structure_crc32"}, "state")
    if state["file"] != STATE_NAME:
        raise CheckpointError(f"state.file is {state['file']!r:.80} instead of {STATE_NAME!r}")
    if not _is(body["block_bytes"], BLOCK):
        raise CheckpointError(f"block_bytes is {body['block_bytes']!r:.40}, version {VERSION} has {BLOCK}")
    if len(arrays) > ARRAY_LIMIT:
        raise CheckpointError(f"{len(arrays)} arrays, at most {ARRAY_LIMIT} are allowed")
    nbytes = _size(state["bytes"], "state.bytes")
    (structure,) = _checksums(state["structure_crc32"], 1, "state.structure_crc32")
    stored = {check_path(path): _stored(path, entry, nbytes) for path, entry in arrays.items()}
    check_paths(stored)
    _check_extents(stored, nbytes)
    return Manifest(attributes, stored, nbytes, structure)


def _is(value: object, number: int) -> bool:
    """Tell whether ``value`` is an int equal to ``number``; False for True and 1.0, which Python calls equal to 1."""
    return type(value) is int and value == number


def _check_keys(entries: Mapping[str, Any], keys: set[str], what: str) -> None:
    if set(entries) != keys:
        raise CheckpointError(f"{what} has the keys {sorted(entries)!r:.200} instead of {sorted(keys)}")


def _stored(path: str, entry: object, state_bytes: int) -> StoredArray:
    where = f"array {path!r}"
    if not isinstance(entry, dict) or set(entry) != {"dataset", "shape", "dtype", "offset", "crc32"}:
        raise CheckpointError(f"{where}: an entry has exactly dataset, shape, dtype, offset and crc32")
    if entry["dataset"] != path:
        raise CheckpointError(f"{where}: dataset {entry['dataset']!r:.80} has another name")
    if not isinstance(entry["shape"], list) or not isinstance(entry["dtype"], str):
        raise CheckpointError(f"{where}: shape must be a list and dtype a string")
    shape = check_shape(path, entry["shape"], entry["dtype"])
    dtype = np.dtype(entry["dtype"])
    offset = _size(entry["offset"], f"{where}: offset")
    nbytes = prod(shape) * dtype.itemsize
    if nbytes and offset + nbytes > state_bytes:
        raise CheckpointError(
            f"{where}: {nbytes} bytes at offset {offset} do not fit a {STATE_NAME} of {state_bytes} bytes"
        )
    return StoredArray(shape, dtype, offset, _checksums(entry["crc32"], block_count(nbytes), f"{where}: crc32"))


#: The largest number of bytes outside the arrays, HDF5's structure: for the file, plus for each array.
STRUCTURE_LIMIT, STRUCTURE_PER_ARRAY = 1024 * 1024, 8192


def _check_extents(arrays: dict[str, StoredArray], state_bytes: int) -> None:
    end, before = 0, ""
    for path in sorted((p for p in arrays if arrays[p].nbytes), key=lambda p: arrays[p].offset):
        if arrays[path].offset < end:
            raise CheckpointError(f"array {path!r}: overlaps array {before!r}")
        end, before = arrays[path].offset + arrays[path].nbytes, path
    structure = sum(length for _, length in gaps(state_bytes, extents(arrays)))
    if structure > (limit := STRUCTURE_LIMIT + STRUCTURE_PER_ARRAY * len(arrays)):
        raise CheckpointError(f"{structure} bytes of {STATE_NAME} belong to no array, at most {limit} are plausible")


def _size(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise CheckpointError(f"{what} is {value!r:.40}, not a size")
    return value


def _checksums(value: object, count: int, what: str) -> tuple[int, ...]:
    try:
        digits = bytes.fromhex(value) if isinstance(value, str) and len(value) == 8 * count else None
    except ValueError:
        digits = None
    if digits is None or digits.hex() != value:
        raise CheckpointError(f"{what} is not {count} checksums of 8 hexadecimal digits")
    return tuple(np.frombuffer(digits, ">u4").tolist())


PARAMETERS, OPTIMIZER = "parameters/", "optimizer/"


def short_name(path: str) -> str:
    """Return the name of an array in other file formats: its path without a leading ``parameters/``. Not collective."""
    return path.removeprefix(PARAMETERS)
