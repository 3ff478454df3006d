"""Update parameters in place by an optimizer's formula, sum gradients in the same pass, compress messages: CPU.

The kernels of optimizers update elements ``start`` to ``stop - 1`` of flat arrays. ``hyper`` is an array of the scalars
that the formula needs, which :mod:`mpizero.optim` computes for every step.

:func:`tree_sum` sums rows of gradients by a *program*, and divides. Kernels whose names end in ``_tree`` sum, divide
and update in one pass over memory. Their results have the same bits as those of two calls, of ``tree_sum`` and of the
optimizer's kernel, whose scalars are in ``hyper``. The decorator of such kernels replaces the parameter ``total`` by
``rows``, ``first``, ``program`` and ``divisor``.

A *program* is a list of integers that a stack machine executes on the rows of a matrix: ``v >= 0`` pushes row v, ``-1``
pops the top of the stack and adds it to the entry below, and ``v <= -2`` adds row ``-2 - v`` to the top. ``ROUND``, the
smallest int32, rounds the top, a sum of float32 values, to bfloat16. Each row holds a gradient or a sum of gradients.
Element i of the parameters belongs to column ``first + i`` of the matrix, where ``first`` is an argument. The stack
holds ``DEPTH`` rows, which is enough for the tree over 32,768 grains.

The machine works on blocks of columns that fit into the first-level cache, so a row is read from memory once, and the
sum is never written to memory. The last addition of a program is done in the loop of the update, if it is not rounded.

Messages are compressed with error feedback: the compression error of a message is kept in ``residual`` and added to the
next message. ``int8`` sends eight bits for each value, and a scale for each block of ``COMPRESSION_BLOCK`` consecutive
values. ``top`` sends the values of largest magnitude with their indices. The selection is exact: the smallest magnitude
that is sent is found by counting how often each pattern of bits occurs in the magnitudes, first in the highest 11 bits
and then twice in the next 10 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np

from mpizero.kernels import formulas
from mpizero.kernels.jit import Kernel, kernel
from mpizero.types import Array

_sgd = formulas.sgd
_lamb_direction = formulas.lamb_direction
_lamb_apply = formulas.lamb_apply
_ema = formulas.ema
_add_scaled = formulas.add_scaled
_first_eight = formulas.first_eight


@kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
def sgd(w: Array, g: Array, hyper: Array, start: int, stop: int) -> None:
    """Update ``w[start:stop]`` by gradient descent with the gradient ``g``.

    hyper = [lr, decay], where lr is the learning rate, and ``decay * w`` is added to the gradient (weight decay).
    """
    lr, decay = hyper[0], hyper[1]
    w, g = w[start:stop], g[start:stop]
    for i in range(w.size):
        w[i] = _sgd(w[i], g[i], lr, decay)


@kernel("void(const T[::1], T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def lamb_direction(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Overwrite the gradient ``g[start:stop]`` with LAMB's direction: Adam's direction plus ``decay * w``.

    ``m`` and ``v`` are the running averages of the gradient and of its square, which are updated too. hyper begins with
    [decay, beta1, rest1, beta2, rest2, first, correction, eps] with rest1 = 1 - beta1, rest2 = 1 - beta2, first = 1 /
    (1 - beta1**step) and correction = 1 / sqrt(1 - beta2**step).
    """
    scalars = _first_eight(hyper)
    w, g, m, v = w[start:stop], g[start:stop], m[start:stop], v[start:stop]
    for i in range(w.size):
        g[i], m[i], v[i] = _lamb_direction(w[i], g[i], m[i], v[i], scalars)


@kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
def lamb_apply(w: Array, u: Array, hyper: Array, start: int, stop: int) -> None:
    """Subtract ``hyper[0] * u`` from ``w`` for the elements ``start`` to ``stop - 1``."""
    rate = hyper[0]
    w, u = w[start:stop], u[start:stop]
    for i in range(w.size):
        w[i] = _lamb_apply(w[i], u[i], rate)


