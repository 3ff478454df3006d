"""Compute layer and root-mean-square normalization on the GPU; rows are samples or positions of sequences.

A block of threads computes a row; one thread computes a column of the gradients of gamma and beta.
"""

from __future__ import annotations

from mpizero.kernels.cuda._rows import MOST_THREADS, block_sum
from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.kernels.formulas import inverse_root, layernorm_gradient, rmsnorm_gradient, scaled, standardized
from mpizero.types import Array


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

    The arguments are those of :func:`mpizero.kernels.cpu.norm.layernorm_backward`.
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

    It is a sum over the rows in ascending order. ``rstd`` is what :func:`rmsnorm` wrote.
    """
    T = x.dtype.type  # noqa: N806
    rows, features = x.shape
    for j in range(cuda.grid(1), features, cuda.gridsize(1)):
        total = T(0)
        for row in range(rows):
            total += dy[row, j] * standardized(x[row, j], T(0), rstd[row])
        dgamma[j] = total
