"""Activation checkpointing (Chen et al., 2016): memory for a second forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpizero.names import explains
from mpizero.nn.graph import Graph, Place
from mpizero.nn.layer import Layer, require_layer
from mpizero.nn.operations import Operations
from mpizero.types import EVALUATE, Array, Group, ParameterSpec, Params, Run


@explains
@dataclass(frozen=True)
class Checkpointed(Layer):
    """Keep only a layer's input; compute its cache again in the backward pass.

    The gradients have the same bits as without: the second forward pass repeats the first, dropout masks included, and
    so do the messages of a layer that is split. Parameters keep the wrapped layer's names.
    """

    layer: Layer

    def __post_init__(self) -> None:
        require_layer("Checkpointed", self.layer)

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the wrapped layer's parameters under their own names. Not collective."""
        return self.layer.specs()

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Run the layer and drop its cache. Not collective."""
        return self.layer.forward(params, x, run)[0], (x, run)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Run the layer forward again, then its input half; the cache lives until the weight half.

        Not collective.
        """
        x, run = cache
        inner = self.layer.forward(params, x, run)[1]
        dx, pending = self.layer.backward_input(params, inner, dy)
        return dx, (inner, pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Run the layer's weight half on the cache computed again. Not collective."""
        inner, inner_pending = pending
        self.layer.backward_weights(params, inner, inner_pending, grads)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Give the wrapped layer's. Not collective."""
        return self.layer.output_shape(shape)

    def split(self, group: Group) -> Layer:
        """Split the wrapped layer. Not collective."""
        layer = self.layer.split(group)
        return self if layer is self.layer else Checkpointed(layer)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the wrapped layer's products, the forward ones twice. Not collective."""
        once = self.layer.operations(shape)
        return once + Operations(backward_input=once.forward)

    def trace(self, graph: Graph, name: str, source: Place) -> Place:
        """Add the wrapped layer: checkpointing changes memory, not the function. Not collective."""
        return self.layer.trace(graph, name, source)
