"""Encode and decode the manifest: two lines of JSON with the arrays of a checkpoint, their offsets and checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mpizero.checkpoint.format.checksum import BLOCK, block_count
from mpizero.checkpoint.format.skeleton import FORMAT, VERSION, gaps
from mpizero.checkpoint.format.strict_json import DEPTH_LIMIT, MEMORY_LIMIT, depth_of, memory_of, parse
from mpizero.checkpoint.format.table import ARRAY_LIMIT, Table, check_path, check_paths, check_shape
from mpizero.errors import CheckpointDamagedError, CheckpointError, CheckpointVersionError

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.h5"
#: The largest size of a manifest in bytes; it is checked before the content, which cannot be trusted.
MANIFEST_LIMIT = 32 * 1024 * 1024
#: The largest number of bytes outside the arrays, HDF5's structure: for the file, plus for each array.
STRUCTURE_LIMIT, STRUCTURE_PER_ARRAY = 1024 * 1024, 8192


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
        found = parse(data)
    except ValueError as error:
        raise CheckpointError(f"{what} would not come back from JSON: {error}") from None
    if found != _lists(value):
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
    """Tell whether ``value`` is an int equal to ``number``; True and 1.0 are not, although Python says ``1.0 == 1``."""
    return type(value) is int and value == number


def _check_keys(found: Mapping[str, Any], keys: set[str], what: str) -> None:
    if set(found) != keys:
        raise CheckpointError(f"{what} has the keys {sorted(found)!r:.200} instead of {sorted(keys)}")


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
        found = bytes.fromhex(value) if isinstance(value, str) and len(value) == 8 * count else None
    except ValueError:
        found = None
    if found is None or found.hex() != value:
        raise CheckpointError(f"{what} is not {count} checksums of 8 hexadecimal digits")
    return tuple(np.frombuffer(found, ">u4").tolist())
