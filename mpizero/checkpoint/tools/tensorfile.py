"""Read and write safetensors files: the length of the header, the header in JSON, then the tensors.

[Note: which part the library does] The library ``safetensors`` reads and checks headers before memory for tensors is
allocated. It refuses a header that is too large, and tensors that overlap, leave gaps or do not fit their bytes. It
cannot write a file without holding all tensors in memory, and cannot read bfloat16 with NumPy. Therefore this module
reads and writes the values itself, block by block. A new file gets its final name only after the library was able to
read it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import numpy as np

from mpizero.checkpoint.backends.direct import as_bytes
from mpizero.checkpoint.format.manifest import canonical_json
from mpizero.checkpoint.format.regular_files import open_regular
from mpizero.checkpoint.format.strict_json import parse
from mpizero.checkpoint.tools.elements import BFLOAT16, stored_type
from mpizero.errors import CheckpointError, ConfigError
from mpizero.types import Array

#: Key in a file's metadata whose value is the attributes of the exported checkpoint.
METADATA = "mpizero"
#: The largest header, in bytes, that is read.
HEADER_LIMIT = 16 * 1024 * 1024
#: The format's names of element types, in the order in which the library writes them.
_TYPES = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": BFLOAT16,
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
}
_RANK = {element: number for number, element in enumerate(_TYPES.values())}
_CODE = {element: code for code, element in _TYPES.items()}


def library() -> Any:
    """Import and return the library ``safetensors``.

    Raises
    ------
    ConfigError
        If the library is not installed.
    """
    try:
        import safetensors
    except ImportError:
        raise ConfigError(
            "safetensors files need the package safetensors, which is not installed: pip install 'mpizero[safetensors]'"
        ) from None
    return safetensors


def write(
    path: str, items: Sequence[Any], values: Callable[[Any], Iterator[Array]], attributes: Mapping[str, Any]
) -> None:
    """Write arrays, and the attributes as metadata; the new file has the bytes that ``safetensors`` would write."""
    entries: dict[str, Any] = {"__metadata__": {METADATA: canonical_json(dict(attributes), "attributes")}}
    if any(item.name in entries for item in items):
        raise ConfigError(
            "array '__metadata__': a safetensors file keeps its metadata under this name, so no array can have it; "
            "choose the format npz or hdf5, or leave the array out (--pattern)"
        )
    if unknown := [item for item in items if item.element not in _CODE]:
        raise ConfigError(
            f"array {unknown[0].path!r} is {unknown[0].element}, which safetensors files cannot hold: convert it "
            "(--dtype float32 makes complex64 of it), or choose the format npz or hdf5"
        )
    ordered, end = sorted(items, key=lambda item: (_RANK[item.element], item.name)), 0
    for item in ordered:
        offsets = [end, end := end + item.nbytes]
        entries[item.name] = {"dtype": _CODE[item.element], "shape": list(item.shape), "data_offsets": offsets}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)  # so that every tensor is aligned to its elements
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for item in ordered:
            for part in values(item):
                file.write(as_bytes(part))
    with TensorFile(path) as found:
        expected = {item.name: (item.element, item.shape) for item in items}
        if {tensor.name: (tensor.element, tensor.shape) for tensor in found.tensors.values()} != expected:
            raise CheckpointError(f"{path}: does not hold what was written")


@dataclass(frozen=True)
class Tensor:
    """Describe one tensor of a safetensors file.

    ``code`` is the type code of the format, such as "BF16"; ``start`` is the first byte in the file.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def element(self) -> str | None:
        """Name of the element type (NumPy's name, or ``bfloat16``); None if a checkpoint cannot store it."""
        return _TYPES.get(self.code)


class TensorFile:
    """Read tensors of a memory-mapped safetensors file; its header is checked before any tensor is read.

    Parameters
    ----------
    path : path
        Path of a regular file, or of a link to one.

    Attributes
    ----------
    tensors : dict
        Description (:class:`Tensor`) of each tensor, by name.
    attributes : dict
        Attributes of the checkpoint from which :func:`~mpizero.checkpoint.tools.export.export` made the file; empty for
        files of other programs.

    Raises
    ------
    CheckpointError
        If the file is not a safetensors file, or is damaged or crafted.
    ConfigError
        If the library is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        library()
        self.tensors, metadata = _read_header(self.path)
        self.attributes = _attributes(metadata)
        self._bytes: Array | None = np.asarray(np.memmap(self.path, np.uint8, "r")) if self.tensors else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._bytes = None

    def values(self, name: str) -> Array:
        """Return a 1-D view of a tensor's values, bfloat16 as uint16; the file is read when the values are used."""
        tensor = self.tensors[name]
        assert self._bytes is not None
        assert tensor.element is not None
        return self._bytes[tensor.start : tensor.start + tensor.nbytes].view(stored_type(tensor.element))


def _read_header(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    header, size = _header_bytes(path)
    safetensors = library()
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            described = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        entries, tensors = json.loads(header), {}
        for name, (code, shape) in described.items():
            begin, stop = map(int, entries[name]["data_offsets"])
            tensors[name] = Tensor(name, code, shape, 8 + len(header) + begin, stop - begin)
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a sound safetensors file: {error}") from None
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        known = tensor.element and prod(tensor.shape) * stored_type(tensor.element).itemsize
        if tensor.start != 8 + len(header) + end or (known is not None and known != tensor.nbytes):
            raise CheckpointError(f"{path}: tensor {tensor.name!r} does not lie where its header says")
        end += tensor.nbytes
    if 8 + len(header) + end != size:
        raise CheckpointError(f"{path}: {size} bytes instead of the {8 + len(header) + end} that its header tells")
    return tensors, metadata


def _header_bytes(path: str) -> tuple[bytes, int]:
    """Return the bytes of the header, and the size of the file in bytes."""
    if not os.path.exists(path):
        raise CheckpointError(f"{path}: no such file")
    with os.fdopen(open_regular(os.path.realpath(path)), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path}: not a safetensors file, or truncated: {size} bytes")
        if length > HEADER_LIMIT:
            raise CheckpointError(f"{path}: a header of {length} bytes, at most {HEADER_LIMIT} are read")
        return file.read(length), size


def _attributes(metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        found = parse(metadata.get(METADATA, "{}").encode())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
