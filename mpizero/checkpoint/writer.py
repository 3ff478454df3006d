"""Save a checkpoint from all ranks; its folder appears only when the checkpoint is complete.

:func:`make_plan` lets all ranks agree on names and shapes of arrays, and on which rank writes which elements, before
they write. A :class:`TemporaryFolder` holds the files while a back end writes the values: "direct", or "mpio"
(:func:`store_collectively`), in which all ranks open the HDF5 file together and write with parallel HDF5. In
:func:`publish` rank 0 writes the manifest and renames the folder. :func:`write` does all of this; :func:`to_bytes` and
:func:`from_bytes` make a byte string of a checkpoint and read it: the HDF5 file, followed by the manifest.

[Note: words] *Write ranges* (:class:`~mpizero.checkpoint.format.WriteRanges`) are the ranges of elements of one array
that one rank writes. The *table* holds the shape and element type of every array. The *pieces* of an array are the
ranges of its elements, with their values, that one rank writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.faults import inject
from mpizero._util.numbers import crc32
from mpizero.checkpoint.atomic_folder import (
    CapturedError,
    LockedFolder,
    PieceSums,
    agreed,
    as_bytes,
    checksums,
    commit,
    create_locked_folder,
    discard,
    fill_file,
    join_parts,
    on_root,
    opened,
    portable_error,
    raise_first,
    store_directly,
    sync_range,
    write_at,
)
from mpizero.checkpoint.format import (
    ALIGNMENT,
    MANIFEST_LIMIT,
    MANIFEST_NAME,
    STATE_NAME,
    LocalArray,
    Manifest,
    Skeleton,
    StoredArray,
    Table,
    WriteRanges,
    build,
    canonical_json,
    check_alignment,
    check_array,
    cut,
    decode,
    encode,
    merge,
    path_of,
)
from mpizero.checkpoint.reader import MemoryByteSource, Reader, check_structure, read_manifest, verify_checksums
from mpizero.comm import as_communicator
from mpizero.comm.communicator import Communicator
from mpizero.comm.startup import communicator_of
from mpizero.errors import CheckpointDamagedError, CheckpointError, ConfigError
from mpizero.layout.flat import hyperslabs
from mpizero.types import Array


@dataclass(frozen=True)
class SavePlan:
    """Describe one save on which all ranks have agreed.

    Attributes
    ----------
    target : str
        Absolute path of the checkpoint.
    local : list of LocalArray
        The arrays of which this rank writes elements, with these elements as their pieces.
    table : Table
        Shape and element type of every array that any rank writes, by path.
    attributes : dict
        JSON values for the manifest.
    offsets : dict
        Offset in bytes of each array in the state file, by path.
    skeleton : Skeleton or None
        The state file without the values of arrays, on rank 0; None on other ranks.
    opened : str or None
        Path of the state file, if rank 0 has opened it before the ranks agreed; else None.
    """

    target: str
    local: list[LocalArray]
    table: Table
    attributes: Mapping[str, Any]
    offsets: Mapping[str, int]
    skeleton: Skeleton | None
    opened: str | None = None

    @property
    def prefix(self) -> str:
        """The text with which all error messages about this save begin."""
        return _prefix(self.target)


@dataclass
class KnownLayout:
    """Keep the file layout of the last save, so that the next save of the same arrays needs fewer messages.

    ``writes`` lists the ranges of elements that this rank wrote. ``number`` is a checksum of the ranges of all ranks.
    ``rank_and_size`` is (rank, number of ranks). The layout can be used again if every process has the same rank and
    writes the same ranges as in the last save, and all ranks have the same ``number``.
    """

    writes: list[WriteRanges] | None = None
    number: int = 0
    rank_and_size: tuple[int, int] = (0, 0)
    alignment: int = ALIGNMENT
    table: Table = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    skeleton: Skeleton | None = None


class RepeatedSave(NamedTuple):
    """Hold the file layout of the last save on this rank, and a function that starts another save of the same arrays.

    Attributes
    ----------
    layout : KnownLayout
        The layout of the last save. Every save updates it.
    start : function
        Called, before the ranks agree, with the target ("" on ranks other than 0) and the arrays of this rank. On rank
        0 it makes the state file and returns its path; on other ranks it returns "".
    """

    layout: KnownLayout
    start: Callable[[str, list[LocalArray]], str]


def _prefix(target: str) -> str:
    return f"checkpoint {target} was not written"


def make_plan(
    comm: Communicator,
    folder: str | os.PathLike[str],
    arrays: Sequence[LocalArray],
    attributes: Mapping[str, Any],
    alignment: int = ALIGNMENT,
    again: RepeatedSave | None = None,
) -> SavePlan:
    """Agree with all ranks on the arrays to be written, lay out the state file on rank 0, and return the plan.

    Collective over ``comm``; all ranks raise the same error or none. If every rank saves the same arrays as in its last
    save, whose layout is ``again.layout``, that layout is used, and the ranks exchange messages only once. Otherwise
    ``again.layout`` is replaced by the new layout.
    """
    path = path_of(folder)  # every rank raises if this is not a path
    where = os.path.realpath(path) if comm.rank == 0 else ""
    known = KnownLayout() if again is None else again.layout
    same = again if known.alignment == alignment else None
    target, local, table, attributes, number, opened = agree_on_arrays(comm, arrays, attributes, _prefix, where, same)
    if table is not known.table:
        skeleton: Skeleton | None = None

        def lay_out() -> dict[str, int]:
            nonlocal skeleton
            skeleton = build(table, alignment)
            return skeleton.offsets

        known.offsets = on_root(comm, _prefix(target), lay_out, lambda: check_alignment(alignment))
        known.writes, known.number, known.alignment = list(map(WriteRanges.of, local)), number, alignment
        known.rank_and_size = comm.rank, comm.size
        known.table, known.skeleton = table, skeleton
    return SavePlan(target, local, table, attributes, known.offsets, known.skeleton, opened)


class Agreement(NamedTuple):
    """Hold the result of :func:`agree_on_arrays`.

    Attributes
    ----------
    where : str
        The argument ``where`` of rank 0: the path of the checkpoint.
    local : list of LocalArray
        The arrays of this rank after checking, with normalized shapes and types.
    table : Table
        Shape and element type of every array that any rank writes, by path.
    attributes : dict
        A copy of the argument ``attributes``.
    number : int
        Checksum of the ranges of elements that all ranks write, as in :class:`KnownLayout`.
    opened : str or None
        Path of the state file, if rank 0 has opened it before the ranks agreed; else None.
    """

    where: str
    local: list[LocalArray]
    table: Table
    attributes: Mapping[str, Any]
    number: int
    opened: str | None


def agree_on_arrays(
    comm: Communicator,
    arrays: Sequence[LocalArray],
    attributes: Mapping[str, Any],
    prefix: Callable[[str], str],
    where: str = "",
    again: RepeatedSave | None = None,
) -> Agreement:
    """Check the arrays that this rank saves, and agree with all ranks on the shape and element type of every array.

    Collective over ``comm``. If all ranks save the same arrays as in their last save, they exchange messages once, and
    the result has the table (shapes and element types) of that save. Otherwise they exchange messages twice, or three
    times if some, but not all, of the ranks save the same arrays again. A rank that saves the same arrays as in its
    last save calls ``again.start`` before the first exchange. All ranks raise the same error or none, including errors
    of ``again.start``. The message of an error begins with ``prefix(where)`` of rank 0. Parent folders that rank 0 has
    made remain, even if the save fails.
    """
    known = KnownLayout() if again is None else again.layout
    request, state = None, None
    with CapturedError() as captured:
        local = [check_array(array) for array in arrays]
        if not isinstance(attributes, dict):
            raise CheckpointError(f"attributes must be a dict, got {type(attributes).__name__}")
        text, local_writes = canonical_json(attributes, "attributes"), list(map(WriteRanges.of, local))
        as_before = known.writes == local_writes and known.rank_and_size == (comm.rank, comm.size)
        request = _SaveRequest(None if as_before else local_writes, known.number, crc32(text.encode()))
        if as_before and again is not None:
            state = again.start(where, local)
    gathered = comm.allgather_object((where, captured.portable, request, state), tag="checkpoint")
    target = gathered[0][0]
    raise_first([error for _, error, _, _ in gathered], prefix(target), captured.error)
    requests = [request for _, _, request, _ in gathered]
    differing = [rank for rank, request in enumerate(requests) if request.attributes != requests[0].attributes]
    if differing:
        raise CheckpointError(f"{prefix(target)}: attributes of rank {differing[0]} differ from those of rank 0")
    copied = json.loads(text)
    if all(request.writes is None for request in requests) and len({request.number for request in requests}) == 1:
        return Agreement(target, local, known.table, copied, known.number, gathered[0][3])
    writes = [request.writes for request in requests]
    if None in writes:
        writes = comm.allgather_object(local_writes, "checkpoint")
    with agreed(comm, prefix(target)):
        table = merge(writes)
    return Agreement(target, local, table, copied, crc32(repr(writes).encode()), None)


class _SaveRequest(NamedTuple):
    """Describe what one rank saves; it is part of the message that all ranks exchange.

    ``writes`` lists the ranges of elements that the rank writes; it is None if they are the same as in the rank's last
    save. ``number`` is the checksum of the ranges that all ranks wrote in the last save. ``attributes`` is the CRC32 of
    the attributes.
    """

    writes: list[WriteRanges] | None
    number: int
    attributes: int


def check_available(comm: Communicator) -> None:
    """Raise :class:`ConfigError` unless h5py was built with MPI and ``comm`` is an MPI communicator. Not collective."""
    import h5py

    if not h5py.get_config().mpi:
        raise ConfigError('backend="mpio" needs an h5py built with MPI, and this one is not: use backend="direct"')
    if getattr(comm, "mpi", None) is None:
        raise ConfigError(f'backend="mpio" needs an MPI communicator, got {comm!r}: use backend="direct"')


def store_collectively(
    comm: Communicator, file: str, arrays: Sequence[LocalArray], offsets: Mapping[str, int], prefix: str
) -> list[PieceSums]:
    """Write the elements of every rank into ``file`` by independent HDF5 writes; return this rank's checksums.

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
    with comm.split(0, name=f"{comm.name}/checkpoint") as file_comm:
        failure: Exception | None = None
        mpi = getattr(file_comm, "mpi", None)
        handle = file_comm.run("hdf5 open", lambda: h5py.File(file, "r+", driver="mpio", comm=mpi), tag=file)
        try:
            with comm.trace.transfer(f"writing {file}") as advance:
                for array in arrays:
                    _write(handle, array, advance)
        except Exception as error:  # the others wait in close()
            failure = error
        try:
            file_comm.run("hdf5 close", handle.close, tag=file)  # a write that fails in it leaves the ranks waiting
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
    """Yield first index and values of each piece (range of elements) of ``array`` as whole elements.

    A half of a complex element is left out.

    A piece of real numbers may start with an imaginary part, or end with a real part, whose other half another rank
    writes.
    """
    for first, values in array.pieces:
        if values.dtype == array.dtype:
            yield first, values
        else:
            odd = first % 2
            yield (first + odd) // 2, values[odd : odd + (values.size - odd) // 2 * 2].view(array.dtype)


