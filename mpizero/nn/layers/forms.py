"""Layers made of others, in what their whole and their split form do alike: messages are their children's."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mpizero import kernels
from mpizero.nn.layer import Layer, known, namespace, require_numbers, require_sequences
from mpizero.nn.layers.activation import Activation
from mpizero.nn.layers.affine import Affine
from mpizero.nn.layers.dropout import Dropout
from mpizero.nn.layers.norm import LayerNorm
from mpizero.nn.operations import Operations
from mpizero.types import EVALUATE, Array, Params, Run


class FeedForwardForm(Affine):
    """Two linear layers with an activation between them, place by place."""

    @property
    @abstractmethod
    def _layers(self) -> tuple[Affine, Activation, Affine]: ...

    def children(self) -> dict[str, Layer]:
        """Give ``expand`` and ``projection``. Not collective."""
        expand, _, projection = self._layers
        return {"expand": expand, "projection": projection}

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., dim) to the same shape. Collective where the layers are split."""
        expand, act, projection = self._layers
        hidden, expand_cache = expand.product(params["expand"], x, run)
        active, act_cache = act.forward_biased(hidden, expand.last_bias(params["expand"]))
        y, projection_cache = projection.product(params["projection"], active, run)
        return y, (expand_cache, act_cache, projection_cache)

    def last_bias(self, params: Params) -> Array | None:
        """Give the projection's. Not collective."""
        return self._layers[2].last_bias(params["projection"])

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the gradient of ``x``. Collective where the layers are split."""
        expand, act, projection = self._layers
        dactive, projection_pending = projection.backward_input(params["projection"], cache[2], dy)
        dhidden = act.backward_over(cache[1], known(dactive))  # the projection's result, which nobody else holds
        dx, expand_pending = expand.backward_input(params["expand"], cache[0], dhidden)
        return dx, (expand_pending, projection_pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of both weights and biases. Collective where sequences are split."""
        expand, _, projection = self._layers
        projection.backward_weights(params["projection"], cache[2], pending[1], grads["projection"])
        expand.backward_weights(params["expand"], cache[0], pending[0], grads["expand"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count both linear layers' products. Not collective."""
        expand, _, projection = self._layers
        return expand.operations(shape) + projection.operations(expand.output_shape(shape))


class BlockForm(Layer):
    """Pre-norm block: ``h = x + attention(norm1(x))``, then ``h + feed_forward(norm2(h))``, with dropouts."""

    @property
    @abstractmethod
    def _layers(self) -> tuple[LayerNorm, Affine, LayerNorm, Affine]: ...

    @property
    @abstractmethod
    def _dropouts(self) -> tuple[Dropout, Dropout]: ...

    def _dropped(self, dropout: Dropout, x: Array, run: Run) -> Array:
        """Mask what this rank holds of ``x``; the gradient is the same function of ``dy``. Not collective."""
        return dropout.mask(x, run) if dropout.drops(x, run) else x

    def _joined(self, branch: Array, bias: Array | None, dropout: Dropout, stream: Array, run: Run) -> Array:
        """Add bias and residual stream to what a branch computed, in its memory; dropout comes in between."""
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
        """Give ``norm1``, ``attention``, ``norm2`` and ``feed_forward``. Not collective."""
        norm1, attention, norm2, feed_forward = self._layers
        return {"norm1": norm1, "attention": attention, "norm2": norm2, "feed_forward": feed_forward}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (samples, length, dim) to the same shape. Collective where the layers are."""
        norm1, attention, norm2, feed_forward = self._layers
        drop1, drop2 = self._dropouts
        require_sequences(x, norm1.features, "TransformerBlock")
        require_numbers(x, "TransformerBlock")
        x = namespace(x).asarray(x, params["norm1"]["weight"].dtype)
        a, norm1_cache = norm1.forward(params["norm1"], x, run)
        a, attention_cache = attention.product(params["attention"], a, run)
        h = self._joined(a, attention.last_bias(params["attention"]), drop1, x, run)
        b, norm2_cache = norm2.forward(params["norm2"], h, run)
        b, feed_cache = feed_forward.product(params["feed_forward"], b, run)
        y = self._joined(b, feed_forward.last_bias(params["feed_forward"]), drop2, h, run)
        return y, (norm1_cache, attention_cache, norm2_cache, feed_cache, run)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the gradient of ``x``. Collective where the layers are."""
        norm1, attention, norm2, feed_forward = self._layers
        drop1, drop2 = self._dropouts
        norm1_cache, attention_cache, norm2_cache, feed_cache, run = cache
        db = self._dropped(drop2, dy, run)
        dfeed, feed_pending = feed_forward.backward_input(params["feed_forward"], feed_cache, db)
        dh, norm2_pending = norm2.backward_joined(params["norm2"], norm2_cache, known(dfeed), dy)
        da = self._dropped(drop1, dh, run)
        dattention, attention_pending = attention.backward_input(params["attention"], attention_cache, da)
        dx, norm1_pending = norm1.backward_joined(params["norm1"], norm1_cache, known(dattention), dh)
        return dx, (norm1_pending, attention_pending, norm2_pending, feed_pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of all four layers. Collective where the layers are."""
        parts = zip(reversed(self.children().items()), reversed(cache[:4]), reversed(pending), strict=True)
        for (name, layer), layer_cache, layer_pending in parts:
            layer.backward_weights(params[name], layer_cache, layer_pending, grads[name])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the products of attention and feed-forward. Not collective."""
        return self._layers[1].operations(shape) + self._layers[3].operations(shape)


class HeadForm(Layer):
    """A norm, then a projection onto the vocabulary."""

    @property
    @abstractmethod
    def _layers(self) -> tuple[Layer, Layer]: ...

    def children(self) -> dict[str, Layer]:
        """Give ``norm`` and ``projection``. Not collective."""
        norm, projection = self._layers
        return {"norm": norm, "projection": projection}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (samples, length, dim) to logits (samples, length, vocabulary). Collective where split."""
        norm, projection = self._layers
        normed, norm_cache = norm.forward(params["norm"], x, run)
        logits, projection_cache = projection.forward(params["projection"], normed, run)
        return logits, (norm_cache, projection_cache)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the gradient of ``x``. Collective where the projection is split."""
        norm, projection = self._layers
        dnormed, projection_pending = projection.backward_input(params["projection"], cache[1], dy)
        dx, norm_pending = norm.backward_input(params["norm"], cache[0], known(dnormed))
        return dx, (norm_pending, projection_pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of the norm and of this use of the table. Collective where split."""
        norm, projection = self._layers
        projection.backward_weights(params["projection"], cache[1], pending[1], grads["projection"])
        norm.backward_weights(params["norm"], cache[0], pending[0], grads["norm"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the projection's products. Not collective."""
        return self._layers[1].operations(shape)
