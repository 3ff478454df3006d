"""Sum rows of gradients by a tree program, divide, and update, in one pass over memory on the CPU.

A *program* is a list of integers that a stack machine executes on the rows of a matrix: ``v >= 0`` pushes row v, ``-1``
pops the top of the stack and adds it to the entry below, and ``v <= -2`` adds row ``-2 - v`` to the top. Each row holds
a gradient or a sum of gradients. Element i of the parameters belongs to column ``first + i`` of the matrix, where
``first`` is an argument. The stack holds ``DEPTH`` rows, which is enough for the tree over 32,768 grains.

The machine works on blocks of columns that fit into the first-level cache, so a row is read from memory once, and the
sum is never written to memory. The last addition of a program is done in the loop of the update.

Kernels that end in ``_tree`` have the bits of two calls, ``tree_sum`` and the kernel of the optimizer, whose scalars
are in ``hyper``. Their decorator puts ``rows``, ``first``, ``program`` and ``divisor`` in the place of ``total``.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from mpizero.kernels import formulas
from mpizero.kernels.jit import Kernel, kernel
from mpizero.types import Array

BLOCK = 2048
DEPTH = 16

_sgd = formulas.sgd
_momentum = formulas.momentum
_adam = formulas.adam
_adamw = formulas.adamw
_rmsprop = formulas.rmsprop
_lion = formulas.lion
_lamb_direction = formulas.lamb_direction


def _row(rows_a: Array, first_a: int, rows_b: Array, first_b: int, row: int, count: int) -> Any:
    if row < rows_a.shape[0]:
        return rows_a[row, first_a : first_a + count]
    return rows_b[row - rows_a.shape[0], first_b : first_b + count]


def _level(scratch: Array, level: int, count: int) -> Any:
    return scratch[level * BLOCK : level * BLOCK + count]


def _copy(x: Array, out: Array) -> None:
    for i in range(out.size):  # a slice assignment would allocate, in case the two overlap
        out[i] = x[i]


def _add(x: Array, y: Array, out: Array) -> None:
    for i in range(out.size):
        out[i] = x[i] + y[i]


def _fold(rows_a: Array, first_a: int, rows_b: Array, first_b: int, program: Array, scratch: Array, count: int) -> None:
    """Execute all instructions of the program but the last, on ``count`` columns; leave the stack in ``scratch``.

    A push and the addition that directly follows it are done in one loop.
    """
    last, step, top = program.size - 1, 0, -1
    while step < last:
        code = program[step]
        step += 1
        if code >= 0:
            row = _row(rows_a, first_a, rows_b, first_b, code, count)
            top += 1
            if step < last and program[step] <= -2:
                other = _row(rows_a, first_a, rows_b, first_b, -2 - program[step], count)
                _add(row, other, _level(scratch, top, count))
                step += 1
            elif last > 1:  # a program of two instructions adds two rows without copying one
                _copy(row, _level(scratch, top, count))
        elif code == -1:
            top -= 1
            below = _level(scratch, top, count)
            _add(below, _level(scratch, top + 1, count), below)
        else:
            below = _level(scratch, top, count)
            _add(below, _row(rows_a, first_a, rows_b, first_b, -2 - code, count), below)


def _left(rows_a: Array, first_a: int, rows_b: Array, first_b: int, program: Array, scratch: Array, count: int) -> Any:
    """Return ``count`` elements of the first operand of the program's last addition, or of the program's only row."""
    if program.size <= 2:
        return _row(rows_a, first_a, rows_b, first_b, program[0], count)
    return _level(scratch, 0, count)


def _right(rows_a: Array, first_a: int, rows_b: Array, first_b: int, program: Array, scratch: Array, count: int) -> Any:
    """Return ``count`` elements of the second operand of the program's last addition.

    If the program has no addition, return some array, which must not be read.
    """
    code = program[program.size - 1]
    if code <= -2:
        return _row(rows_a, first_a, rows_b, first_b, -2 - code, count)
    return _level(scratch, 1, count)


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
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
    scratch: Array,
) -> None:
    """Execute a tree program on rows, and write the sum, divided by ``divisor[0]``, to ``out[start:stop]``.

    ``program`` is a list of integers for a stack machine; the docstring of the module defines them. Row v of the
    program is row v of ``rows_a`` if v < len(rows_a), otherwise row v - len(rows_a) of ``rows_b``. Element i of ``out``
    is computed from columns ``first_a + i`` of ``rows_a`` and ``first_b + i`` of ``rows_b``. ``out`` may be a part of a
    row if its element i is in the column from which it is computed.
    """
    by, both = divisor[0], program.size > 1
    for block in range(start, stop, BLOCK):
        a, b, count = first_a + block, first_b + block, min(BLOCK, stop - block)
        _fold(rows_a, a, rows_b, b, program, scratch, count)
        left = _left(rows_a, a, rows_b, b, program, scratch, count)
        right = _right(rows_a, a, rows_b, b, program, scratch, count)
        target = out[block : block + count]
        for i in range(count):
            target[i] = (left[i] + right[i] if both else left[i]) / by


def _gradient(total: Any, i: int) -> Any:
    """Return element i of the averaged gradient: do the program's last addition, then divide.

    ``total`` is (first operand, second operand, whether there is an addition, divisor).
    """
    left, right, both, divisor = total
    return (left[i] + right[i] if both else left[i]) / divisor


def _tree_kernel(arrays: str) -> Callable[[Callable[..., None]], Kernel]:
    """Make a decorator that turns a function which updates one block into a kernel that first sums rows of gradients.

    The function is called as ``update(total, *arrays, hyper, start, stop)`` and gets the elements of the averaged
    gradient by ``_gradient(total, i)``. The argument of the decorator, ``arrays``, is the types of the arrays in a
    kernel's signature. The kernel is called as ``kernel(rows, first, program, divisor, *arrays, hyper, start, stop)``.
    """

    def made(update: Callable[..., None]) -> Kernel:
        def tree(rows: Array, first: int, program: Array, divisor: Array, *rest: Any) -> None:
            start, stop, scratch = rest[-3], rest[-2], rest[-1]
            by, both = divisor[0], program.size > 1
            for block in range(start, stop, BLOCK):
                end = min(block + BLOCK, stop)
                place, count = first + block, end - block
                _fold(rows, place, rows, place, program, scratch, count)
                left = _left(rows, place, rows, place, program, scratch, count)
                right = _right(rows, place, rows, place, program, scratch, count)
                update((left, right, both, by), *rest[:-3], block, end)

        for attribute in ("__name__", "__qualname__", "__doc__"):
            setattr(tree, attribute, getattr(update, attribute))
        names = ("rows", "first", "program", "divisor", *list(signature(update).parameters)[1:], "scratch")
        types = f"void(const T[:,::1], i8, const i4[::1], const T[::1], {arrays}, const T[::1], i8, i8, T[::1])"
        return kernel(types, scratch=BLOCK * DEPTH, names=names)(tree)

    return made


@_tree_kernel("T[::1]")
def sgd_tree(total: Any, w: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.sgd`` does."""
    lr, decay = hyper[0], hyper[1]
    w = w[start:stop]
    for i in range(w.size):
        w[i] = _sgd(w[i], _gradient(total, i), lr, decay)


