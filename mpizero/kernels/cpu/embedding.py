"""Look up rows of an embedding table by their ids, and compute the gradient of the table, on the CPU."""

from __future__ import annotations

import numpy as np

from mpizero.kernels.formulas import inside
from mpizero.kernels.jit import kernel
from mpizero.types import Array


@kernel("void(const T[:,::1], const i8[::1], T[:,::1])", divided=("out", "ids"))
def gather(table: Array, ids: Array, out: Array) -> None:
    """Copy row ``ids[i]`` of ``table`` to row i of ``out``; fill row i with NaN if the table has no such row."""
    T = table.dtype.type  # noqa: N806
    rows, width = table.shape
    for i in range(ids.size):
        target = out[i]
        if inside(ids[i], rows):
            source = table[ids[i]]
            for j in range(width):
                target[j] = source[j]
        else:
            target[:] = T(np.nan)


@kernel("void(const T[:,::1], const i8[::1], T[:,::1])")
def scatter_add(dy: Array, ids: Array, dtable: Array) -> None:
    """Add row i of ``dy`` to row ``ids[i]`` of ``dtable``, for i = 0, 1, ...; ignore ids that are not rows of it."""
    rows, width = dtable.shape
    for i in range(ids.size):
        if inside(ids[i], rows):
            source, target = dy[i], dtable[ids[i]]
            for j in range(width):
                target[j] += source[j]
