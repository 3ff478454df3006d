"""Extend PyTorch's autograd: share arrays with it, divide its backward pass into two halves, replace some functions.

:func:`as_tensor` and :func:`as_array` share memory between NumPy or CuPy and PyTorch. :func:`input_half` and
:func:`weight_half` are the two halves of a backward pass, for inputs and for weights, without computing anything twice.
:class:`MpizeroKernels` computes some functions of PyTorch with mpizero's kernels, which take less time on CPUs.

Source of the halves: Qi et al., Zero Bubble Pipeline Parallelism (2024), section 2. The nodes of autograd's graph on a
path to an input run in the input half. Where such a node also has edges that lead to weights only, the gradient of the
node's outputs is kept. The weight half begins at such nodes: it computes the gradients of these edges alone, and
follows the edges to the weights.

Where several nodes lead to one such edge (as to a weight that a recurrent layer uses in each step), autograd
cannot compute the contribution of one node alone. The input half then computes all gradients, and the weight half only
returns those of the weights.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import Function
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpizero import kernels
from mpizero._util.pytree import leaves_of, map_leaves
from mpizero.errors import DataError, LayoutError
from mpizero.nn.transformer import CausalSelfAttention
from mpizero.types import Array

with warnings.catch_warnings():  # PyTorch warns once in a process of read-only arrays: parameters and samples are
    warnings.simplefilter("ignore")
    _read_only = np.zeros(1, np.float32)
    _read_only.flags.writeable = False
    torch.from_numpy(_read_only)


def as_tensor(array: Any) -> torch.Tensor:
    """Return a tensor that shares the memory of an array of NumPy or CuPy. Not collective."""
    if isinstance(array, np.ndarray):
        try:
            return torch.from_numpy(array)
        except TypeError as error:
            raise DataError(f"PyTorch takes no arrays of {array.dtype}: {error}") from None
        except ValueError:  # negative strides
            return torch.from_numpy(np.ascontiguousarray(array))
    return torch.as_tensor(array)


def graph_leaves(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors that a backward pass from ``tensors`` would give gradients, each once. Not collective."""
    waiting, seen, leaves = list[Any](), set[Any](), list[torch.Tensor]()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            waiting.append(get_gradient_edge(tensor).node)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves


class Placed(torch.nn.Parameter):  # type: ignore[misc]
    """Share the memory of a parameter, and count in-place changes through ``.data`` in the tensor's version, too."""

    @property
    def data(self) -> torch.Tensor:
        """The tensor, detached from the graph; in-place changes increase the version of both."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise LayoutError(
            f"a parameter of shape {tuple(self.shape)} is given other data in a forward pass, which would be lost "
            "after it: compute with a changed copy"
        )

    @classmethod
    def of(cls, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter that shares the memory of a tensor."""
        return torch.Tensor._make_subclass(cls, tensor)


def as_array(tensor: torch.Tensor) -> Array:
    """Return an array that shares the memory of a tensor: of NumPy on the host, else of CuPy. Not collective."""
    on_host = tensor.device.type == "cpu"
    try:
        array: Array = (tensor.detach() if on_host else torch.empty(0, dtype=tensor.dtype)).numpy()
    except TypeError:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise DataError(
            f"a block returned {kind}, which NumPy does not have: let it end with .float(), and "
            f"the next begin with .to(torch.{kind})"
        ) from None
    if on_host:
        return array
    from mpizero.kernels.gpu import of_tensor

    return of_tensor(tensor.detach())


def put(view: Array, tensor: torch.Tensor) -> None:
    """Copy a tensor to an array of the same shape. Not collective."""
    as_tensor(view).copy_(tensor)


def gradient_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the leaves of a tree of tensors that may have a gradient: floating-point and complex numbers."""
    return [leaf for leaf in leaves_of(tree) if leaf.is_floating_point() or leaf.is_complex()]


def gradients_like(tree: Any, gradients: Gradients) -> Any:
    """Return ``gradients``, in the order of :func:`gradient_leaves`, as arrays in the structure of ``tree``.

    The gradient of a leaf that the loss does not depend on is zero; that of a leaf of integers or bools is None. Not
    collective.
    """
    left = iter(gradients)

    def gradient(leaf: Any) -> Any:
        if getattr(getattr(leaf, "dtype", None), "kind", "") not in ("f", "c"):
            return None
        tensor = next(left)
        return np.zeros_like(leaf) if tensor is None else as_array(tensor)

    return map_leaves(gradient, tree)


#: A gradient for each of several tensors; None for tensors that the outputs do not depend on.
Gradients = Sequence["torch.Tensor | None"]


class Pass(NamedTuple):
    """Hold the tensors at the ends of one forward pass's autograd graph: outputs, inputs and weights."""

    outputs: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]


