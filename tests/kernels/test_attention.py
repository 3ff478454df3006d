from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import attention
from tests.nn.checks import central_difference
from tests.support.reference import attention as reference

DTYPES = (np.float32, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_stands_beyond_the_query_has_no_influence(dtype):
    scores = np.random.default_rng(0).normal(size=(2, 9, 9)).astype(dtype)
    spoiled, scale = scores.copy(), np.ones(1, dtype)
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


def test_gradient_is_the_limit_of_differences():
    rng = np.random.default_rng(1)
    scores, dprobs = rng.normal(size=(2, 1, 4, 5))
    scale, probs, got = np.array([0.7]), scores.copy(), dprobs.copy()
    attention.causal_softmax(probs, scale)
    attention.causal_softmax_backward(probs, got, scale)

    def value():
        mixed = scores.copy()
        reference.causal_softmax(mixed, scale)
        return (mixed * dprobs).sum()

    np.testing.assert_allclose(got, central_difference(value, scores), atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_queries_has_the_bits_of_the_whole(dtype):
    scores = np.random.default_rng(2).normal(size=(3, 40, 40)).astype(dtype)
    scale = np.ones(1, dtype)
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
