"""Update parameters in place by an optimizer's formula, sum gradients in the same pass, compress messages: GPU.

The arguments, and the programs that :func:`tree_sum` and the kernels whose names end in ``_tree`` execute, are those of
``kernels/cpu/update.py``, and the results have the same bits. Every thread executes the program on one column at a
time.

Messages are compressed with error feedback: the compression error of a message is kept and added to the next message.
One thread works on a block of ``COMPRESSION_BLOCK`` consecutive values (``int8``), or on a tile of ``TILE`` (``top``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpizero.kernels import formulas
from mpizero.kernels.cuda.launch import CudaKernel, cuda, kernel
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
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        w[i] = _sgd(w[i], g[i], lr, decay)


@kernel("void(const T[::1], T[::1], T[::1], T[::1], const T[::1], i8, i8)")
def lamb_direction(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
    """Overwrite the gradient ``g[start:stop]`` with LAMB's direction: Adam's direction plus ``decay * w``.

    The arguments are those of :func:`mpizero.kernels.cpu.update.lamb_direction`.
    """
    scalars = _first_eight(hyper)
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        g[i], m[i], v[i] = _lamb_direction(w[i], g[i], m[i], v[i], scalars)


@kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
def lamb_apply(w: Array, u: Array, hyper: Array, start: int, stop: int) -> None:
    """Subtract ``hyper[0] * u`` from ``w`` for the elements ``start`` to ``stop - 1``."""
    rate = hyper[0]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        w[i] = _lamb_apply(w[i], u[i], rate)


@kernel("void(const T[::1], T[::1], const T[::1], i8, i8)")
def ema(w: Array, average: Array, rate1: Array, start: int, stop: int) -> None:
    """Add ``rate1[0] * (w - average)`` to ``average``, for the elements ``start`` to ``stop - 1``."""
    rate = rate1[0]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        average[i] = _ema(average[i], w[i], rate)


@kernel("void(T[::1], const T[::1], const T[::1], i8, i8)")
def add_scaled(y: Array, x: Array, factor1: Array, start: int, stop: int) -> None:
    """Add ``factor1[0] * x`` to ``y``, for the elements ``start`` to ``stop - 1``."""
    factor = factor1[0]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        y[i] = _add_scaled(y[i], x[i], factor)


DEPTH = 16
ROUND = -(2**31)

_round_bfloat16 = formulas.round_bfloat16


@kernel("void(f4[::1])")
def round_bfloat16(x: Array) -> None:
    """Round all elements of ``x`` to bfloat16, in place."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] = _round_bfloat16(x[i])


def _element(rows_a: Array, a: int, rows_b: Array, b: int, row: int) -> Any:
    if row < rows_a.shape[0]:
        return rows_a[row, a]
    return rows_b[row - rows_a.shape[0], b]


def _fold(rows_a: Array, a: int, rows_b: Array, b: int, program: Array, stack: Array) -> Any:
    """Add rows by a program, in column a of ``rows_a`` and column b of ``rows_b``; return the sum.

    A program says which rows to add in which order, see the docstring of ``kernels/cpu/update.py``. The rows of
    ``rows_b`` are numbered after those of ``rows_a``.
    """
    top = -1
    for step in range(program.size):
        code = program[step]
        if code >= 0:
            top += 1
            stack[top] = _element(rows_a, a, rows_b, b, code)
        elif code == -1:
            top -= 1
            stack[top] += stack[top + 1]
        elif code == ROUND:
            stack[top] = _round_bfloat16(stack[top])
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
    """Sum rows in the order of ``program``, and write the sum, divided by ``divisor[0]``, to ``out[start:stop]``.

    A program says which rows to add in which order. The arguments are those of
    :func:`mpizero.kernels.cpu.update.tree_sum`.
    """
    stack = cuda.local.array(DEPTH, out.dtype)
    by = divisor[0]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        out[i] = _fold(rows_a, first_a + i, rows_b, first_b + i, program, stack) / by


@kernel("void(const T[:,::1], i8, const i4[::1], const T[::1], T[::1], const T[::1], i8, i8)")
def sgd_tree(
    rows: Array, first: int, program: Array, divisor: Array, w: Array, hyper: Array, start: int, stop: int
) -> None:
    """Sum rows of gradients, divide the sum, and then update ``w[start:stop]`` as ``sgd`` does."""
    stack = cuda.local.array(DEPTH, w.dtype)
    by = divisor[0]
    lr, decay = hyper[0], hyper[1]
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        g = _fold(rows, first + i, rows, first + i, program, stack) / by
        w[i] = _sgd(w[i], g, lr, decay)


