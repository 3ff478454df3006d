from __future__ import annotations

import numpy as np

from mpizero.kernels.cpu import attention

DTYPES = (np.float32, np.float64)


def test_what_stands_beyond_the_query_has_no_influence():
    scores = np.random.default_rng(0).normal(size=(2, 9, 9)).astype(np.float32)
    spoiled, scale = scores.copy(), np.ones(1, np.float32)
    beyond = ~np.tri(9, dtype=bool)
    spoiled[:, beyond] = np.nan
    dprobs, dspoiled = scores.copy(), spoiled.copy()
    attention.causal_softmax(scores, scale)
    attention.causal_softmax(spoiled, scale)
    assert spoiled.tobytes() == scores.tobytes()
    assert not scores[:, beyond].any()
    attention.causal_softmax_backward(scores, dprobs, scale)
    attention.causal_softmax_backward(scores, dspoiled, scale)
    assert dspoiled.tobytes() == dprobs.tobytes()


def test_a_block_of_queries_has_the_bits_of_the_whole():
    scores = np.random.default_rng(2).normal(size=(3, 40, 40)).astype(np.float32)
    scale = np.ones(1, np.float32)
    block = np.ascontiguousarray(scores[:, 16:32, :32])
    attention.causal_softmax(scores, scale)
    attention.causal_softmax(block, scale)
    assert block.tobytes() == np.ascontiguousarray(scores[:, 16:32, :32]).tobytes()


def test_a_nan_is_seen_by_the_queries_that_see_its_key():
    scores = np.zeros((1, 6, 6), np.float32)
    scores[0, :, 3] = np.nan
    attention.causal_softmax(scores, np.ones(1, np.float32))
    assert np.isnan(scores[0]).any(axis=1).tolist() == [False, False, False, True, True, True]


def test_a_split_without_bias_keeps_every_bit():
    x, out = np.full((2, 4), -0.0, np.float32), np.zeros((1, 1, 1, 2, 4), np.float32)
    attention.split_heads(x, x[:0].reshape(-1), 0, 0, out)
    assert np.signbit(out).all()
