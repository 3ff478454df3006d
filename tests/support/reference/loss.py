"""Compute the softmax cross-entropy of whole rows of logits, or of parts of the classes, in NumPy."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def softmax_cross_entropy(logits: Array, targets: Array, losses: Array) -> None:
    """Write the loss of each row, -log softmax(logits)[target], to ``losses``.

    The loss is 0 for a negative target (the row is ignored), and NaN for a target that is not a class.
    """
    for row, target in enumerate(targets):
        if target < 0:
            losses[row] = 0
        elif target >= logits.shape[1]:
            losses[row] = np.nan
        else:
            wide = logits[row].astype(np.float64)
            losses[row] = np.log(np.exp(wide - wide.max()).sum()) + wide.max() - wide[target]


def softmax_cross_entropy_backward(logits: Array, targets: Array, scale1: Array, dlogits: Array) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dlogits``, which may be ``logits``.

    The gradient of a row is 0 for a negative target, and NaN for a target that is not a class.
    """
    for row, target in enumerate(targets):
        if target < 0:
            dlogits[row] = 0
        elif target >= logits.shape[1]:
            dlogits[row] = np.nan
        else:
            wide = logits[row].astype(np.float64)
            shares = np.exp(wide - wide.max())
            shares /= shares.sum()
            shares[target] -= 1
            dlogits[row] = scale1[0] * shares


def partial_cross_entropy(logits: Array, targets: Array, first: int, terms: Array) -> None:
    """Write the terms of each row's loss that come from a part of the classes to ``terms``.

    The arguments are those of :func:`mpizero.kernels.cpu.loss.partial_cross_entropy`.
    """
    for row, target in enumerate(targets):
        terms[:, row] = 0
        if target >= 0:
            wide = logits[row].astype(np.float64)
            terms[0, row] = largest = wide.max(initial=-np.inf)
            terms[1, row] = np.exp(wide - largest).sum()
            terms[2, row] = wide[target - first] if 0 <= target - first < len(wide) else 0


def merged_cross_entropy(terms: Array, targets: Array, merged: Array, losses: Array) -> None:
    """Compute the loss of each row from the terms of all parts of the classes, and what its gradient needs.

    The arguments are those of :func:`mpizero.kernels.cpu.loss.merged_cross_entropy`.
    """
    wide = terms.astype(np.float64)
    for row, target in enumerate(targets):
        merged[:, row], losses[row] = 0, 0
        if target >= 0:
            largest = wide[:, 0, row].max()
            total = (wide[:, 1, row] * np.exp(wide[:, 0, row] - largest)).sum()
            merged[:, row] = largest, 1 / total
            losses[row] = np.log(total) + largest - wide[:, 2, row].sum()


def partial_cross_entropy_backward(
    logits: Array, targets: Array, first: int, merged: Array, scale1: Array, dlogits: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dlogits``, for a part of the classes.

    Column j of ``logits`` belongs to class ``first + j``. ``merged`` comes from :func:`merged_cross_entropy`.
    ``dlogits`` may be ``logits``. The gradient of a row is 0 for a negative target.
    """
    for row, target in enumerate(targets):
        wide = logits[row].astype(np.float64)
        shares = np.exp(wide - merged[0, row]) * merged[1, row] if target >= 0 else np.zeros(len(wide))
        if 0 <= target - first < len(wide) and target >= 0:
            shares[target - first] -= 1
        dlogits[row] = scale1[0] * shares
