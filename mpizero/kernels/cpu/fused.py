"""Sum rows of gradients by a tree program, divide, and update: one pass over memory, block by block.

A *program* is a list of integers run by a stack machine over whole rows: ``v >= 0`` pushes row v, ``-1`` pops the
top and adds it to the one beneath, ``v <= -2`` adds row ``-2 - v`` to the top. Rows below ``len(rows_a)`` are
``rows_a``'s, the rest ``rows_b``'s; element i of a row lies at column ``first + i``. The machine works on blocks
small enough for the first-level cache, so a row is read from memory once and the sum is never written to it.
The stack holds ``DEPTH`` rows: enough for the canonical tree over 32,768 grains.
"""

from mpizero.kernels.compile import kernel
from mpizero.kernels.formulas import optimizer as _formulas

BLOCK = 2048
DEPTH = 16

_sgd = _formulas.sgd
_momentum = _formulas.momentum
_adam = _formulas.adam
_adamw = _formulas.adamw
_rmsprop = _formulas.rmsprop
_lion = _formulas.lion


def _copy(row, first, target, count):
    row = row[first : first + count]
    for i in range(count):
        target[i] = row[i]


def _add(row, first, target, count):
    row = row[first : first + count]
    for i in range(count):
        target[i] += row[i]


def _fold(rows_a, first_a, rows_b, first_b, program, scratch, count):
    """Run the program over ``count`` columns; the result is left in ``scratch[:count]``."""
    in_a = rows_a.shape[0]
    top = -1
    for step in range(program.size):
        code = program[step]
        if code == -1:
            top -= 1
            _add(scratch, (top + 1) * BLOCK, scratch[top * BLOCK :], count)
            continue
        row = code if code >= 0 else -2 - code
        if code >= 0:
            top += 1
            if row < in_a:
                _copy(rows_a[row], first_a, scratch[top * BLOCK :], count)
            else:
                _copy(rows_b[row - in_a], first_b, scratch[top * BLOCK :], count)
        elif row < in_a:
            _add(rows_a[row], first_a, scratch[top * BLOCK :], count)
        else:
            _add(rows_b[row - in_a], first_b, scratch[top * BLOCK :], count)


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def tree_sum(rows_a, first_a, rows_b, first_b, program, divisor, out, start, stop, scratch):
    """Write the sum of the rows, divided by ``divisor[0]``, to ``out[start:stop]``; out may be one of the rows."""
    by = divisor[0]
    for block in range(start, stop, BLOCK):
        count = min(BLOCK, stop - block)
        _fold(rows_a, first_a + block, rows_b, first_b + block, program, scratch, count)
        target = out[block : block + count]
        for i in range(count):
            target[i] = scratch[i] / by


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def sgd_tree(rows_a, first_a, rows_b, first_b, program, divisor, w, hyper, start, stop, scratch):
    """Sum and divide as ``tree_sum``, then update as ``optimizer.sgd``; same bits as the two in turn."""
    by = divisor[0]
    lr, decay = hyper[0], hyper[1]
    for block in range(start, stop, BLOCK):
        count = min(BLOCK, stop - block)
        _fold(rows_a, first_a + block, rows_b, first_b + block, program, scratch, count)
        w_ = w[block : block + count]
        for i in range(count):
            w_[i] = _sgd(w_[i], scratch[i] / by, lr, decay)


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], "
    "T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def momentum_tree(rows_a, first_a, rows_b, first_b, program, divisor, w, m, hyper, start, stop, scratch):
    """Sum and divide as ``tree_sum``, then update as ``optimizer.momentum``; same bits as the two in turn."""
    by = divisor[0]
    lr, decay, factor, keep, of_g, of_m = hyper[0], hyper[1], hyper[2], hyper[3], hyper[4], hyper[5]
    for block in range(start, stop, BLOCK):
        count = min(BLOCK, stop - block)
        _fold(rows_a, first_a + block, rows_b, first_b + block, program, scratch, count)
        w_, m_ = w[block : block + count], m[block : block + count]
        for i in range(count):
            w_[i], m_[i] = _momentum(w_[i], scratch[i] / by, m_[i], lr, decay, factor, keep, of_g, of_m)


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], "
    "T[::1], T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def adam_tree(rows_a, first_a, rows_b, first_b, program, divisor, w, m, v, hyper, start, stop, scratch):
    """Sum and divide as ``tree_sum``, then update as ``optimizer.adam``; same bits as the two in turn."""
    by = divisor[0]
    decay, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    for block in range(start, stop, BLOCK):
        count = min(BLOCK, stop - block)
        _fold(rows_a, first_a + block, rows_b, first_b + block, program, scratch, count)
        w_, m_, v_ = w[block : block + count], m[block : block + count], v[block : block + count]
        for i in range(count):
            w_[i], m_[i], v_[i] = _adam(
                w_[i], scratch[i] / by, m_[i], v_[i], decay, beta1, rest1, beta2, rest2, rate, correction, eps
            )


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], "
    "T[::1], T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def adamw_tree(rows_a, first_a, rows_b, first_b, program, divisor, w, m, v, hyper, start, stop, scratch):
    """Sum and divide as ``tree_sum``, then update as ``optimizer.adamw``; same bits as the two in turn."""
    by = divisor[0]
    shrink, beta1, rest1, beta2 = hyper[0], hyper[1], hyper[2], hyper[3]
    rest2, rate, correction, eps = hyper[4], hyper[5], hyper[6], hyper[7]
    for block in range(start, stop, BLOCK):
        count = min(BLOCK, stop - block)
        _fold(rows_a, first_a + block, rows_b, first_b + block, program, scratch, count)
        w_, m_, v_ = w[block : block + count], m[block : block + count], v[block : block + count]
        for i in range(count):
            w_[i], m_[i], v_[i] = _adamw(
                w_[i], scratch[i] / by, m_[i], v_[i], shrink, beta1, rest1, beta2, rest2, rate, correction, eps
            )


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], "
    "T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def rmsprop_tree(rows_a, first_a, rows_b, first_b, program, divisor, w, v, hyper, start, stop, scratch):
    """Sum and divide as ``tree_sum``, then update as ``optimizer.rmsprop``; same bits as the two in turn."""
    by = divisor[0]
    lr, decay, alpha, rest, eps = hyper[0], hyper[1], hyper[2], hyper[3], hyper[4]
    for block in range(start, stop, BLOCK):
        count = min(BLOCK, stop - block)
        _fold(rows_a, first_a + block, rows_b, first_b + block, program, scratch, count)
        w_, v_ = w[block : block + count], v[block : block + count]
        for i in range(count):
            w_[i], v_[i] = _rmsprop(w_[i], scratch[i] / by, v_[i], lr, decay, alpha, rest, eps)


@kernel(
    "void(const T[:,::1], i8, const T[:,::1], i8, const i4[::1], const T[::1], "
    "T[::1], T[::1], const T[::1], i8, i8, T[::1])",
    scratch=BLOCK * DEPTH,
)
def lion_tree(rows_a, first_a, rows_b, first_b, program, divisor, w, m, hyper, start, stop, scratch):
    """Sum and divide as ``tree_sum``, then update as ``optimizer.lion``; same bits as the two in turn."""
    by = divisor[0]
    shrink, lr, beta1, rest1, beta2, rest2, zero = hyper[0], hyper[1], hyper[2], hyper[3], hyper[4], hyper[5], hyper[6]
    for block in range(start, stop, BLOCK):
        count = min(BLOCK, stop - block)
        _fold(rows_a, first_a + block, rows_b, first_b + block, program, scratch, count)
        w_, m_ = w[block : block + count], m[block : block + count]
        for i in range(count):
            w_[i], m_[i] = _lion(w_[i], scratch[i] / by, m_[i], shrink, lr, beta1, rest1, beta2, rest2, zero)
