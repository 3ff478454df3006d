"""Load and verify checkpoints: every rank reads only the elements that it needs, and checksums verify all values.

:func:`open_checkpoint` lets rank 0 check the manifest and the bytes of ``state.h5`` outside the arrays
(:func:`read_manifest`), and returns a :class:`Reader`. The reader reads ranges of elements by a :class:`BlockReader`
from a :class:`ByteSource`, which is the file or a copy of it in memory. Each array has one checksum for each block of 4
MiB. :func:`verify` reads a whole checkpoint in one process: it compares all checksums, and checks that HDF5 finds the
arrays in the file.
"""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from glob import escape, glob
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.faults import inject
from mpizero._util.numbers import crc32
from mpizero.checkpoint.atomic_folder import agreed, as_bytes, on_root, standing
from mpizero.checkpoint.format import (
    BLOCK,
    MANIFEST_LIMIT,
    MANIFEST_NAME,
    STATE_NAME,
    LocalArray,
    Manifest,
    SeekableFile,
    StoredArray,
    Table,
    check_array,
    cut,
    decode,
    in_cache,
    judge,
    open_regular,
    path_of,
)
from mpizero.comm import as_communicator
from mpizero.comm.communicator import Communicator
from mpizero.errors import CheckpointDamagedError, CheckpointError, CheckpointMissingError, ConfigError, RemoteError
from mpizero.types import Array


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
        if (size := os.fstat(self._file).st_size) != nbytes:
            self.close()
            raise CheckpointDamagedError(f"{path}: {size} bytes instead of {nbytes}: truncated or damaged")
        with suppress(OSError):  # advice only: read far ahead of pieces that fit a core's cache
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


def read_manifest(folder: str) -> tuple[bytes, Manifest]:
    """Read and check the manifest of a checkpoint; return the bytes of ``manifest.json`` and the parsed manifest.

    The size of ``state.h5`` and the checksum of its HDF5 structure are checked, too. libhdf5 never parses ``state.h5``,
    because the manifest says where the arrays are. So crafted HDF5 structures (links to other files, external storage,
    virtual datasets, huge shapes) have no effect.

    Raises
    ------
    CheckpointMissingError
        If the folder or one of its files does not exist.
    CheckpointDamagedError
        If a checksum or a size shows that bytes have changed since they were written.
    CheckpointVersionError
        If the checkpoint has a version of the format that this mpizero does not know.
    CheckpointError
        If anything else is wrong with the checkpoint. The message names the file.
    OSError
        If the system does not allow access, or reading fails.
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
    with closing(FileByteSource(state, manifest.state_bytes)) as source:
        check_structure(source, manifest, state)
    return data, manifest


def _check_folder(folder: str) -> None:
    """Raise CheckpointError unless ``folder`` has the files of a checkpoint, or OSError if it cannot be inspected."""
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
    """Return a hint for the error message if ``folder`` is a run's folder or contains checkpoints; "" otherwise."""
    for deeper in (folder, os.path.join(folder, "checkpoints")):
        if paths := glob(os.path.join(escape(deeper), "step_*", MANIFEST_NAME)):
            return f"; {len(paths)} checkpoint(s) lie in {deeper}: mpizero.checkpoint.latest(folder) gives the newest"
    return ""


def check_structure(source: ByteSource, manifest: Manifest, where: str) -> None:
    """Verify the checksum of all bytes of ``state.h5`` outside the arrays; raise CheckpointDamagedError if it is wrong.

    ``where`` names the file in the message.
    """
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


class BlockPart(NamedTuple):
    """Describe the part of a checksummed block that a rank has read: bytes ``start:stop`` of the array, their CRC32."""

    path: str
    start: int
    stop: int
    crc: int


