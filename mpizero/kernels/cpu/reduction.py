"""Sum in one fixed order, the same on any number of ranks, and find infinite and NaN values, on the CPU.

The order is a binary tree over the index of the elements: node(level, i) = node(level - 1, 2 i) + node(level - 1, 2 i +
1), where a missing right child passes the left one through. All sums are in float64. A block of ``BLOCK`` elements (a
power of two, so a block is a node of the tree) is summed level by level, which vectorizes. The sums of the blocks are
kept in a binary counter: entry k is a node over 2**k blocks, and two nodes of one level are added as soon as both
exist.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.kernels import formulas
from mpizero.kernels.jit import fetch_ahead, kernel
from mpizero.types import Array

BLOCK = 1024
_LINE = 64  # elements that are tested beside each other
LEVELS = 64

_is_finite = formulas.is_finite


def _halve(source: Array, target: Array, count: int) -> int:
    """Write the next higher level of the tree to ``target``, from the first ``count`` nodes in ``source``.

    Return the number of nodes of the higher level.
    """
    pairs = count // 2
    for i in range(pairs):
        target[i] = source[2 * i] + source[2 * i + 1]
    if count % 2:
        target[pairs] = source[count - 1]
        return pairs + 1
    return pairs


def _top(even: Array, odd: Array, count: int) -> Any:
    """Return the sum of the first ``count`` nodes in ``even``, in the order of the tree.

    ``even`` and ``odd`` are overwritten by the levels of the tree in turn.
    """
    while True:
        if count == 1:
            return even[0]
        count = _halve(even, odd, count)
        if count == 1:
            return odd[0]
        count = _halve(odd, even, count)


def _merge(pending: Array, blocks: int, value: float) -> None:
    """Add the sum ``value`` of a block to the binary counter, which holds the sums of ``blocks`` blocks so far.

    ``pending[k]`` holds the sum of 2**k blocks if bit k of ``blocks`` is set.
    """
    level = 0
    while blocks & 1:
        value = pending[level] + value
        blocks >>= 1
        level += 1
    pending[level] = value


def _collect(pending: Array, blocks: int, value: float, has_value: bool) -> float:
    """Return the sum of all nodes in the binary counter, added from the smallest node (the last blocks) on.

    ``pending[k]`` is a node if bit k of ``blocks`` is set. If ``has_value``, the sum starts with ``value``, the sum of
    an incomplete block after the others.
    """
    level = 0
    while blocks:
        if blocks & 1:
            value = pending[level] + value if has_value else pending[level]
            has_value = True
        blocks >>= 1
        level += 1
    return value


@kernel("void(const T[::1], const i8[::1], const i8[::1], f8[::1], f8[::1])", scratch=2 * BLOCK + LEVELS)
def tree_square_sums(x: Array, starts: Array, stops: Array, out: Array, scratch: Array) -> None:
    """Write the sum of squares of ``x[starts[k]:stops[k]]`` to ``out[k]`` for every k; 0 for an empty range.

    The sum is computed in float64, in the order of a binary tree over the elements of the range.
    """
    even, odd, pending = scratch[:BLOCK], scratch[BLOCK : 2 * BLOCK], scratch[2 * BLOCK :]
    for k in range(starts.size):
        part = x[starts[k] : stops[k]]
        blocks, rest = part.size // BLOCK, part.size % BLOCK
        for block in range(blocks):
            full = part[block * BLOCK : (block + 1) * BLOCK]
            for i in range(BLOCK // 2):
                left, right = np.float64(full[2 * i]), np.float64(full[2 * i + 1])
                even[i] = left * left + right * right
            _merge(pending, block, _top(even, odd, BLOCK // 2))
        last = part[blocks * BLOCK :]
        for i in range(rest):
            value = np.float64(last[i])
            even[i] = value * value
        out[k] = _collect(pending, blocks, _top(even, odd, rest) if rest else 0.0, rest > 0)


@kernel("void(const T[::1], const T[::1], const i8[::1], const i8[::1], f8[::1], f8[::1])", scratch=2 * BLOCK + LEVELS)
def tree_dots(x: Array, y: Array, starts: Array, stops: Array, out: Array, scratch: Array) -> None:
    """Write the dot product of ``x[starts[k]:stops[k]]`` and the same range of ``y`` to ``out[k]`` for every k.

    It is 0 for an empty range. The sum is computed in float64, in the order of a binary tree over the elements of the
    range.
    """
    even, odd, pending = scratch[:BLOCK], scratch[BLOCK : 2 * BLOCK], scratch[2 * BLOCK :]
    for k in range(starts.size):
        part, other = x[starts[k] : stops[k]], y[starts[k] : stops[k]]
        blocks, rest = part.size // BLOCK, part.size % BLOCK
        for block in range(blocks):
            full, beside = part[block * BLOCK : (block + 1) * BLOCK], other[block * BLOCK : (block + 1) * BLOCK]
            for i in range(BLOCK // 2):
                left = np.float64(full[2 * i]) * np.float64(beside[2 * i])
                right = np.float64(full[2 * i + 1]) * np.float64(beside[2 * i + 1])
                even[i] = left + right
            _merge(pending, block, _top(even, odd, BLOCK // 2))
        last, beside = part[blocks * BLOCK :], other[blocks * BLOCK :]
        for i in range(rest):
            even[i] = np.float64(last[i]) * np.float64(beside[i])
        out[k] = _collect(pending, blocks, _top(even, odd, rest) if rest else 0.0, rest > 0)


def _count_nonfinite(x: Array) -> int:
    bad = 0
    for i in range(x.size):
        bad += not _is_finite(x[i])
    return bad


@kernel("bool(const T[::1], T[::1])", scratch=_LINE)
def all_finite(x: Array, scratch: Array) -> bool:
    """Tell whether no element of ``x`` is infinite or NaN."""
    whole = x.size // BLOCK * BLOCK
    for block in range(0, whole, BLOCK):
        part = x[block : block + BLOCK]
        fetch_ahead(x, block, block + BLOCK)
        # x - x is 0 or NaN. Sums of it beside each other fill vectors, where a count would convert every element.
        scratch[:] = 0
        for line in range(0, BLOCK, 4 * _LINE):
            a, b = part[line : line + _LINE], part[line + _LINE : line + 2 * _LINE]
            c, d = part[line + 2 * _LINE : line + 3 * _LINE], part[line + 3 * _LINE : line + 4 * _LINE]
            for i in range(_LINE):
                scratch[i] += ((a[i] - a[i]) + (b[i] - b[i])) + ((c[i] - c[i]) + (d[i] - d[i]))
        if _count_nonfinite(scratch):
            return False
    return _count_nonfinite(x[whole:]) == 0


@kernel("i8(const T[::1])")
def first_nonfinite(x: Array) -> int:
    """Return the index of the first element of ``x`` that is infinite or NaN, or -1 if there is none."""
    for block in range(0, x.size, BLOCK):
        part = x[block : block + BLOCK]
        if _count_nonfinite(part):
            for i in range(part.size):
                if not _is_finite(part[i]):
                    return block + i
    return -1


@kernel("void(const T[:,::1], const T[:,::1], i8, T[:,::1])")
def add_two(a: Array, b: Array, start: int, out: Array) -> None:
    """Write the sum of two arrays, each from column ``start`` on, to ``out``, in the order of a binary tree."""
    for r in range(out.shape[0]):
        to = out[r]
        aa, bb = a[r, start : start + to.size], b[r, start : start + to.size]
        for i in range(to.size):
            to[i] = aa[i] + bb[i]


@kernel("void(const T[:,::1], const T[:,::1], const T[:,::1], const T[:,::1], i8, T[:,::1])")
def add_four(a: Array, b: Array, c: Array, d: Array, start: int, out: Array) -> None:
    """Write the sum of four arrays, each from column ``start`` on, to ``out``, in the order of a binary tree."""
    for r in range(out.shape[0]):
        to = out[r]
        aa, bb = a[r, start : start + to.size], b[r, start : start + to.size]
        cc, dd = c[r, start : start + to.size], d[r, start : start + to.size]
        for i in range(to.size):
            to[i] = (aa[i] + bb[i]) + (cc[i] + dd[i])


@kernel(
    "void(const T[:,::1], const T[:,::1], const T[:,::1], const T[:,::1], "
    "const T[:,::1], const T[:,::1], const T[:,::1], const T[:,::1], i8, T[:,::1])"
)
def add_eight(
    a: Array, b: Array, c: Array, d: Array, e: Array, f: Array, g: Array, h: Array, start: int, out: Array
) -> None:
    """Write the sum of eight arrays, each from column ``start`` on, to ``out``, in the order of a binary tree."""
    for r in range(out.shape[0]):
        to = out[r]
        aa, bb = a[r, start : start + to.size], b[r, start : start + to.size]
        cc, dd = c[r, start : start + to.size], d[r, start : start + to.size]
        ee, ff = e[r, start : start + to.size], f[r, start : start + to.size]
        gg, hh = g[r, start : start + to.size], h[r, start : start + to.size]
        for i in range(to.size):
            to[i] = ((aa[i] + bb[i]) + (cc[i] + dd[i])) + ((ee[i] + ff[i]) + (gg[i] + hh[i]))
