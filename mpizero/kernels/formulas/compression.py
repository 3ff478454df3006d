"""Define the formulas that compress one value of a message: to a code of eight bits, or by its magnitude.

All constants are NumPy scalars of the width that the formulas compute in: Python literals would widen the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Scalar = Any

#: Number of values that share a scale; a power of two, so that blocks begin where vectors do.
BLOCK = 256
#: The value of one code for a largest magnitude of 1: codes go from -127 to 127. A little less than 1 / 127, so that
#: 127 codes of the largest float32 are no more than that.
UNIT = np.float32((1 - 2.0**-22) / 127)

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_SMALLEST_NORMAL = np.float32(2.0**-126)
_ROUNDS = np.float32(1.5 * 2.0**23)  # its last place is 1: adding it rounds to a whole number, to nearest even
_ZERO, _ONE = np.float32(0), np.float32(1)
_NAN = np.float32(np.nan)


def magnitude(x: Scalar) -> Scalar:
    """Return the bits of the magnitude of a float32 as an integer.

    These integers are in the order of the magnitudes; those of NaN are above that of infinity.
    """
    return np.float32(x).view(np.uint32) & _MAGNITUDE


def scale_of(largest: Scalar) -> Scalar:
    """Return the scale of a block: the value of code 1, so that code 127 is the block's largest magnitude.

    ``largest`` is the bits of that magnitude. The scale is 0 if it would be below the smallest normal float32, and NaN
    if the block has a value that is infinite or NaN.
    """
    if largest >= _INFINITY:
        return _NAN
    scale = np.uint32(largest).view(np.float32) * UNIT
    return scale if scale >= _SMALLEST_NORMAL else _ZERO


def inverse_of(scale: Scalar) -> Scalar:
    """Return 1 / scale, the factor that turns values into codes; return 0 if the scale is 0 or NaN."""
    return _ONE / scale if scale > _ZERO else _ZERO


def code_of(x: Scalar, inverse: Scalar) -> Scalar:
    """Return ``x * inverse`` rounded to a whole number, to nearest even, as a float; return 0 for NaN."""
    scaled = x * inverse
    return (scaled + _ROUNDS) - _ROUNDS if scaled == scaled else _ZERO
