"""Gather and scatter ranges, convert to and from 16-bit formats (stored as uint16), and scale, on the GPU."""

from __future__ import annotations

from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.kernels.formulas import copy as formulas
from mpizero.types import Array

_to_bfloat16 = formulas.to_bfloat16
_from_bfloat16 = formulas.from_bfloat16
_to_float16 = formulas.to_float16
_from_float16 = formulas.from_float16


@kernel("void(const T[::1], const i8[::1], const i8[::1], T[::1])")
def pack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    """Write ``source[starts[k] : starts[k] + sizes[k]]`` to ``target``, one range after the other."""
    place = 0
    for k in range(starts.size):
        for i in range(cuda.grid(1), sizes[k], cuda.gridsize(1)):
            target[place + i] = source[starts[k] + i]
        place += sizes[k]


@kernel("void(const T[::1], const i8[::1], const i8[::1], T[::1])")
def unpack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    """Write consecutive parts of ``source`` to ``target[starts[k] : starts[k] + sizes[k]]``; undoes ``pack``."""
    place = 0
    for k in range(starts.size):
        for i in range(cuda.grid(1), sizes[k], cuda.gridsize(1)):
            target[starts[k] + i] = source[place + i]
        place += sizes[k]


@kernel("void(const f4[::1], u2[::1])")
def to_bfloat16(x: Array, out: Array) -> None:
    """Round to bfloat16, to nearest even; NaN stays NaN."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = _to_bfloat16(x[i])


@kernel("void(const u2[::1], f4[::1])")
def from_bfloat16(x: Array, out: Array) -> None:
    """Convert bfloat16 to float32, which is exact."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = _from_bfloat16(x[i])


@kernel("void(const f4[::1], u2[::1])")
def to_float16(x: Array, out: Array) -> None:
    """Round to float16, to nearest even, as hardware does."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = _to_float16(x[i])


@kernel("void(const u2[::1], f4[::1])")
def from_float16(x: Array, out: Array) -> None:
    """Convert float16 to float32, which is exact."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = _from_float16(x[i])


@kernel("void(T[::1], const T[::1])")
def scale(x: Array, factor: Array) -> None:
    """Multiply ``x`` by ``factor[0]``."""
    by = factor[0]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] = x[i] * by
