"""Define an array type whose matrix products are not computed, so that trial runs of blocks take little time."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.types import Array


class FakeArray(np.ndarray):
    """Represent an array that holds zeros or is never read: matrix products with it return zeros at once.

    All other operations work as on a plain array, and return plain arrays. A product whose ``out`` is a FakeArray
    writes nothing, so that the memory of ``out`` is never touched.
    """

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        """Return zeros for a matrix product, and compute all other operations as NumPy does. Not collective."""
        given = tuple(_plain(value) for value in inputs)
        if ufunc is np.matmul and method == "__call__" and not options and (shape := _shape(*given)) is not None:
            return _stored(shape, np.result_type(*given), *out)
        if out:
            options["out"] = tuple(_plain(value) for value in out)
        found = getattr(ufunc, method)(*given, **options)
        return out[0] if len(out) == 1 else found


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, FakeArray) else value


def _shape(a: Any, b: Any) -> tuple[int, ...] | None:
    """Return the shape of the matrix product ``a @ b``; None if NumPy is to compute it or to raise an error."""
    matrices = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and min(a.ndim, b.ndim) >= 2
    if not matrices or a.shape[-1] != b.shape[-2]:
        return None
    return (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])


def _stored(shape: tuple[int, ...], dtype: Any, out: Array | None = None) -> Array:
    if out is None:
        return np.zeros(shape, dtype)
    if out.shape != shape:
        raise ValueError(f"a product of shape {shape} cannot be stored in an array of shape {out.shape}")
    if not isinstance(out, FakeArray):
        out[...] = 0
    return out
