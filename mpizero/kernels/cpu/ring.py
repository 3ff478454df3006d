"""Compute the causal softmax of ring attention tile by tile, on the CPU.

A tile holds the scores of some queries of this rank and some keys: (samples, heads, queries, keys). Numbers of a query,
such as its maximum and its sum, are in arrays (samples, length, heads) for all queries of this rank; the first query of
the tile has index ``start`` in them. Query i of the tile sees the tile's keys 0 to i + ``offset``: no key if that is
negative, all keys if it is large.
"""

from __future__ import annotations

from mpizero.kernels.cpu._rows import SCRATCH, larger, row_max, row_sum
from mpizero.kernels.formulas import keys_seen, rescaled, softmax_gradient
from mpizero.kernels.jit import kernel
from mpizero.kernels.special_functions import exponential
from mpizero.types import Array

# Exponentials are taken of whole vectors, as the few elements of a remainder would cost as much as the rest of a row;
# what lies beyond the keys seen is cleared after.
_WIDTH = 16


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
                seen = keys_seen(i, offset, keys)
                factors[s, h, i] = T(1)
                if seen == 0:
                    scores[s, h, i] = T(0)
                    continue
                row = scores[s, h, i, :seen]
                for j in range(seen):
                    row[j] *= scale
                before = maxima[s, start + i, h]
                largest = larger(row_max(row, scratch), before)
                whole = scores[s, h, i, : min(keys, (seen + _WIDTH - 1) // _WIDTH * _WIDTH)]
                for j in range(whole.size):
                    whole[j] = exponential(whole[j] - largest, T)
                scores[s, h, i, seen:] = T(0)
                factor = exponential(before - largest, T)
                factors[s, h, i] = factor
                maxima[s, start + i, h] = largest
                sums[s, start + i, h] = rescaled(sums[s, start + i, h], factor, row_sum(row, scratch))


@kernel("void(T[:,:,:,::1], const T[::1], i8, i8, const T[:,:,::1], const T[:,:,::1])")
def known_softmax(scores: Array, scale1: Array, offset: int, start: int, maxima: Array, shares: Array) -> None:
    """Replace scores by probabilities, exp(scale1[0] * scores - maximum) * share, with known maxima and shares.

    ``scores`` is (samples, heads, queries, keys), a tile of all scores: some of this rank's queries and some keys.
    Query i of the tile sees the tile's keys 0 to i + ``offset``. Scores of other keys become 0. ``maxima`` and
    ``shares`` (samples, length, heads) hold, for each query of this rank, the maximum of scale1[0] * scores and 1 /
    (sum of exp(scale1[0] * scores - maximum)) over all tiles. The first query of the tile has index ``start`` in them.
    """
    T = scores.dtype.type  # noqa: N806
    samples, heads, queries, keys = scores.shape
    scale = scale1[0]
    for s in range(samples):
        for h in range(heads):
            for i in range(queries):
                seen = keys_seen(i, offset, keys)
                largest, share = maxima[s, start + i, h], shares[s, start + i, h]
                row = scores[s, h, i, : min(keys, (seen + _WIDTH - 1) // _WIDTH * _WIDTH)]
                for j in range(row.size):
                    row[j] = exponential(row[j] * scale - largest, T) * share
                scores[s, h, i, seen:] = T(0)


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
                seen = keys_seen(i, offset, keys)
                dprobs[s, h, i, seen:] = T(0)
                p, dp, dot = probs[s, h, i, :seen], dprobs[s, h, i, :seen], dots[s, start + i, h]
                for j in range(seen):
                    dp[j] = softmax_gradient(p[j], dp[j], dot, scale)
