"""Multiply matrices on a GPU, in float32 or with operands rounded to 16 bits.

[Note: products in 16 bits] mpizero's kernels round the operands of a product to bfloat16 or float16, to nearest even.
The GPU multiplies the rounded operands, and adds the products in float32 to a float32 result. So all stored arrays stay
in float32.

[Note: aligned products] cuBLAS chooses among its kernels by shapes, and may choose by addresses, too. A gradient lies
at another address if a rank is alone, and parameters do if they are gathered unit by unit, but bits must be the same.
So cuBLAS gets arrays at multiples of ``ALIGNED`` bytes only: others are copied, which takes far less than a product.
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


#: The largest alignment that cuBLAS asks for; memory that CuPy allocates begins at multiples of 512 bytes.
ALIGNED = 256


class Multiplier(Protocol):
    """Define the interface of a GPU for products of 16-bit matrices; :class:`mpizero.kernels.device.Device` has it."""

    def multiply(self, a: HalfPrecisionArray, b: HalfPrecisionArray, out: Array, batches: Batches) -> None:
        """Write the products of two batches of matrices, ``a @ b``, to the float32 array ``out``.

        ``batches`` describes the memory layouts of ``a``, ``b`` and ``out``.
        """


class HalfPrecisionArray:
    """Hold a GPU array whose elements are rounded to 16 bits for products; its last two axes are matrices.

    Parameters
    ----------
    bits : Array
        The bits of the rounded elements, as uint16.
    device : Multiplier
        The GPU on which the array is.
    dtype : str
        The dtype to which the elements are rounded: "float16" or "bfloat16".
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
    """Describe the layout in memory of equally spaced matrices of one size, as cuBLAS needs it.

    Attributes
    ----------
    transposed : bool
        Whether the columns of a matrix are contiguous instead of its rows.
    leading : int
        Number of elements from the start of a row (if ``transposed``, of a column) to the start of the next.
    step : int
        Number of elements from the start of a matrix to the start of the next; 0 for a single matrix.
    number : int
        Number of matrices.
    """

    transposed: bool
    leading: int
    step: int
    number: int

    @classmethod
    def of(cls, x: Array) -> MatrixBatch | None:
        """Return the layout of the matrices in the last two axes of ``x``.

        Return None if the matrices are not equally spaced, or neither their rows nor their columns are contiguous.
        """
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
    """Return a float32 GPU array with the values of ``x``, in the same shape."""
    from mpizero.kernels import cuda

    xp = _library(x.bits)
    wide = xp.empty(x.bits.size, np.float32)
    getattr(cuda.copy, SIXTEEN_BITS[x.dtype][1])(xp.ascontiguousarray(x.bits).reshape(-1), wide)
    shaped: Array = wide.reshape(x.bits.shape)
    return shaped


#: The GPU, and the dtype to which the operands of products in this thread are rounded; None if they are not rounded.
PRODUCT_DTYPE: ContextVar[tuple[Multiplier, str] | None] = ContextVar("products", default=None)


def operand(x: Array) -> Array | HalfPrecisionArray:
    """Return ``x`` as an operand for :func:`multiply`: rounded to 16 bits, or ``x`` itself.

    It is rounded where this thread is in the context of :meth:`mpizero.kernels.device.Device.multiplying_in`. The last
    two axes of ``x`` are matrices. See [Note: products in 16 bits].
    """
    asked = PRODUCT_DTYPE.get()
    return x if asked is None else _halved(x, *asked)


def multiply(a: Array | HalfPrecisionArray, b: Array | HalfPrecisionArray, out: Array) -> None:
    """Write ``a @ b`` to ``out``, a float32 GPU array, for all pairs of matrices in their last two axes.

    The other axes of the three arrays have the same lengths. Either both operands come from :func:`operand`, or
    neither.

    Raises
    ------
    ValueError
        If an operand of 16 bits is a view for which :meth:`MatrixBatch.of` returns None.
    """
    xp, target = _library(out), out
    place = MatrixBatch.of(out)
    if not _is_aligned(out) or (isinstance(a, HalfPrecisionArray) and (place is None or place.transposed)):
        target = xp.empty(out.shape, out.dtype)
        place = MatrixBatch.of(target)
    if not (isinstance(a, HalfPrecisionArray) and isinstance(b, HalfPrecisionArray)):
        xp.matmul(*(x if _is_aligned(x) else xp.array(x, order="K") for x in (a, b)), out=target)
    elif not a.bits.size or not b.bits.size:
        target[...] = 0
    else:
        left, right = MatrixBatch.of(a.bits), MatrixBatch.of(b.bits)
        if left is None or right is None or place is None:
            raise ValueError(f"the matrices of an operand do not lie one after the other: {left}, {right}")
        a.device.multiply(a, b, target, (left, right, place))
    if target is not out:
        xp.copyto(out, target)


def _is_aligned(x: Any) -> bool:
    """Tell whether a GPU array begins where cuBLAS chooses its kernel by shapes alone; see [Note: aligned products]."""
    return bool(x.__cuda_array_interface__["data"][0] % ALIGNED == 0)


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return the product of two float32 matrices on a GPU, in ``out`` if it is given.

    The operands are rounded to 16 bits where this thread is in the context of
    :meth:`mpizero.kernels.device.Device.multiplying_in`.
    """
    if out is None:
        out = _library(a).empty((a.shape[0], b.shape[1]), a.dtype)
    multiply(operand(a), operand(b), out)
    return out


def _halved(x: Array, device: Multiplier, dtype: str) -> HalfPrecisionArray:
    """Return ``x`` rounded to 16 bits; if its matrices are transposed in memory, those of the result are too."""
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