def _write_halves(file: str, arrays: Sequence[LocalArray], offsets: Mapping[str, int]) -> None:
    """Write the halves of complex elements that :func:`_elements` leaves out, by system calls.

    HDF5 would read and write the whole element, whose other half another rank writes. Not collective.
    """
    with opened(file, os.O_RDWR) as handle:
        for array in arrays:
            for first, values in array.pieces:
                if values.dtype == array.dtype or not values.size:
                    continue
                ends = ([0] if first % 2 else []) + ([values.size - 1] if (first + values.size) % 2 else [])
                for at in ends:
                    begin = offsets[array.path] + (first + at) * values.itemsize
                    write_at(handle, as_bytes(values[at : at + 1]), begin, f"{file}: array {array.path!r}")


#: The largest number of bytes in one HDF5 write: MPI-IO counts in 32 bits.
WRITE_LIMIT = 256 * 1024 * 1024


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
    with opened(file, os.O_RDWR) as handle:
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


class TemporaryFolder(AbstractContextManager["TemporaryFolder"]):
    """Make the temporary folder of one save, on rank 0, and remove it on exit unless it has become the checkpoint.

    This is a context manager. Leaving its ``with`` block is not collective.

    Parameters
    ----------
    comm : Communicator
        The ranks that save.
    replace : bool
        Whether the save may replace an undamaged checkpoint. A damaged one may always be replaced.

    Attributes
    ----------
    state : str
        Path of the state file in the temporary folder; "" before :meth:`agree`.
    folder : LockedFolder or None
        The temporary folder, on rank 0 from :meth:`open` to :meth:`close`; otherwise None.
    """

    def __init__(self, comm: Communicator, replace: bool) -> None:
        self._comm, self._replace, self._process = comm, replace, os.getpid()
        self.state = ""
        self.folder: LockedFolder | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self, target: str, skeleton: Skeleton | None) -> str:
        """Make the temporary folder, and in it the state file without values of arrays; return the path of that file.

        Not collective: rank 0 only.
        """
        self.close()
        if skeleton is None:
            raise CheckpointError("rank 0 has no layout")
        self.folder = create_locked_folder(target, self.may_replace(target))
        fill_file(self.folder.state, skeleton)
        return self.folder.state

    def may_replace(self, target: str) -> bool:
        """Tell whether the save may replace ``target``: if ``replace`` was True, or ``target`` is a damaged checkpoint.

        Not collective.

        Raises
        ------
        CheckpointError
            If the checkpoint cannot be opened, and no checksum or size proves that it is damaged.
        """
        if not os.path.isdir(target) or not (names := set(os.listdir(target))) or names - {MANIFEST_NAME, STATE_NAME}:
            return self._replace  # nothing is there, or what is never replaced
        try:
            if self._replace:
                read_manifest(target)
            else:
                with self._comm.trace.transfer(f"checking {target}") as advance:
                    verify_checksums(target, advance)
        except CheckpointDamagedError:
            return True
        except (CheckpointError, OSError) as error:
            raise CheckpointError(
                f"exists already, and cannot be opened ({portable_error(error).message}): it may be whole, so it is "
                "not replaced; choose another name"
            ) from None
        return self._replace

    def agree(self, plan: SavePlan, before: Callable[[], object] | None = None) -> None:
        """Make the temporary folder on rank 0, and set :attr:`state`, the path of the state file, on all ranks.

        If ``plan.opened`` is a path, rank 0 has made the folder already, and only :attr:`state` is set. Otherwise each
        rank first calls ``before``. Collective over the ranks that save.
        """
        if plan.opened is None:
            self.state = on_root(self._comm, plan.prefix, lambda: self.open(plan.target, plan.skeleton), before)
        else:
            self.state = plan.opened

    def close(self) -> None:
        """Remove the temporary folder if it is still there; a second call does nothing. Not collective."""
        folder, self.folder = self.folder, None
        if folder is not None and os.getpid() == self._process:  # a forked child leaves it alone
            discard(folder)


