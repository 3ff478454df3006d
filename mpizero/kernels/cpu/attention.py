"""Causal softmax on the CPU: only keys that a query sees are read."""

from __future__ import annotations

from mpizero.kernels.compile import kernel
from mpizero.kernels.cpu._rows import SCRATCH, row_dot, row_max, row_sum
from mpizero.kernels.formulas.attention import softmax_gradient, visible_keys
from mpizero.kernels.formulas.elementary import exponential
from mpizero.types import Array

# Exponentials are taken of whole vectors, as the few elements of a remainder would cost as much as the rest of a row;
# what lies beyond the keys seen is cleared after.
_WIDTH = 16


@kernel("void(T[:,:,::1], const T[::1], T[::1])", scratch=SCRATCH)
def causal_softmax(scores: Array, scale1: Array, scratch: Array) -> None:
    """Replace scores (batch, queries, keys) by softmax(scale * scores) over the keys each query sees.

    The last query sees every key, each one before it one key fewer (with as many queries as keys: keys <= query;
    with fewer, the queries are the last ones, as in a block of rows or in generation). The other entries become 0,
    whatever they held.
    """
    T = scores.dtype.type  # noqa: N806
    batch, queries, keys = scores.shape
    scale = scale1[0]
    for b in range(batch):
        for query in range(queries):
            seen = visible_keys(query, queries, keys)
            if seen == 0:
                scores[b, query] = T(0)
                continue
            row = scores[b, query, :seen]
            for j in range(seen):
                row[j] *= scale
            largest = row_max(row, scratch)
            whole = scores[b, query, : min(keys, (seen + _WIDTH - 1) // _WIDTH * _WIDTH)]
            for j in range(whole.size):
                whole[j] = exponential(whole[j] - largest, T)
            scores[b, query, seen:] = T(0)
            share = T(1) / row_sum(row, scratch)
            for j in range(seen):
                row[j] *= share


@kernel("void(const T[:,:,::1], T[:,:,::1], const T[::1], T[::1])", scratch=SCRATCH)
def causal_softmax_backward(probs: Array, dprobs: Array, scale1: Array, scratch: Array) -> None:
    """Replace the gradient of the probabilities by that of the scores; entries of unseen keys become 0."""
    T = probs.dtype.type  # noqa: N806
    batch, queries, keys = probs.shape
    scale = scale1[0]
    for b in range(batch):
        for query in range(queries):
            seen = visible_keys(query, queries, keys)
            dprobs[b, query, seen:] = T(0)
            p, dp = probs[b, query, :seen], dprobs[b, query, :seen]
            dot = row_dot(p, dp, scratch)
            for j in range(seen):
                dp[j] = softmax_gradient(p[j], dp[j], dot, scale)