@kernel("void(const T[::1], T[::1], const T[::1], i8, i8)")
def ema(w: Array, average: Array, rate1: Array, start: int, stop: int) -> None:
    """Add ``rate1[0] * (w - average)`` to ``average``, for the elements ``start`` to ``stop - 1``."""
    rate = rate1[0]
    w, average = w[start:stop], average[start:stop]
    for i in range(w.size):
        average[i] = _ema(average[i], w[i], rate)


@kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
def add_scaled(y: Array, x: Array, factor1: Array, start: int, stop: int) -> None:
    """Add ``factor1[0] * x`` to ``y``, for the elements ``start`` to ``stop - 1``."""
    factor = factor1[0]
    y, x = y[start:stop], x[start:stop]
    for i in range(y.size):
        y[i] = _add_scaled(y[i], x[i], factor)


BLOCK = 2048
DEPTH = 16
#: The instruction of a program that rounds the top of the stack.
ROUND = -(2**31)

_round_bfloat16 = formulas.round_bfloat16


@kernel("void(f4[::1])")
def round_bfloat16(x: Array) -> None:
    """Round all elements of ``x`` to bfloat16, in place."""
    for i in range(x.size):
        x[i] = _round_bfloat16(x[i])


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


def _round(x: Array) -> None:
    T = x.dtype.type  # noqa: N806
    for i in range(x.size):
        x[i] = T(_round_bfloat16(x[i]))


def _adds_last(program: Array) -> bool:
    """Tell whether a program ends with an addition, which is then left to the loop that uses the sum.

    A program says which rows to add in which order.
    """
    return program.size > 1 and program[program.size - 1] != ROUND


def _fold(rows_a: Array, first_a: int, rows_b: Array, first_b: int, program: Array, scratch: Array, count: int) -> None:
    """Add rows by a program, in ``count`` columns, but leave out an addition that is the program's last instruction.

    A program says which rows to add in which order, see the docstring of the module; if it has only one row, nothing is
    done. ``scratch`` holds the stack of partial sums. The push of a row and the addition that directly follows are done
    in one loop.
    """
    last, step, top = program.size - 1, 0, -1
    if program[last] == ROUND:
        last = program.size
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
        elif code == ROUND:
            _round(_level(scratch, top, count))
        else:
            below = _level(scratch, top, count)
            _add(below, _row(rows_a, first_a, rows_b, first_b, -2 - code, count), below)


def _left(rows_a: Array, first_a: int, rows_b: Array, first_b: int, program: Array, scratch: Array, count: int) -> Any:
    """Return ``count`` elements of the left operand of a program's last addition, which :func:`_fold` leaves out.

    If the program ends without an addition, the elements are those of the whole sum.
    """
    if program.size <= 2:
        return _row(rows_a, first_a, rows_b, first_b, program[0], count)
    return _level(scratch, 0, count)


def _right(rows_a: Array, first_a: int, rows_b: Array, first_b: int, program: Array, scratch: Array, count: int) -> Any:
    """Return ``count`` elements of the right operand of a program's last addition, which :func:`_fold` leaves out.

    If the program ends without an addition (:func:`_adds_last`), return some array, which must not be read.
    """
    code = program[program.size - 1]
    if code <= -2 and code != ROUND:
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
    """Sum rows in the order of ``program``, and write the sum, divided by ``divisor[0]``, to ``out[start:stop]``.

    ``program`` is a list of integers for a stack machine; the docstring of the module defines them. Row v of the
    program is row v of ``rows_a`` if v < len(rows_a), otherwise row v - len(rows_a) of ``rows_b``. Element i of ``out``
    is computed from columns ``first_a + i`` of ``rows_a`` and ``first_b + i`` of ``rows_b``. ``out`` may be a part of
    one of these rows if element i of ``out`` is in the column of the row from which it is computed.
    """
    by, both = divisor[0], _adds_last(program)
    for block in range(start, stop, BLOCK):
        a, b, count = first_a + block, first_b + block, min(BLOCK, stop - block)
        _fold(rows_a, a, rows_b, b, program, scratch, count)
        left = _left(rows_a, a, rows_b, b, program, scratch, count)
        right = _right(rows_a, a, rows_b, b, program, scratch, count)
        target = out[block : block + count]
        for i in range(count):
            target[i] = (left[i] + right[i] if both else left[i]) / by


