"""Compute the causal softmax on the CPU, reading only scores that the mask leaves, and copy features to heads."""

from __future__ import annotations

from mpizero.kernels.compile import kernel
from mpizero.kernels.cpu._rows import SCRATCH, row_dot, row_max, row_sum
from mpizero.kernels.formulas.attention import softmax_gradient, visible_keys
from mpizero.kernels.formulas.elementary import exponential
from mpizero.kernels.prefetch import fetch_below
from mpizero.types import Array

# Exponentials are taken of whole vectors, as the few elements of a remainder would cost as much as the rest of a row;
# what lies beyond the keys seen is cleared after.
_WIDTH = 16
#: Places of a sequence whose values of one feature are gathered at once.
_PLACES = 8


@kernel("void(T[:,:,::1], const T[::1], T[::1])", scratch=SCRATCH)
def causal_softmax(scores: Array, scale1: Array, scratch: Array) -> None:
    """Replace scores (batch, queries, keys) by softmax(scale * scores) over the keys each query sees.

    The last query sees every key, each one before it one key fewer (with as many queries as keys: keys <= query;
    with fewer, the queries are the last ones, as in a block of rows or in generation). The other entries become 0,
    whatever they held. The scale is above 0.
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
            largest = row_max(row, scratch) * scale
            whole = scores[b, query, : min(keys, (seen + _WIDTH - 1) // _WIDTH * _WIDTH)]
            for j in range(whole.size):
                whole[j] = exponential(whole[j] * scale - largest, T)
            share = T(1) / row_sum(row, scratch)
            for j in range(whole.size):
                whole[j] *= share
            scores[b, query, seen:] = T(0)


@kernel("void(const T[:,:,::1], T[:,:,::1], const T[::1], T[::1])", scratch=SCRATCH)
def causal_softmax_backward(probs: Array, dprobs: Array, scale1: Array, scratch: Array) -> None:
    """Replace the gradient of the probabilities by that of the scores; it is 0 for keys that a query does not see."""
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


@kernel("void(const T[:,::1], const T[::1], i8, i8, T[:,:,:,:,::1])")
def split_heads(x: Array, bias: Array, head: int, sample: int, out: Array) -> None:
    """Copy ``x + bias`` of some samples, (samples * length, all features), to an array whose heads are contiguous.

    ``out`` is (kinds, samples, heads, length, size). Its heads are those of x from ``head`` on; the samples of x become
    its samples from ``sample`` on. A row of x holds the kinds (queries, keys, values) one after the other. ``bias`` has
    as many elements as a row of x, or none: then nothing is added.
    """
    kinds, _, heads, length, size = out.shape
    rows, columns = x.shape
    for row in range(rows):
        s, t = sample + row // length, row % length
        fetch_below(x, row, 0, columns)
        for kind in range(kinds):
            for h in range(heads):
                start = kind * (columns // kinds) + (head + h) * size
                part, target = x[row, start : start + size], out[kind, s, h, t]
                if bias.size:
                    shift = bias[start : start + size]
                    for d in range(size):
                        target[d] = part[d] + shift[d]
                else:
                    for d in range(size):
                        target[d] = part[d]


@kernel("void(const T[:,:,:,::1], T[:,:,:,::1])")
def transposed_heads(x: Array, out: Array) -> None:
    """Write x (samples, heads, length, size) transposed, (samples, heads, size, length).

    So a matrix product with the result reads contiguous rows.
    """
    samples, heads, length, size = x.shape
    whole = length // _PLACES * _PLACES
    for s in range(samples):
        for h in range(heads):
            for start in range(0, whole, _PLACES):
                part = x[s, h, start : start + _PLACES]
                for d in range(size):
                    row = out[s, h, d, start : start + _PLACES]
                    for t in range(_PLACES):  # a constant, which unrolls the loop: twice as fast
                        row[t] = part[t, d]
            for d in range(size):
                for t in range(whole, length):
                    out[s, h, d, t] = x[s, h, t, d]
