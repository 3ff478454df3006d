"""Compute the two halves of a backward pass, for inputs and for weights, without computing anything twice.

Source: Qi et al., Zero Bubble Pipeline Parallelism (2024), section 2. The nodes of autograd's graph on a path to an
input run in the input half. Where such a node also leads to weights by another edge, the gradient of its outputs is
kept. The weight half begins there: it computes the gradients of those edges alone, and follows them to the weights.

Where such an edge can also be reached on a path to the input (a weight that a recurrent layer uses in each step),
autograd cannot compute its part alone. The input half then computes all gradients, and the weight half hands them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import thread_time
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

#: Autograd's engine; None in versions of PyTorch that do not have it here.
_run = getattr(torch.autograd.graph, "_engine_run_backward", None)
#: A gradient for each weight; None for those that the outputs do not depend on.
Gradients = Sequence["torch.Tensor | None"]


class Pass(NamedTuple):
    """Hold the graph of one forward pass: the tensors at its ends."""

    outputs: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]


class PendingWeights(NamedTuple):
    """Hold what the weight half needs.

    Attributes
    ----------
    kept : sequence
        Nodes of the graph, and the gradients of their outputs, in the order of the pass.
    edges : dict
        The edges of each of these nodes that lead to weights only.
    roots : sequence
        Edges where the pass begins and that lead to weights only, and their gradients.
    weights : sequence or None
        The gradients of the weights, where the graph cannot be divided.
    """

    kept: Sequence[tuple[Node, tuple[torch.Tensor | None, ...]]]
    edges: dict[Node, tuple[GradientEdge, ...]]
    roots: Sequence[tuple[GradientEdge, torch.Tensor]]
    weights: Gradients | None = None


class HalfTimes(NamedTuple):
    """Hold the seconds of a backward pass, and those of its two halves, and whether both compute the same."""

    whole: float
    inputs: float
    weights: float
    equal: bool

    @property
    def ratio(self) -> float:
        """The time of both halves over that of the whole."""
        return (self.inputs + self.weights) / self.whole


def whole_backward(
    graph: Pass, gradients: Sequence[torch.Tensor], *, keep: bool = False
) -> tuple[Gradients, Gradients]:
    """Return the gradients of inputs and weights, from those of the outputs. Not collective.

    ``keep`` says whether the graph is used again.
    """
    ends = [*graph.inputs, *graph.weights]
    if not graph.outputs or not ends:
        return [None] * len(graph.inputs), [None] * len(graph.weights)
    found = gradients_of(graph.outputs, ends, gradients, keep=keep)
    return found[: len(graph.inputs)], found[len(graph.inputs) :]


def input_half(graph: Pass, gradients: Sequence[torch.Tensor]) -> tuple[Gradients, PendingWeights]:
    """Return the gradients of the inputs, and what :func:`weight_half` needs. Not collective."""
    to_input, to_weight, order = _paths(graph)
    edges = {
        node: tuple(edge for edge in _children(node) if edge.node in to_weight and edge.node not in to_input)
        for node in order
        if node in to_input
    }
    edges = {node: found for node, found in edges.items() if found}
    parents = Counter(edge for node in order for edge in _children(node))
    shared = any(parents[edge] > 1 for found in edges.values() for edge in found)  # reached from another place, too
    if not graph.weights or shared:
        found, weights = whole_backward(graph, gradients, keep=True)
        return found, PendingWeights((), {}, (), weights)
    roots = [
        (edge, gradient)
        for output, gradient in zip(graph.outputs, gradients, strict=True)
        if (edge := get_gradient_edge(output)).node not in to_input
    ]
    kept: list[tuple[Node, tuple[torch.Tensor | None, ...]]] = []
    if not graph.inputs:
        return (), PendingWeights(kept, edges, roots)

    def keep(node: Node) -> Any:
        return lambda given: kept.append((node, tuple(given)))

    hooks = [node.register_prehook(keep(node)) for node in edges]
    try:
        found = gradients_of(graph.outputs, graph.inputs, gradients, keep=True)
    finally:
        for hook in hooks:
            hook.remove()
    return found, PendingWeights(kept, edges, roots)


def weight_half(graph: Pass, pending: PendingWeights, *, keep: bool = False) -> Gradients:
    """Return the gradients of the weights. Not collective. ``keep`` says whether the graph is used again."""
    if pending.weights is not None:
        return pending.weights
    begun = list(pending.roots)
    for node, given in pending.kept:
        outputs = [GradientEdge(node, i) for i, gradient in enumerate(given) if gradient is not None]
        ends = list(dict.fromkeys(pending.edges[node]))
        gradients = [gradient for gradient in given if gradient is not None]
        found = gradients_of(outputs, ends, gradients, keep=True)
        begun += [(edge, gradient) for edge, gradient in zip(ends, found, strict=True) if gradient is not None]
    if not begun:
        return [None] * len(graph.weights)
    starts, gradients = [edge for edge, _ in begun], [gradient for _, gradient in begun]
    return gradients_of(starts, graph.weights, gradients, keep=keep)


def gradients_of(
    outputs: Sequence[Any], ends: Sequence[Any], gradients: Sequence[torch.Tensor], *, keep: bool = False
) -> Gradients:
    """Return the gradients of ``ends``, given those of ``outputs``, as ``torch.autograd.grad`` does. Not collective.

    The checks of that take as long as a small layer, and import SymPy, which takes a second.
    """
    if _run is None:
        found: Gradients = torch.autograd.grad(outputs, ends, gradients, retain_graph=keep, allow_unused=True)
    else:
        found = _run(tuple(outputs), tuple(gradients), keep, False, tuple(ends), True, accumulate_grad=False)
    return found


def half_times(graph: Pass, gradients: Sequence[torch.Tensor]) -> HalfTimes:
    """Measure a backward pass, whole and in two halves. Not collective.

    The times are those of this thread's processor, which other processes on the machine change little. The graph can be
    used afterwards.
    """
    begun = thread_time()
    inputs, weights = whole_backward(graph, gradients, keep=True)
    divided = thread_time()
    again, pending = input_half(graph, gradients)
    halfway = thread_time()
    halves = [*again, *weight_half(graph, pending, keep=True)]
    ended = thread_time()
    equal = all(a is b or torch.equal(a, b) for a, b in zip([*inputs, *weights], halves, strict=True))
    return HalfTimes(divided - begun, halfway - divided, ended - halfway, equal)


def _children(node: Node) -> list[GradientEdge]:
    return [GradientEdge(child, number) for child, number in node.next_functions if child is not None]


def _paths(graph: Pass) -> tuple[set[Node], set[Node], list[Node]]:
    """Return the nodes that lead to an input, those that lead to a weight, and all nodes, children first."""
    to_input = {get_gradient_edge(tensor).node for tensor in graph.inputs}
    to_weight = {get_gradient_edge(tensor).node for tensor in graph.weights}
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(get_gradient_edge(output).node, False) for output in graph.outputs]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            children = [edge.node for edge in _children(node)]
            if any(child in to_input for child in children):
                to_input.add(node)
            if any(child in to_weight for child in children):
                to_weight.add(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(edge.node, False) for edge in _children(node)]
    return to_input, to_weight, order
