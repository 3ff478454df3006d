"""Sum in the order of a binary tree, level by level, in NumPy, as a reference for the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpizero.types import Array


def _tree(values: Array) -> float:
    """Return the sum of ``values`` in the order of the binary tree, level by level; 0 if there are none.

    node(level, i) = node(level - 1, 2 i) + node(level - 1, 2 i + 1); a missing right child passes the left one through.
    """
    if values.size == 0:
        return 0.0
    while values.size > 1:
        level = values[: values.size // 2 * 2].reshape(-1, 2).sum(axis=1)
        values = np.append(level, values[-1]) if values.size % 2 else level
    return float(values[0])


def tree_square_sums(x: Array, starts: Array, stops: Array, out: Array) -> None:
    """Write the sum of squares of ``x[starts[k]:stops[k]]`` to ``out[k]`` for every k; 0 for an empty range.

    The sum is computed in float64, in the order of a binary tree over the elements of the range.
    """
    tree_dots(x, x, starts, stops, out)


def tree_dots(x: Array, y: Array, starts: Array, stops: Array, out: Array) -> None:
    """Write the dot product of ``x[starts[k]:stops[k]]`` and the same range of ``y`` to ``out[k]`` for every k.

    It is 0 for an empty range. The sum is computed in float64, in the order of a binary tree over the elements of the
    range.
    """
    products = x.astype(np.float64) * y.astype(np.float64)
    out[:] = [_tree(products[start:stop]) for start, stop in zip(starts, stops, strict=True)]


def all_finite(x: Array) -> bool:
    """Tell whether no element of ``x`` is infinite or NaN."""
    return bool(np.isfinite(x).all())


def first_nonfinite(x: Array) -> int:
    """Return the index of the first element of ``x`` that is infinite or NaN, or -1 if there is none."""
    found = np.flatnonzero(~np.isfinite(x))
    return int(found[0]) if found.size else -1


def _add(terms: Sequence[Array], start: int, out: Array) -> None:
    """Write the sum of the terms, a power of two, to ``out``: neighbours first, then neighbouring sums."""
    sums = [term[:, start : start + out.shape[1]] for term in terms]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    out[...] = sums[0]


def add_two(a: Array, b: Array, start: int, out: Array) -> None:
    """Write the sum of two arrays, each from column ``start`` on, to ``out``, in the order of a binary tree."""
    _add((a, b), start, out)


def add_four(a: Array, b: Array, c: Array, d: Array, start: int, out: Array) -> None:
    """Write the sum of four arrays, each from column ``start`` on, to ``out``, in the order of a binary tree."""
    _add((a, b, c, d), start, out)


def add_eight(
    a: Array, b: Array, c: Array, d: Array, e: Array, f: Array, g: Array, h: Array, start: int, out: Array
) -> None:
    """Write the sum of eight arrays, each from column ``start`` on, to ``out``, in the order of a binary tree."""
    _add((a, b, c, d, e, f, g, h), start, out)
