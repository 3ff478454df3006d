"""Check :mod:`mpizero.kernels.cpu.reduction`: the canonical tree, written as its definition."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def _tree(values: Array) -> float:
    """Halve the levels of node(level, i) = node(level - 1, 2i) + node(level - 1, 2i + 1) until one node is left."""
    if values.size == 0:
        return 0.0
    while values.size > 1:
        level = values[: values.size // 2 * 2].reshape(-1, 2).sum(axis=1)
        values = np.append(level, values[-1]) if values.size % 2 else level
    return float(values[0])


def tree_square_sums(x: Array, starts: Array, stops: Array, out: Array) -> None:
    """Write the canonical sum of squares of ``x[starts[k]:stops[k]]`` to ``out[k]``; 0 where empty."""
    tree_dots(x, x, starts, stops, out)


def tree_dots(x: Array, y: Array, starts: Array, stops: Array, out: Array) -> None:
    """Write the canonical dot product of ``x`` and ``y`` on ``starts[k]:stops[k]`` to ``out[k]``; 0 where empty."""
    products = x.astype(np.float64) * y.astype(np.float64)
    out[:] = [_tree(products[start:stop]) for start, stop in zip(starts, stops, strict=True)]


def all_finite(x: Array) -> bool:
    """Tell whether no element is infinite or NaN."""
    return bool(np.isfinite(x).all())


def first_nonfinite(x: Array) -> int:
    """Return the index of the first infinite or NaN element, -1 where there is none."""
    found = np.flatnonzero(~np.isfinite(x))
    return int(found[0]) if found.size else -1
