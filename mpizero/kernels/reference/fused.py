"""Check :mod:`mpizero.kernels.cpu.fused`: the stack machine on whole rows, then the reference update."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any

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


def _tree(update: Callable[..., None]) -> Callable[..., None]:
    """Make the oracle that sums and divides, then updates by the reference."""

    def tree(rows: Array, first: int, program: Array, divisor: Array, w: Array, *rest: Any) -> None:
        g, (start, stop) = w.copy(), rest[-2:]
        tree_sum(rows, first, rows, 0, program, divisor, g, start, stop)
        update(w, g, *rest)

    names = ("rows", "first", "program", "divisor", *(name for name in signature(update).parameters if name != "g"))
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    setattr(tree, "__signature__", Signature(parameters))  # noqa: B010 - for mypy
    return tree


sgd_tree = _tree(optimizer.sgd)
momentum_tree = _tree(optimizer.momentum)
adam_tree = _tree(optimizer.adam)
adamw_tree = _tree(optimizer.adamw)
rmsprop_tree = _tree(optimizer.rmsprop)
lion_tree = _tree(optimizer.lion)


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
    """Sum and divide as ``tree_sum`` into ``u``, then compute ``optimizer.lamb_direction``."""
    tree_sum(rows, first, rows, 0, program, divisor, u, start, stop)
    optimizer.lamb_direction(w, u, m, v, hyper, start, stop)
