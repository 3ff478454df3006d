"""Softmax cross-entropy in NumPy."""

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
