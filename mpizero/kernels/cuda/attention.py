"""Compute the causal softmax on the GPU, with a block of threads per query, and split rows into heads."""

from __future__ import annotations

import math

from mpizero.kernels.cuda._rows import MOST_THREADS, block_max, block_sum, larger
from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.kernels.formulas import softmax_gradient, visible_keys
from mpizero.kernels.special_functions import exponential
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
    """Replace ``dprobs``, the gradient of the probabilities, by the gradient of the scores.

    ``probs`` are the probabilities that :func:`causal_softmax` wrote, with the same ``scale1``. The gradient is 0 for
    keys that a query does not see.
    """
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


@kernel("void(const T[:,::1], const T[::1], i8, i8, T[:,:,:,:,::1])")
def split_heads(x: Array, bias: Array, head: int, sample: int, out: Array) -> None:
    """Copy the features of some samples to ``out``, with the features of each head contiguous, and add ``bias``.

    The arguments are those of :func:`mpizero.kernels.cpu.attention.split_heads`.
    """
    kinds, _, heads, length, size = out.shape
    rows, columns = x.shape
    for place in range(cuda.grid(1), rows * kinds * heads * size, cuda.gridsize(1)):
        d, rest = place % size, place // size
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
    for place in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        t, rest = place % length, place // length
        d, rest = rest % size, rest // size
        s, h = rest // heads, rest % heads
        out[s, h, d, t] = x[s, h, t, d]
