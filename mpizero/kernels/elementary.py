"""Compute elementary functions of one number, for CPU and GPU kernels and for the host, with the same bits everywhere.

A libm gives other bits on another CPU or in another version, and a call to it stops LLVM from vectorizing the loop
around it. So these functions consist of additions, subtractions, multiplications, divisions and comparisons, which
IEEE 754 rounds alike on every CPU, and of integer operations on bits. They have no calls, tables or undefined
conversions, and need no fused multiply-add, which compilers do not make of them ([Note: no contraction] in ``jit.py``).
So the vectorized part and the rest of a loop round alike: a value depends neither on its position in a range, nor on
the width of registers, nor on the CPU.

``T`` is the number's type, np.float32 or np.float64. Results are within 1 ulp (the largest error found is 0.89), with
the special values of C's functions. The docstring of a function says where its domain is smaller.

The coefficients are this project's minimax fits of the functions named beside them: in float32 by Lawson's iteration,
weighted by the relative error of the result, in float64 by interpolation at Chebyshev nodes with 200 bits. The
coefficient of the highest power comes first.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any

import numpy as np


def _singles(*values: float) -> Any:
    """Return ``values`` as a tuple of float32 scalars."""
    return tuple(map(np.float32, values))


def _doubles(*values: float) -> Any:
    """Return ``values`` as a tuple of float64 scalars."""
    return tuple(map(np.float64, values))


def polynomial(x: Any, c4: Any, c3: Any, c2: Any, c1: Any, c0: Any) -> Any:
    """Return ``c4 * x**4 + c3 * x**3 + ... + c0`` by Horner's scheme."""
    return (((c4 * x + c3) * x + c2) * x + c1) * x + c0


def constant(T: Any, single: Any, double: Any) -> Any:  # noqa: N803
    """Return a constant as a number of type ``T``: ``single`` if ``T`` is np.float32, otherwise ``double``."""
    return T(single if T is np.float32 else double)


# exp(r) = 1 + r + r**2 * q(r) on |r| <= log(2) / 2.
_EXP_Q = _singles(
    0.001381459878757596, 0.008368716575205326, 0.04166838899254799, 0.1666652113199234, 0.4999999403953552
)
_EXP_Q_64 = _doubles(
    2.0914686968086876e-09, 2.5105217004720745e-08, 2.75572736431103e-07, 2.7557255400206422e-06, 2.4801587325547743e-05
)
_EXP_Q_64_MIDDLE = _doubles(0.00019841269874820627, 0.0013888888888883748, 0.008333333333326136, 0.04166666666666667)
_EXP_Q_64_LAST = _doubles(0.1666666666666667, 0.5)
# log(2) in two parts; the first has few bits, so that its product with an exponent is exact.
_LN2_HIGH, _LN2_LOW = _singles(0.693359375, -2.1219444005469057e-4)
_LN2_HIGH_64, _LN2_LOW_64 = _doubles(0.6931471803691238, 1.9082149292705877e-10)
_LN2, _LOG2_E, _LOG2_E_64 = np.float32(math.log(2)), np.float32(1 / math.log(2)), np.float64(1.4426950408889634)
# 1.5 * 2**23 and 1.5 * 2**52: adding it rounds to an integer and leaves that integer in the low bits; no float-to-int
# conversion, which is undefined for NaN and inf.
_ROUND, _ROUND_BITS = np.float32(12582912.0), np.int32(0x4B400000)
_ROUND_64, _ROUND_BITS_64 = np.float64(6755399441055744.0), np.int64(0x4338000000000000)
_BIAS, _BIAS_64, _SHIFT, _SHIFT_64 = np.int32(126), np.int64(1022), np.int32(23), np.int64(52)
_EXP_LOW, _EXP_HIGH = _singles(-87.5, 89.0)
_EXP_LOW_64, _EXP_HIGH_64 = _doubles(-750.0, 709.9)
_ONE, _ONE_64 = np.float32(1.0), np.float64(1.0)
# A power of two below 2**-960 is made as one 2**64 times as large, which is normal, and divided by 2**64 at the end.
_TINY_POWER, _RAISED, _LOWERED = np.int64(-960), np.int64(64), np.float64(2.0**-64)

