from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import attention
from tests.support.reference import attention as reference

DTYPES = (np.float32, np.float64)
SHAPES = [(0, 4, 4), (1, 1, 1), (2, 5, 5), (3, 17, 17), (2, 64, 64), (2, 3, 9), (2, 1, 130), (1, 6, 4), (1, 2, 4100)]


def tolerance(dtype):
    return {"rtol": 1e-5, "atol": 1e-6} if dtype is np.float32 else {"rtol": 1e-12, "atol": 1e-13}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_and_gradients_agree_with_the_oracle(shape, dtype):
    rng = np.random.default_rng(shape[2])
    scores, dprobs = (5 * rng.normal(size=(2, *shape))).astype(dtype)
    scale, wanted, dwanted = np.array([0.3], dtype), scores.copy(), dprobs.copy()
    attention.causal_softmax(scores, scale)
    reference.causal_softmax(wanted, scale)
    np.testing.assert_allclose(scores, wanted, **tolerance(dtype))
    attention.causal_softmax_backward(scores, dprobs, scale)
    reference.causal_softmax_backward(wanted, dwanted, scale)
    np.testing.assert_allclose(dprobs, dwanted, **tolerance(dtype))


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
    scale, probs, got, step = np.array([0.7]), scores.copy(), dprobs.copy(), 1e-6
    attention.causal_softmax(probs, scale)
    attention.causal_softmax_backward(probs, got, scale)
    for index in np.ndindex(scores.shape):
        sums = []
        for sign in (1, -1):
            moved = scores.copy()
            moved[index] += sign * step
            reference.causal_softmax(moved, scale)
            sums.append((moved * dprobs).sum())
        assert got[index] == pytest.approx((sums[0] - sums[1]) / (2 * step), abs=1e-8)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "heads", "size"), [(0, 2, 3), (1, 1, 1), (8, 2, 4), (37, 3, 5)])
def test_transposed_heads_are_those_of_the_oracle(length, heads, size, dtype):
    x = np.random.default_rng(3).normal(size=(2, heads, length, size)).astype(dtype)
    out, wanted = np.full((2, 2, heads, size, length), np.nan, dtype)
    attention.transposed_heads(x, out)
    reference.transposed_heads(x, wanted)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("kinds", "samples", "length"), [(3, 2, 7), (1, 1, 1), (2, 0, 4), (3, 1, 40)])
def test_split_heads_are_those_of_the_oracle(kinds, samples, length, biased, dtype):
    """Samples 1 and those after it, heads 2 and 3 of 5; what is not asked for stays as it is."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(samples * length, kinds * 5 * 6)).astype(dtype)
    bias = rng.normal(size=x.shape[1] if biased else 0).astype(dtype)
    out, wanted = np.full((2, kinds, samples + 2, 2, length, 6), 7, dtype)
    attention.split_heads(x, bias, 2, 1, out)
    reference.split_heads(x, bias, 2, 1, wanted)
    np.testing.assert_array_equal(out, wanted)


def test_a_split_without_bias_keeps_every_bit():
    x, out = np.full((2, 4), -0.0, np.float32), np.zeros((1, 1, 1, 2, 4), np.float32)
    attention.split_heads(x, x[:0].reshape(-1), 0, 0, out)
    assert np.signbit(out).all()
