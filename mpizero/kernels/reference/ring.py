"""Compute the softmax tile by tile, in NumPy."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def _seen(scores: Array, offset: int) -> Array:
    """Return which of a tile's keys (queries, keys) each query sees."""
    queries, keys = scores.shape[2:]
    return np.tri(queries, keys, offset, dtype=bool)


def _rows(state: Array, start: int, queries: int) -> Array:
    """View the rows of a tile in (samples, length, heads) as (samples, heads, queries)."""
    return state[:, start : start + queries].swapaxes(1, 2)


def running_softmax(
    scores: Array, scale1: Array, offset: int, start: int, maxima: Array, sums: Array, factors: Array
) -> None:
    """Replace scores by exp(scale * scores - maximum so far); bring maxima and sums forward."""
    seen = _seen(scores, offset)
    before, totals = (_rows(state, start, scores.shape[2]) for state in (maxima, sums))
    wide = np.where(seen, scores.astype(np.float64) * scale1[0], -np.inf)
    after = np.maximum(before, wide.max(axis=3, initial=-np.inf))
    touched = seen.any(axis=1)
    with np.errstate(invalid="ignore"):  # rows that see nothing yet have no maximum
        factors[:] = np.where(touched, np.exp(before - after), 1)
        scores[:] = np.where(seen, np.exp(wide - after[..., None]), 0)
    before[:] = after
    totals[:] = totals * factors + scores.sum(axis=3)


def known_softmax(scores: Array, scale1: Array, offset: int, start: int, maxima: Array, shares: Array) -> None:
    """Replace scores by probabilities, whose maxima and inverse sums are known."""
    largest, share = (_rows(state, start, scores.shape[2])[..., None] for state in (maxima, shares))
    with np.errstate(over="ignore", invalid="ignore"):  # of keys that are not seen
        scores[:] = np.where(_seen(scores, offset), np.exp(scores * scale1[0] - largest) * share, 0)


def known_softmax_backward(probs: Array, dprobs: Array, scale1: Array, offset: int, start: int, dots: Array) -> None:
    """Replace the gradient of the probabilities by that of the scores; it is 0 for keys that a query does not see."""
    dot = _rows(dots, start, probs.shape[2])[..., None]
    dprobs[:] = np.where(_seen(probs, offset), scale1[0] * (probs * (dprobs - dot)), 0)
