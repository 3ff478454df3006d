"""Compute layer and root-mean-square normalization on the CPU; rows are samples or positions of sequences.

The variance of a row is computed in two passes, first the mean and then the mean square of the differences from it. So
it loses no digits by cancellation.
"""

from __future__ import annotations

from mpizero.kernels.cpu._rows import SCRATCH, row_dot, row_dot3, row_square_sum, row_sum
from mpizero.kernels.formulas import inverse_root, layernorm_gradient, rmsnorm_gradient, scaled, standardized
from mpizero.kernels.jit import kernel
from mpizero.types import Array


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

    It is a sum over the rows in ascending order. ``rstd`` is what :func:`rmsnorm` wrote.
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
