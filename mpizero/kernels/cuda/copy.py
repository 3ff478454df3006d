"""Pack and unpack ranges of arrays, convert to and from 16-bit formats, and scale, on the GPU.

Numbers of 16 bits are stored as uint16, because NumPy has no bfloat16.
"""

from __future__ import annotations

from mpizero.kernels import formulas
from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.types import Array

_to_bfloat16 = formulas.to_bfloat16
_from_bfloat16 = formulas.from_bfloat16
_to_float16 = formulas.to_float16
_from_float16 = formulas.from_float16


@kernel("void(const T[::1], const i8[::1], const i8[::1], T[::1])")
def pack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    """Write the ranges ``source[starts[k] : starts[k] + sizes[k]]`` to ``target``, one after the other."""
    place = 0
    for k in range(starts.size):
        for i in range(cuda.grid(1), sizes[k], cuda.gridsize(1)):
            target[place + i] = source[starts[k] + i]
        place += sizes[k]


@kernel("void(const T[::1], const i8[::1], const i8[::1], T[::1])")
def unpack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    """Write the elements of ``source``, in order, to the ranges ``target[starts[k] : starts[k] + sizes[k]]``.

    This undoes :func:`pack`.
    """
    place = 0
    for k in range(starts.size):
        for i in range(cuda.grid(1), sizes[k], cuda.gridsize(1)):
            target[starts[k] + i] = source[place + i]
        place += sizes[k]


@kernel("void(const T[:,::1], const i8[:,::1], T[::1])")
def split_columns(matrix: Array, ranges: Array, parts: Array) -> None:
    """Copy ranges of columns of ``matrix`` to matrices with fewer columns, which lie one after the other in ``parts``.

    Row k of ``ranges`` is (start, size, place, width): the columns from ``start`` on, as many as ``size``, are columns
    of a matrix of ``width`` columns; its element in the first row and the first of these columns is ``parts[place]``.
    """
    for k in range(ranges.shape[0]):
        start, size, first, width = ranges[k, 0], ranges[k, 1], ranges[k, 2], ranges[k, 3]
        for i in range(cuda.grid(1), matrix.shape[0] * size, cuda.gridsize(1)):
            r, column = i // size, i % size
            parts[first + r * width + column] = matrix[r, start + column]


@kernel("void(const T[::1], const i8[:,::1], T[:,::1])")
def join_columns(parts: Array, ranges: Array, matrix: Array) -> None:
    """Copy what :func:`split_columns` has written to ``parts`` back to ``matrix``."""
    for k in range(ranges.shape[0]):
        start, size, first, width = ranges[k, 0], ranges[k, 1], ranges[k, 2], ranges[k, 3]
        for i in range(cuda.grid(1), matrix.shape[0] * size, cuda.gridsize(1)):
            r, column = i // size, i % size
            matrix[r, start + column] = parts[first + r * width + column]


@kernel("void(const f4[::1], u2[::1])")
def to_bfloat16(x: Array, out: Array) -> None:
    """Round ``x`` to bfloat16, to nearest even, and write the bits to ``out``; NaN stays NaN."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = _to_bfloat16(x[i])


@kernel("void(const u2[::1], f4[::1])")
def from_bfloat16(x: Array, out: Array) -> None:
    """Convert the bits of bfloat16 numbers to float32, which is exact, and write them to ``out``."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = _from_bfloat16(x[i])


@kernel("void(const f4[::1], u2[::1])")
def to_float16(x: Array, out: Array) -> None:
    """Round ``x`` to float16, to nearest even, and write the bits to ``out``; values too large become infinite."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = _to_float16(x[i])


@kernel("void(const u2[::1], f4[::1])")
def from_float16(x: Array, out: Array) -> None:
    """Convert the bits of float16 numbers to float32, which is exact, and write them to ``out``."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = _from_float16(x[i])


@kernel("void(T[::1], const T[::1])")
def scale(x: Array, factor: Array) -> None:
    """Multiply all elements of ``x`` by ``factor[0]``, in place."""
    by = factor[0]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] = x[i] * by
