"""Compute the softmax cross-entropy in NumPy."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def softmax_cross_entropy(logits: Array, targets: Array, losses: Array) -> None:
    """Write each row's -log softmax(logits)[target]; 0 for negative targets, NaN for targets beyond the classes."""
    for row, target in enumerate(targets):
        if target < 0:
            losses[row] = 0
        elif target >= logits.shape[1]:
            losses[row] = np.nan
        else:
            wide = logits[row].astype(np.float64)
            losses[row] = np.log(np.exp(wide - wide.max()).sum()) + wide.max() - wide[target]


def softmax_cross_entropy_backward(logits: Array, targets: Array, scale1: Array, dlogits: Array) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses into ``dlogits``."""
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
    """Write the largest logit, the sum of exp(logit - largest) and the target's logit of each row's classes."""
    for row, target in enumerate(targets):
        terms[:, row] = 0
        if target >= 0:
            wide = logits[row].astype(np.float64)
            terms[0, row] = largest = wide.max(initial=-np.inf)
            terms[1, row] = np.exp(wide - largest).sum()
            terms[2, row] = wide[target - first] if 0 <= target - first < len(wide) else 0


def merged_cross_entropy(terms: Array, targets: Array, merged: Array, losses: Array) -> None:
    """Merge the terms of all parts into the largest logit and 1 / sum of each row, and its loss."""
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
    """Write ``scale1[0]`` times the gradient of the sum of losses for the logits of the classes from ``first`` on."""
    for row, target in enumerate(targets):
        wide = logits[row].astype(np.float64)
        shares = np.exp(wide - merged[0, row]) * merged[1, row] if target >= 0 else np.zeros(len(wide))
        if 0 <= target - first < len(wide) and target >= 0:
            shares[target - first] -= 1
        dlogits[row] = scale1[0] * shares
