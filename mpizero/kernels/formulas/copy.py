"""Convert one number between float32 and the bits of bfloat16 or float16, as integers; rounding is to nearest even.

All constants are NumPy scalars of the width that the formulas compute in: integer literals would widen the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Scalar = Any

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_ONE, _THIRTEEN, _SIXTEEN = np.uint32(1), np.uint32(13), np.uint32(16)
_LOW_BITS = np.uint32(0xFFFF)
_BELOW_HALF = np.uint32(0x7FFF)  # one less than half a unit in bfloat16's last place
_QUIET = np.uint32(0x40)

_HALF_SIGN, _HALF_MAGNITUDE = np.uint32(0x8000), np.uint32(0x7FFF)
_HALF_INFINITY, _HALF_NAN = np.uint32(0x7C00), np.uint32(0x7E00)
_HALF_SMALLEST_NORMAL = np.uint32(0x0400)
_OVERFLOW = np.uint32(0x47800000)  # 2**16, infinite in float16
_NORMAL = np.uint32(0x38800000)  # 2**-14; below, float16 is subnormal
_BIAS = np.uint32(0x38000000)  # (127 - 15) << 23
_BELOW_HALF_16 = np.uint32(0xFFF)
_MAGIC = np.float32(0.5)  # its last place is float16's subnormal unit: adding it rounds there
_MAGIC_BITS = np.uint32(0x3F000000)
_NORMAL_VALUE = np.float32(2.0**-14)


def to_bfloat16(x: Scalar) -> Scalar:
    """Return the bits of a float32 rounded to bfloat16; NaN gives a quiet NaN."""
    bits = np.float32(x).view(np.uint32)
    high = bits >> _SIXTEEN
    carry = ((bits & _LOW_BITS) + _BELOW_HALF + (high & _ONE)) >> _SIXTEEN
    return high | _QUIET if (bits & _MAGNITUDE) > _INFINITY else high + carry


def from_bfloat16(half: Scalar) -> Scalar:
    """Return the float32 value of the bits of a bfloat16, which is exact."""
    return np.uint32(np.uint32(half) << _SIXTEEN).view(np.float32)


def to_float16(x: Scalar) -> Scalar:
    """Return the bits of a float32 rounded to float16: infinite for values too large, subnormal for small ones."""
    bits = np.float32(x).view(np.uint32)
    sign = (bits >> _SIXTEEN) & _HALF_SIGN
    magnitude = bits & _MAGNITUDE
    if magnitude >= _OVERFLOW:
        return sign | (_HALF_NAN if magnitude > _INFINITY else _HALF_INFINITY)
    if magnitude < _NORMAL:
        rounded = np.uint32(magnitude).view(np.float32) + _MAGIC
        return sign | (np.float32(rounded).view(np.uint32) - _MAGIC_BITS)
    odd = (magnitude >> _THIRTEEN) & _ONE
    return sign | ((magnitude - _BIAS + _BELOW_HALF_16 + odd) >> _THIRTEEN)


def from_float16(half: Scalar) -> Scalar:
    """Return the float32 value of the bits of a float16, which is exact for subnormal values too."""
    sign = (np.uint32(half) & _HALF_SIGN) << _SIXTEEN
    magnitude = np.uint32(half) & _HALF_MAGNITUDE
    if magnitude >= _HALF_INFINITY:
        bits = _INFINITY | ((magnitude - _HALF_INFINITY) << _THIRTEEN)
    elif magnitude < _HALF_SMALLEST_NORMAL:
        value = np.uint32((magnitude << _THIRTEEN) + _NORMAL).view(np.float32) - _NORMAL_VALUE
        bits = np.float32(value).view(np.uint32)
    else:
        bits = (magnitude << _THIRTEEN) + _BIAS
    return np.uint32(sign | bits).view(np.float32)
