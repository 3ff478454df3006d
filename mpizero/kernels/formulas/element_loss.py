"""Define losses of one element and their gradients.

A loss is a float64, whatever the type of the prediction; a gradient has the prediction's type. ``scale`` is a factor on
the gradient. No formula has a float literal, because a literal would turn float32 into float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpizero.kernels.formulas.activation import clamped
from mpizero.kernels.formulas.elementary import exponential

_HALF = np.float64(0.5)
_ZERO = np.float64(0.0)
_ONE = np.float64(1.0)


def absolute_error_value(prediction: Any, target: Any) -> Any:
    """Return |prediction - target|."""
    return abs(np.float64(prediction) - np.float64(target))


def absolute_error_gradient(prediction: Any, target: Any, scale: Any) -> Any:
    """Return ``scale`` times the sign of prediction - target, which is 0 where both are equal and NaN for NaN."""
    if prediction > target:
        return scale
    return -scale if prediction < target else prediction - target


def huber_value(prediction: Any, target: Any, delta: Any) -> Any:
    """Return half the squared error, or the straight line that continues it where the error exceeds ``delta``."""
    size, limit = abs(np.float64(prediction) - np.float64(target)), np.float64(delta)
    return _HALF * size * size if size <= limit else limit * (size - _HALF * limit)


def huber_gradient(prediction: Any, target: Any, delta: Any, scale: Any) -> Any:
    """Return ``scale`` times the error, limited to [-delta, delta]."""
    return clamped(prediction - target, -delta, delta) * scale


def softplus(x: Any) -> Any:
    """Return log(1 + exp(x)) of a float64, without overflow and without cancellation."""
    return max(x, _ZERO) + math.log1p(math.exp(-abs(x)))


def binary_cross_entropy_value(logit: Any, target: Any, weight: Any) -> Any:
    """Return the loss -weight * target * log(sigmoid(logit)) - (1 - target) * log(1 - sigmoid(logit))."""
    x, t = np.float64(logit), np.float64(target)
    return np.float64(weight) * t * softplus(-x) + (_ONE - t) * softplus(x)


def binary_cross_entropy_gradient(logit: Any, target: Any, weight: Any, scale: Any, T: Any) -> Any:  # noqa: N803
    """Return ``scale`` times the gradient of the loss with respect to the logit, of type ``T``.

    It is (1 - target) * sigmoid(logit) - weight * target * sigmoid(-logit).
    """
    power = exponential(-abs(logit), T)
    large = T(_ONE) / (T(_ONE) + power)
    small = power * large
    above, below = (large, small) if logit > T(_ZERO) else (small, large)
    return ((T(_ONE) - target) * above - weight * target * below) * scale


def gaussian_value(mean: Any, log_variance: Any, target: Any, lowest: Any) -> Any:
    """Return (s + (mean - target)**2 * exp(-s)) / 2, where s is the larger of ``log_variance`` and ``lowest``."""
    d, s = np.float64(mean) - np.float64(target), np.float64(lowest if log_variance < lowest else log_variance)
    return _HALF * (s + d * d * math.exp(-s))


def gaussian_gradient(mean: Any, log_variance: Any, target: Any, lowest: Any, scale: Any, T: Any) -> Any:  # noqa: N803
    """Return ``scale`` times the gradients with respect to the mean and to the logarithm of the variance.

    Where the variance is below its limit, the second is that of PyTorch: the gradient with respect to the limited
    variance, times the slope of the variance itself.
    """
    s = lowest if log_variance < lowest else log_variance
    d, precision = mean - target, exponential(-s, T)
    slope = exponential(log_variance - s, T)
    return d * precision * scale, T(_HALF) * (T(_ONE) - d * d * precision) * slope * scale
