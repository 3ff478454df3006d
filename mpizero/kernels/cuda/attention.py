"""Causal softmax on the GPU, a block per query, where only keys that a query sees are read; transposes of heads."""

from __future__ import annotations

import math

from numba import cuda

from mpizero.kernels.cuda._rows import MOST_THREADS, block_max, block_sum, larger
from mpizero.kernels.cuda.launch import kernel
from mpizero.kernels.formulas.attention import softmax_gradient, visible_keys
from mpizero.kernels.formulas.elementary import exponential
from mpizero.types import Array


@kernel("void(T[:,:,::1], const T[::1])")
def causal_softmax(scores: Array, scale1: Array) -> None:
    """Replace scores (batch, queries, keys) by softmax(scale * scores) over the keys each query sees.

    The last query sees every key, each one before it one key fewer (with as many queries as keys: keys <= query;
    with fewer, the queries are the last ones, as in a block of rows or in generation). The other entries become 0,
    whatever they held. The scale is above 0.
    """
    T = scores.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, scores.dtype)
    batch, queries, keys = scores.shape
    scale, first, step = scale1[0], cuda.threadIdx.x, cuda.blockDim.x
    for place in range(cuda.blockIdx.x, batch * queries, cuda.gridDim.x):
        b, query = place // queries, place % queries
        seen = visible_keys(query, queries, keys)
        largest = T(-math.inf)
        for j in range(first, seen, step):
            largest = larger(scores[b, query, j] * scale, largest)
        largest = block_max(largest, shared)
        total = T(0)
        for j in range(first, seen, step):
            scores[b, query, j] = exponential(scores[b, query, j] * scale - largest, T)
            total += scores[b, query, j]
        total = block_sum(total, shared)
        share = T(1) / total if seen > 0 else T(0)
        for j in range(first, keys, step):
            scores[b, query, j] = scores[b, query, j] * share if j < seen else T(0)


@kernel("void(const T[:,:,::1], T[:,:,::1], const T[::1])")
def causal_softmax_backward(probs: Array, dprobs: Array, scale1: Array) -> None:
    """Replace the gradient of the probabilities by that of the scores; entries of unseen keys become 0."""
    T = probs.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, probs.dtype)
    batch, queries, keys = probs.shape
    first, step = cuda.threadIdx.x, cuda.blockDim.x
    for place in range(cuda.blockIdx.x, batch * queries, cuda.gridDim.x):
        b, query = place // queries, place % queries
        seen = visible_keys(query, queries, keys)
        total = T(0)
        for j in range(first, seen, step):
            total += probs[b, query, j] * dprobs[b, query, j]
        dot = block_sum(total, shared)
        for j in range(first, keys, step):
            gradient = softmax_gradient(probs[b, query, j], dprobs[b, query, j], dot, scale1[0])
            dprobs[b, query, j] = gradient if j < seen else T(0)


@kernel("void(const T[:,:,:,::1], i8, T[:,:,:,::1])")
def transposed_heads(x: Array, first: int, out: Array) -> None:
    """Write heads ``first`` and those after it of x (samples, length, all heads, size) transposed.

    ``out`` is (samples, heads, size, length): a product with it reads contiguous rows.
    """
    samples, heads, size, length = out.shape
    for place in range(cuda.grid(1), samples * heads * size * length, cuda.gridsize(1)):
        t, rest = place % length, place // length
        d, rest = rest % size, rest // size
        s, h = rest // heads, rest % heads
        out[s, h, d, t] = x[s, t, first + h, d]
