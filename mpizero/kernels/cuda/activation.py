"""Compute activation functions, bias additions and column sums on the GPU: one thread per element or column."""

from __future__ import annotations

from numba import cuda

from mpizero.kernels.cuda.launch import kernel
from mpizero.kernels.formulas.activation import gelu as gelu_value
from mpizero.kernels.formulas.activation import (
    gelu_gradient,
    relu_gradient,
    silu_gradient,
    tanh_gradient,
    tanh_value,
)
from mpizero.kernels.formulas.activation import relu as relu_value
from mpizero.kernels.formulas.activation import silu as silu_value
from mpizero.types import Array


@kernel("void(const T[::1], T[::1])")
def gelu(x: Array, y: Array) -> None:
    """Write the tanh form of GELU into ``y``, which may be ``x``."""
    T = x.dtype.type  # noqa: N806
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = gelu_value(x[i], T)


@kernel("void(const T[::1], const T[::1], T[::1])")
def gelu_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write ``dy`` times the derivative of :func:`gelu` at ``x`` into ``dx``, which may be ``dy`` or ``x``."""
    T = x.dtype.type  # noqa: N806
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        dx[i] = gelu_gradient(x[i], dy[i], T)


@kernel("void(const T[::1], T[::1])")
def silu(x: Array, y: Array) -> None:
    """Write x * sigmoid(x) into ``y``, which may be ``x``."""
    T = x.dtype.type  # noqa: N806
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = silu_value(x[i], T)


@kernel("void(const T[::1], const T[::1], T[::1])")
def silu_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write ``dy`` times the derivative of :func:`silu` at ``x`` into ``dx``, which may be ``dy`` or ``x``."""
    T = x.dtype.type  # noqa: N806
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        dx[i] = silu_gradient(x[i], dy[i], T)


@kernel("void(const T[::1], T[::1])")
def relu(x: Array, y: Array) -> None:
    """Write max(x, 0) into ``y``, which may be ``x``."""
    T = x.dtype.type  # noqa: N806
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = relu_value(x[i], T)


@kernel("void(const T[::1], const T[::1], T[::1])")
def relu_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write ``dy`` times the derivative of :func:`relu` at ``x`` into ``dx``, which may be ``dy`` or ``x``."""
    T = x.dtype.type  # noqa: N806
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        dx[i] = relu_gradient(x[i], dy[i], T)


@kernel("void(const T[::1], T[::1])")
def tanh(x: Array, y: Array) -> None:
    """Write tanh(x) into ``y``, which may be ``x``."""
    T = x.dtype.type  # noqa: N806
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = tanh_value(x[i], T)


@kernel("void(const T[::1], const T[::1], T[::1])")
def tanh_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write ``dy`` times the derivative of :func:`tanh` at ``x`` into ``dx``, which may be ``dy`` or ``x``."""
    T = x.dtype.type  # noqa: N806
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        dx[i] = tanh_gradient(x[i], dy[i], T)


@kernel("void(const T[:,::1], const T[::1], T[:,::1], T[:,::1])")
def bias_gelu(x: Array, bias: Array, z: Array, y: Array) -> None:
    """Write ``x + bias`` (one row) into ``z``, which may be ``x``, and its GELU into ``y``."""
    T = x.dtype.type  # noqa: N806
    columns = x.shape[1]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        row, column = i // columns, i % columns
        value = x[row, column] + bias[column]
        z[row, column] = value
        y[row, column] = gelu_value(value, T)


@kernel("void(const T[:,::1], const T[::1], T[:,::1])")
def add_bias(x: Array, bias: Array, y: Array) -> None:
    """Write ``x + bias`` (one row) into ``y``, which may be ``x``."""
    columns = x.shape[1]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        row, column = i // columns, i % columns
        y[row, column] = x[row, column] + bias[column]


@kernel("void(const T[:,::1], const T[::1], const T[:,::1], T[:,::1])")
def add_bias_residual(x: Array, bias: Array, residual: Array, y: Array) -> None:
    """Write ``x + bias + residual`` into ``y``, which may be ``x`` or ``residual``."""
    columns = x.shape[1]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        row, column = i // columns, i % columns
        y[row, column] = (x[row, column] + bias[column]) + residual[row, column]


@kernel("void(const T[:,::1], T[::1])")
def column_sums(x: Array, out: Array) -> None:
    """Write the sums over the rows, added in ascending order from 0: the gradient of a bias."""
    T = x.dtype.type  # noqa: N806
    rows, columns = x.shape
    for column in range(cuda.grid(1), columns, cuda.gridsize(1)):
        total = T(0)
        for row in range(rows):
            total += x[row, column]
        out[column] = total
