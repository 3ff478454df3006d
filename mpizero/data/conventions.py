"""Read arrays as the attributes say that NetCDF and xarray give them: unpacked, unsigned, with missing elements."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpizero.errors import DataError
from mpizero.types import Array

#: Attributes that change what an array's elements mean.
FILLS, PACKED, UNSIGNED = ("_FillValue", "missing_value"), ("scale_factor", "add_offset"), "_Unsigned"


def decoded(
    values: Any,
    attributes: Mapping[str, Any],
    label: str,
    default: Any = None,
    *,
    axes: Sequence[str | None] | None = None,
    keep: Any = None,
) -> Named:
    """Return an array of a file so that reading it gives the numbers that are meant.

    Parameters
    ----------
    values : array of a file
        It has a shape and a dtype, and returns stored elements when it is indexed.
    attributes : mapping of str to object
        The array's attributes.
    label : str
        Name of file and array, for error messages.
    default : number, optional
        What the format has where nothing was written, if the array has no ``_FillValue``.
    axes : sequence of str, optional
        Names of the array's axes.
    keep : object, optional
        What the array needs as long as it is read, such as its file.

    Raises
    ------
    DataError
        If an attribute cannot be followed; the message names it.
    """
    given = {name: attributes[name] for name in (*FILLS, *PACKED, UNSIGNED) if name in attributes}
    if default is not None and "_FillValue" not in given:
        given["_FillValue"] = default
    means_bool = attributes.get("dtype") == "bool" and values.dtype.kind in "iu"
    meant = _Decoded(values, given, label, means_bool) if given or means_bool else values
    return Named(meant, axes, attributes, keep)


class Named:
    """An array of a file with the names of its axes, which also says in what its numbers are measured.

    Attributes
    ----------
    axes : tuple of str
        The names; () if the file has none.
    measured : mapping of str to str
        Those of the attributes ``units`` and ``calendar`` that the array has.
    """

    def __init__(
        self, values: Any, axes: Sequence[str | None] | None, attributes: Mapping[str, Any], keep: Any
    ) -> None:
        self._values, self._keep = values, keep
        self.shape, self.dtype, self.ndim = tuple(values.shape), values.dtype, len(values.shape)
        self.axes = tuple(axes) if axes and all(isinstance(axis, str) for axis in axes) else ()
        self.measured = {name: _text(attributes[name]) for name in ("units", "calendar") if name in attributes}

    def __getitem__(self, where: Any) -> Any:
        return self._values[where]


def _text(value: Any) -> str:
    """Return an attribute as text, which a library may have written as characters of a fixed number."""
    return (value.decode(errors="replace") if isinstance(value, bytes) else str(value)).strip("\0 ")


class _Decoded:
    """Unpack an array, and replace missing elements by NaN."""

    def __init__(self, values: Any, given: Mapping[str, Any], label: str, means_bool: bool) -> None:
        self._values = values
        self.shape, self.ndim = tuple(values.shape), len(values.shape)
        stored = np.dtype(values.dtype)
        self._stored = _signed(stored, given.get(UNSIGNED), label)
        self._missing = [one for name in FILLS if name in given for one in _fills(given[name], stored, name, label)]
        self._scale, self._offset = (_number(given[name], name, label) if name in given else None for name in PACKED)
        types = [value.dtype for value in (self._scale, self._offset) if value is not None]
        self.dtype = np.result_type(np.float32, *types) if types else np.dtype(bool) if means_bool else self._stored

    def __getitem__(self, where: Any) -> Array:
        packed = np.asarray(self._values[where])
        missing = np.zeros(packed.shape, bool)
        for value in self._missing:
            missing |= packed == value
        found = packed.astype(packed.dtype.newbyteorder("="), copy=False).view(self._stored).astype(self.dtype)
        if self._scale is not None:
            found *= self.dtype.type(self._scale)
        if self._offset is not None:
            found += self.dtype.type(self._offset)
        if missing.any():
            if self.dtype.kind not in "fc":
                raise ValueError(f"an element is missing: it has the fill value {packed[missing][0]}")
            found[missing] = np.nan
        return found


def _signed(stored: np.dtype[Any], unsigned: Any, label: str) -> np.dtype[Any]:
    """Return the type that ``_Unsigned`` gives to the bits of whole numbers, in this machine's byte order."""
    native = stored.newbyteorder("=")
    if unsigned is None or stored.kind not in "iu":
        return native
    if str(unsigned).lower() not in ("true", "false"):
        raise _wrong(label, UNSIGNED, unsigned, 'expected "true" or "false"')
    return np.dtype(f"{'u' if str(unsigned).lower() == 'true' else 'i'}{stored.itemsize}")


def _number(value: Any, name: str, label: str) -> Array:
    found = np.asarray(value)
    if found.dtype.kind not in "fiu" or found.size != 1:
        raise _wrong(label, name, value, "expected one number")
    return found.reshape(()).astype(found.dtype.newbyteorder("="))


def _fills(value: Any, stored: np.dtype[Any], name: str, label: str) -> list[Any]:
    """Return the values of missing elements in the stored type, leaving out those that it cannot have."""
    if isinstance(value, str | list) and name == "_FillValue" and stored.kind in "fc":
        value = _of_base64(value)
    given = np.atleast_1d(np.asarray(value))
    if given.dtype.kind not in "fiubc":
        raise _wrong(label, name, value, "expected numbers of the array's type")
    native = stored.newbyteorder("=")
    with np.errstate(invalid="ignore", over="ignore"):
        found = given.astype(native)
    if native.kind == "b":  # which has no value to spare
        return []
    if native.kind not in "fc":  # no element has another value; of a wider float the nearest one is meant
        same_bits = given.dtype.kind in "iu" and given.dtype.itemsize == native.itemsize
        found = found if same_bits else found[found == given]
    return list(found)


def _of_base64(value: Any) -> Any:
    """Return the numbers that xarray writes as text into Zarr stores; ``value`` itself if it is no such text."""
    try:
        parts = [struct.unpack("<d", base64.b64decode(one, validate=True))[0] for one in np.atleast_1d(value).tolist()]
    except (TypeError, ValueError, struct.error):
        return value
    return complex(*parts) if isinstance(value, list) and len(parts) == 2 else parts[0]


def _wrong(label: str, name: str, value: Any, expected: str) -> DataError:
    return DataError(
        f"{label}: the attribute {name}={value!r:.80} cannot be followed: {expected}; correct it, or read the stored "
        "numbers by a FileSource of your own"
    )
