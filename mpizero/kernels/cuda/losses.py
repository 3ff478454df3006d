"""Compute losses and their gradients, and sums of squares of rows, on the GPU.

The softmax cross-entropy is computed from whole rows of logits, or from the logits of a part of the classes on each
rank. The other losses are computed element by element. Losses are float64; gradients have the type of the prediction.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.kernels.cuda.layers import MOST_THREADS, block_max, block_sum, larger
from mpizero.kernels.elementary import exponential
from mpizero.kernels.formulas import (
    absolute_error_gradient,
    absolute_error_value,
    binary_cross_entropy_gradient,
    binary_cross_entropy_value,
    cross_entropy,
    cross_entropy_gradient,
    gaussian_gradient,
    gaussian_value,
    huber_gradient,
    huber_value,
    inside,
)
from mpizero.types import Array


def _largest_and_total(logits: Array, row: int, shared: Array) -> tuple[Any, Any]:
    """Return, to all threads, the largest logit of a row, and the sum over the row of exp(logit - largest)."""
    T = logits.dtype.type  # noqa: N806
    first, classes, step = cuda.threadIdx.x, logits.shape[1], cuda.blockDim.x
    largest = T(-math.inf)
    for j in range(first, classes, step):
        largest = larger(logits[row, j], largest)
    largest = block_max(largest, shared)
    total = T(0)
    for j in range(first, classes, step):
        total += exponential(logits[row, j] - largest, T)
    return largest, block_sum(total, shared)


@kernel("void(const T[:,::1], const i8[::1], f8[::1])")
def softmax_cross_entropy(logits: Array, targets: Array, losses: Array) -> None:
    """Write the loss of each row, -log softmax(logits)[target], to ``losses``.

    The loss is 0 for a negative target (the row is ignored), and NaN for a target that is not a class.
    """
    shared = cuda.shared.array(MOST_THREADS, logits.dtype)
    rows, classes = logits.shape
    for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        target = targets[row]
        largest, total = _largest_and_total(logits, row, shared)
        if cuda.threadIdx.x == 0:
            if target < 0:
                losses[row] = 0.0
            elif not inside(target, classes):
                losses[row] = math.nan
            else:
                losses[row] = cross_entropy(total, largest, logits[row, target])


@kernel("void(const T[:,::1], const i8[::1], const T[::1], T[:,::1])")
def softmax_cross_entropy_backward(logits: Array, targets: Array, scale1: Array, dlogits: Array) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dlogits``, which may be ``logits``.

    The gradient of a row is 0 for a negative target, and NaN for a target that is not a class.
    """
    T = logits.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, logits.dtype)
    rows, classes = logits.shape
    for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        target = targets[row]
        largest, total = _largest_and_total(logits, row, shared)
        inverse = T(1) / total
        for j in range(cuda.threadIdx.x, classes, cuda.blockDim.x):
            if target < 0:
                dlogits[row, j] = T(0)
            elif not inside(target, classes):
                dlogits[row, j] = T(np.nan)
            else:
                p = exponential(logits[row, j] - largest, T) * inverse
                dlogits[row, j] = cross_entropy_gradient(p, T(1) if j == target else T(0), scale1[0])


@kernel("void(const T[:,::1], const i8[::1], i8, T[:,::1])")
def partial_cross_entropy(logits: Array, targets: Array, first: int, terms: Array) -> None:
    """Write the terms of each row's loss that come from a part of the classes to ``terms``.

    The arguments are those of :func:`mpizero.kernels.cpu.losses.partial_cross_entropy`.
    """
    T = logits.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, logits.dtype)
    rows, classes = logits.shape
    for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        target = targets[row]
        largest, total = _largest_and_total(logits, row, shared)
        if cuda.threadIdx.x == 0:
            terms[0, row] = T(0) if target < 0 else largest
            terms[1, row] = T(0) if target < 0 else total
            terms[2, row] = logits[row, target - first] if target >= 0 and inside(target - first, classes) else T(0)


