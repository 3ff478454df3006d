"""Compute causal attention by the kernels of :mod:`mpizero.kernels.attention`, in this rank's threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpizero.kernels.jit import parts_of, run_tasks
from mpizero.kernels.matmul import threads_for
from mpizero.nn.arrays import vector
from mpizero.types import Array


class Heads(NamedTuple):
    """Say where the queries, keys and values of all heads lie in an array.

    Attributes
    ----------
    qkv : Array
        The array: (samples, length, 3, heads, size), or (3, samples, heads, length, size) with each head contiguous.
    samples, heads, length, size : int
        Numbers of samples, heads, positions and features of a head.
    steps : tuple of int
        How many elements lie between queries and keys, between samples, between heads and between positions.
    """

    qkv: Array
    samples: int
    heads: int
    length: int
    size: int
    steps: tuple[int, int, int, int]

    @classmethod
    def of_rows(cls, qkv: Array, heads: int) -> Heads:
        """Describe ``qkv`` (samples, length, 3 dim), the result of a linear map."""
        samples, length, width = qkv.shape
        dim = width // 3
        return cls(qkv, samples, heads, length, dim // heads, (dim, length * width, dim // heads, width))

    @classmethod
    def of_heads(cls, apart: Array) -> Heads:
        """Describe ``apart`` (3, samples, heads, length, size)."""
        _, samples, heads, length, size = apart.shape
        head = length * size
        return cls(apart, samples, heads, length, size, (samples * heads * head, heads * head, head, size))

    @property
    def pairs(self) -> int:
        """Number of heads of all samples."""
        return self.samples * self.heads

    @property
    def scores(self) -> int:
        """Number of scores of one head."""
        return self.length * self.length

    def geometry(self) -> Array:
        """Return what the kernels are told of the array."""
        return np.array([self.heads, self.length, self.size, *self.steps], np.int64)

    def room(self, count: int) -> Array:
        """Return an uninitialized array of ``count`` elements."""
        return np.empty(count, self.qkv.dtype)

    def memory(self) -> Array:
        """Return the temporary memory that a kernel needs."""
        from mpizero.kernels.attention import memory_size

        return self.room(memory_size(self.length, self.size, self.qkv.itemsize))

    def run(self, task: Callable[[int, int], None], operations: int) -> None:
        """Call ``task(start, stop)`` for ranges of all heads, in as many threads as ``operations`` are worth."""
        pairs = self.pairs
        if (threads := min(threads_for(operations), pairs)) <= 1:
            task(0, pairs)
            return
        run_tasks([partial(task, part.start, part.stop) for part in parts_of(pairs, threads)], threads)


def attend(heads: Heads, scale: float, *, keep: bool) -> tuple[Array, Array | None]:
    """Return the weighted sums of the values (samples, length, dim), and the attention probabilities if ``keep``."""
    from mpizero.kernels.attention import causal_attention

    mixed = heads.room(heads.pairs * heads.length * heads.size)
    stored = heads.room(heads.pairs * heads.scores) if keep else None
    geometry, qkv, scale1 = heads.geometry(), heads.qkv.reshape(-1), vector(heads.qkv, scale)

    def task(start: int, stop: int) -> None:
        probabilities = heads.room(heads.scores) if stored is None else stored
        causal_attention(qkv, geometry, start, stop, scale1, probabilities, mixed, heads.memory())

    heads.run(task, 2 * mixed.size * heads.length)
    mixed = mixed.reshape(heads.samples, heads.length, heads.heads * heads.size)
    return mixed, None if stored is None else stored.reshape(heads.samples, heads.heads, heads.length, heads.length)


def attend_backward(heads: Heads, scale: float, stored: Array | None, dmixed: Array) -> Array:
    """Return the gradient of queries, keys and values (samples, length, 3 dim) from ``dmixed``, that of the sums.

    ``stored`` are the probabilities that :func:`attend` returned; if they are None, they are computed again.
    """
    from mpizero.kernels.attention import causal_attention_backward

    gradients = heads.room(3 * heads.pairs * heads.length * heads.size)
    geometry, qkv, scale1 = heads.geometry(), heads.qkv.reshape(-1), vector(heads.qkv, scale)
    above: Any = np.require(dmixed, requirements=("C", "W")).reshape(-1)

    def task(start: int, stop: int) -> None:
        probabilities = heads.room(heads.scores) if stored is None else stored.reshape(-1)
        parts = (probabilities, int(stored is not None), above, gradients, heads.room(heads.scores), heads.memory())
        causal_attention_backward(qkv, geometry, start, stop, scale1, *parts)

    heads.run(task, 2 * gradients.size * heads.length)
    return gradients.reshape(heads.samples, heads.length, 3 * heads.heads * heads.size)
