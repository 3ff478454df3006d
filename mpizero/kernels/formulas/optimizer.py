"""Compute one element of each optimizer's update: arguments and results are scalars of the parameters' dtype.

``w`` is the weight, ``g`` its gradient, ``m`` and ``v`` running averages of gradient and squared gradient. Every
coefficient that is a difference or quotient (``1 - beta``, ``lr / (1 - beta**step)``) comes ready from the host, where
it is formed in float64: in float32, ``1 - 0.999`` would be wrong in its fifth digit.
"""

from __future__ import annotations

import math
from typing import Any

Scalar = Any


def sgd(w: Scalar, g: Scalar, lr: Scalar, decay: Scalar) -> Scalar:
    """Step by plain gradient descent."""
    return w - lr * (g + decay * w)


def momentum(
    w: Scalar,
    g: Scalar,
    m: Scalar,
    lr: Scalar,
    decay: Scalar,
    factor: Scalar,
    keep: Scalar,
    of_g: Scalar,
    of_m: Scalar,
) -> tuple[Scalar, Scalar]:
    """Step with momentum; (of_g, of_m) is (0, 1), or (1, momentum) for Nesterov (Sutskever 2013)."""
    g = g + decay * w
    m = factor * m + keep * g
    return w - lr * (of_g * g + of_m * m), m


def adam(
    w: Scalar,
    g: Scalar,
    m: Scalar,
    v: Scalar,
    decay: Scalar,
    beta1: Scalar,
    rest1: Scalar,
    beta2: Scalar,
    rest2: Scalar,
    rate: Scalar,
    correction: Scalar,
    eps: Scalar,
) -> tuple[Scalar, Scalar, Scalar]:
    """Step by Adam; rest = 1 - beta, rate = lr / (1 - beta1**step), correction = 1 / sqrt(1 - beta2**step)."""
    g = g + decay * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    return w - rate * (m / (math.sqrt(v) * correction + eps)), m, v


def adamw(
    w: Scalar,
    g: Scalar,
    m: Scalar,
    v: Scalar,
    shrink: Scalar,
    beta1: Scalar,
    rest1: Scalar,
    beta2: Scalar,
    rest2: Scalar,
    rate: Scalar,
    correction: Scalar,
    eps: Scalar,
) -> tuple[Scalar, Scalar, Scalar]:
    """Step by AdamW (Loshchilov & Hutter 2019); shrink = 1 - lr * decay, the others as :func:`adam`."""
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    return shrink * w - rate * (m / (math.sqrt(v) * correction + eps)), m, v


def rmsprop(
    w: Scalar, g: Scalar, v: Scalar, lr: Scalar, decay: Scalar, alpha: Scalar, rest: Scalar, eps: Scalar
) -> tuple[Scalar, Scalar]:
    """Step by RMSprop (Tieleman & Hinton 2012); rest = 1 - alpha."""
    g = g + decay * w
    v = alpha * v + rest * (g * g)
    return w - lr * (g / (math.sqrt(v) + eps)), v


def lion(
    w: Scalar,
    g: Scalar,
    m: Scalar,
    shrink: Scalar,
    lr: Scalar,
    beta1: Scalar,
    rest1: Scalar,
    beta2: Scalar,
    rest2: Scalar,
    zero: Scalar,
) -> tuple[Scalar, Scalar]:
    """Step by Lion (Chen et al. 2023), the sign of an average; a NaN stays NaN. ``zero`` has the parameters' dtype."""
    c = beta1 * m + rest1 * g
    step = lr if c > zero else (-lr if c < zero else c)
    return shrink * w - step, beta2 * m + rest2 * g


def lamb_direction(
    w: Scalar,
    g: Scalar,
    m: Scalar,
    v: Scalar,
    decay: Scalar,
    beta1: Scalar,
    rest1: Scalar,
    beta2: Scalar,
    rest2: Scalar,
    first: Scalar,
    correction: Scalar,
    eps: Scalar,
) -> tuple[Scalar, Scalar, Scalar]:
    """Return LAMB's direction (You et al. 2020), Adam's plus decay; first = 1 / (1 - beta1**step)."""
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    return first * (m / (math.sqrt(v) * correction + eps)) + decay * w, m, v


def lamb_apply(w: Scalar, u: Scalar, rate: Scalar) -> Scalar:
    """Step along a direction; rate = lr * trust ratio."""
    return w - rate * u
