"""Compute on the GPU what layers need: sums over threads, normalization, activations, copies, conversions, embeddings.

:func:`block_sum` and :func:`block_max` compute the sum or maximum of one value per thread over a block of threads, in
an order fixed by the block's size. All threads of the block must call these functions, each with its own value, and all
get the same result. To reduce a row of a matrix, each thread first reduces some of the row's elements.

In layer and root-mean-square normalization, rows are samples or positions of sequences. One block of threads computes
the output, or the gradient of the input, of one row; one thread computes the gradients of gamma and beta of one column.
Activation functions and bias additions have one thread per element, column sums one per column.

:func:`pack` and the kernels after it copy ranges of arrays, convert to and from 16-bit formats, and scale. Numbers of
16 bits are stored as uint16, because NumPy has no bfloat16. :func:`gather` looks up rows of an embedding table by their
ids, and :func:`scatter_add` computes the gradient of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpizero.kernels import formulas
from mpizero.kernels.cuda.launch import CudaKernel, cuda, kernel
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
from mpizero.types import Array

#: Threads of a block at most (compute capability 3 and newer).
MOST_THREADS = 1024


def larger(a: Any, b: Any) -> Any:
    """Return the larger of two numbers; return ``b`` if one of them is NaN."""
    return a if a > b else b


def _plus(a: Any, b: Any) -> Any:
    return a + b


def _block_fold(joined: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that combines ``value`` of all threads of a block, pairwise by ``joined``, for all threads.

    All threads of the block must call the function. ``shared`` is shared memory of ``MOST_THREADS`` elements.
    """

    def fold(value: Any, shared: Any) -> Any:
        thread = cuda.threadIdx.x
        shared[thread] = value
        cuda.syncthreads()
        count = cuda.blockDim.x
        while count > 1:
            half = (count + 1) // 2
            if thread < count - half:
                shared[thread] = joined(shared[thread], shared[thread + half])
            cuda.syncthreads()
            count = half
        total = shared[0]
        cuda.syncthreads()
        return total

    return fold


block_sum, block_max = _block_fold(_plus), _block_fold(larger)


@kernel("void(const T[:,::1], const T[::1], const T[::1], const T[::1], T[:,::1], T[::1], T[::1])")
def layernorm(x: Array, gamma: Array, beta: Array, eps1: Array, y: Array, mean: Array, rstd: Array) -> None:
    """Normalize every row: ``y = (x - mean) * rstd * gamma + beta`` with ``rstd = 1 / sqrt(variance + eps1[0])``.

    ``mean`` and ``rstd`` receive one number for each row, which :func:`layernorm_backward` needs.
    """
    T = x.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, x.dtype)
    rows, features = x.shape
    first, step = cuda.threadIdx.x, cuda.blockDim.x
    for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        total = T(0)
        for j in range(first, features, step):
            total += x[row, j]
        m = block_sum(total, shared) / T(features)
        total = T(0)
        for j in range(first, features, step):
            total += (x[row, j] - m) * (x[row, j] - m)
        r = inverse_root(block_sum(total, shared) / T(features), eps1[0], T)
        if first == 0:
            mean[row] = m
            rstd[row] = r
        for j in range(first, features, step):
            y[row, j] = scaled(standardized(x[row, j], m, r), gamma[j], beta[j])


def layernorm_backward(
    dy: Array, x: Array, gamma: Array, mean: Array, rstd: Array, residual: Array, dx: Array, dgamma: Array, dbeta: Array
) -> None:
    """Write the gradients of :func:`layernorm` to ``dx``, ``dgamma`` and ``dbeta``, from ``dy``, the gradient of y.

    The arguments are those of :func:`mpizero.kernels.cpu.layers.layernorm_backward`.
    """
    _layernorm_backward_input(dy, x, gamma, mean, rstd, residual, dx)
    _layernorm_backward_weights(dy, x, mean, rstd, dgamma, dbeta)


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], const T[::1], const T[::1], const T[:,::1], T[:,::1])")
def _layernorm_backward_input(
    dy: Array, x: Array, gamma: Array, mean: Array, rstd: Array, residual: Array, dx: Array
) -> None:
    T = x.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, x.dtype)
    rows, features = x.shape
    first, step = cuda.threadIdx.x, cuda.blockDim.x
    for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        m, r = mean[row], rstd[row]
        total, weighted = T(0), T(0)
        for j in range(first, features, step):
            g = dy[row, j] * gamma[j]
            total += g
            weighted += g * standardized(x[row, j], m, r)
        mean_g = block_sum(total, shared) / T(features)
        mean_gs = block_sum(weighted, shared) / T(features)
        for j in range(first, features, step):
            g = dy[row, j] * gamma[j]
            gradient = layernorm_gradient(g, standardized(x[row, j], m, r), mean_g, mean_gs, r)
            dx[row, j] = gradient + residual[row, j] if residual.shape[0] else gradient


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], const T[::1], T[::1], T[::1])")
def _layernorm_backward_weights(dy: Array, x: Array, mean: Array, rstd: Array, dgamma: Array, dbeta: Array) -> None:
    T = x.dtype.type  # noqa: N806
    rows, features = x.shape
    for j in range(cuda.grid(1), features, cuda.gridsize(1)):
        total, shift = T(0), T(0)
        for row in range(rows):
            total += dy[row, j] * standardized(x[row, j], mean[row], rstd[row])
            shift += dy[row, j]
        dgamma[j] = total
        dbeta[j] = shift


