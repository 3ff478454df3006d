"""Look up rows of an embedding table by their ids, and compute the gradient of the table, in NumPy."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def gather(table: Array, ids: Array, out: Array) -> None:
    """Copy row ``ids[i]`` of ``table`` to row i of ``out``; fill row i with NaN if the table has no such row."""
    for i, index in enumerate(ids):
        out[i] = table[index] if 0 <= index < table.shape[0] else np.nan


def scatter_add(dy: Array, ids: Array, dtable: Array) -> None:
    """Add row i of ``dy`` to row ``ids[i]`` of ``dtable``, for i = 0, 1, ...; ignore ids that are not rows of it."""
    for row, index in zip(dy, ids, strict=True):
        if 0 <= index < dtable.shape[0]:
            dtable[index] += row