class BlockReader:
    """Read ranges of elements of stored arrays, and verify every checksummed block that contains some of them.

    If several ranks each read a part of one block, the block is verified from the checksums of the parts. No method
    communicates: :class:`~mpizero.checkpoint.reader.Reader` gathers the :class:`BlockPart` objects of all ranks.
    """

    def __init__(self, source: ByteSource, arrays: Mapping[str, StoredArray]) -> None:
        self._source, self._arrays = source, arrays

    def fill(self, request: LocalArray, advance: Callable[[int], object]) -> list[BlockPart]:
        """Fill ``request.pieces`` from the file; verify blocks that were read whole, return the parts of other blocks.

        The returned parts of blocks are verified later, together with the parts that other ranks have read. ``advance``
        is called with the number of bytes after each read. Raises :class:`CheckpointDamagedError` if a checksum is
        wrong.
        """
        stored, parts = self._arrays[request.path], []
        for first, values in request.pieces:
            data, begin = as_bytes(values), first * values.itemsize
            for start, stop in cut(begin, begin + len(data)):
                view = data[start - begin : stop - begin]
                inject("load.read")
                part = BlockPart(request.path, start, stop, self._read_block(stored.offset + start, view, advance))
                if stop - start < _block_length(stored, start):
                    parts.append(part)
                elif part.crc != stored.checksums[start // BLOCK]:
                    raise self._mismatch(part)
        return parts

    def _read_block(self, offset: int, block: memoryview, advance: Callable[[int], object]) -> int:
        """Fill ``block`` with the bytes of the file from ``offset`` on; return their CRC32.

        The checksum is computed while the bytes are in the cache. ``advance`` is called with the number of bytes after
        each read.
        """
        crc = 0
        for position, piece in in_cache(block):
            self._source.read_into(offset + position, piece)
            crc = crc32(piece, crc)
            advance(len(piece))
        return crc

    def unproven(self, gathered: Sequence[Sequence[BlockPart]], this_rank: int) -> list[BlockPart]:
        """Verify blocks from the parts that all ranks have read; return this rank's parts that remain unverified.

        A part can be verified if it and other parts follow each other without a gap from the start to the end of the
        block. ``gathered`` holds the parts that each rank has read, by rank. Each rank verifies only blocks of which it
        has read a part. Raises :class:`CheckpointDamagedError` if a checksum is wrong.
        """
        keys = {(part.path, part.start // BLOCK) for part in gathered[this_rank]}
        blocks: dict[tuple[str, int], list[tuple[int, BlockPart]]] = {key: [] for key in keys}
        for rank, parts in enumerate(gathered):
            for part in parts:
                if (key := (part.path, part.start // BLOCK)) in keys:
                    blocks[key].append((rank, part))
        alone = []
        for (path, index), listed in sorted(blocks.items()):
            stored, origin = self._arrays[path], index * BLOCK
            segments = [(part.start - origin, part.stop - origin, part.crc) for _, part in listed]
            verdicts = judge(_block_length(stored, origin), stored.checksums[index], segments)
            for (rank, part), verdict in zip(listed, verdicts, strict=True):
                if verdict is False:
                    raise self._mismatch(part)
                if verdict is None and rank == this_rank:
                    alone.append(part)
        return alone

    def prove_alone(self, part: BlockPart) -> None:
        """Read the rest of the block that contains ``part``, and compare the block's checksum with the stored one.

        Raises :class:`CheckpointDamagedError` if the checksums differ.
        """
        stored = self._arrays[part.path]
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

    def _mismatch(self, part: BlockPart) -> CheckpointDamagedError:
        origin = part.start // BLOCK * BLOCK
        end = origin + _block_length(self._arrays[part.path], origin)
        return CheckpointDamagedError(
            f"{STATE_NAME}: array {part.path!r}: checksum mismatch in its bytes {origin} to {end - 1}: damaged"
        )


def _block_length(stored: StoredArray, start: int) -> int:
    """Return the length in bytes of the checksummed block that contains byte ``start`` of an array."""
    origin = start // BLOCK * BLOCK
    return min(origin + BLOCK, stored.nbytes) - origin


class Reader(AbstractContextManager["Reader"]):
    """Read arrays of an open checkpoint; made by :func:`open_checkpoint` or :func:`mpizero.checkpoint.from_bytes`.

    Attributes
    ----------
    attributes : dict
        The attributes that were given to :func:`~mpizero.checkpoint.writer.write`.
    arrays : dict
        Shape and element type of every array, by its path in the file.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> weight = np.arange(6.0).reshape(2, 3)
    >>> whole = checkpoint.LocalArray("parameters/weight", (2, 3), weight.dtype, ((0, weight.reshape(-1)),))
    >>> with checkpoint.from_bytes(checkpoint.to_bytes([whole], {"step": 3}, comm="self")) as reader:
    ...     print(reader.attributes, reader.arrays["parameters/weight"])
    ...     last = checkpoint.LocalArray("parameters/weight", (2, 3), weight.dtype, ((4, np.empty(2)),))
    ...     reader.read([last])  # two elements of six
    {'step': 3} ((2, 3), dtype('float64'))
    >>> last.pieces[0][1]
    array([4., 5.])
    """

    def __init__(
        self, comm: Communicator, manifest: Manifest, source: ByteSource, name: str, owns_comm: bool = False
    ) -> None:
        self.attributes: dict[str, Any] = manifest.attributes
        self.arrays: Table = manifest.table
        self.name = name
        self._comm = comm
        self._manifest = manifest
        self._source = source
        self._blocks = BlockReader(source, manifest.arrays)
        self._owns_comm = owns_comm

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the state file; a second call does nothing.

        Not collective if the checkpoint was opened with an mpizero communicator. If it was opened with an mpi4py
        communicator, "self" or None, closing is collective over the same ranks.
        """
        self._source.close()
        if self._owns_comm:
            self._owns_comm = False
            self._comm.close()

    def checksums(self) -> dict[str, tuple[int, ...]]:
        """Return, by path, the CRC32s of the 4 MiB blocks of every array, as the manifest has them. Not collective."""
        return {path: stored.checksums for path, stored in self._manifest.arrays.items()}

    def check(self, expected: Mapping[str, tuple[tuple[int, ...], Any]], complete: bool = True) -> None:
        """Compare the arrays of the checkpoint with the ``expected`` shape and element type of each array, by path.

        Raises a :class:`CheckpointError` that lists missing arrays, arrays with another shape or type and, if
        ``complete``, arrays that were not expected. Not collective: ranks that expect the same arrays raise the same
        error.
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
        if missing and not (extra or different) and all(path.startswith("optimizer/") for path in missing):
            raise CheckpointError(
                f"{self.name} has no optimizer state of some parameters, which were not trained when it was saved: "
                f"{problems[0]}; freeze them again, or load the parameters alone, by load_parameters(path)"
            )
        if problems:
            raise CheckpointError(f"{self.name} belongs to another model: {'; '.join(problems)}")

    def read(self, requests: Sequence[LocalArray]) -> None:
        """Fill the arrays in ``requests[i].pieces`` with values of the checkpoint, and verify them by checksums.

        Collective over the communicator with which the checkpoint was opened. Each rank may request any ranges of
        elements, or none. A rank reads only the elements that it requests. If several ranks read parts of one
        checksummed block, the checksum of the block is computed from the checksums of the parts. If no rank has read
        some part of the block, that part is read only to verify the block.

        Raises
        ------
        CheckpointError
            On every rank, if reading or verifying fails on any rank. The message names the file, the array and the
            reason. The contents of the pieces are then undefined.
        """
        prefix = f"checkpoint {self.name} cannot be loaded"
        with agreed(self._comm, prefix):
            wanted = [check_array(request, writable=True) for request in requests]
            self.check({request.path: (request.shape, request.dtype) for request in wanted}, complete=False)
            with self._comm.trace.transfer(f"reading {self.name}") as advance:
                parts = [part for request in wanted for part in self._blocks.fill(request, advance)]
        gathered = self._comm.allgather_object(parts, tag="checkpoint parts")
        with agreed(self._comm, prefix), self._comm.trace.transfer(f"reading {self.name}") as advance:
            for part in self._blocks.unproven(gathered, self._comm.rank):
                self._blocks.prove_alone(part)
                advance(part.stop - part.start)

    def read_whole(self, path: str) -> Array:
        """Return one whole array. Collective over the communicator with which the checkpoint was opened."""
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


def open_checkpoint(folder: str | os.PathLike[str], comm: object = None) -> Reader:
    """Open a checkpoint, which may have been written on any number of ranks, for reading.

    Collective over ``comm``: rank 0 reads and checks the manifest, and the size and HDF5 structure of the state file.
    All ranks raise the same error.

    Parameters
    ----------
    folder : path
        The checkpoint's folder; the path of rank 0 is used.
    comm : communicator, "self" or None
        mpi4py communicator, :class:`~mpizero.comm.communicator.Communicator`, "self" for this process alone, or None
        for all ranks that a launcher has started.

    Raises
    ------
    CheckpointMissingError
        If there is no such checkpoint. This error is also a ``FileNotFoundError``.
    CheckpointError
        If the folder is damaged, crafted or not a checkpoint. The message names the file and what is wrong.

    Examples
    --------
    >>> import tempfile
    >>> import mpizero as mz
    >>> with mz.ShardingConfig(comm="self") as config, tempfile.TemporaryDirectory() as run:
    ...     with mz.distribute(mz.nn.MLP(2, [3], 2), None, "ddp", config=config) as model:
    ...         model.save_model(f"{run}/final")
    ...     with mz.checkpoint.open_checkpoint(f"{run}/final", comm="self") as reader:
    ...         print(reader.read_whole("parameters/output.linear.weight").shape)
    (3, 2)
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
        source = FileByteSource(os.path.join(target, STATE_NAME), manifest.state_bytes)
    return Reader(world, manifest, source, target, owns_comm)


def verify(folder: str | os.PathLike[str], report: Callable[[int], object] | None = None) -> int:
    """Verify all checksums of a checkpoint and that HDF5 finds its arrays; return the size of ``state.h5`` in bytes.

    ``report`` is called with the number of bytes of each checksummed block after the block has been verified.

    Raises
    ------
    CheckpointError
        If something is wrong. The message names the file, the array and the reason. The error is a
        ``CheckpointMissingError`` if the checkpoint does not exist.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> weight = np.arange(6.0).reshape(2, 3)
    >>> whole = checkpoint.LocalArray("parameters/weight", (2, 3), weight.dtype, ((0, weight.reshape(-1)),))
    >>> with tempfile.TemporaryDirectory() as run:
    ...     checkpoint.write(f"{run}/start", [whole], {}, comm="self")
    ...     print(checkpoint.verify(f"{run}/start") > weight.nbytes)  # bytes of state.h5
    True
    """
    where = os.path.abspath(os.fspath(folder))
    manifest = verify_checksums(where, report)
    _compare_with_hdf5(os.path.join(where, STATE_NAME), manifest)
    return manifest.state_bytes


def verify_checksums(where: str, report: Callable[[int], object] | None = None) -> Manifest:
    """Read the whole checkpoint in the folder ``where`` and compare every checksum; return the manifest.

    ``report`` is called with the number of bytes of each checksummed block after the block has been verified.
    """
    _, manifest = read_manifest(where)
    state = os.path.join(where, STATE_NAME)
    buffer = memoryview(bytearray(BLOCK))
    with closing(FileByteSource(state, manifest.state_bytes)) as source:
        for path, stored in manifest.arrays.items():
            for start, stop in cut(0, stored.nbytes):
                part = buffer[: stop - start]
                source.read_into(stored.offset + start, part)
                if crc32(part) != stored.checksums[start // BLOCK]:
                    which = f"{state}: array {path!r}"
                    raise CheckpointDamagedError(f"{which}: checksum mismatch in bytes {start} to {stop - 1}")
                if report is not None:
                    report(len(part))
    return manifest


class _View(SeekableFile):
    """Pass the bytes of the open state file to libhdf5, which then cannot open other files that this file refers to."""

    def __init__(self, source: FileByteSource, nbytes: int) -> None:
        super().__init__(nbytes)
        self._source = source

    def fill(self, view: memoryview) -> None:
        self._source.read_into(self._position, view)


def _compare_with_hdf5(state: str, manifest: Manifest) -> None:
    """Check that HDF5 finds the arrays that the manifest describes in the state file ``state``.

    The checksums must have been verified before.
    """
    import h5py

    with closing(FileByteSource(state, manifest.state_bytes)) as source:
        try:
            with h5py.File(_View(source, manifest.state_bytes), "r") as file:
                _compare_group(file, "", manifest.arrays, state)
        except CheckpointError:
            raise
        except Exception as error:  # what HDF5 and h5py raise for a crafted file is of many kinds
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{state}: HDF5 cannot read it: {type(error).__name__}: {reason:.200}") from None


def _compare_group(group: Any, prefix: str, arrays: Mapping[str, StoredArray], state: str) -> None:
    """Check that an HDF5 group has exactly the members that ``arrays``, the part of the manifest below it, describes.

    ``prefix`` is the path of the group with a final slash, and ``state`` is the path of the file for error messages.
    Only expected names are opened, so the recursion ends even in a crafted file.
    """
    import h5py

    inner: dict[str, dict[str, StoredArray]] = {}
    for path, stored in arrays.items():
        inner.setdefault(path[len(prefix) :].partition("/")[0], {})[path] = stored
    if len(group) != len(inner):
        _name_the_difference(group, prefix, inner, state)
    for name, below in inner.items():
        path = prefix + name
        link = group.get(name, getlink=True)
        if link is None:
            raise CheckpointError(f"{state}: {_what(path, below)} is in the manifest and not in the file")
        if not isinstance(link, h5py.HardLink):
            raise CheckpointError(f"{state}: {path!r} is a soft or external link")
        member = group[name]
        if path in below and isinstance(member, h5py.Dataset):
            _compare_dataset(member, path, below[path], state)
        elif path not in below and isinstance(member, h5py.Group):
            _compare_group(member, f"{path}/", below, state)
        else:
            raise CheckpointError(f"{state}: {path!r} is not {'an array' if path in below else 'a group'}")


def _what(path: str, below: Mapping[str, StoredArray]) -> str:
    return f"array {path!r}" if path in below else f"group {path!r}"


def _name_the_difference(group: Any, prefix: str, inner: Mapping[str, Mapping[str, StoredArray]], state: str) -> None:
    for name, below in inner.items():
        if group.get(name, getlink=True) is None:
            raise CheckpointError(f"{state}: {_what(prefix + name, below)} is in the manifest and not in the file")
    extra = next((name for name in group if name not in inner), "?")
    raise CheckpointError(
        f"{state}: {prefix + extra!r:.80} is in the file and not in the manifest; "
        f"the group has {len(group)} members, {len(inner)} are expected"
    )


def _compare_dataset(dataset: Any, path: str, stored: StoredArray, state: str) -> None:
    if dataset.is_virtual or dataset.external is not None or dataset.chunks is not None:
        raise CheckpointError(f"{state}: array {path!r} is stored outside the file, virtual or chunked")
    if dataset.shape != stored.shape or dataset.dtype != stored.dtype:
        raise CheckpointError(
            f"{state}: array {path!r} is {dataset.shape} {dataset.dtype.str} in the file, "
            f"{stored.shape} {stored.dtype.str} in the manifest"
        )
    if stored.nbytes and dataset.id.get_offset() != stored.offset:
        raise CheckpointError(f"{state}: array {path!r} lies elsewhere than the manifest says")
