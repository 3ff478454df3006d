"""Provide kernels that do little but read and write memory, to measure the memory bandwidth.

Arrays that are read and written are updated in place, as mpizero's other kernels do. The arithmetic is one addition per
array, far less than what a core can do in the time of a load.
"""

from __future__ import annotations

from mpizero.kernels.compile import kernel
from mpizero.types import Array


@kernel("i8(const i8[::1])")
def read(x: Array) -> int:
    """Read one array; integers are used because a sum of floats has a fixed order and cannot be vectorized."""
    total = 0
    for i in range(x.size):
        total ^= x[i]
    return total


@kernel("void(const T[::1], T[::1])")
def copy(x: Array, out: Array) -> None:
    """Read one array and write another."""
    for i in range(out.size):
        out[i] = x[i]


@kernel("void(const T[::1], const T[::1], T[::1])")
def add_two(a: Array, b: Array, out: Array) -> None:
    """Read two arrays and write another."""
    for i in range(out.size):
        out[i] = a[i] + b[i]


@kernel("void(const T[::1], const T[::1], const T[::1], const T[::1], T[::1])")
def add_four(a: Array, b: Array, c: Array, d: Array, out: Array) -> None:
    """Read four arrays and write another."""
    for i in range(out.size):
        out[i] = (a[i] + b[i]) + (c[i] + d[i])


@kernel("void(const T[::1], T[::1], T[::1], T[::1])")
def update(g: Array, w: Array, m: Array, v: Array) -> None:
    """Read four arrays and write three of them."""
    for i in range(w.size):
        w[i] = w[i] + g[i]
        m[i] = m[i] + g[i]
        v[i] = v[i] + g[i]


@kernel("void(const T[::1], const T[::1], T[::1], T[::1], T[::1])")
def add_and_update(a: Array, b: Array, w: Array, m: Array, v: Array) -> None:
    """Read five arrays and write three of them."""
    for i in range(w.size):
        w[i] = w[i] + a[i]
        m[i] = m[i] + b[i]
        v[i] = v[i] + a[i]