# 2**r = 1 + r * log(2) + r**2 * q(r) on |r| <= 1/2.
_EXP2_Q = _singles(
    0.0001532115275040269, 0.0013390161329880357, 0.009618526324629784, 0.05550362169742584, 0.24022647738456726
)
_EXP2_BIAS = np.int32(127)


def exp_parts_single(x: Any) -> Any:
    """Return (y, h) with exp(x) = 2 h (1 + y) and |y| < 0.42, for a float32 in [-87.5, 89]; h is 0 below -86.99."""
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    high, low = x - n * _LN2_HIGH, n * _LN2_LOW
    r = high - low
    y = high + (polynomial(r, *_EXP_Q) * (r * r) - low)
    # 2**(n - 1) for n in -126 .. 128, as bits; 0 for n = -126.
    k = np.int32(np.float32(shifted).view(np.int32) - _ROUND_BITS)
    return y, np.int32(np.int32(k + _BIAS) << _SHIFT).view(np.float32)


def exp_parts_double(x: Any) -> Any:
    """Return (y, h, l) with exp(x) = 2 h l (1 + y) and |y| < 0.42, for a float64 in [-750, 709.9].

    ``l`` is 1, or 2**-64 where ``h`` would otherwise be tiny or even subnormal.
    """
    shifted = x * _LOG2_E_64 + _ROUND_64
    n = shifted - _ROUND_64
    high, low = x - n * _LN2_HIGH_64, n * _LN2_LOW_64
    r = high - low
    q = polynomial(r, polynomial(r, *_EXP_Q_64), *_EXP_Q_64_MIDDLE)
    q = (q * r + _EXP_Q_64_LAST[0]) * r + _EXP_Q_64_LAST[1]
    k = np.int64(np.float64(shifted).view(np.int64) - _ROUND_BITS_64)
    is_tiny = k < _TINY_POWER
    half = np.int64(np.int64((k + _RAISED if is_tiny else k) + _BIAS_64) << _SHIFT_64).view(np.float64)
    return high + (q * (r * r) - low), half, (_LOWERED if is_tiny else _ONE_64)


def exp_single(x: Any) -> Any:
    """Return exp(x) of a float32: infinity on overflow, NaN for NaN.

    Results below 1.7e-38 are 0, because subnormal numbers would make every loop that computes with them up to a hundred
    times slower.
    """
    above = _EXP_LOW if x < _EXP_LOW else x
    y, half = exp_parts_single(_EXP_HIGH if above > _EXP_HIGH else above)
    p = _ONE + y
    return (p + p) * half


def exp_double(x: Any) -> Any:
    """Return exp(x) of a float64: infinity on overflow, subnormal numbers and then 0 on underflow, NaN for NaN."""
    above = _EXP_LOW_64 if x < _EXP_LOW_64 else x
    y, half, lowered = exp_parts_double(_EXP_HIGH_64 if above > _EXP_HIGH_64 else above)
    p = _ONE_64 + y
    return (p + p) * half * lowered


def exponential(x: Any, T: Any) -> Any:  # noqa: N803
    """Return exp(x) as a number of type ``T``."""
    if T is np.float32:
        return T(exp_single(np.float32(x)))
    return T(exp_double(np.float64(x)))


def exp2_single(x: Any) -> Any:
    """Return 2**x of a float32 in [-127, 128.4]: 0 below -126.5, infinity above 127.5, NaN for NaN."""
    shifted = x + _ROUND
    r = x - (shifted - _ROUND)
    q = polynomial(r, *_EXP2_Q)
    first = r * _LN2
    p = _ONE + first
    p = p + ((first - (p - _ONE)) + q * (r * r))
    k = np.int32(np.float32(shifted).view(np.int32) - _ROUND_BITS)
    return p * np.int32(np.int32(k + _EXP2_BIAS) << _SHIFT).view(np.float32)


