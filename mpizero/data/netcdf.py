"""Read samples from variables of NetCDF files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpizero.data.files import FileSource
from mpizero.errors import DataError
from mpizero.names import explains
from mpizero.sampletree import leaves_of
from mpizero.types import Array


@explains
class NetcdfSource(FileSource):
    """Read samples from variables of one or several NetCDF-4 files; each sample is read when it is requested.

    The parameters and errors are those of :class:`~mpizero.data.FileSource`; it needs the extra ``netcdf``. Packed
    variables (``scale_factor``, ``add_offset``) are unpacked to the type of these attributes, at least float32.
    Elements that are missing (``_FillValue``, ``missing_value``) become NaN; in whole numbers that are not packed they
    are an error.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import h5netcdf
    >>> import numpy as np
    >>> import mpizero as mz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with h5netcdf.File(Path(folder, "2001.nc"), "w") as file:
    ...         file.dimensions = {"day": 3, "place": 2}
    ...         variable = file.create_variable("wind", ("day", "place"), data=np.array([[1, 2], [3, 4], [5, 6]], "i2"))
    ...         variable.attrs["scale_factor"] = np.float32(0.5)
    ...     days = mz.data.NetcdfSource(f"{folder}/*.nc", x="wind", y="wind")
    ...     print(len(days), days.samples([2])[0])  # unpacked
    3 [[2.5 3. ]]
    """

    kind, array_word = "netcdf", "variable"

    def open_file(self, path: str) -> Mapping[str, tuple[Any, int]]:
        """Open a file; return its variables of :attr:`names` by name, and the rows of a chunk of each."""
        try:
            import h5netcdf
        except ImportError:
            raise DataError(f"{path}: needs h5netcdf, which is not installed: pip install h5netcdf") from None
        if not os.path.isfile(path):
            raise DataError(f"{path}: {'not a regular file' if os.path.lexists(path) else 'does not exist'}")
        try:
            file = h5netcdf.File(path, "r")
        except Exception as error:
            raise DataError(f"{path}: not a readable NetCDF-4 file: {error}") from None
        found = {}
        for name in dict.fromkeys(leaves_of(self.names)):
            try:
                variable = file[name]
            except KeyError:
                have = ", ".join(list(file.variables)[:10]) or "nothing"
                raise DataError(f"{path}: no variable {name!r}; it has {have}") from None
            chunk = variable.chunks[0] if variable.chunks else max(1, *variable.shape[:1])
            found[name] = (_Unpacked(file, variable), chunk)
        return found


class _Unpacked:
    """Unpack a variable by its attributes, and replace missing elements by NaN."""

    def __init__(self, file: Any, variable: Any) -> None:
        self._file, self._variable = file, variable  # a variable does not keep its file open
        self.shape, self.ndim = tuple(variable.shape), len(variable.shape)
        attributes = dict(variable.attrs)
        self._scale, self._offset = attributes.get("scale_factor"), attributes.get("add_offset")
        self._missing = [attributes[name] for name in ("_FillValue", "missing_value") if name in attributes]
        given = [np.asarray(value).dtype for value in (self._scale, self._offset) if value is not None]
        self.dtype = np.result_type(np.float32, *given) if given else np.dtype(variable.dtype)

    def __getitem__(self, where: Any) -> Array:
        packed = np.asarray(self._variable[where])
        missing = np.zeros(packed.shape, bool)
        for value in self._missing:
            missing |= packed == value
        found = packed.astype(self.dtype)
        if self._scale is not None:
            found *= self.dtype.type(np.asarray(self._scale).item())
        if self._offset is not None:
            found += self.dtype.type(np.asarray(self._offset).item())
        if missing.any():
            if self.dtype.kind not in "fc":
                raise ValueError(f"an element is missing: it has the fill value {self._missing[0]}")
            found[missing] = np.nan
        return found
