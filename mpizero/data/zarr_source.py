"""Read samples from arrays of Zarr stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mpizero._util.names import explains
from mpizero._util.pytree import leaves_of
from mpizero.data.conventions import decoded
from mpizero.data.files import FileSource
from mpizero.errors import DataError


@explains
class ZarrSource(FileSource):
    """Read samples from arrays of one or several Zarr stores (folders); each sample is read when it is requested.

    The parameters and errors are those of :class:`~mpizero.data.FileSource`; it needs the extra ``zarr``. A chunk that
    is not in the store is made of the array's fill value, as the format says. What xarray has packed is unpacked, and
    what is missing becomes NaN, as by :class:`~mpizero.data.NetcdfSource`.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import zarr
    >>> import numpy as np
    >>> import mpizero as mz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = zarr.open_group(Path(folder, "2001.zarr"), mode="w")
    ...     store["wind"] = np.arange(6.0).reshape(3, 2)
    ...     days = mz.data.ZarrSource(f"{folder}/*.zarr", x="wind", y="wind")
    ...     print(len(days), days.samples([2])[0])
    3 [[4. 5.]]
    """

    kind = "zarr"

    def open_file(self, path: str) -> Mapping[str, tuple[Any, int]]:
        """Open a store; return its arrays of :attr:`names` by name, and the rows of a chunk of each."""
        try:
            import zarr
        except ImportError:
            raise DataError(f"{path}: needs zarr, which is not installed: pip install zarr") from None
        if not os.path.exists(path):
            raise DataError(f"{path}: does not exist")
        try:
            group = zarr.open_group(path, mode="r")
        except Exception as error:
            packed = "; it is an archive: unpack it" if os.path.isfile(path) and path.endswith((".zip", ".tar")) else ""
            raise DataError(f"{path}: not a readable Zarr group: {error}{packed}") from None
        found = {}
        for name in dict.fromkeys(leaves_of(self.names)):
            try:
                array = group.get(name)
            except Exception as error:  # zarr raises errors of many kinds
                raise DataError(f"{path}: array {name!r} cannot be opened: {error}") from None
            if not isinstance(array, zarr.Array):
                what = f"no array {name!r}" if array is None else f"{name!r} is a group; needed is an array"
                raise DataError(f"{path}: {what}; it has {', '.join(sorted(group.keys())[:10]) or 'nothing'}")
            attributes = _attributes(array)
            axes = getattr(array.metadata, "dimension_names", None) or attributes.get("_ARRAY_DIMENSIONS")
            known = decoded(array, attributes, f"{path}: array {name!r}", axes=axes)
            found[name] = (known, array.chunks[0] if array.ndim else 1)
        return found


def _attributes(array: Any) -> dict[str, Any]:
    """Return an array's attributes; in stores of version 2 xarray keeps ``_FillValue`` as the array's fill value."""
    found = dict(array.attrs)
    if "_ARRAY_DIMENSIONS" in found and array.metadata.zarr_format == 2 and array.fill_value is not None:
        found.setdefault("_FillValue", array.fill_value)
    return found
