"""Sum rows of gradients by a tree program, divide, and update: one pass over memory, block by block.

A *row* is one copy of the whole gradient vector.
A *program* is a list of integers run by a stack machine over whole rows: ``v >= 0`` pushes row v, ``-1`` pops the
top and adds it to the entry below, ``v <= -2`` adds row ``-2 - v`` to the top. Element i of a row lies at column
``first + i``. ``tree_sum`` takes rows of two arrays: rows below ``len(rows_a)`` are in ``rows_a``. The machine works on
blocks small enough for the first-level cache, so a row is read from memory once and the sum is never written to it.
The program's last addition is made in the loop of the update.
The stack holds ``DEPTH`` rows: enough for the canonical tree over 32,768 grains.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from mpizero.kernels.compile import Kernel, kernel
from mpizero.kernels.formulas import optimizer as formulas
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
    """Run the program without its last instruction; a push and the addition that follows it are one loop."""
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
    """Return the first operand of the last addition, or the only row."""
    if program.size <= 2:
        return _row(rows_a, first_a, rows_b, first_b, program[0], count)
    return _level(scratch, 0, count)


def _right(rows_a: Array, first_a: int, rows_b: Array, first_b: int, program: Array, scratch: Array, count: int) -> Any:
    """Return the second operand of the last addition; an array that is not read if there is no addition."""
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
    """Write the sum of the rows, divided by ``divisor[0]``, to ``out[start:stop]``; out may be one of the rows."""
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
    """Return an element of the averaged gradient: the program's last addition, and the division."""
    left, right, both, divisor = total
    return (left[i] + right[i] if both else left[i]) / divisor


def _tree_kernel(arrays: str) -> Callable[[Callable[..., None]], Kernel]:
    """Make a kernel that sums rows by a program and updates, block by block, from a function that updates one block.

    ``update(total, *arrays, hyper, start, stop)`` takes the averaged gradient from :func:`_gradient`; ``arrays`` are
    the types of its arrays.
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
    """Sum and divide as ``tree_sum``, then update as ``optimizer.sgd``; same bits as the two calls."""
    lr, decay = hyper[0], hyper[1]
    w = w[start:stop]
    for i in range(w.size):
        w[i] = _sgd(w[i], _gradient(total, i), lr, decay)


@_tree_kernel("T[::1], T[::1]")
def momentum_tree(total: Any, w: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum and divide as ``tree_sum``, then update as ``optimizer.momentum``; same bits as the two calls."""
    lr, decay, factor, keep = hyper[0], hyper[1], hyper[2], hyper[3]
    of_g, of_m = hyper[4], hyper[5]
    w, m = w[start:stop], m[start:stop]
    for i in range(w.size):
        w[i], m[i] = _momentum(w[i], _gradient(total, i), m[i], lr, decay, factor, keep, of_g, of_m)


@_tree_kernel("T[::1], T[::1], T[::1]")
def adam_tree(total: Any, w: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum and divide as ``tree_sum``, then update as ``optimizer.adam``; same bits as the two calls."""
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    w, m, v = w[start:stop], m[start:stop], v[start:stop]
    for i in range(w.size):
        g = _gradient(total, i)
        w[i], m[i], v[i] = _adam(w[i], g, m[i], v[i], decay, beta1, rest1, beta2, rest2, rate, correction, eps)


@_tree_kernel("T[::1], T[::1], T[::1]")
def adamw_tree(total: Any, w: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum and divide as ``tree_sum``, then update as ``optimizer.adamw``; same bits as the two calls."""
    shrink, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    w, m, v = w[start:stop], m[start:stop], v[start:stop]
    for i in range(w.size):
        g = _gradient(total, i)
        w[i], m[i], v[i] = _adamw(w[i], g, m[i], v[i], shrink, beta1, rest1, beta2, rest2, rate, correction, eps)


@_tree_kernel("T[::1], T[::1]")
def rmsprop_tree(total: Any, w: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum and divide as ``tree_sum``, then update as ``optimizer.rmsprop``; same bits as the two calls."""
    lr, decay, alpha, rest, eps = hyper[0], hyper[1], hyper[2], hyper[3], hyper[4]
    w, v = w[start:stop], v[start:stop]
    for i in range(w.size):
        w[i], v[i] = _rmsprop(w[i], _gradient(total, i), v[i], lr, decay, alpha, rest, eps)


@_tree_kernel("T[::1], T[::1]")
def lion_tree(total: Any, w: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum and divide as ``tree_sum``, then update as ``optimizer.lion``; same bits as the two calls."""
    shrink, lr, beta1, rest1 = hyper[0], hyper[1], hyper[2], hyper[3]
    beta2, rest2, zero = hyper[4], hyper[5], hyper[6]
    w, m = w[start:stop], m[start:stop]
    for i in range(w.size):
        w[i], m[i] = _lion(w[i], _gradient(total, i), m[i], shrink, lr, beta1, rest1, beta2, rest2, zero)


@_tree_kernel("const T[::1], T[::1], T[::1], T[::1]")
def lamb_direction_tree(
    total: Any, w: Array, u: Array, m: Array, v: Array, hyper: Array, start: int, stop: int
) -> None:
    """Sum and divide as ``tree_sum`` into ``u``, then ``optimizer.lamb_direction``; same bits as the two calls."""
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, first, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    w, u, m, v = w[start:stop], u[start:stop], m[start:stop], v[start:stop]
    for i in range(w.size):
        g = _gradient(total, i)
        u[i], m[i], v[i] = _lamb_direction(
            w[i], g, m[i], v[i], decay, beta1, rest1, beta2, rest2, first, correction, eps
        )