def _gradient(total: Any, i: int) -> Any:
    """Return element i of the averaged gradient: do the last addition of the sum of gradients, then divide.

    ``total`` is (first operand, second operand, whether there is an addition, divisor).
    """
    left, right, both, divisor = total
    return (left[i] + right[i] if both else left[i]) / divisor


def _tree_kernel(arrays: str) -> Callable[[Callable[..., None]], Kernel]:
    """Make a decorator that turns a function which updates one block into a kernel that first sums rows of gradients.

    The function is called as ``update(total, *arrays, hyper, start, stop)`` and gets the elements of the averaged
    gradient by ``_gradient(total, i)``. ``arrays`` is the part of the kernel's signature with the types of ``*arrays``,
    as text. The kernel is called as ``kernel(rows, first, program, divisor, *arrays, hyper, start, stop)``: the rows
    from column ``first`` on are added as ``program`` says (see :mod:`mpizero.layout.sum_tree`), and ``divisor`` is an
    array with the total weight.
    """

    def made(update: Callable[..., None]) -> Kernel:
        def tree(rows: Array, first: int, program: Array, divisor: Array, *rest: Any) -> None:
            start, stop, scratch = rest[-3], rest[-2], rest[-1]
            by, both = divisor[0], _adds_last(program)
            for block in range(start, stop, BLOCK):
                end = min(block + BLOCK, stop)
                column, count = first + block, end - block
                _fold(rows, column, rows, column, program, scratch, count)
                left = _left(rows, column, rows, column, program, scratch, count)
                right = _right(rows, column, rows, column, program, scratch, count)
                update((left, right, both, by), *rest[:-3], block, end)

        for attribute in ("__name__", "__qualname__", "__doc__"):
            setattr(tree, attribute, getattr(update, attribute))
        names = ("rows", "first", "program", "divisor", *list(signature(update).parameters)[1:], "scratch")
        types = f"void(const T[:,::1], i8, const i4[::1], const T[::1], {arrays}, const T[::1], i8, i8, T[::1])"
        return kernel(types, scratch=BLOCK * DEPTH, names=names)(tree)

    return made


@_tree_kernel("T[::1]")
def sgd_tree(total: Any, w: Array, hyper: Array, start: int, stop: int) -> None:
    """Sum rows of gradients, divide the sum, and then update ``w[start:stop]`` as ``sgd`` does."""
    lr, decay = hyper[0], hyper[1]
    w = w[start:stop]
    for i in range(w.size):
        w[i] = _sgd(w[i], _gradient(total, i), lr, decay)


def _both_kernels(
    formula: Callable[..., Any], arrays: str, update: Callable[..., None], tree: Callable[..., None]
) -> tuple[Kernel, Kernel]:
    """Make the two kernels of an optimizer's formula from their Python functions; the formula gives their names.

    Both kernels update the arrays in place; ``hyper`` holds the formula's scalars in the order in which the formula
    unpacks them. The second kernel first sums rows of gradients and divides the sum, and updates by the result.
    """
    doc = f"Update parameters in place as ``formulas.{formula.__name__}`` says."
    formulas.name_kernel(update, formula.__name__, doc)
    formulas.name_kernel(tree, f"{formula.__name__}_tree", f"{doc[:-1]}, with the sum of rows of gradients.")
    plain = kernel(f"void(T[::1], const T[::1], {arrays}, const T[::1], i8, i8)")(update)
    return plain, _tree_kernel(f"T[::1], {arrays}")(tree)


