"""Implement the back end "direct": every rank writes its values into the HDF5 file by system calls, without HDF5."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpizero._util.faults import inject
from mpizero._util.text import crc32
from mpizero.checkpoint.atomic_folder import sync_range, write_at
from mpizero.checkpoint.failures import agreed
from mpizero.checkpoint.format.checksum import BLOCK, block_count, crc32_shifted, cut
from mpizero.checkpoint.format.table import LocalArray, Table
from mpizero.comm.communicator import Communicator
from mpizero.types import Array


class PieceSums(NamedTuple):
    """Hold the CRC32s of bytes ``start:stop`` of an array, one for each checksummed block that they overlap."""

    path: str
    start: int
    stop: int
    checksums: tuple[int, ...]


class WritingStopped(Exception):  # noqa: N818 - a request, not a mistake
    """Raised by :func:`write_pieces` when it stops between two blocks because ``stopped()`` returned True."""


def as_bytes(values: Array) -> memoryview:
    """Return a view of the bytes of a one-dimensional contiguous array. Not collective."""
    return values.view(np.uint8).data


def store(
    comm: Communicator, file: str, arrays: Sequence[LocalArray], offsets: Mapping[str, int], prefix: str
) -> list[PieceSums]:
    """Write every rank's pieces of arrays into ``file`` and sync it to disk; return this rank's checksums.

    ``offsets`` holds the first byte of each array in the file. Collective over ``comm``: all ranks succeed, or all
    raise the same error, whose message begins with ``prefix``.
    """
    with agreed(comm, prefix), comm.trace.transfer(f"writing {file}") as advance:
        return write_pieces(open_state(file), file, arrays, offsets, advance)


def open_state(file: str) -> int:
    """Open an existing state file for :func:`write_pieces`, and return its descriptor. Not collective."""
    return os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def write_pieces(
    handle: int,
    file: str,
    arrays: Sequence[LocalArray],
    offsets: Mapping[str, int],
    advance: Callable[[int], object] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[PieceSums]:
    """Write this rank's pieces of arrays into an open file and sync it to disk; return the checksums of the pieces.

    Not collective, and without MPI. ``handle`` is the descriptor from :func:`open_state`, which this function closes,
    and ``file`` is the path for error messages. ``offsets`` holds the first byte of each array in the file. The
    checksum of each block is computed from memory just before the block is written, so a reader finds any later damage.
    ``advance`` is called with the number of bytes of each block after it was written, and of each range after it was
    synced to disk. ``stopped`` is called before each block; if it returns True, writing ends.

    Raises
    ------
    WritingStopped
        If ``stopped()`` returned True.
    OSError
        If writing fails. The error names the file and the array.
    """
    sums = []
    try:
        for array in arrays:
            for first, values in array.pieces:
                data, begin = as_bytes(values), first * values.itemsize
                checksums = []
                for start, stop in cut(begin, begin + len(data)):
                    if stopped():
                        raise WritingStopped
                    part = data[start - begin : stop - begin]
                    inject("save.write", handle)
                    checksums.append(crc32(part))
                    write_at(handle, part, offsets[array.path] + start, f"{file}: array {array.path!r}")
                    advance(len(part))
                if checksums:
                    sums.append(PieceSums(array.path, begin, begin + len(data), tuple(checksums)))
        inject("save.sync", handle)
        for piece in sums:
            sync_range(handle, offsets[piece.path] + piece.start, piece.stop - piece.start, advance)
        os.fsync(handle)
    finally:
        os.close(handle)
    return sums


def checksums(arrays: Sequence[LocalArray]) -> list[PieceSums]:
    """Return the checksums of this rank's pieces of arrays, computed from memory. Not collective."""
    sums = []
    for array in arrays:
        for first, values in array.pieces:
            data, begin = as_bytes(values), first * values.itemsize
            parts = cut(begin, begin + len(data))
            crcs = tuple(crc32(data[start - begin : stop - begin]) for start, stop in parts)
            if crcs:
                sums.append(PieceSums(array.path, begin, begin + len(data), crcs))
    return sums


def join(table: Table, gathered: Sequence[Sequence[PieceSums]]) -> dict[str, tuple[int, ...]]:
    """Combine the checksums of the pieces of all ranks into the CRC32s of whole blocks, by array path. Not collective.

    ``gathered`` holds, for each rank, the checksums of the pieces that it has written.
    """
    pieces: dict[str, list[PieceSums]] = {path: [] for path in table}
    for listed in gathered:
        for piece in listed:
            pieces[piece.path].append(piece)
    joined = {}
    for path, (shape, dtype) in table.items():
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        blocks = [0] * block_count(size)
        for piece in pieces[path]:
            for (start, stop), crc in zip(cut(piece.start, piece.stop), piece.checksums, strict=True):
                block = start // BLOCK
                blocks[block] ^= crc32_shifted(crc, min((block + 1) * BLOCK, size) - stop)
        joined[path] = tuple(blocks)
    return joined
