"""Compute the causal softmax of attention, for whole rows or tile by tile, and split rows into heads, on the GPU.

Each block of threads computes one query. :func:`causal_softmax` takes whole rows of scores. Ring attention computes its
softmax tile by tile (:func:`running_softmax`, :func:`known_softmax`).

A tile holds the scores of some queries of this rank and some keys: (samples, heads, queries, keys). Numbers of a query,
such as the maximum and the sum of its scores, are in arrays (samples, length, heads) for all queries of this rank; the
first query of the tile has index ``start`` in them. Query i of the tile sees the tile's keys 0 to i + ``offset``: no
key if this sum is negative, all keys if it is at least the index of the last key.
"""

from __future__ import annotations

import math

from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.kernels.cuda.layers import MOST_THREADS, block_max, block_sum, larger
from mpizero.kernels.elementary import exponential
from mpizero.kernels.formulas import rescaled, softmax_gradient, visible_keys, visible_keys_in_tile
from mpizero.types import Array


@kernel("void(T[:,:,::1], const T[::1])")
def causal_softmax(scores: Array, scale1: Array) -> None:
    """Replace ``scores`` by softmax(scale1[0] * scores) over the keys that each query sees.

    The arguments are those of :func:`mpizero.kernels.cpu.attention.causal_softmax`.
    """
    T = scores.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, scores.dtype)
    batch, queries, keys = scores.shape
    scale, first, step = scale1[0], cuda.threadIdx.x, cuda.blockDim.x
    for index in range(cuda.blockIdx.x, batch * queries, cuda.gridDim.x):
        b, query = index // queries, index % queries
        visible = visible_keys(query, queries, keys)
        largest = T(-math.inf)
        for j in range(first, visible, step):
            largest = larger(scores[b, query, j] * scale, largest)
        largest = block_max(largest, shared)
        total = T(0)
        for j in range(first, visible, step):
            scores[b, query, j] = exponential(scores[b, query, j] * scale - largest, T)
            total += scores[b, query, j]
        total = block_sum(total, shared)
        inverse = T(1) / total if visible > 0 else T(0)
        for j in range(first, keys, step):
            scores[b, query, j] = scores[b, query, j] * inverse if j < visible else T(0)


@kernel("void(const T[:,:,::1], T[:,:,::1], const T[::1])")
def causal_softmax_backward(probs: Array, dprobs: Array, scale1: Array) -> None:
    """Replace ``dprobs``, the gradient of the probabilities, by the gradient of the scores.

    ``probs`` are the probabilities that :func:`causal_softmax` wrote, with the same ``scale1``. The gradient is 0 for
    keys that a query does not see.
    """
    T = probs.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, probs.dtype)
    batch, queries, keys = probs.shape
    first, step = cuda.threadIdx.x, cuda.blockDim.x
    for index in range(cuda.blockIdx.x, batch * queries, cuda.gridDim.x):
        b, query = index // queries, index % queries
        visible = visible_keys(query, queries, keys)
        total = T(0)
        for j in range(first, visible, step):
            total += probs[b, query, j] * dprobs[b, query, j]
        dot = block_sum(total, shared)
        for j in range(first, keys, step):
            gradient = softmax_gradient(probs[b, query, j], dprobs[b, query, j], dot, scale1[0])
            dprobs[b, query, j] = gradient if j < visible else T(0)


