"""Verify a whole stored checkpoint in one process: all checksums, and whether HDF5 finds the arrays in the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mpizero._util.text import crc32
from mpizero.checkpoint.byte_source import FileByteSource
from mpizero.checkpoint.format.checksum import BLOCK, cut
from mpizero.checkpoint.format.manifest import STATE_NAME, Manifest, StoredArray
from mpizero.checkpoint.format.skeleton import SeekableFile
from mpizero.checkpoint.open_manifest import read_manifest
from mpizero.errors import CheckpointDamagedError, CheckpointError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


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
    source = FileByteSource(state, manifest.state_bytes)
    buffer = memoryview(bytearray(BLOCK))
    try:
        for path, stored in manifest.arrays.items():
            for start, stop in cut(0, stored.nbytes):
                part = buffer[: stop - start]
                source.read_into(stored.offset + start, part)
                if crc32(part) != stored.checksums[start // BLOCK]:
                    which = f"{state}: array {path!r}"
                    raise CheckpointDamagedError(f"{which}: checksum mismatch in bytes {start} to {stop - 1}")
                if report is not None:
                    report(len(part))
    finally:
        source.close()
    return manifest


class _View(SeekableFile):
    """Pass the bytes of the open state file to libhdf5, which then cannot open other files that this file refers to."""

    def __init__(self, source: FileByteSource, nbytes: int) -> None:
        super().__init__(nbytes)
        self._source = source

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.nbytes - self._position))
        self._source.read_into(self._position, view[:count])
        self._position += count
        return count


def _compare_with_hdf5(state: str, manifest: Manifest) -> None:
    """Check that HDF5 finds the arrays that the manifest describes in the state file ``state``.

    The checksums must have been verified before.
    """
    import h5py

    source = FileByteSource(state, manifest.state_bytes)
    try:
        with h5py.File(_View(source, manifest.state_bytes), "r") as file:
            _compare_group(file, "", manifest.arrays, state)
    except CheckpointError:
        raise
    except Exception as error:  # what HDF5 and h5py raise for a crafted file is of many kinds
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{state}: HDF5 cannot read it: {type(error).__name__}: {reason:.200}") from None
    finally:
        source.close()


def _compare_group(group: Any, prefix: str, arrays: Mapping[str, StoredArray], state: str) -> None:
    """Check that an HDF5 group has exactly the members that ``arrays``, the part of the manifest below it, describes.

    ``prefix`` is the path of the group with a final slash, and ``state`` is the path of the file for error messages.
    Only expected names are followed, so the recursion ends even in a crafted file.
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
