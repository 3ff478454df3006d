"""Compute the causal softmax of ring attention tile by tile, in NumPy, as a reference for the kernels.

A tile holds the scores of some queries of this rank and some keys: (samples, heads, queries, keys). Numbers of a query,
such as its maximum and its sum, are in arrays (samples, length, heads) for all queries of this rank; the first query of
the tile has index ``start`` in them. Query i of the tile sees the tile's keys 0 to i + ``offset``: no key if that is
negative, all keys if it is large.
"""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def _seen(scores: Array, offset: int) -> Array:
    """Return a bool array (queries, keys): whether each query of a tile sees each key."""
    queries, keys = scores.shape[2:]
    return np.tri(queries, keys, offset, dtype=bool)


def _rows(state: Array, start: int, queries: int) -> Array:
    """Return a view (samples, heads, queries) of the numbers in ``state`` that belong to the queries of a tile.

    ``state`` is (samples, length, heads); the tile's queries have the indices from ``start`` on.
    """
    return state[:, start : start + queries].swapaxes(1, 2)


def running_softmax(
    scores: Array, scale1: Array, offset: int, start: int, maxima: Array, sums: Array, factors: Array
) -> None:
    """Replace scores by exp(scale1[0] * scores - maximum so far), and update maxima and sums (online softmax).

    The arguments are those of :func:`mpizero.kernels.cpu.ring.running_softmax`.
    """
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
    """Replace scores by probabilities, exp(scale1[0] * scores - maximum) * share, with known maxima and shares.

    The arguments are those of :func:`mpizero.kernels.cpu.ring.known_softmax`.
    """
    largest, share = (_rows(state, start, scores.shape[2])[..., None] for state in (maxima, shares))
    with np.errstate(over="ignore", invalid="ignore"):  # of keys that are not seen
        scores[:] = np.where(_seen(scores, offset), np.exp(scores * scale1[0] - largest) * share, 0)


def known_softmax_backward(probs: Array, dprobs: Array, scale1: Array, offset: int, start: int, dots: Array) -> None:
    """Replace ``dprobs``, the gradient of the probabilities of a tile, by the gradient of the scores.

    The arguments are those of :func:`mpizero.kernels.cpu.ring.known_softmax_backward`.
    """
    dot = _rows(dots, start, probs.shape[2])[..., None]
    dprobs[:] = np.where(_seen(probs, offset), scale1[0] * (probs * (dprobs - dot)), 0)
