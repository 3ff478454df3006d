"""Define a transformer's pre-norm block, and the feed-forward layer in it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpizero import kernels
from mpizero._util.names import explains
from mpizero.nn.arrays import known, namespace, require_numbers, require_sequences
from mpizero.nn.graph import Graph, NodeOutput
from mpizero.nn.layer import Layer, poll
from mpizero.nn.layers.activation import Activation, named_activation
from mpizero.nn.layers.affine import Affine
from mpizero.nn.layers.attention import CausalSelfAttention
from mpizero.nn.layers.dropout import Dropout
from mpizero.nn.layers.linear import Linear
from mpizero.nn.layers.norm import LayerNorm
from mpizero.nn.layers.sequence_layer import SequenceLayer
from mpizero.nn.operations import Operations
from mpizero.nn.settings import require_positive
from mpizero.types import EVALUATE, Array, Init, Params, Run


class FeedForwardBase(Affine):
    """Apply two linear layers with an activation between them; the base class of the unsplit and the split form."""

    @property
    @abstractmethod
    def _layers(self) -> tuple[Affine, Activation, Affine]: ...

    def children(self) -> dict[str, Layer]:
        """Return the two linear layers by name: ``expand`` and ``projection``. Not collective."""
        expand, _, projection = self._layers
        return {"expand": expand, "projection": projection}

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` (..., dim) without the last bias, and the cache.

        Collective where the layers are split.
        """
        expand, act, projection = self._layers
        hidden, expand_cache = expand.product(params["expand"], x, run)
        active, act_cache = act.forward_biased(hidden, expand.last_bias(params["expand"]))
        poll(params)
        y, projection_cache = projection.product(params["projection"], active, run)
        return y, (expand_cache, act_cache, projection_cache)

    def last_bias(self, params: Params) -> Array | None:
        """Return the second linear layer's bias, which :meth:`product` does not add. Not collective."""
        return self._layers[2].last_bias(params["projection"])

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs.

        Collective where the layers are split.
        """
        expand, act, projection = self._layers
        dactive, projection_pending = projection.backward_input(params["projection"], cache[2], dy)
        dhidden = act.backward_over(cache[1], known(dactive))  # the projection's result, which nobody else holds
        poll(params)
        dx, expand_pending = expand.backward_input(params["expand"], cache[0], dhidden)
        return dx, (expand_pending, projection_pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of both linear layers' weights and biases. Collective where sequences are split."""
        expand, _, projection = self._layers
        projection.backward_weights(params["projection"], cache[2], pending[1], grads["projection"])
        poll(params)
        expand.backward_weights(params["expand"], cache[0], pending[0], grads["expand"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the sum of both linear layers' operations for one sample of ``shape``. Not collective."""
        expand, _, projection = self._layers
        return expand.operations(shape) + projection.operations(expand.output_shape(shape))


@explains
@dataclass(frozen=True)
class FeedForward(FeedForwardBase):
    """Apply two linear layers with an activation between them, to each position of a sequence by itself.

    Inputs and outputs are (samples, length, dim). No method is collective.

    Parameters
    ----------
    dim : int
        Features of input and output.
    hidden : int or None
        Number of features between the two layers; None is ``4 * dim``.
    activation : str
        "gelu", "silu", "relu" or "tanh".
    init, projection_init : Init or None
        Start values of the first and the second weight; None takes the default of :class:`Linear`.

    Examples
    --------
    >>> import mpizero as mz
    >>> layer = mz.nn.FeedForward(dim=8, hidden=12, activation="silu")
    >>> {spec.name: spec.shape for spec in layer.specs()}
    {'expand.weight': (8, 12), 'expand.bias': (12,), 'projection.weight': (12, 8), 'projection.bias': (8,)}
    """

    dim: int
    hidden: int | None = None
    activation: str = "gelu"
    init: Init | None = None
    projection_init: Init | None = None

    def __post_init__(self) -> None:
        require_positive("FeedForward", dim=self.dim, hidden=self.width)
        named_activation(self.activation)

    @property
    def width(self) -> int:
        """Number of features between the two linear layers."""
        return 4 * self.dim if self.hidden is None else self.hidden

    @cached_property
    def _layers(self) -> tuple[Linear, Activation, Linear]:
        return (
            Linear(self.dim, self.width, init=self.init),
            named_activation(self.activation),
            Linear(self.width, self.dim, init=self.projection_init),
        )

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add nodes for the three layers, one after the other, to the exported computation graph; return the output."""
        expand, act, projection = self._layers
        node = expand.trace(graph, f"{name}.expand", source)
        node = act.trace(graph, f"{name}.activation", node)
        return projection.trace(graph, f"{name}.projection", node)


class TransformerBlockBase(SequenceLayer):
    """Compute a pre-norm transformer block; the base class of the unsplit and the split form."""

    @property
    @abstractmethod
    def _layers(self) -> tuple[LayerNorm, Affine, LayerNorm, Affine]: ...

    @property
    @abstractmethod
    def _dropouts(self) -> tuple[Dropout, Dropout]: ...

    def _dropped(self, dropout: Dropout, x: Array, run: Run) -> Array:
        """Return ``x``, or a split block's part of it, with dropout applied.

        The backward pass calls this with ``dy``. Not collective.
        """
        return dropout.mask(x, run) if dropout.drops(x, run) else x

    def _joined(self, branch: Array, bias: Array | None, dropout: Dropout, stream: Array, run: Run) -> Array:
        """Return dropout of ``branch + bias``, plus the residual stream, computed in the memory of ``branch``."""
        xp = namespace(branch)
        if bias is None or dropout.drops(branch, run):
            if bias is not None:
                branch += bias
            branch = self._dropped(dropout, branch, run)
            branch += stream
            return branch
        rows = xp.ascontiguousarray(branch).reshape(-1, branch.shape[-1])
        residual = xp.ascontiguousarray(stream).reshape(rows.shape)
        kernels.backend(rows).activation.add_bias_residual(rows, bias, residual, rows)
        joined: Array = rows.reshape(branch.shape)
        return joined

    def children(self) -> dict[str, Layer]:
        """Return the four layers by name: ``norm1``, ``attention``, ``norm2`` and ``feed_forward``. Not collective."""
        norm1, attention, norm2, feed_forward = self._layers
        return {"norm1": norm1, "attention": attention, "norm2": norm2, "feed_forward": feed_forward}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` (samples, length, dim), of the same shape, and the cache.

        Collective where the layers are split.
        """
        norm1, attention, norm2, feed_forward = self._layers
        drop1, drop2 = self._dropouts
        require_sequences(x, norm1.features, "TransformerBlock")
        require_numbers(x, "TransformerBlock")
        x = namespace(x).asarray(x, params["norm1"]["weight"].dtype)
        a, norm1_cache = norm1.forward(params["norm1"], x, run)
        poll(params)
        a, attention_cache = attention.product(params["attention"], a, run)
        h = self._joined(a, attention.last_bias(params["attention"]), drop1, x, run)
        poll(params)
        b, norm2_cache = norm2.forward(params["norm2"], h, run)
        poll(params)
        b, feed_cache = feed_forward.product(params["feed_forward"], b, run)
        y = self._joined(b, feed_forward.last_bias(params["feed_forward"]), drop2, h, run)
        return y, (norm1_cache, attention_cache, norm2_cache, feed_cache, run)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs.

        Collective where the layers are split.
        """
        norm1, attention, norm2, feed_forward = self._layers
        drop1, drop2 = self._dropouts
        norm1_cache, attention_cache, norm2_cache, feed_cache, run = cache
        db = self._dropped(drop2, dy, run)
        dfeed, feed_pending = feed_forward.backward_input(params["feed_forward"], feed_cache, db)
        poll(params)
        dh, norm2_pending = norm2.backward_joined(params["norm2"], norm2_cache, known(dfeed), dy)
        da = self._dropped(drop1, dh, run)
        poll(params)
        dattention, attention_pending = attention.backward_input(params["attention"], attention_cache, da)
        poll(params)
        dx, norm1_pending = norm1.backward_joined(params["norm1"], norm1_cache, known(dattention), dh)
        return dx, (norm1_pending, attention_pending, norm2_pending, feed_pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of the parameters of all four layers. Collective where the layers are split."""
        parts = zip(reversed(self.children().items()), reversed(cache[:4]), reversed(pending), strict=True)
        for (name, layer), layer_cache, layer_pending in parts:
            poll(params)
            layer.backward_weights(params[name], layer_cache, layer_pending, grads[name])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the sum of the operations of attention and feed-forward for one sample of ``shape``.

        Not collective.
        """
        _, attention, _, feed_forward = self._layers
        return attention.operations(shape) + feed_forward.operations(self.own_shape(shape))


@explains
@dataclass(frozen=True)
class TransformerBlock(TransformerBlockBase):
    """Compute a pre-norm block: ``h = x + attention(norm1(x))``, then ``h + feed_forward(norm2(h))``.

    Inputs and outputs are (samples, length, dim). No method is collective.

    Parameters
    ----------
    dim, heads : int
        Number of features and number of attention heads.
    dropout : float
        Rate of the block's three dropouts. One acts on the attention probabilities, the others on the results of
        ``attention`` and ``feed_forward``.
    site : int
        First of the three consecutive numbers that key the random masks of this block's dropouts.
    residual_scale : float
        Factor on the start values of the two projections that write into the residual stream. GPT-2 uses
        1/sqrt(2 * layers), so that the stream's variance does not grow with depth.

    Examples
    --------
    >>> import mpizero as mz
    >>> block = mz.nn.TransformerBlock(dim=8, heads=2)
    >>> list(block.children())
    ['norm1', 'attention', 'norm2', 'feed_forward']
    >>> sum(spec.size for spec in block.specs())  # 12 dim**2 + 13 dim parameters
    872
    """

    dim: int
    heads: int
    dropout: float = 0.0
    site: int = 0
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        self.children()

    @cached_property
    def _layers(self) -> tuple[LayerNorm, CausalSelfAttention, LayerNorm, FeedForward]:
        init, residual = Init("normal", 0.02), Init("normal", 0.02 * self.residual_scale)
        attention = CausalSelfAttention(self.dim, self.heads, self.dropout, self.site, init, residual)
        feed_forward = FeedForward(self.dim, init=init, projection_init=residual)
        return LayerNorm(self.dim), attention, LayerNorm(self.dim), feed_forward

    @cached_property
    def _dropouts(self) -> tuple[Dropout, Dropout]:
        return Dropout(self.dropout, self.site + 1), Dropout(self.dropout, self.site + 2)

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add nodes for attention, feed-forward and their residual sums to the computation graph; return the output."""
        norm1, attention, norm2, feed_forward = self._layers
        drop1, drop2 = self._dropouts
        node = norm1.trace(graph, f"{name}.norm1", source)
        node = attention.trace(graph, f"{name}.attention", node)
        node = drop1.trace(graph, f"{name}.dropout1", node)
        middle = graph.add("Add", f"{name}.residual1", (source, node), source.shape)
        node = norm2.trace(graph, f"{name}.norm2", middle)
        node = feed_forward.trace(graph, f"{name}.feed_forward", node)
        node = drop2.trace(graph, f"{name}.dropout2", node)
        return graph.add("Add", f"{name}.residual2", (middle, node), source.shape)
