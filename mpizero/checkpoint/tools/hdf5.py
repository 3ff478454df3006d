"""Write arrays into one plain HDF5 file.

As for checkpoints, libhdf5 builds the file's structure in memory and never writes to the disk, because it crashes if
the disk is full.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpizero.checkpoint.atomic_folder import fill_file, write_at
from mpizero.checkpoint.backends.direct import as_bytes
from mpizero.checkpoint.format.manifest import canonical_json
from mpizero.checkpoint.format.skeleton import build
from mpizero.types import Array


def write(
    path: str, items: Sequence[Any], values: Callable[[Any], Iterator[Array]], attributes: Mapping[str, Any]
) -> None:
    """Write each array as a contiguous dataset, and the attributes as JSON text in an attribute of the root group."""
    marks = {"attributes": np.bytes_(canonical_json(dict(attributes), "attributes").encode())}
    skeleton = build({item.name: (item.shape, item.dtype) for item in items}, marks=marks)
    fill_file(path, skeleton)
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for item in items:
            place = skeleton.offsets[item.name]
            for part in values(item):
                write_at(file, as_bytes(part), place, path)
                place += part.nbytes
    finally:
        os.close(file)
