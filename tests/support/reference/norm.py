"""Compute layer and root-mean-square normalization in NumPy, as a reference for the kernels."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def layernorm(x: Array, gamma: Array, beta: Array, eps1: Array, y: Array, mean: Array, rstd: Array) -> None:
    """Normalize every row: ``y = (x - mean) * rstd * gamma + beta`` with ``rstd = 1 / sqrt(variance + eps1[0])``.

    ``mean`` and ``rstd`` receive one number for each row, which :func:`layernorm_backward` needs.
    """
    mean[:] = x.mean(axis=1, dtype=np.float64)
    rstd[:] = 1 / np.sqrt(x.var(axis=1, dtype=np.float64) + eps1[0])
    y[:] = (x - mean[:, None]) * rstd[:, None] * gamma + beta


def layernorm_backward(
    dy: Array, x: Array, gamma: Array, mean: Array, rstd: Array, residual: Array, dx: Array, dgamma: Array, dbeta: Array
) -> None:
    """Write the gradients of :func:`layernorm` to ``dx``, ``dgamma`` and ``dbeta``, from ``dy``, the gradient of y.

    The arguments are those of :func:`mpizero.kernels.cpu.norm.layernorm_backward`.
    """
    standard = (x - mean[:, None]) * rstd[:, None]
    g = dy * gamma
    mean_g, mean_gs = g.mean(axis=1, keepdims=True), (g * standard).mean(axis=1, keepdims=True)
    dx[:] = rstd[:, None] * (g - mean_g - standard * mean_gs)
    if len(residual):
        dx += residual
    dgamma[:] = 0
    dbeta[:] = 0
    for row in range(x.shape[0]):
        dgamma += dy[row] * ((x[row] - mean[row]) * rstd[row])
        dbeta += dy[row]


def rmsnorm(x: Array, gamma: Array, eps1: Array, y: Array, rstd: Array) -> None:
    """Scale every row: ``y = x * rstd * gamma`` with ``rstd = 1 / sqrt(mean(x**2) + eps1[0])``.

    Zhang and Sennrich 2019. ``rstd`` receives one number for each row, which the backward pass needs.
    """
    rstd[:] = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1) + eps1[0])
    y[:] = x * rstd[:, None] * gamma


def rmsnorm_backward_input(dy: Array, x: Array, gamma: Array, rstd: Array, dx: Array) -> None:
    """Write the gradient of the input of :func:`rmsnorm` to ``dx``, from ``dy``, the gradient of y.

    ``rstd`` is what :func:`rmsnorm` wrote. ``dx`` must not be one of the inputs.
    """
    standard = x * rstd[:, None]
    g = dy * gamma
    dx[:] = rstd[:, None] * (g - standard * (g * standard).mean(axis=1, keepdims=True))


def rmsnorm_backward_weights(dy: Array, x: Array, rstd: Array, dgamma: Array) -> None:
    """Write the gradient of ``gamma`` of :func:`rmsnorm` to ``dgamma``, from ``dy``, the gradient of y.

    It is a sum over the rows in ascending order. ``rstd`` is what :func:`rmsnorm` wrote.
    """
    dgamma[:] = 0
    for row in range(x.shape[0]):
        dgamma += dy[row] * (x[row] * rstd[row])
