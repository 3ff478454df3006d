"""Define the base class of all layers, and what layers and models share.

A :class:`Layer` holds settings only: no parameters, caches or gradients. The matrix products of a layer are counted as
:class:`Operations`, and :class:`Graph` describes a model as plain data, the nodes of its computation, for tools that
draw, check or translate it. :class:`Wrapper` is the base class of layers that run another layer in a different way. An
:class:`Affine` layer can leave the addition of its bias to the caller, who may fuse it into the next operation. A
:class:`SequenceLayer` knows which positions of the whole sequences its input holds. The functions at the end check the
settings of layers, list a model's integer arrays (such as counters of batches) and make the start values of these, and
add the name of the block or layer in which an error occurred to the error's message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.checks import fraction, require, unmasked, whole
from mpizero.errors import CollectiveError, ConfigError, LayoutError, MpizeroError, PeerFailure, UnsupportedError
from mpizero.kernels import recording
from mpizero.layout.flat import joined, nested
from mpizero.nn.arrays import add_bias
from mpizero.types import (
    EVALUATE,
    INTEGER_DTYPES,
    Array,
    BlockModel,
    Group,
    Init,
    IntegerSpec,
    ParameterSpec,
    Params,
    Run,
)


class Layer(ABC):
    """Describe a differentiable function of parameters and input; a layer object holds neither of them.

    A subclass is a frozen dataclass. A layer with parameters of its own defines :meth:`own_specs`. A layer made of
    other layers defines :meth:`children`; their parameters get dotted names. The rules for every layer:

    - the first axis of ``x`` counts samples, and every output keeps it;
    - ``x`` and the output may be trees (tuples, lists, dictionaries, dataclasses) of arrays. ``dy`` then is a tree like
      the output, and the returned gradient one like ``x``, with None in place of arrays that have no gradient, such as
      ids and masks;
    - ``x``, ``dy`` and parameters are never written to;
    - gradients are overwritten completely, ``grads[name][...] = value``. They are never added to, and ``grads[name]``
      is never replaced by another array, because the arrays in ``grads`` are views of a buffer that every step uses
      again;
    - for an averaged parameter (:attr:`ParameterSpec.averaged <mpizero.types.ParameterSpec>`), such as a running mean,
      ``grads[name]`` takes the new value after these samples in place of a gradient;
    - a large layer made of other layers may call :func:`poll` between their passes, so that messages in flight make
      progress;
    - the caller may overwrite a returned array that is neither one of the arguments nor part of the cache.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.types import EVALUATE, Init, ParameterSpec
    >>> class Scale(mz.nn.Layer):
    ...     def own_specs(self):
    ...         return (ParameterSpec("scale", (3,), Init("ones")),)
    ...     def forward(self, params, x, run=EVALUATE):
    ...         return x * params["scale"], x
    ...     def backward_input(self, params, cache, dy):
    ...         return dy * params["scale"], dy
    ...     def backward_weights(self, params, cache, pending, grads):
    ...         grads["scale"][...] = (cache * pending).sum(axis=0)
    >>> params, grads = {"scale": np.array([1.0, 2.0, 3.0])}, {"scale": np.empty(3)}
    >>> y, cache = Scale().forward(params, np.ones((2, 3)))
    >>> Scale().backward(params, cache, np.ones((2, 3)), grads)  # the gradient of x
    array([[1., 2., 3.],
           [1., 2., 3.]])
    >>> grads
    {'scale': array([2., 2., 2.])}
    """

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the parameters of this layer itself, without those of its children."""
        return ()

    def children(self) -> Mapping[str, Layer]:
        """Return the layers that this one is made of, by name, in the order of their parameters in :meth:`specs`."""
        return {}

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe all parameters: the layer's own first, then each child's, with the prefix ``<child>.``."""
        return self._specs

    @cached_property
    def _specs(self) -> tuple[ParameterSpec, ...]:
        nested = (
            replace(spec, name=f"{name}.{spec.name}")
            for name, child in self.children().items()
            for spec in child.specs()
        )
        return (*self.own_specs(), *nested)

    def own_integers(self) -> tuple[IntegerSpec, ...]:
        """Describe the integer arrays (:class:`~mpizero.types.IntegerSpec`) of this layer, without its children's."""
        return ()

    @abstractmethod
    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for the input ``x``, and the cache that the backward pass needs."""

    @abstractmethod
    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of the input, and what :meth:`backward_weights` needs besides the cache.

        ``cache`` comes from :meth:`forward`, and ``dy`` is the gradient of the output. The returned gradient is None if
        the layer computes none, because its input is integer ids, for example.
        """

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:  # noqa: B027
        """Overwrite ``grads`` with the gradients of the parameters.

        ``cache`` comes from :meth:`forward`, and ``pending`` is the second value that :meth:`backward_input` returned.
        The default does nothing, for layers without parameters.
        """

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Array | None:
        """Call :meth:`backward_input` and then :meth:`backward_weights`; return the gradient of the input."""
        dx, pending = self.backward_input(params, cache, dy)
        self.backward_weights(params, cache, pending, grads)
        return dx

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return one sample's output shape from one sample's input shape.

        The default returns the input's shape, but if the layer has children and does not define :meth:`operations`, it
        runs :meth:`forward` once on zeros, and returns the output's shape (the input's shape if the run fails).
        """
        if type(self).operations is Layer.operations and self.children():
            with suppress(NotImplementedError):
                return _tried(self, shape)[1]
        return shape

    def split(self, group: Group) -> Layer:
        """Return the tensor-parallel form of this layer: each rank of ``group`` holds and computes a part of it.

        The split layer takes and returns whole activations, the same on every rank. The split layer's passes are
        collective over the group. Its parameters have the same names as those of this layer, and
        :attr:`ParameterSpec.part` says which part of each parameter this rank holds. If every rank holds a parameter
        whole (``part`` is None), its gradient is the same on every rank when ``backward_weights`` returns. Ranks
        exchange arrays by the methods of ``group`` alone (``docs/split_layers.md``). The default makes the form that
        the table ``SPLIT_FORMS`` in ``mpizero/nn/tensor_parallel.py`` has for the layer's class. The default returns
        the layer itself if the table has no form for its class, or if the group has one rank.

        Raises
        ------
        ConfigError
            The layer's class is a subclass of a class in the table, and does not define ``split`` itself. The split
            form of the base class might compute something else than the subclass.
        """
        if group.size == 1:
            return self
        # The forms are made of layers, so their module is imported when the first layer is split.
        forms: Mapping[type, Callable[[Any, Group], Layer]]
        forms = import_module("mpizero.nn.tensor_parallel").SPLIT_FORMS
        kind = next((kind for kind in type(self).__mro__ if kind in forms), None)
        if kind is None:
            return self
        if kind is not type(self):
            raise ConfigError(
                f"{type(self).__name__} has split() from {kind.__name__}, which does not know what the subclass "
                "changes; define split(group) in it"
            )
        return forms[kind](self, group)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the floating-point operations of this rank's matrix products for one sample of shape ``shape``.

        ``shape`` is the shape of the whole input, also where this rank computes a part of it. The default is for layers
        without products of their own: it adds the operations of the children that :meth:`forward` calls, each as often
        as it is called. To find these calls, ``forward`` runs once on zeros; for this run the children are replaced by
        objects that count the calls and compute nothing.

        Raises
        ------
        UnsupportedError
            If ``forward`` fails in this run, or if it does not call each child through an attribute of the layer.
        """
        return _tried(self, shape)[0] if self.children() else Operations()

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add this layer to the exported computation graph, which tools draw or translate, and return its output.

        ``name`` becomes the name of the layer's node, and ``source`` is the layer's input. A layer made of children
        must override this method, to say how the children are connected.
        """
        if self.children():
            raise UnsupportedError(f"{type(self).__name__} does not say how its layers are joined: define trace()")
        return graph.add_layer(self, name, source, self.output_shape(source.shape))


def poll(params: Params) -> None:
    """Let messages in flight make progress, if ``params`` has a method ``poll``.

    A layer calls this function between its children. MPI moves most messages only while a rank is inside an MPI call.
    Not collective.

    Examples
    --------
    >>> import mpizero as mz
    >>> class InFlight(dict):
    ...     def poll(self):
    ...         print("messages make progress")
    >>> mz.nn.poll(InFlight(weight=1.0))
    messages make progress
    >>> mz.nn.poll({"weight": 1.0})  # parameters without messages: nothing happens
    """
    method = poll_of(params)
    if method is not None:
        recording.call(method)


def poll_of(params: Params) -> Callable[[], object] | None:
    """Return the method ``poll`` of ``params``, which lets messages in flight progress; None if there is none.

    Not collective.
    """
    method: Callable[[], object] | None = getattr(params, "poll", None)
    return method


@dataclass(frozen=True)
class Operations:
    """Hold the number of floating-point operations of a layer's matrix products for one sample, by pass.

    A product of (m, k) by (k, n) counts 2 m n k operations. Elementwise work, norms and softmax are not counted: they
    are bound by memory, not by arithmetic. A user's own layer returns such an object from
    :meth:`mpizero.nn.Layer.operations`.

    Parameters
    ----------
    forward, backward_input, backward_weights : int
        Operations of the forward pass, and of the two halves of the backward pass.

    Examples
    --------
    >>> import mpizero as mz
    >>> first, second = mz.nn.Linear(3, 4).operations((3,)), mz.nn.Linear(4, 2).operations((4,))
    >>> first + second
    Operations(forward=40, backward_input=40, backward_weights=40)
    >>> (first + second).total  # of one training step on one sample
    120
    """

    forward: int = 0
    backward_input: int = 0
    backward_weights: int = 0

    def __add__(self, other: Operations) -> Operations:
        """Add two layers' numbers, pass by pass."""
        return Operations(*(a + b for a, b in zip(self, other, strict=True)))

    def __iter__(self) -> Iterator[int]:
        """Iterate over the three numbers: forward, backward_input, backward_weights."""
        return iter((self.forward, self.backward_input, self.backward_weights))

    @property
    def total(self) -> int:
        """The sum of the three numbers: forward pass and both halves of the backward pass."""
        return sum(self)


