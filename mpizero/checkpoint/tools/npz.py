"""NumPy's ``.npz``: a zip archive, uncompressed, with one ``.npy`` for each array."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpizero.checkpoint.direct import as_bytes
from mpizero.types import Array

_NO_DATE = (1980, 1, 1, 0, 0, 0)  # the same arrays give the same bytes


def write(
    path: str, items: Sequence[Any], values: Callable[[Any], Iterator[Array]], attributes: Mapping[str, Any]
) -> None:
    """Write items; the format has no place for attributes. Not collective."""
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for item in items:
            header = {"descr": item.dtype.str, "fortran_order": False, "shape": item.shape}
            entry = zipfile.ZipInfo(f"{item.name}.npy", _NO_DATE)
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                for part in values(item):
                    member.write(as_bytes(part))