def publish(comm: Communicator, plan: SavePlan, temporary: TemporaryFolder, sums: Sequence[PieceSums]) -> None:
    """Wait until all ranks have written their values, write the manifest, and rename the temporary folder.

    Collective over ``comm``; all ranks raise the same error or none. ``sums`` holds the checksums of the ranges of
    elements that this rank has written.
    """
    gathered = comm.allgather_object(sums, tag="checkpoint checksums")

    def finish() -> None:
        if temporary.folder is None or plan.skeleton is None:
            return
        with opened(temporary.state, os.O_RDONLY) as state:
            structure = _checked_structure(state, temporary.state, plan.skeleton)
            manifest = describe(plan.table, plan.skeleton, structure, gathered, plan.attributes)
            if temporary.folder.replace and os.path.lexists(plan.target) and not temporary.may_replace(plan.target):
                raise CheckpointError("a sound checkpoint has taken the place of the damaged one: choose another name")
            commit(temporary.folder, encode(manifest), state)

    on_root(comm, plan.prefix, finish)


def _checked_structure(handle: int, state: str, skeleton: Skeleton) -> int:
    """Return the CRC32 of the HDF5 structure (all bytes outside the arrays) in the state file.

    ``handle`` is the open file, and ``state`` its path. Raises :class:`CheckpointError` if the structure differs from
    ``skeleton``, as the file was made, because writing the values has changed it.
    """
    crc = 0
    if (size := os.fstat(handle).st_size) != skeleton.nbytes:
        raise CheckpointError(f"{state}: has {size} bytes instead of {skeleton.nbytes}")
    for offset, data in skeleton.structure:
        if os.pread(handle, len(data), offset) != data:
            raise CheckpointError(f"{state}: bytes at offset {offset} are not those laid out")
        crc = crc32(data, crc)
    return crc


