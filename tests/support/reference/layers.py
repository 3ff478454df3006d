"""Compute in NumPy what layers need, as a reference for the kernels: normalization, activations, copies, embeddings.

Layer and root-mean-square normalization come first, then activation functions, bias additions and column sums.
:func:`pack` and the functions after it copy ranges of arrays, convert to and from 16-bit formats, and scale. A number
is rounded to bfloat16 by comparing its distances to the two nearest bfloat16 numbers. :func:`gather` looks up rows of
an embedding table by their ids, and :func:`scatter_add` computes the gradient of the table.
"""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def layernorm(x: Array, gamma: Array, beta: Array, eps1: Array, y: Array, mean: Array, rstd: Array) -> None:
    mean[:] = x.mean(axis=1, dtype=np.float64)
    rstd[:] = 1 / np.sqrt(x.var(axis=1, dtype=np.float64) + eps1[0])
    y[:] = (x - mean[:, None]) * rstd[:, None] * gamma + beta


def layernorm_backward(
    dy: Array, x: Array, gamma: Array, mean: Array, rstd: Array, residual: Array, dx: Array, dgamma: Array, dbeta: Array
) -> None:
    standard = (x - mean[:, None]) * rstd[:, None]
    g = dy * gamma
    mean_g, mean_gs = g.mean(axis=1, keepdims=True), (g * standard).mean(axis=1, keepdims=True)
    dx[:] = rstd[:, None] * (g - mean_g - standard * mean_gs)
    if len(residual):
        dx += residual
    dgamma[:] = 0
    dbeta[:] = 0
    for row in range(x.shape[0]):
        dgamma += dy[row] * ((x[row] - mean[row]) * rstd[row])
        dbeta += dy[row]


def rmsnorm(x: Array, gamma: Array, eps1: Array, y: Array, rstd: Array) -> None:
    rstd[:] = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1) + eps1[0])
    y[:] = x * rstd[:, None] * gamma


def rmsnorm_backward_input(dy: Array, x: Array, gamma: Array, rstd: Array, dx: Array) -> None:
    standard = x * rstd[:, None]
    g = dy * gamma
    dx[:] = rstd[:, None] * (g - standard * (g * standard).mean(axis=1, keepdims=True))


def rmsnorm_backward_weights(dy: Array, x: Array, rstd: Array, dgamma: Array) -> None:
    dgamma[:] = 0
    for row in range(x.shape[0]):
        dgamma += dy[row] * (x[row] * rstd[row])


def _gelu_gate(x: Array) -> Array:
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return np.asarray(0.5 * (1 + np.tanh(inner)))


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def gelu(x: Array, y: Array) -> None:
    y[:] = _wide(x) * _gelu_gate(_wide(x))


def gelu_backward(x: Array, dy: Array, dx: Array) -> None:
    v, s = _wide(x), _gelu_gate(_wide(x))
    slope = 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * v**2)
    dx[:] = dy * (s + v * s * (1 - s) * slope)


def silu(x: Array, y: Array) -> None:
    y[:] = _wide(x) * _sigmoid(_wide(x))


def silu_backward(x: Array, dy: Array, dx: Array) -> None:
    v, s = _wide(x), _sigmoid(_wide(x))
    dx[:] = dy * s * (1 + v * (1 - s))


def relu(x: Array, y: Array) -> None:
    y[:] = np.maximum(x, 0)


def relu_backward(x: Array, dy: Array, dx: Array) -> None:
    dx[:] = np.where(x <= 0, 0, dy)


def tanh(x: Array, y: Array) -> None:
    y[:] = np.tanh(_wide(x))


def tanh_backward(x: Array, dy: Array, dx: Array) -> None:  # x is the output of tanh
    dx[:] = dy * (1 - _wide(x) ** 2)


def bias_gelu(x: Array, bias: Array, z: Array, y: Array) -> None:
    z[:] = x + bias
    gelu(z, y)


def add_bias(x: Array, bias: Array, y: Array) -> None:
    y[:] = x + bias


def add_bias_residual(x: Array, bias: Array, residual: Array, y: Array) -> None:
    y[:] = x + bias + residual


def column_sums(x: Array, out: Array) -> None:
    out[:] = 0
    for row in x:
        out += row


def _indices(starts: Array, sizes: Array) -> Array:
    ranges = [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return np.concatenate([np.empty(0, np.int64), *ranges])


def pack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    index = _indices(starts, sizes)
    target[: index.size] = source[index]


def unpack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    index = _indices(starts, sizes)
    target[index] = source[: index.size]


def split_columns(matrix: Array, ranges: Array, parts: Array) -> None:
    rows = np.arange(matrix.shape[0])[:, None]
    for start, size, place, width in ranges.tolist():
        columns = place + rows * width + np.arange(size)
        parts[columns] = matrix[:, start : start + size]


def join_columns(parts: Array, ranges: Array, matrix: Array) -> None:
    rows = np.arange(matrix.shape[0])[:, None]
    for start, size, place, width in ranges.tolist():
        columns = place + rows * width + np.arange(size)
        matrix[:, start : start + size] = parts[columns]


def to_bfloat16(x: Array, out: Array) -> None:
    below = x.view(np.uint32) >> np.uint32(16)
    # In float64 the neighbour above the largest bfloat16 is 2**128, so rounding to infinity needs no special case.
    low, high = _magnitude(below), _magnitude(below + np.uint32(1))
    with np.errstate(invalid="ignore"):
        from_low, to_high = np.abs(x.astype(np.float64)) - low, high - np.abs(x.astype(np.float64))
    up = (from_low > to_high) | ((from_low == to_high) & (below % 2 == 1))
    rounded = np.where(np.isinf(x), below, below + up)
    out[:] = np.where(np.isnan(x), below | np.uint32(0x40), rounded).astype(np.uint16)


def _magnitude(bits: Array) -> Array:
    exponent, mantissa = (bits >> np.uint32(7) & np.uint32(0xFF)).astype(np.int64), bits & np.uint32(0x7F)
    fraction = np.where(exponent == 0, mantissa / 128.0, 1.0 + mantissa / 128.0)
    magnitude: Array = np.ldexp(fraction, np.maximum(exponent, 1) - 127)
    return magnitude


def from_bfloat16(x: Array, out: Array) -> None:
    out.view(np.uint32)[:] = x.astype(np.uint32) << np.uint32(16)


def to_float16(x: Array, out: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        out[:] = x.astype(np.float16).view(np.uint16)


def from_float16(x: Array, out: Array) -> None:
    with np.errstate(invalid="ignore"):
        out[:] = x.view(np.float16)


def scale(x: Array, factor: Array) -> None:
    x *= factor[0]


def gather(table: Array, ids: Array, out: Array) -> None:
    for i, index in enumerate(ids):
        out[i] = table[index] if 0 <= index < table.shape[0] else np.nan


def scatter_add(dy: Array, ids: Array, dtable: Array) -> None:
    for row, index in zip(dy, ids, strict=True):
        if 0 <= index < dtable.shape[0]:
            dtable[index] += row
