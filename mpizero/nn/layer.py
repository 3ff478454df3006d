"""Define the base class of all layers, which hold settings only: no parameters, caches or gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from mpizero.errors import ConfigError, UnsupportedError
from mpizero.layout.flat import nested
from mpizero.nn.graph import Graph, NodeOutput
from mpizero.nn.operations import Operations
from mpizero.types import EVALUATE, Array, Group, IntegerSpec, ParameterSpec, Params, Run


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
    - of an averaged parameter (:attr:`ParameterSpec.averaged <mpizero.types.ParameterSpec>`), such as a running mean,
      ``grads[name]`` takes the new value after these samples in place of a gradient;
    - a large layer made of others may call :func:`poll` between them, so that messages in flight make progress;
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

        The default is the input's shape. For a layer made of children that defines no :meth:`operations`, the default
        runs :meth:`forward` once on zeros and returns the shape of its output, or the input's shape if that run fails.
        """
        if type(self).operations is Layer.operations and self.children():
            with suppress(NotImplementedError):
                return _tried(self, shape)[1]
        return shape

    def split(self, group: Group) -> Layer:
        """Return the tensor-parallel form of this layer: each rank of ``group`` holds and computes a part of it.

        The split layer takes and returns whole activations, the same on every rank. Its forward and backward passes are
        collective over the group. Its parameters have the same names as those of this layer, and
        :attr:`ParameterSpec.part` says which part of each this rank holds. If every rank holds a parameter whole
        (``part`` is None), its gradient is the same on every rank when ``backward_weights`` returns. Ranks exchange
        arrays by the methods of ``group`` alone (``docs/split_layers.md``). The default makes the form that the table
        in ``mpizero/nn/split/split_forms.py`` has for the layer's class. It returns the layer itself if the table has
        no form for it, or if the group has one rank.

        Raises
        ------
        ConfigError
            The layer's class is a subclass of one in the table, and does not define ``split`` itself. The form in the
            table might compute something else than the subclass.
        """
        if group.size == 1:
            return self
        # The forms are made of layers, so their module is imported when the first layer is split.
        forms: Mapping[type, Callable[[Any, Group], Layer]]
        forms = import_module("mpizero.nn.split.split_forms").SPLIT_FORMS
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
        must override this method, to say how they are joined.
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
    found = getattr(params, "poll", None)
    if found is not None:
        found()


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
        return {key: watched(held) for key, held in value.items()} if type(value) is dict else value

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
    seen = {id(called) for called, _ in calls}
    if any(id(child) not in seen for child in children):
        raise UnsupportedError(
            f"{name} does not count its products: define operations(), or keep its layers as attributes that forward "
            "calls"
        )
    return sum((found for _, found in calls), Operations()), output