def _both_kernels(
    formula: Callable[..., Any], arrays: str, update: Callable[..., None], tree: Callable[..., None]
) -> tuple[CudaKernel, CudaKernel]:
    """Make the two kernels of an optimizer's formula from their Python functions; the formula gives their names.

    Both kernels update the arrays in place; ``hyper`` holds the formula's scalars in the order in which the formula
    unpacks them. The second kernel first sums rows of gradients and divides the sum, and updates by the result.
    """
    doc = f"Update parameters in place as ``formulas.{formula.__name__}`` says."
    formulas.name_kernel(update, formula.__name__, doc)
    formulas.name_kernel(tree, f"{formula.__name__}_tree", f"{doc[:-1]}, with the sum of rows of gradients.")
    rest = f"{arrays}, const T[::1], i8, i8"
    plain = kernel(f"void(T[::1], const T[::1], {rest})")(update)
    return plain, kernel(f"void(const T[:,::1], i8, const i4[::1], const T[::1], T[::1], {rest})")(tree)


def _one_state_kernels(formula: Callable[..., Any], scalars_of: Callable[..., Any]) -> tuple[CudaKernel, CudaKernel]:
    """Make two kernels that update ``w[start:stop]`` and ``m``: by the gradient ``g``, or by a sum of gradients."""

    def update(w: Array, g: Array, m: Array, hyper: Array, start: int, stop: int) -> None:
        scalars = scalars_of(hyper)
        for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
            w[i], m[i] = formula(w[i], g[i], m[i], scalars)

    def tree(
        rows: Array, first: int, program: Array, divisor: Array, w: Array, m: Array, hyper: Array, start: int, stop: int
    ) -> None:
        stack = cuda.local.array(DEPTH, w.dtype)
        by = divisor[0]
        scalars = scalars_of(hyper)
        for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
            g = _fold(rows, first + i, rows, first + i, program, stack) / by
            w[i], m[i] = formula(w[i], g, m[i], scalars)

    return _both_kernels(formula, "T[::1]", update, tree)


