"""Compute the loops of Fourier layers on the CPU: truncated transforms of fields, as products of matrices.

The basis of an axis is a matrix of cosines and sines at its positions (:func:`axis_basis`). A transform
applies the bases of three axes one after the other.

- :func:`analyse` sums the products of a field and the basis functions over each spatial tile, and adds the sums of
  tiles by the binary tree.
- :func:`synthesize` adds up basis functions at each position: the adjoint of :func:`analyse`.
- :func:`mode_products` multiplies many pairs of small matrices, one pair for each mode.

All consist of products of matrices, which :class:`mpizero.kernels.matmul_tile.RunsTile` computes without packing them.
An element of a product is one chain of fused multiply-adds in ascending order, so its bits depend neither on the shape
of the field nor on the part of it that is computed, nor on the CPU ([Note: equal bits] in :mod:`.matmul`). On a CPU
without fused multiply-adds NumPy multiplies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpizero.kernels import jit
from mpizero.kernels.convolution import with_margin
from mpizero.kernels.elementary import cos_sin_turn
from mpizero.kernels.jit import apart, kernel
from mpizero.kernels.matmul import fuses
from mpizero.kernels.matmul_tile import HIGH, LOW, RunsTile, fold, tile_columns
from mpizero.types import Array

_high, _low, _one = (RunsTile(rows, along=True) for rows in (HIGH, LOW, 1))
#: Tiles of products with few columns: the columns of one vector register.
_tall, _tall_low, _tall_one = (RunsTile(rows, along=True, across=1) for rows in (2 * HIGH, 2 * LOW, 1))
#: Least number of multiplications of a thread's part.
_WORTH_A_THREAD = 1 << 22
#: The bases of three axes, (functions, positions) each; axes that a field does not have come first, as [[1]].
Bases = tuple[Array, Array, Array]


@functools.lru_cache(maxsize=256)
def turns(period: int) -> tuple[Array, Array]:
    """Return the cosines and the sines of ``2 pi k / period`` for k = 0, 1, ..., ``period - 1``, in float64."""
    cosines, sines = np.empty((2, period))
    _turns(cosines, sines)
    return cosines, sines


@kernel("void(f8[::1], f8[::1])")
def _turns(cosines: Array, sines: Array) -> None:
    for part in range(cosines.size):
        cosines[part], sines[part] = cos_sin_turn(np.float64(part) / np.float64(cosines.size), np.float64)


@functools.lru_cache(maxsize=1024)
def axis_basis(period: int, modes: int, first: int, stop: int, last: bool, dtype: np.dtype[Any]) -> Array:
    """Return cosines and sines of the frequencies 0 to ``modes // 2`` at positions of an axis: (functions, positions).

    The positions are ``first:stop`` of an axis with ``period`` positions. All cosines come before all sines, but with
    ``last`` (for the last axis of space) each cosine is followed by the sine of its frequency. The sine of frequency 0
    is left out.
    """
    cosines, sines = turns(period)
    parts = np.outer(np.arange(modes // 2 + 1), np.arange(first, stop)) % period
    pairs = np.stack([cosines[parts], sines[parts]], axis=int(last)).reshape(2 * len(parts), stop - first)
    functions = np.delete(pairs, 1 if last else modes // 2 + 1, axis=0).astype(dtype)
    functions.setflags(write=False)
    return functions


def field_bases(periods: Sequence[int], modes: Sequence[int], box: Sequence[slice], dtype: np.dtype[Any]) -> Bases:
    """Return the bases (cosines and sines) of the axes of a field, at the positions ``box``.

    ``periods``, ``modes`` and ``box`` have one entry for each axis of space, with the meaning that :func:`axis_basis`
    gives them. Axes that the field does not have get a basis of a single 1.
    """
    rows = enumerate(zip(periods, modes, box, strict=True), start=1)
    found = [axis_basis(n, k, part.start, part.stop, axis == len(modes), dtype) for axis, (n, k, part) in rows]
    one, two, three = [np.ones((1, 1), dtype)] * (3 - len(found)) + found
    return one, two, three


def analyse(x: Array, bases: Bases, boxes: Array) -> Array:
    """Return the sums over space of the products of a field and the basis functions, for each sample and channel.

    Each spatial tile has a sum of its own, over the last axis first, then over the axes before it, each in ascending
    order; the sums of tiles are added by the binary tree.

    Parameters
    ----------
    x : Array
        A field (samples, one to three axes of space, channels).
    bases : tuple of Array
        For each of three axes its basis functions at the positions of ``x``.
    boxes : Array
        Ranges of positions [start, stop) of each spatial tile on three axes: (tiles, 3, 2) integers, for 1, 2, 4, ...
        tiles.

    Returns
    -------
    Array
        (samples, functions of axis 1, of axis 2, of axis 3, channels).
    """
    counts, three = [len(basis) for basis in bases], x.ndim == 5
    x = x.reshape(len(x), *(1,) * (5 - x.ndim), *x.shape[1:])
    out = np.zeros((len(x), *counts, x.shape[-1]), x.dtype)
    if x.size and not fuses():
        fold(np.add, [_transformed(*_of_tile(x, bases, box)) for box in boxes.tolist()], out)
    elif x.size:
        deep, high, _ = (boxes[..., 1] - boxes[..., 0]).max(axis=0).tolist()
        wide, row, dtype = tile_columns(x.itemsize), counts[2] * x.shape[-1], x.dtype
        rows, planes = deep * high * row + wide, deep * counts[1] * row + wide
        depth, flat, start = len(boxes).bit_length() + 1, with_margin(x), np.zeros(wide, x.dtype)
        given = [np.ascontiguousarray(basis, dtype).reshape(-1) for basis in bases]

        def task(part: slice) -> None:
            shape, stack = np.array([*flat[part].shape, *counts, three], np.int64), np.empty(depth * out[0].size, dtype)
            memory = np.zeros(rows + planes, dtype)
            _analyse(flat[part].reshape(-1), *given, shape, boxes, start, _NONE, memory, rows, stack,
                     out[part].reshape(-1))  # fmt: skip

        _in_parts(task, len(x), x.size * counts[2])
    return out


@kernel(
    "void(const T[::1], const T[::1], const T[::1], const T[::1], const i8[::1], const i8[:,:,::1], const T[::1],"
    "const i8[::1], T[::1], i8, T[::1], T[::1])"
)
def _analyse(
    x: Array, first: Array, second: Array, third: Array, shape: Array, boxes: Array, start: Array, none: Array,
    memory: Array, after: int, stack: Array, out: Array,
) -> None:  # fmt: skip
    """Compute the sums of :func:`analyse`; ``memory`` and ``stack`` are temporary memory.

    ``memory`` gets the sums over the last axis, and from index ``after`` on those over the last two axes. ``shape``
    holds the shape of ``x``, how many basis functions each axis has, and whether the field has three axes.
    """
    n1, n2, n3, channels, f1, f2, f3 = shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7]
    row = f3 * channels
    plane, size = f2 * row, f1 * f2 * row
    for s in range(shape[0]):
        top = 0
        for box in range(boxes.shape[0]):
            a, b, c = boxes[box, 0, 0], boxes[box, 1, 0], boxes[box, 2, 0]
            depth, height, width = boxes[box, 0, 1] - a, boxes[box, 1, 1] - b, boxes[box, 2, 1] - c
            for i in range(depth):
                for j in range(height):
                    at = (((s * n1 + a + i) * n2 + b + j) * n3 + c) * channels
                    products(third, c, n3, f3, width, x, at, channels, channels, start, 0, 0, memory,
                             (i * height + j) * row, channels, none)  # fmt: skip
                if shape[8]:
                    products(second, b, n2, f2, height, memory, i * height * row, row, row, start, 0, 0, memory,
                             after + i * plane, row, none)  # fmt: skip
                else:
                    products(second, b, n2, f2, height, memory, 0, row, row, start, 0, 0, stack, top * size, row,
                             none)  # fmt: skip
            if shape[8]:
                products(first, a, n1, f1, depth, memory, after, plane, plane, start, 0, 0, stack, top * size, plane,
                         none)  # fmt: skip
            added = box + 1
            while added % 2 == 0:
                top, added = top - 1, added // 2
                left, right = stack[top * size : (top + 1) * size], stack[(top + 1) * size : (top + 2) * size]
                for element in range(size):
                    left[element] += right[element]
            top += 1
        for element in range(size):
            out[s * size + element] = stack[element]


def synthesize(sums: Array, bases: Bases, start: Array | None = None) -> Array:
    """Return at each position the sum of the basis functions times ``sums``: a field (samples, n1, n2, n3, channels).

    Parameters
    ----------
    sums : Array
        (samples, functions of axis 1, of axis 2, of axis 3, channels).
    bases : tuple of Array
        For each axis the basis functions at the positions of the result.
    start : Array or None
        A field with whose elements the sums begin; None stands for zeros.
    """
    counts, lengths, channels, dtype = sums.shape[1:4], [len(basis.T) for basis in bases], sums.shape[-1], sums.dtype
    out = np.empty((len(sums), *lengths, channels), dtype)
    if not out.size:
        return out
    given = [np.ascontiguousarray(basis.T, dtype) for basis in bases]
    if not fuses():
        out[...] = _transformed(sums, given) + (0 if start is None else start)
        return out
    wide, row = tile_columns(sums.itemsize), counts[2] * channels
    first, second = counts[1] * row + wide, lengths[1] * row + wide
    flat, begin = with_margin(sums), np.zeros((len(sums), wide), dtype) if start is None else with_margin(start)

    def task(part: slice) -> None:
        shape = np.array([*flat[part].shape, *lengths, start is not None], np.int64)
        operands = flat[part].reshape(-1), *(one.reshape(-1) for one in given), shape, begin[part].reshape(-1)
        _synthesize(*operands, np.zeros(wide, dtype), _NONE, np.zeros(first + second, dtype), first,
                    out[part].reshape(-1))  # fmt: skip

    _in_parts(task, len(sums), out.size * counts[2])
    return out


@kernel(
    "void(const T[::1], const T[::1], const T[::1], const T[::1], const i8[::1], const T[::1], const T[::1],"
    "const i8[::1], T[::1], i8, T[::1])"
)
def _synthesize(
    sums: Array, first: Array, second: Array, third: Array, shape: Array, start: Array, zeros: Array, none: Array,
    memory: Array, after: int, out: Array,
) -> None:  # fmt: skip
    """Compute the field of :func:`synthesize`, one position of the first axis after the other.

    ``memory`` gets the sums over the functions of the first axis, and from index ``after`` on those over two axes.
    """
    f1, f2, f3, channels, n1, n2, n3 = shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7]
    row, line, begins = f3 * channels, n3 * channels, shape[8]
    plane = f2 * row
    for s in range(shape[0]):
        for i in range(n1):
            products(first, i * f1, f1, 1, f1, sums, s * f1 * plane, plane, plane, zeros, 0, 0, memory, 0, plane,
                     none)  # fmt: skip
            products(second, 0, f2, n2, f2, memory, 0, row, row, zeros, 0, 0, memory, after, row, none)
            for j in range(n2):
                at = ((s * n1 + i) * n2 + j) * line
                products(third, 0, f3, n3, f3, memory, after + j * row, channels, channels, start, at * begins,
                         channels * begins, out, at, channels, none)  # fmt: skip


def mode_products(a: Array, b: Array) -> Array:
    """Return ``a[i] @ b[i]`` for all i, of arrays (matrices, rows, terms) and (matrices, terms, columns)."""
    out = np.zeros((len(a), a.shape[1], b.shape[2]), a.dtype)
    if out.size and not fuses():
        np.matmul(a, b, out=out)
    elif out.size and a.shape[2]:
        start, left, right = np.zeros(tile_columns(a.itemsize), a.dtype), np.ascontiguousarray(a), with_margin(b)

        def task(part: slice) -> None:
            operands, shape = (one[part].reshape(-1) for one in (left, right, out)), (*left[part].shape, b.shape[2])
            _mode_products(*operands, np.array(shape, np.int64), start, _NONE)

        _in_parts(task, len(a), out.size * a.shape[2])
    return out


@kernel("void(const T[::1], const T[::1], T[::1], const i8[::1], const T[::1], const i8[::1])")
def _mode_products(a: Array, b: Array, out: Array, shape: Array, start: Array, none: Array) -> None:
    rows, terms, columns = shape[1], shape[2], shape[3]
    for i in range(shape[0]):
        products(a, i * rows * terms, terms, rows, terms, b, i * terms * columns, columns, columns, start, 0, 0, out,
                 i * rows * columns, columns, none)  # fmt: skip


@apart
def products(
    a: Any, a_at: Any, a_step: Any, rows: Any, terms: Any, b: Any, b_at: Any, b_step: Any, columns: Any, start: Any,
    s_at: Any, s_step: Any, out: Any, out_at: Any, out_step: Any, none: Any,
) -> None:  # fmt: skip
    """Write the product of the matrices ``a`` and ``b`` to ``out``.

    A matrix begins at index ``*_at`` of its array; its rows are ``*_step`` elements apart. The sum of an element of the
    product begins with the element of the matrix ``start`` at the same place; or, if ``s_step`` is 0, the sums of every
    tile begin with the same row of elements, from ``s_at`` on. ``none`` is the array [0]: :class:`.RunsTile` can read
    operands in several runs, each at a distance from the index ``*_at``; here each operand is one run, at the distance
    0. A tile (the rows and columns that one call of it computes) may overlap the one before; then some rows are
    computed twice, with the same bits.
    """
    wide, left = tile_columns(out.itemsize), 0
    while left < columns:
        width = min(wide, columns - left)
        narrow = width <= wide // 2
        high, low = (2 * HIGH, 2 * LOW) if narrow else (HIGH, LOW)
        row, right, begin = 0, b_at + left, s_at + (left if s_step > 0 else 0)
        while row < rows:
            rest = rows - row
            if rest >= high or (rows >= high and rest > low):
                row = min(row, rows - high)
                source, first, target = a_at + row * a_step, begin + row * s_step, out_at + left + row * out_step
                if narrow:
                    _tall(a, source, b, right, none, 0, none, 0, 1, terms, a_step, b_step, start, first, s_step, out,
                          target, out_step, width)  # fmt: skip
                else:
                    _high(a, source, b, right, none, 0, none, 0, 1, terms, a_step, b_step, start, first, s_step, out,
                          target, out_step, width)  # fmt: skip
                row += high
            elif rows >= low:
                row = min(row, rows - low)
                source, first, target = a_at + row * a_step, begin + row * s_step, out_at + left + row * out_step
                if narrow:
                    _tall_low(a, source, b, right, none, 0, none, 0, 1, terms, a_step, b_step, start, first, s_step,
                              out, target, out_step, width)  # fmt: skip
                else:
                    _low(a, source, b, right, none, 0, none, 0, 1, terms, a_step, b_step, start, first, s_step, out,
                         target, out_step, width)  # fmt: skip
                row += low
            else:
                source, first, target = a_at + row * a_step, begin + row * s_step, out_at + left + row * out_step
                if narrow:
                    _tall_one(a, source, b, right, none, 0, none, 0, 1, terms, a_step, b_step, start, first, s_step,
                              out, target, out_step, width)  # fmt: skip
                else:
                    _one(a, source, b, right, none, 0, none, 0, 1, terms, a_step, b_step, start, first, s_step, out,
                         target, out_step, width)  # fmt: skip
                row += 1
        left += width


#: Distances of the runs of an operand that is a single run, see :class:`.RunsTile`.
_NONE = np.zeros(1, np.int64)


def _in_parts(task: Callable[[slice], None], length: int, work: int) -> None:
    """Call ``task`` with slices that divide ``length`` samples or modes, in threads if there are many multiplications.

    ``work`` is the number of multiplications.
    """
    parts = min(length, jit.threads_for(work, _WORTH_A_THREAD))
    jit.run_tasks([functools.partial(task, part) for part in jit.parts_of(length, parts)], parts)


def _of_tile(x: Array, bases: Bases, box: list[list[int]]) -> tuple[Array, list[Array]]:
    """Return a spatial tile of a field, and the bases (cosines and sines of each axis) at the tile's positions."""
    places = [slice(*pair) for pair in box]
    return x[(slice(None), *places)], [basis[:, place] for basis, place in zip(bases, places, strict=True)]


def _transformed(x: Array, bases: Any) -> Array:
    """Return the product of a field with the bases (cosines and sines) of its axes, the last axis first, by NumPy."""
    for axis in (3, 2, 1):
        x = np.moveaxis(np.tensordot(bases[axis - 1], x, (1, axis)), 0, axis)
    return x
