"""Multiply matrices on a GPU: float32, or rounded to 16 bits.

[Note: products in 16 bits] Operands are rounded to bfloat16 or float16, to nearest even, by the library's own kernels;
the GPU multiplies those and adds in float32, into float32. So what is stored stays in float32, and what a product
gives is the same wherever its operands came from.
"""

from __future__ import annotations

from contextvars import ContextVar
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpizero.types import Array

#: Kernels that round to a dtype of 16 bits and widen from it, and CUDA's number for the dtype.
SIXTEEN_BITS = {"float16": ("to_float16", "from_float16", 2), "bfloat16": ("to_bfloat16", "from_bfloat16", 14)}


class Multiplier(Protocol):
    """Multiply matrices rounded to 16 bits: a :class:`mpizero.kernels.device.Device`."""

    def multiply(self, a: HalfPrecisionArray, b: HalfPrecisionArray, out: Array, batches: Batches) -> None:
        """Write the products of matrices to ``out``, float32; ``batches`` say how the three lie."""


class HalfPrecisionArray:
    """Hold matrices of a GPU, rounded to 16 bits for products: an array whose last two axes are those of a matrix.

    Parameters
    ----------
    bits : Array
        The rounded elements, as uint16.
    device : Multiplier
        Where they lie.
    dtype : str
        What they are rounded to, a key of :data:`SIXTEEN_BITS`.
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
    """Describe the places of matrices of one size in memory, one after the other, in elements.

    Attributes
    ----------
    transposed : bool
        Whether their columns are contiguous instead of their rows.
    leading : int
        From one row (or, transposed, column) to the next.
    step : int
        From one matrix to the next; 0 for a single one.
    number : int
        Of matrices.
    """

    transposed: bool
    leading: int
    step: int
    number: int

    @classmethod
    def of(cls, x: Array) -> MatrixBatch | None:
        """Describe the last two axes of ``x``; None where no such numbers do."""
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


#: How the matrices of two operands and of the result lie.
Batches = tuple[MatrixBatch, MatrixBatch, MatrixBatch]


def widened(x: HalfPrecisionArray) -> Array:
    """Return the elements in float32."""
    from mpizero.kernels import cuda

    xp = _library(x.bits)
    wide = xp.empty(x.bits.size, np.float32)
    getattr(cuda.copy, SIXTEEN_BITS[x.dtype][1])(xp.ascontiguousarray(x.bits).reshape(-1), wide)
    shaped: Array = wide.reshape(x.bits.shape)
    return shaped


#: The GPU and the dtype that products of this thread round their operands to; None leaves them.
PRODUCT_DTYPE: ContextVar[tuple[Multiplier, str] | None] = ContextVar("products", default=None)


def operand(x: Array) -> Array | HalfPrecisionArray:
    """Return what :func:`multiply` shall take for ``x``: itself, or :class:`HalfPrecisionArray` where asked.

    [Note: products in 16 bits]. ``x`` has a matrix in its last two axes.
    """
    asked = PRODUCT_DTYPE.get()
    return x if asked is None else _halved(x, *asked)


def multiply(a: Array | HalfPrecisionArray, b: Array | HalfPrecisionArray, out: Array) -> None:
    """Write the products of the matrices of two operands to ``out``, float32 on a GPU.

    All have the same leading axes, and both operands come from :func:`operand`, or both do not.

    Raises
    ------
    ValueError
        If an operand was cut in such a way that its matrices are no :class:`MatrixBatch`.
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
    """Compute the product of two float32 matrices on a GPU: [Note: products in 16 bits]."""
    if out is None:
        out = _library(a).empty((a.shape[0], b.shape[1]), a.dtype)
    multiply(operand(a), operand(b), out)
    return out


def _halved(x: Array, device: Multiplier, dtype: str) -> HalfPrecisionArray:
    """Round an array, in the order in which its matrices lie in memory."""
    from mpizero.kernels import cuda

    xp, turned = _library(x), x.swapaxes(-1, -2)
    transposed = not x.flags.c_contiguous and turned.flags.c_contiguous
    flat = xp.ascontiguousarray(turned if transposed else x).reshape(-1)
    bits = xp.empty(flat.size, np.uint16)
    getattr(cuda.copy, SIXTEEN_BITS[dtype][0])(flat, bits)
    shaped = bits.reshape(turned.shape if transposed else x.shape)
    return HalfPrecisionArray(shaped.swapaxes(-1, -2) if transposed else shaped, device, dtype)


def _library(array: Any) -> Any:
    """Return the array library of an array of a GPU."""
    from mpizero.kernels import namespace  # which imports this module

    return namespace(array)