def _two_state_kernels(formula: Callable[..., Any], scalars_of: Callable[..., Any]) -> tuple[CudaKernel, CudaKernel]:
    """Make two kernels that update ``w[start:stop]``, ``m``, ``v``: by the gradient ``g``, or by a sum of gradients."""

    def update(w: Array, g: Array, m: Array, v: Array, hyper: Array, start: int, stop: int) -> None:
        scalars = scalars_of(hyper)
        for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
            w[i], m[i], v[i] = formula(w[i], g[i], m[i], v[i], scalars)

    def tree(
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
        stack = cuda.local.array(DEPTH, w.dtype)
        by = divisor[0]
        scalars = scalars_of(hyper)
        for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
            g = _fold(rows, first + i, rows, first + i, program, stack) / by
            w[i], m[i], v[i] = formula(w[i], g, m[i], v[i], scalars)

    return _both_kernels(formula, "T[::1], T[::1]", update, tree)


momentum, momentum_tree = _one_state_kernels(formulas.momentum, formulas.first_six)
adam, adam_tree = _two_state_kernels(formulas.adam, formulas.first_eight)
adamw, adamw_tree = _two_state_kernels(formulas.adamw, formulas.first_eight)
rmsprop, rmsprop_tree = _one_state_kernels(formulas.rmsprop, formulas.first_five)
lion, lion_tree = _one_state_kernels(formulas.lion, formulas.first_seven)


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
    """Sum rows of gradients and divide the sum as ``tree_sum`` does, then write LAMB's direction to ``u``.

    The bits are the same as with ``tree_sum`` into ``u`` and then :func:`lamb_direction`. ``hyper`` holds the scalars
    of :func:`lamb_direction`.
    """
    stack = cuda.local.array(DEPTH, w.dtype)
    by = divisor[0]
    scalars = _first_eight(hyper)
    for i in range(start + cuda.grid(1), stop, cuda.gridsize(1)):
        g = _fold(rows, first + i, rows, first + i, program, stack) / by
        u[i], m[i], v[i] = _lamb_direction(w[i], g, m[i], v[i], scalars)


COMPRESSION_BLOCK = formulas.BLOCK
#: Neighbours whose largest values one thread collects, so that indices ascend.
TILE = 256

_magnitude = formulas.magnitude
_scale_of = formulas.scale_of
_inverse_of = formulas.inverse_of
_code_of = formulas.code_of


@kernel("void(const f4[::1], f4[::1], f4[::1], i1[::1])")
def int8_encode(values: Array, residual: Array, scales: Array, codes: Array) -> None:
    """Round ``values + residual`` to ``codes``, integers of 8 bits, and write the rounding errors to ``residual``.

    The arguments are those of :func:`mpizero.kernels.cpu.update.int8_encode`.
    """
    for block in range(cuda.grid(1), scales.size, cuda.gridsize(1)):
        first, last = block * COMPRESSION_BLOCK, min((block + 1) * COMPRESSION_BLOCK, values.size)
        largest = np.uint32(0)
        for i in range(first, last):
            residual[i] = values[i] + residual[i]
            largest = max(largest, _magnitude(residual[i]))
        scale = _scale_of(largest)
        inverse = _inverse_of(scale)
        scales[block] = scale
        for i in range(first, last):
            code = _code_of(residual[i], inverse)
            codes[i] = np.int8(code)
            residual[i] = residual[i] - code * scale


@kernel("void(const f4[::1], const i1[::1], f4[::1])")
def int8_decode(scales: Array, codes: Array, out: Array) -> None:
    """Write the values to which :func:`int8_encode` rounded, ``code * scale`` for each code, to ``out``."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = np.float32(codes[i]) * scales[i // COMPRESSION_BLOCK]


@kernel("void(const f4[::1], f4[::1])")
def _add(values: Array, residual: Array) -> None:
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        residual[i] = values[i] + residual[i]


@kernel("void(const f4[::1], u4, u4, u4, u4, i8[::1])")
def _count(values: Array, prefix: int, above: int, shift: int, mask: int, counts: Array) -> None:
    """Count the magnitudes of ``values`` by some of their bits: add 1 to ``counts[(bits >> shift) & mask]`` for each.

    Only magnitudes with ``bits >> above == prefix`` are counted; with ``above`` = 32, all magnitudes are.
    """
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        bits = _magnitude(values[i])
        if above == 32 or bits >> np.uint32(above) == np.uint32(prefix):
            cuda.atomic.add(counts, int((bits >> np.uint32(shift)) & np.uint32(mask)), 1)


@kernel("void(const f4[::1], u4, i8[::1], i8[::1])")
def _count_tiles(values: Array, threshold: int, more: Array, equal: Array) -> None:
    """Count, for each tile of ``TILE`` values, the magnitudes above ``threshold`` and those equal to it.

    The counts are written to ``more`` and ``equal``. ``threshold`` is the bits of a magnitude.
    """
    for tile in range(cuda.grid(1), more.size, cuda.gridsize(1)):
        more[tile], equal[tile] = 0, 0
        for i in range(tile * TILE, min((tile + 1) * TILE, values.size)):
            bits = _magnitude(values[i])
            more[tile] += bits > np.uint32(threshold)
            equal[tile] += bits == np.uint32(threshold)


@kernel("void(f4[::1], u4, const i8[::1], const i8[::1], i4[::1], f4[::1])")
def _collect(residual: Array, threshold: int, starts: Array, allowed: Array, indices: Array, largest: Array) -> None:
    """Move the values of largest magnitude from ``residual`` to ``largest``, and their indices to ``indices``.

    The values in tile t (``TILE`` consecutive values) with a magnitude above ``threshold``, and the first
    ``allowed[t]`` with a magnitude equal to ``threshold``, are moved to the elements of the outputs from index
    ``starts[t]`` on. Moved values become 0 in ``residual``. ``threshold`` is the bits of a magnitude.
    """
    for tile in range(cuda.grid(1), starts.size, cuda.gridsize(1)):
        position, left = starts[tile], allowed[tile]
        for i in range(tile * TILE, min((tile + 1) * TILE, residual.size)):
            bits = _magnitude(residual[i])
            equal = bits == np.uint32(threshold)
            if bits > np.uint32(threshold) or (equal and left > 0):
                left -= equal
                indices[position] = i
                largest[position] = residual[i]
                residual[i] = 0
                position += 1


def top_encode(values: Array, residual: Array, counts: Array, indices: Array, largest: Array) -> None:
    """Write the ``indices.size`` values of largest magnitude of ``values + residual`` to ``largest``.

    The arguments are those of :func:`mpizero.kernels.cpu.update.top_encode`.
    """
    _add(values, residual)
    if not indices.size:
        return
    threshold, equal_wanted = _threshold(residual, int(indices.size))
    tiles = -(-int(residual.size) // TILE)
    more, equal = np.zeros((2, tiles), np.int64)
    _count_tiles(residual, threshold, more, equal)
    before = np.cumsum(equal) - equal
    allowed = np.clip(equal_wanted - before, 0, equal)
    taken = more + allowed
    _collect(residual, threshold, np.cumsum(taken) - taken, allowed, indices, largest)


def _threshold(values: Array, wanted: int) -> tuple[int, int]:
    """Return the smallest of the ``wanted`` largest magnitudes, and how many of these are equal to it.

    The magnitude is returned as bits (see :func:`mpizero.kernels.formulas.magnitude`).
    """
    prefix, above = 0, 32
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        counts: Any = np.zeros(1 << width, np.int64)
        _count(values, prefix, above, shift, (1 << width) - 1, counts)
        from_top = np.cumsum(counts[::-1])
        digit = counts.size - 1 - int(np.searchsorted(from_top, wanted))
        wanted -= int(counts[digit + 1 :].sum())
        prefix, above = (prefix << width) | digit, shift
    return prefix, wanted


@kernel("void(const i4[::1], const f4[::1], f4[::1])")
def _scatter(indices: Array, largest: Array, out: Array) -> None:
    for i in range(cuda.grid(1), indices.size, cuda.gridsize(1)):
        out[indices[i]] = largest[i]


@kernel("void(f4[::1])")
def _clear(out: Array) -> None:
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = 0


def top_decode(indices: Array, largest: Array, out: Array) -> None:
    """Write ``largest[i]`` to ``out[indices[i]]`` for every i, and 0 to all other elements of ``out``."""
    _clear(out)
    if indices.size:
        _scatter(indices, largest, out)