@kernel("void(const T[:,::1], const T[::1], const T[::1], T[:,::1], T[::1])")
def rmsnorm(x: Array, gamma: Array, eps1: Array, y: Array, rstd: Array) -> None:
    """Scale every row: ``y = x * rstd * gamma`` with ``rstd = 1 / sqrt(mean(x**2) + eps1[0])``.

    Zhang and Sennrich 2019. ``rstd`` receives one number for each row, which the backward pass needs.
    """
    T = x.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, x.dtype)
    rows, features = x.shape
    first, step = cuda.threadIdx.x, cuda.blockDim.x
    for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        total = T(0)
        for j in range(first, features, step):
            total += x[row, j] * x[row, j]
        r = inverse_root(block_sum(total, shared) / T(features), eps1[0], T)
        if first == 0:
            rstd[row] = r
        for j in range(first, features, step):
            y[row, j] = standardized(x[row, j], T(0), r) * gamma[j]


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], const T[::1], T[:,::1])")
def rmsnorm_backward_input(dy: Array, x: Array, gamma: Array, rstd: Array, dx: Array) -> None:
    """Write the gradient of the input of :func:`rmsnorm` to ``dx``, from ``dy``, the gradient of y.

    ``rstd`` is what :func:`rmsnorm` wrote. ``dx`` must not be one of the inputs.
    """
    T = x.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, x.dtype)
    rows, features = x.shape
    first, step = cuda.threadIdx.x, cuda.blockDim.x
    for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        r, weighted = rstd[row], T(0)
        for j in range(first, features, step):
            weighted += (dy[row, j] * gamma[j]) * standardized(x[row, j], T(0), r)
        mean_gs = block_sum(weighted, shared) / T(features)
        for j in range(first, features, step):
            g = dy[row, j] * gamma[j]
            dx[row, j] = rmsnorm_gradient(g, standardized(x[row, j], T(0), r), mean_gs, r)


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], T[::1])")
def rmsnorm_backward_weights(dy: Array, x: Array, rstd: Array, dgamma: Array) -> None:
    """Write the gradient of ``gamma`` of :func:`rmsnorm` to ``dgamma``, from ``dy``, the gradient of y.

    The gradient is a sum over the rows in ascending order. ``rstd`` is what :func:`rmsnorm` wrote.
    """
    T = x.dtype.type  # noqa: N806
    rows, features = x.shape
    for j in range(cuda.grid(1), features, cuda.gridsize(1)):
        total = T(0)
        for row in range(rows):
            total += dy[row, j] * standardized(x[row, j], T(0), rstd[row])
        dgamma[j] = total


def _value_kernel(name: str, value: Callable[..., Any]) -> CudaKernel:
    """Make a kernel that writes ``value(x[i], T)`` to ``y[i]`` for every i; ``y`` may be ``x``."""

    def apply(x: Array, y: Array) -> None:
        T = x.dtype.type  # noqa: N806
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            y[i] = value(x[i], T)

    apply.__qualname__ = name
    return kernel("void(const T[::1], T[::1])")(apply)


def _gradient_kernel(name: str, gradient: Callable[..., Any]) -> CudaKernel:
    """Make a kernel that writes ``gradient(x[i], dy[i], T)`` to ``dx[i]`` for every i.

    ``dx`` may be ``dy`` or ``x``.
    """

    def apply(x: Array, dy: Array, dx: Array) -> None:
        T = x.dtype.type  # noqa: N806
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            dx[i] = gradient(x[i], dy[i], T)

    apply.__qualname__ = name
    return kernel("void(const T[::1], const T[::1], T[::1])")(apply)


gelu, gelu_backward = _value_kernel("gelu", gelu_value), _gradient_kernel("gelu_backward", gelu_gradient)
silu, silu_backward = _value_kernel("silu", silu_value), _gradient_kernel("silu_backward", silu_gradient)
relu, relu_backward = _value_kernel("relu", relu_value), _gradient_kernel("relu_backward", relu_gradient)
tanh, tanh_backward = _value_kernel("tanh", tanh_value), _gradient_kernel("tanh_backward", tanh_gradient)


@kernel("void(const T[:,::1], const T[::1], T[:,::1], T[:,::1])")
def bias_gelu(x: Array, bias: Array, z: Array, y: Array) -> None:
    """Add ``bias`` to every row of ``x``; write the sum to ``z``, which may be ``x``, and its GELU to ``y``."""
    T = x.dtype.type  # noqa: N806
    columns = x.shape[1]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        row, column = i // columns, i % columns
        value = x[row, column] + bias[column]
        z[row, column] = value
        y[row, column] = gelu_value(value, T)


