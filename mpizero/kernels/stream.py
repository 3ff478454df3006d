"""Provide kernels that do little but read and write memory, to measure the memory bandwidth.

An array that is both read and written is updated in place, as in mpizero's other kernels. The arithmetic is at most one
addition per element, far less than what a core can do while it waits for the element.
"""

from __future__ import annotations

from mpizero.kernels.compile import kernel
from mpizero.types import Array


@kernel("i8(const i8[::1])")
def read(x: Array) -> int:
    """Read one array and return the exclusive or of its integers, which can be vectorized (a sum of floats cannot)."""
    total = 0
    for i in range(x.size):
        total ^= x[i]
    return total


@kernel("void(const T[::1], T[::1])")
def copy(x: Array, out: Array) -> None:
    """Read one array and write another: copy ``x`` to ``out``."""
    for i in range(out.size):
        out[i] = x[i]


@kernel("void(const T[::1], const T[::1], T[::1])")
def add_two(a: Array, b: Array, out: Array) -> None:
    """Read two arrays and write another: write ``a + b`` to ``out``."""
    for i in range(out.size):
        out[i] = a[i] + b[i]


@kernel("void(const T[::1], const T[::1], const T[::1], const T[::1], T[::1])")
def add_four(a: Array, b: Array, c: Array, d: Array, out: Array) -> None:
    """Read four arrays and write another: write ``(a + b) + (c + d)`` to ``out``."""
    for i in range(out.size):
        out[i] = (a[i] + b[i]) + (c[i] + d[i])


@kernel("void(const T[::1], T[::1], T[::1], T[::1])")
def update(g: Array, w: Array, m: Array, v: Array) -> None:
    """Read four arrays and write three of them: add ``g`` to ``w``, ``m`` and ``v``, as an optimizer's step does."""
    for i in range(w.size):
        w[i] = w[i] + g[i]
        m[i] = m[i] + g[i]
        v[i] = v[i] + g[i]


@kernel("void(const T[::1], const T[::1], T[::1], T[::1], T[::1])")
def add_and_update(a: Array, b: Array, w: Array, m: Array, v: Array) -> None:
    """Read five arrays and write three of them: add ``a`` to ``w`` and ``v``, and ``b`` to ``m``."""
    for i in range(w.size):
        w[i] = w[i] + a[i]
        m[i] = m[i] + b[i]
        v[i] = v[i] + a[i]
