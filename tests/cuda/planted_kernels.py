"""Kernels as they should not be, and one as it should."""

from __future__ import annotations

from mpizero.kernels.cuda.launch import cuda, kernel


@kernel("void(const T[::1], T[::1])")
def good(x, y):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = x[i] * x[i]


@kernel("void(const T[::1], T[::1])")
def mixed(x, y):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = x[i] * 0.1 + 0.3  # bare literals are doubles


@kernel("void(const T[::1], T[::1])")
def contractible(x, y):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = x[i] * x[i] + y[i]


@kernel("void(const T[::1], T[::1])")
def impossible(x, y):
    y[0] = x.nothing


@kernel("void(u8, T[::1])")
def keyed(key, y):
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        y[i] = key + i
