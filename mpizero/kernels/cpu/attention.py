"""Compute the causal softmax of attention, for whole rows or tile by tile, and split rows into heads, on the CPU.

Only scores of keys that a query sees are read. :func:`causal_softmax` takes whole rows of scores. Ring attention
computes its softmax tile by tile (:func:`running_softmax`, :func:`known_softmax`).

A tile holds the scores of some queries of this rank and some keys: (samples, heads, queries, keys). Numbers of a query,
such as the maximum and the sum of its scores, are in arrays (samples, length, heads) for all queries of this rank; the
first query of the tile has index ``start`` in them. Query i of the tile sees the tile's keys 0 to i + ``offset``: no
key if this sum is negative, all keys if it is at least the index of the last key.
"""

from __future__ import annotations

from typing import Any

from mpizero.kernels.cpu.layers import SCRATCH, larger, row_dot, row_max, row_sum
from mpizero.kernels.elementary import exponential
from mpizero.kernels.formulas import rescaled, softmax_gradient, visible_keys, visible_keys_in_tile
from mpizero.kernels.jit import fetch_below, kernel
from mpizero.types import Array

# Exponentials are taken of whole vectors, as the few elements of a remainder would cost as much as the rest of a row;
# what lies beyond the keys seen is cleared after.
_WIDTH = 16
#: Places of a sequence whose values of one feature are gathered at once.
_UNROLLED = 8


@kernel("void(T[:,:,::1], const T[::1], T[::1])", scratch=SCRATCH)
def causal_softmax(scores: Array, scale1: Array, scratch: Array) -> None:
    """Replace ``scores`` by softmax(scale1[0] * scores) over the keys that each query sees.

    ``scores`` is (batch, queries, keys). The last query sees all keys, and every other query sees one key fewer than
    the next query. So with as many queries as keys, query i sees the keys 0 to i. With fewer queries than keys, the
    queries are the last ones of the sequence, for example the new tokens in generation. Scores of keys that a query
    does not see become 0, whatever they were before. ``scale1`` has one element, which is above 0.
    """
    batch, queries, keys = scores.shape
    scale = scale1[0]
    for b in range(batch):
        for query in range(queries):
            visible = visible_keys(query, queries, keys)
            softmax_of_first(scores[b, query], visible, scale, scratch)


@kernel("void(const T[:,:,::1], T[:,:,::1], const T[::1], T[::1])", scratch=SCRATCH)
def causal_softmax_backward(probs: Array, dprobs: Array, scale1: Array, scratch: Array) -> None:
    """Replace ``dprobs``, the gradient of the probabilities, by the gradient of the scores.

    ``probs`` are the probabilities that :func:`causal_softmax` wrote, with the same ``scale1``. The gradient is 0 for
    keys that a query does not see.
    """
    batch, queries, keys = probs.shape
    scale = scale1[0]
    for b in range(batch):
        for query in range(queries):
            visible = visible_keys(query, queries, keys)
            gradient_of_first(probs[b, query], dprobs[b, query], visible, scale, scratch)


