"""Apply layers one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mpizero._util.names import explains
from mpizero.errors import ConfigError
from mpizero.nn.error_location import add_location
from mpizero.nn.graph import Graph, NodeOutput
from mpizero.nn.layer import Layer, poll
from mpizero.nn.operations import Operations
from mpizero.types import EVALUATE, Array, Group, Params, Run


@explains
@dataclass(frozen=True, init=False)
class Sequential(Layer):
    """Apply layers in order: each takes the output of the one before it.

    Parameters are named "<layer>.<name in the layer>". No method is collective, unless a layer's is.

    Parameters
    ----------
    layers : mapping of str to Layer, or iterable of Layer
        The layers in the order in which they are applied. Those of an iterable without names are named "0", "1", ...

    Examples
    --------
    >>> import mpizero as mz
    >>> net = mz.nn.Sequential([mz.nn.Linear(3, 4), mz.nn.Tanh(), mz.nn.Linear(4, 1)])
    >>> [spec.name for spec in net.specs()]
    ['0.weight', '0.bias', '2.weight', '2.bias']
    >>> net.output_shape((3,))
    (1,)
    >>> mz.nn.Sequential({"down": mz.nn.Linear(3, 2), "up": mz.nn.Linear(2, 3)}).specs()[0].name
    'down.weight'
    """

    layers: tuple[tuple[str, Layer], ...]

    def __init__(self, layers: Mapping[str, Layer] | Iterable[Layer]) -> None:
        if isinstance(layers, Layer) or not isinstance(layers, Iterable):
            raise ConfigError(f"Sequential takes a list or mapping of layers, got {layers!r}: give [layer, ...]")
        named = layers.items() if isinstance(layers, Mapping) else ((str(i), layer) for i, layer in enumerate(layers))
        object.__setattr__(self, "layers", tuple(named))
        for name, layer in self.layers:
            if not name or "." in name or not isinstance(layer, Layer):
                raise ConfigError(f"Sequential: {name!r}: {layer!r} must be a layer under a name without dots")

    def children(self) -> dict[str, Layer]:
        """Return the layers by name."""
        return dict(self.layers)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Apply the layers, first to last; return the last output and a list of the layers' caches."""
        caches = []
        try:
            for name, layer in self.layers:
                poll(params)
                x, cache = layer.forward(params.get(name, {}), x, run)
                caches.append(cache)
        except Exception as error:
            add_location(error, "layer", name, layer.forward)
            raise
        return x, caches

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the input gradients from the last layer to the first; stop at a layer that returns None.

        Returns the gradient of ``x`` (or None), and what the layers' ``backward_weights`` need.
        """
        gradient: Array | None = dy
        pendings = []
        for (name, layer), layer_cache in zip(reversed(self.layers), reversed(cache), strict=True):
            if gradient is None:
                if any(spec.trainable for spec in layer.specs()):
                    raise ConfigError(f"Sequential: no gradient reaches {name!r}: the layer after it returns none")
                continue
            try:
                poll(params)
                gradient, pending = layer.backward_input(params.get(name, {}), layer_cache, gradient)
            except Exception as error:
                add_location(error, "layer", name, layer.backward_input)
                raise
            pendings.append(pending)
        return gradient, pendings

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of all layers' parameters, last layer to first."""
        reached = zip(reversed(self.layers), reversed(cache), pending, strict=False)
        for (name, layer), layer_cache, layer_pending in reached:
            try:
                poll(params)
                layer.backward_weights(params.get(name, {}), layer_cache, layer_pending, grads.get(name, {}))
            except Exception as error:
                add_location(error, "layer", name, layer.backward_weights)
                raise

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the last layer's output for one sample of ``shape``."""
        for _, layer in self.layers:
            shape = layer.output_shape(shape)
        return shape

    def split(self, group: Group) -> Layer:
        """Return a Sequential of the split forms of the layers, or this one if no layer has a split form."""
        layers = {name: layer.split(group) for name, layer in self.layers}
        return self if all(layers[name] is layer for name, layer in self.layers) else Sequential(layers)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the sum of the operations of all layers for one sample of ``shape``."""
        total = Operations()
        for _, layer in self.layers:
            total, shape = total + layer.operations(shape), layer.output_shape(shape)
        return total

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add the nodes of all layers to the exported computation graph, each fed by the layer before it.

        ``source`` is the input of the first layer. Returns the output of the last layer.
        """
        for child, layer in self.layers:
            source = layer.trace(graph, f"{name}.{child}", source)
        return source
