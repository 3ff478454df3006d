"""Compute activation functions, bias additions and column sums on the GPU: one thread per element (or column)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpizero.kernels.cuda.launch import CudaKernel, cuda, kernel
from mpizero.kernels.formulas import gelu as gelu_value
from mpizero.kernels.formulas import gelu_gradient, relu_gradient, silu_gradient, tanh_gradient, tanh_value
from mpizero.kernels.formulas import relu as relu_value
from mpizero.kernels.formulas import silu as silu_value
from mpizero.types import Array


def _value_kernel(name: str, value: Callable[..., Any]) -> CudaKernel:
    """Make a kernel that writes ``value(x[i], T)`` to ``y[i]`` for every i; ``y`` may be ``x``."""

    def apply(x: Array, y: Array) -> None:
        T = x.dtype.type  # noqa: N806
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            y[i] = value(x[i], T)

    apply.__qualname__ = name
    return kernel("void(const T[::1], T[::1])")(apply)


def _gradient_kernel(name: str, gradient: Callable[..., Any]) -> CudaKernel:
    """Make a kernel that writes ``gradient(x[i], dy[i], T)`` to ``dx[i]`` for every i.

    ``dx`` may be ``dy`` or ``x``.
    """

    def apply(x: Array, dy: Array, dx: Array) -> None:
        T = x.dtype.type  # noqa: N806
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            dx[i] = gradient(x[i], dy[i], T)

    apply.__qualname__ = name
    return kernel("void(const T[::1], const T[::1], T[::1])")(apply)


gelu, gelu_backward = _value_kernel("gelu", gelu_value), _gradient_kernel("gelu_backward", gelu_gradient)
silu, silu_backward = _value_kernel("silu", silu_value), _gradient_kernel("silu_backward", silu_gradient)
relu, relu_backward = _value_kernel("relu", relu_value), _gradient_kernel("relu_backward", relu_gradient)
tanh, tanh_backward = _value_kernel("tanh", tanh_value), _gradient_kernel("tanh_backward", tanh_gradient)


@kernel("void(const T[:,::1], const T[::1], T[:,::1], T[:,::1])")
def bias_gelu(x: Array, bias: Array, z: Array, y: Array) -> None:
    """Add ``bias`` to every row of ``x``; write the sum to ``z``, which may be ``x``, and its GELU to ``y``."""
    T = x.dtype.type  # noqa: N806
    columns = x.shape[1]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        row, column = i // columns, i % columns
        value = x[row, column] + bias[column]
        z[row, column] = value
        y[row, column] = gelu_value(value, T)


@kernel("void(const T[:,::1], const T[::1], T[:,::1])")
def add_bias(x: Array, bias: Array, y: Array) -> None:
    """Add ``bias`` to every row of ``x`` and write the sum to ``y``, which may be ``x``."""
    columns = x.shape[1]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        row, column = i // columns, i % columns
        y[row, column] = x[row, column] + bias[column]


@kernel("void(const T[:,::1], const T[::1], const T[:,::1], T[:,::1])")
def add_bias_residual(x: Array, bias: Array, residual: Array, y: Array) -> None:
    """Add ``bias`` to every row of ``x + residual``; write the sum to ``y``, which may be ``x`` or ``residual``."""
    columns = x.shape[1]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        row, column = i // columns, i % columns
        y[row, column] = (x[row, column] + bias[column]) + residual[row, column]


@kernel("void(const T[:,::1], T[::1])")
def column_sums(x: Array, out: Array) -> None:
    """Write the sum of each column of ``x`` to ``out``, for example to compute the gradient of a bias.

    Each sum starts from 0 and adds the rows in ascending order.
    """
    T = x.dtype.type  # noqa: N806
    rows, columns = x.shape
    for column in range(cuda.grid(1), columns, cuda.gridsize(1)):
        total = T(0)
        for row in range(rows):
            total += x[row, column]
        out[column] = total
