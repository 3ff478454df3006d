"""Compute the causal softmax of attention, and split rows into heads, in NumPy, as a reference for the kernels.

:func:`causal_softmax` has whole rows of scores. Ring attention computes its softmax tile by tile
(:func:`running_softmax`, :func:`known_softmax`).

A tile holds the scores of some queries of this rank and some keys: (samples, heads, queries, keys). Numbers of a query,
such as its maximum and its sum, are in arrays (samples, length, heads) for all queries of this rank; the first query of
the tile has index ``start`` in them. Query i of the tile sees the tile's keys 0 to i + ``offset``: no key if that is
negative, all keys if it is large.
"""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def _seen(queries: int, keys: int) -> Array:
    return np.tri(queries, keys, keys - queries, dtype=bool)


def causal_softmax(scores: Array, scale1: Array) -> None:
    seen = _seen(*scores.shape[1:])
    for matrix in scores:
        for row, mask in zip(matrix, seen, strict=True):
            if mask.any():
                wide = row[mask].astype(np.float64) * scale1[0]
                shares = np.exp(wide - wide.max())
                row[mask] = shares / shares.sum()
            row[~mask] = 0


def causal_softmax_backward(probs: Array, dprobs: Array, scale1: Array) -> None:
    seen = _seen(*probs.shape[1:])
    dprobs[:, ~seen] = 0
    dots = (probs * dprobs).sum(axis=2, keepdims=True)
    dprobs[:] = np.where(seen, scale1[0] * probs * (dprobs - dots), 0)


def split_heads(x: Array, bias: Array, head: int, sample: int, out: Array) -> None:
    kinds, _, heads, length, size = out.shape
    shifted = x + bias if bias.size else x
    apart = shifted.reshape(-1, length, kinds, x.shape[1] // (kinds * size), size)[:, :, :, head : head + heads]
    out[:, sample : sample + len(apart)] = apart.transpose(2, 0, 3, 1, 4)


def transposed_heads(x: Array, out: Array) -> None:
    out[:] = x.swapaxes(-1, -2)


def _seen_of_part(scores: Array, offset: int) -> Array:
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
    seen = _seen_of_part(scores, offset)
    before, totals = (_rows(state, start, scores.shape[2]) for state in (maxima, sums))
    wide = np.where(seen, scores.astype(np.float64) * scale1[0], -np.inf)
    after = np.maximum(before, wide.max(axis=3, initial=-np.inf))
    touched = seen.any(axis=1)
    with np.errstate(invalid="ignore"):  # rows that see nothing yet have no maximum
        factors[:] = np.where(touched, np.exp(before - after), 1)
        scores[:] = np.where(seen, np.exp(wide - after[..., None]), 0)
    before[:] = after
    totals[:] = totals * factors + scores.sum(axis=3)


def known_softmax(scores: Array, scale1: Array, offset: int, start: int, maxima: Array, inverse_sums: Array) -> None:
    largest, share = (_rows(state, start, scores.shape[2])[..., None] for state in (maxima, inverse_sums))
    with np.errstate(over="ignore", invalid="ignore"):  # of keys that are not seen
        scores[:] = np.where(_seen_of_part(scores, offset), np.exp(scores * scale1[0] - largest) * share, 0)


def known_softmax_backward(probs: Array, dprobs: Array, scale1: Array, offset: int, start: int, dots: Array) -> None:
    dot = _rows(dots, start, probs.shape[2])[..., None]
    dprobs[:] = np.where(_seen_of_part(probs, offset), scale1[0] * (probs * (dprobs - dot)), 0)