@kernel("void(const T[:,::1], const T[::1], i8, i8, T[:,:,:,:,::1])")
def split_heads(x: Array, bias: Array, head: int, sample: int, out: Array) -> None:
    """Copy the features of some samples to ``out``, with the features of each head contiguous, and add ``bias``.

    The arguments are those of :func:`mpizero.kernels.cpu.attention.split_heads`.
    """
    kinds, _, heads, length, size = out.shape
    rows, columns = x.shape
    for index in range(cuda.grid(1), rows * kinds * heads * size, cuda.gridsize(1)):
        d, rest = index % size, index // size
        h, rest = rest % heads, rest // heads
        kind, row = rest % kinds, rest // kinds
        column = kind * (columns // kinds) + (head + h) * size + d
        value = x[row, column] + bias[column] if bias.size > 0 else x[row, column]
        out[kind, sample + row // length, h, row % length, d] = value


@kernel("void(const T[:,:,:,::1], T[:,:,:,::1])")
def transposed_heads(x: Array, out: Array) -> None:
    """Copy ``x`` (samples, heads, length, size) to ``out`` (samples, heads, size, length).

    A matrix product with ``out`` then reads contiguous rows.
    """
    samples, heads, length, size = x.shape
    for index in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        t, rest = index % length, index // length
        d, rest = rest % size, rest // size
        s, h = rest // heads, rest % heads
        out[s, h, d, t] = x[s, h, t, d]


@kernel("void(T[:,:,:,::1], const T[::1], i8, i8, T[:,:,::1], T[:,:,::1], T[:,:,::1])")
def running_softmax(
    scores: Array, scale1: Array, offset: int, start: int, maxima: Array, sums: Array, factors: Array
) -> None:
    """Replace scores by exp(scale1[0] * scores - maximum so far), and update maxima and sums (online softmax).

    The arguments are those of :func:`mpizero.kernels.cpu.attention.running_softmax`.
    """
    T = scores.dtype.type  # noqa: N806
    shared = cuda.shared.array(MOST_THREADS, scores.dtype)
    samples, heads, queries, keys = scores.shape
    scale, first, step = scale1[0], cuda.threadIdx.x, cuda.blockDim.x
    for index in range(cuda.blockIdx.x, samples * heads * queries, cuda.gridDim.x):
        s, h, i = index // (heads * queries), index // queries % heads, index % queries
        visible = visible_keys_in_tile(i, offset, keys)
        before = maxima[s, start + i, h]
        largest = T(-math.inf)
        for j in range(first, visible, step):
            largest = larger(scores[s, h, i, j] * scale, largest)
        largest = larger(block_max(largest, shared), before)
        total = T(0)
        for j in range(first, keys, step):
            weight = exponential(scores[s, h, i, j] * scale - largest, T) if j < visible else T(0)
            scores[s, h, i, j] = weight
            total += weight
        total = block_sum(total, shared)
        if first == 0:
            factor = exponential(before - largest, T) if visible > 0 else T(1)
            factors[s, h, i] = factor
            maxima[s, start + i, h] = largest
            sums[s, start + i, h] = rescaled(sums[s, start + i, h], factor, total)


@kernel("void(T[:,:,:,::1], const T[::1], i8, i8, const T[:,:,::1], const T[:,:,::1])")
def known_softmax(scores: Array, scale1: Array, offset: int, start: int, maxima: Array, inverse_sums: Array) -> None:
    """Replace scores by probabilities, exp(scale1[0] * scores - maximum) / sum, with known maxima and sums.

    The arguments are those of :func:`mpizero.kernels.cpu.attention.known_softmax`.
    """
    T = scores.dtype.type  # noqa: N806
    samples, heads, queries, keys = scores.shape
    scale, first, step = scale1[0], cuda.threadIdx.x, cuda.blockDim.x
    for index in range(cuda.blockIdx.x, samples * heads * queries, cuda.gridDim.x):
        s, h, i = index // (heads * queries), index // queries % heads, index % queries
        visible = visible_keys_in_tile(i, offset, keys)
        largest, inverse = maxima[s, start + i, h], inverse_sums[s, start + i, h]
        for j in range(first, keys, step):
            weight = exponential(scores[s, h, i, j] * scale - largest, T) * inverse if j < visible else T(0)
            scores[s, h, i, j] = weight


@kernel("void(const T[:,:,:,::1], T[:,:,:,::1], const T[::1], i8, i8, const T[:,:,::1])")
def known_softmax_backward(probs: Array, dprobs: Array, scale1: Array, offset: int, start: int, dots: Array) -> None:
    """Replace ``dprobs``, the gradient of the probabilities of a tile, by the gradient of the scores.

    The arguments are those of :func:`mpizero.kernels.cpu.attention.known_softmax_backward`.
    """
    T = probs.dtype.type  # noqa: N806
    samples, heads, queries, keys = probs.shape
    scale, first, step = scale1[0], cuda.threadIdx.x, cuda.blockDim.x
    for index in range(cuda.blockIdx.x, samples * heads * queries, cuda.gridDim.x):
        s, h, i = index // (heads * queries), index // queries % heads, index % queries
        visible = visible_keys_in_tile(i, offset, keys)
        dot = dots[s, start + i, h]
        for j in range(first, keys, step):
            gradient = softmax_gradient(probs[s, h, i, j], dprobs[s, h, i, j], dot, scale)
            dprobs[s, h, i, j] = gradient if j < visible else T(0)
