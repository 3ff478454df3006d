"""Define a wrapper that keeps a layer's parameters from being trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mpizero.names import explains
from mpizero.nn.layers.wrapper import Wrapper
from mpizero.nn.operations import Operations
from mpizero.types import Array, ParameterSpec, Params


@explains
@dataclass(frozen=True)
class Frozen(Wrapper):
    """Use a layer without training it: its parameters have no gradient and no optimizer state.

    The gradient of the layer's input is still computed. Parameters keep the wrapped layer's names.
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
