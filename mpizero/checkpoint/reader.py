"""Loading: every rank reads the ranges it needs and no others, and nothing is returned that was not verified."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from glob import escape, glob
from math import prod
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from mpizero.checkpoint.atomic_folder import standing
from mpizero.checkpoint.backends.direct import as_bytes
from mpizero.checkpoint.failures import agreed, on_root
from mpizero.checkpoint.format.checksum import BLOCK, cut, in_cache, judge
from mpizero.checkpoint.format.manifest import MANIFEST_LIMIT, MANIFEST_NAME, STATE_NAME, Manifest, StoredArray, decode
from mpizero.checkpoint.format.regular_files import open_regular, path_of
from mpizero.checkpoint.format.table import LocalArray, Table, check_array
from mpizero.comm import as_communicator
from mpizero.comm.communicator import Communicator
from mpizero.crc import crc32
from mpizero.errors import CheckpointDamagedError, CheckpointError, CheckpointMissingError, ConfigError, RemoteError
from mpizero.faults import strike
from mpizero.types import Array


class Bytes(ABC):
    """Where a reader finds the bytes of ``state.h5``."""

    @abstractmethod
    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on. Not collective."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the bytes; a second call does nothing. Not collective."""


class FileBytes(Bytes):
    """The bytes of a regular file of known size."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self._file = open_regular(path)
        if (found := os.fstat(self._file).st_size) != nbytes:
            self.close()
            raise CheckpointDamagedError(f"{path}: {found} bytes instead of {nbytes}: truncated or damaged")
        with contextlib.suppress(OSError):  # advice only: read far ahead of pieces that fit a core's cache
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on. Not collective."""
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
        """Close the file; a second call does nothing. Not collective."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class MemoryBytes(Bytes):
    """Bytes in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on. Not collective."""
        view[:] = self._data[offset : offset + len(view)]

    def close(self) -> None:
        """Let go of the memory. Not collective."""
        self._data = memoryview(b"")


class _Part(NamedTuple):
    """A part of one block that a rank read: bytes ``start:stop`` of the array, with their CRC32."""

    path: str
    start: int
    stop: int
    crc: int


def read_manifest(folder: str) -> tuple[bytes, Manifest]:
    """Read and check a checkpoint's manifest, and the size and structure of its state file. Not collective.

    libhdf5 never parses the file: the manifest says where the arrays lie, so crafted HDF5 structures (links to other
    files, external storage, virtual datasets, huge shapes) have no effect.

    Raises
    ------
    CheckpointMissingError
        No such folder, or one of its files is missing.
    CheckpointDamagedError
        Its bytes are not those that were written.
    CheckpointVersionError
        It is of another version of the format.
    CheckpointError
        Anything else that is wrong with it, naming the file.
    OSError
        The system refuses to tell.
    """
    path = os.path.join(folder, MANIFEST_NAME)
    _check_folder(folder)
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(min(MANIFEST_LIMIT, os.fstat(file.fileno()).st_size) + 1)
    try:
        manifest = decode(data)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from None
    state = os.path.join(folder, STATE_NAME)
    source = FileBytes(state, manifest.state_bytes)
    try:
        check_structure(source, manifest, state)
    finally:
        source.close()
    return data, manifest


def _check_folder(folder: str) -> None:
    """Look for the files of a checkpoint; what the system refuses to tell is no proof that nothing is there."""
    try:
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        what = "a link to nothing" if os.path.islink(folder) else "does not exist"
        raise CheckpointMissingError(f"{folder}: {what}") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        is_folder = False
    if not is_folder:
        raise CheckpointError(f"{folder}: not an mpizero checkpoint, which is a folder with {MANIFEST_NAME}")
    for name in (MANIFEST_NAME, STATE_NAME):
        try:
            os.lstat(os.path.join(folder, name))
        except FileNotFoundError:
            raise CheckpointMissingError(
                f"{folder}: not a complete mpizero checkpoint: {name} is missing{_within(folder)}"
            ) from None


def _within(folder: str) -> str:
    """Say that checkpoints lie deeper, where a run's folder or its folder of checkpoints was given."""
    for deeper in (folder, os.path.join(folder, "checkpoints")):
        if found := glob(os.path.join(escape(deeper), "step_*", MANIFEST_NAME)):
            return f"; {len(found)} checkpoint(s) lie in {deeper}: mpizero.checkpoint.newest(folder) gives the newest"
    return ""


def check_structure(source: Bytes, manifest: Manifest, where: str) -> None:
    """Compare the checksum of everything outside the arrays. Not collective."""
    crc = 0
    for start, length in manifest.structure_ranges:
        for begin, end in cut(0, length):
            part = bytearray(end - begin)
            source.read_into(start + begin, memoryview(part))
            crc = crc32(part, crc)
    if crc != manifest.structure:
        raise CheckpointDamagedError(
            f"{where}: checksum mismatch in the HDF5 structure (outside all arrays): "
            f"stored {manifest.structure:08x}, found {crc:08x}"
        )


