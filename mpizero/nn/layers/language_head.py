"""Define the last block of a language model, which computes logits of its vocabulary."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpizero._util.names import explains
from mpizero.nn.arrays import known
from mpizero.nn.graph import Graph, NodeOutput
from mpizero.nn.layer import Layer, poll
from mpizero.nn.layers.linear import Projection
from mpizero.nn.layers.norm import LayerNorm
from mpizero.nn.operations import Operations
from mpizero.types import EVALUATE, Array, Params, Run


class LanguageHeadBase(Layer):
    """Apply a norm, then project onto the vocabulary; the base class of the unsplit and the split head."""

    @property
    @abstractmethod
    def _layers(self) -> tuple[Layer, Layer]: ...

    def children(self) -> dict[str, Layer]:
        """Return the two layers by name: ``norm`` and ``projection``. Not collective."""
        norm, projection = self._layers
        return {"norm": norm, "projection": projection}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (samples, length, dim) to logits (samples, length, vocabulary); return them and the cache.

        Collective where the projection is split.
        """
        norm, projection = self._layers
        normed, norm_cache = norm.forward(params["norm"], x, run)
        poll(params)
        logits, projection_cache = projection.forward(params["projection"], normed, run)
        return logits, (norm_cache, projection_cache)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs.

        Collective where the projection is split.
        """
        norm, projection = self._layers
        dnormed, projection_pending = projection.backward_input(params["projection"], cache[1], dy)
        poll(params)
        dx, norm_pending = norm.backward_input(params["norm"], cache[0], known(dnormed))
        return dx, (norm_pending, projection_pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of the norm's parameters and of the projection's weight.

        If the weight is tied, only the gradient of its use in the projection is written. Collective where the
        projection is split.
        """
        norm, projection = self._layers
        projection.backward_weights(params["projection"], cache[1], pending[1], grads["projection"])
        poll(params)
        norm.backward_weights(params["norm"], cache[0], pending[0], grads["norm"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the projection's operations for one sample of ``shape``. Not collective."""
        return self._layers[1].operations(shape)


@explains
@dataclass(frozen=True)
class LanguageHead(LanguageHeadBase):
    """Apply the final :class:`LayerNorm`, then project onto the vocabulary: a language model's last block.

    Inputs are (samples, length, dim), outputs are logits (samples, length, vocabulary). No method is collective.

    Parameters
    ----------
    dim, vocabulary : int
        Number of features, and number of different ids.
    tied : str or None
        Name of the parameter that the projection uses as its weight (the token table), or None for one of its own.

    Examples
    --------
    >>> import mpizero as mz
    >>> head = mz.nn.LanguageHead(4, 256, tied="embedding.token.weight")
    >>> [spec.name for spec in head.specs()]
    ['norm.weight', 'norm.bias', 'projection.weight']
    >>> head.output_shape((6, 4))  # of one sample: 6 positions of 4 features
    (6, 256)
    """

    dim: int
    vocabulary: int
    tied: str | None = None

    @cached_property
    def _layers(self) -> tuple[LayerNorm, Projection]:
        return LayerNorm(self.dim), Projection(self.dim, self.vocabulary, self.tied)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with ``vocabulary`` as its last element."""
        return (*shape[:-1], self.vocabulary)

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add nodes for the norm and the projection to the exported computation graph; return the output."""
        norm, projection = self._layers
        return projection.trace(graph, f"{name}.projection", norm.trace(graph, f"{name}.norm", source))
