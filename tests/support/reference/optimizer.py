"""Update elements ``start`` to ``stop - 1`` of flat arrays in NumPy, as a reference for the optimizers' kernels."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def _averages(g: Array, m: Array, v: Array, rates: Array) -> None:
    """Update ``m`` and ``v``, the running averages of the gradient and of its square.

    rates = [beta1, 1 - beta1, beta2, 1 - beta2].
    """
    m[:] = rates[0] * m + rates[1] * g
    v[:] = rates[2] * v + rates[3] * g**2


def sgd(w: Array, g: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by gradient descent with the gradient ``g``.

    hyper = [lr, decay], where lr is the learning rate, and ``decay * w`` is added to the gradient (weight decay).
    """
    lr, decay = hyper
    part = slice(start, stop)
    w[part] -= lr * (g[part] + decay * w[part])


def momentum(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` and the momentum buffer ``m`` by gradient descent with the gradient ``g``.

    hyper = [lr, decay, factor, keep, of_g, of_m]. First ``decay * w`` is added to the gradient; then ``m = factor * m +
    keep * g`` and ``w -= lr * (of_g * g + of_m * m)``.
    """
    lr, decay, factor, keep, of_g, of_m = hyper
    part = slice(start, stop)
    gradient = g[part] + decay * w[part]
    m[part] = factor * m[part] + keep * gradient
    w[part] -= lr * (of_g * gradient + of_m * m[part])


def adam(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by Adam with the gradient ``g``.

    The arguments are those of :func:`mpizero.kernels.cpu.optimizer.adam`.
    """
    decay, rate, correction, eps = hyper[0], *hyper[5:]
    part = slice(start, stop)
    _averages(g[part] + decay * w[part], m[part], v[part], hyper[1:5])
    w[part] -= rate * m[part] / (np.sqrt(v[part]) * correction + eps)


def adamw(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by AdamW with the gradient ``g``.

    The arguments are those of :func:`mpizero.kernels.cpu.optimizer.adamw`.
    """
    shrink, rate, correction, eps = hyper[0], *hyper[5:]
    part = slice(start, stop)
    _averages(g[part], m[part], v[part], hyper[1:5])
    w[part] = shrink * w[part] - rate * m[part] / (np.sqrt(v[part]) * correction + eps)


def rmsprop(w: Array, g: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by RMSprop with the gradient ``g``.

    ``v`` is the running average of the squared gradient, which is updated too. hyper = [lr, decay, alpha, rest, eps]
    with rest = 1 - alpha. First ``decay * w`` is added to the gradient.
    """
    lr, decay, alpha, rest, eps = hyper
    part = slice(start, stop)
    gradient = g[part] + decay * w[part]
    v[part] = alpha * v[part] + rest * gradient**2
    w[part] -= lr * gradient / (np.sqrt(v[part]) + eps)


def lion(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by Lion with the gradient ``g``.

    The arguments are those of :func:`mpizero.kernels.cpu.optimizer.lion`.
    """
    shrink, lr, beta1, rest1, beta2, rest2, _ = hyper
    part = slice(start, stop)
    w[part] = shrink * w[part] - lr * np.sign(beta1 * m[part] + rest1 * g[part])
    m[part] = beta2 * m[part] + rest2 * g[part]


def lamb_direction(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Overwrite the gradient ``g[start:stop]`` with LAMB's direction: Adam's direction plus ``decay * w``.

    The arguments are those of :func:`mpizero.kernels.cpu.optimizer.lamb_direction`.
    """
    decay, first, correction, eps = hyper[0], hyper[5], hyper[6], hyper[7]
    part = slice(start, stop)
    _averages(g[part], m[part], v[part], hyper[1:5])
    g[part] = first * m[part] / (np.sqrt(v[part]) * correction + eps) + decay * w[part]


def lamb_apply(w: Array, u: Array, hyper: Array, start: int, stop: int) -> None:
    """Subtract ``hyper[0] * u`` from ``w`` for the elements ``start`` to ``stop - 1``."""
    w[start:stop] -= hyper[0] * u[start:stop]


def ema(w: Array, average: Array, rate1: Array, start: int, stop: int) -> None:
    """Add ``rate1[0] * (w - average)`` to ``average``, for the elements ``start`` to ``stop - 1``."""
    average[start:stop] += rate1[0] * (w[start:stop] - average[start:stop])


def add_scaled(y: Array, x: Array, factor1: Array, start: int, stop: int) -> None:
    """Add ``factor1[0] * x`` to ``y``, for the elements ``start`` to ``stop - 1``."""
    y[start:stop] += factor1[0] * x[start:stop]
