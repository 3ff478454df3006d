"""Draw counter-based random numbers (Philox 4x32-10) on the CPU, for several Philox blocks of four words at a time."""

from __future__ import annotations

import numpy as np

from mpizero.kernels.jit import kernel
from mpizero.kernels.special_functions import (
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

    They are a range of a random sequence, which begins with element ``start`` of the sequence. The sequence is
    determined by the key (the low 32 bits of ``key0`` and of ``key1``) and the 64-bit number ``site``.
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
                source, target, kept = x[begin : begin + count], y[begin : begin + count], factors[skip : skip + count]
                for i in range(count):
                    results[i] = source[i] * kept[i] if kept[i] > T(0) else T(0)
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
