"""Check what users pass and what their functions return; errors name the value and say what is expected.

A check is a function that returns the value to use, or raises :class:`Unexpected` with a text of what is expected.
:func:`require` turns that exception into the error that users see. Configuration files and command line options use the
same checks, but word their messages themselves. :func:`strict_json` parses JSON of other machines and of files. Further
functions check a user's own functions: with which arguments they are called (:func:`takes_run`), and whether they
return a loss, a weight or a gradient; errors name the user's function, its file and its line.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpizero._util.names import nearest, shown
from mpizero.errors import ConfigError, DataError, LayoutError, MpizeroError
from mpizero.types import Array, Run

T = TypeVar("T")
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
    """Tell whether a value is an integer of Python or NumPy, and not a bool, from ``least`` to ``most`` inclusive."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def home_path(path: str | PathLike[str]) -> Path:
    """Return a path in which "~" or "~user" at the beginning is replaced by the user's home folder.

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
            converted = float(value)
        except OverflowError:  # of an integer
            converted = math.inf
        if (
            not math.isfinite(converted)
            or not (least < converted if above else least <= converted)
            or converted >= below
        ):
            raise Unexpected(expected)
        return converted

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


def strict_json(data: bytes) -> Any:
    """Parse JSON in UTF-8 that is not trusted, and return its value.

    Raises
    ------
    ValueError
        If ``data`` is not JSON, contains a number beyond the range of float64 or a key twice, or is nested deeper than
        the parser can go.
    """
    try:
        return json.loads(
            data.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite, parse_int=_bounded
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error!s:.200}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError("a number is too large")
    return value


#: The most characters of an integer: those of the largest float64, with a sign.
_INTEGER = 310


def _bounded(number: str) -> int:
    if len(number) > _INTEGER or abs(value := int(number)) > sys.float_info.max:
        raise ValueError("a number is too large")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


#: Advice for a masked array where no mask can be given separately.
_FILLED = "give a.filled(value), with a number for what is masked, or a.data if nothing is"
#: Advice for a masked array of samples: losses accept a mask as an array of its own.
_TWO_ARRAYS = "give the values and the mask as two arrays, for example {'values': a.filled(0), 'mask': a.mask}"


def unmasked(value: T, what: str, error: type[MpizeroError] = LayoutError, way: str = _FILLED) -> T:
    """Return ``value``; raise ``error`` for a masked array, or a list with one: conversion would lose the mask.

    In the message ``what`` names the value, and ``way`` says what the user can pass instead.
    """
    module = sys.modules.get("numpy.ma")  # which takes 30 ms to import; without it there are no masked arrays
    kind = getattr(module, "MaskedArray", None)  # nor while another thread imports it
    arrays = value if isinstance(value, list | tuple) else (value,)
    if kind is not None and any(isinstance(one, kind) for one in arrays):
        raise error(f"{what} is a masked array, whose mask would be lost: {way}")
    return value


def unmasked_samples(value: T, path: str) -> T:
    """Return an array or a list of samples; raise a DataError that names ``path`` if an array is masked."""
    return unmasked(value, path, DataError, _TWO_ARRAYS)


def native(array: NDArray[Any]) -> NDArray[Any]:
    """Return ``array`` in this machine's byte order, with zeros as padding bytes: itself, a view, or a converted copy.

    Files of other machines may have the other byte order. NumPy computes with either, but MPI messages, checksums and
    compiled code read the bytes as they are, and equal numbers must be equal bytes. Compiled code also refuses a dtype
    that names this machine's byte order explicitly, by "<" or ">" in place of NumPy's usual "=", as the dtype of an
    array mapped from HDF5 does.
    """
    swapped = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if swapped.dtype.byteorder in "<>":
        swapped = swapped.view(swapped.dtype.newbyteorder("="))
    return swapped if has_plain_bytes(swapped) else _without_padding(swapped)


def has_plain_bytes(array: NDArray[Any]) -> bool:
    """Tell whether an array is in this machine's byte order, without padding bytes such as those of extended floats."""
    return array.dtype.isnative and array.dtype.char not in "gG"


