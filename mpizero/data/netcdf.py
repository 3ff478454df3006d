"""Read samples from variables of NetCDF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpizero._util.names import explains
from mpizero._util.pytree import leaves_of
from mpizero.data.conventions import decoded
from mpizero.data.files import FileSource
from mpizero.data.hdf5 import unlocked
from mpizero.errors import DataError

#: What the format's own library puts where nothing is written, by type; single bytes have no such value.
DEFAULT_FILLS: Mapping[str, float] = {
    "i2": -32767,
    "u2": 65535,
    "i4": -2147483647,
    "u4": 4294967295,
    "i8": -9223372036854775806,
    "u8": 18446744073709551614,
    "f4": 9.969209968386869e36,
    "f8": 9.969209968386869e36,
}


@explains
class NetcdfSource(FileSource):
    """Read samples from variables of one or several NetCDF-4 files; each sample is read when it is requested.

    The parameters and errors are those of :class:`~mpizero.data.FileSource`; it needs the extra ``netcdf``. Packed
    variables (``scale_factor``, ``add_offset``, ``_Unsigned``) are unpacked to the type of these attributes, at least
    float32. Elements that are missing (``_FillValue``, one or several of ``missing_value``, never written) become NaN;
    in whole numbers that are not packed they are an error. ``valid_range`` is not looked at.

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
        file = unlocked(path, lambda **locking: h5netcdf.File(path, "r", **locking))
        found = {}
        for name in dict.fromkeys(leaves_of(self.names)):
            try:
                variable = file[name]
                shape = tuple(variable.shape)
            except KeyError:
                have = ", ".join(list(file.variables)[:10]) or "nothing"
                raise DataError(f"{path}: no variable {name!r}; it has {have}") from None
            except ValueError as error:  # it is HDF5, without dimensions
                told = str(error).partition("\n")[0]
                raise DataError(f"{path}: {name!r} is no variable of NetCDF: {told} Use Hdf5Source") from None
            chunk = variable.chunks[0] if variable.chunks else max(1, *shape[:1])
            known = {"axes": variable.dimensions, "keep": file}  # a variable does not hold its file open
            label = f"{path}: variable {name!r}"
            found[name] = (decoded(variable, dict(variable.attrs), label, _unwritten(variable), **known), chunk)
        return found


def _unwritten(variable: Any) -> Any:
    """Return what the format's library has put where nothing was written; None if the file says otherwise."""
    default = DEFAULT_FILLS.get(np.dtype(variable.dtype).str[1:])
    stored = getattr(variable, "_h5ds", None)  # of files that other libraries have made, it is a number like others
    if default is None or getattr(stored, "fillvalue", None) != np.dtype(variable.dtype).type(default):
        return None
    return default
