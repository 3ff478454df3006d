"""Choose arrays by name, read them in blocks, and convert their elements, also from and to bfloat16."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from mpizero._util.names import fits
from mpizero.checkpoint.format.checksum import BLOCK
from mpizero.checkpoint.format.table import LocalArray
from mpizero.checkpoint.reader import Reader
from mpizero.errors import ConfigError
from mpizero.types import Array, as_reals

#: Name of the type, and of the checkpoint attribute that lists the bfloat16 arrays, which are stored as ``<u2``.
BFLOAT16 = "bfloat16"
FLOATING = (BFLOAT16, "float16", "float32", "float64")
#: The type of complex numbers whose parts have the given type.
_COMPLEX = {"float32": "complex64", "float64": "complex128"}
PARAMETERS, OPTIMIZER = "parameters/", "optimizer/"
#: Folder of the moving averages of the parameters (``ShardingConfig(ema=...)``).
AVERAGES = f"{OPTIMIZER}ema/"
_EXPONENT_OF_BFLOAT16 = 0x7F80

#: Type of a function that reports progress: it is called with the number of bytes of each finished block.
Report = Callable[[int], object]


def element_types(reader: Reader) -> dict[str, str]:
    """Return the name of the element type (NumPy's name, or ``bfloat16``) of every array, by path. Not collective."""
    listed = reader.attributes.get(BFLOAT16, ())
    tagged = {path for path in listed if isinstance(path, str)} if isinstance(listed, list) else set()
    bits = np.dtype("<u2")
    return {
        path: BFLOAT16 if path in tagged and dtype == bits else dtype.name for path, (_, dtype) in reader.arrays.items()
    }


def stored_type(element: str) -> np.dtype[Any]:
    """Return the NumPy type in which elements of the named type are stored: uint16 for bfloat16. Not collective."""
    return np.dtype("<u2") if element == BFLOAT16 else np.dtype(element).newbyteorder("<")


def nbytes_of(reader: Reader, path: str) -> int:
    """Return the size in bytes of the array ``path``. Not collective."""
    shape, dtype = reader.arrays[path]
    return prod(shape) * dtype.itemsize


def short_name(path: str) -> str:
    """Return the name of an array in other file formats: its path without a leading ``parameters/``. Not collective."""
    return path.removeprefix(PARAMETERS)


def matches(path: str, pattern: str | None) -> bool:
    """Tell whether a path, with or without ``parameters/``, fits a shell pattern; None fits all. Not collective."""
    return pattern is None or fits(path, pattern) or fits(short_name(path), pattern)


def blocks(reader: Reader, path: str, report: Report | None = None) -> Iterator[tuple[int, Array]]:
    """Read and verify an array block by block; yield the index of the first element and the 1-D values of each block.

    The index refers to the array flattened in C order. The next block overwrites the memory of the values. ``report``
    is called with the number of bytes of each block after the caller has used it.

    Collective over the communicator with which the checkpoint was opened.
    """
    shape, dtype = reader.arrays[path]
    size, step = prod(shape), BLOCK // dtype.itemsize
    buffer = np.empty(min(size, step), dtype)
    for first in range(0, size, step):
        values = buffer[: min(step, size - first)]
        reader.read([LocalArray(path, shape, dtype, ((first, values),))])
        yield first, values
        if report is not None:
            report(values.nbytes)


def convert(values: Array, source: str, target: str) -> Array:
    """Return 1-D values converted from the element type ``source`` to ``target``. Not collective.

    Values are rounded to nearest even, and values that are too large become infinite.
    """
    if source == target:
        return values
    if source == BFLOAT16:
        from mpizero.kernels.cpu.copy import from_bfloat16

        wide = np.empty(values.size, np.float32)
        from_bfloat16(values, wide)
        return convert(wide, "float32", target)
    with np.errstate(over="ignore"):
        if target != BFLOAT16:
            return values.astype(stored_type(target))
        narrow = _rounded_to_odd(values) if values.dtype == np.float64 else values.astype(np.float32)
    from mpizero.kernels.cpu.copy import to_bfloat16

    bits = np.empty(values.size, np.uint16)
    to_bfloat16(narrow, bits)
    return bits


def _rounded_to_odd(values: Array) -> Array:
    """Convert float64 to float32, rounded to odd, so that rounding the result to bfloat16 rounds correctly."""
    narrow = values.astype(np.float32)
    wide, bits, finite = narrow.astype(np.float64), narrow.view(np.uint32), np.isfinite(narrow)
    bits -= (finite & (np.abs(wide) > np.abs(values))).astype(np.uint32)
    bits |= (finite & (wide != values)).astype(np.uint32)
    return narrow


def as_wanted(element: str, dtype: str | None) -> str:
    """Return the type of elements of the type ``element`` when floating-point ones are converted to ``dtype``.

    Not collective. None converts nothing; integers are never converted. Complex numbers get parts of that type.

    Raises
    ------
    ConfigError
        If there are no complex numbers with parts of that type.
    """
    if dtype is None or element not in (*FLOATING, *_COMPLEX.values()):
        return element
    if element in FLOATING:
        return dtype
    if dtype not in _COMPLEX:
        raise ConfigError(f"type {dtype!r}: there are no complex numbers of it, only {', '.join(_COMPLEX)}")
    return _COMPLEX[dtype]


def overflows(values: Array, source: str, converted: Array, target: str) -> int:
    """Return the number of finite values that a conversion has made infinite. Not collective."""
    if target not in (*FLOATING, *_COMPLEX.values()) or source == target:
        return 0
    return int(np.count_nonzero(_infinite(converted, target) & ~_infinite(values, source)))


def _infinite(values: Array, element: str) -> Array:
    return (values & 0x7FFF) == _EXPONENT_OF_BFLOAT16 if element == BFLOAT16 else np.isinf(values)


def widened(values: Array, element: str) -> Array:
    """Return 1-D values of the type ``element`` converted to float64. Not collective.

    Complex values become twice as many: real and imaginary part in turn.
    """
    reals = as_reals(values)
    return convert(reals, element if reals is values else reals.dtype.name, "float64")


def flat(attributes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested attributes as one dictionary with dotted names; lists are not flattened. Not collective.

    Each name begins with ``prefix``. A key that contains a dot is quoted, so that no two attributes get the same name.
    """
    found: dict[str, Any] = {}
    for key, value in attributes.items():
        name = prefix + (json.dumps(key) if "." in key or '"' in key else key)
        found.update(flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value})
    return found