# tanh(x) = x + x * z * q(z), z = x**2, on |x| <= 0.625.
_TANH_Q = _singles(
    -0.005704986862838268, 0.0206390880048275, -0.05373971536755562, 0.13331441581249237, -0.3333328068256378
)
_TANH_Q_64 = _doubles(
    6.484612156316395e-06, -3.119996874178646e-05, 9.257015852602979e-05, -0.00023759014908800234, 0.0005896605030472117
)
_TANH_Q_64_MIDDLE = _doubles(-0.0014557753814086393, 0.0035921217472709827, -0.008863235102935029, 0.021869488518994312)
_TANH_Q_64_LAST = _doubles(-0.053968253967896666, 0.13333333333333042, -0.3333333333333333)


def tanh_polynomial(z: Any, T: Any) -> Any:  # noqa: N803
    """Return (tanh(x) / x - 1) / x**2 for z = x**2 and |x| <= 0.625."""
    if T is np.float32:
        return T(polynomial(np.float32(z), *_TANH_Q))
    q = polynomial(z, polynomial(z, *_TANH_Q_64), *_TANH_Q_64_MIDDLE)
    return T(((q * z + _TANH_Q_64_LAST[0]) * z + _TANH_Q_64_LAST[1]) * z + _TANH_Q_64_LAST[2])


def exp_of_moderate(x: Any, T: Any) -> Any:  # noqa: N803
    """Return (y, h) with exp(x) = 2 h (1 + y), for x in [0, 40]."""
    if T is np.float32:
        y, half = exp_parts_single(np.float32(x))
        return T(y), T(half)
    y, half, _ = exp_parts_double(np.float64(x))
    return T(y), T(half)


def hyperbolic_tangent(x: Any, T: Any) -> Any:  # noqa: N803
    """Return tanh(x) as a number of type ``T``."""
    zero, one = T(0.0), T(1.0)
    x = T(x)
    z = x * x
    small = x + x * (z * tanh_polynomial(z, T))
    size = abs(x)
    size = T(20.0) if size > T(20.0) else size
    # 1 - 2 / (e + 1) with e = exp(2 |x|), where e, e + 1 and the difference are sums of two numbers.
    y, half = exp_of_moderate(size + size, T)
    p = one + y
    rest = y - (p - one)
    e, e_low = (p + p) * half, (rest + rest) * half
    d = e + one
    inverse = one / d
    quotient = inverse + inverse
    missing = ((one - (d - e)) + e_low) * (inverse * quotient)
    rest = one - quotient
    large = rest + (((one - rest) - quotient) + missing)
    result = (-large if x < zero else large) if size > T(0.625) else small
    return result if x != zero else x  # -0 keeps its sign


# log((1 + s) / (1 - s)) = 2 s + s * z * q(z), z = s**2, on |s| <= (sqrt(2) - 1) / (sqrt(2) + 1).
_LOG_Q = _singles(0.2958005368709564, 0.3998877704143524, 0.6666668653488159)
_LOG_Q_64 = _doubles(
    0.14616585424888623, 0.15331710618210773, 0.18182889455674947, 0.22222211130259878, 0.2857142862600327
)
_LOG_Q_64_LAST = _doubles(0.39999999999899444, 0.666666666666667)
# The bit pattern of sqrt(1/2): subtracting it before the exponent is cut puts the mantissa into [sqrt(1/2), sqrt(2)).
_SQRT_HALF_BITS, _SQRT_HALF_BITS_64 = np.int32(0x3F3504F3), np.int64(0x3FE6A09E667F3BCD)
_MANTISSA, _MANTISSA_64 = np.int32(0x007FFFFF), np.int64(0x000FFFFFFFFFFFFF)


