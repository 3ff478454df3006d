"""Sum in one fixed order, find infinite and NaN values, and draw random numbers, on the GPU.

Sums have the order of one fixed binary tree, as on the CPU. One thread sums ``TILE`` neighbouring elements, which is a
node of the tree because ``TILE`` is a power of two. The next kernel sums ``TILE`` neighbouring nodes in the same way,
until one node is left. The results have the bits of the CPU kernels.

Random numbers are counter-based (Philox 4x32-10): one thread per Philox block, or per permuted index.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.kernels import formulas, namespace, to_host
from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.kernels.random_numbers import (
    dropout_key,
    dropout_threshold,
    half_bits,
    high_word,
    low_word,
    normals,
    permuted,
    philox_words,
    round_keys,
    scaled_unit,
    units,
    values_per_block,
)
from mpizero.types import Array

TILE = 64
_LEVELS = 8

_is_finite = formulas.is_finite


def _range_of(firsts: Array, node: int) -> int:
    """Return the index k of the range that a node (a sum of some of its elements) belongs to.

    The node's index is at least ``firsts[k]`` and below ``firsts[k + 1]``: ``firsts`` holds the index of the first node
    of each range, and at the end the count of all nodes.
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
    """Return the sum of all nodes (partial sums) in a binary counter of ``count`` > 0 elements, smallest node first.

    ``stack[k]`` is a node, the sum of 2**k elements, if bit k of ``count`` is set.
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
    """Write the sum of each tile of ``x`` to ``nodes``.

    ``x`` holds the nodes (partial sums) of one level of the tree, and ``nodes`` gets those of the next level.

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

    The dot product of an empty range is 0. The sum is computed in float64, in the order of a binary tree over the
    elements of the range.
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
    """Return, for each range of elements, the index of its first node on the next level; and last, the count of nodes.

    Each node of the next level is the sum of ``TILE`` elements of a range, or fewer at its end.
    """
    return np.concatenate([[0], np.cumsum(-(-(stops - starts) // TILE))]).astype(np.int64)


@kernel("void(const T[::1], i8[::1])")
def _lowest_nonfinite(x: Array, lowest: Array) -> None:
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        if not _is_finite(x[i]):
            cuda.atomic.min(lowest, 0, i)


def all_finite(x: Array) -> bool:
    """Tell whether no element of ``x`` is infinite or NaN."""
    return first_nonfinite(x) < 0


def first_nonfinite(x: Array) -> int:
    """Return the index of the first element of ``x`` that is infinite or NaN, or -1 if there is none."""
    lowest = np.array([x.size], np.int64)
    _lowest_nonfinite(x, lowest)
    return int(lowest[0]) if lowest[0] < x.size else -1


@kernel("void(const T[:,::1], const T[:,::1], i8, T[:,::1])")
def add_two(a: Array, b: Array, start: int, out: Array) -> None:
    """Write the elementwise sum of two matrices, from column ``start`` on, to ``out``."""
    columns = out.shape[1]
    for index in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        r, i = index // columns, index % columns
        out[r, i] = a[r, start + i] + b[r, start + i]


@kernel("void(const T[:,::1], const T[:,::1], const T[:,::1], const T[:,::1], i8, T[:,::1])")
def add_four(a: Array, b: Array, c: Array, d: Array, start: int, out: Array) -> None:
    """Write the elementwise sum of four matrices, from column ``start`` on, to ``out``: ``(a + b) + (c + d)``."""
    columns = out.shape[1]
    for index in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        r, i = index // columns, index % columns
        out[r, i] = (a[r, start + i] + b[r, start + i]) + (c[r, start + i] + d[r, start + i])


@kernel(
    "void(const T[:,::1], const T[:,::1], const T[:,::1], const T[:,::1], "
    "const T[:,::1], const T[:,::1], const T[:,::1], const T[:,::1], i8, T[:,::1])"
)
def add_eight(
    a: Array, b: Array, c: Array, d: Array, e: Array, f: Array, g: Array, h: Array, start: int, out: Array
) -> None:
    """Write the elementwise sum of eight matrices, from column ``start`` on, to ``out``, added as a binary tree."""
    columns = out.shape[1]
    for index in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        r, i = index // columns, index % columns
        j = start + i
        out[r, i] = ((a[r, j] + b[r, j]) + (c[r, j] + d[r, j])) + ((e[r, j] + f[r, j]) + (g[r, j] + h[r, j]))


@kernel("void(const u4[::1], const u4[::1], u4[::1])")
def philox(counter: Array, key: Array, out: Array) -> None:
    """Write the four random words that Philox computes from a counter (four words) and a key (two words) to ``out``.

    A word has 32 bits.
    """
    if cuda.grid(1) == 0:
        a, b, c, d = philox_words(
            np.uint64(counter[0]),
            np.uint64(counter[1]),
            np.uint64(counter[2]),
            np.uint64(counter[3]),
            np.uint64(key[0]),
            np.uint64(key[1]),
        )
        out[0], out[1], out[2], out[3] = np.uint32(a), np.uint32(b), np.uint32(c), np.uint32(d)


def put(out: Array, index: Any, value: Any) -> None:
    """Write ``value`` to ``out[index]`` if ``index`` is an index of ``out``; otherwise do nothing."""
    if 0 <= index < out.size:
        out[index] = value


@kernel("void(u8, u8, u8, i8, T[::1], const T[::1], const T[::1])")
def fill_uniform(key0: int, key1: int, site: int, start: int, out: Array, low1: Array, high1: Array) -> None:
    """Write uniform random numbers on [low1[0], high1[0]) to ``out``: a range of a random sequence.

    The sequence is determined by the key (the low 32 bits of ``key0`` and of ``key1``) and the 64-bit number ``site``.
    The range begins with element ``start`` of the sequence.
    """
    T = out.dtype.type  # noqa: N806
    per, low, high = values_per_block(T), low1[0], high1[0]
    k0, k1, s0, s1 = low_word(key0), low_word(key1), low_word(site), high_word(site)
    first_block = start // per
    blocks = (start + out.size + per - 1) // per - first_block
    for b in range(cuda.grid(1), blocks, cuda.gridsize(1)):
        block = first_block + b
        w0, w1, w2, w3 = philox_words(low_word(block), high_word(block), s0, s1, k0, k1)
        a, c, e, f = units(w0, w1, w2, w3, T)
        index = block * per - start
        put(out, index, scaled_unit(a, low, high))
        put(out, index + 1, scaled_unit(c, low, high))
        if per == 4:
            put(out, index + 2, scaled_unit(e, low, high))
            put(out, index + 3, scaled_unit(f, low, high))


@kernel("void(u8, u8, u8, i8, T[::1], const T[::1])")
def fill_normal(key0: int, key1: int, site: int, start: int, out: Array, scale1: Array) -> None:
    """Write normal random numbers of mean 0 and standard deviation ``scale1[0]`` to ``out``.

    The numbers are a range of a random sequence, from element ``start`` on. The sequence is determined by the key (the
    low 32 bits of ``key0`` and of ``key1``) and the 64-bit number ``site``.
    """
    T = out.dtype.type  # noqa: N806
    per, scale = values_per_block(T), scale1[0]
    k0, k1, s0, s1 = low_word(key0), low_word(key1), low_word(site), high_word(site)
    first_block = start // per
    blocks = (start + out.size + per - 1) // per - first_block
    for b in range(cuda.grid(1), blocks, cuda.gridsize(1)):
        block = first_block + b
        w0, w1, w2, w3 = philox_words(low_word(block), high_word(block), s0, s1, k0, k1)
        a, c, e, f = normals(w0, w1, w2, w3, T)
        index = block * per - start
        put(out, index, a * scale)
        put(out, index + 1, c * scale)
        if per == 4:
            put(out, index + 2, e * scale)
            put(out, index + 3, f * scale)


@kernel("void(const T[::1], T[::1], const T[::1], u8, u8, u8, i8, i8, i8, i8, i8, i8, i8)")
def dropout(
    x: Array,
    y: Array,
    rate1: Array,
    seed: int,
    site: int,
    step: int,
    first_sample: int,
    per_sample: int,
    offset: int,
    width: int,
    rows: int,
    row_step: int,
    plane_step: int,
) -> None:
    """Write ``x / (1 - rate)`` or, with probability ``rate``, 0 to ``y``, which may be ``x``; rate = ``rate1[0]``.

    The arguments are those of :func:`mpizero.kernels.cpu.reduction.dropout`.
    """
    T = x.dtype.type  # noqa: N806
    k0, k1, _, _ = dropout_key(seed, site, step)
    threshold, scale = dropout_threshold(rate1[0]), T(1) / (T(1) - rate1[0])
    per_line = (width + 6) // 4  # blocks that a row may touch, wherever in a block it starts
    samples = x.size // per_sample if per_sample > 0 else 0
    lines = per_sample // width if width > 0 else 0
    for task in range(cuda.grid(1), samples * lines * per_line, cuda.gridsize(1)):
        sample, line = task // per_line // lines, task // per_line % lines
        element = offset + line // rows * plane_step + line % rows * row_step
        block = element // 4 + task % per_line
        s0, s1 = low_word(first_sample + sample), high_word(first_sample + sample)
        words = philox_words(low_word(block), high_word(block), s0, s1, k0, k1)
        first = 4 * block - element
        for lane in range(4):
            if 0 <= first + lane < width:
                index = sample * per_sample + line * width + first + lane
                y[index] = x[index] * scale if words[lane] >= threshold else T(0)


@kernel("void(i8[::1], i8, u8, u8)")
def permutation(index: Array, length: int, seed: int, epoch: int) -> None:
    """Replace every index by its image under a random permutation of ``range(length)``, in place.

    The arguments are those of :func:`mpizero.kernels.cpu.reduction.permutation`.
    """
    first, second = round_keys(seed, epoch, 0), round_keys(seed, epoch, 1)
    bits = half_bits(length)
    for i in range(cuda.grid(1), index.size, cuda.gridsize(1)):
        index[i] = permuted(index[i], length, bits, first, second)
