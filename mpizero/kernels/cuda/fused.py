"""Sum rows of gradients by a tree program, divide, and update, in one pass over memory on the GPU.

A *program* is a list of integers that a stack machine executes on the rows of a matrix: ``v >= 0`` pushes row v, ``-1``
pops the top of the stack and adds it to the entry below, and ``v <= -2`` adds row ``-2 - v`` to the top. Each row holds
a gradient or a sum of gradients. Element i of the parameters belongs to column ``first + i`` of the matrix, where
``first`` is an argument. The stack holds ``DEPTH`` rows, which is enough for the tree over 32,768 grains.

Every thread executes the program on one column at a time. Kernels that end in ``_tree`` have the bits of two calls, of
``tree_sum`` and then of the optimizer's kernel, whose scalars are in ``hyper``.
"""

from __future__ import annotations

from typing import Any

from mpizero.kernels import formulas
from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.types import Array

DEPTH = 16

_sgd = formulas.sgd
_momentum = formulas.momentum
_adam = formulas.adam
_adamw = formulas.adamw
_rmsprop = formulas.rmsprop
_lion = formulas.lion
_lamb_direction = formulas.lamb_direction


def _element(rows_a: Array, a: int, rows_b: Array, b: int, row: int) -> Any:
    if row < rows_a.shape[0]:
        return rows_a[row, a]
    return rows_b[row - rows_a.shape[0], b]


def _fold(rows_a: Array, a: int, rows_b: Array, b: int, program: Array, stack: Array) -> Any:
    """Execute the program on one element of each row, column a of ``rows_a`` or b of ``rows_b``; return the sum."""
    top = -1
    for step in range(program.size):
        code = program[step]
        if code >= 0:
            top += 1
            stack[top] = _element(rows_a, a, rows_b, b, code)
        elif code == -1:
            top -= 1
            stack[top] += stack[top + 1]
        else:
            stack[top] += _element(rows_a, a, rows_b, b, -2 - code)
    return stack[0]


@kernel("void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], T[::1], i8, i8)")
def tree_sum(
    rows_a: Array,
    first_a: int,
    rows_b: Array,
    first_b: int,
    program: Array,
    divisor: Array,
    out: Array,
    start: int,
    stop: int,
) -> None:
    """Execute a tree program on rows, and write the sum, divided by ``divisor[0]``, to ``out[start:stop]``.

    The arguments are those of :func:`mpizero.kernels.cpu.fused.tree_sum`.
    """
    stack = cuda.local.array(DEPTH, out.dtype)
    by = divisor[0]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        out[i] = _fold(rows_a, first_a + i, rows_b, first_b + i, program, stack) / by


@kernel("void(const T[:,::1], i8, const i4[::1], const T[::1], T[::1], const T[::1], i8, i8)")
def sgd_tree(
    rows: Array, first: int, program: Array, divisor: Array, w: Array, hyper: Array, start: int, stop: int
) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.sgd`` does."""
    stack = cuda.local.array(DEPTH, w.dtype)
    by = divisor[0]
    lr, decay = hyper[0], hyper[1]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        g = _fold(rows, first + i, rows, first + i, program, stack) / by
        w[i] = _sgd(w[i], g, lr, decay)


@kernel("void(const T[:,::1], i8, const i4[::1], const T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def momentum_tree(
    rows: Array, first: int, program: Array, divisor: Array, w: Array, m: Array, hyper: Array, start: int, stop: int
) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.momentum`` does."""
    stack = cuda.local.array(DEPTH, w.dtype)
    by = divisor[0]
    lr, decay, factor, keep = hyper[0], hyper[1], hyper[2], hyper[3]
    of_g, of_m = hyper[4], hyper[5]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        g = _fold(rows, first + i, rows, first + i, program, stack) / by
        w[i], m[i] = _momentum(w[i], g, m[i], lr, decay, factor, keep, of_g, of_m)


@kernel("void(const T[:,::1], i8, const i4[::1], const T[::1], T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def adam_tree(
    rows: Array,
    first: int,
    program: Array,
    divisor: Array,
    w: Array,
    m: Array,
    v: Array,
    hyper: Array,
    start: int,
    stop: int,
) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.adam`` does."""
    stack = cuda.local.array(DEPTH, w.dtype)
    by = divisor[0]
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        g = _fold(rows, first + i, rows, first + i, program, stack) / by
        w[i], m[i], v[i] = _adam(w[i], g, m[i], v[i], decay, beta1, rest1, beta2, rest2, rate, correction, eps)


@kernel("void(const T[:,::1], i8, const i4[::1], const T[::1], T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def adamw_tree(
    rows: Array,
    first: int,
    program: Array,
    divisor: Array,
    w: Array,
    m: Array,
    v: Array,
    hyper: Array,
    start: int,
    stop: int,
) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.adamw`` does."""
    stack = cuda.local.array(DEPTH, w.dtype)
    by = divisor[0]
    shrink, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        g = _fold(rows, first + i, rows, first + i, program, stack) / by
        w[i], m[i], v[i] = _adamw(w[i], g, m[i], v[i], shrink, beta1, rest1, beta2, rest2, rate, correction, eps)


@kernel("void(const T[:,::1], i8, const i4[::1], const T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def rmsprop_tree(
    rows: Array, first: int, program: Array, divisor: Array, w: Array, v: Array, hyper: Array, start: int, stop: int
) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.rmsprop`` does."""
    stack = cuda.local.array(DEPTH, w.dtype)
    by = divisor[0]
    lr, decay, alpha, rest = hyper[0], hyper[1], hyper[2], hyper[3]
    eps = hyper[4]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        g = _fold(rows, first + i, rows, first + i, program, stack) / by
        w[i], v[i] = _rmsprop(w[i], g, v[i], lr, decay, alpha, rest, eps)


@kernel("void(const T[:,::1], i8, const i4[::1], const T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def lion_tree(
    rows: Array, first: int, program: Array, divisor: Array, w: Array, m: Array, hyper: Array, start: int, stop: int
) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.lion`` does."""
    stack = cuda.local.array(DEPTH, w.dtype)
    by = divisor[0]
    shrink, lr, beta1, rest1 = hyper[0], hyper[1], hyper[2], hyper[3]
    beta2, rest2, zero = hyper[4], hyper[5], hyper[6]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        g = _fold(rows, first + i, rows, first + i, program, stack) / by
        w[i], m[i] = _lion(w[i], g, m[i], shrink, lr, beta1, rest1, beta2, rest2, zero)


@kernel(
    "void(const T[:,::1], i8, const i4[::1], const T[::1], const T[::1], T[::1], T[::1], T[::1], const T[::1], i8, i8)"
)
def lamb_direction_tree(
    rows: Array,
    first: int,
    program: Array,
    divisor: Array,
    w: Array,
    u: Array,
    m: Array,
    v: Array,
    hyper: Array,
    start: int,
    stop: int,
) -> None:
    """Sum and divide rows of gradients as ``tree_sum`` does, then write LAMB's direction to ``u``.

    The bits are the same as with ``tree_sum`` into ``u`` and then ``optimizer.lamb_direction``. ``hyper`` holds the
    scalars that ``optimizer.lamb_direction`` needs.
    """
    stack = cuda.local.array(DEPTH, w.dtype)
    by = divisor[0]
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, scale, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        g = _fold(rows, first + i, rows, first + i, program, stack) / by
        u[i], m[i], v[i] = _lamb_direction(
            w[i], g, m[i], v[i], decay, beta1, rest1, beta2, rest2, scale, correction, eps
        )
