"""Define the base class of layers that run another layer in a different way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mpizero.nn.graph import Graph, NodeOutput
from mpizero.nn.integers import layer_integers
from mpizero.nn.layer import Layer
from mpizero.nn.operations import Operations
from mpizero.nn.settings import require_layer
from mpizero.types import EVALUATE, Array, Group, IntegerSpec, ParameterSpec, Params, Run


@dataclass(frozen=True)
class Wrapper(Layer):
    """Run ``layer``, whose parameters keep their names; a subclass overrides the methods whose behaviour it changes."""

    layer: Layer

    def __post_init__(self) -> None:
        require_layer(type(self).__name__, self.layer)

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the wrapped layer's parameters under their own names. Not collective."""
        return self.layer.specs()

    def integers(self) -> tuple[IntegerSpec, ...]:
        """Describe the wrapped layer's integer arrays under their own names. Not collective."""
        return layer_integers(self.layer)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the wrapped layer's output and cache. Collective where the layer is split."""
        return self.layer.forward(params, x, run)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Call the wrapped layer's ``backward_input``. Collective where the layer is split."""
        return self.layer.backward_input(params, cache, dy)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Call the wrapped layer's ``backward_weights``. Collective where the layer is split."""
        self.layer.backward_weights(params, cache, pending, grads)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the wrapped layer's output shape. Not collective."""
        return self.layer.output_shape(shape)

    def split(self, group: Group) -> Layer:
        """Return a wrapper of the same class around the wrapped layer's split form. Not collective."""
        layer = self.layer.split(group)
        return self if layer is self.layer else replace(self, layer=layer)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the wrapped layer's operations for one sample of ``shape``. Not collective."""
        return self.layer.operations(shape)

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add the wrapped layer's nodes to the exported computation graph, and return its output. Not collective."""
        return self.layer.trace(graph, name, source)
