"""Update by optimizers' formulas, sum gradients on the way, and compress, in NumPy, as a reference for the kernels.

The optimizers update elements ``start`` to ``stop - 1`` of flat arrays. :func:`tree_sum` sums rows of gradients by a
tree program, and divides; functions that end in ``_tree`` then update by an optimizer. Messages are compressed block by
block (``int8``) or with a sort (``top``).
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any

import numpy as np

from mpizero.types import Array
from tests.support.reference import layers


def _averages(g: Array, m: Array, v: Array, rates: Array) -> None:
    """Update ``m`` and ``v``, the running averages of the gradient and of its square.

    rates = [beta1, 1 - beta1, beta2, 1 - beta2].
    """
    m[:] = rates[0] * m + rates[1] * g
    v[:] = rates[2] * v + rates[3] * g**2


def sgd(w: Array, g: Array, hyper: Array, start: int, stop: int) -> None:
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
    decay, rate, correction, eps = hyper[0], *hyper[5:]
    part = slice(start, stop)
    _averages(g[part] + decay * w[part], m[part], v[part], hyper[1:5])
    w[part] -= rate * m[part] / (np.sqrt(v[part]) * correction + eps)


def adamw(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    shrink, rate, correction, eps = hyper[0], *hyper[5:]
    part = slice(start, stop)
    _averages(g[part], m[part], v[part], hyper[1:5])
    w[part] = shrink * w[part] - rate * m[part] / (np.sqrt(v[part]) * correction + eps)


def rmsprop(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by RMSprop with the gradient ``g``.

    ``m`` is the running average of the squared gradient, which is updated too. hyper = [lr, decay, alpha, rest, eps]
    with rest = 1 - alpha. First ``decay * w`` is added to the gradient.
    """
    lr, decay, alpha, rest, eps = hyper
    part = slice(start, stop)
    gradient = g[part] + decay * w[part]
    m[part] = alpha * m[part] + rest * gradient**2
    w[part] -= lr * gradient / (np.sqrt(m[part]) + eps)


def lion(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    shrink, lr, beta1, rest1, beta2, rest2, _ = hyper
    part = slice(start, stop)
    w[part] = shrink * w[part] - lr * np.sign(beta1 * m[part] + rest1 * g[part])
    m[part] = beta2 * m[part] + rest2 * g[part]


def lamb_direction(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    decay, first, correction, eps = hyper[0], hyper[5], hyper[6], hyper[7]
    part = slice(start, stop)
    _averages(g[part], m[part], v[part], hyper[1:5])
    g[part] = first * m[part] / (np.sqrt(v[part]) * correction + eps) + decay * w[part]


def lamb_apply(w: Array, u: Array, hyper: Array, start: int, stop: int) -> None:
    w[start:stop] -= hyper[0] * u[start:stop]


def ema(w: Array, average: Array, rate1: Array, start: int, stop: int) -> None:
    average[start:stop] += rate1[0] * (w[start:stop] - average[start:stop])


def add_scaled(y: Array, x: Array, factor1: Array, start: int, stop: int) -> None:
    y[start:stop] += factor1[0] * x[start:stop]


#: The instruction of a program that rounds the top of the stack.
ROUND = -(2**31)


def round_bfloat16(x: Array) -> None:
    bits = np.empty(x.size, np.uint16)
    layers.to_bfloat16(x, bits)
    layers.from_bfloat16(bits, x)


def tree_sum(
    rows_a: Array, first_a: int, rows_b: Array, first_b: int, program: Array, divisor: Array, out: Array,
    start: int, stop: int,
) -> None:  # fmt: skip
    rows = [row[first_a:] for row in rows_a] + [row[first_b:] for row in rows_b]
    stack: list[Array] = []
    for code in program.tolist():
        if code >= 0:
            stack.append(rows[code][start:stop])
        elif code == -1:
            right = stack.pop()
            stack[-1] = stack[-1] + right
        elif code == ROUND:
            stack[-1] = stack[-1].copy()
            round_bfloat16(stack[-1])
        else:
            stack[-1] = stack[-1] + rows[-2 - code][start:stop]
    out[start:stop] = stack.pop() / divisor[0]


def _tree(update: Callable[..., None]) -> Callable[..., None]:
    """Make the reference of a fused kernel from ``update``, the reference of an optimizer's kernel.

    The new function sums rows of gradients, divides the sum, and calls ``update`` with the result as the gradient.
    """

    def tree(rows: Array, first: int, program: Array, divisor: Array, w: Array, *rest: Any) -> None:
        g, (start, stop) = w.copy(), rest[-2:]
        tree_sum(rows, first, rows, 0, program, divisor, g, start, stop)
        update(w, g, *rest)

    names = ("rows", "first", "program", "divisor", *(name for name in signature(update).parameters if name != "g"))
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    setattr(tree, "__signature__", Signature(parameters))  # noqa: B010 - for mypy
    return tree


sgd_tree = _tree(sgd)
momentum_tree = _tree(momentum)
adam_tree = _tree(adam)
adamw_tree = _tree(adamw)
rmsprop_tree = _tree(rmsprop)
lion_tree = _tree(lion)


def lamb_direction_tree(
    rows: Array, first: int, program: Array, divisor: Array, w: Array, u: Array, m: Array, v: Array, hyper: Array,
    start: int, stop: int,
) -> None:  # fmt: skip
    tree_sum(rows, first, rows, 0, program, divisor, u, start, stop)
    lamb_direction(w, u, m, v, hyper, start, stop)


COMPRESSION_BLOCK = 256


def int8_encode(values: Array, residual: Array, scales: Array, codes: Array) -> None:
    residual += values
    for block in range(scales.size):
        part = slice(block * COMPRESSION_BLOCK, (block + 1) * COMPRESSION_BLOCK)
        rest = residual[part]
        scale = np.max(np.abs(rest)) * np.float32((1 - 2.0**-22) / 127)
        if not np.isfinite(scale):
            scales[block], codes[part], rest[:] = np.nan, 0, np.nan
            continue
        if scale < np.finfo(np.float32).tiny:
            scales[block], codes[part] = 0, 0
            continue
        code = np.rint(rest * (np.float32(1) / scale))
        scales[block], codes[part] = scale, code
        rest -= code * scale


def int8_decode(scales: Array, codes: Array, out: Array) -> None:
    out[:] = codes * np.repeat(scales, COMPRESSION_BLOCK)[: codes.size]


def top_encode(values: Array, residual: Array, counts: Array, indices: Array, largest: Array) -> None:
    residual += values
    order = np.lexsort((-np.abs(residual), ~np.isnan(residual)))  # stable; NaN counts as larger than infinity
    indices[:] = np.sort(order[: indices.size])
    largest[:] = residual[indices]
    residual[indices] = 0


def top_decode(indices: Array, largest: Array, out: Array) -> None:
    out[:] = 0
    out[indices] = largest