@kernel("void(const T[:,:,::1], const i8[::1], T[:,::1], f8[::1])")
def merged_cross_entropy(terms: Array, targets: Array, merged: Array, losses: Array) -> None:
    """Compute each row's loss, and the numbers that its gradient needs, from the terms of all parts of the classes.

    The arguments are those of :func:`mpizero.kernels.cpu.losses.merged_cross_entropy`.
    """
    T = terms.dtype.type  # noqa: N806
    parts, _, rows = terms.shape
    for row in range(cuda.grid(1), rows, cuda.gridsize(1)):
        largest, total, logit = terms[0, 0, row], T(0), T(0)
        for p in range(1, parts):
            largest = larger(terms[p, 0, row], largest)
        for p in range(parts):
            total += terms[p, 1, row] * exponential(terms[p, 0, row] - largest, T)
            logit += terms[p, 2, row]
        if targets[row] < 0:
            merged[0, row], merged[1, row], losses[row] = T(0), T(0), 0.0
        else:
            merged[0, row], merged[1, row] = largest, T(1) / total
            losses[row] = cross_entropy(total, largest, logit)


@kernel("void(const T[:,::1], const i8[::1], i8, const T[:,::1], const T[::1], T[:,::1])")
def partial_cross_entropy_backward(
    logits: Array, targets: Array, first: int, merged: Array, scale1: Array, dlogits: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dlogits``, for a part of the classes.

    Column j of ``logits`` belongs to class ``first + j``. ``merged`` comes from :func:`merged_cross_entropy`.
    ``dlogits`` may be ``logits``. The gradient of a row is 0 for a negative target.
    """
    T = logits.dtype.type  # noqa: N806
    rows, classes = logits.shape
    for index in range(cuda.grid(1), rows * classes, cuda.gridsize(1)):
        row, j = index // classes, index % classes
        target = targets[row]
        if target < 0:
            dlogits[row, j] = T(0)
        else:
            p = exponential(logits[row, j] - merged[0, row], T) * merged[1, row]
            dlogits[row, j] = cross_entropy_gradient(p, T(1) if j == target - first else T(0), scale1[0])


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
    """Write the Huber loss of each element to ``losses``; above the error ``delta1[0]`` the loss is linear."""
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

    Arrays are (rows, columns). ``pos_weight`` holds, for each column, a factor on the loss of positive targets (1).
    """
    rows, columns = logits.shape
    for index in range(cuda.grid(1), rows * columns, cuda.gridsize(1)):
        row, j = index // columns, index % columns
        losses[row, j] = binary_cross_entropy_value(logits[row, j], targets[row, j], pos_weight[j])


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], const T[::1], T[:,::1])")
def binary_cross_entropy_backward(
    logits: Array, targets: Array, pos_weight: Array, scale1: Array, dlogits: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dlogits``."""
    T = logits.dtype.type  # noqa: N806
    rows, columns = logits.shape
    for index in range(cuda.grid(1), rows * columns, cuda.gridsize(1)):
        row, j = index // columns, index % columns
        dlogits[row, j] = binary_cross_entropy_gradient(logits[row, j], targets[row, j], pos_weight[j], scale1[0], T)


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], f8[:,::1])")
def gaussian_likelihood(prediction: Array, target: Array, lowest1: Array, losses: Array) -> None:
    """Write the negative logarithm of each target's normal density, without its constant, to ``losses``.

    ``target`` and ``losses`` are (rows, columns). ``prediction`` is (rows, 2 * columns): the means, then the logarithms
    of the variances; logarithms below ``lowest1[0]`` are replaced by it.
    """
    rows, columns = target.shape
    for index in range(cuda.grid(1), rows * columns, cuda.gridsize(1)):
        row, j = index // columns, index % columns
        losses[row, j] = gaussian_value(prediction[row, j], prediction[row, columns + j], target[row, j], lowest1[0])


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], const T[::1], T[:,::1])")
def gaussian_likelihood_backward(
    prediction: Array, target: Array, lowest1: Array, scale1: Array, dprediction: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dprediction`` (rows, 2 * columns)."""
    T = prediction.dtype.type  # noqa: N806
    rows, columns = target.shape
    for index in range(cuda.grid(1), rows * columns, cuda.gridsize(1)):
        row, j = index // columns, index % columns
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
