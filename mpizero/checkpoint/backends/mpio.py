"""Implement the back end "mpio": all ranks open the HDF5 file together and write their values with parallel HDF5."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from mpizero._util.faults import inject
from mpizero._util.text import crc32
from mpizero.checkpoint.atomic_folder import sync_range, write_at
from mpizero.checkpoint.backends.direct import PieceSums, as_bytes, checksums
from mpizero.checkpoint.failures import agreed
from mpizero.checkpoint.format.checksum import cut
from mpizero.checkpoint.format.table import LocalArray
from mpizero.comm.communicator import Communicator
from mpizero.errors import CheckpointError, ConfigError
from mpizero.layout.flat import hyperslabs
from mpizero.types import Array

#: The largest number of bytes in one HDF5 write: MPI-IO counts in 32 bits.
WRITE_LIMIT = 256 * 1024 * 1024


def check_available(comm: Communicator) -> None:
    """Raise :class:`ConfigError` unless h5py was built with MPI and ``comm`` is an MPI communicator. Not collective."""
    import h5py

    if not h5py.get_config().mpi:
        raise ConfigError('backend="mpio" needs an h5py built with MPI, and this one is not: use backend="direct"')
    if getattr(comm, "mpi", None) is None:
        raise ConfigError(f'backend="mpio" needs an MPI communicator, got {comm!r}: use backend="direct"')


def store(
    comm: Communicator, file: str, arrays: Sequence[LocalArray], offsets: Mapping[str, int], prefix: str
) -> list[PieceSums]:
    """Write every rank's pieces of arrays into ``file`` by independent HDF5 writes; return this rank's checksums.

    ``offsets`` holds the first byte of each array in the file. Collective over ``comm``: all ranks succeed, or all
    raise the same error, whose message begins with ``prefix``. The file is opened on a communicator made by ``split``,
    and the writes are independent, because collective writes on Cartesian communicators lose data in Open MPI 4.1.4.
    All bytes are read back and compared with the checksums computed from memory, because an MPI library may report
    success although it has lost a write.
    """
    import h5py

    with agreed(comm, prefix):
        check_available(comm)
        sums = checksums(arrays)
        os.close(os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))  # opening below fails on all ranks or none
    with comm.split(0, name=f"{comm.name}/checkpoint") as own:
        failure: Exception | None = None
        mpi = getattr(own, "mpi", None)
        handle = own.run("hdf5 open", lambda: h5py.File(file, "r+", driver="mpio", comm=mpi), tag=file)
        try:
            with comm.trace.transfer(f"writing {file}") as advance:
                for array in arrays:
                    _write(handle, array, advance)
        except Exception as error:  # the others wait in close()
            failure = error
        try:
            own.run("hdf5 close", handle.close, tag=file)  # a write that fails in it leaves the ranks waiting
        except Exception as error:
            failure = failure or error
    with agreed(comm, prefix):
        if failure is not None:
            reason = " ".join(str(failure).split())
            raise OSError(getattr(failure, "errno", None) or 5, reason, file) from failure
        _write_halves(file, arrays, offsets)
        with comm.trace.transfer(f"comparing {file}") as advance:
            _sync_and_compare(file, sums, offsets, advance)
    return sums


def _elements(array: LocalArray) -> Iterator[tuple[int, Array]]:
    """Yield first index and values of each piece in whole elements, without what it has of an element shared by ranks.

    That is the imaginary part at its start, or the real part at its end, of a complex number.
    """
    for first, values in array.pieces:
        if values.dtype == array.dtype:
            yield first, values
        else:
            odd = first % 2
            yield (first + odd) // 2, values[odd : odd + (values.size - odd) // 2 * 2].view(array.dtype)


def _write_halves(file: str, arrays: Sequence[LocalArray], offsets: Mapping[str, int]) -> None:
    """Write what :func:`_elements` leaves out. HDF5 would read and write the whole element, which another rank shares.

    Not collective. It is a few bytes for each piece.
    """
    handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for array in arrays:
            for first, values in array.pieces:
                if values.dtype == array.dtype or not values.size:
                    continue
                ends = ([0] if first % 2 else []) + ([values.size - 1] if (first + values.size) % 2 else [])
                for at in ends:
                    begin = offsets[array.path] + (first + at) * values.itemsize
                    write_at(handle, as_bytes(values[at : at + 1]), begin, f"{file}: array {array.path!r}")
    finally:
        os.close(handle)


def _write(handle: Any, array: LocalArray, advance: Callable[[int], object]) -> None:
    dataset = None
    step = max(1, WRITE_LIMIT // array.dtype.itemsize)
    for first, values in _elements(array):
        for begin in range(0, values.size, step):
            inject("save.write")
            part = values[begin : begin + step]
            dataset = handle[array.path] if dataset is None else dataset
            done = 0
            for block in hyperslabs(array.shape, first + begin, first + begin + part.size):
                sizes = tuple(axis.stop - axis.start for axis in block)
                dataset[block] = part[done : done + prod(sizes)].reshape(sizes)
                done += prod(sizes)
            advance(part.nbytes)


def _sync_and_compare(
    file: str, sums: Sequence[PieceSums], offsets: Mapping[str, int], advance: Callable[[int], object]
) -> None:
    handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        inject("save.sync", handle)
        for piece in sums:
            sync_range(handle, offsets[piece.path] + piece.start, piece.stop - piece.start, advance)
        os.fsync(handle)
        for piece in sums:
            for (start, stop), crc in zip(cut(piece.start, piece.stop), piece.checksums, strict=True):
                if crc32(os.pread(handle, stop - start, offsets[piece.path] + start)) != crc:
                    raise CheckpointError(
                        f"{file}: array {piece.path!r}, bytes {start} to {stop - 1}: MPI-IO wrote something else"
                    )
                advance(stop - start)
    finally:
        os.close(handle)
