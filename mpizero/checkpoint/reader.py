"""Load a checkpoint: every rank reads only the elements that it needs, and checksums verify all values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Self

import numpy as np

from mpizero.checkpoint.atomic_folder import standing
from mpizero.checkpoint.block_reader import BlockReader
from mpizero.checkpoint.byte_source import ByteSource, FileByteSource
from mpizero.checkpoint.failures import agreed, on_root
from mpizero.checkpoint.format.manifest import STATE_NAME, Manifest, decode
from mpizero.checkpoint.format.regular_files import path_of
from mpizero.checkpoint.format.table import LocalArray, Table, check_array
from mpizero.checkpoint.open_manifest import read_manifest
from mpizero.comm import as_communicator
from mpizero.comm.communicator import Communicator
from mpizero.errors import CheckpointError, ConfigError, RemoteError
from mpizero.types import Array


class Reader:
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

    def __enter__(self) -> Self:
        return self

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
    ...     with mz.DDPModel(mz.nn.MLP(2, [3], 2), config) as model:
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
