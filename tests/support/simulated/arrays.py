"""Simulate GPU arrays: a simulated array holds a NumPy array, but behaves like an array of CuPy.

As with CuPy, a function cannot take arrays of the host and of the GPU together, a GPU array is never converted to a
NumPy array implicitly, and a sum over all elements is an array without axes. So if code forgets a copy between host and
GPU, it fails with simulated arrays too. Functions, arguments and attributes that NumPy has and CuPy 14 has not are
missing here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpizero.types import Array

#: Functions of NumPy, and attributes of its arrays, that CuPy 14 does not have.
ABSENT_FUNCTIONS = frozenset([
    "asmatrix", "block", "bmat", "busday_count", "busday_offset", "datetime_as_string", "datetime_data",
    "einsum_path", "frompyfunc", "fromregex", "geomspace", "get_include", "getbufsize", "geterr", "geterrcall",
    "histogram_bin_edges", "info", "insert", "is_busday", "isnat", "matvec", "nanpercentile", "nanquantile",
    "nested_iters", "polyder", "polydiv", "polyint", "setbufsize", "seterr", "seterrcall", "show_runtime",
    "spacing", "test", "unstack", "vecdot", "vecmat",
])  # fmt: skip
#: Attributes that are those of the NumPy array.
SHAPE_AND_TYPE = frozenset(["shape", "dtype", "ndim", "size", "itemsize", "nbytes", "strides"])
ABSENT_ATTRIBUTES = frozenset(["ctypes", "getfield", "resize", "setfield", "setflags", "to_device"])
#: Keyword arguments that CuPy's elementwise functions take.
UFUNC_ARGUMENTS = frozenset(["out", "dtype", "casting"])


class SimulatedFlags(NamedTuple):
    """Tell what CuPy's ``flags`` tell."""

    c_contiguous: bool
    f_contiguous: bool
    owndata: bool


class SimulatedArray(NDArrayOperatorsMixin):
    """Represent an array on a simulated GPU.

    Parameters
    ----------
    values : Array
        The NumPy array that holds the elements; kernels of the simulator work on it.
    """

    __slots__ = ("values",)

    def __init__(self, values: Array) -> None:
        self.values = values

    @property
    def flags(self) -> SimulatedFlags:
        """Return how the elements lie in memory."""
        flags = self.values.flags
        return SimulatedFlags(flags.c_contiguous, flags.f_contiguous, flags.owndata)

    @property
    def T(self) -> SimulatedArray:  # noqa: N802
        """A view of the array with its axes in reverse order."""
        return SimulatedArray(self.values.T)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The description of the array's memory that the CUDA array interface (version 3) requires."""
        own = self.values.__array_interface__
        return {key: own[key] for key in ("shape", "typestr", "data", "strides")} | {"version": 3}

    def __array_namespace__(self) -> Any:
        return NAMESPACE

    def get(self, out: Array | None = None) -> Array:
        """Return a NumPy copy of the elements, or copy them to the NumPy array ``out`` and return it."""
        if out is None:
            return self.values.copy()
        self._require_alike(out, out)
        out[...] = self.values
        return out

    def set(self, values: Array) -> None:
        """Overwrite the elements by those of a NumPy array, which must have the same shape and dtype."""
        self._require_alike(values, self.values)
        self.values[...] = values

    def _require_alike(self, host: Array, written: Array) -> None:
        """Raise ValueError if an array of the host has another shape or dtype, or if ``written`` is not contiguous."""
        if host.shape != self.shape or host.dtype != self.dtype:
            raise ValueError(f"cannot copy between {host.dtype}{host.shape} and {self.dtype}{self.shape}")
        if not (written.flags.c_contiguous or written.flags.f_contiguous):
            raise ValueError(f"cannot copy to an array that is not contiguous, of strides {written.strides}")

    def __array__(self, *args: Any, **kwargs: Any) -> Array:
        raise TypeError("an array of the GPU does not turn into a NumPy array by itself: use get()")

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[SimulatedArray]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: Any) -> SimulatedArray:
        return SimulatedArray(np.asarray(self.values[_unwrapped(key)]))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.values[_unwrapped(key)] = _unwrapped(value)

    def __float__(self) -> float:
        return float(self.values)

    def __int__(self) -> int:
        return int(self.values)

    def __bool__(self) -> bool:
        return bool(self.values)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        _check(ufunc.__name__, ABSENT_FUNCTIONS)
        if method == "__call__" and ufunc.signature is None:
            return _elementwise(ufunc, inputs, kwargs)
        return _called(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _check(func.__name__, ABSENT_FUNCTIONS)
        return _called(func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in SimulatedArray.__slots__:
            raise AttributeError(name)
        if name in SHAPE_AND_TYPE:
            return getattr(self.values, name)
        _check(name, ABSENT_ATTRIBUTES)
        method = getattr(self.values, name)  # reshape, transpose, sum, astype, ...
        return lambda *args, **kwargs: _called(method, args, kwargs)


class Namespace:
    """Provide the functions of NumPy for simulated arrays: they take and return :class:`SimulatedArray`."""

    def __getattr__(self, name: str) -> Any:
        _check(name, ABSENT_FUNCTIONS)
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found
        if isinstance(found, np.ufunc) and found.signature is None:
            return lambda *args, **kwargs: _elementwise(found, args, kwargs)
        return lambda *args, **kwargs: _called(found, args, kwargs)


NAMESPACE = Namespace()


def _check(name: str, absent: frozenset[str]) -> None:
    if name in absent:
        raise AttributeError(f"CuPy has no {name}")


def _elementwise(function: np.ufunc, args: Any, kwargs: dict[str, Any]) -> Any:
    if unknown := kwargs.keys() - UFUNC_ARGUMENTS:
        raise TypeError(f"CuPy's {function.__name__} does not take {', '.join(sorted(unknown))}")
    return _called(function, args, kwargs)


def _called(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    out = kwargs.get("out")
    result = function(*_unwrapped(tuple(args)), **{name: _unwrapped(value) for name, value in kwargs.items()})
    if out is not None:
        return out[0] if isinstance(out, tuple) else out
    return _wrapped(result)


def _unwrapped(value: Any) -> Any:
    """Return the NumPy array that a simulated array holds; for a tuple or list, do so for each item.

    Return any other value unchanged, but raise TypeError for a NumPy array, as CuPy does.
    """
    if isinstance(value, SimulatedArray):
        return value.values
    if isinstance(value, np.ndarray):
        raise TypeError(f"an array of the host (shape {value.shape}) among arrays of the GPU: put it there first")
    if isinstance(value, tuple | list):
        return type(value)(_unwrapped(item) for item in value)
    return value


def _wrapped(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return SimulatedArray(np.asarray(value))
    if isinstance(value, tuple | list):
        return type(value)(_wrapped(item) for item in value)
    return value
