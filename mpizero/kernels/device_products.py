"""Multiply matrices on a GPU, in float32 or with operands rounded to 16 bits.

[Note: products in 16 bits] mpizero's own kernels round the operands of a product to bfloat16 or float16, to nearest
even. The GPU multiplies the rounded operands, and adds in float32 to a float32 result. So all stored arrays stay in
float32.
"""

from __future__ import annotations

from contextvars import ContextVar
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpizero.types import Array

#: For each dtype of 16 bits, the kernels that round to it and convert from it, and CUDA's number for the dtype.
SIXTEEN_BITS = {"float16": ("to_float16", "from_float16", 2), "bfloat16": ("to_bfloat16", "from_bfloat16", 14)}


class Multiplier(Protocol):
    """Define what is needed to multiply 16-bit matrices; :class:`mpizero.kernels.device.Device` implements it."""

    def multiply(self, a: HalfPrecisionArray, b: HalfPrecisionArray, out: Array, batches: Batches) -> None:
        """Write the products of two batches of matrices to ``out``, float32; ``batches`` describes their layouts."""


class HalfPrecisionArray:
    """Hold an array of matrices (its last two axes) on a GPU, rounded to 16 bits for products.

    Parameters
    ----------
    bits : Array
        The rounded elements, as uint16.
    device : Multiplier
        The GPU that holds them.
    dtype : str
        The dtype that they are rounded to, a key of :data:`SIXTEEN_BITS`.
    """

    __slots__ = ("bits", "device", "dtype")

    def __init__(self, bits: Array, device: Multiplier, dtype: str) -> None:
        self.bits, self.device, self.dtype = bits, device, dtype

    def __getitem__(self, key: Any) -> HalfPrecisionArray:
        return HalfPrecisionArray(self.bits[key], self.device, self.dtype)

    def swapaxes(self, first: int, second: int) -> HalfPrecisionArray:
        """Return a view with two axes interchanged."""
        return HalfPrecisionArray(self.bits.swapaxes(first, second), self.device, self.dtype)


class MatrixBatch(NamedTuple):
    """Describe the layout in memory of equally spaced matrices of one size, in elements, as cuBLAS takes it.

    Attributes
    ----------
    transposed : bool
        Whether the columns of a matrix are contiguous instead of its rows.
    leading : int
        Distance from one row (or, if transposed, column) to the next.
    step : int
        Distance from one matrix to the next; 0 for a single matrix.
    number : int
        Number of matrices.
    """

    transposed: bool
    leading: int
    step: int
    number: int

    @classmethod
    def of(cls, x: Array) -> MatrixBatch | None:
        """Describe the matrices in the last two axes of ``x``; return None if they are not equally spaced."""
        strides = [stride // x.itemsize for stride in x.strides]
        steps = [(stride, size) for stride, size in zip(strides[:-2], x.shape[:-2], strict=True) if size != 1]
        if any(outer != step * size for (outer, _), (step, size) in pairwise(steps)):
            return None
        number, step = prod(x.shape[:-2]), steps[-1][0] if steps else 0
        (rows, columns), (down, along) = x.shape[-2:], strides[-2:]
        down, along = down if rows > 1 else columns, along if columns > 1 else rows  # of one row, none comes next
        if step < 0 or (step == 0 and number > 1):
            return None
        if (columns == 1 or along == 1) and down >= columns:
            return cls(False, down, step, number)
        if (rows == 1 or down == 1) and along >= rows:
            return cls(True, along, step, number)
        return None


#: The layouts of the matrices of the two operands and of the result.
Batches = tuple[MatrixBatch, MatrixBatch, MatrixBatch]


def widened(x: HalfPrecisionArray) -> Array:
    """Convert the elements to float32."""
    from mpizero.kernels import cuda

    xp = _library(x.bits)
    wide = xp.empty(x.bits.size, np.float32)
    getattr(cuda.copy, SIXTEEN_BITS[x.dtype][1])(xp.ascontiguousarray(x.bits).reshape(-1), wide)
    shaped: Array = wide.reshape(x.bits.shape)
    return shaped


#: The GPU, and the dtype to which the operands of products in this thread are rounded; None if they are not rounded.
PRODUCT_DTYPE: ContextVar[tuple[Multiplier, str] | None] = ContextVar("products", default=None)


def operand(x: Array) -> Array | HalfPrecisionArray:
    """Return ``x`` in the form that :func:`multiply` takes: rounded to 16 bits if set for this thread, else itself.

    ``x`` has a matrix in its last two axes. See [Note: products in 16 bits].
    """
    asked = PRODUCT_DTYPE.get()
    return x if asked is None else _halved(x, *asked)


def multiply(a: Array | HalfPrecisionArray, b: Array | HalfPrecisionArray, out: Array) -> None:
    """Write ``a @ b`` to ``out``, a float32 GPU array: one product for each pair of matrices in the last two axes.

    All three have the same leading axes. Either both operands come from :func:`operand`, or neither.

    Raises
    ------
    ValueError
        If an operand is a view whose matrices are not equally spaced in memory.
    """
    xp, target = _library(out), out
    if not (isinstance(a, HalfPrecisionArray) and isinstance(b, HalfPrecisionArray)):
        xp.matmul(a, b, out=out)
        return
    if not a.bits.size or not b.bits.size:
        out[...] = 0
        return
    left, right, place = MatrixBatch.of(a.bits), MatrixBatch.of(b.bits), MatrixBatch.of(out)
    if place is None or place.transposed:
        target = xp.empty(out.shape, np.float32)
        place = MatrixBatch.of(target)
    if left is None or right is None or place is None:
        raise ValueError(f"the matrices of an operand do not lie one after the other: {left}, {right}")
    a.device.multiply(a, b, target, (left, right, place))
    if target is not out:
        xp.copyto(out, target)


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Compute the product of two float32 matrices on a GPU; see [Note: products in 16 bits]."""
    if out is None:
        out = _library(a).empty((a.shape[0], b.shape[1]), a.dtype)
    multiply(operand(a), operand(b), out)
    return out


def _halved(x: Array, device: Multiplier, dtype: str) -> HalfPrecisionArray:
    """Round an array to 16 bits, keeping the order of its elements in memory (also if matrices are transposed)."""
    from mpizero.kernels import cuda

    xp, turned = _library(x), x.swapaxes(-1, -2)
    transposed = not x.flags.c_contiguous and turned.flags.c_contiguous
    flat = xp.ascontiguousarray(turned if transposed else x).reshape(-1)
    bits = xp.empty(flat.size, np.uint16)
    getattr(cuda.copy, SIXTEEN_BITS[dtype][0])(flat, bits)
    shaped = bits.reshape(turned.shape if transposed else x.shape)
    return HalfPrecisionArray(shaped.swapaxes(-1, -2) if transposed else shaped, device, dtype)


def _library(array: Any) -> Any:
    """Return the array library of a GPU array."""
    from mpizero.kernels import namespace  # which imports this module

    return namespace(array)
