"""Compute losses and their gradients, and sums of squares of rows, in NumPy, as a reference for the kernels.

The softmax cross-entropy is that of whole rows of logits, or of parts of the classes. The other losses are of single
elements.
"""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def softmax_cross_entropy(logits: Array, targets: Array, losses: Array) -> None:
    for row, target in enumerate(targets):
        if target < 0:
            losses[row] = 0
        elif target >= logits.shape[1]:
            losses[row] = np.nan
        else:
            wide = logits[row].astype(np.float64)
            losses[row] = np.log(np.exp(wide - wide.max()).sum()) + wide.max() - wide[target]


def softmax_cross_entropy_backward(logits: Array, targets: Array, scale1: Array, dlogits: Array) -> None:
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
    for row, target in enumerate(targets):
        terms[:, row] = 0
        if target >= 0:
            wide = logits[row].astype(np.float64)
            terms[0, row] = largest = wide.max(initial=-np.inf)
            terms[1, row] = np.exp(wide - largest).sum()
            terms[2, row] = wide[target - first] if 0 <= target - first < len(wide) else 0


def merged_cross_entropy(terms: Array, targets: Array, merged: Array, losses: Array) -> None:
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
    for row, target in enumerate(targets):
        wide = logits[row].astype(np.float64)
        shares = np.exp(wide - merged[0, row]) * merged[1, row] if target >= 0 else np.zeros(len(wide))
        if 0 <= target - first < len(wide) and target >= 0:
            shares[target - first] -= 1
        dlogits[row] = scale1[0] * shares


def absolute_error(prediction: Array, target: Array, losses: Array) -> None:
    losses[:] = np.abs(_wide(prediction) - _wide(target))


def absolute_error_backward(prediction: Array, target: Array, scale1: Array, dprediction: Array) -> None:
    dprediction[:] = np.sign(_wide(prediction) - _wide(target)) * scale1[0]


def huber(prediction: Array, target: Array, delta1: Array, losses: Array) -> None:
    size, delta = np.abs(_wide(prediction) - _wide(target)), float(delta1[0])
    losses[:] = np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))


def huber_backward(prediction: Array, target: Array, delta1: Array, scale1: Array, dprediction: Array) -> None:
    dprediction[:] = np.clip(_wide(prediction) - _wide(target), -delta1[0], delta1[0]) * scale1[0]


def binary_cross_entropy(logits: Array, targets: Array, pos_weight: Array, losses: Array) -> None:
    x, t = _wide(logits), _wide(targets)
    losses[:] = pos_weight * t * np.logaddexp(0, -x) + (1 - t) * np.logaddexp(0, x)


def binary_cross_entropy_backward(
    logits: Array, targets: Array, pos_weight: Array, scale1: Array, dlogits: Array
) -> None:
    x, t = _wide(logits), _wide(targets)
    dlogits[:] = ((1 - t) * np.exp(-np.logaddexp(0, -x)) - pos_weight * t * np.exp(-np.logaddexp(0, x))) * scale1[0]


def gaussian_likelihood(prediction: Array, target: Array, lowest1: Array, losses: Array) -> None:
    mean, spread = np.split(_wide(prediction), 2, axis=1)
    variance = np.exp(np.maximum(spread, lowest1[0]))
    losses[:] = (np.log(variance) + (mean - target) ** 2 / variance) / 2


def gaussian_likelihood_backward(
    prediction: Array, target: Array, lowest1: Array, scale1: Array, dprediction: Array
) -> None:
    mean, spread = np.split(_wide(prediction), 2, axis=1)
    variance, d = np.exp(np.maximum(spread, lowest1[0])), mean - target
    dspread = (1 / variance - d**2 / variance**2) / 2 * np.exp(spread)
    dprediction[:] = np.concatenate([d / variance, dspread], axis=1) * scale1[0]


def row_square_sums(x: Array, sums: Array) -> None:
    sums[:] = np.square(_wide(x)).sum(axis=1)


def _wide(x: Array) -> Array:
    return x.astype(np.float64)
