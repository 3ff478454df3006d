"""Look up rows of an embedding table by their ids, and compute the gradient of the table, on the GPU."""

from __future__ import annotations

import numpy as np

from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.kernels.formulas import inside
from mpizero.types import Array


@kernel("void(const T[:,::1], const i8[::1], T[:,::1])")
def gather(table: Array, ids: Array, out: Array) -> None:
    """Copy row ``ids[i]`` of ``table`` to row i of ``out``; fill row i with NaN if the table has no such row."""
    T = table.dtype.type  # noqa: N806
    rows, width = table.shape
    for place in range(cuda.grid(1), ids.size * width, cuda.gridsize(1)):
        i, j = place // width, place % width
        out[i, j] = table[ids[i], j] if inside(ids[i], rows) else T(np.nan)


@kernel("void(const T[:,::1], const i8[::1], T[:,::1])")
def scatter_add(dy: Array, ids: Array, dtable: Array) -> None:
    """Add row i of ``dy`` to row ``ids[i]`` of ``dtable``, for i = 0, 1, ...; ignore ids that are not rows of it.

    One thread adds all elements of a column, so additions keep their order without atomic operations.
    """
    rows, width = dtable.shape
    for j in range(cuda.grid(1), width, cuda.gridsize(1)):
        for i in range(ids.size):
            if inside(ids[i], rows):
                dtable[ids[i], j] += dy[i, j]
