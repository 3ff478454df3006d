"""Multiply, sum and check arrays of NumPy or CuPy for layers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero.errors import DataError
from mpizero.kernels import gpu
from mpizero.kernels import matmul as host_products
from mpizero.types import Array

#: ``dtype.kind`` of real numbers, and ``dtype.char`` of the types that kernels take.
_REAL, _FLOATS = frozenset("biuf"), frozenset("fd")


def namespace(array: Any) -> Any:
    """Return the array library of ``array``: NumPy, or the package its type comes from (CuPy)."""
    return np if isinstance(array, np.ndarray) else kernels.namespace(array)


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return the product of two matrices, written to ``out`` if that is given.

    NumPy arrays are multiplied by :mod:`mpizero.kernels.matmul`, arrays on a GPU by
    :mod:`mpizero.kernels.gpu`.
    """
    if isinstance(a, np.ndarray):
        return host_products.matmul(a, b, out)
    return gpu.matmul(a, b, out)


def operand(x: Array) -> Any:
    """Return ``x`` in the form that :func:`multiply` takes: ``x`` itself, or a copy in 16 bits.

    The copy is made on a GPU whose matrix products are set to 16 bits. Slices of a returned operand, and the operand
    with its last two axes swapped, can also be passed to :func:`multiply`.
    """
    return x if isinstance(x, np.ndarray) else gpu.operand(x)


def multiply(a: Any, b: Any, out: Array) -> None:
    """Write the batched matrix product ``a @ b``, over the last two axes, to ``out``.

    ``a`` and ``b`` were returned by :func:`operand`.
    """
    if isinstance(out, np.ndarray):
        np.matmul(a, b, out=out)
    else:
        gpu.multiply(a, b, out)


def sum_rows(dy: Array, out: Array) -> None:
    """Write the sum of a matrix's rows to ``out``, for the gradient of a bias.

    On the host the rows are added in ascending order. On a GPU that order would need one thread for each column and
    leave most of the GPU idle. There CuPy adds the rows, in another order, which is the same in every call.
    """
    xp = namespace(dy)
    if xp is np:
        rows = np.ascontiguousarray(dy)
        kernels.backend(rows).activation.column_sums(rows, out)
    else:
        xp.sum(dy, axis=0, out=out)


def vector(like: Array, value: float) -> Array:
    """Return an array of one element, ``value``, in ``like``'s dtype: the form in which kernels take scalars.

    A Python float would make a kernel compute in float64. NumPy arrays are cached, and cannot be written to.
    """
    if isinstance(like, np.ndarray):
        return _host_vector(value, like.dtype)
    return namespace(like).full(1, value, like.dtype)


@lru_cache(maxsize=256)
def _host_vector(value: float, dtype: np.dtype[Any]) -> Array:
    result = np.full(1, value, dtype)
    result.setflags(write=False)
    return result


def known(dx: Array | None) -> Array:
    """Return ``dx``, the input gradient that a layer returned, and assert for type checkers that it is not None."""
    assert dx is not None
    return dx


def as_rows(x: Array, features: int, dtype: np.dtype[Any], where: str) -> Array:
    """Return ``x`` as a contiguous matrix of ``features`` columns and of ``dtype``, without a copy if possible.

    The last axis of ``x`` must have ``features`` elements. ``where`` is the layer's name for error messages.
    """
    require_numbers(x, where)
    if x.shape[-1:] != (features,):
        raise DataError(f"{where}: takes {features} features on the last axis, the input has shape {tuple(x.shape)}")
    rows = x.reshape(-1, features) if x.size else x.reshape(int(np.prod(x.shape[:-1])), features)
    matrix: Array = namespace(x).ascontiguousarray(rows, dtype=dtype)
    return matrix


def require_array(x: Any, where: str, what: str = "input") -> None:
    """Raise :class:`DataError` if ``x`` is no array of NumPy or CuPy.

    ``where`` and ``what`` name the layer and the array in the message.
    """
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise DataError(f"{where}: takes arrays, the {what} is of type {type(x).__name__}; give numpy.asarray of it")


def require_numbers(x: Any, where: str, what: str = "input") -> None:
    """Raise :class:`DataError` if ``x`` is no array of real numbers (float, integer or bool).

    ``where`` and ``what`` name the layer and the array in the message.
    """
    if getattr(getattr(x, "dtype", None), "kind", "") not in _REAL:
        require_array(x, where, what)
        advice = "; give its parts as real numbers" if x.dtype.kind == "c" else ""
        raise DataError(f"{where}: takes real numbers, the {what} has dtype {x.dtype}{advice}")


def require_floats(x: Any, where: str, what: str = "input") -> None:
    """Raise :class:`DataError` if ``x`` is no array of float32 or float64, the types that kernels take.

    ``where`` and ``what`` name the layer and the array in the message.
    """
    if getattr(getattr(x, "dtype", None), "char", "") not in _FLOATS:
        require_array(x, where, what)
        advice = "; cast it with astype(numpy.float32)" if x.dtype.kind in "biuf" else ""
        raise DataError(f"{where}: takes float32 or float64, the {what} has dtype {x.dtype}{advice}")


def require_sequences(x: Any, features: int | None, where: str) -> None:
    """Raise :class:`DataError` if ``x`` has no shape (samples, length, features).

    ``features`` None allows any number. ``where`` is the layer's name in the message.
    """
    require_array(x, where)
    if x.ndim != 3 or features not in (None, x.shape[2]):
        shown = "features" if features is None else features
        raise DataError(f"{where}: takes (samples, length, {shown}), the input has shape {tuple(x.shape)}")


def as_ids(x: Array, bound: int, where: str) -> Array:
    """Return integer ids as contiguous int64; raise :class:`DataError` if one is not in [0, ``bound``).

    ``where`` is the layer's name in the message.
    """
    require_array(x, where)
    if x.dtype.kind not in "iu":
        raise DataError(f"{where}: takes integer ids, the input has dtype {x.dtype}; cast it with astype(numpy.int64)")
    if x.size and (int(x.min()) < 0 or int(x.max()) >= bound):
        raise DataError(
            f"{where}: takes ids from 0 to {bound - 1}, the input has ids from {int(x.min())} to {int(x.max())}; "
            "make the vocabulary larger or map the ids into it"
        )
    ids: Array = namespace(x).ascontiguousarray(x, dtype=np.int64)
    return ids
