"""Update elements [start, stop) of flat arrays in place; :mod:`mpizero.optim` fills ``hyper``."""

from __future__ import annotations

from mpizero.kernels.compile import kernel
from mpizero.kernels.formulas import optimizer as formulas
from mpizero.types import Array

_sgd = formulas.sgd
_momentum = formulas.momentum
_adam = formulas.adam
_adamw = formulas.adamw
_rmsprop = formulas.rmsprop
_lion = formulas.lion
_lamb_direction = formulas.lamb_direction
_lamb_apply = formulas.lamb_apply


@kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
def sgd(w: Array, g: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by gradient descent; hyper = [lr, decay]."""
    lr, decay = hyper[0], hyper[1]
    w, g = w[start:stop], g[start:stop]
    for i in range(w.size):
        w[i] = _sgd(w[i], g[i], lr, decay)


@kernel("void(T[::1], const T[::1], T[::1], const T[::1], i8, i8)")
def momentum(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by gradient descent with momentum; hyper = [lr, decay, factor, keep, of_g, of_m]."""
    lr, decay, factor, keep = hyper[0], hyper[1], hyper[2], hyper[3]
    of_g, of_m = hyper[4], hyper[5]
    w, g, m = w[start:stop], g[start:stop], m[start:stop]
    for i in range(w.size):
        w[i], m[i] = _momentum(w[i], g[i], m[i], lr, decay, factor, keep, of_g, of_m)


@kernel("void(T[::1], const T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def adam(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by Adam; hyper = [decay, beta1, rest1, beta2, rest2, rate, correction, eps]."""
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    w, g, m, v = w[start:stop], g[start:stop], m[start:stop], v[start:stop]
    for i in range(w.size):
        w[i], m[i], v[i] = _adam(w[i], g[i], m[i], v[i], decay, beta1, rest1, beta2, rest2, rate, correction, eps)


@kernel("void(T[::1], const T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def adamw(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by AdamW; hyper = [shrink, beta1, rest1, beta2, rest2, rate, correction, eps]."""
    shrink, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    w, g, m, v = w[start:stop], g[start:stop], m[start:stop], v[start:stop]
    for i in range(w.size):
        w[i], m[i], v[i] = _adamw(w[i], g[i], m[i], v[i], shrink, beta1, rest1, beta2, rest2, rate, correction, eps)


@kernel("void(T[::1], const T[::1], T[::1], const T[::1], i8, i8)")
def rmsprop(w: Array, g: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by RMSprop; hyper = [lr, decay, alpha, rest, eps]."""
    lr, decay, alpha, rest = hyper[0], hyper[1], hyper[2], hyper[3]
    eps = hyper[4]
    w, g, v = w[start:stop], g[start:stop], v[start:stop]
    for i in range(w.size):
        w[i], v[i] = _rmsprop(w[i], g[i], v[i], lr, decay, alpha, rest, eps)


@kernel("void(T[::1], const T[::1], T[::1], const T[::1], i8, i8)")
def lion(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w`` by Lion; hyper = [shrink, lr, beta1, rest1, beta2, rest2, zero]."""
    shrink, lr, beta1, rest1 = hyper[0], hyper[1], hyper[2], hyper[3]
    beta2, rest2, zero = hyper[4], hyper[5], hyper[6]
    w, g, m = w[start:stop], g[start:stop], m[start:stop]
    for i in range(w.size):
        w[i], m[i] = _lion(w[i], g[i], m[i], shrink, lr, beta1, rest1, beta2, rest2, zero)


@kernel("void(const T[::1], T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def lamb_direction(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Write LAMB's direction over ``g``; hyper = [decay, beta1, rest1, beta2, rest2, first, correction, eps]."""
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, first, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    w, g, m, v = w[start:stop], g[start:stop], m[start:stop], v[start:stop]
    for i in range(w.size):
        g[i], m[i], v[i] = _lamb_direction(
            w[i], g[i], m[i], v[i], decay, beta1, rest1, beta2, rest2, first, correction, eps
        )


@kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
def lamb_apply(w: Array, u: Array, hyper: Array, start: int, stop: int) -> None:
    """Subtract ``hyper[0]`` times ``u`` from ``w``."""
    rate = hyper[0]
    w, u = w[start:stop], u[start:stop]
    for i in range(w.size):
        w[i] = _lamb_apply(w[i], u[i], rate)
