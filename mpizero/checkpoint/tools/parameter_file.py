"""Read ranges of parameters from a checkpoint, a safetensors file or an ``.npz`` file, whatever float they are of."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mpizero.checkpoint.format.table import LocalArray
from mpizero.checkpoint.reader import Reader, open_checkpoint
from mpizero.checkpoint.tools.elements import (
    FLOATING,
    PARAMETERS,
    convert,
    element_types,
    overflows,
    short_name,
    stored_type,
)
from mpizero.checkpoint.tools.lookup import find_checkpoint
from mpizero.checkpoint.tools.npz import NpzFile
from mpizero.checkpoint.tools.tensorfile import TensorFile
from mpizero.comm.agreement import all_ranks
from mpizero.comm.communicator import Communicator
from mpizero.errors import CheckpointError, CheckpointMissingError
from mpizero.types import Array


def loadable(element: str | None, target: str) -> bool:
    """Tell whether elements of the type ``element`` can be loaded as ``target``: the same, or both are floats."""
    return element == target or (element in FLOATING and target in FLOATING)


class ParameterFile(Protocol):
    """Provide the parameters of a file by name."""

    @property
    def path(self) -> str:
        """The path of the file."""

    @property
    def arrays(self) -> Mapping[str, tuple[tuple[int, ...], str | None]]:
        """Shape and element type (None for one that cannot be read) of each parameter by name."""

    def read(self, requests: Sequence[LocalArray]) -> None:
        """Fill the pieces of each request, whose path is a parameter's name, and convert its elements.

        Collective over the communicator with which the file was opened; a rank may request nothing. The contents of the
        pieces are undefined after an error.
        """


@dataclass(frozen=True)
class _CheckpointFile:
    """Read the parameters of an open checkpoint; every value is verified by its checksum."""

    reader: Reader
    path: str
    arrays: Mapping[str, tuple[tuple[int, ...], str | None]]

    @classmethod
    def of(cls, reader: Reader) -> _CheckpointFile:
        elements = element_types(reader)
        found = {short_name(p): (reader.arrays[p][0], elements[p]) for p in elements if p.startswith(PARAMETERS)}
        return cls(reader, reader.name, found)

    def read(self, requests: Sequence[LocalArray]) -> None:
        """Fill the pieces of all requests from the checkpoint; ranges of another type are read into new memory."""
        stored = []
        for request in requests:
            shape, element = self.arrays[request.path]
            assert element is not None
            dtype = stored_type(element)
            same = element == request.dtype.name
            pieces = [(start, values if same else np.empty(values.size, dtype)) for start, values in request.pieces]
            stored.append(LocalArray(PARAMETERS + request.path, shape, dtype, tuple(pieces)))
        self.reader.read(stored)
        for request, found in zip(requests, stored, strict=True):
            for (_, values), (_, read) in zip(request.pieces, found.pieces, strict=True):
                if values is not read:
                    _convert(self, request.path, read, values)


@dataclass(frozen=True)
class _TensorFile:
    """Read tensors of a memory-mapped safetensors file."""

    file: TensorFile

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def arrays(self) -> Mapping[str, tuple[tuple[int, ...], str | None]]:
        return {name: (tensor.shape, tensor.element) for name, tensor in self.file.tensors.items()}

    def read(self, requests: Sequence[LocalArray]) -> None:
        """Copy the ranges of all requests out of the file."""
        for request in requests:
            for start, values in request.pieces:
                given = self.file.values(request.path)[start : start + values.size]
                _convert(self, request.path, np.require(given, requirements="A"), values)


@dataclass(frozen=True)
class _NpzFile:
    """Read arrays of an ``.npz`` file, of which a rank holds one at a time."""

    file: NpzFile

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def arrays(self) -> Mapping[str, tuple[tuple[int, ...], str | None]]:
        return {name: (shape, dtype.name) for name, (shape, dtype) in self.file.arrays.items()}

    def read(self, requests: Sequence[LocalArray]) -> None:
        """Read each requested array, and copy its ranges."""
        for request in requests:
            whole = self.file.values(request.path)
            for start, values in request.pieces:
                _convert(self, request.path, whole[start : start + values.size], values)


def _convert(file: ParameterFile, name: str, given: Array, out: Array) -> None:
    """Convert values of a parameter from the file's element type, and write them to ``out``."""
    element = file.arrays[name][1]
    assert element is not None
    out[:] = convert(given, element, out.dtype.name)
    if lost := overflows(given, element, out, out.dtype.name):
        raise CheckpointError(f"{file.path}: parameter {name!r}: {lost} values are too large for {out.dtype.name}")


@contextmanager
def open_parameters(path: str | os.PathLike[str], comm: Communicator) -> Iterator[ParameterFile]:
    """Open a checkpoint or a run (folders), a safetensors file or an ``.npz`` file, and yield its parameters.

    Collective over ``comm``; the path of rank 0 is used, and every rank reads the file. The kind of a file is told by
    its first bytes.

    Raises
    ------
    CheckpointMissingError
        If there is nothing at ``path``.
    CheckpointError
        If the file is damaged, or of no kind that is known.
    ConfigError
        If the package safetensors is needed and missing.
    """
    given, name = os.fspath(path), ""
    with all_ranks(comm, "parameter file"):
        if comm.rank == 0:
            name = str(find_checkpoint(Path(given))) if os.path.isdir(given) else given
    name = comm.broadcast_object(name, 0, "parameter file")
    kind = ""
    with all_ranks(comm, "parameter file"):
        if not os.path.exists(name):
            raise CheckpointMissingError(f"{name}: no such file or folder")
        kind = "checkpoint" if os.path.isdir(name) else _kind(name)
    if kind == "checkpoint":
        with open_checkpoint(name, comm) as reader:
            yield _CheckpointFile.of(reader)
        return
    opened: list[TensorFile | NpzFile] = []
    with all_ranks(comm, "parameter file"):
        opened.append(NpzFile(os.path.realpath(name)) if kind == "npz" else TensorFile(name))
    with opened[0] as file:
        yield _NpzFile(file) if isinstance(file, NpzFile) else _TensorFile(file)


def _kind(name: str) -> str:
    with open(name, "rb") as file:
        begin = file.read(9)
    if begin[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "npz"
    if begin[8:] == b"{":
        return "safetensors"
    raise CheckpointError(
        f"{name}: neither a checkpoint (a folder) nor a safetensors or .npz file; of a PyTorch file write "
        "model.state_dict() with safetensors.torch.save_file"
    )