def describe(
    table: Table,
    skeleton: Skeleton,
    structure: int,
    gathered: Sequence[Sequence[PieceSums]],
    attributes: Mapping[str, Any],
) -> Manifest:
    """Build the manifest from shapes and types of arrays and the checksums gathered from all ranks. Not collective.

    ``table`` holds the shape and element type of every array, ``structure`` is the CRC32 of the state file outside the
    arrays.
    """
    checksums = join_parts(table, gathered)
    stored = {
        path: StoredArray(shape, dtype, skeleton.offsets[path], checksums[path])
        for path, (shape, dtype) in table.items()
    }
    return Manifest(dict(attributes), stored, skeleton.nbytes, structure)


_BACKENDS: Mapping[str, Callable[..., list[PieceSums]]] = {"direct": store_directly, "mpio": store_collectively}


def write(
    folder: str | os.PathLike[str],
    arrays: Sequence[LocalArray],
    attributes: Mapping[str, Any],
    comm: object = None,
    backend: str = "direct",
    replace: bool = False,
    *,
    alignment: int = ALIGNMENT,
) -> None:
    """Save arrays and attributes as a checkpoint; its folder appears only when the checkpoint is complete.

    Collective over ``comm``. The ranks write into a hidden folder beside ``folder`` and sync its files to disk; rank 0
    then renames it to ``folder``. If one rank fails, for example because the disk is full, every rank raises the same
    error, the hidden folder is removed, and older checkpoints do not change. Leftovers of killed saves are removed.

    Parameters
    ----------
    folder : path
        The checkpoint's folder; the path of rank 0 is used. Missing parent folders are made.
    arrays : sequence of LocalArray
        The arrays of which this rank writes elements, with these elements as their pieces. All ranks together must
        write every element exactly once. A rank need not list arrays of which it writes no element.
    attributes : dict
        Dictionary of JSON values for the manifest, equal on every rank.
    comm : communicator, "self" or None
        mpi4py communicator, Communicator, "self" (this process alone), or None (all ranks that a launcher started).
    backend : {"direct", "mpio"}
        "direct": each rank writes its elements by system calls. "mpio": all ranks write by parallel HDF5. Both back
        ends write the same bytes.
    replace : bool
        Whether an existing checkpoint at ``folder`` may be replaced, by one rename after the new one is complete. If
        False, only a checkpoint that is damaged, as its checksums or sizes prove, is replaced. A checkpoint that cannot
        be opened but may be undamaged is never replaced.
    alignment : int
        A power of two from 64 to 4096 (the size of a page). Arrays of at least ``alignment`` bytes start at a multiple
        of ``alignment`` in the file, and all other arrays at a multiple of 64.

    Raises
    ------
    CheckpointError
        On every rank, if the pieces of all ranks do not make up whole arrays, the folder exists and may not be
        replaced, or another run is writing it. A system error is raised as a :class:`CheckpointIOError`, which is also
        an ``OSError`` with ``errno``.
    ConfigError
        If the back end is unknown or not installed, or the alignment is not allowed.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> array = checkpoint.LocalArray("parameters/w", (3,), np.dtype("f8"), ((0, np.arange(3.0)),))
    >>> with tempfile.TemporaryDirectory() as run:
    ...     checkpoint.write(f"{run}/start", [array], {"loss": 0.5}, comm="self")
    ...     with checkpoint.open_checkpoint(f"{run}/start", comm="self") as reader:
    ...         print(reader.attributes, reader.read_whole("parameters/w"))
    {'loss': 0.5} [0. 1. 2.]
    """
    with communicator_of(comm) as world:
        plan = make_plan(world, folder, arrays, attributes, alignment)
        with agreed(world, plan.prefix):
            check_backend(world, backend)
        with TemporaryFolder(world, replace) as temporary:
            temporary.agree(plan)
            sums = _BACKENDS[backend](world, temporary.state, plan.local, plan.offsets, plan.prefix)
            publish(world, plan, temporary, sums)