def log_parts(x: Any, T: Any) -> Any:  # noqa: N803
    """Return (f, n) with x = (1 + f) * 2**n and 1 + f in [sqrt(1/2), sqrt(2)), for a positive, normal number."""
    if T is np.float32:
        shifted = np.int32(np.float32(x).view(np.int32) - _SQRT_HALF_BITS)
        mantissa = np.int32(np.int32(shifted & _MANTISSA) + _SQRT_HALF_BITS).view(np.float32)
        return T(mantissa - _ONE), T(np.float32(np.int32(shifted >> _SHIFT)))
    wide = np.int64(np.float64(x).view(np.int64) - _SQRT_HALF_BITS_64)
    fraction = np.int64(np.int64(wide & _MANTISSA_64) + _SQRT_HALF_BITS_64).view(np.float64)
    return T(fraction - _ONE_64), T(np.float64(np.int64(wide >> _SHIFT_64)))


def log_polynomial(z: Any, T: Any) -> Any:  # noqa: N803
    """Return (log((1 + s) / (1 - s)) / s - 2) / s**2 for z = s**2 and |s| <= 0.1716."""
    if T is np.float32:
        return T((np.float32(z) * _LOG_Q[0] + _LOG_Q[1]) * np.float32(z) + _LOG_Q[2])
    return T((polynomial(z, *_LOG_Q_64) * z + _LOG_Q_64_LAST[0]) * z + _LOG_Q_64_LAST[1])


def log_of_parts(f: Any, n: Any, low: Any, T: Any) -> Any:  # noqa: N803
    """Return log((1 + f) * 2**n) + low, where ``low`` is tiny; ``f`` is in [sqrt(1/2) - 1, sqrt(2) - 1]."""
    s = f / (T(2.0) + f)
    z = s * s
    half = T(0.5) * f * f
    # log(1 + f) = f - (f**2 / 2 - s * (f**2 / 2 + z * q)), which rounds less than 2 s + s * z * q.
    inner = s * (half + z * log_polynomial(z, T)) + (n * constant(T, _LN2_LOW, _LN2_LOW_64) + low)
    return n * constant(T, _LN2_HIGH, _LN2_HIGH_64) - ((half - inner) - f)


def logarithm(x: Any, T: Any) -> Any:  # noqa: N803
    """Return log(x) as a number of type ``T``: -infinity for 0, NaN for negative numbers and for NaN."""
    zero, infinity = T(0.0), T(math.inf)
    x = T(x)
    is_small = x < constant(T, 2.0**-126, 2.0**-1022)
    f, n = log_parts(x * T(2.0**54) if is_small else x, T)
    result = log_of_parts(f, n - T(54.0) if is_small else n, zero, T)
    result = result if x < infinity else x
    result = result if x != zero else -infinity
    return T(math.nan) if x < zero else result


def log1p(x: Any, T: Any) -> Any:  # noqa: N803
    """Return log(1 + x) of x in [0, infinity] as a number of type ``T``; NaN for NaN."""
    one = T(1.0)
    x = T(x)
    u = one + x
    # What u has lost of 1 + x, relative to u.
    lost = (one - (u - x) if x > one else x - (u - one)) / u
    f, n = log_parts(u, T)
    result = log_of_parts(f, n, lost, T)
    return result if x < T(math.inf) else x


