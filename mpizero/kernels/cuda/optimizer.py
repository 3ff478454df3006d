"""Update elements ``start`` to ``stop - 1`` of flat arrays in place by an optimizer's formula, on the GPU.

``hyper`` is an array of the scalars that the formula needs, which :mod:`mpizero.optim` computes for every step.
"""

from __future__ import annotations

from mpizero.kernels import formulas
from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.types import Array

_sgd = formulas.sgd
_momentum = formulas.momentum
_adam = formulas.adam
_adamw = formulas.adamw
_rmsprop = formulas.rmsprop
_lion = formulas.lion
_lamb_direction = formulas.lamb_direction
_lamb_apply = formulas.lamb_apply
_ema = formulas.ema
_add_scaled = formulas.add_scaled


@kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
def sgd(w: Array, g: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by gradient descent with the gradient ``g``.

    hyper = [lr, decay], where lr is the learning rate, and ``decay * w`` is added to the gradient (weight decay).
    """
    lr, decay = hyper[0], hyper[1]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        w[i] = _sgd(w[i], g[i], lr, decay)


@kernel("void(T[::1], const T[::1], T[::1], const T[::1], i8, i8)")
def momentum(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` and the momentum buffer ``m`` by gradient descent with the gradient ``g``.

    hyper = [lr, decay, factor, keep, of_g, of_m]. First ``decay * w`` is added to the gradient; then ``m = factor * m +
    keep * g`` and ``w -= lr * (of_g * g + of_m * m)``.
    """
    lr, decay, factor, keep = hyper[0], hyper[1], hyper[2], hyper[3]
    of_g, of_m = hyper[4], hyper[5]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        w[i], m[i] = _momentum(w[i], g[i], m[i], lr, decay, factor, keep, of_g, of_m)


@kernel("void(T[::1], const T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def adam(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by Adam with the gradient ``g``.

    The arguments are those of :func:`mpizero.kernels.cpu.optimizer.adam`.
    """
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        w[i], m[i], v[i] = _adam(w[i], g[i], m[i], v[i], decay, beta1, rest1, beta2, rest2, rate, correction, eps)


@kernel("void(T[::1], const T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def adamw(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by AdamW with the gradient ``g``.

    The arguments are those of :func:`mpizero.kernels.cpu.optimizer.adamw`.
    """
    shrink, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        w[i], m[i], v[i] = _adamw(w[i], g[i], m[i], v[i], shrink, beta1, rest1, beta2, rest2, rate, correction, eps)


@kernel("void(T[::1], const T[::1], T[::1], const T[::1], i8, i8)")
def rmsprop(w: Array, g: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by RMSprop with the gradient ``g``.

    ``v`` is the running average of the squared gradient, which is updated too. hyper = [lr, decay, alpha, rest, eps]
    with rest = 1 - alpha. First ``decay * w`` is added to the gradient.
    """
    lr, decay, alpha, rest = hyper[0], hyper[1], hyper[2], hyper[3]
    eps = hyper[4]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        w[i], v[i] = _rmsprop(w[i], g[i], v[i], lr, decay, alpha, rest, eps)


@kernel("void(T[::1], const T[::1], T[::1], const T[::1], i8, i8)")
def lion(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by Lion with the gradient ``g``.

    The arguments are those of :func:`mpizero.kernels.cpu.optimizer.lion`.
    """
    shrink, lr, beta1, rest1 = hyper[0], hyper[1], hyper[2], hyper[3]
    beta2, rest2, zero = hyper[4], hyper[5], hyper[6]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        w[i], m[i] = _lion(w[i], g[i], m[i], shrink, lr, beta1, rest1, beta2, rest2, zero)


@kernel("void(const T[::1], T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def lamb_direction(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Overwrite the gradient ``g[start:stop]`` with LAMB's direction: Adam's direction plus ``decay * w``.

    The arguments are those of :func:`mpizero.kernels.cpu.optimizer.lamb_direction`.
    """
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, first, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        g[i], m[i], v[i] = _lamb_direction(
            w[i], g[i], m[i], v[i], decay, beta1, rest1, beta2, rest2, first, correction, eps
        )


@kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
def lamb_apply(w: Array, u: Array, hyper: Array, start: int, stop: int) -> None:
    """Subtract ``hyper[0] * u`` from ``w`` for the elements ``start`` to ``stop - 1``."""
    rate = hyper[0]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        w[i] = _lamb_apply(w[i], u[i], rate)


@kernel("void(const T[::1], T[::1], const T[::1], i8, i8)")
def ema(w: Array, average: Array, rate1: Array, start: int, stop: int) -> None:
    """Add ``rate1[0] * (w - average)`` to ``average``, for the elements ``start`` to ``stop - 1``."""
    rate = rate1[0]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        average[i] = _ema(average[i], w[i], rate)


@kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
def add_scaled(y: Array, x: Array, factor1: Array, start: int, stop: int) -> None:
    """Add ``factor1[0] * x`` to ``y``, for the elements ``start`` to ``stop - 1``."""
    factor = factor1[0]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        y[i] = _add_scaled(y[i], x[i], factor)
