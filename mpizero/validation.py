"""Check numbers, flags and arrays that users pass; errors name the argument, its value and what is expected.

A check is a function that returns the value to use, or raises :class:`Unexpected` with a text of what is expected.
:func:`require` turns that exception into the error that users see. Configuration files and command line options use the
same checks, but word their messages themselves.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpizero.errors import ConfigError, DataError, LayoutError, MpizeroError

T = TypeVar("T")
#: What to give in place of a masked array that takes no mask beside it.
_FILLED = "give a.filled(value), with a number for what is masked, or a.data if nothing is"
#: The same of a masked array of samples, which losses take a mask for.
_TWO_ARRAYS = "give the values and the mask as two arrays, for example {'values': a.filled(0), 'mask': a.mask}"
#: Function that returns the value to use, or raises :class:`Unexpected`.
Check = Callable[[Any], Any]


class Unexpected(ValueError):  # noqa: N818 - becomes an error of the package
    """Raised by a check for a wrong value; the message says what is expected, such as "a whole number >= 1"."""


def require(name: str, value: object, check: Callable[[Any], T], error: type[MpizeroError] = ConfigError) -> T:
    """Apply ``check`` to the value of the argument ``name``; return the value to use, or raise ``error``.

    Raises
    ------
    error
        If the check fails. The message names the argument, its value and what is expected.
    """
    try:
        return check(value)
    except Unexpected as expected:
        raise error(f"{name}={value!r}: expected {expected}") from None


def is_whole(value: object, least: int = 0, most: int = 2**63 - 1) -> TypeGuard[int]:
    """Tell whether a value is an integer of Python or NumPy, but no bool, from ``least`` to ``most`` inclusive."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def home_path(path: str | PathLike[str]) -> Path:
    """Return a path in which "~" or "~user" at the beginning is replaced by that home folder.

    Raises
    ------
    ConfigError
        If there is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{os.fspath(path)}: there is no such home folder; give the whole path") from None


def whole(least: int = 0, most: int | None = None, of: str = "") -> Callable[[Any], int]:
    """Return a check for integers from ``least`` to ``most`` (default 2**63 - 1), inclusive.

    ``of`` is inserted into the message: " of samples" gives "a whole number of samples >= 1".
    """
    limit = 2**63 - 1 if most is None else most

    def check(value: Any) -> int:
        if not is_whole(value, least, limit):
            names_limit = most is not None or (isinstance(value, Integral) and int(value) > limit)
            bounds = f"from {least} to {limit}" if names_limit else f">= {least}"
            raise Unexpected(f"a whole number{of} {bounds}")
        return int(value)

    return check


def seed(value: Any) -> int:
    """Check that a value is an integer from 0 to 2**64 - 1, and return it as an int."""
    if not is_whole(value, most=2**64 - 1):
        raise Unexpected("a whole number from 0 to 2**64 - 1")
    return int(value)


def number(
    least: float = 0.0, below: float = math.inf, *, above: bool = False, what: str = "a finite number"
) -> Callable[[Any], float]:
    """Return a check for finite numbers in [least, below), or in (least, below) if ``above`` is True.

    ``what`` describes the number in the message.
    """
    bounds = ((least, ">" if above else ">="), (below, "<"))
    ranges = " and ".join(f"{sign} {bound:g}" for bound, sign in bounds if math.isfinite(bound))
    expected = f"{what} {ranges}".rstrip()

    def check(value: Any) -> float:
        if isinstance(value, bool | np.bool) or not isinstance(value, Real):
            raise Unexpected(expected)
        try:
            given = float(value)
        except OverflowError:  # of an integer
            given = math.inf
        if not math.isfinite(given) or not (least < given if above else least <= given) or given >= below:
            raise Unexpected(expected)
        return given

    return check


#: Check for a finite number above zero.
positive = number(above=True)
#: Check for a number from zero up to, but not including, one.
fraction = number(below=1.0)


def flag(value: Any) -> bool:
    """Check that a value is True or False, and return it as a bool."""
    if not isinstance(value, bool | np.bool):
        raise Unexpected("True or False")
    return bool(value)


def unmasked(value: T, what: str, error: type[MpizeroError] = LayoutError, way: str = _FILLED) -> T:
    """Return ``value``; raise ``error`` if it is a masked array, or a list of some: as an array it would lose its mask.

    ``what`` names the value in the message, ``way`` is the way out.
    """
    module = sys.modules.get("numpy.ma")  # which takes 30 ms to import; without it there are no masked arrays
    kind = getattr(module, "MaskedArray", None)  # nor while another thread imports it
    held = value if isinstance(value, list | tuple) else (value,)
    if kind is not None and any(isinstance(one, kind) for one in held):
        raise error(f"{what} is a masked array, whose mask would be lost: {way}")
    return value


def unmasked_samples(value: T, path: str) -> T:
    """Return an array of samples, or a list; raise DataError, which names ``path``, if it is masked."""
    return unmasked(value, path, DataError, _TWO_ARRAYS)


def native(array: NDArray[Any]) -> NDArray[Any]:
    """Return ``array`` in this machine's byte order, equal numbers as equal bytes: itself, or a copy if it has others.

    Files of other machines hold numbers in theirs. NumPy computes with them, but messages, checksums and compiled code
    see bytes.
    """
    found = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return found if has_plain_bytes(found) else _without_padding(found)


def has_plain_bytes(array: NDArray[Any]) -> bool:
    """Tell whether an array is in this machine's byte order, and has no bytes without meaning, as extended floats."""
    return array.dtype.isnative and array.dtype.char not in "gG"


def _without_padding(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of extended floats with zeros where x86 has bytes without meaning, ten bytes of sixteen."""
    kind = np.finfo(np.longdouble)
    used, size = 10 if kind.nmant == 63 else kind.dtype.itemsize, kind.dtype.itemsize
    found = np.zeros(array.shape, array.dtype)
    found.reshape(-1).view(np.uint8).reshape(-1, size)[:, :used] = (
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, size)[:, :used]
    )
    return found


def number_array(values: Any, what: str, *, complex: bool = True) -> NDArray[Any]:
    """Convert ``values`` to an array of booleans, integers, floats or, if ``complex``, complex numbers.

    It has this machine's byte order.

    Raises
    ------
    LayoutError
        If the values are no such numbers; the message begins with ``what``, the name of the values.
    """
    if isinstance(values, Mapping):
        inner = ", ".join(repr(str(key)) for key in list(values)[:3])
        raise LayoutError(
            f"{what} is a mapping of {inner}, not an array: flatten the names, as in {{'layer.weight': array}}"
        )
    try:
        array = native(np.asarray(unmasked(values, what)))
    except ValueError as error:  # a ragged list
        raise LayoutError(f"{what} is a {type(values).__name__} that makes no array: {error}") from None
    if array.dtype.kind not in ("biufc" if complex else "biuf"):
        kind = "numbers" if complex else "real numbers"
        advice = ": give its real part, or real and imaginary parts in turn" if array.dtype.kind == "c" else ""
        raise LayoutError(f"{what} is of type {array.dtype}, not an array of {kind}{advice}")
    return array
