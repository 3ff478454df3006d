"""Compute losses and their gradients, and sums of squares of rows, on the CPU.

The softmax cross-entropy is computed from whole rows of logits, or from the logits of a part of the classes on each
rank. The other losses are computed element by element. Losses are float64; gradients have the type of the prediction.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpizero.kernels.cpu.layers import BLOCK, FOLD, SCRATCH, fold_sum, larger, row_max
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
from mpizero.kernels.jit import kernel
from mpizero.types import Array


def exp_sum(x: Any, largest: Any, scratch: Any) -> Any:
    """Return the sum of exp(x - largest) over a row ``x``; ``scratch`` is temporary memory of ``SCRATCH`` elements."""
    T = x.dtype.type  # noqa: N806
    total = T(0)
    fold, terms = scratch[:FOLD], scratch[FOLD:SCRATCH]
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        for j in range(part.size):
            terms[j] = exponential(part[j] - largest, T)
        total += fold_sum(terms[: part.size], fold)
    return total


@kernel(
    "void(const T[:,::1], const i8[::1], f8[::1], T[::1])", scratch=SCRATCH, divided=("logits", "targets", "losses")
)
def softmax_cross_entropy(logits: Array, targets: Array, losses: Array, scratch: Array) -> None:
    """Write the loss of each row, -log softmax(logits)[target], to ``losses``.

    The loss is 0 for a negative target (the row is ignored), and NaN for a target that is not a class.
    """
    rows, classes = logits.shape
    for row in range(rows):
        target = targets[row]
        if target < 0:
            losses[row] = 0.0
        elif not inside(target, classes):
            losses[row] = math.nan
        else:
            part = logits[row]
            largest = row_max(part, scratch)
            losses[row] = cross_entropy(exp_sum(part, largest, scratch), largest, part[target])


@kernel(
    "void(const T[:,::1], const i8[::1], const T[::1], T[:,::1], T[::1])",
    scratch=SCRATCH,
    divided=("logits", "targets", "dlogits"),
)
def softmax_cross_entropy_backward(
    logits: Array, targets: Array, scale1: Array, dlogits: Array, scratch: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dlogits``, which may be ``logits``.

    The gradient of a row is 0 for a negative target, and NaN for a target that is not a class.
    """
    T = logits.dtype.type  # noqa: N806
    rows, classes = logits.shape
    scale = scale1[0]
    fold, terms = scratch[:FOLD], scratch[FOLD:SCRATCH]
    for row in range(rows):
        part, result, target = logits[row], dlogits[row], targets[row]
        if not inside(target, classes):
            result[:] = T(0) if target < 0 else T(np.nan)
            continue
        largest = row_max(part, scratch)
        at_target = exponential(part[target] - largest, T)
        total = T(0)
        for first in range(0, classes, BLOCK):
            source, aim = part[first : first + BLOCK], result[first : first + BLOCK]
            for j in range(source.size):
                terms[j] = exponential(source[j] - largest, T)
            total += fold_sum(terms[: source.size], fold)
            for j in range(source.size):
                aim[j] = terms[j]
        inverse = T(1) / total
        for j in range(classes):
            result[j] = cross_entropy_gradient(result[j] * inverse, T(0), scale)
        result[target] = cross_entropy_gradient(at_target * inverse, T(1), scale)


@kernel("void(const T[:,::1], const i8[::1], i8, T[:,::1], T[::1])", scratch=SCRATCH)
def partial_cross_entropy(logits: Array, targets: Array, first: int, terms: Array, scratch: Array) -> None:
    """Write the terms of each row's loss that come from a part of the classes to ``terms``.

    Column j of ``logits`` belongs to class ``first + j``. ``terms`` (3, rows) receives, for each row of ``logits``: the
    largest logit (-inf if the part has no classes), the sum of exp(logit - largest), and the target's logit, or 0 if
    the part does not have the target. All three are 0 for a negative target.
    """
    T = logits.dtype.type  # noqa: N806
    rows, classes = logits.shape
    for row in range(rows):
        part, target = logits[row], targets[row]
        terms[0, row] = T(0) if target < 0 else T(-math.inf)
        terms[1, row] = T(0)
        terms[2, row] = part[target - first] if inside(target - first, classes) and target >= 0 else T(0)
        if target >= 0 and classes > 0:
            largest = row_max(part, scratch)
            terms[0, row] = largest
            terms[1, row] = exp_sum(part, largest, scratch)


@kernel("void(const T[:,:,::1], const i8[::1], T[:,::1], f8[::1])")
def merged_cross_entropy(terms: Array, targets: Array, merged: Array, losses: Array) -> None:
    """Compute each row's loss, and the numbers that its gradient needs, from the terms of all parts of the classes.

    ``terms`` is (parts, 3, rows), as :func:`partial_cross_entropy` writes it for each part. ``merged`` (2, rows)
    receives, for each row, the largest logit of all classes, and 1 / (sum of exp(logit - largest)). Sums are added in
    the order of the parts. The loss and both numbers are 0 for a negative target.
    """
    T = terms.dtype.type  # noqa: N806
    parts, _, rows = terms.shape
    for row in range(rows):
        largest, total, logit = terms[0, 0, row], T(0), T(0)
        for p in range(1, parts):
            largest = larger(terms[p, 0, row], largest)
        for p in range(parts):
            total += terms[p, 1, row] * exponential(terms[p, 0, row] - largest, T)
            logit += terms[p, 2, row]
        counts = targets[row] >= 0
        merged[0, row] = largest if counts else T(0)
        merged[1, row] = T(1) / total if counts else T(0)
        losses[row] = cross_entropy(total, largest, logit) if counts else 0.0


