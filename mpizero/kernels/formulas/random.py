"""Compute Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), and random numbers of its words.

Words are uint64 values below 2**32, so that products need no wider type and nothing overflows in plain Python.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpizero.kernels.formulas.elementary import cos_sin_turn, logarithm

_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
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
    """Return the counter after one round."""
    a, b = _MULTIPLY_0 * c0, _MULTIPLY_1 * c2
    return (b >> _32) ^ c1 ^ k0, b & _LOW, (a >> _32) ^ c3 ^ k1, a & _LOW


def philox_words(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Return the four words of a counter and a key after ten rounds."""
    for _ in range(10):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def derived_key(seed: Any, purpose: Any, first: Any, second: Any) -> Any:
    """Return four key words that depend on a seed, a purpose and two more integers."""
    return philox_words(
        low_word(first),
        high_word(first),
        low_word(second),
        high_word(second),
        low_word(seed),
        high_word(seed) ^ purpose,
    )


def dropout_key(seed: Any, site: Any, step: Any) -> Any:
    """Return the words whose first two are the key of one dropout layer in one step."""
    return derived_key(seed, _DROPOUT, site, step)


def dropout_threshold(rate: Any) -> Any:
    """Return the word below which an element is dropped."""
    return np.uint64(np.float64(rate) * 4294967296.0)


def units(w0: Any, w1: Any, w2: Any, w3: Any, T: Any) -> Any:  # noqa: N803
    """Return uniform numbers on [0, 1): four of 24 bits in float32, two of 53 bits (given twice) in float64."""
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
    """Return low + (high - low) * unit, kept below ``high`` where rounding would reach it."""
    value = low + (high - low) * unit
    return value if value < high else low


def box_muller(a: Any, b: Any, T: Any) -> Any:  # noqa: N803
    """Return two independent normal numbers from a in (0, 1] and b in [0, 1) (Box and Muller 1958)."""
    radius = T(math.sqrt(T(-2.0) * logarithm(a, T)))
    cosine, sine = cos_sin_turn(b, T)
    return radius * cosine, radius * sine


def normals(w0: Any, w1: Any, w2: Any, w3: Any, T: Any) -> Any:  # noqa: N803
    """Return standard normal numbers: four in float32, two (given twice) in float64."""
    if T is np.float32:
        # All 32 bits for the radius, which float32 resolves near 0: tails to 6.7 standard deviations.
        whole, half = T(2.0**-32), T(2.0**-33)
        _, b, _, d = units(w0, w1, w2, w3, T)
        x0, x1 = box_muller(T(np.int64(w0)) * whole + half, b, T)
        x2, x3 = box_muller(T(np.int64(w2)) * whole + half, d, T)
        return x0, x1, x2, x3
    a, b, _, _ = units(w0, w1, w2, w3, T)
    x0, x1 = box_muller(a + T(2.0**-54), b, T)
    return x0, x1, x0, x1


def round_keys(seed: Any, epoch: Any, part: Any) -> Any:
    """Return four of the eight round keys of a permutation (``part`` 0 or 1)."""
    return derived_key(seed, _PERMUTATION, epoch, np.uint64(part))


def feistel_mix(half: Any, key: Any) -> Any:
    """Return 32 bits that depend on all bits of a half and a round key."""
    p = (half ^ key) * _MULTIPLY_0
    p = ((p >> _32) ^ (p & _LOW) ^ key) * _MULTIPLY_1
    return (p >> _32) ^ (p & _LOW)


def half_bits(length: Any) -> Any:
    """Return the smallest h >= 1 with 4**h >= length."""
    bits = np.int64(1)
    while (np.int64(1) << (np.int64(2) * bits)) < length:
        bits += np.int64(1)
    return bits


def feistel_image(value: Any, bits: Any, first: Any, second: Any) -> Any:
    """Return the image of ``value`` < 4**bits after eight rounds with the keys of two tuples."""
    mask = (_ONE << bits) - _ONE
    left, right = value >> bits, value & mask
    for key in first:
        left, right = right, left ^ (feistel_mix(right, key) & mask)
    for key in second:
        left, right = right, left ^ (feistel_mix(right, key) & mask)
    return (left << bits) | right


def permuted(index: Any, length: Any, bits: Any, first: Any, second: Any) -> Any:
    """Return the image of an index in ``range(length)``; -1 for an index outside."""
    if index < 0 or index >= length:
        return np.int64(-1)
    # Cycle walking: an image beyond the length is sent through again, which ends since the whole map is a bijection.
    image = feistel_image(np.uint64(index), np.uint64(bits), first, second)
    while image >= np.uint64(length):
        image = feistel_image(image, np.uint64(bits), first, second)
    return np.int64(image)


def values_per_block(T: Any) -> Any:  # noqa: N803
    """Return how many floating-point numbers a Philox block makes."""
    if T is np.float32:
        return 4
    return 2
