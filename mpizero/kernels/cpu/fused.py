"""Sum rows of gradients by a tree program, divide, and update: one pass over memory, block by block.

A *program* is a list of integers run by a stack machine over whole rows: ``v >= 0`` pushes row v, ``-1`` pops the
top and adds it to the one beneath, ``v <= -2`` adds row ``-2 - v`` to the top. Rows below ``len(rows_a)`` are
``rows_a``'s, the rest ``rows_b``'s; element i of a row lies at column ``first + i``. The machine works on blocks
small enough for the first-level cache, so a row is read from memory once and the sum is never written to it.
The program's last addition is made in the loop of the update.
The stack holds ``DEPTH`` rows: enough for the canonical tree over 32,768 grains.
"""

from __future__ import annotations

from typing import Any

from mpizero.kernels.compile import kernel
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
    """Run the program without its last instruction; a push and the addition after it are one loop."""
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
    """Return the second operand of the last addition; nothing that is read where there is none."""
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


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def sgd_tree(
    rows_a: Array,
    first_a: int,
    rows_b: Array,
    first_b: int,
    program: Array,
    divisor: Array,
    w: Array,
    hyper: Array,
    start: int,
    stop: int,
    scratch: Array,
) -> None:
    """Sum and divide as ``tree_sum``, then update as ``optimizer.sgd``; same bits as the two in turn."""
    by, both = divisor[0], program.size > 1
    lr, decay = hyper[0], hyper[1]
    for block in range(start, stop, BLOCK):
        a, b, count = first_a + block, first_b + block, min(BLOCK, stop - block)
        _fold(rows_a, a, rows_b, b, program, scratch, count)
        left = _left(rows_a, a, rows_b, b, program, scratch, count)
        right = _right(rows_a, a, rows_b, b, program, scratch, count)
        w_ = w[block : block + count]
        for i in range(count):
            g = (left[i] + right[i] if both else left[i]) / by
            w_[i] = _sgd(w_[i], g, lr, decay)


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], "
    "T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def momentum_tree(
    rows_a: Array,
    first_a: int,
    rows_b: Array,
    first_b: int,
    program: Array,
    divisor: Array,
    w: Array,
    m: Array,
    hyper: Array,
    start: int,
    stop: int,
    scratch: Array,
) -> None:
    """Sum and divide as ``tree_sum``, then update as ``optimizer.momentum``; same bits as the two in turn."""
    by, both = divisor[0], program.size > 1
    lr, decay, factor, keep = hyper[0], hyper[1], hyper[2], hyper[3]
    of_g, of_m = hyper[4], hyper[5]
    for block in range(start, stop, BLOCK):
        a, b, count = first_a + block, first_b + block, min(BLOCK, stop - block)
        _fold(rows_a, a, rows_b, b, program, scratch, count)
        left = _left(rows_a, a, rows_b, b, program, scratch, count)
        right = _right(rows_a, a, rows_b, b, program, scratch, count)
        w_, m_ = w[block : block + count], m[block : block + count]
        for i in range(count):
            g = (left[i] + right[i] if both else left[i]) / by
            w_[i], m_[i] = _momentum(w_[i], g, m_[i], lr, decay, factor, keep, of_g, of_m)


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], "
    "T[::1], T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def adam_tree(
    rows_a: Array,
    first_a: int,
    rows_b: Array,
    first_b: int,
    program: Array,
    divisor: Array,
    w: Array,
    m: Array,
    v: Array,
    hyper: Array,
    start: int,
    stop: int,
    scratch: Array,
) -> None:
    """Sum and divide as ``tree_sum``, then update as ``optimizer.adam``; same bits as the two in turn."""
    by, both = divisor[0], program.size > 1
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    for block in range(start, stop, BLOCK):
        a, b, count = first_a + block, first_b + block, min(BLOCK, stop - block)
        _fold(rows_a, a, rows_b, b, program, scratch, count)
        left = _left(rows_a, a, rows_b, b, program, scratch, count)
        right = _right(rows_a, a, rows_b, b, program, scratch, count)
        w_, m_, v_ = w[block : block + count], m[block : block + count], v[block : block + count]
        for i in range(count):
            g = (left[i] + right[i] if both else left[i]) / by
            w_[i], m_[i], v_[i] = _adam(
                w_[i], g, m_[i], v_[i], decay, beta1, rest1, beta2, rest2, rate, correction, eps
            )


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], "
    "T[::1], T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def adamw_tree(
    rows_a: Array,
    first_a: int,
    rows_b: Array,
    first_b: int,
    program: Array,
    divisor: Array,
    w: Array,
    m: Array,
    v: Array,
    hyper: Array,
    start: int,
    stop: int,
    scratch: Array,
) -> None:
    """Sum and divide as ``tree_sum``, then update as ``optimizer.adamw``; same bits as the two in turn."""
    by, both = divisor[0], program.size > 1
    shrink, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    for block in range(start, stop, BLOCK):
        a, b, count = first_a + block, first_b + block, min(BLOCK, stop - block)
        _fold(rows_a, a, rows_b, b, program, scratch, count)
        left = _left(rows_a, a, rows_b, b, program, scratch, count)
        right = _right(rows_a, a, rows_b, b, program, scratch, count)
        w_, m_, v_ = w[block : block + count], m[block : block + count], v[block : block + count]
        for i in range(count):
            g = (left[i] + right[i] if both else left[i]) / by
            w_[i], m_[i], v_[i] = _adamw(
                w_[i], g, m_[i], v_[i], shrink, beta1, rest1, beta2, rest2, rate, correction, eps
            )


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], "
    "T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def rmsprop_tree(
    rows_a: Array,
    first_a: int,
    rows_b: Array,
    first_b: int,
    program: Array,
    divisor: Array,
    w: Array,
    v: Array,
    hyper: Array,
    start: int,
    stop: int,
    scratch: Array,
) -> None:
    """Sum and divide as ``tree_sum``, then update as ``optimizer.rmsprop``; same bits as the two in turn."""
    by, both = divisor[0], program.size > 1
    lr, decay, alpha, rest = hyper[0], hyper[1], hyper[2], hyper[3]
    eps = hyper[4]
    for block in range(start, stop, BLOCK):
        a, b, count = first_a + block, first_b + block, min(BLOCK, stop - block)
        _fold(rows_a, a, rows_b, b, program, scratch, count)
        left = _left(rows_a, a, rows_b, b, program, scratch, count)
        right = _right(rows_a, a, rows_b, b, program, scratch, count)
        w_, v_ = w[block : block + count], v[block : block + count]
        for i in range(count):
            g = (left[i] + right[i] if both else left[i]) / by
            w_[i], v_[i] = _rmsprop(w_[i], g, v_[i], lr, decay, alpha, rest, eps)


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], "
    "T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def lion_tree(
    rows_a: Array,
    first_a: int,
    rows_b: Array,
    first_b: int,
    program: Array,
    divisor: Array,
    w: Array,
    m: Array,
    hyper: Array,
    start: int,
    stop: int,
    scratch: Array,
) -> None:
    """Sum and divide as ``tree_sum``, then update as ``optimizer.lion``; same bits as the two in turn."""
    by, both = divisor[0], program.size > 1
    shrink, lr, beta1, rest1 = hyper[0], hyper[1], hyper[2], hyper[3]
    beta2, rest2, zero = hyper[4], hyper[5], hyper[6]
    for block in range(start, stop, BLOCK):
        a, b, count = first_a + block, first_b + block, min(BLOCK, stop - block)
        _fold(rows_a, a, rows_b, b, program, scratch, count)
        left = _left(rows_a, a, rows_b, b, program, scratch, count)
        right = _right(rows_a, a, rows_b, b, program, scratch, count)
        w_, m_ = w[block : block + count], m[block : block + count]
        for i in range(count):
            g = (left[i] + right[i] if both else left[i]) / by
            w_[i], m_[i] = _lion(w_[i], g, m_[i], shrink, lr, beta1, rest1, beta2, rest2, zero)


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], "
    "const T[::1], T[::1], T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def lamb_direction_tree(
    rows_a: Array,
    first_a: int,
    rows_b: Array,
    first_b: int,
    program: Array,
    divisor: Array,
    w: Array,
    u: Array,
    m: Array,
    v: Array,
    hyper: Array,
    start: int,
    stop: int,
    scratch: Array,
) -> None:
    """Sum and divide as ``tree_sum`` into ``u``, then ``optimizer.lamb_direction``; same bits as the two in turn."""
    by, both = divisor[0], program.size > 1
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, first, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    for block in range(start, stop, BLOCK):
        a, b, count = first_a + block, first_b + block, min(BLOCK, stop - block)
        _fold(rows_a, a, rows_b, b, program, scratch, count)
        left = _left(rows_a, a, rows_b, b, program, scratch, count)
        right = _right(rows_a, a, rows_b, b, program, scratch, count)
        w_, u_ = w[block : block + count], u[block : block + count]
        m_, v_ = m[block : block + count], v[block : block + count]
        for i in range(count):
            g = (left[i] + right[i] if both else left[i]) / by
            u_[i], m_[i], v_[i] = _lamb_direction(
                w_[i], g, m_[i], v_[i], decay, beta1, rest1, beta2, rest2, first, correction, eps
            )
