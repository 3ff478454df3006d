"""Sum rows of gradients by a tree program, divide, and update, in NumPy, as a reference for the fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any

from mpizero.types import Array
from tests.support.reference import optimizer


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

    ``program`` is a list of integers for a stack machine; ``mpizero.kernels.cpu.fused`` defines them. Row v of the
    program is row v of ``rows_a`` if v < len(rows_a), otherwise row v - len(rows_a) of ``rows_b``. Element i of ``out``
    is computed from columns ``first_a + i`` of ``rows_a`` and ``first_b + i`` of ``rows_b``.
    """
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
    """Sum and divide rows of gradients as ``tree_sum`` does, then write LAMB's direction to ``u``.

    The bits are the same as with ``tree_sum`` into ``u`` and then ``optimizer.lamb_direction``. ``hyper`` holds the
    scalars that ``optimizer.lamb_direction`` needs.
    """
    tree_sum(rows, first, rows, 0, program, divisor, u, start, stop)
    optimizer.lamb_direction(w, u, m, v, hyper, start, stop)