def check_backend(comm: Communicator, backend: str) -> None:
    """Raise :class:`ConfigError` unless checkpoints can be written with ``backend`` over ``comm``. Not collective."""
    if backend not in _BACKENDS:
        raise ConfigError(f"backend must be one of {sorted(_BACKENDS)}, got {backend!r}")
    if backend == "mpio":
        check_available(comm)


#: Last bytes of the byte string. The eight bytes before them are the manifest's length in bytes (little-endian).
MAGIC = b"mpizero1"


def to_bytes(arrays: Sequence[LocalArray], attributes: Mapping[str, Any], comm: object = None) -> bytes:
    """Return a checkpoint of arrays and attributes as bytes, on every rank; equal values give equal bytes.

    Collective over ``comm``; the arguments have the same meaning as for :func:`~mpizero.checkpoint.writer.write`. The
    result starts with the HDF5 file, so h5py can open ``io.BytesIO(result)``. The function is meant for small models,
    because every rank holds all bytes.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> weight = np.arange(6.0).reshape(2, 3)
    >>> array = checkpoint.LocalArray("parameters/weight", (2, 3), weight.dtype, ((0, weight.reshape(-1)),))
    >>> data = checkpoint.to_bytes([array], {"step": 3}, comm="self")
    >>> data[1:4], data == checkpoint.to_bytes([array], {"step": 3}, comm="self")
    (b'HDF', True)
    """
    prefix = "the model was not serialized"
    with communicator_of(comm) as world:
        _, local, table, *_ = agree_on_arrays(world, arrays, attributes, lambda _: prefix)
        skeleton = on_root(world, prefix, lambda: build(table))
        with agreed(world, prefix):
            image = np.zeros(skeleton.nbytes, np.uint8)
        gathered = world.allgather_object(checksums(local), tag="checkpoint checksums")
        values = {(a.path, start * v.itemsize): as_bytes(v) for a in local for start, v in a.pieces}
        for rank, listed in enumerate(gathered):
            for piece in listed:
                begin = skeleton.offsets[piece.path]
                target = image[begin + piece.start : begin + piece.stop]
                if rank == world.rank:
                    target[:] = np.frombuffer(values[piece.path, piece.start], np.uint8)
                world.broadcast(target, root=rank, tag=piece.path)
    structure = 0
    for offset, data in skeleton.structure:
        image[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        structure = crc32(data, structure)
    manifest = encode(describe(table, skeleton, structure, gathered, attributes))
    return b"".join((image.data, manifest, len(manifest).to_bytes(8, "little"), MAGIC))


def from_bytes(data: bytes | bytearray | memoryview) -> Reader:
    """Open the bytes that :func:`to_bytes` returned as a checkpoint, which each rank can read on its own.

    Not collective.

    Raises
    ------
    CheckpointError
        If the bytes are damaged, crafted, or not a checkpoint.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> weight = np.arange(6.0).reshape(2, 3)
    >>> array = checkpoint.LocalArray("parameters/weight", (2, 3), weight.dtype, ((0, weight.reshape(-1)),))
    >>> data = checkpoint.to_bytes([array], {"step": 3}, comm="self")
    >>> with checkpoint.from_bytes(data) as reader:
    ...     print(reader.attributes, reader.read_whole("parameters/weight")[0])
    {'step': 3} [0. 1. 2.]
    """
    name = "of serialized bytes"
    view = memoryview(data).cast("B")
    tail = len(MAGIC) + 8
    if len(view) < tail or view[-len(MAGIC) :] != MAGIC:
        raise CheckpointError(f"{len(view)} bytes that do not end like a serialized model: truncated or foreign")
    length = int.from_bytes(view[-tail : -len(MAGIC)], "little")
    if length > min(MANIFEST_LIMIT, len(view) - tail):
        raise CheckpointError(f"serialized model: a manifest of {length} bytes does not fit {len(view)} bytes")
    start = len(view) - tail - length
    try:
        manifest = decode(bytes(view[start : start + length]))
    except CheckpointError as error:
        raise type(error)(f"serialized model: manifest: {error}") from None
    if manifest.state_bytes != start:
        raise CheckpointError(f"serialized model: {start} bytes of state instead of {manifest.state_bytes}")
    source = MemoryByteSource(view[:start])
    check_structure(source, manifest, "serialized model")
    return Reader(as_communicator("self"), manifest, source, name)
