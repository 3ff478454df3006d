"""Implement the back end "direct": every rank writes its ranges of the HDF5 file by system calls, without HDF5."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpizero.checkpoint.atomic_folder import sync_range, write_at
from mpizero.checkpoint.failures import agreed
from mpizero.checkpoint.format.checksum import BLOCK, block_count, crc32_shifted, cut
from mpizero.checkpoint.format.table import LocalArray, Table
from mpizero.comm.communicator import Communicator
from mpizero.crc import crc32
from mpizero.faults import inject
from mpizero.types import Array


class PieceSums(NamedTuple):
    """Hold the CRC32s of bytes ``start:stop`` of an array, one for each part into which block borders cut them."""

    path: str
    start: int
    stop: int
    checksums: tuple[int, ...]


class WritingStopped(Exception):  # noqa: N818 - a request, not a mistake
    """Signal that :func:`write_pieces` has stopped between two blocks because its caller asked for it."""


def as_bytes(values: Array) -> memoryview:
    """Return the bytes of a one-dimensional contiguous array, without a copy. Not collective."""
    return values.view(np.uint8).data


def store(
    comm: Communicator, file: str, arrays: Sequence[LocalArray], offsets: Mapping[str, int], prefix: str
) -> list[PieceSums]:
    """Write every rank's pieces into ``file`` and make them durable; return this rank's checksums.

    Collective over ``comm``: all ranks succeed, or all raise the same error, which begins with ``prefix``.
    """
    with agreed(comm, prefix), comm.trace.transfer(f"writing {file}") as advance:
        return write_pieces(open_state(file), file, arrays, offsets, advance)


def open_state(file: str) -> int:
    """Open a state file that exists, to be written by :func:`write_pieces`. Not collective."""
    return os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def write_pieces(
    handle: int,
    file: str,
    arrays: Sequence[LocalArray],
    offsets: Mapping[str, int],
    advance: Callable[[int], object] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[PieceSums]:
    """Write this rank's pieces into an open ``file`` and make them durable; return their checksums.

    Not collective, no MPI. ``handle`` comes from :func:`open_state` and is closed. Each block's checksum is computed
    from memory just before the block is written, so a reader finds any later damage. ``advance`` is called with the
    number of bytes of each block when it is written, and of each range when it is on disk. ``stopped`` is asked before
    each block; when it returns true, writing ends.

    Raises
    ------
    WritingStopped
        If ``stopped()`` returned true.
    OSError
        If writing fails; names the file and the array.
    """
    sums = []
    try:
        for array in arrays:
            for first, values in array.pieces:
                data, begin = as_bytes(values), first * array.dtype.itemsize
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
    """Compute the checksums of this rank's pieces from memory. Not collective."""
    sums = []
    for array in arrays:
        for first, values in array.pieces:
            data, begin = as_bytes(values), first * array.dtype.itemsize
            parts = cut(begin, begin + len(data))
            crcs = tuple(crc32(data[start - begin : stop - begin]) for start, stop in parts)
            if crcs:
                sums.append(PieceSums(array.path, begin, begin + len(data), crcs))
    return sums


def join(table: Table, gathered: Sequence[Sequence[PieceSums]]) -> dict[str, tuple[int, ...]]:
    """Combine the checksums of all ranks' pieces into the CRC32s of whole blocks, by array. Not collective."""
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