def linear_operations(rows: int, inputs: int, outputs: int, input_gradient: bool = True) -> Operations:
    """Count the operations of a linear map on ``rows`` rows: its forward product and its two gradient products.

    ``inputs`` and ``outputs`` are the sizes of the weight. If ``input_gradient`` is False, the product for the input's
    gradient is not counted.
    """
    product = 2 * rows * inputs * outputs
    return Operations(product, product if input_gradient else 0, product)


class _Counted:
    """Replace a child layer while its parent's forward runs on zeros: count matrix products, compute nothing."""

    def __init__(self, layer: Layer, calls: list[tuple[Layer, Operations]]) -> None:
        self._layer, self._calls = layer, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Record the layer's operations, and return zeros of the output's shape, and None for the cache."""
        shape = tuple(x.shape[1:])
        self._calls.append((self._layer, self._layer.operations(shape)))
        dtype = x.dtype if x.dtype.kind == "f" else np.float32
        return np.zeros((len(x), *self._layer.output_shape(shape)), dtype), None


def _tried(layer: Layer, shape: tuple[int, ...]) -> tuple[Operations, tuple[int, ...]]:
    """Run a layer's forward on zeros; return the operations of the child layers that it calls, and its output's shape.

    ``shape`` and the returned shape are those of one sample. The operations are added up over all calls.
    """
    name, children = type(layer).__name__, list(layer.children().values())
    calls: list[tuple[Layer, Operations]] = []

    def watched(value: Any) -> Any:
        if isinstance(value, Layer):
            return _Counted(value, calls)
        if type(value) in (list, tuple):
            return type(value)(map(watched, value))
        return {key: watched(item) for key, item in value.items()} if type(value) is dict else value

    twin = copy(layer)
    for attribute, value in getattr(layer, "__dict__", {}).items():
        object.__setattr__(twin, attribute, watched(value))
    params = nested({spec.name: np.broadcast_to(np.float32(0), spec.shape) for spec in layer.specs()})
    try:
        try:
            y = twin.forward(params, np.zeros((1, *shape), np.float32))[0]
        except Exception:
            calls.clear()
            y = twin.forward(params, np.zeros((1, *shape), np.int64))[0]  # ids
        output = tuple(y.shape[1:])
    except Exception as error:
        raise UnsupportedError(
            f"{name} does not count its products, and its forward cannot be tried on zeros of shape {(1, *shape)} "
            f"({type(error).__name__}: {error}): define operations()"
        ) from error
    ids = {id(called) for called, _ in calls}
    if any(id(child) not in ids for child in children):
        raise UnsupportedError(
            f"{name} does not count its products: define operations(), or keep its layers as attributes that forward "
            "calls"
        )
    return sum((operations for _, operations in calls), Operations()), output


#: Name and version of the format of exported graphs. The version is raised when a program that was written for the old
#: version would misread the new one.
GRAPH_FORMAT = "mpizero computation graph 1"


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


def traced(graph: Graph, name: str, source: NodeOutput, /, **layers: Layer) -> NodeOutput:
    """Add the nodes of layers to the computation graph, each fed by the layer before it; return the last output."""
    for child, layer in layers.items():
        source = layer.trace(graph, f"{name}.{child}", source)
    return source


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
        """Return the wrapped layer's output and cache. Collective if the layer is split."""
        return self.layer.forward(params, x, run)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Call the wrapped layer's ``backward_input``. Collective if the layer is split."""
        return self.layer.backward_input(params, cache, dy)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Call the wrapped layer's ``backward_weights``. Collective if the layer is split."""
        self.layer.backward_weights(params, cache, pending, grads)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the wrapped layer's output shape. Not collective."""
        return self.layer.output_shape(shape)

    def split(self, group: Group) -> Layer:
        """Return a wrapper of the same class around the wrapped layer's split form. Not collective."""
        layer = self.layer.split(group)
        return self if layer is self.layer else replace(self, layer=layer)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the wrapped layer's floating-point operations for one sample of ``shape``. Not collective."""
        return self.layer.operations(shape)

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add the wrapped layer's nodes to the exported computation graph, and return its output. Not collective."""
        return self.layer.trace(graph, name, source)


