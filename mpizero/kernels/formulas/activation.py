"""Compute activation functions of one number and their gradients; ``T`` is its type, np.float32 or np.float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpizero.kernels.formulas.elementary import exp2_single, exponential, hyperbolic_tangent

# The tanh form of GELU is x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x**3); in this form it keeps its
# relative precision for negative x, where 1 + tanh(u) cancels.
_TWICE_ROOT = 1.5957691216057308
_CUBE = 0.044715
_SLOPE_CUBE = 3.0 * _TWICE_ROOT * _CUBE
_NEGATIVE_TWICE_ROOT = -_TWICE_ROOT
_NEGATIVE_TWICE_ROOT_CUBE = -_TWICE_ROOT * _CUBE
# The same for a power of two instead of e.
_POWER = _NEGATIVE_TWICE_ROOT / math.log(2.0)
_POWER_CUBE = _NEGATIVE_TWICE_ROOT_CUBE / math.log(2.0)
# Outside of these the derivative is 0 or 1 to the last bit, while the cube may overflow.
_FLAT = 20.0
_FLAT_SINGLE = 10.0
# From here exp(-2 u) is inf in float32 (2**127.97), so that huge negative x give 0.
_LOWEST_SINGLE = -10.06
# Outside of these the derivative of SiLU is 0 or 1, and exp(-x) is still finite.
_SILU_FLAT = 700.0
_SILU_FLAT_SINGLE = 80.0


def clamped(x: Any, low: Any, high: Any) -> Any:
    """Return the number in [low, high] that is nearest to ``x``; return NaN for NaN."""
    above = low if x < low else x
    return high if above > high else above


def gelu_power(x: Any, T: Any) -> Any:  # noqa: N803
    """Return exp(-2 u) with u = sqrt(2 / pi) * (x + 0.044715 * x**3), a part of :func:`gelu`.

    In float32, ``x`` must be in [-10.06, 10].
    """
    if T is np.float32:
        c = np.float32(x)
        return T(exp2_single(c * (np.float32(_POWER) + np.float32(_POWER_CUBE) * (c * c))))
    return exponential(x * (T(_NEGATIVE_TWICE_ROOT) + T(_NEGATIVE_TWICE_ROOT_CUBE) * (x * x)), T)


def gelu(x: Any, T: Any) -> Any:  # noqa: N803
    """Return the tanh form of GELU of ``x`` (Hendrycks and Gimpel 2016)."""
    if T is np.float32:
        return x / (T(1.0) + gelu_power(clamped(x, T(_LOWEST_SINGLE), T(_FLAT_SINGLE)), T))
    return x / (T(1.0) + gelu_power(x, T))


def gelu_gradient(x: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return ``dy`` times the derivative of :func:`gelu` at ``x``."""
    flat = T(_FLAT_SINGLE) if T is np.float32 else T(_FLAT)
    c = clamped(x, -flat, flat)
    power = gelu_power(c, T)
    s = T(1.0) / (T(1.0) + power)
    slope = T(_TWICE_ROOT) + T(_SLOPE_CUBE) * (c * c)
    # power * s is 1 - s without its cancellation.
    return dy * (s + c * slope * (s * (power * s)))


def silu(x: Any, T: Any) -> Any:  # noqa: N803
    """Return ``x * sigmoid(x)``, computed as x / (1 + exp(-x))."""
    return x / (T(1.0) + exponential(-x, T))


def silu_gradient(x: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return ``dy`` times the derivative of :func:`silu` at ``x``."""
    flat = T(_SILU_FLAT_SINGLE) if T is np.float32 else T(_SILU_FLAT)
    c = clamped(x, -flat, flat)
    power = exponential(-c, T)
    s = T(1.0) / (T(1.0) + power)
    return dy * (s * (T(1.0) + c * (power * s)))


def relu(x: Any, T: Any) -> Any:  # noqa: N803
    """Return ``max(x, 0)``; return NaN for NaN."""
    return T(0.0) if x <= T(0.0) else x


def relu_gradient(x: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return 0 if ``x <= 0``, otherwise ``dy``."""
    return T(0.0) if x <= T(0.0) else dy


def tanh_value(x: Any, T: Any) -> Any:  # noqa: N803
    """Return ``tanh(x)``."""
    return hyperbolic_tangent(x, T)


def tanh_gradient(x: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return ``dy`` times the derivative of tanh at ``x``."""
    t = hyperbolic_tangent(x, T)
    return dy * (T(1.0) - t * t)
