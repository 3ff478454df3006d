"""Compute causal self-attention (Vaswani et al., 2017) by batched products that skip most of the masked scores.

A few samples or heads are computed at a time, so that their scores stay in the CPU's cache.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero.errors import ConfigError, DataError
from mpizero.names import explains
from mpizero.nn.graph import Graph, NodeOutput
from mpizero.nn.layer import Layer, known, multiply, namespace, operand, poll, require_sequences, vector
from mpizero.nn.layers.affine import Affine
from mpizero.nn.layers.dropout import Dropout, SamplePart
from mpizero.nn.layers.linear import Linear
from mpizero.nn.layers.sequence_layer import SequenceLayer
from mpizero.nn.layers.workspace import Workspace
from mpizero.nn.operations import Operations
from mpizero.nn.settings import require_positive
from mpizero.types import EVALUATE, Array, Init, Params, Run

#: Number of queries per product. 64 was fastest for 128 and 256 tokens: smaller blocks skip more of the masked scores,
#: but their products are too small for the BLAS.
BLOCK = 64
#: Number of queries per product on a GPU, where starting a product takes long. Not tuned on a GPU yet.
BLOCK_ON_DEVICE = 256
#: Largest number of bytes of scores computed at once, on CPUs and on GPUs.
CACHE, DEVICE = 1 << 18, 1 << 28
#: Ranges of the samples and of the heads that are computed together.
Part = tuple[slice, slice]


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
        xp, (samples, length, _) = namespace(qkv), qkv.shape
        if not length:
            raise DataError("CausalSelfAttention: takes sequences of at least one place, the input has none")
        apart = xp.empty_like(qkv, shape=(3, samples, self.heads, length, self.dim // self.heads))
        work, qkv = _Heads(self, apart, run, first_head), xp.ascontiguousarray(qkv)
        return self._attend(work, lambda some: work.take(qkv, bias, some))

    def attend_heads(self, apart: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Compute attention from the heads of queries, keys and values, (3, samples, heads, length, dim / heads).

        Not collective. Returns what :meth:`attend` returns; its cache holds ``apart``, which must be contiguous.
        """
        return self._attend(_Heads(self, apart, run, 0), None)

    def _attend(self, work: _Heads, take: Callable[[slice], None] | None) -> tuple[Array, Any]:
        """Compute attention of all heads; ``take`` puts those of some samples into ``work.apart`` before."""
        apart, xp = work.apart, namespace(work.apart)
        _, samples, _, length, _ = apart.shape
        mixed: Array = xp.empty_like(apart, shape=(samples, length, self.dim))
        out = self._split(mixed)
        keeps = self._keeps_probabilities(length)
        stored = xp.empty_like(mixed, shape=(samples, self.heads, length, length)) if keeps else None
        for part in work.parts():
            if take is not None and part[1].start == 0:
                take(part[0])
            scores = work.room("scores", work.score_shape(part)) if stored is None else stored[part]
            kept = operand(work.dropped(work.probabilities(part, scores), part))
            v = operand(work.heads(2, part))
            for start, stop in work.blocks():
                multiply(kept[:, :, start:stop, :stop], v[:, :, :stop], out[part][:, :, start:stop])
        return mixed, (apart, stored, work.run, work.first_head)

    def attend_backward(self, seen: Any, dmixed: Array) -> Array:
        """Return the gradient of ``qkv``, (samples, length, 3 dim).

        ``seen`` is the cache that :meth:`attend` returned, and ``dmixed`` the gradient of the first result of
        :meth:`attend`.
        """
        apart, stored, run, first_head = seen
        xp, work = namespace(apart), _Heads(self, apart, run, first_head)
        samples, length, _ = dmixed.shape
        dqkv: Array = xp.empty_like(apart, shape=(samples, length, 3 * self.dim))
        gradients, dmixed = self._heads(dqkv), xp.ascontiguousarray(dmixed)
        for part in work.parts():
            if stored is None:
                probabilities = work.probabilities(part, work.room("scores", work.score_shape(part)))
            else:
                probabilities = stored[part]
            kept = operand(work.dropped(probabilities, part))
            do, v_transposed = operand(work.copied(dmixed, part)), operand(work.transposed(2, part))
            dq, dk, dv = (gradient[part] for gradient in gradients)
            dprobabilities = work.room("gradients", work.score_shape(part))
            for start, stop in work.blocks():
                block = dprobabilities[:, :, start:stop, :stop]  # the kernel does not read what lies beyond
                multiply(do[:, :, start:stop], v_transposed[..., :stop], block)
                multiply(kept[:, :, start:, start:stop].swapaxes(-1, -2), do[:, :, start:], dv[:, :, start:stop])
            dscores = work.dropped(dprobabilities, part)
            work.softmax_backward(probabilities, dscores)
            dscores, q, k = (operand(x) for x in (dscores, work.heads(0, part), work.heads(1, part)))
            for start, stop in work.blocks():
                multiply(dscores[:, :, start:stop, :stop], k[:, :, :stop], dq[:, :, start:stop])
                multiply(dscores[:, :, start:, start:stop].swapaxes(-1, -2), q[:, :, start:], dk[:, :, start:stop])
        return dqkv

    def _keeps_probabilities(self, length: int) -> bool:
        """Tell whether the attention probabilities of sequences of ``length`` are kept for the backward pass.

        They are kept if they are no larger than four arrays (samples, length, dim). For longer sequences the backward
        pass computes them again, with the same bits.
        """
        return length <= 4 * (self.dim // self.heads)

    @property
    def _scale(self) -> float:
        return 1.0 / math.sqrt(self.dim // self.heads)

    def _heads(self, qkv: Array) -> Array:
        """View (samples, length, 3 dim) as (3, samples, heads, length, dim / heads)."""
        samples, length, _ = qkv.shape
        return qkv.reshape(samples, length, 3, self.heads, self.dim // self.heads).transpose(2, 0, 3, 1, 4)

    def _split(self, x: Array) -> Array:
        """View (samples, length, dim) as (samples, heads, length, dim / heads)."""
        samples, length, _ = x.shape
        return x.reshape(samples, length, self.heads, self.dim // self.heads).transpose(0, 2, 1, 3)

    def attend_operations(self, length: int) -> Operations:
        """Count the operations of :meth:`attend` and its backward pass for one sample of ``length`` positions.

        The count is that on a CPU. Products that are skipped because the causal mask hides their scores are not
        counted. A GPU skips fewer of them: see :data:`BLOCK_ON_DEVICE`.
        """
        sizes = [(stop - start, stop, length - start) for start, stop in _blocks(length)]
        seen = sum(2 * self.dim * queries * before for queries, before, _ in sizes)
        seeing = sum(2 * self.dim * queries * after for queries, _, after in sizes)
        again = 0 if self._keeps_probabilities(length) else seen
        return Operations(2 * seen, again + 2 * seen + 2 * seeing)

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add nodes for the two linear maps and the attention to the exported computation graph; return the output."""
        into_qkv, projection = self._layers
        node = into_qkv.trace(graph, f"{name}.qkv", source)
        settings = {"heads": self.heads, "scale": self._scale, "dropout": self.dropout}
        node = graph.add("CausalAttention", f"{name}.attend", (node,), source.shape, **settings)
        return projection.trace(graph, f"{name}.projection", node)


def _blocks(length: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, length)) for start in range(0, length, size))


class _Heads:
    """Compute one group of heads after the other, forward and backward, in memory that is reused.

    A group, here a ``Part``, is a range of the samples and a range of the heads. The heads are copied to contiguous
    memory. Strided views would need no copy, but the BLAS takes twice as long for their products.
    """

    def __init__(self, layer: CausalSelfAttention, apart: Array, run: Run, first_head: int) -> None:
        self.apart = apart
        self._work = Workspace(apart)
        self.run, self.first_head = run, first_head
        self._layer = layer
        self._scale = vector(apart, layer._scale)
        self._kernels = kernels.backend(apart).attention

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
        return _blocks(self.apart.shape[3], BLOCK if isinstance(self.apart, np.ndarray) else BLOCK_ON_DEVICE)

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
        dropout = self._layer.probability_dropout
        if not dropout.drops(x, self.run):
            return x
        some, heads = part
        per_head = x.shape[2] * x.shape[3]
        run = replace(self.run, first_sample=self.run.first_sample + some.start)
        return dropout.mask(x, run, SamplePart((self.first_head + heads.start) * per_head, x.shape[1] * per_head))


def _rows(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _matrices(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])
