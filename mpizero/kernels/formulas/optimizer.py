"""One element of each optimizer's update: arguments and results are scalars of the parameters' dtype.

``w`` is the weight, ``g`` its gradient, ``m`` and ``v`` running averages of gradient and squared gradient. Every
coefficient that is a difference or quotient (``1 - beta``, ``lr / (1 - beta**step)``) comes ready from the host, where
it is formed in float64: in float32, ``1 - 0.999`` would be wrong in its fifth digit.
"""

import math


def sgd(w, g, lr, decay):
    """Plain gradient descent."""
    return w - lr * (g + decay * w)


def momentum(w, g, m, lr, decay, momentum, keep, of_g, of_m):
    """Gradient descent with momentum; (of_g, of_m) is (0, 1), or (1, momentum) for Nesterov (Sutskever 2013)."""
    g = g + decay * w
    m = momentum * m + keep * g
    return w - lr * (of_g * g + of_m * m), m


def adam(w, g, m, v, decay, beta1, rest1, beta2, rest2, rate, correction, eps):
    """Kingma & Ba 2015; rate = lr / (1 - beta1**step), correction = 1 / sqrt(1 - beta2**step)."""
    g = g + decay * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    return w - rate * (m / (math.sqrt(v) * correction + eps)), m, v


def adamw(w, g, m, v, shrink, beta1, rest1, beta2, rest2, rate, correction, eps):
    """Loshchilov & Hutter 2019; shrink = 1 - lr * decay."""
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    return shrink * w - rate * (m / (math.sqrt(v) * correction + eps)), m, v


def rmsprop(w, g, v, lr, decay, alpha, rest, eps):
    """Tieleman & Hinton 2012."""
    g = g + decay * w
    v = alpha * v + rest * (g * g)
    return w - lr * (g / (math.sqrt(v) + eps)), v


def lion(w, g, m, shrink, lr, beta1, rest1, beta2, rest2, zero):
    """Chen et al. 2023: the sign of an average; a NaN stays NaN."""
    c = beta1 * m + rest1 * g
    step = lr if c > zero else (-lr if c < zero else c)
    return shrink * w - step, beta2 * m + rest2 * g


def lamb_direction(w, g, m, v, decay, beta1, rest1, beta2, rest2, first, correction, eps):
    """You et al. 2020: Adam's direction plus decay; first = 1 / (1 - beta1**step)."""
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    return first * (m / (math.sqrt(v) * correction + eps)) + decay * w, m, v


def lamb_apply(w, u, rate):
    """Step along a direction; rate = lr * trust ratio."""
    return w - rate * u
