from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import attention

DTYPES = (np.float32, np.float64)


def tile(shape, dtype):
    """Scores, and the state of one query more on either side, of which the tile's must be touched alone."""
    samples, heads, queries, keys, offset = shape
    rng = np.random.default_rng(keys)
    scores = (5 * rng.normal(size=(samples, heads, queries, keys))).astype(dtype)
    maxima = rng.normal(size=(samples, queries + 2, heads)).astype(dtype)
    maxima[:, ::2] = -np.inf
    sums = np.where(np.isinf(maxima), 0, 3).astype(dtype)
    return scores, np.array([0.3], dtype), offset, maxima, sums


def test_scores_far_apart_neither_overflow_nor_vanish():
    """The running maximum moves by thousands from tile to tile, either way."""
    rows = np.array([[-3000.0, -2999.0], [4000.0, 3999.0], [1.0, 4000.0]], np.float32)
    maxima, sums, factors = (
        np.full((1, 1, 1), -np.inf, np.float32),
        np.zeros((1, 1, 1), np.float32),
        np.empty((1, 1, 1), np.float32),
    )
    for row in rows:
        attention.running_softmax(row.reshape(1, 1, 1, 2).copy(), np.ones(1, np.float32), 1, 0, maxima, sums, factors)
    assert maxima.item() == 4000
    assert sums.item() == pytest.approx(2 + np.exp(-1), rel=1e-6)


def test_what_a_query_does_not_see_has_no_influence():
    scores, scale, offset, maxima, sums = tile((2, 2, 9, 9, 2), np.float32)
    maxima[:], unseen = 1, ~np.tri(9, 9, 2, dtype=bool)
    spoiled = scores.copy()
    spoiled[..., unseen] = np.nan
    results = []
    for values in (scores, spoiled):
        p, m, s, factors, known, dp = (
            values.copy(),
            maxima.copy(),
            sums.copy(),
            sums[:, 1:10].swapaxes(1, 2).copy(),
            *(values.copy() for _ in range(2)),
        )
        attention.running_softmax(p, scale, offset, 1, m, s, factors)
        attention.known_softmax(known, scale, offset, 1, maxima, sums)
        attention.known_softmax_backward(p, dp, scale, offset, 1, sums)
        results.append((p, m, s, factors, known, dp))
        assert not any(a[..., unseen].any() for a in (p, known, dp))
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_nan_is_seen_by_the_queries_that_see_its_key():
    scores = np.zeros((1, 1, 6, 6), np.float32)
    scores[..., 3] = np.nan
    maxima, sums = np.full((1, 6, 1), -np.inf, np.float32), np.zeros((1, 6, 1), np.float32)
    attention.running_softmax(scores, np.ones(1, np.float32), 0, 0, maxima, sums, np.empty((1, 1, 6), np.float32))
    assert np.isnan(sums[0, :, 0]).tolist() == [False, False, False, True, True, True]