class Affine(Layer):
    """Define a layer that ends by adding a bias (or none), and can leave that addition to its caller.

    A caller that fuses the addition into its own next operation saves a pass over memory.
    """

    @abstractmethod
    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` without the bias, as a new array, and the cache.

        Collective if the layer is split.
        """

    @abstractmethod
    def last_bias(self, params: Params) -> Array | None:
        """Return the bias that :meth:`product` leaves out, or None. Not collective."""

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` with the bias, and the cache for the backward pass.

        Collective if the layer is split.
        """
        y, cache = self.product(params, x, run)
        bias = self.last_bias(params)
        if bias is not None:
            add_bias(y, bias)
        return y, cache


class Composite(Layer):
    """Define a layer made of children; the first item of its cache is the list of the children's caches.

    The second value that its ``backward_input`` returns is a sequence with an item for each child, in the same order:
    what this child's ``backward_weights`` needs.
    """

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of all children's parameters, last child to first. Collective if they are split."""
        parts = zip(reversed([*self.children().items()]), reversed(cache[0]), reversed(pending), strict=True)
        for (name, child), child_cache, child_pending in parts:
            poll(params)
            child.backward_weights(params.get(name, {}), child_cache, child_pending, grads.get(name, {}))


class SequenceLayer(Layer):
    """Define a layer that knows which positions of the whole sequences its input holds.

    In this class the input holds all positions; in a context-parallel layer it holds this rank's part of them. A
    tensor-parallel layer calls these methods of its unsplit layer. With context parallelism, the tensor group splits
    the positions that one context rank holds as it would split whole sequences.
    """

    def located(self, run: Run, shape: tuple[int, ...] | None) -> Run:
        """Return ``run`` with the length of the whole sequences, and the ranges of positions that the input holds.

        ``shape`` (samples, positions, ...) is the shape of the input; None if ``run.length`` is known. Collective over
        the context group in a context-parallel layer, if ``run.length`` is 0 (unknown).
        """
        return run if shape is None or len(shape) < 2 else run.on_whole(shape[1])

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a sample whose whole shape is ``shape`` (length, ...).

        Not collective.
        """
        return shape


def require_layer(where: str, layer: Any) -> None:
    """Raise :class:`ConfigError` unless ``layer`` is an instance (not a class) with a method ``specs``.

    ``where`` is the caller's name in the message.
    """
    if isinstance(layer, type) or not callable(getattr(layer, "specs", None)):
        raise ConfigError(f"{where} takes a layer, got {layer!r:.80}")


def require_init(where: str, init: Any) -> None:
    """Raise :class:`ConfigError` unless ``init`` is None or an :class:`~mpizero.types.Init`.

    ``where`` is the caller's name in the message.
    """
    if init is not None and not isinstance(init, Init):
        raise ConfigError(f'{where}: init={init!r} must be None or an mpizero.types.Init, such as Init("normal", 0.02)')


def require_positive(where: str, **values: int) -> None:
    """Raise :class:`ConfigError` for the first of ``values`` that is not a positive integer.

    The message names the caller (``where``) and the value's keyword.
    """
    for name, value in values.items():
        require(f"{where}: {name}", value, whole(1))


def require_rate(where: str, rate: float) -> None:
    """Raise :class:`ConfigError` unless 0 <= ``rate`` < 1, as a dropout rate must be; ``where`` names the caller."""
    require(f"{where}: dropout rate", rate, fraction)


class SamplePart(NamedTuple):
    """Describe which elements of each sample an array holds, where a rank has only a part of each sample.

    The part consists of planes. Each plane consists of ``rows`` rows, and each row of ``width`` contiguous elements.
    Element j of row r of plane p is element ``offset + p * plane_step + r * row_step + j`` of the whole sample, counted
    in C order. If ``rows`` is 1, the part is contiguous: consecutive positions of a sequence, for example, or the
    scores of consecutive heads.
    """

    offset: int
    width: int
    rows: int = 1
    row_step: int = 0
    plane_step: int = 0


Integers = Mapping[str, tuple[IntegerSpec, ...]]


def integers_of(model: Any) -> dict[str, tuple[IntegerSpec, ...]]:
    """Return the specs of a model's integer arrays by block, for blocks that have such arrays. Not collective.

    :func:`layer_integers` says how blocks declare integer arrays. A functional model (one function) has an attribute
    ``integers``, a mapping from names to arrays; each of these arrays is treated as a block of its own.

    Raises
    ------
    ConfigError
        If an array has a dtype that is not in :data:`~mpizero.types.INTEGER_DTYPES`, or the name of a parameter.
    """
    declared: dict[str, tuple[IntegerSpec, ...]] = {}
    if isinstance(model, BlockModel):
        for block, layer in model.blocks.items():
            if specs := layer_integers(layer):
                declared[block] = specs
                taken = {spec.name for spec in layer.specs()}
                if twice := [spec.name for spec in specs if spec.name in taken]:
                    raise ConfigError(f"block {block!r} has {twice[0]!r} as a parameter and as an integer array")
    else:
        for name, array in getattr(model, "integers", {}).items():
            declared[name] = (IntegerSpec("", np.shape(array), np.asarray(array).dtype.name),)
            if name in model.parameters:
                raise ConfigError(f"{name!r} is a parameter and an integer array: give one of them another name")
    for block, specs in declared.items():
        for spec in specs:
            if spec.dtype not in INTEGER_DTYPES:
                name, known = joined(block, spec.name), ", ".join(INTEGER_DTYPES)
                raise ConfigError(f"integer array {name!r} has dtype {spec.dtype}: use {known}")
    return declared


def layer_integers(layer: Any) -> tuple[IntegerSpec, ...]:
    """Return the specs of a layer's integer arrays: its own first, then each child's, with the prefix ``<child>.``.

    If a layer defines a method ``integers()``, the specs are what this method returns. Not collective.
    """
    if (declared := getattr(layer, "integers", None)) is not None:
        return tuple(declared())
    specs = layer.own_integers() if hasattr(layer, "own_integers") else ()
    children = layer.children().items() if hasattr(layer, "children") else ()
    nested = (replace(spec, name=f"{name}.{spec.name}") for name, child in children for spec in layer_integers(child))
    return (*specs, *nested)


def fresh_integers(layer: Any) -> dict[str, Array]:
    """Return new arrays with the start values that a layer declares for its integer arrays, by local name.

    Not collective.
    """
    return {spec.name: np.full(spec.shape, spec.start, spec.dtype) for spec in layer_integers(layer)}


def start_integers(model: Any) -> dict[str, Array]:
    """Return new arrays with the start values of a model's integer arrays, by global name. Not collective.

    The start values are those in the model's attribute ``start_values`` (of a functional model also ``integers``). An
    array that is not there is filled with the number :attr:`IntegerSpec.start` of its spec.

    Raises
    ------
    LayoutError
        If an array of the model's attribute has another shape than declared, or values that the dtype cannot hold.
    """
    start_values = getattr(model, "start_values", None) or {}
    start_values = start_values if isinstance(model, BlockModel) else {**getattr(model, "integers", {}), **start_values}
    integers = {}
    for block, specs in integers_of(model).items():
        for spec in specs:
            name = joined(block, spec.name)
            value = start_values[name] if name in start_values else np.full(spec.shape, spec.start, spec.dtype)
            integers[name] = start_value(name, spec, value)
    return integers


def start_value(name: str, spec: IntegerSpec, value: Any) -> Array:
    """Return a new integer array with the given value; ``name`` is its global name. Not collective.

    Raises
    ------
    LayoutError
        If ``value`` has another shape, or numbers that the dtype cannot hold.
    """
    array = np.asarray(unmasked(value, f"integer array {name!r}"))
    if array.shape == spec.shape and array.dtype.kind in "iubf":
        converted: Array = array.astype(spec.dtype)
        if (converted == array).all():
            return converted
    raise LayoutError(
        f"integer array {name!r} is {spec.dtype} of shape {spec.shape}, it is given {array.dtype} of shape "
        f"{array.shape}{': it cannot hold these values' * (array.shape == spec.shape)}"
    )


def call_located(kind: str, name: str, method: Callable[..., Any], *args: Any) -> Any:
    """Return ``method(*args)``, and add the block's or layer's name to any error that it raises.

    ``kind`` is "block" or "layer", and ``name`` is its name in the model. Collective if ``method`` is.
    """
    try:
        return method(*args)
    except Exception as error:
        add_location(error, kind, name, method)
        raise


def add_location(error: Exception, kind: str, name: str, method: Callable[..., Any]) -> None:
    """Add the name of the block or layer in which an error occurred to the error itself.

    The message of an mpizero error then begins with the name; any other exception gets a note (``add_note``). Errors of
    communication (:class:`CollectiveError`, :class:`PeerFailure`) are not changed, because no layer caused them. Not
    collective. Call this function in an ``except`` clause where it would cost too much to call :func:`call_located` for
    every layer of every micro-batch; a ``try`` statement without an error costs nothing.
    """
    if isinstance(error, CollectiveError | PeerFailure):
        return
    location = f"{kind} {name!r}" if name else ""  # a model of one block may give it no name
    if isinstance(error, MpizeroError):
        error.place = ", ".join(filter(None, [location, error.place]))
    else:
        owner = getattr(method, "__self__", None)
        layer = type(getattr(owner, "stands_for", owner)).__name__
        error.add_note(f"In {location or 'the model'}: {layer}.{getattr(method, '__name__', '')}")
