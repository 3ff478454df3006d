"""Causal self-attention (Vaswani et al., 2017) by batched products that skip most of the masked half."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpizero import kernels
from mpizero.errors import ConfigError
from mpizero.nn.dropout import Dropout, Window
from mpizero.nn.graph import Graph, Place
from mpizero.nn.layer import Layer, known, namespace, require_positive, splits, vector
from mpizero.nn.linear import Linear
from mpizero.nn.operations import Operations
from mpizero.nn.split.attention import SplitAttention
from mpizero.types import EVALUATE, Array, Group, Init, Params, Run

#: Queries per product. 64 was fastest for 128 and 256 tokens: smaller blocks skip more of the masked half, but
#: their products are too small for the BLAS.
BLOCK = 64


@dataclass(frozen=True)
class CausalSelfAttention(Layer):
    """Let each place of a sequence attend to itself and the places before it.

    One product gives queries, keys and values side by side, (samples, length, 3, heads, dim / heads); the heads are
    strided views of it, so nothing is transposed or copied.

    Parameters
    ----------
    dim, heads : int
        Features, and the number of heads they are split into; ``heads`` must divide ``dim``.
    dropout : float
        Dropout rate of the attention probabilities.
    site : int
        The dropout's number, unique in the model.
    projection_init : Init or None
        Start values of the output projection's weight; None takes :class:`Linear`'s.
    init : Init or None
        Start values of the query, key and value weight; None takes :class:`Linear`'s.
    """

    dim: int
    heads: int
    dropout: float = 0.0
    site: int = 0
    init: Init | None = None
    projection_init: Init | None = None

    def __post_init__(self) -> None:
        require_positive("CausalSelfAttention", dim=self.dim, heads=self.heads)
        if self.dim % self.heads:
            raise ConfigError(
                f"dim={self.dim} is not divisible by heads={self.heads}; "
                f"choose heads that divide dim, or dim={self.dim - self.dim % self.heads or self.heads}"
            )
        Dropout(self.dropout, self.site)

    @cached_property
    def _layers(self) -> tuple[Linear, Linear, Dropout]:
        return (
            Linear(self.dim, 3 * self.dim, init=self.init),
            Linear(self.dim, self.dim, init=self.projection_init),
            Dropout(self.dropout, self.site),
        )

    def children(self) -> dict[str, Layer]:
        """Give ``qkv`` and ``projection``. Not collective."""
        qkv, projection, _ = self._layers
        return {"qkv": qkv, "projection": projection}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Attend within each sample of ``x`` (samples, length, dim). Not collective."""
        into_qkv, projection, _ = self._layers
        qkv, qkv_cache = into_qkv.forward(params["qkv"], x, run)
        mixed, seen = self.attend(qkv, run)
        y, projection_cache = projection.forward(params["projection"], mixed, run)
        return y, (qkv_cache, seen, projection_cache)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the gradient of ``x``. Not collective."""
        into_qkv, projection, _ = self._layers
        qkv_cache, seen, projection_cache = cache
        dmixed, projection_pending = projection.backward_input(params["projection"], projection_cache, dy)
        dqkv = self.attend_backward(seen, known(dmixed))
        dx, qkv_pending = into_qkv.backward_input(params["qkv"], qkv_cache, dqkv)
        return dx, (qkv_pending, projection_pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of both weights and biases. Not collective."""
        into_qkv, projection, _ = self._layers
        projection.backward_weights(params["projection"], cache[2], pending[1], grads["projection"])
        into_qkv.backward_weights(params["qkv"], cache[0], pending[0], grads["qkv"])

    def attend(self, qkv: Array, run: Run, first_head: int = 0) -> tuple[Array, Any]:
        """Mix the values of ``qkv`` (samples, length, 3 dim) into (samples, length, dim). Not collective.

        Where these are some of a wider layer's heads, ``first_head`` is the first one's number there: dropout masks
        depend on it.
        """
        dropout = self._layers[2]
        q, k, v = self._heads(qkv)
        probabilities = self._probabilities(q, k)
        kept, mask = probabilities, None
        if dropout.drops(probabilities, run):
            per_head = probabilities.shape[2] * probabilities.shape[3]
            mask = run, Window(first_head * per_head, self.heads * per_head)
            kept = dropout.mask(probabilities, *mask)
        mixed = namespace(qkv).empty((*qkv.shape[:2], self.dim), qkv.dtype)
        out = self._split(mixed)
        for start, stop in _blocks(qkv.shape[1]):
            namespace(qkv).matmul(kept[:, :, start:stop, :stop], v[:, :, :stop], out=out[:, :, start:stop])
        return mixed, (qkv, probabilities, kept, mask)

    def attend_backward(self, seen: Any, dmixed: Array) -> Array:
        """Compute the gradient of ``qkv`` from what :meth:`attend` cached. Not collective."""
        qkv, probabilities, kept, mask = seen
        xp = namespace(qkv)
        q, k, v = self._heads(qkv)
        dqkv: Array = xp.empty_like(qkv)
        dq, dk, dv = self._heads(dqkv)
        dout = self._split(dmixed)
        dprobabilities = xp.empty_like(probabilities)
        for start, stop in _blocks(qkv.shape[1]):
            queries = slice(start, stop)
            part = dprobabilities[:, :, queries, :stop]  # what lies beyond stays undefined: the kernel does not read it
            xp.matmul(dout[:, :, queries], v[:, :, :stop].swapaxes(-1, -2), out=part)
            xp.matmul(kept[:, :, start:, queries].swapaxes(-1, -2), dout[:, :, start:], out=dv[:, :, queries])
        dscores = dprobabilities if mask is None else self._layers[2].mask(dprobabilities, *mask)
        self._softmax_backward(probabilities, dscores)
        for start, stop in _blocks(qkv.shape[1]):
            queries = slice(start, stop)
            xp.matmul(dscores[:, :, queries, :stop], k[:, :, :stop], out=dq[:, :, queries])
            xp.matmul(dscores[:, :, start:, queries].swapaxes(-1, -2), q[:, :, start:], out=dk[:, :, queries])
        return dqkv

    def _probabilities(self, q: Array, k: Array) -> Array:
        samples, heads, length, _ = q.shape
        xp = namespace(q)
        scores: Array = xp.empty((samples, heads, length, length), q.dtype)
        for start, stop in _blocks(length):
            xp.matmul(q[:, :, start:stop], k[:, :, :stop].swapaxes(-1, -2), out=scores[:, :, start:stop, :stop])
        flat = scores.reshape(samples * heads, length, length)
        kernels.backend(scores).attention.causal_softmax(flat, vector(scores, self._scale))
        return scores

    def _softmax_backward(self, probabilities: Array, dscores: Array) -> None:
        samples, heads, length, _ = probabilities.shape
        shape = (samples * heads, length, length)
        kernels.backend(dscores).attention.causal_softmax_backward(
            probabilities.reshape(shape), dscores.reshape(shape), vector(dscores, self._scale)
        )

    @property
    def _scale(self) -> float:
        return 1.0 / math.sqrt(self.dim // self.heads)

    def _heads(self, qkv: Array) -> Array:
        """View (samples, length, 3 dim) as three of (samples, heads, length, dim / heads)."""
        samples, length, _ = qkv.shape
        return qkv.reshape(samples, length, 3, self.heads, self.dim // self.heads).transpose(2, 0, 3, 1, 4)

    def _split(self, x: Array) -> Array:
        """View (samples, length, dim) as (samples, heads, length, dim / heads)."""
        samples, length, _ = x.shape
        return x.reshape(samples, length, self.heads, self.dim // self.heads).transpose(0, 2, 1, 3)

    def split(self, group: Group) -> Layer:
        """Split the heads; :class:`ConfigError` unless the group's size divides their number. Not collective."""
        return SplitAttention(self, group) if splits(self, CausalSelfAttention, group) else self

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the two linear maps and the products between them. Not collective."""
        into_qkv, projection, _ = self._layers
        return into_qkv.operations(shape) + projection.operations(shape) + self.attend_operations(shape[0])

    def attend_operations(self, length: int) -> Operations:
        """Count the products of :meth:`attend` that are not skipped as masked. Not collective."""
        sizes = [(stop - start, stop, length - start) for start, stop in _blocks(length)]
        seen = sum(2 * self.dim * queries * before for queries, before, _ in sizes)
        seeing = sum(2 * self.dim * queries * after for queries, _, after in sizes)
        return Operations(2 * seen, 2 * seen + 2 * seeing)

    def trace(self, graph: Graph, name: str, source: Place) -> Place:
        """Add the two products and the attention between them. Not collective."""
        into_qkv, projection, _ = self._layers
        place = into_qkv.trace(graph, f"{name}.qkv", source)
        settings = {"heads": self.heads, "scale": self._scale, "dropout": self.dropout}
        place = graph.add("CausalAttention", f"{name}.attend", (place,), source.shape, **settings)
        return projection.trace(graph, f"{name}.projection", place)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + BLOCK, length)) for start in range(0, length, BLOCK))