class PendingWeights(NamedTuple):
    """Hold the values that :func:`weight_half` needs from :func:`input_half`.

    Attributes
    ----------
    node_gradients : sequence
        Nodes of the graph, and the gradients of their outputs, in the order of the backward pass.
    edges : dict
        For each of these nodes, its edges that lead to weights only.
    roots : sequence
        Edges of the outputs that lead to weights only, and their gradients.
    weights : sequence or None
        The gradients of the weights, if the graph cannot be divided; otherwise None.
    """

    node_gradients: Sequence[tuple[Node, tuple[torch.Tensor | None, ...]]]
    edges: dict[Node, tuple[GradientEdge, ...]]
    roots: Sequence[tuple[GradientEdge, torch.Tensor]]
    weights: Gradients | None = None


class HalfTimes(NamedTuple):
    """Hold the seconds of a backward pass and of its two halves, and whether halves and whole give equal gradients."""

    full: float
    inputs: float
    weights: float
    equal: bool

    @property
    def ratio(self) -> float:
        """The time of both halves, divided by the time of the whole backward pass."""
        return (self.inputs + self.weights) / self.full


def full_backward(graph: Pass, gradients: Sequence[torch.Tensor], *, keep: bool = False) -> tuple[Gradients, Gradients]:
    """Return the gradients of inputs and weights, given ``gradients`` of the outputs. Not collective.

    ``keep`` retains the graph for another pass.
    """
    ends = [*graph.inputs, *graph.weights]
    if not graph.outputs or not ends:
        return [None] * len(graph.inputs), [None] * len(graph.weights)
    results = gradients_of(graph.outputs, ends, gradients, keep=keep)
    return results[: len(graph.inputs)], results[len(graph.inputs) :]


def input_half(graph: Pass, gradients: Sequence[torch.Tensor]) -> tuple[Gradients, PendingWeights]:
    """Return the gradients of the inputs, and the values that :func:`weight_half` needs. Not collective."""
    to_input, to_weight, order = _paths(graph)
    edges = {
        node: tuple(edge for edge in _children(node) if edge.node in to_weight and edge.node not in to_input)
        for node in order
        if node in to_input
    }
    edges = {node: results for node, results in edges.items() if results}
    parents = Counter(edge for node in order for edge in _children(node))
    shared = any(parents[edge] > 1 for results in edges.values() for edge in results)  # reached from another place, too
    if not graph.weights or shared:
        results, weights = full_backward(graph, gradients, keep=True)
        return results, PendingWeights((), {}, (), weights)
    roots = [
        (edge, gradient)
        for output, gradient in zip(graph.outputs, gradients, strict=True)
        if (edge := get_gradient_edge(output)).node not in to_input
    ]
    node_gradients: list[tuple[Node, tuple[torch.Tensor | None, ...]]] = []
    if not graph.inputs:
        return (), PendingWeights(node_gradients, edges, roots)

    def keep(node: Node) -> Any:
        return lambda received: node_gradients.append((node, tuple(received)))

    hooks = [node.register_prehook(keep(node)) for node in edges]
    try:
        results = gradients_of(graph.outputs, graph.inputs, gradients, keep=True)
    finally:
        for hook in hooks:
            hook.remove()
    return results, PendingWeights(node_gradients, edges, roots)


def weight_half(graph: Pass, pending: PendingWeights, *, keep: bool = False) -> Gradients:
    """Return the gradients of the weights. Not collective. ``keep`` retains the graph for another pass."""
    if pending.weights is not None:
        return pending.weights
    begun = list(pending.roots)
    for node, received in pending.node_gradients:
        outputs = [GradientEdge(node, i) for i, gradient in enumerate(received) if gradient is not None]
        ends = list(dict.fromkeys(pending.edges[node]))
        gradients = [gradient for gradient in received if gradient is not None]
        of_ends = gradients_of(outputs, ends, gradients, keep=True)
        begun += [(edge, gradient) for edge, gradient in zip(ends, of_ends, strict=True) if gradient is not None]
    if not begun:
        return [None] * len(graph.weights)
    starts, gradients = [edge for edge, _ in begun], [gradient for _, gradient in begun]
    return gradients_of(starts, graph.weights, gradients, keep=keep)


