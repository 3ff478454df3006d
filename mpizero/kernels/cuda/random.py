"""Draw counter-based random numbers (Philox 4x32-10) on the GPU: one thread per Philox block, or per permuted index."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.kernels.cuda.launch import cuda, kernel
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


def put(out: Array, place: Any, value: Any) -> None:
    """Write ``value`` to ``out[place]`` if ``place`` is an index of ``out``; otherwise do nothing."""
    if 0 <= place < out.size:
        out[place] = value


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
        place = block * per - start
        put(out, place, scaled_unit(a, low, high))
        put(out, place + 1, scaled_unit(c, low, high))
        if per == 4:
            put(out, place + 2, scaled_unit(e, low, high))
            put(out, place + 3, scaled_unit(f, low, high))


@kernel("void(u8, u8, u8, i8, T[::1], const T[::1])")
def fill_normal(key0: int, key1: int, site: int, start: int, out: Array, scale1: Array) -> None:
    """Write normal random numbers of mean 0 and standard deviation ``scale1[0]`` to ``out``.

    They are a range of a random sequence, which begins with element ``start`` of the sequence. The sequence is
    determined by the key (the low 32 bits of ``key0`` and of ``key1``) and the 64-bit number ``site``.
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
        place = block * per - start
        put(out, place, a * scale)
        put(out, place + 1, c * scale)
        if per == 4:
            put(out, place + 2, e * scale)
            put(out, place + 3, f * scale)


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

    The arguments are those of :func:`mpizero.kernels.cpu.random.dropout`.
    """
    T = x.dtype.type  # noqa: N806
    k0, k1, _, _ = dropout_key(seed, site, step)
    threshold, scale = dropout_threshold(rate1[0]), T(1) / (T(1) - rate1[0])
    per_line = (width + 6) // 4  # blocks that a row may touch, wherever in a block it starts
    samples = x.size // per_sample if per_sample > 0 else 0
    lines = per_sample // width if width > 0 else 0
    for place in range(cuda.grid(1), samples * lines * per_line, cuda.gridsize(1)):
        sample, line = place // per_line // lines, place // per_line % lines
        element = offset + line // rows * plane_step + line % rows * row_step
        block = element // 4 + place % per_line
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

    The arguments are those of :func:`mpizero.kernels.cpu.random.permutation`.
    """
    first, second = round_keys(seed, epoch, 0), round_keys(seed, epoch, 1)
    bits = half_bits(length)
    for i in range(cuda.grid(1), index.size, cuda.gridsize(1)):
        index[i] = permuted(index[i], length, bits, first, second)
