"""Define context-parallel forms of layers: each rank of a context group computes on its positions of every sequence."""

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
    """Apply :class:`Dropout` to this rank's positions, with the mask that they have in the whole sequence.

    ``x`` is (samples, positions of this rank, ...); ``group`` is the context group.
    """

    group: Group = field(kw_only=True)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` with the mask applied, or ``x`` itself if not in training; and the cache.

        Collective over ``group`` in training if ``run.length`` is 0.
        """
        training = run.training and self.rate > 0.0  # not drops(), which ranks without places would deny
        return super().forward(params, x, with_zigzag(run, x, self.group)[0] if training else run)

    def mask(self, x: Array, run: Run, window: SamplePart | None = None) -> Array:
        """Return a copy of ``x`` with the mask applied.

        ``x`` holds this rank's positions of each sample, or the elements that ``window`` describes. Collective over
        ``group`` if ``run.length`` is 0 and ``window`` is None.
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
    """Apply :class:`Position` to the positions that this rank holds; ``group`` is the context group."""

    group: Group = field(kw_only=True)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` (samples, positions of this rank, features) plus the table's rows for these positions.

        The cache is the :class:`Zigzag` cut of the sequences. Collective over ``group`` if ``run.length`` is 0.
        """
        zigzag = with_zigzag(run, x, self.group)[1]
        y: Array = namespace(x).array(x)
        self.add(params["weight"], y, zigzag)
        return y, zigzag

    def add(self, weight: Array, x: Array, zigzag: Zigzag) -> None:
        """Add the rows of ``weight`` for the positions that this rank holds to ``x``, in place.

        ``zigzag`` is the cut of the sequences. Not collective.
        """
        for here, run in zigzag.pieces(self.group.rank):
            x[:, here] += weight[run]

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the weight's gradient with the sum of ``dy`` over the samples.

        Rows for positions that other ranks hold get zeros. Not collective.
        """
        gradient = grads["weight"]
        gradient[...] = 0
        for here, run in cache.pieces(self.group.rank):
            namespace(pending).sum(pending[:, here], axis=0, out=gradient[run])


@dataclass(frozen=True)
class ContextEmbedding(TokenEmbedding):
    """Apply :class:`TokenEmbedding` to the positions that this rank holds; ``group`` is the context group."""

    group: Group = field(kw_only=True)

    @cached_property
    def _layers(self) -> tuple[Embedding, ContextPosition, ContextDropout]:
        return (
            Embedding(self.vocabulary, self.features),
            ContextPosition(self.sequence, self.features, group=self.group),
            ContextDropout(self.dropout, self.site, group=self.group),
        )

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ids (samples, positions of this rank) to vectors (samples, positions of this rank, features).

        Returns the vectors and the cache. Collective over ``group`` if ``run.length`` is 0.

        Raises
        ------
        DataError
            An id is outside the vocabulary; only the ranks that hold it raise this error. Or sequences are longer than
            ``sequence``, or the ranks' inputs are not parts of the same sequences; all ranks raise this error.
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
        """Overwrite the gradients of the token and the position table, computed from this rank's positions only.

        Their sums over the ranks are the whole gradients. Not collective.
        """
        token, position, _ = self._layers
        token.backward_weights(params["token"], cache[0], pending, grads["token"])
        position.backward_weights(params["position"], cache[2], pending, grads["position"])


@dataclass(frozen=True)
class ContextBlock(TransformerBlock):
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
        return super().forward(params, x, with_zigzag(run, x, self.group)[0])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of this rank for one sample; ``shape`` is the shape of the whole sample.

        Not collective.
        """
        _, attention, _, feed_forward = self._layers
        return attention.operations(shape) + feed_forward.operations(own_shape(shape, self.group))


@dataclass(frozen=True)
class Positionwise(Wrapper):
    """Run a layer that treats each position by itself, and count its operations for this rank's positions only."""

    group: Group

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the wrapped layer's operations for this rank's positions of a sample of ``shape``."""
        return self.layer.operations(own_shape(shape, self.group))


def own_shape(shape: tuple[int, ...], group: Group) -> tuple[int, ...]:
    """Return the shape of this rank's part of a sample whose whole shape is ``shape`` (length, ...)."""
    return (Zigzag(shape[0], group.size).sizes[group.rank], *shape[1:])


def cut_layer(layer: Layer, form: Callable[..., L], group: Group) -> L:
    """Return the context-parallel form of ``layer``: an object of class ``form`` with the same fields and ``group``."""
    return form(**{item.name: getattr(layer, item.name) for item in fields(cast(Any, layer))}, group=group)
