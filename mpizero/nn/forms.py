"""Layers made of others, in what their whole and their split form do alike: messages are their children's."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mpizero.nn.activation import Activation
from mpizero.nn.layer import Layer, known
from mpizero.nn.operations import Operations
from mpizero.types import EVALUATE, Array, Params, Run


class FeedForwardForm(Layer):
    """Two linear layers with an activation between them, place by place."""

    @property
    @abstractmethod
    def _layers(self) -> tuple[Layer, Activation, Layer]: ...

    def children(self) -> dict[str, Layer]:
        """Give ``expand`` and ``projection``. Not collective."""
        expand, _, projection = self._layers
        return {"expand": expand, "projection": projection}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., dim) to the same shape. Collective where the layers are split."""
        expand, act, projection = self._layers
        hidden, expand_cache = expand.forward(params["expand"], x, run)
        active, act_cache = act.forward({}, hidden, run)
        y, projection_cache = projection.forward(params["projection"], active, run)
        return y, (expand_cache, act_cache, projection_cache)

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
