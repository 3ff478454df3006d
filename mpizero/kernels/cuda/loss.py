"""Compute the softmax cross-entropy of whole rows of logits, or of parts of the classes, on the GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpizero.kernels.cuda._rows import MOST_THREADS, block_max, block_sum, larger
from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.kernels.formulas import cross_entropy, cross_entropy_gradient, inside
from mpizero.kernels.special_functions import exponential
from mpizero.types import Array


def _largest_and_total(logits: Array, row: int, shared: Array) -> tuple[Any, Any]:
    """Return the largest logit of a row, and the sum over its classes of exp(logit - largest), in all threads."""
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
        share = T(1) / total
        for j in range(cuda.threadIdx.x, classes, cuda.blockDim.x):
            if target < 0:
                dlogits[row, j] = T(0)
            elif not inside(target, classes):
                dlogits[row, j] = T(np.nan)
            else:
                p = exponential(logits[row, j] - largest, T) * share
                dlogits[row, j] = cross_entropy_gradient(p, T(1) if j == target else T(0), scale1[0])


@kernel("void(const T[:,::1], const i8[::1], i8, T[:,::1])")
def partial_cross_entropy(logits: Array, targets: Array, first: int, terms: Array) -> None:
    """Write the terms of each row's loss that come from a part of the classes to ``terms``.

    The arguments are those of :func:`mpizero.kernels.cpu.loss.partial_cross_entropy`.
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
    """Compute the loss of each row from the terms of all parts of the classes, and what its gradient needs.

    The arguments are those of :func:`mpizero.kernels.cpu.loss.merged_cross_entropy`.
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
    for place in range(cuda.grid(1), rows * classes, cuda.gridsize(1)):
        row, j = place // classes, place % classes
        target = targets[row]
        if target < 0:
            dlogits[row, j] = T(0)
        else:
            p = exponential(logits[row, j] - merged[0, row], T) * merged[1, row]
            dlogits[row, j] = cross_entropy_gradient(p, T(1) if j == target - first else T(0), scale1[0])
