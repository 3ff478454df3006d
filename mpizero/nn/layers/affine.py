"""Define the base class of layers whose last bias can be added by the next operation, to save a pass over memory."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mpizero.nn.layer import Layer
from mpizero.types import EVALUATE, Array, Params, Run


class Affine(Layer):
    """Define a layer that ends by adding a bias (or none), and can leave that addition to its caller."""

    @abstractmethod
    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Compute the output without the bias, as a new array, and the cache. Collective where the layer is split."""

    @abstractmethod
    def last_bias(self, params: Params) -> Array | None:
        """Return the bias that :meth:`product` leaves out, or None. Not collective."""

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Compute the output and the cache that the backward pass needs. Collective where the layer is split."""
        y, cache = self.product(params, x, run)
        bias = self.last_bias(params)
        if bias is not None:
            y += bias
        return y, cache
