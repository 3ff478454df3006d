"""Convert a checkpoint to a byte string and back.

The byte string is the HDF5 file, followed by the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpizero._util.text import crc32
from mpizero.checkpoint.backends.direct import as_bytes, checksums
from mpizero.checkpoint.byte_source import MemoryByteSource
from mpizero.checkpoint.failures import agreed, on_root
from mpizero.checkpoint.format.manifest import MANIFEST_LIMIT, decode, encode
from mpizero.checkpoint.format.skeleton import build
from mpizero.checkpoint.format.table import LocalArray
from mpizero.checkpoint.open_manifest import check_structure
from mpizero.checkpoint.publish import describe
from mpizero.checkpoint.reader import Reader
from mpizero.checkpoint.save_plan import agree_on_arrays
from mpizero.comm import as_communicator
from mpizero.comm.communicator import Communicator
from mpizero.comm.startup import communicator_of
from mpizero.errors import CheckpointError

#: Last bytes of the byte string. The eight bytes before them are the manifest's length in bytes (little-endian).
MAGIC = b"mpizero1"


def to_bytes(arrays: Sequence[LocalArray], attributes: Mapping[str, Any], comm: object = None) -> bytes:
    """Return a checkpoint of arrays and attributes as bytes, on every rank; equal values give equal bytes.

    Collective over ``comm``; the arguments have the same meaning as for :func:`~mpizero.checkpoint.writer.write`. The
    result starts with the HDF5 file, so h5py can open ``io.BytesIO(result)``. This is meant for small models, because
    every rank holds all bytes.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> weight = np.arange(6.0).reshape(2, 3)
    >>> whole = checkpoint.LocalArray("parameters/weight", (2, 3), weight.dtype, ((0, weight.reshape(-1)),))
    >>> data = checkpoint.to_bytes([whole], {"step": 3}, comm="self")
    >>> data[1:4], data == checkpoint.to_bytes([whole], {"step": 3}, comm="self")
    (b'HDF', True)
    """
    with communicator_of(comm) as world:
        return _to_bytes(world, arrays, attributes)


def _to_bytes(world: Communicator, arrays: Sequence[LocalArray], attributes: Mapping[str, Any]) -> bytes:
    prefix = "the model was not serialized"
    agreement = agree_on_arrays(world, arrays, attributes, lambda _: prefix)
    local, table = agreement.local, agreement.table
    skeleton = on_root(world, prefix, lambda: build(table))
    with agreed(world, prefix):
        image = np.zeros(skeleton.nbytes, np.uint8)
    for offset, data in skeleton.structure:
        image[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
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
    for _, data in skeleton.structure:
        structure = crc32(data, structure)
    manifest = encode(describe(table, skeleton, structure, gathered, attributes))
    return b"".join((image.data, manifest, len(manifest).to_bytes(8, "little"), MAGIC))


def from_bytes(data: bytes | bytearray | memoryview) -> Reader:
    """Open the bytes that :func:`to_bytes` returned as a checkpoint, from which each rank can read by itself.

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
    >>> whole = checkpoint.LocalArray("parameters/weight", (2, 3), weight.dtype, ((0, weight.reshape(-1)),))
    >>> data = checkpoint.to_bytes([whole], {"step": 3}, comm="self")
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