@kernel("void(const T[:,::1], const T[::1], T[:,::1])")
def add_bias(x: Array, bias: Array, y: Array) -> None:
    """Add ``bias`` to every row of ``x`` and write the sum to ``y``, which may be ``x``."""
    columns = x.shape[1]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        row, column = i // columns, i % columns
        y[row, column] = x[row, column] + bias[column]


@kernel("void(const T[:,::1], const T[::1], const T[:,::1], T[:,::1])")
def add_bias_residual(x: Array, bias: Array, residual: Array, y: Array) -> None:
    """Add ``bias`` to every row of ``x + residual``; write the sum to ``y``, which may be ``x`` or ``residual``."""
    columns = x.shape[1]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        row, column = i // columns, i % columns
        y[row, column] = (x[row, column] + bias[column]) + residual[row, column]


@kernel("void(const T[:,::1], T[::1])")
def column_sums(x: Array, out: Array) -> None:
    """Write the sum of each column of ``x`` to ``out``, for example to compute the gradient of a bias.

    Each sum starts from 0 and adds the rows in ascending order.
    """
    T = x.dtype.type  # noqa: N806
    rows, columns = x.shape
    for column in range(cuda.grid(1), columns, cuda.gridsize(1)):
        total = T(0)
        for row in range(rows):
            total += x[row, column]
        out[column] = total


@kernel("void(const T[::1], const i8[::1], const i8[::1], T[::1])")
def pack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    """Write the ranges ``source[starts[k] : starts[k] + sizes[k]]`` to ``target``, one after the other."""
    position = 0
    for k in range(starts.size):
        for i in range(cuda.grid(1), sizes[k], cuda.gridsize(1)):
            target[position + i] = source[starts[k] + i]
        position += sizes[k]


@kernel("void(const T[::1], const i8[::1], const i8[::1], T[::1])")
def unpack(source: Array, starts: Array, sizes: Array, target: Array) -> None:
    """Write the elements of ``source``, in order, to the ranges ``target[starts[k] : starts[k] + sizes[k]]``.

    This undoes :func:`pack`.
    """
    position = 0
    for k in range(starts.size):
        for i in range(cuda.grid(1), sizes[k], cuda.gridsize(1)):
            target[starts[k] + i] = source[position + i]
        position += sizes[k]


@kernel("void(const T[:,::1], const i8[:,::1], T[::1])")
def split_columns(matrix: Array, ranges: Array, parts: Array) -> None:
    """Copy ranges of columns of ``matrix`` to matrices with fewer columns, stored one after the other in ``parts``.

    Row k of ``ranges`` is (start, size, place, width): ``size`` columns, from column ``start`` on, are copied to a
    matrix of ``width`` columns. The first of these columns begins at ``parts[place]`` with its element in row 0.
    """
    for k in range(ranges.shape[0]):
        start, size, first, width = ranges[k, 0], ranges[k, 1], ranges[k, 2], ranges[k, 3]
        for i in range(cuda.grid(1), matrix.shape[0] * size, cuda.gridsize(1)):
            r, column = i // size, i % size
            parts[first + r * width + column] = matrix[r, start + column]


@kernel("void(const T[::1], const i8[:,::1], T[:,::1])")
def join_columns(parts: Array, ranges: Array, matrix: Array) -> None:
    """Copy the columns that :func:`split_columns` has written to ``parts`` back to ``matrix``."""
    for k in range(ranges.shape[0]):
        start, size, first, width = ranges[k, 0], ranges[k, 1], ranges[k, 2], ranges[k, 3]
        for i in range(cuda.grid(1), matrix.shape[0] * size, cuda.gridsize(1)):
            r, column = i // size, i % size
            matrix[r, start + column] = parts[first + r * width + column]


def _conversion_kernel(types: str, convert: Callable[..., Any]) -> CudaKernel:
    """Make a kernel that writes ``convert(x[i])`` to ``out[i]`` for every i; the kernel has the name of ``convert``."""

    def apply(x: Array, out: Array) -> None:
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
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
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] = x[i] * by


@kernel("void(const T[:,::1], const i8[::1], T[:,::1])")
def gather(table: Array, ids: Array, out: Array) -> None:
    """Copy row ``ids[i]`` of ``table`` to row i of ``out``; fill row i with NaN if the table has no such row."""
    T = table.dtype.type  # noqa: N806
    rows, width = table.shape
    for index in range(cuda.grid(1), ids.size * width, cuda.gridsize(1)):
        i, j = index // width, index % width
        out[i, j] = table[ids[i], j] if inside(ids[i], rows) else T(np.nan)


@kernel("void(const T[:,::1], const i8[::1], T[:,::1])")
def scatter_add(dy: Array, ids: Array, dtable: Array) -> None:
    """Add row i of ``dy`` to row ``ids[i]`` of ``dtable``, for i = 0, 1, ...; ignore ids without a row.

    One thread adds all elements of a column, so additions keep their order without atomic operations.
    """
    rows, width = dtable.shape
    for j in range(cuda.grid(1), width, cuda.gridsize(1)):
        for i in range(ids.size):
            if inside(ids[i], rows):
                dtable[ids[i], j] += dy[i, j]