def _children(node: Node) -> list[GradientEdge]:
    return [GradientEdge(child, number) for child, number in node.next_functions if child is not None]


def _paths(graph: Pass) -> tuple[set[Node], set[Node], list[Node]]:
    """Return the nodes that lead to an input, those that lead to a weight, and all nodes, each after its successors.

    The successors of a node are the nodes to which its edges lead, in the direction of the backward pass.
    """
    to_input = {get_gradient_edge(tensor).node for tensor in graph.inputs}
    to_weight = {get_gradient_edge(tensor).node for tensor in graph.weights}
    order: list[Node] = []
    visited: set[Node] = set()
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
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack += [(edge.node, False) for edge in _children(node)]
    return to_input, to_weight, order


#: Autograd's engine; None in versions of PyTorch that do not have it here.
_run = getattr(torch.autograd.graph, "_engine_run_backward", None)


def gradients_of(
    outputs: Sequence[Any], ends: Sequence[Any], gradients: Sequence[torch.Tensor], *, keep: bool = False
) -> Gradients:
    """Return the gradients of ``ends``, given ``gradients`` of ``outputs``, like ``torch.autograd.grad``.

    Not collective. The checks of ``torch.autograd.grad`` are omitted: they take as long as a small layer, and import
    SymPy, which takes a second.
    """
    if _run is None:
        results: Gradients = torch.autograd.grad(outputs, ends, gradients, retain_graph=keep, allow_unused=True)
    else:
        results = _run(tuple(outputs), tuple(gradients), keep, False, tuple(ends), True, accumulate_grad=False)
    return results


def half_times(graph: Pass, gradients: Sequence[torch.Tensor]) -> HalfTimes:
    """Measure a backward pass, whole and in two halves. Not collective.

    The times are CPU times of this thread, on which other processes of the machine have little effect. The graph can be
    used afterwards.
    """
    begun = thread_time()
    inputs, weights = full_backward(graph, gradients, keep=True)
    divided = thread_time()
    again, pending = input_half(graph, gradients)
    halfway = thread_time()
    halves = [*again, *weight_half(graph, pending, keep=True)]
    ended = thread_time()
    equal = all(a is b or torch.equal(a, b) for a, b in zip([*inputs, *weights], halves, strict=True))
    return HalfTimes(divided - begun, halfway - divided, ended - halfway, equal)


class Kernels(TorchDispatchMode):  # type: ignore[misc]
    """Intercept, in a ``with`` block, the kernels that PyTorch calls; subclasses define what happens then."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell whether PyTorch's compiler is to skip the intercepted calls: only if it is imported already.

        If the result were True without it, PyTorch would import the compiler, which takes as long as importing PyTorch.
        """
        return "torch._dynamo" in sys.modules


