"""Compute losses of single elements and their gradients, and sums of squares of rows, in NumPy."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def absolute_error(prediction: Array, target: Array, losses: Array) -> None:
    """Write the absolute difference of each element to ``losses``."""
    losses[:] = np.abs(_wide(prediction) - _wide(target))


def absolute_error_backward(prediction: Array, target: Array, scale1: Array, dprediction: Array) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dprediction``."""
    dprediction[:] = np.sign(_wide(prediction) - _wide(target)) * scale1[0]


def huber(prediction: Array, target: Array, delta1: Array, losses: Array) -> None:
    """Write the Huber loss of each element to ``losses``; ``delta1[0]`` is the error where its straight part begins."""
    size, delta = np.abs(_wide(prediction) - _wide(target)), float(delta1[0])
    losses[:] = np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))


def huber_backward(prediction: Array, target: Array, delta1: Array, scale1: Array, dprediction: Array) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dprediction``."""
    dprediction[:] = np.clip(_wide(prediction) - _wide(target), -delta1[0], delta1[0]) * scale1[0]


def binary_cross_entropy(logits: Array, targets: Array, pos_weight: Array, losses: Array) -> None:
    """Write the cross-entropy of each logit's sigmoid to ``losses``.

    Arrays are (rows, columns). ``pos_weight`` has, for each column, the factor on the loss of a target of 1.
    """
    x, t = _wide(logits), _wide(targets)
    losses[:] = pos_weight * t * np.logaddexp(0, -x) + (1 - t) * np.logaddexp(0, x)


def binary_cross_entropy_backward(
    logits: Array, targets: Array, pos_weight: Array, scale1: Array, dlogits: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dlogits``."""
    x, t = _wide(logits), _wide(targets)
    dlogits[:] = ((1 - t) * np.exp(-np.logaddexp(0, -x)) - pos_weight * t * np.exp(-np.logaddexp(0, x))) * scale1[0]


def gaussian_likelihood(prediction: Array, target: Array, lowest1: Array, losses: Array) -> None:
    """Write the negative logarithm of each target's normal density, without its constant, to ``losses``.

    ``target`` and ``losses`` are (rows, columns). ``prediction`` is (rows, 2 * columns): the means, then the logarithms
    of the variances, which count as ``lowest1[0]`` where they are below it.
    """
    mean, spread = np.split(_wide(prediction), 2, axis=1)
    variance = np.exp(np.maximum(spread, lowest1[0]))
    losses[:] = (np.log(variance) + (mean - target) ** 2 / variance) / 2


def gaussian_likelihood_backward(
    prediction: Array, target: Array, lowest1: Array, scale1: Array, dprediction: Array
) -> None:
    """Write ``scale1[0]`` times the gradient of the sum of losses to ``dprediction`` (rows, 2 * columns)."""
    mean, spread = np.split(_wide(prediction), 2, axis=1)
    variance, d = np.exp(np.maximum(spread, lowest1[0])), mean - target
    dspread = (1 / variance - d**2 / variance**2) / 2 * np.exp(spread)
    dprediction[:] = np.concatenate([d / variance, dspread], axis=1) * scale1[0]


def row_square_sums(x: Array, sums: Array) -> None:
    """Write the sum of the squares of each row of ``x``, computed in float64, to ``sums``."""
    sums[:] = np.square(_wide(x)).sum(axis=1)


def _wide(x: Array) -> Array:
    return x.astype(np.float64)
