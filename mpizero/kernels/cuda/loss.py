"""Softmax cross-entropy on the GPU: a block per row."""

from __future__ import annotations

import math

import numpy as np
from numba import cuda

from mpizero.kernels.cuda._rows import MOST_THREADS, block_max, block_sum, larger
from mpizero.kernels.cuda.launch import kernel
from mpizero.kernels.formulas.elementary import exponential
from mpizero.kernels.formulas.embedding import inside
from mpizero.kernels.formulas.loss import cross_entropy, cross_entropy_gradient
from mpizero.types import Array


@kernel("void(const T[:,::1], const i8[::1], f8[::1])")
def softmax_cross_entropy(logits: Array, targets: Array, losses: Array) -> None:
    """Write each row's loss, -log softmax(logits)[target].

    The loss of a negative target is 0 (the row is ignored), of one beyond the classes NaN.
    """
    T = logits.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, logits.dtype)
    rows, classes = logits.shape
    first, step = cuda.threadIdx.x, cuda.blockDim.x
    for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        target = targets[row]
        largest = T(-math.inf)
        for j in range(first, classes, step):
            largest = larger(logits[row, j], largest)
        largest = block_max(largest, shared)
        total = T(0)
        for j in range(first, classes, step):
            total += exponential(logits[row, j] - largest, T)
        total = block_sum(total, shared)
        if first == 0:
            if target < 0:
                losses[row] = 0.0
            elif not inside(target, classes):
                losses[row] = math.nan
            else:
                losses[row] = cross_entropy(total, largest, logits[row, target])


@kernel("void(const T[:,::1], const i8[::1], const T[::1], T[:,::1])")
def softmax_cross_entropy_backward(logits: Array, targets: Array, scale1: Array, dlogits: Array) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses into ``dlogits``, which may be ``logits``."""
    T = logits.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, logits.dtype)
    rows, classes = logits.shape
    first, step = cuda.threadIdx.x, cuda.blockDim.x
    for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        target = targets[row]
        largest = T(-math.inf)
        for j in range(first, classes, step):
            largest = larger(logits[row, j], largest)
        largest = block_max(largest, shared)
        total = T(0)
        for j in range(first, classes, step):
            total += exponential(logits[row, j] - largest, T)
        share = T(1) / block_sum(total, shared)
        for j in range(first, classes, step):
            if target < 0:
                dlogits[row, j] = T(0)
            elif not inside(target, classes):
                dlogits[row, j] = T(np.nan)
            else:
                p = exponential(logits[row, j] - largest, T) * share
                dlogits[row, j] = cross_entropy_gradient(p, T(1) if j == target else T(0), scale1[0])