@kernel("void(const T[:,::1], const i8[::1], i8, const T[:,::1], const T[::1], T[:,::1], T[::1])", scratch=BLOCK)
def partial_cross_entropy_backward(
    logits: Array, targets: Array, first: int, merged: Array, scale1: Array, dlogits: Array, scratch: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dlogits``, for a part of the classes.

    Column j of ``logits`` belongs to class ``first + j``. ``merged`` comes from :func:`merged_cross_entropy`.
    ``dlogits`` may be ``logits``. The gradient of a row is 0 for a negative target.
    """
    T = logits.dtype.type  # noqa: N806
    rows, classes = logits.shape
    scale = scale1[0]
    for row in range(rows):
        part, result, target = logits[row], dlogits[row], targets[row]
        if target < 0:
            result[:] = T(0)
            continue
        largest, inverse = merged[0, row], merged[1, row]
        is_local = inside(target - first, classes)
        at_target = exponential(part[target - first] - largest, T) if is_local else T(0)
        for start in range(0, classes, BLOCK):
            source, aim = part[start : start + BLOCK], result[start : start + BLOCK]
            for j in range(source.size):
                scratch[j] = cross_entropy_gradient(exponential(source[j] - largest, T) * inverse, T(0), scale)
            for j in range(source.size):
                aim[j] = scratch[j]
        if is_local:
            result[target - first] = cross_entropy_gradient(at_target * inverse, T(1), scale)


@kernel("void(const T[::1], const T[::1], f8[::1])")
def absolute_error(prediction: Array, target: Array, losses: Array) -> None:
    """Write the absolute difference of each element to ``losses``."""
    for i in range(prediction.size):
        losses[i] = absolute_error_value(prediction[i], target[i])


@kernel("void(const T[::1], const T[::1], const T[::1], T[::1])")
def absolute_error_backward(prediction: Array, target: Array, scale1: Array, dprediction: Array) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dprediction``."""
    for i in range(prediction.size):
        dprediction[i] = absolute_error_gradient(prediction[i], target[i], scale1[0])


@kernel("void(const T[::1], const T[::1], const T[::1], f8[::1])")
def huber(prediction: Array, target: Array, delta1: Array, losses: Array) -> None:
    """Write the Huber loss of each element to ``losses``; above the error ``delta1[0]`` the loss is linear."""
    for i in range(prediction.size):
        losses[i] = huber_value(prediction[i], target[i], delta1[0])


@kernel("void(const T[::1], const T[::1], const T[::1], const T[::1], T[::1])")
def huber_backward(prediction: Array, target: Array, delta1: Array, scale1: Array, dprediction: Array) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dprediction``."""
    for i in range(prediction.size):
        dprediction[i] = huber_gradient(prediction[i], target[i], delta1[0], scale1[0])


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], f8[:,::1])")
def binary_cross_entropy(logits: Array, targets: Array, pos_weight: Array, losses: Array) -> None:
    """Write the cross-entropy of each logit's sigmoid to ``losses``.

    Arrays are (rows, columns). ``pos_weight`` holds, for each column, a factor on the loss of positive targets (1).
    """
    rows, columns = logits.shape
    for row in range(rows):
        for j in range(columns):
            losses[row, j] = binary_cross_entropy_value(logits[row, j], targets[row, j], pos_weight[j])


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], const T[::1], T[:,::1])")
def binary_cross_entropy_backward(
    logits: Array, targets: Array, pos_weight: Array, scale1: Array, dlogits: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dlogits``."""
    T = logits.dtype.type  # noqa: N806
    rows, columns = logits.shape
    for row in range(rows):
        for j in range(columns):
            dlogits[row, j] = binary_cross_entropy_gradient(
                logits[row, j], targets[row, j], pos_weight[j], scale1[0], T
            )


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], f8[:,::1])")
def gaussian_likelihood(prediction: Array, target: Array, lowest1: Array, losses: Array) -> None:
    """Write the negative logarithm of each target's normal density, without its constant, to ``losses``.

    ``target`` and ``losses`` are (rows, columns). ``prediction`` is (rows, 2 * columns): the means, then the logarithms
    of the variances; logarithms below ``lowest1[0]`` are replaced by it.
    """
    rows, columns = target.shape
    for row in range(rows):
        for j in range(columns):
            losses[row, j] = gaussian_value(
                prediction[row, j], prediction[row, columns + j], target[row, j], lowest1[0]
            )


@kernel("void(const T[:,::1], const T[:,::1], const T[::1], const T[::1], T[:,::1])")
def gaussian_likelihood_backward(
    prediction: Array, target: Array, lowest1: Array, scale1: Array, dprediction: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dprediction`` (rows, 2 * columns)."""
    T = prediction.dtype.type  # noqa: N806
    rows, columns = target.shape
    for row in range(rows):
        for j in range(columns):
            dmean, dspread = gaussian_gradient(
                prediction[row, j], prediction[row, columns + j], target[row, j], lowest1[0], scale1[0], T
            )
            dprediction[row, j] = dmean
            dprediction[row, columns + j] = dspread


@kernel("void(const T[:,::1], f8[::1], f8[::1])", scratch=SCRATCH)
def row_square_sums(x: Array, sums: Array, scratch: Array) -> None:
    """Write the sum of the squares of each row of ``x``, computed in float64, to ``sums``."""
    rows, columns = x.shape
    fold, terms = scratch[:FOLD], scratch[FOLD:SCRATCH]
    for row in range(rows):
        total = np.float64(0)
        for start in range(0, columns, BLOCK):
            part = x[row, start : start + BLOCK]
            for j in range(part.size):
                terms[j] = np.float64(part[j]) * np.float64(part[j])
            total += fold_sum(terms[: part.size], fold)
        sums[row] = total
