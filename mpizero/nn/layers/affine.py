"""Define layers that end with a bias, which the next layer can add in its own pass over memory."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mpizero.nn.layer import Layer
from mpizero.types import EVALUATE, Array, Params, Run


class Affine(Layer):
    """Define a layer whose last operation adds a bias, if it has one."""

    @abstractmethod
    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Compute the output before the bias is added, a new array, and the cache. Collective as the layer is."""

    @abstractmethod
    def last_bias(self, params: Params) -> Array | None:
        """Return the bias of the last axis, or None. Not collective."""

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Compute the output and the cache that the backward pass needs. Collective where the layer is split."""
        y, cache = self.product(params, x, run)
        bias = self.last_bias(params)
        if bias is not None:
            y += bias
        return y, cache
