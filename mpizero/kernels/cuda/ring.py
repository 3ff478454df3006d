"""Compute the causal softmax of ring attention tile by tile, on the GPU: a block of threads per query.

A tile holds the scores of some queries of this rank and some keys: (samples, heads, queries, keys). Numbers of a query,
such as its maximum and its sum, are in arrays (samples, length, heads) for all queries of this rank; the first query of
the tile has index ``start`` in them. Query i of the tile sees the tile's keys 0 to i + ``offset``: no key if that is
negative, all keys if it is large.
"""

from __future__ import annotations

import math

from mpizero.kernels.cuda._rows import MOST_THREADS, block_max, block_sum, larger
from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.kernels.formulas import keys_seen, rescaled, softmax_gradient
from mpizero.kernels.special_functions import exponential
from mpizero.types import Array


@kernel("void(T[:,:,:,::1], const T[::1], i8, i8, T[:,:,::1], T[:,:,::1], T[:,:,::1])")
def running_softmax(
    scores: Array, scale1: Array, offset: int, start: int, maxima: Array, sums: Array, factors: Array
) -> None:
    """Replace scores by exp(scale1[0] * scores - maximum so far), and update maxima and sums (online softmax).

    The arguments are those of :func:`mpizero.kernels.cpu.ring.running_softmax`.
    """
    T = scores.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, scores.dtype)
    samples, heads, queries, keys = scores.shape
    scale, first, step = scale1[0], cuda.threadIdx.x, cuda.blockDim.x
    for place in range(cuda.blockIdx.x, samples * heads * queries, cuda.gridDim.x):
        s, h, i = place // (heads * queries), place // queries % heads, place % queries
        seen = keys_seen(i, offset, keys)
        before = maxima[s, start + i, h]
        largest = T(-math.inf)
        for j in range(first, seen, step):
            largest = larger(scores[s, h, i, j] * scale, largest)
        largest = larger(block_max(largest, shared), before)
        total = T(0)
        for j in range(first, keys, step):
            weight = exponential(scores[s, h, i, j] * scale - largest, T) if j < seen else T(0)
            scores[s, h, i, j] = weight
            total += weight
        total = block_sum(total, shared)
        if first == 0:
            factor = exponential(before - largest, T) if seen > 0 else T(1)
            factors[s, h, i] = factor
            maxima[s, start + i, h] = largest
            sums[s, start + i, h] = rescaled(sums[s, start + i, h], factor, total)


@kernel("void(T[:,:,:,::1], const T[::1], i8, i8, const T[:,:,::1], const T[:,:,::1])")
def known_softmax(scores: Array, scale1: Array, offset: int, start: int, maxima: Array, shares: Array) -> None:
    """Replace scores by probabilities, exp(scale1[0] * scores - maximum) * share, with known maxima and shares.

    The arguments are those of :func:`mpizero.kernels.cpu.ring.known_softmax`.
    """
    T = scores.dtype.type  # noqa: N806
    samples, heads, queries, keys = scores.shape
    scale, first, step = scale1[0], cuda.threadIdx.x, cuda.blockDim.x
    for place in range(cuda.blockIdx.x, samples * heads * queries, cuda.gridDim.x):
        s, h, i = place // (heads * queries), place // queries % heads, place % queries
        seen = keys_seen(i, offset, keys)
        largest, share = maxima[s, start + i, h], shares[s, start + i, h]
        for j in range(first, keys, step):
            weight = exponential(scores[s, h, i, j] * scale - largest, T) * share if j < seen else T(0)
            scores[s, h, i, j] = weight


@kernel("void(const T[:,:,:,::1], T[:,:,:,::1], const T[::1], i8, i8, const T[:,:,::1])")
def known_softmax_backward(probs: Array, dprobs: Array, scale1: Array, offset: int, start: int, dots: Array) -> None:
    """Replace ``dprobs``, the gradient of the probabilities of a tile, by the gradient of the scores.

    The arguments are those of :func:`mpizero.kernels.cpu.ring.known_softmax_backward`.
    """
    T = probs.dtype.type  # noqa: N806
    samples, heads, queries, keys = probs.shape
    scale, first, step = scale1[0], cuda.threadIdx.x, cuda.blockDim.x
    for place in range(cuda.blockIdx.x, samples * heads * queries, cuda.gridDim.x):
        s, h, i = place // (heads * queries), place // queries % heads, place % queries
        seen = keys_seen(i, offset, keys)
        dot = dots[s, start + i, h]
        for j in range(first, keys, step):
            gradient = softmax_gradient(probs[s, h, i, j], dprobs[s, h, i, j], dot, scale)
            dprobs[s, h, i, j] = gradient if j < seen else T(0)