def _without_padding(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of extended floats with zeros as padding bytes: on x86 only ten bytes of sixteen have a meaning."""
    kind = np.finfo(np.longdouble)
    used, size = 10 if kind.nmant == 63 else kind.dtype.itemsize, kind.dtype.itemsize
    copy = np.zeros(array.shape, array.dtype)
    copy.reshape(-1).view(np.uint8).reshape(-1, size)[:, :used] = (
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, size)[:, :used]
    )
    return copy


def number_array(values: Any, what: str, *, complex: bool = True) -> NDArray[Any]:
    """Convert ``values`` to an array of booleans, integers, floats or, if ``complex``, complex numbers.

    The array has this machine's byte order.

    Raises
    ------
    LayoutError
        If a value is of another type; the message begins with ``what``, the name of the values.
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


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def writes_in_place(model: Any) -> bool:
    """Tell whether a black box writes its gradients into arrays that it is given, instead of returning them."""
    return getattr(model, "in_place", False) is True


def loss_arguments(*, in_place: bool) -> tuple[str, ...]:
    """Return the names of the positional arguments that a black box's ``loss_and_grad`` is called with."""
    return ("parameters", "batch", "gradients") if in_place else ("parameters", "batch")


def takes_run(function: Callable[..., Any], name: str, *arguments: str) -> bool:
    """Tell whether a function called with positional arguments named ``arguments`` also accepts the keyword ``run``.

    ``run`` is a :class:`mpizero.types.Run`.

    ``name`` is the name of the function in error messages. The result is False for a function without a readable
    signature (compiled code). For a decorated function the result is True only if both the function itself and the
    decorator's wrapper accept ``run``.

    Raises
    ------
    ConfigError
        If the function cannot be called with that many positional arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    outer = signature
    with suppress(TypeError, ValueError):  # of a decorator in compiled code
        outer = inspect.signature(function, follow_wrapped=False)
    parameters = list(signature.parameters.values())
    first = [parameter.name for parameter in parameters[: len(arguments)] if parameter.kind in _POSITIONAL]
    keyword = signature.parameters.get("run")
    takes = (
        keyword is not None
        and keyword.kind in (keyword.KEYWORD_ONLY, keyword.POSITIONAL_OR_KEYWORD)
        and "run" not in first
    )
    if takes:
        with suppress(TypeError):
            outer.bind(*arguments, run=None)
            return True
    try:
        outer.bind(*arguments)
    except TypeError as error:
        called = getattr(function, "__qualname__", name).rpartition("<locals>.")[2]
        raise ConfigError(
            f"{name} is called as {name}({', '.join(arguments)}), or with run=... as well where it takes that, but it "
            f"is {called}{outer}: {error}"
        ) from None
    return False


def named(function: Any, name: str) -> str:
    """Return ``name``, followed by the function's own name, file and line if they are known. Not collective."""
    function = inspect.unwrap(getattr(function, "func", function))  # of a functools.partial, or decorated
    code, qualified = getattr(function, "__code__", None), getattr(function, "__qualname__", name)
    if code is None:
        return name
    qualified = qualified.rpartition("<locals>.")[2]
    location = f"{qualified} at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return location if qualified == name else f"{name} ({location})"


#: The ``dtype.kind`` codes that a number may have: float, int, unsigned, and void, which JAX's bfloat16 has.
_NUMBERS = "fiuV"
_WEIGHT = "how much the samples count, for a plain mean their number; 0 for those that shall not"


def samples_text(run: Run) -> str:
    """Return a text for messages: which samples of the global batch ``run`` covers. Not collective."""
    first, last = run.first_sample, run.first_sample + run.count - 1
    return f"samples {first} to {last} of the global batch" if run.count > 1 else f"sample {first}"


def loss_and_weight(
    function: Callable[..., Any], loss: Any, weight: Any, run: Run | None = None, name: str = "loss_and_grad"
) -> tuple[float, float]:
    """Check the loss sum and the weight that ``function`` returned, and return them as floats. Not collective.

    ``run`` tells for which samples the function was called, for error messages. ``name`` is the function's name in
    error messages; a loss layer's ``forward`` is named by the layer's class instead. Infinities and NaN are accepted:
    the training step is skipped later, and a message tells the user why.

    Raises
    ------
    LayoutError
        If the loss or the weight is not a real number.
    DataError
        If the weight is negative.
    """
    if type(loss) is float and type(weight) is float and weight >= 0:  # as usual: every micro-batch comes here
        return loss, weight
    at = "" if run is None else f" of {samples_text(run)}"
    if getattr(function, "__name__", "") == "forward":
        name = f"{type(getattr(function, '__self__', None)).__name__}.forward"

    def real(what: str, value: Any, expected: str) -> float:
        if (number := _number(value)) is None:
            raise LayoutError(
                f"{named(function, name)} returned {_described(value)} as the {what}{at}: expected one real number, "
                f"{expected}"
            )
        return number

    loss_sum, sample_weight = real("loss", loss, "the sum of the samples' losses"), real("weight", weight, _WEIGHT)
    if sample_weight < 0:
        raise DataError(
            f"{named(function, name)} returned {sample_weight:g} as the weight{at}: expected a number >= 0, {_WEIGHT}"
        )
    return loss_sum, sample_weight


def _number(value: Any) -> float | None:
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if value is not None and not isinstance(value, bool | str | bytes | bytearray | complex) and kind in _NUMBERS:
        try:
            single = getattr(value, "shape", ()) and math.prod(value.shape) == 1
            return float(value.reshape(()) if single else value)
        except (TypeError, ValueError):
            pass
    return None


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return f"an array of {value.dtype} of shape {tuple(shape)}" if shape else f"{shown(value)} ({value.dtype})"
    return "None" if value is None else f"{shown(value)} ({type(value).__name__})"


def check_names(function: Callable[..., Any], grads: Mapping[str, Any], trained: Set[str], frozen: Set[str]) -> None:
    """Check the names of the gradients that a user's function returned. Not collective.

    There must be a gradient for each name in ``trained``. Those for names in ``frozen`` are ignored.

    Raises
    ------
    LayoutError
        If a gradient is missing, or one has a name that is in neither set.
    """
    if grads.keys() == trained:
        return
    for name in grads:
        if name not in trained and name not in frozen:
            raise LayoutError(
                f"{named(function, 'loss_and_grad')} returned a gradient for {shown(name)}, which is no parameter"
                f"{nearest(name, trained)}: the parameters are {_some(trained)}"
            )
    for name in trained:
        if name not in grads:
            raise LayoutError(
                f"{named(function, 'loss_and_grad')} returned no gradient for {name!r}; it returned {_some(grads)}"
            )


def _some(names: Any, most: int = 8) -> str:
    listed = sorted(map(str, names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"{listed[:most]}{more}"


def gradient(function: Callable[..., Any], name: str, value: Any, view: Array, run: Run) -> Array:
    """Check one gradient that a user's function returned, and return it as an array. Not collective.

    ``value`` is the gradient of the parameter ``name`` for the samples of ``run``. It must have the shape of
    ``view``, the array to which the caller copies it.

    Raises
    ------
    LayoutError
        If the gradient has another shape, or a type other than float32 and float64 (of a complex parameter: complex64
        and complex128).
    """
    array = np.asarray(unmasked(value, f"{named(function, 'loss_and_grad')} returned a gradient of {name!r} that"))
    if array.dtype.kind != view.dtype.kind or array.real.itemsize < 4:
        expected = "complex64 or complex128" if view.dtype.kind == "c" else "float32 or float64"
        raise LayoutError(
            f"{named(function, 'loss_and_grad')} returned {_described(array)} as the gradient of {name!r} by "
            f"{samples_text(run)}: expected {expected}; {_way_out(array, view)}"
        )
    if array.shape != view.shape:
        raise LayoutError(
            f"{named(function, 'loss_and_grad')}: the gradient of {name!r} has shape {array.shape}, its parameter has "
            f"{view.shape}, by {samples_text(run)}"
        )
    return array


def take_integers(function: Callable[..., Any], name: str, value: Any, view: Array, run: Run) -> None:
    """Copy ``value``, the new value that a user's function returned for an integer array, to ``view``. Not collective.

    ``name`` is the array's name; ``run`` tells for which samples the function was called.

    Raises
    ------
    LayoutError
        If the new value has another shape, or numbers that the array's dtype cannot hold.
    """
    array = np.asarray(unmasked(value, f"{named(function, 'loss_and_grad')} returned a value of {name!r} that"))
    if array.shape == view.shape and array.dtype.kind in "iub":
        view[...] = array
        if (view == array).all():
            return
    raise LayoutError(
        f"{named(function, 'loss_and_grad')} returned {_described(array)} as the new value of integer array {name!r} "
        f"by {samples_text(run)}: expected {view.dtype} of shape {view.shape}"
    )


def _way_out(array: Array, view: Array) -> str:
    if array.dtype.kind == "c":
        return "the gradient of a real loss by a real parameter is real: return its real part"
    if view.dtype.kind == "c" and array.dtype.kind == "f":
        return "the parameter is complex, so its gradient is dL/dRe + i dL/dIm"
    if array.dtype.kind == "f" or array.itemsize == 2:
        return "sums of many samples lose digits in 16 bits: compute it in float32"
    if array.dtype.kind == "O":
        return "numbers of different kinds, or things that are no numbers, stand in it"
    return "if these are the right values, convert them: value.astype(numpy.float32)"
