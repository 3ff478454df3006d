"""Compute losses of single elements and their gradients, and sums of squares of rows, on the GPU.

Losses are float64; gradients have the type of the prediction.
"""

from __future__ import annotations

import numpy as np

from mpizero.kernels.cuda._rows import MOST_THREADS, block_sum
from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.kernels.formulas import (
    absolute_error_gradient,
    absolute_error_value,
    binary_cross_entropy_gradient,
    binary_cross_entropy_value,
    gaussian_gradient,
    gaussian_value,
    huber_gradient,
    huber_value,
)
from mpizero.types import Array


@kernel("void(const T[::1], const T[::1], f8[::1])")
def absolute_error(prediction: Array, target: Array, losses: Array) -> None:
    """Write the absolute difference of each element to ``losses``."""
    for i in range(cuda.grid(1), prediction.size, cuda.gridsize(1)):
        losses[i] = absolute_error_value(prediction[i], target[i])


@kernel("void(const T[::1], const T[::1], const T[::1], T[::1])")
def absolute_error_backward(prediction: Array, target: Array, scale1: Array, dprediction: Array) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dprediction``."""
    for i in range(cuda.grid(1), prediction.size, cuda.gridsize(1)):
        dprediction[i] = absolute_error_gradient(prediction[i], target[i], scale1[0])


@kernel("void(const T[::1], const T[::1], const T[::1], f8[::1])")
def huber(prediction: Array, target: Array, delta1: Array, losses: Array) -> None:
    """Write the Huber loss of each element to ``losses``; ``delta1[0]`` is the error where its straight part begins."""
    for i in range(cuda.grid(1), prediction.size, cuda.gridsize(1)):
        losses[i] = huber_value(prediction[i], target[i], delta1[0])


@kernel("void(const T[::1], const T[::1], const T[::1], const T[::1], T[::1])")
def huber_backward(prediction: Array, target: Array, delta1: Array, scale1: Array, dprediction: Array) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dprediction``."""
    for i in range(cuda.grid(1), prediction.size, cuda.gridsize(1)):
        dprediction[i] = huber_gradient(prediction[i], target[i], delta1[0], scale1[0])


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], f8[:,::1])")
def binary_cross_entropy(logits: Array, targets: Array, pos_weight: Array, losses: Array) -> None:
    """Write the cross-entropy of each logit's sigmoid to ``losses``.

    Arrays are (rows, columns). ``pos_weight`` has, for each column, the factor on the loss of a target of 1.
    """
    rows, columns = logits.shape
    for place in range(cuda.grid(1), rows * columns, cuda.gridsize(1)):
        row, j = place // columns, place % columns
        losses[row, j] = binary_cross_entropy_value(logits[row, j], targets[row, j], pos_weight[j])


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], const T[::1], T[:,::1])")
def binary_cross_entropy_backward(
    logits: Array, targets: Array, pos_weight: Array, scale1: Array, dlogits: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dlogits``."""
    T = logits.dtype.type  # noqa: N806
    rows, columns = logits.shape
    for place in range(cuda.grid(1), rows * columns, cuda.gridsize(1)):
        row, j = place // columns, place % columns
        dlogits[row, j] = binary_cross_entropy_gradient(logits[row, j], targets[row, j], pos_weight[j], scale1[0], T)


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], f8[:,::1])")
def gaussian_likelihood(prediction: Array, target: Array, lowest1: Array, losses: Array) -> None:
    """Write the negative logarithm of each target's normal density, without its constant, to ``losses``.

    ``target`` and ``losses`` are (rows, columns). ``prediction`` is (rows, 2 * columns): the means, then the logarithms
    of the variances, which count as ``lowest1[0]`` where they are below it.
    """
    rows, columns = target.shape
    for place in range(cuda.grid(1), rows * columns, cuda.gridsize(1)):
        row, j = place // columns, place % columns
        losses[row, j] = gaussian_value(prediction[row, j], prediction[row, columns + j], target[row, j], lowest1[0])


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], const T[::1], T[:,::1])")
def gaussian_likelihood_backward(
    prediction: Array, target: Array, lowest1: Array, scale1: Array, dprediction: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dprediction`` (rows, 2 * columns)."""
    T = prediction.dtype.type  # noqa: N806
    rows, columns = target.shape
    for place in range(cuda.grid(1), rows * columns, cuda.gridsize(1)):
        row, j = place // columns, place % columns
        dmean, dspread = gaussian_gradient(
            prediction[row, j], prediction[row, columns + j], target[row, j], lowest1[0], scale1[0], T
        )
        dprediction[row, j] = dmean
        dprediction[row, columns + j] = dspread


@kernel("void(const T[:,::1], f8[::1])")
def row_square_sums(x: Array, sums: Array) -> None:
    """Write the sum of the squares of each row of ``x``, computed in float64, to ``sums``."""
    shared = cuda.shared.array(MOST_THREADS, np.float64)
    rows, columns = x.shape
    for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        total = np.float64(0)
        for j in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            total += np.float64(x[row, j]) * np.float64(x[row, j])
        total = block_sum(total, shared)
        if cuda.threadIdx.x == 0:
            sums[row] = total
