"""Softmax cross-entropy on the CPU, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpizero.kernels.compile import kernel
from mpizero.kernels.cpu._rows import BLOCK, FOLD, SCRATCH, fold_sum, row_max
from mpizero.kernels.formulas.elementary import exponential
from mpizero.kernels.formulas.embedding import inside
from mpizero.kernels.formulas.loss import cross_entropy, cross_entropy_gradient
from mpizero.types import Array


def exp_sum(x: Any, largest: Any, scratch: Any) -> Any:
    """Return the sum of exp(x - largest) over a row."""
    T = x.dtype.type  # noqa: N806
    total = T(0)
    fold, terms = scratch[:FOLD], scratch[FOLD:SCRATCH]
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        for j in range(part.size):
            terms[j] = exponential(part[j] - largest, T)
        total += fold_sum(terms[: part.size], fold)
    return total


@kernel("void(const T[:,::1], const i8[::1], f8[::1], T[::1])", scratch=SCRATCH)
def softmax_cross_entropy(logits: Array, targets: Array, losses: Array, scratch: Array) -> None:
    """Write each row's loss, -log softmax(logits)[target].

    The loss of a negative target is 0 (the row is ignored), of one beyond the classes NaN.
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


@kernel("void(const T[:,::1], const i8[::1], const T[::1], T[:,::1], T[::1])", scratch=SCRATCH)
def softmax_cross_entropy_backward(
    logits: Array, targets: Array, scale1: Array, dlogits: Array, scratch: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses into ``dlogits``, which may be ``logits``."""
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
        share = T(1) / total
        for j in range(classes):
            result[j] = cross_entropy_gradient(result[j] * share, T(0), scale)
        result[target] = cross_entropy_gradient(at_target * share, T(1), scale)
