"""Compute causal attention by batched products that skip most of the masked scores: on GPUs, and with dropout.

A few samples or heads are computed at a time, so that their scores stay in the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero import kernels
from mpizero.nn.arrays import multiply, namespace, operand, vector
from mpizero.nn.attention.workspace import Workspace
from mpizero.nn.sample_part import SamplePart
from mpizero.types import Array, Run

if TYPE_CHECKING:
    from mpizero.nn.layers.dropout import Dropout

#: Number of queries per product. 64 was fastest for 128 and 256 tokens: smaller blocks skip more of the masked scores,
#: but their products are too small for the BLAS.
BLOCK = 64
#: Number of queries per product on a GPU, where starting a product takes long. Not tuned on a GPU yet.
BLOCK_ON_DEVICE = 256
#: Largest number of bytes of scores computed at once, on CPUs and on GPUs.
CACHE, DEVICE = 1 << 18, 1 << 28
#: Ranges of the samples and of the heads that are computed together.
Part = tuple[slice, slice]


def blocks(length: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Return the ranges (start, stop) of at most ``size`` of ``length`` positions."""
    return ((start, min(start + size, length)) for start in range(0, length, size))


class BatchedHeads:
    """Compute one group of heads after the other, forward and backward, in memory that is reused.

    A group, here a ``Part``, is a range of the samples and a range of the heads. The heads are copied to contiguous
    memory. Strided views would need no copy, but the BLAS takes twice as long for their products.
    """

    def __init__(self, apart: Array, scale: float, dropout: Dropout, run: Run, first_head: int) -> None:
        self.apart = apart
        self._work = Workspace(apart)
        self.run, self.first_head = run, first_head
        self._dropout = dropout
        self._scale = vector(apart, scale)
        self._kernels = kernels.backend(apart).attention

    def attend(self, take: Callable[[slice], None] | None, *, keep: bool) -> tuple[Array, Any]:
        """Compute attention of all heads; ``take`` puts those of some samples into ``apart`` before.

        ``keep`` says whether the probabilities are kept for the backward pass.
        """
        apart, xp = self.apart, namespace(self.apart)
        _, samples, heads, length, size = apart.shape
        mixed: Array = xp.empty_like(apart, shape=(samples, length, heads * size))
        out = view_heads(mixed, heads)
        stored = xp.empty_like(mixed, shape=(samples, heads, length, length)) if keep else None
        for part in self.parts():
            if take is not None and part[1].start == 0:
                take(part[0])
            scores = self.room("scores", self.score_shape(part)) if stored is None else stored[part]
            kept = operand(self.dropped(self.probabilities(part, scores), part))
            v = operand(self.heads(2, part))
            for start, stop in self.blocks():
                multiply(kept[:, :, start:stop, :stop], v[:, :, :stop], out[part][:, :, start:stop])
        return mixed, (apart, stored, self.run, self.first_head)

    def attend_backward(self, stored: Array | None, dmixed: Array) -> Array:
        """Return the gradient of ``qkv``, (samples, length, 3 dim).

        ``stored`` are the probabilities that :meth:`attend` kept, or None, and ``dmixed`` is the gradient of the sums.
        """
        apart, xp = self.apart, namespace(self.apart)
        samples, length, dim = dmixed.shape
        dqkv: Array = xp.empty_like(apart, shape=(samples, length, 3 * dim))
        gradients, dmixed = view_kinds(dqkv, apart.shape[2]), xp.ascontiguousarray(dmixed)
        for part in self.parts():
            if stored is None:
                probabilities = self.probabilities(part, self.room("scores", self.score_shape(part)))
            else:
                probabilities = stored[part]
            kept = operand(self.dropped(probabilities, part))
            do, v_transposed = operand(self.copied(dmixed, part)), operand(self.transposed(2, part))
            dq, dk, dv = (gradient[part] for gradient in gradients)
            dprobabilities = self.room("gradients", self.score_shape(part))
            for start, stop in self.blocks():
                block = dprobabilities[:, :, start:stop, :stop]  # the kernel does not read what lies beyond
                multiply(do[:, :, start:stop], v_transposed[..., :stop], block)
                multiply(kept[:, :, start:, start:stop].swapaxes(-1, -2), do[:, :, start:], dv[:, :, start:stop])
            dscores = self.dropped(dprobabilities, part)
            self.softmax_backward(probabilities, dscores)
            dscores, q, k = (operand(x) for x in (dscores, self.heads(0, part), self.heads(1, part)))
            for start, stop in self.blocks():
                multiply(dscores[:, :, start:stop, :stop], k[:, :, :stop], dq[:, :, start:stop])
                multiply(dscores[:, :, start:, start:stop].swapaxes(-1, -2), q[:, :, start:], dk[:, :, start:stop])
        return dqkv

    def parts(self) -> Iterator[Part]:
        """Yield groups whose scores fit the cache: ranges of whole samples, or ranges of the heads of one sample."""
        _, samples, heads, length, _ = self.apart.shape
        limit = CACHE if isinstance(self.apart, np.ndarray) else DEVICE
        fitting = max(1, limit // max(1, length * length * self.apart.itemsize))
        some, several = max(1, fitting // heads), min(fitting, heads)
        for first in range(0, samples, some):
            for head in range(0, heads, several):
                yield slice(first, min(first + some, samples)), slice(head, min(head + several, heads))

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of queries (start, stop) for which scores are computed at once.

        The causal mask hides all keys from ``stop`` on from the queries of a range.
        """
        return blocks(self.apart.shape[3], BLOCK if isinstance(self.apart, np.ndarray) else BLOCK_ON_DEVICE)

    def take(self, qkv: Array, bias: Array | None, some: slice) -> None:
        """Copy queries, keys and values of the samples ``some`` of ``qkv + bias`` to ``apart``, head by head."""
        rows = _rows(qkv[some])
        self._kernels.split_heads(rows, rows[:0].reshape(-1) if bias is None else bias, 0, some.start, self.apart)

    def score_shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape of the scores of ``part``: (samples, heads, queries, keys)."""
        some, heads = part
        length = self.apart.shape[3]
        return some.stop - some.start, heads.stop - heads.start, length, length

    def room(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return an array of undefined contents in the workspace memory called ``name``; see :meth:`Workspace.room`."""
        return self._work.room(name, shape)

    def heads(self, kind: int, part: Part) -> Array:
        """Return queries (``kind`` 0), keys (1) or values (2) of ``part``, as a contiguous view.

        Its shape is (samples, heads, length, dim / heads).
        """
        heads: Array = self.apart[kind][part]
        return heads

    def transposed(self, kind: int, part: Part) -> Array:
        """Return a copy of the result of :meth:`heads`, transposed to (samples, heads, dim / heads, length)."""
        heads = self.heads(kind, part)
        out = self.room("transposed", (*heads.shape[:2], heads.shape[3], heads.shape[2]))
        self._kernels.transposed_heads(heads, out)
        return out

    def copied(self, x: Array, part: Part) -> Array:
        """Return a copy of the part ``part`` of ``x`` (samples, length, dim), in the shape of :meth:`heads`."""
        some, heads = part
        rows, shape = _rows(x[some]), self.heads(0, part).shape
        out = self.room("copied", shape)
        self._kernels.split_heads(rows, rows[:0].reshape(-1), heads.start, 0, out.reshape(1, *shape))
        return out

    def probabilities(self, part: Part, scores: Array) -> Array:
        """Compute the attention probabilities of ``part`` in the memory of ``scores``, and return them."""
        q, k_transposed = operand(self.heads(0, part)), operand(self.transposed(1, part))
        for start, stop in self.blocks():
            multiply(q[:, :, start:stop], k_transposed[..., :stop], scores[:, :, start:stop, :stop])
        self._kernels.causal_softmax(_matrices(scores), self._scale)
        return scores

    def softmax_backward(self, probabilities: Array, dscores: Array) -> None:
        """Replace ``dscores``, the gradient of the given probabilities, by the gradient of the scores, in place."""
        self._kernels.causal_softmax_backward(_matrices(probabilities), _matrices(dscores), self._scale)

    def dropped(self, x: Array, part: Part) -> Array:
        """Apply dropout to ``x``, the probabilities of ``part`` or their gradient; return a new array, or ``x`` itself.

        ``x`` itself is returned if nothing is dropped.
        """
        dropout = self._dropout
        if not dropout.drops(x, self.run):
            return x
        some, heads = part
        per_head = x.shape[2] * x.shape[3]
        run = replace(self.run, first_sample=self.run.first_sample + some.start)
        return dropout.mask(x, run, SamplePart((self.first_head + heads.start) * per_head, x.shape[1] * per_head))


def view_kinds(qkv: Array, heads: int) -> Array:
    """View (samples, length, 3 dim) as (3, samples, heads, length, dim / heads)."""
    samples, length, width = qkv.shape
    return qkv.reshape(samples, length, 3, heads, width // (3 * heads)).transpose(2, 0, 3, 1, 4)


def view_heads(x: Array, heads: int) -> Array:
    """View (samples, length, dim) as (samples, heads, length, dim / heads)."""
    samples, length, width = x.shape
    return x.reshape(samples, length, heads, width // heads).transpose(0, 2, 1, 3)


def _rows(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _matrices(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])
