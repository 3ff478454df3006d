"""The full check of a checkpoint at rest, by one process."""

from __future__ import annotations

import os
from typing import Any

from mpizero.checkpoint.checksum import BLOCK, crc32, cut
from mpizero.checkpoint.manifest import STATE_NAME, Manifest
from mpizero.checkpoint.reader import FileBytes, read_manifest
from mpizero.errors import CheckpointError


def verify(folder: str | os.PathLike[str]) -> int:
    """Read all of a checkpoint and compare every checksum, then what HDF5 says with the manifest; return its bytes.

    Not collective.

    Raises
    ------
    CheckpointError
        Naming file, array and reason; ``CheckpointMissingError`` where there is none.
    """
    where = os.path.abspath(os.fspath(folder))
    manifest = verify_checksums(where)
    _compare_with_hdf5(os.path.join(where, STATE_NAME), manifest)
    return manifest.state_bytes


def verify_checksums(where: str) -> Manifest:
    """Read all of a checkpoint and compare every checksum; return its manifest. Not collective."""
    _, manifest = read_manifest(where)
    state = os.path.join(where, STATE_NAME)
    source = FileBytes(state, manifest.state_bytes)
    buffer = memoryview(bytearray(BLOCK))
    try:
        for path, stored in manifest.arrays.items():
            for start, stop in cut(0, stored.nbytes):
                part = buffer[: stop - start]
                source.read_into(stored.offset + start, part)
                if crc32(part) != stored.checksums[start // BLOCK]:
                    raise CheckpointError(f"{state}: array {path!r}: checksum mismatch in bytes {start} to {stop - 1}")
    finally:
        source.close()
    return manifest


def _compare_with_hdf5(state: str, manifest: Manifest) -> None:
    """Check that any HDF5 tool finds the arrays that the manifest describes; only after the structure's checksum."""
    import h5py

    with h5py.File(state, "r", locking=False) as file:
        found = dict(_walk(file, "", state, len(manifest.arrays)))
        for path, stored in manifest.arrays.items():
            if path not in found:
                raise CheckpointError(f"{state}: array {path!r} is in the manifest and not in the file")
            dataset = found.pop(path)
            if dataset.shape != stored.shape or dataset.dtype != stored.dtype:
                raise CheckpointError(
                    f"{state}: array {path!r} is {dataset.shape} {dataset.dtype.str} in the file, "
                    f"{stored.shape} {stored.dtype.str} in the manifest"
                )
            if dataset.is_virtual or dataset.external is not None or dataset.chunks is not None:
                raise CheckpointError(f"{state}: array {path!r} is stored outside the file, virtual or chunked")
            if stored.nbytes and dataset.id.get_offset() != stored.offset:
                raise CheckpointError(f"{state}: array {path!r} lies elsewhere than the manifest says")
    if found:
        raise CheckpointError(f"{state}: array {min(found)!r} is in the file and not in the manifest")


def _walk(group: Any, prefix: str, state: str, limit: int, depth: int = 0) -> list[tuple[str, Any]]:
    """List the datasets below ``group``; hard links only, so no other file can be meant."""
    import h5py

    found: list[tuple[str, Any]] = []
    if depth > 256 or len(group) > limit:
        raise CheckpointError(f"{state}: group {prefix!r} is too deep or has more members than there are arrays")
    for name in sorted(group):
        path = prefix + name
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise CheckpointError(f"{state}: {path!r} is a soft or external link")
        member = group[name]
        if isinstance(member, h5py.Group):
            found.extend(_walk(member, path + "/", state, limit, depth + 1))
        elif isinstance(member, h5py.Dataset):
            found.append((path, member))
        else:
            raise CheckpointError(f"{state}: {path!r} is neither a group nor an array")
    return found
