"""Compute random numbers, for CPU and GPU kernels.

The numbers are made of the words of Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011). A word has 32 bits. Words are
stored as uint64, so that products of two words do not overflow, in plain Python either. ``T`` is the type of the
numbers, np.float32 or np.float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpizero.kernels.elementary import cos_sin_turn, logarithm

_LOW = np.uint64(0xFFFFFFFF)
_ONE_BIT = np.uint64(1)
_32 = np.uint64(32)
_MULTIPLY_0 = np.uint64(0xD2511F53)
_MULTIPLY_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
# Words of the key that separate the uses of one seed.
_DROPOUT = np.uint64(0xD809)
_PERMUTATION = np.uint64(0x9E12)
_5 = np.uint64(5)
_6 = np.uint64(6)
_8 = np.uint64(8)
_26 = np.uint64(26)


def low_word(value: Any) -> Any:
    """Return the low 32 bits of an integer, which may be negative."""
    return np.uint64(value & 0xFFFFFFFF)


def high_word(value: Any) -> Any:
    """Return the high 32 bits of a 64-bit integer, which may be negative."""
    return np.uint64((value >> 32) & 0xFFFFFFFF)


def philox_round(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Return the words c0 to c3 of the counter after one round of Philox with the words k0 and k1 of the key."""
    a, b = _MULTIPLY_0 * c0, _MULTIPLY_1 * c2
    return (b >> _32) ^ c1 ^ k0, b & _LOW, (a >> _32) ^ c3 ^ k1, a & _LOW


def philox_words(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Return the four random words of a counter (words c0 to c3) and a key (words k0 and k1): ten rounds."""
    for _ in range(10):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def derived_key(seed: Any, purpose: Any, first: Any, second: Any) -> Any:
    """Return four words that depend on a seed, a purpose and two more 64-bit integers, to be used as keys.

    ``purpose`` is a word that separates different uses of a seed.
    """
    return philox_words(
        low_word(first),
        high_word(first),
        low_word(second),
        high_word(second),
        low_word(seed),
        high_word(seed) ^ purpose,
    )


def dropout_key(seed: Any, site: Any, step: Any) -> Any:
    """Return four words that depend on a seed, a dropout layer (``site``) and a step.

    The first two words are the Philox key with which the layer draws its mask in this step.
    """
    return derived_key(seed, _DROPOUT, site, step)


def dropout_threshold(rate: Any) -> Any:
    """Return ``rate * 2**32``: an element is dropped if its random word is less than this."""
    return np.uint64(np.float64(rate) * 4294967296.0)


def units(w0: Any, w1: Any, w2: Any, w3: Any, T: Any) -> Any:  # noqa: N803
    """Return four uniform random numbers on [0, 1) from the four words w0 to w3 of a Philox block.

    In float32 the numbers have 24 random bits each. In float64 a block gives only two numbers of 53 bits, a and b,
    which are returned as (a, b, a, b).
    """
    if T is np.float32:
        fraction = T(2.0**-24)
        return (
            T(np.int32(w0 >> _8)) * fraction,
            T(np.int32(w1 >> _8)) * fraction,
            T(np.int32(w2 >> _8)) * fraction,
            T(np.int32(w3 >> _8)) * fraction,
        )
    a = T(np.int64(((w0 >> _5) << _26) | (w1 >> _6))) * T(2.0**-53)
    b = T(np.int64(((w2 >> _5) << _26) | (w3 >> _6))) * T(2.0**-53)
    return a, b, a, b


def scaled_unit(unit: Any, low: Any, high: Any) -> Any:
    """Return ``low + (high - low) * unit`` for ``unit`` in [0, 1).

    If the sum is rounded to ``high``, return ``low``, so that the result is always less than ``high``.
    """
    value = low + (high - low) * unit
    return value if value < high else low


def box_muller(a: Any, b: Any, T: Any) -> Any:  # noqa: N803
    """Return two independent normal numbers from uniform ones, a in (0, 1] and b in [0, 1) (Box and Muller 1958)."""
    radius = T(math.sqrt(T(-2.0) * logarithm(a, T)))
    cosine, sine = cos_sin_turn(b, T)
    return radius * cosine, radius * sine


def normals(w0: Any, w1: Any, w2: Any, w3: Any, T: Any) -> Any:  # noqa: N803
    """Return four standard normal random numbers from the four words w0 to w3 of a Philox block.

    In float64 a block gives only two numbers, a and b, which are returned as (a, b, a, b).
    """
    if T is np.float32:
        # All 32 bits for the radius, which float32 resolves near 0: tails to 6.7 standard deviations.
        unit, half = T(2.0**-32), T(2.0**-33)
        _, b, _, d = units(w0, w1, w2, w3, T)
        x0, x1 = box_muller(T(np.int64(w0)) * unit + half, b, T)
        x2, x3 = box_muller(T(np.int64(w2)) * unit + half, d, T)
        return x0, x1, x2, x3
    a, b, _, _ = units(w0, w1, w2, w3, T)
    x0, x1 = box_muller(a + T(2.0**-54), b, T)
    return x0, x1, x0, x1


def round_keys(seed: Any, epoch: Any, part: Any) -> Any:
    """Return four of a permutation's eight round keys: the first four (``part`` = 0) or the last four (1)."""
    return derived_key(seed, _PERMUTATION, epoch, np.uint64(part))


def feistel_mix(half: Any, key: Any) -> Any:
    """Return a word that depends on all bits of ``half`` and ``key``: the round function of a Feistel network."""
    p = (half ^ key) * _MULTIPLY_0
    p = ((p >> _32) ^ (p & _LOW) ^ key) * _MULTIPLY_1
    return (p >> _32) ^ (p & _LOW)


def half_bits(length: Any) -> Any:
    """Return the smallest h >= 1 with 4**h >= length: the number of bits of each half in a Feistel network."""
    bits = np.int64(1)
    while (np.int64(1) << (np.int64(2) * bits)) < length:
        bits += np.int64(1)
    return bits


def feistel_image(value: Any, bits: Any, first: Any, second: Any) -> Any:
    """Return the image of ``value`` < 4**bits under a Feistel network of eight rounds.

    ``first`` and ``second`` are the keys of the first four and of the last four rounds.
    """
    mask = (_ONE_BIT << bits) - _ONE_BIT
    left, right = value >> bits, value & mask
    for key in first:
        left, right = right, left ^ (feistel_mix(right, key) & mask)
    for key in second:
        left, right = right, left ^ (feistel_mix(right, key) & mask)
    return (left << bits) | right


def permuted(index: Any, length: Any, bits: Any, first: Any, second: Any) -> Any:
    """Return the image of ``index`` under a permutation of ``range(length)``; -1 if it is not in this range.

    ``bits`` is ``half_bits(length)``; ``first`` and ``second`` are the round keys from :func:`round_keys`.
    """
    if index < 0 or index >= length:
        return np.int64(-1)
    # Cycle walking: an image beyond the length is sent through again, which ends since the whole map is a bijection.
    image = feistel_image(np.uint64(index), np.uint64(bits), first, second)
    while image >= np.uint64(length):
        image = feistel_image(image, np.uint64(bits), first, second)
    return np.int64(image)


def values_per_block(T: Any) -> Any:  # noqa: N803
    """Return how many random numbers of type ``T`` a Philox block of four words gives: 4 in float32, 2 in float64."""
    if T is np.float32:
        return 4
    return 2
