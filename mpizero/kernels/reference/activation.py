"""Compute activation functions, bias additions and column sums in NumPy."""

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
    """Write the tanh form of GELU into ``y``."""
    y[:] = _wide(x) * _gelu_gate(_wide(x))


def gelu_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write ``dy`` times the derivative of :func:`gelu` at ``x`` into ``dx``."""
    v, s = _wide(x), _gelu_gate(_wide(x))
    slope = 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * v**2)
    dx[:] = dy * (s + v * s * (1 - s) * slope)


def silu(x: Array, y: Array) -> None:
    """Write x * sigmoid(x) into ``y``."""
    y[:] = _wide(x) * _sigmoid(_wide(x))


def silu_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write ``dy`` times the derivative of :func:`silu` at ``x`` into ``dx``."""
    v, s = _wide(x), _sigmoid(_wide(x))
    dx[:] = dy * s * (1 + v * (1 - s))


def relu(x: Array, y: Array) -> None:
    """Write max(x, 0) into ``y``."""
    y[:] = np.maximum(x, 0)


def relu_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write ``dy`` where ``x`` > 0, else 0, into ``dx``."""
    dx[:] = np.where(x <= 0, 0, dy)


def tanh(x: Array, y: Array) -> None:
    """Write tanh(x) into ``y``."""
    y[:] = np.tanh(_wide(x))


def tanh_backward(x: Array, dy: Array, dx: Array) -> None:
    """Write ``dy`` times the derivative of :func:`tanh` at ``x`` into ``dx``."""
    dx[:] = dy * (1 - np.tanh(_wide(x)) ** 2)


def bias_gelu(x: Array, bias: Array, z: Array, y: Array) -> None:
    """Write ``x + bias`` (one row) into ``z`` and its GELU into ``y``."""
    z[:] = x + bias
    gelu(z, y)


def add_bias(x: Array, bias: Array, y: Array) -> None:
    """Write ``x + bias`` (one row) into ``y``."""
    y[:] = x + bias


def add_bias_residual(x: Array, bias: Array, residual: Array, y: Array) -> None:
    """Write ``x + bias + residual`` into ``y``."""
    y[:] = x + bias + residual


def column_sums(x: Array, out: Array) -> None:
    """Write the sums over the rows, added in ascending order from 0."""
    out[:] = 0
    for row in x:
        out += row