# sin(2 pi t) = 2 pi t + t * z * s(z) and cos(2 pi t) = 1 - 2 pi**2 z + z**2 * c(z), z = t**2, on |t| <= 1/8.
_SIN_S = _singles(-75.40206909179688, 81.5925521850586, -41.3416633605957)
_SIN_S_64 = _doubles(
    -0.7124434970285869, 3.8198307196725416, -15.094641279191324, 42.05869393780287, -76.70585975304292
)
_SIN_S_64_LAST = _doubles(81.60524927607504, -41.34170224039976)
_COS_C = _singles(59.22040557861328, -85.44285583496094, 64.93931579589844)
_COS_C_64 = _doubles(
    -1.7012202112573187, 7.903305118614352, -26.426254910686037, 60.244641365020044, -85.45681720668455
)
_COS_C_64_LAST = np.float64(64.9393940226683)
# 2 pi and 2 pi**2 in two parts; the first ones have half the bits of a number, or fewer.
_TWO_PI_HIGH, _TWO_PI_LOW = _singles(6.283203125, -1.7817820413523076e-05)
_TWO_PI_HIGH_64, _TWO_PI_LOW_64 = _doubles(6.283185303211212, 3.968374318722162e-09)
_SQUARE_HIGH, _SQUARE_LOW = _singles(19.7421875, -0.0029786978212827625)
_SQUARE_HIGH_64, _SQUARE_LOW_64 = _doubles(19.739208698272705, 1.0390601215954398e-07)


def cos_sin_polynomials(z: Any, T: Any) -> Any:  # noqa: N803
    """Return (c, s) for z = t**2 <= 1/64: cos(2 pi t) = 1 - 2 pi**2 z + z**2 c and sin(2 pi t) = 2 pi t + t z s."""
    if T is np.float32:
        w = np.float32(z)
        return T((_COS_C[0] * w + _COS_C[1]) * w + _COS_C[2]), T((_SIN_S[0] * w + _SIN_S[1]) * w + _SIN_S[2])
    s = (polynomial(z, *_SIN_S_64) * z + _SIN_S_64_LAST[0]) * z + _SIN_S_64_LAST[1]
    return T(polynomial(z, *_COS_C_64) * z + _COS_C_64_LAST), T(s)


def cos_sin_turn(u: Any, T: Any) -> Any:  # noqa: N803
    """Return (cos(2 pi u), sin(2 pi u)) of u in [0, 1] as numbers of type ``T``."""
    one, two, three, round_ = T(1.0), T(2.0), T(3.0), constant(T, _ROUND, _ROUND_64)
    u = T(u)
    quarter = (u * T(4.0) + round_) - round_
    t = u - quarter * T(0.25)
    z = t * t
    c, s = cos_sin_polynomials(z, T)
    # 2 pi t as the sum of two numbers, of which the first is exact: Veltkamp's factor leaves 11 or 24 bits of t.
    shifted = t * constant(T, 2.0**13 + 1.0, 2.0**29 + 1.0)
    high = shifted - (shifted - t)
    two_pi, square = constant(T, _TWO_PI_HIGH, _TWO_PI_HIGH_64), constant(T, _SQUARE_HIGH, _SQUARE_HIGH_64)
    first, second = high * two_pi, (t - high) * two_pi + t * constant(T, _TWO_PI_LOW, _TWO_PI_LOW_64)
    s = first + (second + t * (z * s))
    # 2 pi**2 z likewise: adding the constant rounds t to a multiple of 2**-8 or 2**-14.
    coarse = (t + constant(T, 1.5 * 2.0**15, 1.5 * 2.0**38)) - constant(T, 1.5 * 2.0**15, 1.5 * 2.0**38)
    first = coarse * coarse * square
    second = (t - coarse) * (t + coarse) * square + z * constant(T, _SQUARE_LOW, _SQUARE_LOW_64)
    rest = one - first
    c = rest + ((((one - rest) - first) - second) + z * z * c)
    odd = quarter in (one, three)
    cosine = s if odd else c
    sine = c if odd else s
    cosine = -cosine if quarter in (one, two) else cosine
    sine = -sine if quarter in (two, three) else sine
    return cosine, sine


_DIGITS = Context(prec=40)


@lru_cache(maxsize=16)  # every group of an optimizer asks for the same
def power(base: float, exponent: int) -> float:
    """Return ``base**exponent`` of a float in [0, 1], on the host: rounded once, from 40 decimal digits."""
    return float(_DIGITS.power(Decimal(base), exponent))