class Reader:
    """An open checkpoint; made by :func:`open_checkpoint` or :func:`~mpizero.checkpoint.image.from_bytes`.

    Attributes
    ----------
    attributes : dict
        What was given to :func:`~mpizero.checkpoint.writer.write`.
    arrays : dict
        Shape and element type of every array, by path.
    """

    def __init__(
        self, comm: Communicator, manifest: Manifest, source: Bytes, name: str, owns_comm: bool = False
    ) -> None:
        self.attributes: dict[str, Any] = manifest.attributes
        self.arrays: Table = manifest.table
        self.name = name
        self._comm = comm
        self._manifest = manifest
        self._source = source
        self._owns_comm = owns_comm

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing.

        Not collective, except for a checkpoint opened with an mpi4py communicator: collective over that one.
        """
        self._source.close()
        if self._owns_comm:
            self._owns_comm = False
            self._comm.close()

    def checksums(self) -> dict[str, tuple[int, ...]]:
        """Return the CRC32s of the blocks of every array, by path, as they are told beside it. Not collective."""
        return {path: stored.checksums for path, stored in self._manifest.arrays.items()}

    def check(self, expected: Mapping[str, tuple[tuple[int, ...], Any]], complete: bool = True) -> None:
        """Raise :class:`CheckpointError` listing arrays that are missing, different or (if ``complete``) too many.

        Not collective: the same on every rank that expects the same.
        """
        wanted = {path: (tuple(shape), np.dtype(dtype)) for path, (shape, dtype) in expected.items()}
        missing = [path for path in wanted if path not in self.arrays]
        extra = [path for path in self.arrays if path not in wanted] if complete else []
        different = [
            f"{path} is {self.arrays[path][0]} {self.arrays[path][1].str}, expected {shape} {dtype.str}"
            for path, (shape, dtype) in wanted.items()
            if path in self.arrays and self.arrays[path] != (shape, dtype)
        ]
        problems = [
            f"{what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for what, names in (("different", different), ("missing", missing), ("unexpected", extra))
            if names
        ]
        if problems:
            raise CheckpointError(f"{self.name} belongs to another model: {'; '.join(problems)}")

    def read(self, requests: Sequence[LocalArray]) -> None:
        """Fill the pieces of ``requests`` with the values of the checkpoint, verified.

        Collective over the communicator the checkpoint was opened with; each rank asks for what it likes, also for
        nothing. A rank reads its own ranges only: blocks that ranks read in parts are verified by joining the parts'
        checksums, and what no rank read of such a block is read for the verification.

        Raises
        ------
        CheckpointError
            On every rank alike, naming file, array and reason; the pieces' contents are undefined then.
        """
        prefix = f"checkpoint {self.name} cannot be loaded"
        with agreed(self._comm, prefix):
            wanted = [check_array(request, writable=True) for request in requests]
            self.check({request.path: (request.shape, request.dtype) for request in wanted}, complete=False)
            with self._comm.trace.transfer(f"reading {self.name}") as advance:
                parts = [part for request in wanted for part in self._fill(request, advance)]
        gathered = self._comm.allgather_object(parts, tag="checkpoint parts")
        with agreed(self._comm, prefix), self._comm.trace.transfer(f"reading {self.name}") as advance:
            for part in self._unproven(gathered):
                self._prove_alone(part)
                advance(part.stop - part.start)

    def read_whole(self, path: str) -> Array:
        """Return one whole array. Collective over the communicator the checkpoint was opened with."""
        prefix = f"checkpoint {self.name} cannot be loaded"
        with agreed(self._comm, prefix):
            if path not in self.arrays:
                raise CheckpointError(f"it has no array {path!r}")
            shape, dtype = self.arrays[path]
            try:
                values = np.empty(prod(shape), dtype)
            except MemoryError:
                size = prod(shape) * dtype.itemsize
                raise CheckpointError(f"array {path!r}: no memory for its {size} bytes") from None
        self.read([LocalArray(path, shape, dtype, ((0, values),))])
        return values.reshape(shape)

    def _fill(self, request: LocalArray, advance: Callable[[int], object]) -> list[_Part]:
        """Read the pieces of one array, and tell of each; verify whole blocks at once, return the parts of others."""
        stored, parts = self._manifest.arrays[request.path], []
        for first, values in request.pieces:
            data, begin = as_bytes(values), first * stored.dtype.itemsize
            for start, stop in cut(begin, begin + len(data)):
                view = data[start - begin : stop - begin]
                strike("load.read")
                part = _Part(request.path, start, stop, self._read_block(stored.offset + start, view, advance))
                if stop - start < _block_length(stored, start):
                    parts.append(part)
                elif part.crc != stored.checksums[start // BLOCK]:
                    raise self._mismatch(part)
        return parts

    def _read_block(self, offset: int, block: memoryview, advance: Callable[[int], object]) -> int:
        """Fill ``block`` from ``offset`` on, and return its checksum, taken while it is in the cache."""
        crc = 0
        for place, piece in in_cache(block):
            self._source.read_into(offset + place, piece)
            crc = crc32(piece, crc)
            advance(len(piece))
        return crc

    def _unproven(self, gathered: Sequence[Sequence[_Part]]) -> list[_Part]:
        """Join the parts of all ranks; return this rank's that no tiling of their block can prove.

        Each rank looks at the blocks of which it has a part.
        """
        own = {(part.path, part.start // BLOCK) for part in gathered[self._comm.rank]}
        blocks: dict[tuple[str, int], list[tuple[int, _Part]]] = {key: [] for key in own}
        for rank, parts in enumerate(gathered):
            for part in parts:
                if (key := (part.path, part.start // BLOCK)) in own:
                    blocks[key].append((rank, part))
        alone = []
        for (path, index), listed in sorted(blocks.items()):
            stored, origin = self._manifest.arrays[path], index * BLOCK
            segments = [(part.start - origin, part.stop - origin, part.crc) for _, part in listed]
            verdicts = judge(_block_length(stored, origin), stored.checksums[index], segments)
            for (rank, part), verdict in zip(listed, verdicts, strict=True):
                if verdict is False:
                    raise self._mismatch(part)
                if verdict is None and rank == self._comm.rank:
                    alone.append(part)
        return alone

    def _prove_alone(self, part: _Part) -> None:
        """Read the rest of the block of ``part`` and compare the block's checksum."""
        stored = self._manifest.arrays[part.path]
        origin = part.start // BLOCK * BLOCK
        end = origin + _block_length(stored, origin)
        head, tail = bytearray(part.start - origin), bytearray(end - part.stop)
        self._source.read_into(stored.offset + origin, memoryview(head))
        self._source.read_into(stored.offset + part.stop, memoryview(tail))
        segments = [(0, len(head), crc32(head)), (part.start - origin, part.stop - origin, part.crc)]
        segments.append((part.stop - origin, end - origin, crc32(tail)))
        verdicts = judge(end - origin, stored.checksums[origin // BLOCK], [s for s in segments if s[0] < s[1]])
        if not all(verdicts):
            raise self._mismatch(part)

    def _mismatch(self, part: _Part) -> CheckpointDamagedError:
        origin = part.start // BLOCK * BLOCK
        end = origin + _block_length(self._manifest.arrays[part.path], origin)
        return CheckpointDamagedError(
            f"{STATE_NAME}: array {part.path!r}: checksum mismatch in its bytes {origin} to {end - 1}: damaged"
        )


def _block_length(stored: StoredArray, start: int) -> int:
    """Return the bytes of the block that byte ``start`` of an array lies in."""
    origin = start // BLOCK * BLOCK
    return min(origin + BLOCK, stored.nbytes) - origin


def open_checkpoint(folder: str | os.PathLike[str], comm: object = None) -> Reader:
    """Open a checkpoint, whoever wrote it on however many ranks.

    Collective over ``comm``: rank 0 reads and checks the manifest, size and structure; all ranks raise the same error.

    Parameters
    ----------
    folder : path
        The checkpoint; rank 0's path counts.
    comm : communicator, "self" or None
        mpi4py communicator, :class:`~mpizero.comm.communicator.Communicator`, "self" for this process alone, or None
        for all ranks that a launcher has started.

    Raises
    ------
    CheckpointMissingError
        Also a ``FileNotFoundError``: there is no such checkpoint.
    CheckpointError
        Damaged, foreign or hostile; names the file and what is wrong.
    """
    world = as_communicator(comm)
    try:
        return _open(world, folder, world is not comm)
    except (CheckpointError, ConfigError, RemoteError):  # agreed: every rank is here
        if world is not comm:
            world.close()
        raise


def _open(world: Communicator, folder: str | os.PathLike[str], owns_comm: bool) -> Reader:
    prefix = "cannot open checkpoint"

    def read() -> tuple[str, bytes]:
        target = standing(os.path.abspath(path_of(folder)))
        return target, read_manifest(target)[0]

    target, data = on_root(world, prefix, read)
    with agreed(world, prefix):
        manifest = decode(data)
        source = FileBytes(os.path.join(target, STATE_NAME), manifest.state_bytes)
    return Reader(world, manifest, source, target, owns_comm)
