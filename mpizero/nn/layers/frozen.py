"""Layers whose parameters stay as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mpizero.names import explains
from mpizero.nn.graph import Graph, Place
from mpizero.nn.layer import Layer, require_layer
from mpizero.nn.operations import Operations
from mpizero.types import EVALUATE, Array, Group, ParameterSpec, Params, Run


@explains
@dataclass(frozen=True)
class Frozen(Layer):
    """Use a layer without training it: its parameters have no gradient and no optimizer state.

    Gradients still flow through to its input. Parameters keep the wrapped layer's names.
    """

    layer: Layer

    def __post_init__(self) -> None:
        require_layer("Frozen", self.layer)

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the wrapped layer's parameters as not trainable. Not collective."""
        return tuple(replace(spec, trainable=False) for spec in self.layer.specs())

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Run the wrapped layer. Not collective."""
        return self.layer.forward(params, x, run)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Run the wrapped layer's input half. Not collective."""
        return self.layer.backward_input(params, cache, dy)[0], None

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Write nothing. Not collective."""

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Give the wrapped layer's. Not collective."""
        return self.layer.output_shape(shape)

    def split(self, group: Group) -> Layer:
        """Split the wrapped layer. Not collective."""
        layer = self.layer.split(group)
        return self if layer is self.layer else Frozen(layer)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the wrapped layer's products without those of its weights' gradients. Not collective."""
        return replace(self.layer.operations(shape), backward_weights=0)

    def trace(self, graph: Graph, name: str, source: Place) -> Place:
        """Add the wrapped layer. Not collective."""
        return self.layer.trace(graph, name, source)
