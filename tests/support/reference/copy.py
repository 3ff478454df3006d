"""Pack and unpack ranges, convert to and from 16-bit formats, and scale, in NumPy, as a reference for the kernels.

A number is rounded to bfloat16 by comparing its distances to the two nearest bfloat16 numbers.
"""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def _indices(starts: Array, sizes: Array) -> Array:
    ranges = [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return np.concatenate([np.empty(0, np.int64), *ranges])


def pack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    """Write the ranges ``source[starts[k] : starts[k] + sizes[k]]`` to ``target``, one after the other."""
    index = _indices(starts, sizes)
    target[: index.size] = source[index]


def unpack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    """Write the elements of ``source``, in order, to the ranges ``target[starts[k] : starts[k] + sizes[k]]``.

    This undoes :func:`pack`.
    """
    index = _indices(starts, sizes)
    target[index] = source[: index.size]


def split_columns(matrix: Array, ranges: Array, parts: Array) -> None:
    """Copy ranges of columns of ``matrix`` to matrices with fewer columns, which lie one after the other in ``parts``.

    Row k of ``ranges`` is (start, size, place, width): the columns from ``start`` on, as many as ``size``, are columns
    of a matrix of ``width`` columns; its element in the first row and the first of these columns is ``parts[place]``.
    """
    rows = np.arange(matrix.shape[0])[:, None]
    for start, size, place, width in ranges.tolist():
        columns = place + rows * width + np.arange(size)
        parts[columns] = matrix[:, start : start + size]


def join_columns(parts: Array, ranges: Array, matrix: Array) -> None:
    """Copy what :func:`split_columns` has written to ``parts`` back to ``matrix``."""
    rows = np.arange(matrix.shape[0])[:, None]
    for start, size, place, width in ranges.tolist():
        columns = place + rows * width + np.arange(size)
        matrix[:, start : start + size] = parts[columns]


def to_bfloat16(x: Array, out: Array) -> None:
    """Round ``x`` to bfloat16, to nearest even, and write the bits to ``out``; NaN stays NaN."""
    below = x.view(np.uint32) >> np.uint32(16)
    # In float64 the neighbour above the largest bfloat16 is 2**128, so rounding to infinity needs no special case.
    low, high = _magnitude(below), _magnitude(below + np.uint32(1))
    with np.errstate(invalid="ignore"):
        from_low, to_high = np.abs(x.astype(np.float64)) - low, high - np.abs(x.astype(np.float64))
    up = (from_low > to_high) | ((from_low == to_high) & (below % 2 == 1))
    rounded = np.where(np.isinf(x), below, below + up)
    out[:] = np.where(np.isnan(x), below | np.uint32(0x40), rounded).astype(np.uint16)


def _magnitude(bits: Array) -> Array:
    exponent, mantissa = (bits >> np.uint32(7) & np.uint32(0xFF)).astype(np.int64), bits & np.uint32(0x7F)
    fraction = np.where(exponent == 0, mantissa / 128.0, 1.0 + mantissa / 128.0)
    magnitude: Array = np.ldexp(fraction, np.maximum(exponent, 1) - 127)
    return magnitude


def from_bfloat16(x: Array, out: Array) -> None:
    """Convert the bits of bfloat16 numbers to float32, which is exact, and write them to ``out``."""
    out.view(np.uint32)[:] = x.astype(np.uint32) << np.uint32(16)


def to_float16(x: Array, out: Array) -> None:
    """Round ``x`` to float16, to nearest even, and write the bits to ``out``; values too large become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        out[:] = x.astype(np.float16).view(np.uint16)


def from_float16(x: Array, out: Array) -> None:
    """Convert the bits of float16 numbers to float32, which is exact, and write them to ``out``."""
    with np.errstate(invalid="ignore"):
        out[:] = x.view(np.float16)


def scale(x: Array, factor: Array) -> None:
    """Multiply all elements of ``x`` by ``factor[0]``, in place."""
    x *= factor[0]
