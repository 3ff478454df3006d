"""Simulate GPU arrays: they hold NumPy arrays, but behave like CuPy's arrays.

Under ``NUMBA_ENABLE_CUDASIM=1`` they replace CuPy's arrays. As with CuPy, arrays of the host and of the GPU cannot be
mixed, no GPU array turns into a NumPy array by itself, and a sum over all elements is an array without axes. So a
training that works with simulated arrays forgets no copy between host and GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpizero.types import Array


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

    # ------------------------------------------------------------------ shape and place

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.values.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.values.size

    @property
    def itemsize(self) -> int:
        """Number of bytes of an element."""
        return self.values.itemsize

    @property
    def nbytes(self) -> int:
        """Number of bytes of all elements."""
        return self.values.nbytes

    @property
    def strides(self) -> tuple[int, ...]:
        """For each axis, the number of bytes from one element to the next."""
        return self.values.strides

    @property
    def flags(self) -> Any:
        """NumPy's flags of the values."""
        return self.values.flags

    @property
    def T(self) -> SimulatedArray:  # noqa: N802
        """The array with its axes reversed: a view."""
        return SimulatedArray(self.values.T)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The description of the array by which other libraries recognize a GPU array."""
        own = self.values.__array_interface__
        return {key: own[key] for key in ("shape", "typestr", "data", "strides")} | {"version": 3}

    def __array_namespace__(self) -> Any:
        return NAMESPACE

    # ------------------------------------------------------------------ between host and GPU

    def get(self, out: Array | None = None) -> Array:
        """Copy to the host, into ``out`` if given."""
        if out is None:
            return self.values.copy()
        np.copyto(out, self.values)
        return out

    def set(self, values: Array) -> None:
        """Copy from the host; shape and dtype must be equal."""
        if values.shape != self.shape or values.dtype != self.dtype:
            raise ValueError(f"cannot copy {values.dtype}{values.shape} to {self.dtype}{self.shape}")
        self.values[...] = values

    def __array__(self, *args: Any, **kwargs: Any) -> Array:
        raise TypeError("an array of the GPU does not turn into a NumPy array by itself: use get()")

    # ------------------------------------------------------------------ elements

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

    # ------------------------------------------------------------------ functions

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _called(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _called(func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in SimulatedArray.__slots__:
            raise AttributeError(name)
        method = getattr(self.values, name)  # reshape, transpose, sum, astype, ...
        return lambda *args, **kwargs: _called(method, args, kwargs)


class Namespace:
    """Provide the functions of NumPy for arrays of a simulated GPU."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found
        return lambda *args, **kwargs: _called(found, args, kwargs)


NAMESPACE = Namespace()


def _called(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    out = kwargs.get("out")
    result = function(*_unwrapped(tuple(args)), **{name: _unwrapped(value) for name, value in kwargs.items()})
    if out is not None:
        return out[0] if isinstance(out, tuple) else out
    return _wrapped(result)


def _unwrapped(value: Any) -> Any:
    """Replace simulated arrays by the NumPy arrays that they hold, also inside tuples and lists."""
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