class MpizeroKernels(TorchFunctionMode):  # type: ignore[misc]
    """Compute functions of PyTorch by mpizero's kernels, where there are any, in calls of the current thread.

    As a mode of PyTorch, it intercepts the calls of functions while a module runs. GELU in its tanh form, SiLU, and
    causal attention without mask and dropout, if there are more than :data:`FEW_SCORES` scores, are computed by the
    kernels of :mod:`mpizero.nn`'s layers, where tensors are float32 or float64 on the host; all other calls run as they
    are. PyTorch itself computes gradients that are to be differentiated again (``create_graph=True``), and functions
    inside ``torch.func``'s transforms and forward-mode derivatives.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return ``func(*args, **kwargs)``, by a kernel if there is one."""
        kwargs = kwargs or {}
        known = _KNOWN.get(func)
        result = NotImplemented if known is None else known(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _gelu(input: Any, *, approximate: str = "none") -> Any:
    if approximate != "tanh" or not _is_plain(input):
        return NotImplemented
    return _Elementwise.apply(input, "gelu", lambda x: functional.gelu(x, approximate="tanh"))


def _silu(input: Any, inplace: bool = False) -> Any:
    if inplace or not _is_plain(input):
        return NotImplemented
    return _Elementwise.apply(input, "silu", functional.silu)


#: Attention with at most so many scores takes less time in PyTorch, which calls no Python function for it.
FEW_SCORES = 1 << 14


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
               *, scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
    plain = all(map(_is_plain, (query, key, value))) and query.ndim == 4
    alike = plain and query.shape == key.shape == value.shape and query.dtype == key.dtype == value.dtype
    if not (alike and is_causal and attn_mask is None and dropout_p == 0 and scale is None):
        return NotImplemented
    samples, heads, length, _ = query.shape
    if samples * heads * length**2 <= FEW_SCORES:
        return NotImplemented
    return _CausalAttention.apply(query, key, value)


_KNOWN: dict[Any, Callable[..., Any]] = {
    functional.gelu: _gelu,
    functional.silu: _silu,
    functional.scaled_dot_product_attention: _attention,
}


def _is_plain(tensor: Any) -> bool:
    """Tell whether a kernel can read a tensor: dense float32 or float64 on the host, and not in a transform."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.float64)
        and tensor.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and torch.autograd.forward_ad._current_level < 0
    )


def _again(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], dy: torch.Tensor) -> Any:
    """Return PyTorch's own gradients, which can be differentiated, of ``function`` at ``inputs``.

    ``dy`` is the gradient of the function's output.
    """
    with torch._C.DisableTorchFunction():
        wanted = [x for x in inputs if x.requires_grad]
        gradients = iter(torch.autograd.grad(function(*inputs), wanted, dy, create_graph=True))
    return [next(gradients) if x.requires_grad else None for x in inputs]


class _Elementwise(Function):  # type: ignore[misc]
    """Apply a function to each element by the kernel ``name``; another kernel applies the derivative.

    That kernel's name is ``name`` followed by "_backward".
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return the function's values at ``x``."""
        ctx.save_for_backward(x)
        ctx.name, ctx.function = name, function
        x = x.contiguous()
        y = torch.empty_like(x)
        getattr(kernels.cpu.layers, name)(_flat(x), _flat(y))
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return ``dy``, the gradient of the output, times the derivative."""
        (x,), (dy,) = ctx.saved_tensors, grad_outputs
        if torch.is_grad_enabled():
            return *_again(ctx.function, (x,), dy), None, None
        x = x.contiguous()
        dx = torch.empty_like(x)
        getattr(kernels.cpu.layers, f"{ctx.name}_backward")(_flat(x), _flat(dy.contiguous()), _flat(dx))
        return dx, None, None


class _CausalAttention(Function):  # type: ignore[misc]
    """Compute causal attention of queries, keys and values (samples, heads, length, features)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        """Return the weighted sums of the values."""
        samples, heads, length, features = inputs[0].shape
        apart = torch.empty(3, samples, heads, length, features, dtype=inputs[0].dtype)
        for target, tensor in zip(apart, inputs, strict=True):
            target.copy_(tensor)
        mixed, (_, stored, ctx.run, _) = CausalSelfAttention(heads * features, heads).attend_heads(apart.numpy())
        ctx.save_for_backward(*inputs, apart, None if stored is None else torch.from_numpy(stored))
        return torch.from_numpy(mixed).view(samples, length, heads, features).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradients of queries, keys and values."""
        (*inputs, apart, stored), (dy,) = ctx.saved_tensors, grad_outputs
        if torch.is_grad_enabled():
            return tuple(_again(_torch_attention, tuple(inputs), dy))
        samples, heads, length, features = dy.shape
        layer = CausalSelfAttention(heads * features, heads)
        saved = (apart.numpy(), None if stored is None else stored.numpy(), ctx.run, 0)
        rows = dy.transpose(1, 2).reshape(samples, length, heads * features)
        gradient = torch.from_numpy(layer.attend_backward(saved, rows.numpy()))
        return tuple(gradient.view(samples, length, 3, heads, features).permute(2, 0, 3, 1, 4))


def _torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    # The fused kernels of PyTorch cannot be differentiated twice.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _flat(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array of all elements that shares the memory of a contiguous tensor."""
    array: np.ndarray[Any, np.dtype[Any]] = tensor.detach().numpy()
    return array.reshape(-1)
