"""Compute activation functions, bias additions and column sums on the CPU.

A kernel writes the results of 256 elements to a temporary array and then copies them to its output. So an output may be
one of the inputs, and LLVM still vectorizes the loops, since the arrays in a loop never overlap. The temporary array
stays in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpizero.kernels.formulas import gelu as gelu_value
from mpizero.kernels.formulas import gelu_gradient, relu_gradient, silu_gradient, tanh_gradient, tanh_value
from mpizero.kernels.formulas import relu as relu_value
from mpizero.kernels.formulas import silu as silu_value
from mpizero.kernels.jit import Kernel, fetch_ahead, fetch_below, kernel
from mpizero.types import Array

#: Number of elements of a block; of 128 to 1024, 256 was fastest for arrays that are not in a cache.
_BLOCK = 256


def store(source: Any, target: Any) -> None:
    """Copy the first ``target.size`` elements of ``source`` to ``target``."""
    for i in range(target.size):
        target[i] = source[i]


def _value_kernel(name: str, value: Callable[..., Any]) -> Kernel:
    """Make a kernel that writes ``value(x[i], T)`` to ``y[i]`` for every i; ``y`` may be ``x``."""

    def apply(x: Array, y: Array, block: Array) -> None:
        T = x.dtype.type  # noqa: N806
        for first in range(0, x.size, _BLOCK):
            part = x[first : first + _BLOCK]
            fetch_ahead(x, first, first + part.size)
            for i in range(part.size):
                block[i] = value(part[i], T)
            store(block, y[first : first + part.size])

    apply.__qualname__ = name
    return kernel("void(const T[::1], T[::1], T[::1])", scratch=_BLOCK, divided=("x", "y"))(apply)


def _gradient_kernel(name: str, gradient: Callable[..., Any]) -> Kernel:
    """Make a kernel that writes ``gradient(x[i], dy[i], T)`` to ``dx[i]`` for every i.

    ``dx`` may be ``dy`` or ``x``.
    """

    def apply(x: Array, dy: Array, dx: Array, block: Array) -> None:
        T = x.dtype.type  # noqa: N806
        for first in range(0, x.size, _BLOCK):
            part, above = x[first : first + _BLOCK], dy[first : first + _BLOCK]
            fetch_ahead(x, first, first + part.size)
            fetch_ahead(dy, first, first + part.size)
            for i in range(part.size):
                block[i] = gradient(part[i], above[i], T)
            store(block, dx[first : first + part.size])

    apply.__qualname__ = name
    divided = ("x", "dy", "dx")
    return kernel("void(const T[::1], const T[::1], T[::1], T[::1])", scratch=_BLOCK, divided=divided)(apply)


gelu, gelu_backward = _value_kernel("gelu", gelu_value), _gradient_kernel("gelu_backward", gelu_gradient)
silu, silu_backward = _value_kernel("silu", silu_value), _gradient_kernel("silu_backward", silu_gradient)
relu, relu_backward = _value_kernel("relu", relu_value), _gradient_kernel("relu_backward", relu_gradient)
tanh, tanh_backward = _value_kernel("tanh", tanh_value), _gradient_kernel("tanh_backward", tanh_gradient)


@kernel("void(const T[:,::1], const T[::1], T[:,::1], T[:,::1], T[::1])", scratch=_BLOCK, divided=("x", "z", "y"))
def bias_gelu(x: Array, bias: Array, z: Array, y: Array, block: Array) -> None:
    """Add ``bias`` to every row of ``x``; write the sum to ``z``, which may be ``x``, and its GELU to ``y``."""
    T = x.dtype.type  # noqa: N806
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], _BLOCK):
            part, shift = x[row, first : first + _BLOCK], bias[first : first + _BLOCK]
            before, after = z[row, first : first + part.size], y[row, first : first + part.size]
            fetch_below(x, row, first, first + part.size)
            for i in range(part.size):
                block[i] = part[i] + shift[i]
            store(block, before)
            for i in range(part.size):
                after[i] = gelu_value(block[i], T)


@kernel("void(const T[:,::1], const T[::1], T[:,::1], T[::1])", scratch=_BLOCK, divided=("x", "y"))
def add_bias(x: Array, bias: Array, y: Array, block: Array) -> None:
    """Add ``bias`` to every row of ``x`` and write the sum to ``y``, which may be ``x``."""
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], _BLOCK):
            part, shift = x[row, first : first + _BLOCK], bias[first : first + _BLOCK]
            fetch_below(x, row, first, first + part.size)
            for i in range(part.size):
                block[i] = part[i] + shift[i]
            store(block, y[row, first : first + part.size])


@kernel(
    "void(const T[:,::1], const T[::1], const T[:,::1], T[:,::1], T[::1])",
    scratch=_BLOCK,
    divided=("x", "residual", "y"),
)
def add_bias_residual(x: Array, bias: Array, residual: Array, y: Array, block: Array) -> None:
    """Add ``bias`` to every row of ``x + residual``; write the sum to ``y``, which may be ``x`` or ``residual``."""
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], _BLOCK):
            part, shift = x[row, first : first + _BLOCK], bias[first : first + _BLOCK]
            past = residual[row, first : first + _BLOCK]
            fetch_below(x, row, first, first + part.size)
            fetch_below(residual, row, first, first + part.size)
            for i in range(part.size):
                block[i] = (part[i] + shift[i]) + past[i]
            store(block, y[row, first : first + part.size])


@kernel("void(const T[:,::1], T[::1])")
def column_sums(x: Array, out: Array) -> None:
    """Write the sum of each column of ``x`` to ``out``, for example to compute the gradient of a bias.

    Each sum starts from 0 and adds the rows in ascending order.
    """
    T = x.dtype.type  # noqa: N806
    rows, columns = x.shape
    out[:] = T(0)
    quads = rows // 4
    for k in range(quads):
        a, b, c, d = x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]
        for j in range(columns):
            out[j] = (((out[j] + a[j]) + b[j]) + c[j]) + d[j]
    for row in range(4 * quads, rows):
        a = x[row]
        for j in range(columns):
            out[j] += a[j]
