"""Check :mod:`mpizero.kernels.cpu.compression`: blocks one by one, and a sort."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array

BLOCK = 256


def int8_encode(values: Array, residual: Array, scales: Array, codes: Array) -> None:
    """Write scales and codes of ``values + residual``, and their rounding errors to ``residual``."""
    residual += values
    for block in range(scales.size):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        rest = residual[part]
        scale = np.max(np.abs(rest)) * np.float32((1 - 2.0**-22) / 127)
        if not np.isfinite(scale):
            scales[block], codes[part], rest[:] = np.nan, 0, np.nan
            continue
        if scale < np.finfo(np.float32).tiny:
            scales[block], codes[part] = 0, 0
            continue
        code = np.rint(rest * (np.float32(1) / scale))
        scales[block], codes[part] = scale, code
        rest -= code * scale


def int8_decode(scales: Array, codes: Array, out: Array) -> None:
    """Write the values that the scales and codes of ``int8_encode`` stand for."""
    out[:] = codes * np.repeat(scales, BLOCK)[: codes.size]


def top_encode(values: Array, residual: Array, counts: Array, indices: Array, largest: Array) -> None:
    """Write the ``indices.size`` values of largest magnitude of ``values + residual``; ``residual`` keeps the rest."""
    residual += values
    order = np.argsort(-np.where(np.isnan(residual), np.inf, np.abs(residual)), kind="stable")
    indices[:] = np.sort(order[: indices.size])
    largest[:] = residual[indices]
    residual[indices] = 0


def top_decode(indices: Array, largest: Array, out: Array) -> None:
    """Write the values that ``top_encode`` selected to their indices, and 0 to all other elements."""
    out[:] = 0
    out[indices] = largest