def softmax_of_first(row: Any, visible: Any, scale: Any, scratch: Any) -> None:
    """Replace the first ``visible`` scores of a query by softmax(scale * scores), and the others by 0."""
    T = row.dtype.type  # noqa: N806
    if visible > 0:
        part = row[:visible]
        largest = row_max(part, scratch) * scale
        padded = row[: min(row.size, (visible + _WIDTH - 1) // _WIDTH * _WIDTH)]
        for j in range(padded.size):
            padded[j] = exponential(padded[j] * scale - largest, T)
        inverse = T(1) / row_sum(part, scratch)
        for j in range(padded.size):
            padded[j] *= inverse
    row[visible:] = T(0)


def gradient_of_first(probs: Any, dprobs: Any, visible: Any, scale: Any, scratch: Any) -> None:
    """Replace a query's ``dprobs`` by the gradient of its scores, which is 0 after the first ``visible`` scores."""
    T = probs.dtype.type  # noqa: N806
    dprobs[visible:] = T(0)
    p, dp = probs[:visible], dprobs[:visible]
    dot = row_dot(p, dp, scratch)
    for j in range(visible):
        dp[j] = softmax_gradient(p[j], dp[j], dot, scale)


@kernel("void(const T[:,::1], const T[::1], i8, i8, T[:,:,:,:,::1])")
def split_heads(x: Array, bias: Array, head: int, sample: int, out: Array) -> None:
    """Copy the features of some samples to ``out``, with the features of each head contiguous, and add ``bias``.

    Each row of ``x`` holds the features of one position of a sequence; there are ``length`` rows per sample. A row
    consists of ``kinds`` equal parts one after the other, for example queries, keys and values, and each part holds all
    heads. ``out`` is (kinds, samples, heads, length, size), where ``size`` is the number of features of a head. Head h
    of ``out`` is head ``head + h`` of ``x``; sample ``sample + s`` of ``out`` is sample s of ``x``; other samples of
    ``out`` do not change. ``bias`` is added to every row of ``x``; if it has no elements, nothing is added.
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
    """Copy ``x`` (samples, heads, length, size) to ``out`` (samples, heads, size, length).

    A matrix product with ``out`` then reads contiguous rows.
    """
    samples, heads, length, size = x.shape
    unrolled = length // _UNROLLED * _UNROLLED
    for s in range(samples):
        for h in range(heads):
            for start in range(0, unrolled, _UNROLLED):
                part = x[s, h, start : start + _UNROLLED]
                for d in range(size):
                    row = out[s, h, d, start : start + _UNROLLED]
                    for t in range(_UNROLLED):  # a constant, which unrolls the loop: twice as fast
                        row[t] = part[t, d]
            for d in range(size):
                for t in range(unrolled, length):
                    out[s, h, d, t] = x[s, h, t, d]


@kernel("void(T[:,:,:,::1], const T[::1], i8, i8, T[:,:,::1], T[:,:,::1], T[:,:,::1], T[::1])", scratch=SCRATCH)
def running_softmax(
    scores: Array, scale1: Array, offset: int, start: int, maxima: Array, sums: Array, factors: Array, scratch: Array
) -> None:
    """Replace scores by exp(scale1[0] * scores - maximum so far), and update maxima and sums (online softmax).

    ``scores`` is (samples, heads, queries, keys), a tile of all scores: some of this rank's queries and some keys.
    Query i of the tile sees the tile's keys 0 to i + ``offset``. Scores of other keys become 0. ``maxima`` and ``sums``
    (samples, length, heads) hold, for each query of this rank, the maximum of scale1[0] * scores and the sum of
    exp(scale1[0] * scores - maximum) over all tiles so far; they start from -inf and 0. The first query of the tile has
    index ``start`` in them. ``factors`` (samples, heads, queries) receives the factors by which sums over earlier tiles
    must be multiplied. Milakov and Gimelshein, 2018, algorithm 3.
    """
    T = scores.dtype.type  # noqa: N806
    samples, heads, queries, keys = scores.shape
    scale = scale1[0]
    for s in range(samples):
        for h in range(heads):
            for i in range(queries):
                visible = visible_keys_in_tile(i, offset, keys)
                factors[s, h, i] = T(1)
                if visible == 0:
                    scores[s, h, i] = T(0)
                    continue
                row = scores[s, h, i, :visible]
                for j in range(visible):
                    row[j] *= scale
                before = maxima[s, start + i, h]
                largest = larger(row_max(row, scratch), before)
                padded = scores[s, h, i, : min(keys, (visible + _WIDTH - 1) // _WIDTH * _WIDTH)]
                for j in range(padded.size):
                    padded[j] = exponential(padded[j] - largest, T)
                scores[s, h, i, visible:] = T(0)
                factor = exponential(before - largest, T)
                factors[s, h, i] = factor
                maxima[s, start + i, h] = largest
                sums[s, start + i, h] = rescaled(sums[s, start + i, h], factor, row_sum(row, scratch))


@kernel("void(T[:,:,:,::1], const T[::1], i8, i8, const T[:,:,::1], const T[:,:,::1])")
def known_softmax(scores: Array, scale1: Array, offset: int, start: int, maxima: Array, inverse_sums: Array) -> None:
    """Replace scores by probabilities, exp(scale1[0] * scores - maximum) / sum, with known maxima and sums.

    ``scores`` is (samples, heads, queries, keys), a tile of all scores: some of this rank's queries and some keys.
    Query i of the tile sees the tile's keys 0 to i + ``offset``. Scores of other keys become 0. ``maxima`` and
    ``inverse_sums`` (samples, length, heads) hold, for each query of this rank, the maximum of scale1[0] * scores and
    1 / (sum of exp(scale1[0] * scores - maximum)) over all tiles. The first query of the tile has index ``start`` in
    them.
    """
    T = scores.dtype.type  # noqa: N806
    samples, heads, queries, keys = scores.shape
    scale = scale1[0]
    for s in range(samples):
        for h in range(heads):
            for i in range(queries):
                visible = visible_keys_in_tile(i, offset, keys)
                largest, inverse = maxima[s, start + i, h], inverse_sums[s, start + i, h]
                row = scores[s, h, i, : min(keys, (visible + _WIDTH - 1) // _WIDTH * _WIDTH)]
                for j in range(row.size):
                    row[j] = exponential(row[j] * scale - largest, T) * inverse
                scores[s, h, i, visible:] = T(0)


@kernel("void(const T[:,:,:,::1], T[:,:,:,::1], const T[::1], i8, i8, const T[:,:,::1])")
def known_softmax_backward(probs: Array, dprobs: Array, scale1: Array, offset: int, start: int, dots: Array) -> None:
    """Replace ``dprobs``, the gradient of the probabilities of a tile, by the gradient of the scores.

    ``probs`` are the probabilities that :func:`known_softmax` wrote, with the same ``scale1``, ``offset`` and
    ``start``. ``dots`` (samples, length, heads) holds, for each query of this rank, the sum of probability * gradient
    over all keys. The gradient is 0 for keys that a query does not see.
    """
    T = probs.dtype.type  # noqa: N806
    samples, heads, queries, keys = probs.shape
    scale = scale1[0]
    for s in range(samples):
        for h in range(heads):
            for i in range(queries):
                visible = visible_keys_in_tile(i, offset, keys)
                dprobs[s, h, i, visible:] = T(0)
                p, dp, dot = probs[s, h, i, :visible], dprobs[s, h, i, :visible], dots[s, start + i, h]
                for j in range(visible):
                    dp[j] = softmax_gradient(p[j], dp[j], dot, scale)
