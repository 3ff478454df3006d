"""Define context-parallel forms of layers, which compute on this rank's places of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar, cast

from mpizero.errors import DataError
from mpizero.nn.context.ring import Zigzag, with_zigzag
from mpizero.nn.context.ring_attention import RingSelfAttention
from mpizero.nn.layer import Layer, namespace
from mpizero.nn.layers.attention import CausalSelfAttention
from mpizero.nn.layers.block import FeedForward, TransformerBlock
from mpizero.nn.layers.dropout import Dropout, SamplePart
from mpizero.nn.layers.embedding import Embedding, Position, TokenEmbedding
from mpizero.nn.layers.norm import LayerNorm
from mpizero.nn.layers.wrapper import Wrapper
from mpizero.nn.operations import Operations
from mpizero.types import EVALUATE, Array, Group, Params, Run

L = TypeVar("L")


@dataclass(frozen=True)
class ContextDropout(Dropout):
    """Apply :class:`Dropout` to this rank's places, with the mask that the places have in the whole sequence.

    ``x`` is (samples, places, ...); ``group`` is the context group.
    """

    group: Group = field(kw_only=True)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Mask ``x`` in training; otherwise return ``x`` itself.

        Collective over ``group`` in training, unless ``run`` has the sequences' length.
        """
        training = run.training and self.rate > 0.0  # not drops(), which ranks without places would deny
        return super().forward(params, x, with_zigzag(run, x, self.group)[0] if training else run)

    def mask(self, x: Array, run: Run, window: SamplePart | None = None) -> Array:
        """Mask ``x``, which holds this rank's places of each sample, or the elements that ``window`` describes.

        Collective over ``group``, unless ``run`` has the sequences' length or ``window`` is given.
        """
        if window is not None:
            return super().mask(x, run, window)
        (here, first), (there, second) = with_zigzag(run, x, self.group)[1].pieces(self.group.rank)
        width = x.size // (x.shape[0] * x.shape[1])
        low = SamplePart(first.start * width, (first.stop - first.start) * width)
        high = SamplePart(second.start * width, (second.stop - second.start) * width)
        if low.width == high.width:  # both runs at once, without a copy
            return super().mask(x, run, low._replace(rows=2, row_step=high.offset - low.offset))
        runs = [super().mask(x[:, here], run, low)]
        if high.width:
            runs.append(super().mask(x[:, there], run, high))
        y: Array = namespace(x).concatenate(runs, axis=1)
        return y


@dataclass(frozen=True)
class ContextPosition(Position):
    """Apply :class:`Position` to the places that this rank holds. ``group`` is the context group."""

    group: Group = field(kw_only=True)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Add positions to ``x`` (samples, places, features).

        Collective over ``group``, unless ``run`` has the sequences' length.
        """
        zigzag = with_zigzag(run, x, self.group)[1]
        y: Array = namespace(x).array(x)
        self.add(params["weight"], y, zigzag)
        return y, zigzag

    def add(self, weight: Array, x: Array, zigzag: Zigzag) -> None:
        """Add the table's rows for the places that this rank holds to ``x``, in place. Not collective."""
        for here, run in zigzag.pieces(self.group.rank):
            x[:, here] += weight[run]

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradient with the sum of ``dy`` over samples; it is zero for places of other ranks.

        Not collective.
        """
        gradient = grads["weight"]
        gradient[...] = 0
        for here, run in cache.pieces(self.group.rank):
            namespace(pending).sum(pending[:, here], axis=0, out=gradient[run])


@dataclass(frozen=True)
class ContextEmbedding(TokenEmbedding):
    """Apply :class:`TokenEmbedding` to the places that this rank holds. ``group`` is the context group."""

    group: Group = field(kw_only=True)

    @cached_property
    def _layers(self) -> tuple[Embedding, ContextPosition, ContextDropout]:
        return (
            Embedding(self.vocabulary, self.features),
            ContextPosition(self.sequence, self.features, group=self.group),
            ContextDropout(self.dropout, self.site, group=self.group),
        )

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ids (samples, places) to vectors (samples, places, features).

        Collective over ``group``, unless ``run`` has the sequences' length.

        Raises
        ------
        DataError
            An id is outside the vocabulary. Or, on all ranks: sequences are longer than ``sequence``, or the ranks'
            inputs are not parts of the same sequences.
        """
        run, zigzag = with_zigzag(run, x, self.group)
        if x.ndim != 2 or zigzag.length > self.sequence:
            raise DataError(
                f"TokenEmbedding: takes ids of shape (samples, length <= {self.sequence}), the input has shape "
                f"{tuple(x.shape)} of sequences of {zigzag.length}; cut the input or build the model with a longer "
                "sequence"
            )
        token, position, dropout = self._layers
        vectors, ids = token.forward(params["token"], x, run)
        position.add(params["position"]["weight"], vectors, zigzag)
        y, mask = dropout.forward({}, vectors, run)
        return y, (ids, mask, zigzag)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite both tables' gradients with the terms of this rank's places. Not collective."""
        token, position, _ = self._layers
        token.backward_weights(params["token"], cache[0], pending, grads["token"])
        position.backward_weights(params["position"], cache[2], pending, grads["position"])


@dataclass(frozen=True)
class ContextBlock(TransformerBlock):
    """Apply :class:`TransformerBlock` to the places that this rank holds. ``group`` is the context group."""

    group: Group = field(kw_only=True)

    @cached_property
    def _layers(self) -> tuple[LayerNorm, CausalSelfAttention, LayerNorm, FeedForward]:
        whole = TransformerBlock(**{item.name: getattr(self, item.name) for item in fields(TransformerBlock)})
        norm1, attention, norm2, feed_forward = whole._layers
        return norm1, cut_layer(attention, RingSelfAttention, self.group), norm2, feed_forward

    @cached_property
    def _dropouts(self) -> tuple[Dropout, Dropout]:
        return (
            ContextDropout(self.dropout, self.site + 1, group=self.group),
            ContextDropout(self.dropout, self.site + 2, group=self.group),
        )

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (samples, places, dim) to the same shape. Collective over ``group``."""
        return super().forward(params, x, with_zigzag(run, x, self.group)[0])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of this rank; ``shape`` is the shape of a whole sample. Not collective."""
        _, attention, _, feed_forward = self._layers
        return attention.operations(shape) + feed_forward.operations(own_shape(shape, self.group))


@dataclass(frozen=True)
class Positionwise(Wrapper):
    """Run a layer that treats each place on its own, and count its operations for this rank's places only."""

    group: Group

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the wrapped layer's operations for this rank's places of a sample of ``shape``."""
        return self.layer.operations(own_shape(shape, self.group))


def own_shape(shape: tuple[int, ...], group: Group) -> tuple[int, ...]:
    """Return the shape of this rank's part of a sample of ``shape`` (length, ...)."""
    return (Zigzag(shape[0], group.size).sizes[group.rank], *shape[1:])


def cut_layer(layer: Layer, form: Callable[..., L], group: Group) -> L:
    """Make the context-parallel form of ``layer``: an object of class ``form`` with the same fields and ``group``."""
    return form(**{item.name: getattr(layer, item.name) for item in fields(cast(Any, layer))}, group=group)
