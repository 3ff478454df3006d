"""Define one element's update by each optimizer; arguments and results are scalars of the parameters' dtype.

``w`` is the weight, ``g`` its gradient, ``m`` and ``v`` are running averages of the gradient and of its square.
Coefficients that are differences or quotients (``1 - beta``, ``lr / (1 - beta**step)``) are arguments, because they are
computed in float64 on the host: in float32, ``1 - 0.999`` would be wrong in its fifth digit.
"""

from __future__ import annotations

import math
from typing import Any

Scalar = Any


def sgd(w: Scalar, g: Scalar, lr: Scalar, decay: Scalar) -> Scalar:
    """Return the new weight after a step of gradient descent; ``decay * w`` is added to the gradient."""
    return w - lr * (g + decay * w)


def momentum(
    w: Scalar, g: Scalar, m: Scalar, lr: Scalar, decay: Scalar, factor: Scalar, keep: Scalar, of_g: Scalar, of_m: Scalar
) -> tuple[Scalar, Scalar]:
    """Return the new ``w`` and momentum buffer ``m`` after a step of gradient descent with momentum.

    First ``decay * w`` is added to the gradient; then ``m = factor * m + keep * g`` and ``w -= lr * (of_g * g + of_m *
    m)``. (of_g, of_m) is (0, 1), or (1, momentum) for Nesterov's momentum (Sutskever 2013).
    """
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
    """Return the new ``w``, ``m`` and ``v`` after a step of Adam (Kingma & Ba 2015).

    rest1 = 1 - beta1, rest2 = 1 - beta2, rate = lr / (1 - beta1**step) and correction = 1 / sqrt(1 - beta2**step).
    First ``decay * w`` is added to the gradient.
    """
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
    """Return the new ``w``, ``m`` and ``v`` after a step of AdamW (Loshchilov & Hutter 2019).

    rest1 = 1 - beta1, rest2 = 1 - beta2, rate = lr / (1 - beta1**step) and correction = 1 / sqrt(1 - beta2**step).
    ``w`` is multiplied by shrink = 1 - lr * (weight decay).
    """
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    return shrink * w - rate * (m / (math.sqrt(v) * correction + eps)), m, v


def rmsprop(
    w: Scalar, g: Scalar, v: Scalar, lr: Scalar, decay: Scalar, alpha: Scalar, rest: Scalar, eps: Scalar
) -> tuple[Scalar, Scalar]:
    """Return the new ``w`` and ``v`` after a step of RMSprop (Tieleman & Hinton 2012).

    rest = 1 - alpha. First ``decay * w`` is added to the gradient.
    """
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
    """Return the new ``w`` and ``m`` after a step of Lion (Chen et al. 2023).

    rest1 = 1 - beta1, rest2 = 1 - beta2, and zero is 0 in the parameters' dtype. ``w`` is multiplied by shrink = 1 - lr
    * (weight decay), and then changes by lr times the sign of an average of the gradient; where that average is NaN,
    ``w`` becomes NaN.
    """
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
    """Return LAMB's direction (You et al. 2020), and the new ``m`` and ``v``.

    The direction is Adam's plus ``decay * w``. rest1 = 1 - beta1, rest2 = 1 - beta2, first = 1 / (1 - beta1**step) and
    correction = 1 / sqrt(1 - beta2**step).
    """
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    return first * (m / (math.sqrt(v) * correction + eps)) + decay * w, m, v


def lamb_apply(w: Scalar, u: Scalar, rate: Scalar) -> Scalar:
    """Return the new weight after a step along LAMB's direction ``u``; rate = lr * trust ratio."""
    return w - rate * u


def ema(average: Scalar, w: Scalar, rate: Scalar) -> Scalar:
    """Return the average of a weight's past values, moved towards the weight ``w`` by ``rate`` times their distance."""
    return average + rate * (w - average)


def add_scaled(y: Scalar, x: Scalar, factor: Scalar) -> Scalar:
    """Return ``y`` plus ``factor`` times ``x``."""
    return y + factor * x
