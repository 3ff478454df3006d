"""Compute activations again in the backward pass instead of keeping them (Chen et al., 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpizero._util.names import explains
from mpizero.nn.layers.wrapper import Wrapper
from mpizero.nn.operations import Operations
from mpizero.types import EVALUATE, Array, Params, Run


@explains
@dataclass(frozen=True)
class Checkpointed(Wrapper):
    """Keep only a layer's input in the forward pass, and compute its cache again in the backward pass.

    The gradients have the same bits as without this wrapper. The second forward pass repeats the first one, including
    dropout masks and, for a split layer, messages. Parameters keep the wrapped layer's names (Chen et al., *Training
    Deep Nets with Sublinear Memory Cost*, 2016).

    Parameters
    ----------
    layer : Layer
        The layer, mostly a whole block such as a :class:`~mpizero.nn.TransformerBlock`.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> wide = mz.nn.Checkpointed(mz.nn.Linear(2, 1000, bias=False))
    >>> y, cache = wide.forward({"weight": np.ones((2, 1000))}, np.array([[1.0, 2.0]]))
    >>> cache[0]  # the input is all that is kept
    array([[1., 2.]])
    >>> wide.operations((2,))  # the forward pass counts again in the backward pass
    Operations(forward=4000, backward_input=8000, backward_weights=4000)
    """

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the layer's output; the returned cache is only ``x`` and ``run``.

        Collective where the layer is split.
        """
        return self.layer.forward(params, x, run)[0], (x, run)

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Array | None:
        """Run the layer forward again to get its cache, then call its ``backward``. Collective where it is split."""
        x, run = cache
        return self.layer.backward(params, self.layer.forward(params, x, run)[1], dy, grads)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Run the layer forward again to get its cache, then call its ``backward_input``.

        The second value returned includes that cache, because :meth:`backward_weights` needs it. Collective where the
        layer is split.
        """
        x, run = cache
        inner = self.layer.forward(params, x, run)[1]
        dx, pending = self.layer.backward_input(params, inner, dy)
        return dx, (inner, pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Call the layer's ``backward_weights`` with the cache that :meth:`backward_input` computed.

        Collective where the layer is split.
        """
        inner, inner_pending = pending
        self.layer.backward_weights(params, inner, inner_pending, grads)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the wrapped layer's operations for one sample of ``shape``, with its forward pass counted twice.

        The second forward pass counts as part of ``backward_input``. Not collective.
        """
        once = self.layer.operations(shape)
        return once + Operations(backward_input=once.forward)
