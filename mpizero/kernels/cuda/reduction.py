"""Sum in the order of one fixed binary tree, as the CPU kernels do, and find infinite and NaN values, on the GPU.

One thread sums ``TILE`` neighbouring elements, which is a node of the tree because ``TILE`` is a power of two. The next
kernel sums ``TILE`` neighbouring nodes in the same way, until one node is left. The bits are those of the CPU kernels.
"""

from __future__ import annotations

import numpy as np

from mpizero.kernels import formulas, namespace, to_host
from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.types import Array

TILE = 64
_LEVELS = 8

_is_finite = formulas.is_finite


def _range_of(firsts: Array, node: int) -> int:
    """Return the number k of the range that a node belongs to: ``firsts[k] <= node < firsts[k + 1]``.

    ``firsts`` holds the number of the first node of each range, and at the end the number of all nodes.
    """
    low, high = 0, firsts.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if firsts[middle] <= node:
            low = middle
        else:
            high = middle
    return low


def _push(stack: Array, count: int, value: float) -> None:
    """Add ``value`` to a binary counter that holds the sums of ``count`` elements so far.

    ``stack[k]`` holds the sum of 2**k elements if bit k of ``count`` is set.
    """
    level = 0
    while count & 1:
        value = stack[level] + value
        count >>= 1
        level += 1
    stack[level] = value


def _collect(stack: Array, count: int) -> float:
    """Return the sum of all nodes in a binary counter of ``count`` > 0 elements, added from the smallest node on.

    ``stack[k]`` is a node if bit k of ``count`` is set.
    """
    level = 0
    while not count & 1:
        count >>= 1
        level += 1
    value = stack[level]
    count >>= 1
    level += 1
    while count:
        if count & 1:
            value = stack[level] + value
        count >>= 1
        level += 1
    return float(value)


@kernel("void(const T[::1], const T[::1], const i8[::1], const i8[::1], const i8[::1], f8[::1])")
def _product_nodes(x: Array, y: Array, starts: Array, stops: Array, firsts: Array, nodes: Array) -> None:
    """Write the sum of the products ``x * y`` of each tile to ``nodes``.

    Range k is ``starts[k]:stops[k]``, cut into tiles of ``TILE`` elements (fewer at its end). Node ``firsts[k] + j`` is
    the sum of tile j of range k.
    """
    stack = cuda.local.array(_LEVELS, np.float64)
    for node in range(cuda.grid(1), nodes.size, cuda.gridsize(1)):
        k = _range_of(firsts, node)
        first = starts[k] + (node - firsts[k]) * TILE
        count = min(TILE, stops[k] - first)
        for i in range(count):
            _push(stack, i, np.float64(x[first + i]) * np.float64(y[first + i]))
        nodes[node] = _collect(stack, count)


@kernel("void(const f8[::1], const i8[::1], const i8[::1], const i8[::1], f8[::1])")
def _sum_nodes(x: Array, starts: Array, stops: Array, firsts: Array, nodes: Array) -> None:
    """Write the sum of each tile of ``x``, the nodes of the level below, to ``nodes``.

    Range k is ``starts[k]:stops[k]``, cut into tiles of ``TILE`` elements (fewer at its end). Node ``firsts[k] + j`` is
    the sum of tile j of range k.
    """
    stack = cuda.local.array(_LEVELS, np.float64)
    for node in range(cuda.grid(1), nodes.size, cuda.gridsize(1)):
        k = _range_of(firsts, node)
        first = starts[k] + (node - firsts[k]) * TILE
        count = min(TILE, stops[k] - first)
        for i in range(count):
            _push(stack, i, x[first + i])
        nodes[node] = _collect(stack, count)


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
    sizes = np.asarray(stops) - np.asarray(starts)
    filled = np.flatnonzero(sizes > 0)
    result = np.zeros(sizes.size)
    if filled.size:
        begins, ends = np.asarray(starts)[filled], np.asarray(stops)[filled]
        firsts = _first_nodes(begins, ends)
        nodes = namespace(x).empty(int(firsts[-1]), np.float64)
        _product_nodes(x, y, begins, ends, firsts, nodes)
        while (np.diff(firsts) > 1).any():
            begins, ends = firsts[:-1], firsts[1:]
            below, firsts = nodes, _first_nodes(begins, ends)
            nodes = namespace(x).empty(int(firsts[-1]), np.float64)
            _sum_nodes(below, begins, ends, firsts, nodes)
        result[filled] = to_host(nodes)
    out[:] = result


def _first_nodes(starts: Array, stops: Array) -> Array:
    """Return, for each range of elements, the index of its first node on the next level, and the number of all nodes.

    Each node of the next level is the sum of ``TILE`` elements of a range, or fewer at its end.
    """
    return np.concatenate([[0], np.cumsum(-(-(stops - starts) // TILE))]).astype(np.int64)


@kernel("void(const T[::1], i8[::1])")
def _lowest_nonfinite(x: Array, found: Array) -> None:
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        if not _is_finite(x[i]):
            cuda.atomic.min(found, 0, i)


def all_finite(x: Array) -> bool:
    """Tell whether no element of ``x`` is infinite or NaN."""
    return first_nonfinite(x) < 0


def first_nonfinite(x: Array) -> int:
    """Return the index of the first element of ``x`` that is infinite or NaN, or -1 if there is none."""
    found = np.array([x.size], np.int64)
    _lowest_nonfinite(x, found)
    return int(found[0]) if found[0] < x.size else -1


@kernel("void(const T[:,::1], const T[:,::1], i8, T[:,::1])")
def add_two(a: Array, b: Array, start: int, out: Array) -> None:
    """Write the sum of two arrays, each from column ``start`` on, to ``out``, in the order of a binary tree."""
    columns = out.shape[1]
    for place in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        r, i = place // columns, place % columns
        out[r, i] = a[r, start + i] + b[r, start + i]


@kernel("void(const T[:,::1], const T[:,::1], const T[:,::1], const T[:,::1], i8, T[:,::1])")
def add_four(a: Array, b: Array, c: Array, d: Array, start: int, out: Array) -> None:
    """Write the sum of four arrays, each from column ``start`` on, to ``out``, in the order of a binary tree."""
    columns = out.shape[1]
    for place in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        r, i = place // columns, place % columns
        out[r, i] = (a[r, start + i] + b[r, start + i]) + (c[r, start + i] + d[r, start + i])


@kernel(
    "void(const T[:,::1], const T[:,::1], const T[:,::1], const T[:,::1], "
    "const T[:,::1], const T[:,::1], const T[:,::1], const T[:,::1], i8, T[:,::1])"
)
def add_eight(
    a: Array, b: Array, c: Array, d: Array, e: Array, f: Array, g: Array, h: Array, start: int, out: Array
) -> None:
    """Write the sum of eight arrays, each from column ``start`` on, to ``out``, in the order of a binary tree."""
    columns = out.shape[1]
    for place in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        r, i = place // columns, place % columns
        j = start + i
        out[r, i] = ((a[r, j] + b[r, j]) + (c[r, j] + d[r, j])) + ((e[r, j] + f[r, j]) + (g[r, j] + h[r, j]))
