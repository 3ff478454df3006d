"""Define the base class of layers whose caller can add their last bias, fused into the next operation on the output."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mpizero.nn.layer import Layer
from mpizero.types import EVALUATE, Array, Params, Run


class Affine(Layer):
    """Define a layer that ends by adding a bias (or none), and can leave that addition to its caller.

    A caller that fuses the addition into its own next operation saves a pass over memory.
    """

    @abstractmethod
    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` without the bias, as a new array, and the cache.

        Collective where the layer is split.
        """

    @abstractmethod
    def last_bias(self, params: Params) -> Array | None:
        """Return the bias that :meth:`product` leaves out, or None. Not collective."""

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` with the bias, and the cache for the backward pass.

        Collective where the layer is split.
        """
        y, cache = self.product(params, x, run)
        bias = self.last_bias(params)
        if bias is not None:
            y += bias
        return y, cache
