"""Compute elementary functions of one number and random numbers, for CPU and GPU kernels.

``T`` is the number's type, np.float32 or np.float64. In float64 these are the functions of ``math``. In float32 they
are polynomials without calls, tables or undefined conversions, because a call to libm stops LLVM from vectorizing the
loop around it. No step needs a fused multiply-add. So the vectorized part and the rest of a loop round alike, and a
value does not depend on its position in a range.

The coefficients are weighted minimax fits of this project (Lawson's iteration on 4001 Chebyshev nodes, weight =
relative error of the result), rounded to float32.

Random numbers come from the words of Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011). A word has 32 bits. Words
are stored as uint64, so that products of two words do not overflow, in plain Python either.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def _singles(*values: float) -> Any:
    """Return ``values`` as a tuple of float32 scalars."""
    return tuple(map(np.float32, values))


_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_THREE = np.float32(3.0)
_HALF = np.float32(0.5)

# Coefficients begin with that of the highest power.
# exp(r) = 1 + r + r**2 * q(r) on |r| <= log(2) / 2, relative error 5e-2 ulp before rounding.
_EXP_Q = _singles(
    0.001381459878757596, 0.008368716575205326, 0.04166838899254799, 0.1666652113199234, 0.4999999403953552
)
_LOG2_E = np.float32(1.4426950408889634)
# log(2) in two parts; the first has few bits, so that its product with an exponent is exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.1219444005469057e-4)
# 1.5 * 2**23: adding it rounds to an integer and leaves that integer in the low bits; no float-to-int conversion,
# which is undefined for NaN and inf.
_ROUND = np.float32(12582912.0)
_EXP_LOW = np.float32(-87.5)
_EXP_HIGH = np.float32(89.0)
_BIAS = np.int32(126)
_ROUND_BITS = np.int32(0x4B400000)
_SHIFT = np.int32(23)

# 2**r = 1 + r * q(r) on |r| <= 1/2, relative error 1.6 ulp.
_EXP2_Q = _singles(
    0.001326471334323287, 0.009671523235738277, 0.05550733953714371, 0.24022242426872253, 0.6931470036506653
)
_EXP2_BIAS = np.int32(127)

# tanh(x) = x + x**3 * q(x**2) on |x| <= 0.625.
_TANH_Q = _singles(
    -0.005704986862838268, 0.0206390880048275, -0.05373971536755562, 0.13331441581249237, -0.3333328068256378
)
_TANH_SMALL = np.float32(0.625)
_TANH_LARGE = np.float32(10.0)

# log(1 + t) = t - t**2 / 2 + t**3 * q(t) on [sqrt(1/2) - 1, sqrt(2) - 1].
_LOG_LOW = _singles(-0.1666799634695053, 0.2000211924314499, -0.25000008940696716, 0.3333331346511841)
_LOG_HIGH = _singles(
    0.06746640801429749, -0.11675652116537094, 0.11888162046670914, -0.1240558922290802, 0.14219552278518677
)
# The bit pattern of sqrt(1/2): subtracting it before the exponent is cut puts the mantissa into [sqrt(1/2), sqrt(2)).
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_MANTISSA = np.int32(0x007FFFFF)

# sin(2 pi t) = t * s(t**2) and cos(2 pi t) = c(t**2) on |t| <= 1/8.
_SIN_S = _singles(-75.40206909179688, 81.5925521850586, -41.3416633605957, 6.2831854820251465)
_COS_C = _singles(59.22040557861328, -85.44285583496094, 64.93931579589844, -19.739208221435547, 1.0)
_QUARTER = np.float32(0.25)
_FOUR = np.float32(4.0)
_TWO_PI = 2.0 * math.pi


def polynomial(x: Any, c4: Any, c3: Any, c2: Any, c1: Any, c0: Any) -> Any:
    """Return ``c4 * x**4 + c3 * x**3 + ... + c0`` by Horner's scheme."""
    return (((c4 * x + c3) * x + c2) * x + c1) * x + c0


