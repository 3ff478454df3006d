"""Sum in one fixed order, find infinite and NaN values, and draw random numbers, on the CPU.

Sums are the same on any number of ranks. The order of additions is a binary tree over the index of the elements:
node(level, i) = node(level - 1, 2 i) + node(level - 1, 2 i + 1), where a node without a right child equals its left
child. All sums are in float64. A block of ``BLOCK`` elements (a power of two, so a block is a node of the tree) is
summed level by level, which vectorizes. The sums of the blocks are kept in a binary counter: entry k is a node over
2**k blocks, and two nodes of one level are added as soon as both exist.

Random numbers are counter-based (Philox 4x32-10), computed for several Philox blocks of four words at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.kernels import formulas
from mpizero.kernels.jit import fetch_ahead, kernel
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

BLOCK = 1024
_LINE = 64  # elements that are tested beside each other
LEVELS = 64

_is_finite = formulas.is_finite


def _halve(source: Array, target: Array, count: int) -> int:
    """Write a level of the tree to ``target``: the sums of neighbours among the first ``count`` numbers in ``source``.

    A last number without a neighbour is copied. Return how many numbers were written.
    """
    pairs = count // 2
    for i in range(pairs):
        target[i] = source[2 * i] + source[2 * i + 1]
    if count % 2:
        target[pairs] = source[count - 1]
        return pairs + 1
    return pairs


def _top(even: Array, odd: Array, count: int) -> Any:
    """Return the sum of the first ``count`` numbers in ``even``, in the order of the tree.

    ``even`` and ``odd`` are overwritten in turn, by the sums of one level of the tree after the other.
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
    """Return the sum of all nodes (sums of blocks) in the binary counter, added from the smallest (the last blocks) on.

    ``pending[k]`` is a node, the sum of 2**k blocks, if bit k of ``blocks`` is set. If ``has_value``, the sum starts
    with ``value``, the sum of an incomplete block after the others.
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

    The dot product of an empty range is 0. The sum is computed in float64, in the order of a binary tree over the
    elements of the range.
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
    in_blocks = x.size // BLOCK * BLOCK
    for block in range(0, in_blocks, BLOCK):
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
    return _count_nonfinite(x[in_blocks:]) == 0


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
    """Write the elementwise sum of two matrices, from column ``start`` on, to ``out``."""
    for r in range(out.shape[0]):
        to = out[r]
        aa, bb = a[r, start : start + to.size], b[r, start : start + to.size]
        for i in range(to.size):
            to[i] = aa[i] + bb[i]


@kernel("void(const T[:,::1], const T[:,::1], const T[:,::1], const T[:,::1], i8, T[:,::1])")
def add_four(a: Array, b: Array, c: Array, d: Array, start: int, out: Array) -> None:
    """Write the elementwise sum of four matrices, from column ``start`` on, to ``out``: ``(a + b) + (c + d)``."""
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
    """Write the elementwise sum of eight matrices, from column ``start`` on, to ``out``, added as a binary tree."""
    for r in range(out.shape[0]):
        to = out[r]
        aa, bb = a[r, start : start + to.size], b[r, start : start + to.size]
        cc, dd = c[r, start : start + to.size], d[r, start : start + to.size]
        ee, ff = e[r, start : start + to.size], f[r, start : start + to.size]
        gg, hh = g[r, start : start + to.size], h[r, start : start + to.size]
        for i in range(to.size):
            to[i] = ((aa[i] + bb[i]) + (cc[i] + dd[i])) + ((ee[i] + ff[i]) + (gg[i] + hh[i]))


# Philox blocks at a time; four words each.
_CHUNK = 64
_SCRATCH = 4 * _CHUNK
# For short rows dropout draws as many numbers as it needs, rounded up to whole vectors.
_ROUNDED = 32


@kernel("void(const u4[::1], const u4[::1], u4[::1])")
def philox(counter: Array, key: Array, out: Array) -> None:
    """Write the four random words that Philox computes from a counter (four words) and a key (two words) to ``out``.

    A word has 32 bits.
    """
    a, b, c, d = philox_words(
        np.uint64(counter[0]),
        np.uint64(counter[1]),
        np.uint64(counter[2]),
        np.uint64(counter[3]),
        np.uint64(key[0]),
        np.uint64(key[1]),
    )
    out[0], out[1], out[2], out[3] = np.uint32(a), np.uint32(b), np.uint32(c), np.uint32(d)


@kernel("void(u8, u8, u8, i8, T[::1], const T[::1], const T[::1], T[::1])", scratch=_SCRATCH)
def fill_uniform(
    key0: int, key1: int, site: int, start: int, out: Array, low1: Array, high1: Array, chunk: Array
) -> None:
    """Write uniform random numbers on [low1[0], high1[0]) to ``out``: a range of a random sequence.

    The sequence is determined by the key (the low 32 bits of ``key0`` and of ``key1``) and the 64-bit number ``site``.
    The range begins with element ``start`` of the sequence.
    """
    T = out.dtype.type  # noqa: N806
    per, low, high = values_per_block(T), low1[0], high1[0]
    k0, k1, s0, s1 = low_word(key0), low_word(key1), low_word(site), high_word(site)
    first_block = start // per
    skip, done = start - first_block * per, 0
    while done < out.size:
        for b in range(_CHUNK):
            block = np.uint64(first_block + b)
            w0, w1, w2, w3 = philox_words(low_word(block), high_word(block), s0, s1, k0, k1)
            a, c, e, f = units(w0, w1, w2, w3, T)
            chunk[per * b] = scaled_unit(a, low, high)
            chunk[per * b + 1] = scaled_unit(c, low, high)
            if per == 4:
                chunk[4 * b + 2] = scaled_unit(e, low, high)
                chunk[4 * b + 3] = scaled_unit(f, low, high)
        count = min(per * _CHUNK - skip, out.size - done)
        target, source = out[done : done + count], chunk[skip : skip + count]
        for i in range(count):
            target[i] = source[i]
        done, skip, first_block = done + count, 0, first_block + _CHUNK


@kernel("void(u8, u8, u8, i8, T[::1], const T[::1], T[::1])", scratch=_SCRATCH)
def fill_normal(key0: int, key1: int, site: int, start: int, out: Array, scale1: Array, chunk: Array) -> None:
    """Write normal random numbers of mean 0 and standard deviation ``scale1[0]`` to ``out``.

    The numbers are a range of a random sequence, from element ``start`` on. The sequence is determined by the key (the
    low 32 bits of ``key0`` and of ``key1``) and the 64-bit number ``site``.
    """
    T = out.dtype.type  # noqa: N806
    per, scale = values_per_block(T), scale1[0]
    k0, k1, s0, s1 = low_word(key0), low_word(key1), low_word(site), high_word(site)
    first_block = start // per
    skip, done = start - first_block * per, 0
    while done < out.size:
        for b in range(_CHUNK):
            block = np.uint64(first_block + b)
            w0, w1, w2, w3 = philox_words(low_word(block), high_word(block), s0, s1, k0, k1)
            a, c, e, f = normals(w0, w1, w2, w3, T)
            chunk[per * b] = a * scale
            chunk[per * b + 1] = c * scale
            if per == 4:
                chunk[4 * b + 2] = e * scale
                chunk[4 * b + 3] = f * scale
        count = min(per * _CHUNK - skip, out.size - done)
        target, source = out[done : done + count], chunk[skip : skip + count]
        for i in range(count):
            target[i] = source[i]
        done, skip, first_block = done + count, 0, first_block + _CHUNK


@kernel(
    "void(const T[::1], T[::1], const T[::1], u8, u8, u8, i8, i8, i8, i8, i8, i8, i8, T[::1])", scratch=2 * _SCRATCH
)
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
    scratch: Array,
) -> None:
    """Write ``x / (1 - rate)`` or, with probability ``rate``, 0 to ``y``, which may be ``x``; rate = ``rate1[0]``.

    ``x`` holds a part of each sample, with ``per_sample`` elements: planes of ``rows`` rows of ``width`` elements.
    Element j of row r of plane p is element ``offset + p * plane_step + r * row_step + j`` of the whole sample. (If
    ``x`` holds whole samples, ``offset`` is 0, and each sample is one row.) Whether an element is set to 0 depends on
    ``seed``, ``site`` (the dropout layer), ``step``, the index of the sample in the global batch, and the element's
    index in the whole sample. ``first_sample`` is the index of the first sample of ``x``. In the backward pass the
    kernel is called with the gradient of the output as ``x``.
    """
    T = x.dtype.type  # noqa: N806
    k0, k1, _, _ = dropout_key(seed, site, step)
    threshold, scale = dropout_threshold(rate1[0]), T(1) / (T(1) - rate1[0])
    factors, results = scratch[:_SCRATCH], scratch[_SCRATCH : 2 * _SCRATCH]
    samples = x.size // per_sample if per_sample > 0 else 0
    lines = per_sample // width if width > 0 else 0
    for sample in range(samples):
        s0, s1 = low_word(first_sample + sample), high_word(first_sample + sample)
        for line in range(lines):
            element = offset + line // rows * plane_step + line % rows * row_step
            begin, end = sample * per_sample + line * width, sample * per_sample + (line + 1) * width
            while begin < end:
                first_block = element // 4
                skip = element - 4 * first_block
                count = min(_SCRATCH - skip, end - begin)
                few = (skip + count + _ROUNDED - 1) // _ROUNDED * (_ROUNDED // 4)
                for b in range(few if count < _SCRATCH // 2 else _CHUNK):
                    block = np.uint64(first_block + b)
                    w0, w1, w2, w3 = philox_words(low_word(block), high_word(block), s0, s1, k0, k1)
                    factors[4 * b] = T(0) if w0 < threshold else scale
                    factors[4 * b + 1] = T(0) if w1 < threshold else scale
                    factors[4 * b + 2] = T(0) if w2 < threshold else scale
                    factors[4 * b + 3] = T(0) if w3 < threshold else scale
                source, target, mask = x[begin : begin + count], y[begin : begin + count], factors[skip : skip + count]
                for i in range(count):
                    results[i] = source[i] * mask[i] if mask[i] > T(0) else T(0)
                for i in range(count):
                    target[i] = results[i]
                begin, element = begin + count, element + count


@kernel("void(i8[::1], i8, u8, u8)")
def permutation(index: Array, length: int, seed: int, epoch: int) -> None:
    """Replace every index by its image under a random permutation of ``range(length)``, in place.

    ``seed`` and ``epoch`` determine the permutation. Indices outside ``range(length)`` become -1. A Feistel network of
    eight rounds permutes ``range(4**h)``, the smallest such range with at least ``length`` numbers. An image that is
    not less than ``length`` is permuted again (cycle walking; Black and Rogaway 2002).
    """
    first, second = round_keys(seed, epoch, 0), round_keys(seed, epoch, 1)
    bits = half_bits(length)
    for i in range(index.size):
        index[i] = permuted(index[i], length, bits, first, second)
