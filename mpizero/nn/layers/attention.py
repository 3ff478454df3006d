"""Compute causal self-attention (Vaswani et al., 2017): by one kernel on CPUs, otherwise by batched products."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpizero import kernels
from mpizero._util.names import explains
from mpizero.errors import ConfigError, DataError
from mpizero.kernels.matmul import by_kernels
from mpizero.nn.arrays import known, namespace, require_sequences
from mpizero.nn.attention import by_kernel
from mpizero.nn.attention.batched import BatchedHeads, blocks
from mpizero.nn.graph import Graph, NodeOutput
from mpizero.nn.layer import Layer, poll
from mpizero.nn.layers.affine import Affine
from mpizero.nn.layers.dropout import Dropout
from mpizero.nn.layers.linear import Linear
from mpizero.nn.layers.sequence_layer import SequenceLayer
from mpizero.nn.operations import Operations
from mpizero.nn.settings import require_positive
from mpizero.types import EVALUATE, Array, Init, Params, Run


class AttentionBase(Affine, SequenceLayer):
    """Compute queries, keys and values, attention, and a projection; the base class of unsplit and split attention."""

    @property
    @abstractmethod
    def _layers(self) -> tuple[Affine, Affine]: ...

    @property
    @abstractmethod
    def features(self) -> int:
        """Number of features of the input."""

    @property
    @abstractmethod
    def own_heads(self) -> tuple[CausalSelfAttention, int]:
        """A layer that computes the attention of this rank's heads, and its first head's number in the whole layer.

        Only the attention of the returned layer is used, not its linear maps.
        """

    def children(self) -> dict[str, Layer]:
        """Return the two linear layers by name: ``qkv`` and ``projection``. Not collective."""
        into_qkv, projection = self._layers
        return {"qkv": into_qkv, "projection": projection}

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` (samples, length, dim) without the projection's bias, and the cache.

        Collective where the layer is split.
        """
        require_sequences(x, self.features, "CausalSelfAttention")
        (into_qkv, projection), (own, first_head) = self._layers, self.own_heads
        qkv, qkv_cache = into_qkv.product(params["qkv"], x, run)
        poll(params)
        mixed, seen = own.attend(qkv, into_qkv.last_bias(params["qkv"]), run, first_head)
        poll(params)
        y, projection_cache = projection.product(params["projection"], mixed, run)
        return y, (qkv_cache, seen, projection_cache)

    def last_bias(self, params: Params) -> Array | None:
        """Return the projection's bias, which :meth:`product` does not add. Not collective."""
        return self._layers[1].last_bias(params["projection"])

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs.

        Collective where the layer is split.
        """
        into_qkv, projection = self._layers
        qkv_cache, seen, projection_cache = cache
        dmixed, projection_pending = projection.backward_input(params["projection"], projection_cache, dy)
        poll(params)
        dqkv = self.own_heads[0].attend_backward(seen, known(dmixed))
        poll(params)
        dx, qkv_pending = into_qkv.backward_input(params["qkv"], qkv_cache, dqkv)
        return dx, (qkv_pending, projection_pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of both linear layers' weights and biases. Collective where sequences are split."""
        into_qkv, projection = self._layers
        projection.backward_weights(params["projection"], cache[2], pending[1], grads["projection"])
        poll(params)
        into_qkv.backward_weights(params["qkv"], cache[0], pending[0], grads["qkv"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of the two linear maps and of the attention between them, for one sample of ``shape``.

        Not collective.
        """
        (into_qkv, projection), own = self._layers, self.own_shape(shape)
        return into_qkv.operations(own) + projection.operations(own) + self.own_heads[0].attend_operations(shape[0])


@explains
@dataclass(frozen=True)
class CausalSelfAttention(AttentionBase):
    """Let each position of a sequence attend to itself and the positions before it.

    Inputs and outputs are (samples, length, dim). One linear map, ``qkv``, computes queries, keys and values as one
    array (samples, length, 3, heads, dim / heads) (Vaswani et al., 2017, section 3.2). No method is collective.

    Parameters
    ----------
    dim, heads : int
        Number of features, and number of heads that they are split into; ``heads`` must divide ``dim``.
    dropout : float
        Dropout rate of the attention probabilities.
    site : int
        Number that keys the dropout's random mask; unique in the model.
    init, projection_init : Init or None
        Start values of the weight of ``qkv`` and of the output projection; None takes the default of :class:`Linear`.

    Examples
    --------
    >>> import mpizero as mz
    >>> layer = mz.nn.CausalSelfAttention(dim=8, heads=2)
    >>> {spec.name: spec.shape for spec in layer.specs()}
    {'qkv.weight': (8, 24), 'qkv.bias': (24,), 'projection.weight': (8, 8), 'projection.bias': (8,)}
    >>> layer.operations((16, 8)).forward  # floating-point operations of one sequence of 16 positions
    16384
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
                f"CausalSelfAttention: dim={self.dim} is not divisible by heads={self.heads}; "
                f"choose heads that divide dim, or dim={self.dim - self.dim % self.heads or self.heads}"
            )
        Dropout(self.dropout, self.site)

    @cached_property
    def _layers(self) -> tuple[Linear, Linear]:
        qkv = Linear(self.dim, 3 * self.dim, init=self.init)
        return qkv, Linear(self.dim, self.dim, init=self.projection_init)

    @cached_property
    def probability_dropout(self) -> Dropout:
        """The dropout of the attention probabilities."""
        return Dropout(self.dropout, self.site)

    @property
    def features(self) -> int:
        """Number of features of the input."""
        return self.dim

    @property
    def own_heads(self) -> tuple[CausalSelfAttention, int]:
        """The layer itself, which has all heads, and 0, the number of its first head."""
        return self, 0

    def attend(self, qkv: Array, bias: Array | None, run: Run, first_head: int = 0) -> tuple[Array, Any]:
        """Compute attention from queries, keys and values, ``qkv + bias`` (samples, length, 3 dim).

        Returns the weighted sums of the values (samples, length, dim), and the cache for :meth:`attend_backward`.
        ``qkv`` may be overwritten. If this layer has only some of the heads of a split layer, ``first_head`` is the
        number of its first head in the whole layer; dropout masks depend on it.
        """
        xp, (samples, length, width) = namespace(qkv), qkv.shape
        if not length:
            raise DataError("CausalSelfAttention: takes sequences of at least one place, the input has none")
        if self._by_kernels(qkv, run):
            qkv = xp.ascontiguousarray(qkv)
            rows = qkv.reshape(-1, width)
            if bias is not None:
                kernels.backend(rows).activation.add_bias(rows, bias, rows)
            return self._attend_by_kernels(qkv, run, first_head)
        apart = xp.empty_like(qkv, shape=(3, samples, self.heads, length, self.dim // self.heads))
        work, qkv = self._batched(apart, run, first_head), xp.ascontiguousarray(qkv)
        return work.attend(lambda some: work.take(qkv, bias, some), keep=self.keeps_probabilities(length))

    def attend_heads(self, apart: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Compute attention from the heads of queries, keys and values, (3, samples, heads, length, dim / heads).

        Not collective. Returns what :meth:`attend` returns; its cache holds ``apart``, which must be contiguous.
        """
        if self._by_kernels(apart, run):
            return self._attend_by_kernels(apart, run, 0)
        return self._batched(apart, run, 0).attend(None, keep=self.keeps_probabilities(apart.shape[3]))

    def attend_backward(self, seen: Any, dmixed: Array) -> Array:
        """Return the gradient of ``qkv``, (samples, length, 3 dim).

        ``seen`` is the cache that :meth:`attend` returned, and ``dmixed`` the gradient of the first result of
        :meth:`attend`.
        """
        held, stored, run, first_head = seen
        if self._by_kernels(held, run):
            return by_kernel.attend_backward(self._kernel_heads(held), self.scale, stored, dmixed)
        return self._batched(held, run, first_head).attend_backward(stored, dmixed)

    def _batched(self, apart: Array, run: Run, first_head: int) -> BatchedHeads:
        return BatchedHeads(apart, self.scale, self.probability_dropout, run, first_head)

    def _by_kernels(self, x: Array, run: Run) -> bool:
        """Tell whether one kernel computes the whole attention; it knows no dropout."""
        return by_kernels(x) and not self.probability_dropout.drops(x, run)

    def _attend_by_kernels(self, held: Array, run: Run, first_head: int) -> tuple[Array, Any]:
        heads = self._kernel_heads(held)
        mixed, stored = by_kernel.attend(heads, self.scale, keep=self.keeps_probabilities(heads.length))
        return mixed, (held, stored, run, first_head)

    def _kernel_heads(self, held: Array) -> by_kernel.Heads:
        """Describe the array that the cache holds: rows of a linear map, or heads that lie apart."""
        heads = by_kernel.Heads
        return heads.of_heads(held) if held.ndim == 5 else heads.of_rows(held, self.heads)

    def keeps_probabilities(self, length: int) -> bool:
        """Tell whether the attention probabilities of sequences of ``length`` are kept for the backward pass.

        They are kept if they are no larger than four arrays (samples, length, dim). For longer sequences the backward
        pass computes them again, with the same bits.
        """
        return length <= 4 * (self.dim // self.heads)

    @property
    def scale(self) -> float:
        """The factor on the scores, 1 / sqrt(dim / heads)."""
        return 1.0 / math.sqrt(self.dim // self.heads)

    def attend_operations(self, length: int) -> Operations:
        """Count the operations of :meth:`attend` and its backward pass for one sample of ``length`` positions.

        Products of 64 queries by keys that the causal mask hides are not counted; the kernels of a CPU skip some more.
        A GPU skips fewer of them: see :data:`mpizero.nn.attention.batched.BLOCK_ON_DEVICE`.
        """
        sizes = [(stop - start, stop, length - start) for start, stop in blocks(length)]
        seen = sum(2 * self.dim * queries * before for queries, before, _ in sizes)
        seeing = sum(2 * self.dim * queries * after for queries, _, after in sizes)
        again = 0 if self.keeps_probabilities(length) else seen
        return Operations(2 * seen, again + 2 * seen + 2 * seeing)

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add nodes for the two linear maps and the attention to the exported computation graph; return the output."""
        into_qkv, projection = self._layers
        node = into_qkv.trace(graph, f"{name}.qkv", source)
        settings = {"heads": self.heads, "scale": self.scale, "dropout": self.dropout}
        node = graph.add("CausalAttention", f"{name}.attend", (node,), source.shape, **settings)
        return projection.trace(graph, f"{name}.projection", node)
