"""Check :mod:`mpizero.kernels.cpu.optimizer`: whole-array NumPy, from the papers' formulas."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def _averages(g: Array, m: Array, v: Array, rates: Array) -> None:
    """Update the running averages of gradient and squared gradient; rates = [beta1, 1-beta1, beta2, 1-beta2]."""
    m[:] = rates[0] * m + rates[1] * g
    v[:] = rates[2] * v + rates[3] * g**2


def sgd(w: Array, g: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by gradient descent; hyper = [lr, decay]."""
    lr, decay = hyper
    part = slice(start, stop)
    w[part] -= lr * (g[part] + decay * w[part])


def momentum(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by gradient descent with momentum; hyper = [lr, decay, factor, keep, of_g, of_m]."""
    lr, decay, factor, keep, of_g, of_m = hyper
    part = slice(start, stop)
    gradient = g[part] + decay * w[part]
    m[part] = factor * m[part] + keep * gradient
    w[part] -= lr * (of_g * gradient + of_m * m[part])


def adam(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by Adam; hyper = [decay, beta1, rest1, beta2, rest2, rate, correction, eps]."""
    decay, rate, correction, eps = hyper[0], *hyper[5:]
    part = slice(start, stop)
    _averages(g[part] + decay * w[part], m[part], v[part], hyper[1:5])
    w[part] -= rate * m[part] / (np.sqrt(v[part]) * correction + eps)


def adamw(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by AdamW; hyper = [shrink, beta1, rest1, beta2, rest2, rate, correction, eps]."""
    shrink, rate, correction, eps = hyper[0], *hyper[5:]
    part = slice(start, stop)
    _averages(g[part], m[part], v[part], hyper[1:5])
    w[part] = shrink * w[part] - rate * m[part] / (np.sqrt(v[part]) * correction + eps)


def rmsprop(w: Array, g: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by RMSprop; hyper = [lr, decay, alpha, rest, eps]."""
    lr, decay, alpha, rest, eps = hyper
    part = slice(start, stop)
    gradient = g[part] + decay * w[part]
    v[part] = alpha * v[part] + rest * gradient**2
    w[part] -= lr * gradient / (np.sqrt(v[part]) + eps)


def lion(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by Lion; hyper = [shrink, lr, beta1, rest1, beta2, rest2, zero]."""
    shrink, lr, beta1, rest1, beta2, rest2, _ = hyper
    part = slice(start, stop)
    w[part] = shrink * w[part] - lr * np.sign(beta1 * m[part] + rest1 * g[part])
    m[part] = beta2 * m[part] + rest2 * g[part]


def lamb_direction(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Write LAMB's direction over ``g``; hyper = [decay, beta1, rest1, beta2, rest2, first, correction, eps]."""
    decay, first, correction, eps = hyper[0], hyper[5], hyper[6], hyper[7]
    part = slice(start, stop)
    _averages(g[part], m[part], v[part], hyper[1:5])
    g[part] = first * m[part] / (np.sqrt(v[part]) * correction + eps) + decay * w[part]


def lamb_apply(w: Array, u: Array, hyper: Array, start: int, stop: int) -> None:
    """Subtract ``hyper[0]`` times ``u`` from ``w``."""
    w[start:stop] -= hyper[0] * u[start:stop]
