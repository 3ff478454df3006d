"""Compute on the CPU what layers need: row sums, normalization, activations, copies and conversions, embeddings.

Sums, maxima and dot products of one row of a matrix are computed in an order that is the same on every CPU. LLVM does
not vectorize a sum of floats in the order of the loop, because that would change the order. So :func:`row_sum` and its
neighbours use a fixed order that can be vectorized. A row is cut into blocks of at most ``BLOCK`` elements. A block is
first reduced to h = (its size) / 8 sums: sum j adds elements j, j + h, j + 2 h, ..., j + 7 h. Then these h sums are
added in four lanes of a vector register. At last the sums of the blocks are added in order.

In layer and root-mean-square normalization, rows are samples or positions of sequences. The variance of a row is
computed in two passes, first the mean and then the mean square of the differences from it. So the variance loses no
digits by cancellation.

Activation functions, bias additions and column sums follow. The kernels of the first two write the results of 256
elements to a temporary array and then copy them to the output. So an output may be one of the inputs, and LLVM still
vectorizes the loops, since the arrays in a loop never overlap. The temporary array stays in the first-level cache.

:func:`pack` and the kernels after it copy ranges of arrays, convert to and from 16-bit formats, and scale. Numbers of
16 bits are stored as uint16, because NumPy has no bfloat16. :func:`gather` looks up rows of an embedding table by their
ids, and :func:`scatter_add` computes the gradient of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpizero.kernels import formulas
from mpizero.kernels.formulas import gelu as gelu_value
from mpizero.kernels.formulas import (
    gelu_gradient,
    inside,
    inverse_root,
    layernorm_gradient,
    relu_gradient,
    rmsnorm_gradient,
    scaled,
    silu_gradient,
    standardized,
    tanh_gradient,
    tanh_value,
)
from mpizero.kernels.formulas import relu as relu_value
from mpizero.kernels.formulas import silu as silu_value
from mpizero.kernels.jit import Kernel, fetch_ahead, fetch_below, kernel
from mpizero.types import Array

#: Number of elements of a row that are summed at once.
BLOCK = 2048
FOLD = BLOCK // 4
#: Number of elements of temporary memory that functions with a parameter ``scratch`` need.
SCRATCH = FOLD + BLOCK


def fold_sum(x: Any, fold: Any) -> Any:
    """Return the sum of ``x``, of at most ``BLOCK`` elements; ``fold`` is temporary memory of ``FOLD`` elements."""
    T = x.dtype.type  # noqa: N806
    h = x.size >> 3
    for j in range(h):
        fold[j] = ((x[j] + x[j + h]) + (x[j + 2 * h] + x[j + 3 * h])) + (
            (x[j + 4 * h] + x[j + 5 * h]) + (x[j + 6 * h] + x[j + 7 * h])
        )
    a, b, c, d = T(0), T(0), T(0), T(0)
    q = h >> 2
    for j in range(q):
        a += fold[j]
        b += fold[j + q]
        c += fold[j + 2 * q]
        d += fold[j + 3 * q]
    for j in range(4 * q, h):
        a += fold[j]
    for j in range(8 * h, x.size):
        b += x[j]
    return (a + b) + (c + d)


def larger(a: Any, b: Any) -> Any:
    """Return the larger of two numbers; return ``b`` if one of them is NaN."""
    return a if a > b else b


def row_max(x: Any, fold: Any) -> Any:
    """Return the largest element of a non-empty row ``x``; if the row holds a NaN, any number may be returned.

    ``fold`` is temporary memory of ``FOLD`` elements.
    """
    first = x[0]
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        h = part.size >> 2
        for j in range(h):
            fold[j] = larger(larger(part[j], part[j + h]), larger(part[j + 2 * h], part[j + 3 * h]))
        a, b, c, d = first, first, first, first
        q = h >> 2
        for j in range(q):
            a = larger(fold[j], a)
            b = larger(fold[j + q], b)
            c = larger(fold[j + 2 * q], c)
            d = larger(fold[j + 3 * q], d)
        for j in range(4 * q, h):
            a = larger(fold[j], a)
        for j in range(4 * h, part.size):
            b = larger(part[j], b)
        first = larger(larger(a, b), larger(c, d))
    return first


def row_sum(x: Any, fold: Any) -> Any:
    """Return the sum of a row ``x``; ``fold`` is temporary memory of ``FOLD`` elements."""
    total = x.dtype.type(0)
    for start in range(0, x.size, BLOCK):
        total += fold_sum(x[start : start + BLOCK], fold)
    return total


def row_dot(x: Any, y: Any, scratch: Any) -> Any:
    """Return the dot product of two rows; ``scratch`` is temporary memory of ``SCRATCH`` elements."""
    total = x.dtype.type(0)
    fold, terms = scratch[:FOLD], scratch[FOLD:SCRATCH]
    for start in range(0, x.size, BLOCK):
        a, b = x[start : start + BLOCK], y[start : start + BLOCK]
        for j in range(a.size):
            terms[j] = a[j] * b[j]
        total += fold_sum(terms[: a.size], fold)
    return total


def row_dot3(x: Any, y: Any, z: Any, scratch: Any) -> Any:
    """Return the sum of (x * y) * z over three rows; ``scratch`` is temporary memory of ``SCRATCH`` elements."""
    total = x.dtype.type(0)
    fold, terms = scratch[:FOLD], scratch[FOLD:SCRATCH]
    for start in range(0, x.size, BLOCK):
        a, b, c = x[start : start + BLOCK], y[start : start + BLOCK], z[start : start + BLOCK]
        for j in range(a.size):
            terms[j] = (a[j] * b[j]) * c[j]
        total += fold_sum(terms[: a.size], fold)
    return total


def row_square_sum(x: Any, center: Any, scratch: Any) -> Any:
    """Return the sum of (x - center)**2 over a row; ``scratch`` is temporary memory of ``SCRATCH`` elements."""
    total = x.dtype.type(0)
    fold, terms = scratch[:FOLD], scratch[FOLD:SCRATCH]
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        for j in range(part.size):
            terms[j] = (part[j] - center) * (part[j] - center)
        total += fold_sum(terms[: part.size], fold)
    return total


@kernel(
    "void(const T[:,::1], const T[::1], const T[::1], const T[::1], T[:,::1], T[::1], T[::1], T[::1])",
    scratch=SCRATCH,
    divided=("x", "y", "mean", "rstd"),
)
def layernorm(
    x: Array, gamma: Array, beta: Array, eps1: Array, y: Array, mean: Array, rstd: Array, scratch: Array
) -> None:
    """Normalize every row: ``y = (x - mean) * rstd * gamma + beta`` with ``rstd = 1 / sqrt(variance + eps1[0])``.

    ``mean`` and ``rstd`` receive one number for each row, which :func:`layernorm_backward` needs.
    """
    T = x.dtype.type  # noqa: N806
    rows, features = x.shape
    count = T(features)
    for row in range(rows):
        part, result = x[row], y[row]
        m = row_sum(part, scratch) / count
        r = inverse_root(row_square_sum(part, m, scratch) / count, eps1[0], T)
        mean[row], rstd[row] = m, r
        for j in range(features):
            result[j] = scaled(standardized(part[j], m, r), gamma[j], beta[j])


@kernel(
    "void(const T[:,::1], const T[:,::1], const T[::1], const T[::1], const T[::1], const T[:,::1], "
    "T[:,::1], T[::1], T[::1], T[::1])",
    scratch=SCRATCH,
)
def layernorm_backward(
    dy: Array,
    x: Array,
    gamma: Array,
    mean: Array,
    rstd: Array,
    residual: Array,
    dx: Array,
    dgamma: Array,
    dbeta: Array,
    scratch: Array,
) -> None:
    """Write the gradients of :func:`layernorm` to ``dx``, ``dgamma`` and ``dbeta``, from ``dy``, the gradient of y.

    ``dgamma`` and ``dbeta`` are sums over the rows in ascending order. ``mean`` and ``rstd`` are what :func:`layernorm`
    wrote. ``residual`` is added to ``dx``; it has the shape of ``x``, or no rows if nothing is to be added. ``dx`` must
    not be one of the inputs.
    """
    T = x.dtype.type  # noqa: N806
    rows, features = x.shape
    count = T(features)
    dgamma[:] = T(0)
    dbeta[:] = T(0)
    for row in range(rows):
        above, part, result, m, r = dy[row], x[row], dx[row], mean[row], rstd[row]
        for j in range(features):
            result[j] = standardized(part[j], m, r)
        for j in range(features):
            dgamma[j] += above[j] * result[j]
            dbeta[j] += above[j]
        mean_g = row_dot(above, gamma, scratch) / count
        mean_gs = row_dot3(above, gamma, result, scratch) / count
        for j in range(features):
            result[j] = layernorm_gradient(above[j] * gamma[j], result[j], mean_g, mean_gs, r)
        if residual.shape[0]:
            past = residual[row]
            for j in range(features):
                result[j] += past[j]


@kernel(
    "void(const T[:,::1], const T[::1], const T[::1], T[:,::1], T[::1], T[::1])",
    scratch=SCRATCH,
    divided=("x", "y", "rstd"),
)
def rmsnorm(x: Array, gamma: Array, eps1: Array, y: Array, rstd: Array, scratch: Array) -> None:
    """Scale every row: ``y = x * rstd * gamma`` with ``rstd = 1 / sqrt(mean(x**2) + eps1[0])``.

    Zhang and Sennrich 2019. ``rstd`` receives one number for each row, which the backward pass needs.
    """
    T = x.dtype.type  # noqa: N806
    rows, features = x.shape
    zero = T(0)
    for row in range(rows):
        part, result = x[row], y[row]
        r = inverse_root(row_square_sum(part, zero, scratch) / T(features), eps1[0], T)
        rstd[row] = r
        for j in range(features):
            result[j] = standardized(part[j], zero, r) * gamma[j]


@kernel(
    "void(const T[:,::1], const T[:,::1], const T[::1], const T[::1], T[:,::1], T[::1])",
    scratch=SCRATCH,
    divided=("dy", "x", "rstd", "dx"),
)
def rmsnorm_backward_input(dy: Array, x: Array, gamma: Array, rstd: Array, dx: Array, scratch: Array) -> None:
    """Write the gradient of the input of :func:`rmsnorm` to ``dx``, from ``dy``, the gradient of y.

    ``rstd`` is what :func:`rmsnorm` wrote. ``dx`` must not be one of the inputs.
    """
    T = x.dtype.type  # noqa: N806
    rows, features = x.shape
    zero = T(0)
    for row in range(rows):
        above, part, result, r = dy[row], x[row], dx[row], rstd[row]
        for j in range(features):
            result[j] = standardized(part[j], zero, r)
        mean_gs = row_dot3(above, gamma, result, scratch) / T(features)
        for j in range(features):
            result[j] = rmsnorm_gradient(above[j] * gamma[j], result[j], mean_gs, r)


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], T[::1])")
def rmsnorm_backward_weights(dy: Array, x: Array, rstd: Array, dgamma: Array) -> None:
    """Write the gradient of ``gamma`` of :func:`rmsnorm` to ``dgamma``, from ``dy``, the gradient of y.

    The gradient is a sum over the rows in ascending order. ``rstd`` is what :func:`rmsnorm` wrote.
    """
    T = x.dtype.type  # noqa: N806
    rows, features = x.shape
    zero = T(0)
    dgamma[:] = zero
    pairs = rows // 2
    for k in range(pairs):
        r = 2 * k
        a, b, s, t, u, v = dy[r], dy[r + 1], x[r], x[r + 1], rstd[r], rstd[r + 1]
        for j in range(features):
            dgamma[j] = (dgamma[j] + a[j] * standardized(s[j], zero, u)) + b[j] * standardized(t[j], zero, v)
    for row in range(2 * pairs, rows):
        a, s, u = dy[row], x[row], rstd[row]
        for j in range(features):
            dgamma[j] += a[j] * standardized(s[j], zero, u)


#: Number of elements of a block; of 128 to 1024, 256 was fastest for arrays that are not in a cache.
_BLOCK = 256


def store(source: Any, target: Any) -> None:
    """Copy the first ``target.size`` elements of ``source`` to ``target``."""
    for i in range(target.size):
        target[i] = source[i]


def _value_kernel(name: str, value: Callable[..., Any]) -> Kernel:
    """Make a kernel that writes ``value(x[i], T)`` to ``y[i]`` for every i; ``y`` may be ``x``."""

    def apply(x: Array, y: Array, block: Array) -> None:
        T = x.dtype.type  # noqa: N806
        for first in range(0, x.size, _BLOCK):
            part = x[first : first + _BLOCK]
            fetch_ahead(x, first, first + part.size)
            for i in range(part.size):
                block[i] = value(part[i], T)
            store(block, y[first : first + part.size])

    apply.__qualname__ = name
    return kernel("void(const T[::1], T[::1], T[::1])", scratch=_BLOCK, divided=("x", "y"))(apply)


def _gradient_kernel(name: str, gradient: Callable[..., Any]) -> Kernel:
    """Make a kernel that writes ``gradient(x[i], dy[i], T)`` to ``dx[i]`` for every i.

    ``dx`` may be ``dy`` or ``x``.
    """

    def apply(x: Array, dy: Array, dx: Array, block: Array) -> None:
        T = x.dtype.type  # noqa: N806
        for first in range(0, x.size, _BLOCK):
            part, above = x[first : first + _BLOCK], dy[first : first + _BLOCK]
            fetch_ahead(x, first, first + part.size)
            fetch_ahead(dy, first, first + part.size)
            for i in range(part.size):
                block[i] = gradient(part[i], above[i], T)
            store(block, dx[first : first + part.size])

    apply.__qualname__ = name
    divided = ("x", "dy", "dx")
    return kernel("void(const T[::1], const T[::1], T[::1], T[::1])", scratch=_BLOCK, divided=divided)(apply)


gelu, gelu_backward = _value_kernel("gelu", gelu_value), _gradient_kernel("gelu_backward", gelu_gradient)
silu, silu_backward = _value_kernel("silu", silu_value), _gradient_kernel("silu_backward", silu_gradient)
relu, relu_backward = _value_kernel("relu", relu_value), _gradient_kernel("relu_backward", relu_gradient)
tanh, tanh_backward = _value_kernel("tanh", tanh_value), _gradient_kernel("tanh_backward", tanh_gradient)


@kernel("void(const T[:,::1], const T[::1], T[:,::1], T[:,::1], T[::1])", scratch=_BLOCK, divided=("x", "z", "y"))
def bias_gelu(x: Array, bias: Array, z: Array, y: Array, block: Array) -> None:
    """Add ``bias`` to every row of ``x``; write the sum to ``z``, which may be ``x``, and its GELU to ``y``."""
    T = x.dtype.type  # noqa: N806
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], _BLOCK):
            part, shift = x[row, first : first + _BLOCK], bias[first : first + _BLOCK]
            before, after = z[row, first : first + part.size], y[row, first : first + part.size]
            fetch_below(x, row, first, first + part.size)
            for i in range(part.size):
                block[i] = part[i] + shift[i]
            store(block, before)
            for i in range(part.size):
                after[i] = gelu_value(block[i], T)


@kernel("void(const T[:,::1], const T[::1], T[:,::1], T[::1])", scratch=_BLOCK, divided=("x", "y"))
def add_bias(x: Array, bias: Array, y: Array, block: Array) -> None:
    """Add ``bias`` to every row of ``x`` and write the sum to ``y``, which may be ``x``."""
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], _BLOCK):
            part, shift = x[row, first : first + _BLOCK], bias[first : first + _BLOCK]
            fetch_below(x, row, first, first + part.size)
            for i in range(part.size):
                block[i] = part[i] + shift[i]
            store(block, y[row, first : first + part.size])


@kernel(
    "void(const T[:,::1], const T[::1], const T[:,::1], T[:,::1], T[::1])",
    scratch=_BLOCK,
    divided=("x", "residual", "y"),
)
def add_bias_residual(x: Array, bias: Array, residual: Array, y: Array, block: Array) -> None:
    """Add ``bias`` to every row of ``x + residual``; write the sum to ``y``, which may be ``x`` or ``residual``."""
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], _BLOCK):
            part, shift = x[row, first : first + _BLOCK], bias[first : first + _BLOCK]
            past = residual[row, first : first + _BLOCK]
            fetch_below(x, row, first, first + part.size)
            fetch_below(residual, row, first, first + part.size)
            for i in range(part.size):
                block[i] = (part[i] + shift[i]) + past[i]
            store(block, y[row, first : first + part.size])


@kernel("void(const T[:,::1], T[::1])")
def column_sums(x: Array, out: Array) -> None:
    """Write the sum of each column of ``x`` to ``out``, for example to compute the gradient of a bias.

    Each sum starts from 0 and adds the rows in ascending order.
    """
    T = x.dtype.type  # noqa: N806
    rows, columns = x.shape
    out[:] = T(0)
    quads = rows // 4
    for k in range(quads):
        a, b, c, d = x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]
        for j in range(columns):
            out[j] = (((out[j] + a[j]) + b[j]) + c[j]) + d[j]
    for row in range(4 * quads, rows):
        a = x[row]
        for j in range(columns):
            out[j] += a[j]


@kernel("void(const T[::1], const i8[::1], const i8[::1], T[::1])")
def pack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    """Write the ranges ``source[starts[k] : starts[k] + sizes[k]]`` to ``target``, one after the other."""
    position = 0
    for k in range(starts.size):
        part, region = target[position : position + sizes[k]], source[starts[k] : starts[k] + sizes[k]]
        for i in range(part.size):
            part[i] = region[i]
        position += sizes[k]


@kernel("void(const T[::1], const i8[::1], const i8[::1], T[::1])")
def unpack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    """Write the elements of ``source``, in order, to the ranges ``target[starts[k] : starts[k] + sizes[k]]``.

    This undoes :func:`pack`.
    """
    position = 0
    for k in range(starts.size):
        part, region = source[position : position + sizes[k]], target[starts[k] : starts[k] + sizes[k]]
        for i in range(part.size):
            region[i] = part[i]
        position += sizes[k]


@kernel("void(const T[:,::1], const i8[:,::1], T[::1])")
def split_columns(matrix: Array, ranges: Array, parts: Array) -> None:
    """Copy ranges of columns of ``matrix`` to matrices with fewer columns, stored one after the other in ``parts``.

    Row k of ``ranges`` is (start, size, position, width): ``size`` columns, from column ``start`` on, are copied to a
    matrix of ``width`` columns. The first of these columns begins at ``parts[position]`` with its element in row 0.
    """
    for r in range(matrix.shape[0]):
        for k in range(ranges.shape[0]):
            start, size, position = ranges[k, 0], ranges[k, 1], ranges[k, 2] + r * ranges[k, 3]
            columns, part = matrix[r, start : start + size], parts[position : position + size]
            for i in range(part.size):
                part[i] = columns[i]


@kernel("void(const T[::1], const i8[:,::1], T[:,::1])")
def join_columns(parts: Array, ranges: Array, matrix: Array) -> None:
    """Copy the columns that :func:`split_columns` has written to ``parts`` back to ``matrix``."""
    for r in range(matrix.shape[0]):
        for k in range(ranges.shape[0]):
            start, size, position = ranges[k, 0], ranges[k, 1], ranges[k, 2] + r * ranges[k, 3]
            columns, part = matrix[r, start : start + size], parts[position : position + size]
            for i in range(part.size):
                columns[i] = part[i]


def _conversion_kernel(types: str, convert: Callable[..., Any]) -> Kernel:
    """Make a kernel that writes ``convert(x[i])`` to ``out[i]`` for every i; the kernel has the name of ``convert``."""

    def apply(x: Array, out: Array) -> None:
        for i in range(x.size):
            out[i] = convert(x[i])

    formulas.name_kernel(apply, convert.__name__, f"Write ``formulas.{convert.__name__}`` of each element to ``out``.")
    return kernel(f"void({types})")(apply)


to_bfloat16 = _conversion_kernel("const f4[::1], u2[::1]", formulas.to_bfloat16)
from_bfloat16 = _conversion_kernel("const u2[::1], f4[::1]", formulas.from_bfloat16)
to_float16 = _conversion_kernel("const f4[::1], u2[::1]", formulas.to_float16)
from_float16 = _conversion_kernel("const u2[::1], f4[::1]", formulas.from_float16)


@kernel("void(T[::1], const T[::1])")
def scale(x: Array, factor: Array) -> None:
    """Multiply all elements of ``x`` by ``factor[0]``, in place."""
    by = factor[0]
    for i in range(x.size):
        x[i] = x[i] * by


@kernel("void(const T[:,::1], const i8[::1], T[:,::1])", divided=("out", "ids"))
def gather(table: Array, ids: Array, out: Array) -> None:
    """Copy row ``ids[i]`` of ``table`` to row i of ``out``; fill row i with NaN if the table has no such row."""
    T = table.dtype.type  # noqa: N806
    rows, width = table.shape
    for i in range(ids.size):
        target = out[i]
        if inside(ids[i], rows):
            source = table[ids[i]]
            for j in range(width):
                target[j] = source[j]
        else:
            target[:] = T(np.nan)


@kernel("void(const T[:,::1], const i8[::1], T[:,::1])")
def scatter_add(dy: Array, ids: Array, dtable: Array) -> None:
    """Add row i of ``dy`` to row ``ids[i]`` of ``dtable``, for i = 0, 1, ...; ignore ids without a row."""
    rows, width = dtable.shape
    for i in range(ids.size):
        if inside(ids[i], rows):
            source, target = dy[i], dtable[ids[i]]
            for j in range(width):
                target[j] += source[j]
