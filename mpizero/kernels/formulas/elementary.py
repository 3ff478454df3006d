"""Compute elementary functions of one number, for CPU and GPU kernels.

``T`` is the number's type, np.float32 or np.float64. In float64 these are the functions of ``math``. In float32 they
are polynomials without calls, tables or undefined conversions, because a call to libm stops LLVM from vectorizing the
loop around it. No step needs a fused multiply-add. So the vectorized part and the rest of a loop round alike, and a
value does not depend on how a range was cut.

The coefficients are weighted minimax fits of this project (Lawson's iteration on 4001 Chebyshev nodes, weight =
relative error of the result), rounded to float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_THREE = np.float32(3.0)
_HALF = np.float32(0.5)

# exp(r) = 1 + r + r**2 * q(r) on |r| <= log(2) / 2, relative error 5e-2 ulp before rounding.
_EXP_Q = tuple(
    np.float32(c)
    for c in (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.008368716575205326, 0.001381459878757596)
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
_EXP2_Q = tuple(
    np.float32(c)
    for c in (0.6931470036506653, 0.24022242426872253, 0.05550733953714371, 0.009671523235738277, 0.001326471334323287)
)
_EXP2_BIAS = np.int32(127)

# tanh(x) = x + x**3 * q(x**2) on |x| <= 0.625.
_TANH_Q = tuple(
    np.float32(c)
    for c in (-0.3333328068256378, 0.13331441581249237, -0.05373971536755562, 0.0206390880048275, -0.005704986862838268)
)
_TANH_SMALL = np.float32(0.625)
_TANH_LARGE = np.float32(10.0)

# log(1 + t) = t - t**2 / 2 + t**3 * q(t) on [sqrt(1/2) - 1, sqrt(2) - 1].
_LOG_Q = tuple(
    np.float32(c)
    for c in (
        0.3333331346511841,
        -0.25000008940696716,
        0.2000211924314499,
        -0.1666799634695053,
        0.14219552278518677,
        -0.1240558922290802,
        0.11888162046670914,
        -0.11675652116537094,
        0.06746640801429749,
    )
)
# The bit pattern of sqrt(1/2): subtracting it before the exponent is cut puts the mantissa into [sqrt(1/2), sqrt(2)).
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_MANTISSA = np.int32(0x007FFFFF)

# sin(2 pi t) = t * s(t**2) and cos(2 pi t) = c(t**2) on |t| <= 1/8.
_SIN_S = tuple(np.float32(c) for c in (6.2831854820251465, -41.3416633605957, 81.5925521850586, -75.40206909179688))
_COS_C = tuple(
    np.float32(c) for c in (1.0, -19.739208221435547, 64.93931579589844, -85.44285583496094, 59.22040557861328)
)
_QUARTER = np.float32(0.25)
_FOUR = np.float32(4.0)
_TWO_PI = 2.0 * math.pi


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
    q = _EXP_Q[4]
    q = q * r + _EXP_Q[3]
    q = q * r + _EXP_Q[2]
    q = q * r + _EXP_Q[1]
    q = q * r + _EXP_Q[0]
    p = (q * (r * r) + r) + _ONE
    # 2**(n - 1) for n in -126 .. 128, as bits; 0 for n = -126. Twice p makes up for the one.
    k = np.int32(np.float32(shifted).view(np.int32) - _ROUND_BITS)
    scale = np.int32(np.int32(k + _BIAS) << _SHIFT).view(np.float32)
    return (p + p) * scale


def exp2_single(x: Any) -> Any:
    """Return 2**x of a float32 in [-127, 128.4] within 2.5 ulp: 0 below -126.5, infinity above 127.5, NaN for NaN."""
    shifted = x + _ROUND
    r = x - (shifted - _ROUND)
    q = _EXP2_Q[4]
    q = q * r + _EXP2_Q[3]
    q = q * r + _EXP2_Q[2]
    q = q * r + _EXP2_Q[1]
    q = q * r + _EXP2_Q[0]
    p = q * r + _ONE
    k = np.int32(np.float32(shifted).view(np.int32) - _ROUND_BITS)
    return p * np.int32(np.int32(k + _EXP2_BIAS) << _SHIFT).view(np.float32)


def tanh_single(x: Any) -> Any:
    """Return tanh(x) of a float32 within 2 ulp."""
    square = x * x
    q = _TANH_Q[4]
    q = q * square + _TANH_Q[3]
    q = q * square + _TANH_Q[2]
    q = q * square + _TANH_Q[1]
    q = q * square + _TANH_Q[0]
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
    q = _LOG_Q[8]
    q = q * t + _LOG_Q[7]
    q = q * t + _LOG_Q[6]
    q = q * t + _LOG_Q[5]
    q = q * t + _LOG_Q[4]
    q = q * t + _LOG_Q[3]
    q = q * t + _LOG_Q[2]
    q = q * t + _LOG_Q[1]
    q = q * t + _LOG_Q[0]
    square = t * t
    return ((t * (square * q) + n * _LN2_LOW) - _HALF * square + t) + n * _LN2_HIGH


def cos_sin_turn_single(u: Any) -> Any:
    """Return (cos(2 pi u), sin(2 pi u)) of a float32 u in [0, 1]."""
    quarter = (u * _FOUR + _ROUND) - _ROUND
    t = u - quarter * _QUARTER
    square = t * t
    s = _SIN_S[3]
    s = s * square + _SIN_S[2]
    s = s * square + _SIN_S[1]
    s = s * square + _SIN_S[0]
    s = s * t
    c = _COS_C[4]
    c = c * square + _COS_C[3]
    c = c * square + _COS_C[2]
    c = c * square + _COS_C[1]
    c = c * square + _COS_C[0]
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
