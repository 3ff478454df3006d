"""Activation functions of one number and their derivatives; ``T`` is the scalar type of the arrays."""

from __future__ import annotations

from typing import Any

from mpizero.kernels.formulas.elementary import exponential, hyperbolic_tangent

# 2 * sqrt(2 / pi): the tanh form of GELU is x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x**3); as a sigmoid
# it keeps its relative precision for negative x, where 1 + tanh(u) cancels.
_TWICE_ROOT = 1.5957691216057308
_CUBE = 0.044715
_THREE_CUBE = 0.134145
# Beyond this the sigmoid is exactly 0 or 1 in float64 too, while the cube may overflow.
_FLAT = 32.0


def sigmoid(x: Any, T: Any) -> Any:  # noqa: N803
    """Return 1 / (1 + exp(-x))."""
    return T(1.0) / (T(1.0) + exponential(-x, T))


def gelu(x: Any, T: Any) -> Any:  # noqa: N803
    """Return the tanh form of GELU (Hendrycks and Gimpel 2016)."""
    return x * sigmoid(T(_TWICE_ROOT) * x * (T(1.0) + T(_CUBE) * x * x), T)


def gelu_gradient(x: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return dy times the derivative of :func:`gelu`."""
    c = T(_FLAT) if x > T(_FLAT) else x
    c = T(-_FLAT) if c < T(-_FLAT) else c
    square = c * c
    s = sigmoid(T(_TWICE_ROOT) * c * (T(1.0) + T(_CUBE) * square), T)
    slope = T(_TWICE_ROOT) * (T(1.0) + T(_THREE_CUBE) * square)
    return dy * (s + c * (s * (T(1.0) - s)) * slope)


def silu(x: Any, T: Any) -> Any:  # noqa: N803
    """Return x * sigmoid(x)."""
    return x * sigmoid(x, T)


def silu_gradient(x: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return dy times the derivative of :func:`silu`."""
    s = sigmoid(x, T)
    return dy * (s * (T(1.0) + x * (T(1.0) - s)))


def relu(x: Any, T: Any) -> Any:  # noqa: N803
    """Return max(x, 0); NaN stays NaN."""
    return T(0.0) if x <= T(0.0) else x


def relu_gradient(x: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return dy where x > 0, else 0."""
    return T(0.0) if x <= T(0.0) else dy


def tanh_value(x: Any, T: Any) -> Any:  # noqa: N803
    """Return tanh(x)."""
    return hyperbolic_tangent(x, T)


def tanh_gradient(x: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return dy times the derivative of tanh."""
    t = hyperbolic_tangent(x, T)
    return dy * (T(1.0) - t * t)
