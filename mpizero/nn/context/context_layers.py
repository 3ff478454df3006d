"""Define context-parallel forms of layers: each rank of a context group computes on its positions of every sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar, cast

from mpizero.nn.context.ring import ContextLayer, located
from mpizero.nn.context.ring_attention import RingSelfAttention
from mpizero.nn.layer import Layer
from mpizero.nn.layers.attention import CausalSelfAttention
from mpizero.nn.layers.block import FeedForward, TransformerBlock
from mpizero.nn.layers.dropout import Dropout
from mpizero.nn.layers.embedding import Embedding, Position, TokenEmbedding
from mpizero.nn.layers.norm import LayerNorm
from mpizero.nn.layers.wrapper import Wrapper
from mpizero.nn.operations import Operations
from mpizero.nn.sample_part import SamplePart
from mpizero.types import EVALUATE, Array, Group, Params, Run

L = TypeVar("L")


@dataclass(frozen=True)
class ContextDropout(Dropout):
    """Apply :class:`Dropout` to this rank's positions, with the mask that they have in the whole sequence.

    ``x`` is (samples, positions of this rank, ...); ``group`` is the context group.
    """

    group: Group = field(kw_only=True)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` with the mask applied, or ``x`` itself if not in training; and the cache.

        Collective over ``group`` in training if ``run.length`` is 0.
        """
        training = run.training and self.rate > 0.0  # not drops(), which ranks without places would deny
        return super().forward(params, x, located(run, x.shape, self.group) if training else run)

    def mask(self, x: Array, run: Run, window: SamplePart | None = None) -> Array:
        """Return a copy of ``x`` with the mask applied.

        ``x`` holds this rank's positions of each sample, or the elements that ``window`` describes. Collective over
        ``group`` if ``run.length`` is 0 and ``window`` is None.
        """
        if window is not None:
            return super().mask(x, run, window)
        return self.mask_pieces(x, run, located(run, x.shape, self.group).pieces())


@dataclass(frozen=True)
class ContextPosition(ContextLayer, Position):
    """Apply :class:`Position` to the positions that this rank holds; ``group`` is the context group.

    Rows of the weight's gradient for positions that other ranks hold get zeros. The forward pass is collective over
    ``group`` if ``run.length`` is 0.
    """

    group: Group = field(kw_only=True)


@dataclass(frozen=True)
class ContextEmbedding(ContextLayer, TokenEmbedding):
    """Apply :class:`TokenEmbedding` to the positions that this rank holds; ``group`` is the context group.

    The gradients of both tables are computed from these positions only; their sums over the ranks are the whole
    gradients. The forward pass is collective over ``group`` if ``run.length`` is 0. Its errors are raised on all ranks,
    but for an id outside the vocabulary, which only the ranks that hold it find.
    """

    group: Group = field(kw_only=True)

    @cached_property
    def _layers(self) -> tuple[Embedding, ContextPosition, ContextDropout]:
        return (
            Embedding(self.vocabulary, self.features),
            ContextPosition(self.sequence, self.features, group=self.group),
            ContextDropout(self.dropout, self.site, group=self.group),
        )


@dataclass(frozen=True)
class ContextBlock(ContextLayer, TransformerBlock):
    """Apply :class:`TransformerBlock` to the positions that this rank holds; ``group`` is the context group."""

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
        """Return the output for ``x`` (samples, positions of this rank, dim), of the same shape, and the cache.

        Collective over ``group``.
        """
        return super().forward(params, x, self.located(run, x.shape))


@dataclass(frozen=True)
class Positionwise(ContextLayer, Wrapper):
    """Run a layer that treats each position by itself, and count its operations for this rank's positions only."""

    group: Group

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the wrapped layer's operations for this rank's positions of a sample of ``shape``."""
        return self.layer.operations(self.own_shape(shape))


def cut_layer(layer: Layer, form: Callable[..., L], group: Group) -> L:
    """Return the context-parallel form of ``layer``: an object of class ``form`` with the same fields and ``group``."""
    return form(**{item.name: getattr(layer, item.name) for item in fields(cast(Any, layer))}, group=group)