def _one_state_kernels(formula: Callable[..., Any], scalars_of: Callable[..., Any]) -> tuple[Kernel, Kernel]:
    """Make two kernels that update ``w[start:stop]`` and ``m``: by the gradient ``g``, or by a sum of gradients."""

    def update(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
        scalars = scalars_of(hyper)
        w, g, m = w[start:stop], g[start:stop], m[start:stop]
        for i in range(w.size):
            w[i], m[i] = formula(w[i], g[i], m[i], scalars)

    def tree(total: Any, w: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
        scalars = scalars_of(hyper)
        w, m = w[start:stop], m[start:stop]
        for i in range(w.size):
            w[i], m[i] = formula(w[i], _gradient(total, i), m[i], scalars)

    return _both_kernels(formula, "T[::1]", update, tree)


def _two_state_kernels(formula: Callable[..., Any], scalars_of: Callable[..., Any]) -> tuple[Kernel, Kernel]:
    """Make two kernels that update ``w[start:stop]``, ``m``, ``v``: by the gradient ``g``, or by a sum of gradients."""

    def update(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
        scalars = scalars_of(hyper)
        w, g, m, v = w[start:stop], g[start:stop], m[start:stop], v[start:stop]
        for i in range(w.size):
            w[i], m[i], v[i] = formula(w[i], g[i], m[i], v[i], scalars)

    def tree(total: Any, w: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
        scalars = scalars_of(hyper)
        w, m, v = w[start:stop], m[start:stop], v[start:stop]
        for i in range(w.size):
            w[i], m[i], v[i] = formula(w[i], _gradient(total, i), m[i], v[i], scalars)

    return _both_kernels(formula, "T[::1], T[::1]", update, tree)


momentum, momentum_tree = _one_state_kernels(formulas.momentum, formulas.first_six)
adam, adam_tree = _two_state_kernels(formulas.adam, formulas.first_eight)
adamw, adamw_tree = _two_state_kernels(formulas.adamw, formulas.first_eight)
rmsprop, rmsprop_tree = _one_state_kernels(formulas.rmsprop, formulas.first_five)
lion, lion_tree = _one_state_kernels(formulas.lion, formulas.first_seven)


@_tree_kernel("const T[::1], T[::1], T[::1], T[::1]")
def lamb_direction_tree(
    total: Any, w: Array, u: Array, m: Array, v: Array, hyper: Array, start: int, stop: int
) -> None:
    """Sum rows of gradients and divide the sum as ``tree_sum`` does, then write LAMB's direction to ``u``.

    The bits are the same as with ``tree_sum`` into ``u`` and then :func:`lamb_direction`. ``hyper`` holds the scalars
    of :func:`lamb_direction`. The decorator replaces ``total`` by the arguments ``rows``, ``first``, ``program`` and
    ``divisor``.
    """
    scalars = _first_eight(hyper)
    w, u, m, v = w[start:stop], u[start:stop], m[start:stop], v[start:stop]
    for i in range(w.size):
        u[i], m[i], v[i] = _lamb_direction(w[i], _gradient(total, i), m[i], v[i], scalars)


COMPRESSION_BLOCK = formulas.BLOCK
#: Counters that ``top`` needs: for 11, then 10, then the last 10 bits of a magnitude.
COUNTERS = 2048

_magnitude = formulas.magnitude
_scale_of = formulas.scale_of
_inverse_of = formulas.inverse_of
_code_of = formulas.code_of

_HIGH, _LOW = np.uint32(20), np.uint32(10)
_LOW_BITS = np.uint32(1023)


def _largest(values: Array, residual: Array) -> Any:
    """Add ``values`` to ``residual`` and return the largest magnitude of the sum.

    The magnitude is returned as bits (see :func:`mpizero.kernels.formulas.magnitude`).
    """
    largest = np.uint32(0)
    for i in range(values.size):
        total = values[i] + residual[i]
        residual[i] = total
        largest = max(largest, _magnitude(total))
    return largest


@kernel("void(const f4[::1], f4[::1], f4[::1], i1[::1])")
def int8_encode(values: Array, residual: Array, scales: Array, codes: Array) -> None:
    """Round ``values + residual`` to ``codes``, integers of 8 bits, and write the rounding errors to ``residual``.

    A code is an integer from -127 to 127, and ``code * scale`` is the rounded value. Each block of
    ``COMPRESSION_BLOCK`` consecutive values has one scale. If a block has a value that is infinite or NaN, its scale
    and its errors are NaN. If its values are too small to be scaled in float32, its scale and codes are 0, and
    ``residual`` receives the values themselves.
    """
    for block in range(scales.size):
        first = block * COMPRESSION_BLOCK
        rest = residual[first : first + COMPRESSION_BLOCK]
        scale = _scale_of(_largest(values[first : first + COMPRESSION_BLOCK], rest))
        inverse = _inverse_of(scale)
        scales[block] = scale
        part = codes[first : first + COMPRESSION_BLOCK]
        for i in range(rest.size):
            code = _code_of(rest[i], inverse)
            part[i] = np.int8(code)
            rest[i] = rest[i] - code * scale


@kernel("void(const f4[::1], const i1[::1], f4[::1])")
def int8_decode(scales: Array, codes: Array, out: Array) -> None:
    """Write the values to which :func:`int8_encode` rounded, ``code * scale`` for each code, to ``out``."""
    for block in range(scales.size):
        first = block * COMPRESSION_BLOCK
        scale = scales[block]
        for i in range(first, min(first + COMPRESSION_BLOCK, out.size)):
            out[i] = np.float32(codes[i]) * scale


def _reach(counts: Array, used: int, wanted: int) -> int:
    """Return the largest ``index`` for which the sum of ``counts[index:used]`` is at least ``wanted``."""
    index = used
    while wanted > 0:
        index -= 1
        wanted -= counts[index]
    return index


def _above(counts: Array, used: int, index: int) -> int:
    """Return the sum of ``counts[index + 1 : used]``."""
    total = 0
    for i in range(index + 1, used):
        total += counts[i]
    return total


@kernel("void(const f4[::1], f4[::1], i8[::1], i4[::1], f4[::1])")
def top_encode(values: Array, residual: Array, counts: Array, indices: Array, largest: Array) -> None:
    """Write the ``indices.size`` values of largest magnitude of ``values + residual`` to ``largest``.

    ``indices`` receives their indices, in ascending order. Of values of equal magnitude, those of the smallest indices
    are chosen. ``residual`` receives the values of the sum that are not chosen, and 0 at the chosen indices. ``counts``
    is temporary memory for 2048 integers, which only the CPU kernel uses.
    """
    wanted = indices.size
    if wanted == 0:
        for i in range(values.size):
            residual[i] = values[i] + residual[i]
        return
    counts[:] = 0
    for i in range(values.size):
        total = values[i] + residual[i]
        residual[i] = total
        counts[_magnitude(total) >> _HIGH] += 1
    digit = _reach(counts, COUNTERS, wanted)
    wanted -= _above(counts, COUNTERS, digit)
    prefix = np.uint32(digit)
    counts[:] = 0
    for i in range(residual.size):
        bits = _magnitude(residual[i])
        if bits >> _HIGH == prefix:
            counts[(bits >> _LOW) & _LOW_BITS] += 1
    digit = _reach(counts, COUNTERS // 2, wanted)
    wanted -= _above(counts, COUNTERS // 2, digit)
    prefix = (prefix << _LOW) | np.uint32(digit)
    counts[:] = 0
    for i in range(residual.size):
        bits = _magnitude(residual[i])
        if bits >> _LOW == prefix:
            counts[bits & _LOW_BITS] += 1
    digit = _reach(counts, COUNTERS // 2, wanted)
    wanted -= _above(counts, COUNTERS // 2, digit)
    threshold = (prefix << _LOW) | np.uint32(digit)
    taken = 0
    for i in range(residual.size):
        bits = _magnitude(residual[i])
        if bits >= threshold:
            if bits == threshold:
                if wanted == 0:
                    continue
                wanted -= 1
            indices[taken] = i
            largest[taken] = residual[i]
            residual[i] = 0
            taken += 1


@kernel("void(const i4[::1], const f4[::1], f4[::1])")
def top_decode(indices: Array, largest: Array, out: Array) -> None:
    """Write ``largest[i]`` to ``out[indices[i]]`` for every i, and 0 to all other elements of ``out``."""
    out[:] = 0
    for i in range(indices.size):
        out[indices[i]] = largest[i]
