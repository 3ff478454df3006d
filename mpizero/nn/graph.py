"""Describe a model as plain data: the nodes of its computation, for tools that draw, check or translate it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from mpizero.layout.flat import joined

#: Version of the description. It is raised when a program written for the old version would misread the new one.
FORMAT = "mpizero computation graph 1"


class NodeOutput(NamedTuple):
    """Hold the name of a node of the graph and the shape of its output for one sample."""

    name: str
    shape: tuple[int, ...]


@dataclass
class Graph:
    """Collect nodes in the order of evaluation; see :func:`mpizero.nn.export_computation_graph`."""

    nodes: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, op: str, name: str, inputs: tuple[NodeOutput, ...], shape: tuple[int, ...], **attributes: Any
    ) -> NodeOutput:
        """Append a node without parameters and return its output.

        ``op`` is the node's operation, ``inputs`` are outputs of earlier nodes, and ``shape`` is the shape of the
        output for one sample. ``attributes`` are the node's settings.
        """
        return self._append(op, name, inputs, shape, {"parameters": [], "attributes": attributes})

    def add_layer(self, layer: Any, name: str, source: NodeOutput, shape: tuple[int, ...]) -> NodeOutput:
        """Append a layer as one node, with its parameters' global names and its settings; return the node's output.

        ``source`` is the layer's input, and ``shape`` the shape of its output for one sample.
        """
        parameters = [
            {"name": spec.tied or joined(name, spec.name), "shape": list(spec.shape), "tied": spec.tied is not None}
            for spec in layer.specs()
        ]
        settings = {item.name: getattr(layer, item.name) for item in fields(layer)}
        attributes = {key: value for key, value in settings.items() if isinstance(value, (bool, int, float, str))}
        return self._append(
            type(layer).__name__, name, (source,), shape, {"parameters": parameters, "attributes": attributes}
        )

    def _append(
        self, op: str, name: str, inputs: tuple[NodeOutput, ...], shape: tuple[int, ...], rest: dict[str, Any]
    ) -> NodeOutput:
        self.nodes.append(
            {"name": name, "op": op, "inputs": [node.name for node in inputs], "shape": ["samples", *shape], **rest}
        )
        return NodeOutput(name, shape)
