"""Define wrappers that keep a layer's parameters, or some of them, from being trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpizero._util.names import explains
from mpizero.nn.arrays import namespace
from mpizero.nn.layers.wrapper import Wrapper
from mpizero.nn.operations import Operations
from mpizero.types import Array, ParameterSpec, Params


@explains
@dataclass(frozen=True)
class Frozen(Wrapper):
    """Use a layer without training it: its parameters have no gradient and no optimizer state.

    The gradient of the layer's input is still computed. Parameters keep the wrapped layer's names.
    :func:`mpizero.nn.freeze` does it for the parameters of a whole model whose names fit a pattern.

    Parameters
    ----------
    layer : Layer
        The layer.

    Examples
    --------
    >>> import mpizero as mz
    >>> [spec.trainable for spec in mz.nn.Frozen(mz.nn.Linear(3, 2)).specs()]
    [False, False]
    """

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the wrapped layer's parameters as not trainable. Not collective."""
        return tuple(replace(spec, trainable=False) for spec in self.layer.specs())

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of the wrapped layer's input, and None. Collective where the layer is split."""
        return self.layer.backward_input(params, cache, dy)[0], None

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Do nothing, because the parameters have no gradients. Not collective."""

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the wrapped layer's operations, with 0 for the gradients of its weights. Not collective."""
        return replace(self.layer.operations(shape), backward_weights=0)


@explains
@dataclass(frozen=True)
class PartlyFrozen(Wrapper):
    """Use a layer without training the parameters ``names``, which are named as in the layer's specs.

    The layer computes all gradients; those of frozen parameters are not used.
    """

    names: tuple[str, ...]

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the wrapped layer's parameters, those with the given names as not trainable. Not collective."""
        return frozen_specs(self.layer.specs(), self.names)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Call the wrapped layer's ``backward_weights``. Collective where the layer is split."""
        self.layer.backward_weights(params, cache, pending, completed(params, grads, self.names))

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Array | None:
        """Call the wrapped layer's ``backward``. Collective where the layer is split."""
        return self.layer.backward(params, cache, dy, completed(params, grads, self.names))


def frozen_specs(specs: tuple[ParameterSpec, ...], names: tuple[str, ...]) -> tuple[ParameterSpec, ...]:
    """Return ``specs`` with those of the given names as not trainable. Not collective."""
    return tuple(replace(spec, trainable=spec.trainable and spec.name not in names) for spec in specs)


def completed(params: Params, grads: Params, names: tuple[str, ...]) -> Params:
    """Return ``grads`` with a new array for each parameter of ``names`` that has none. Not collective."""
    found = grads
    for name in names:
        path = name.split(".")
        if _at(found, path) is None:
            like = _at(params, path)
            found = _with(found, path, namespace(like).empty_like(like))
    return found


def _at(tree: Any, path: list[str]) -> Any:
    for step in path:
        tree = tree.get(step) if isinstance(tree, Mapping) else None
    return tree


def _with(tree: Params, path: list[str], value: Any) -> dict[str, Any]:
    inner = value if len(path) == 1 else _with(tree.get(path[0], {}), path[1:], value)
    return {**tree, path[0]: inner}