def exp_single(x: Any) -> Any:
    """Return exp(x) of a float32 within 1.1 ulp: infinity on overflow, NaN for NaN.

    Results below 1.7e-38 are 0, because subnormal numbers would make every loop that computes with them up to a hundred
    times slower.
    """
    above = _EXP_LOW if x < _EXP_LOW else x
    c = _EXP_HIGH if above > _EXP_HIGH else above
    shifted = c * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (c - n * _LN2_HIGH) - n * _LN2_LOW
    q = polynomial(r, *_EXP_Q)
    p = (q * (r * r) + r) + _ONE
    # 2**(n - 1) for n in -126 .. 128, as bits; 0 for n = -126. Twice p makes up for the one.
    k = np.int32(np.float32(shifted).view(np.int32) - _ROUND_BITS)
    scale = np.int32(np.int32(k + _BIAS) << _SHIFT).view(np.float32)
    return (p + p) * scale


def exp2_single(x: Any) -> Any:
    """Return 2**x of a float32 in [-127, 128.4] within 2.5 ulp: 0 below -126.5, infinity above 127.5, NaN for NaN."""
    shifted = x + _ROUND
    r = x - (shifted - _ROUND)
    q = polynomial(r, *_EXP2_Q)
    p = q * r + _ONE
    k = np.int32(np.float32(shifted).view(np.int32) - _ROUND_BITS)
    return p * np.int32(np.int32(k + _EXP2_BIAS) << _SHIFT).view(np.float32)


def tanh_single(x: Any) -> Any:
    """Return tanh(x) of a float32 within 2 ulp."""
    square = x * x
    q = polynomial(square, *_TANH_Q)
    small = x + x * (square * q)
    size = abs(x)
    size = _TANH_LARGE if size > _TANH_LARGE else size
    large = _ONE - _TWO / (exp_single(size + size) + _ONE)
    large = -large if x < np.float32(0.0) else large
    return small if abs(x) <= _TANH_SMALL else large


def log_single(x: Any) -> Any:
    """Return log(x) of a positive, normal float32 within 1.5 ulp; other arguments give wrong results."""
    shifted = np.int32(np.float32(x).view(np.int32) - _SQRT_HALF_BITS)
    n = np.float32(np.int32(shifted >> _SHIFT))
    t = np.int32(np.int32(shifted & _MANTISSA) + _SQRT_HALF_BITS).view(np.float32) - _ONE
    q = polynomial(t, polynomial(t, *_LOG_HIGH), *_LOG_LOW)
    square = t * t
    return ((t * (square * q) + n * _LN2_LOW) - _HALF * square + t) + n * _LN2_HIGH


def cos_sin_turn_single(u: Any) -> Any:
    """Return (cos(2 pi u), sin(2 pi u)) of a float32 u in [0, 1]."""
    quarter = (u * _FOUR + _ROUND) - _ROUND
    t = u - quarter * _QUARTER
    square = t * t
    s = _SIN_S[0]
    s = s * square + _SIN_S[1]
    s = s * square + _SIN_S[2]
    s = s * square + _SIN_S[3]
    s = s * t
    c = polynomial(square, *_COS_C)
    odd = quarter in (_ONE, _THREE)
    cosine = s if odd else c
    sine = c if odd else s
    cosine = -cosine if quarter in (_ONE, _TWO) else cosine
    sine = -sine if quarter in (_TWO, _THREE) else sine
    return cosine, sine


def exponential(x: Any, T: Any) -> Any:  # noqa: N803
    """Return exp(x) as a number of type ``T``."""
    if T is np.float32:
        return T(exp_single(np.float32(x)))
    return T(math.exp(x))


def hyperbolic_tangent(x: Any, T: Any) -> Any:  # noqa: N803
    """Return tanh(x) as a number of type ``T``."""
    if T is np.float32:
        return T(tanh_single(np.float32(x)))
    return T(math.tanh(x))


def logarithm(x: Any, T: Any) -> Any:  # noqa: N803
    """Return log(x) of a positive, normal number as a number of type ``T``."""
    if T is np.float32:
        return T(log_single(np.float32(x)))
    return T(math.log(x))


def cos_sin_turn(u: Any, T: Any) -> Any:  # noqa: N803
    """Return (cos(2 pi u), sin(2 pi u)) of u in [0, 1] as numbers of type ``T``."""
    if T is np.float32:
        cosine, sine = cos_sin_turn_single(np.float32(u))
        return T(cosine), T(sine)
    angle = T(_TWO_PI) * u
    return T(math.cos(angle)), T(math.sin(angle))


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
    """Return the counter words c0 to c3 after one round of Philox with the key words k0 and k1."""
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
