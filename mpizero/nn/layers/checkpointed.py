"""Compute activations again in the backward pass instead of keeping them (Chen et al., 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpizero.names import explains
from mpizero.nn.layers.wrapper import Wrapper
from mpizero.nn.operations import Operations
from mpizero.types import EVALUATE, Array, Params, Run


@explains
@dataclass(frozen=True)
class Checkpointed(Wrapper):
    """Keep only a layer's input in the forward pass, and compute its cache again in the backward pass.

    The gradients have the same bits as without this wrapper: the second forward pass repeats the first one, with its
    dropout masks and, for a split layer, its messages. Parameters keep the wrapped layer's names.
    """

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Run the layer and drop its cache. Collective where the layer is split."""
        return self.layer.forward(params, x, run)[0], (x, run)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Run the layer forward again, then its input half; the cache lives until the weight half.

        Collective where the layer is split.
        """
        x, run = cache
        inner = self.layer.forward(params, x, run)[1]
        dx, pending = self.layer.backward_input(params, inner, dy)
        return dx, (inner, pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Run the layer's weight half with the cache computed again. Collective where the layer is split."""
        inner, inner_pending = pending
        self.layer.backward_weights(params, inner, inner_pending, grads)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the wrapped layer's operations, with those of the forward pass twice. Not collective."""
        once = self.layer.operations(shape)
        return once + Operations(backward_input=once.forward)
