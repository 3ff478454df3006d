"""Compress messages in NumPy, block by block or with a sort, as a reference for the kernels."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array

BLOCK = 256


def int8_encode(values: Array, residual: Array, scales: Array, codes: Array) -> None:
    """Round ``values + residual`` to ``codes`` with ``scales``, and write the rounding errors to ``residual``.

    The arguments are those of :func:`mpizero.kernels.cpu.compression.int8_encode`.
    """
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
    """Write the values to which :func:`int8_encode` rounded, ``code * scale`` for each code, to ``out``."""
    out[:] = codes * np.repeat(scales, BLOCK)[: codes.size]


def top_encode(values: Array, residual: Array, counts: Array, indices: Array, largest: Array) -> None:
    """Write the ``indices.size`` values of largest magnitude of ``values + residual`` to ``largest``.

    The arguments are those of :func:`mpizero.kernels.cpu.compression.top_encode`.
    """
    residual += values
    order = np.lexsort((-np.abs(residual), ~np.isnan(residual)))  # stable; NaN counts as larger than infinity
    indices[:] = np.sort(order[: indices.size])
    largest[:] = residual[indices]
    residual[indices] = 0


def top_decode(indices: Array, largest: Array, out: Array) -> None:
    """Write ``largest[i]`` to ``out[indices[i]]`` for every i, and 0 to all other elements of ``out``."""
    out[:] = 0
    out[indices] = largest
