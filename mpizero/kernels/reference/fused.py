"""Oracle of :mod:`mpizero.kernels.cpu.fused`: the stack machine on whole rows, then the reference update."""

from __future__ import annotations

from mpizero.kernels.reference import optimizer
from mpizero.types import Array


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
    """Write the sum of the rows, divided by ``divisor[0]``, to ``out[start:stop]``."""
    rows = [row[first_a:] for row in rows_a] + [row[first_b:] for row in rows_b]
    stack: list[Array] = []
    for code in program.tolist():
        if code >= 0:
            stack.append(rows[code][start:stop])
        elif code == -1:
            right = stack.pop()
            stack[-1] = stack[-1] + right
        else:
            stack[-1] = stack[-1] + rows[-2 - code][start:stop]
    out[start:stop] = stack.pop() / divisor[0]


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
) -> None:
    """Sum and divide, then update as ``optimizer.sgd``."""
    g = w.copy()
    tree_sum(rows_a, first_a, rows_b, first_b, program, divisor, g, start, stop)
    optimizer.sgd(w, g, hyper, start, stop)


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
) -> None:
    """Sum and divide, then update as ``optimizer.momentum``."""
    g = w.copy()
    tree_sum(rows_a, first_a, rows_b, first_b, program, divisor, g, start, stop)
    optimizer.momentum(w, g, m, hyper, start, stop)


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
) -> None:
    """Sum and divide, then update as ``optimizer.adam``."""
    g = w.copy()
    tree_sum(rows_a, first_a, rows_b, first_b, program, divisor, g, start, stop)
    optimizer.adam(w, g, m, v, hyper, start, stop)


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
) -> None:
    """Sum and divide, then update as ``optimizer.adamw``."""
    g = w.copy()
    tree_sum(rows_a, first_a, rows_b, first_b, program, divisor, g, start, stop)
    optimizer.adamw(w, g, m, v, hyper, start, stop)


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
) -> None:
    """Sum and divide, then update as ``optimizer.rmsprop``."""
    g = w.copy()
    tree_sum(rows_a, first_a, rows_b, first_b, program, divisor, g, start, stop)
    optimizer.rmsprop(w, g, v, hyper, start, stop)


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
) -> None:
    """Sum and divide, then update as ``optimizer.lion``."""
    g = w.copy()
    tree_sum(rows_a, first_a, rows_b, first_b, program, divisor, g, start, stop)
    optimizer.lion(w, g, m, hyper, start, stop)


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
) -> None:
    """Sum and divide into ``u``, then ``optimizer.lamb_direction``."""
    tree_sum(rows_a, first_a, rows_b, first_b, program, divisor, u, start, stop)
    optimizer.lamb_direction(w, u, m, v, hyper, start, stop)
