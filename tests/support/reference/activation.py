"""Compute activation functions, bias additions and column sums in NumPy, as a reference for the kernels."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def _gelu_gate(x: Array) -> Array:
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return np.asarray(0.5 * (1 + np.tanh(inner)))


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def gelu(x: Array, y: Array) -> None:
    """Write the tanh form of GELU of every element of ``x`` to ``y``, which may be ``x``."""
    y[:] = _wide(x) * _gelu_gate(_wide(x))


def gelu_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write ``dy`` times the derivative of :func:`gelu` at ``x`` to ``dx``, which may be ``dy`` or ``x``."""
    v, s = _wide(x), _gelu_gate(_wide(x))
    slope = 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * v**2)
    dx[:] = dy * (s + v * s * (1 - s) * slope)


def silu(x: Array, y: Array) -> None:
    """Write ``x * sigmoid(x)`` to ``y``, which may be ``x``."""
    y[:] = _wide(x) * _sigmoid(_wide(x))


def silu_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write ``dy`` times the derivative of :func:`silu` at ``x`` to ``dx``, which may be ``dy`` or ``x``."""
    v, s = _wide(x), _sigmoid(_wide(x))
    dx[:] = dy * s * (1 + v * (1 - s))


def relu(x: Array, y: Array) -> None:
    """Write ``max(x, 0)`` to ``y``, which may be ``x``."""
    y[:] = np.maximum(x, 0)


def relu_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write 0 where ``x <= 0``, otherwise ``dy``, to ``dx``, which may be ``dy`` or ``x``."""
    dx[:] = np.where(x <= 0, 0, dy)


def tanh(x: Array, y: Array) -> None:
    """Write ``tanh(x)`` to ``y``, which may be ``x``."""
    y[:] = np.tanh(_wide(x))


def tanh_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write ``dy`` times the derivative of :func:`tanh` at ``x`` to ``dx``, which may be ``dy`` or ``x``."""
    dx[:] = dy * (1 - np.tanh(_wide(x)) ** 2)


def bias_gelu(x: Array, bias: Array, z: Array, y: Array) -> None:
    """Add ``bias`` to every row of ``x``; write the sum to ``z``, which may be ``x``, and its GELU to ``y``."""
    z[:] = x + bias
    gelu(z, y)


def add_bias(x: Array, bias: Array, y: Array) -> None:
    """Add ``bias`` to every row of ``x`` and write the sum to ``y``, which may be ``x``."""
    y[:] = x + bias


def add_bias_residual(x: Array, bias: Array, residual: Array, y: Array) -> None:
    """Add ``bias`` to every row of ``x + residual``; write the sum to ``y``, which may be ``x`` or ``residual``."""
    y[:] = x + bias + residual


def column_sums(x: Array, out: Array) -> None:
    """Write the sum of each column of ``x`` to ``out``, for example to compute the gradient of a bias.

    Each sum starts from 0 and adds the rows in ascending order.
    """
    out[:] = 0
    for row in x:
        out += row