@_tree_kernel("T[::1], T[::1]")
def momentum_tree(total: Any, w: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.momentum`` does."""
    lr, decay, factor, keep = hyper[0], hyper[1], hyper[2], hyper[3]
    of_g, of_m = hyper[4], hyper[5]
    w, m = w[start:stop], m[start:stop]
    for i in range(w.size):
        w[i], m[i] = _momentum(w[i], _gradient(total, i), m[i], lr, decay, factor, keep, of_g, of_m)


@_tree_kernel("T[::1], T[::1], T[::1]")
def adam_tree(total: Any, w: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.adam`` does."""
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    w, m, v = w[start:stop], m[start:stop], v[start:stop]
    for i in range(w.size):
        g = _gradient(total, i)
        w[i], m[i], v[i] = _adam(w[i], g, m[i], v[i], decay, beta1, rest1, beta2, rest2, rate, correction, eps)


@_tree_kernel("T[::1], T[::1], T[::1]")
def adamw_tree(total: Any, w: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.adamw`` does."""
    shrink, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    w, m, v = w[start:stop], m[start:stop], v[start:stop]
    for i in range(w.size):
        g = _gradient(total, i)
        w[i], m[i], v[i] = _adamw(w[i], g, m[i], v[i], shrink, beta1, rest1, beta2, rest2, rate, correction, eps)


@_tree_kernel("T[::1], T[::1]")
def rmsprop_tree(total: Any, w: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.rmsprop`` does."""
    lr, decay, alpha, rest, eps = hyper[0], hyper[1], hyper[2], hyper[3], hyper[4]
    w, v = w[start:stop], v[start:stop]
    for i in range(w.size):
        w[i], v[i] = _rmsprop(w[i], _gradient(total, i), v[i], lr, decay, alpha, rest, eps)


@_tree_kernel("T[::1], T[::1]")
def lion_tree(total: Any, w: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum and divide rows of gradients, then update as ``optimizer.lion`` does."""
    shrink, lr, beta1, rest1 = hyper[0], hyper[1], hyper[2], hyper[3]
    beta2, rest2, zero = hyper[4], hyper[5], hyper[6]
    w, m = w[start:stop], m[start:stop]
    for i in range(w.size):
        w[i], m[i] = _lion(w[i], _gradient(total, i), m[i], shrink, lr, beta1, rest1, beta2, rest2, zero)


@_tree_kernel("const T[::1], T[::1], T[::1], T[::1]")
def lamb_direction_tree(
    total: Any, w: Array, u: Array, m: Array, v: Array, hyper: Array, start: int, stop: int
) -> None:
    """Sum and divide rows of gradients as ``tree_sum`` does, then write LAMB's direction to ``u``.

    The bits are the same as with ``tree_sum`` into ``u`` and then ``optimizer.lamb_direction``. ``hyper`` holds the
    scalars that ``optimizer.lamb_direction`` needs. The decorator replaces ``total`` by the arguments ``rows``,
    ``first``, ``program`` and ``divisor``.
    """
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, first, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    w, u, m, v = w[start:stop], u[start:stop], m[start:stop], v[start:stop]
    for i in range(w.size):
        g = _gradient(total, i)
        u[i], m[i], v[i] = _lamb_direction(
            w[i], g, m[i], v[i], decay, beta1, rest1, beta2, rest2, first, correction, eps
        )
