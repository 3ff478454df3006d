"""Compute the causal softmax and split rows into heads in NumPy, as a reference for the kernels."""

from __future__ import annotations

import numpy as np

from mpizero.types import Array


def _seen(queries: int, keys: int) -> Array:
    return np.tri(queries, keys, keys - queries, dtype=bool)


def causal_softmax(scores: Array, scale1: Array) -> None:
    """Replace ``scores`` by softmax(scale1[0] * scores) over the keys that each query sees.

    The arguments are those of :func:`mpizero.kernels.cpu.attention.causal_softmax`.
    """
    seen = _seen(*scores.shape[1:])
    for matrix in scores:
        for row, mask in zip(matrix, seen, strict=True):
            if mask.any():
                wide = row[mask].astype(np.float64) * scale1[0]
                shares = np.exp(wide - wide.max())
                row[mask] = shares / shares.sum()
            row[~mask] = 0


def causal_softmax_backward(probs: Array, dprobs: Array, scale1: Array) -> None:
    """Replace ``dprobs``, the gradient of the probabilities, by the gradient of the scores.

    ``probs`` are the probabilities that :func:`causal_softmax` wrote, with the same ``scale1``. The gradient is 0 for
    keys that a query does not see.
    """
    seen = _seen(*probs.shape[1:])
    dprobs[:, ~seen] = 0
    dots = (probs * dprobs).sum(axis=2, keepdims=True)
    dprobs[:] = np.where(seen, scale1[0] * probs * (dprobs - dots), 0)


def split_heads(x: Array, bias: Array, head: int, sample: int, out: Array) -> None:
    """Copy the features of some samples to ``out``, with the features of each head contiguous, and add ``bias``.

    The arguments are those of :func:`mpizero.kernels.cpu.attention.split_heads`.
    """
    kinds, _, heads, length, size = out.shape
    shifted = x + bias if bias.size else x
    apart = shifted.reshape(-1, length, kinds, x.shape[1] // (kinds * size), size)[:, :, :, head : head + heads]
    out[:, sample : sample + len(apart)] = apart.transpose(2, 0, 3, 1, 4)


def transposed_heads(x: Array, out: Array) -> None:
    """Copy ``x`` (samples, heads, length, size) to ``out`` (samples, heads, size, length).

    A matrix product with ``out`` then reads contiguous rows.
    """
    out[:] = x.swapaxes(-1, -2)
