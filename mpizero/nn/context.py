"""Context parallelism: long sequences cut among ranks, every layer on its own part of them.

Layers that work place by place need nothing; the others have a form here that knows which places a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np

from mpizero.errors import ConfigError, DataError
from mpizero.nn.activation import Activation
from mpizero.nn.attention import CausalSelfAttention
from mpizero.nn.block import FeedForward, TransformerBlock
from mpizero.nn.checkpointed import Checkpointed
from mpizero.nn.dropout import Dropout, Window
from mpizero.nn.embedding import Embedding, Position, TokenEmbedding
from mpizero.nn.frozen import Frozen
from mpizero.nn.gpt import LanguageHead
from mpizero.nn.layer import Layer, namespace
from mpizero.nn.linear import Linear, Projection
from mpizero.nn.loss import CrossEntropy
from mpizero.nn.mlp import Select
from mpizero.nn.norm import LayerNorm, RMSNorm
from mpizero.nn.ring import Zigzag, agreed_lengths, placed
from mpizero.nn.ring_attention import RingSelfAttention
from mpizero.nn.sequential import Sequential
from mpizero.types import EVALUATE, Array, BlockModel, Group, Loss, Params, Run

L = TypeVar("L")


@dataclass(frozen=True)
class ContextDropout(Dropout):
    """:class:`Dropout` of this rank's places with the masks that they have in the whole sequence.

    ``x`` is (samples, places, ...); ``group`` is the context group.
    """

    group: Group = field(kw_only=True)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Mask ``x`` in training; otherwise return ``x`` itself.

        Collective over ``group`` in training, unless ``run`` knows the length.
        """
        training = run.training and self.rate > 0.0  # not drops(), which ranks without places would deny
        return super().forward(params, x, placed(run, x, self.group)[0] if training else run)

    def mask(self, x: Array, run: Run, window: Window | None = None) -> Array:
        """Mask ``x``, whose samples are the parts that this rank holds, or those that ``window`` says.

        Collective over ``group``, unless ``run`` knows the length or ``window`` is given.
        """
        if window is not None:
            return super().mask(x, run, window)
        (here, first), (there, second) = placed(run, x, self.group)[1].pieces(self.group.rank)
        width = x.size // (x.shape[0] * x.shape[1])
        low = Window(first.start * width, (first.stop - first.start) * width)
        high = Window(second.start * width, (second.stop - second.start) * width)
        if low.width == high.width:  # both runs at once, without a copy
            return super().mask(x, run, low._replace(rows=2, row_step=high.offset - low.offset))
        runs = [super().mask(x[:, here], run, low)]
        if high.width:
            runs.append(super().mask(x[:, there], run, high))
        y: Array = namespace(x).concatenate(runs, axis=1)
        return y


@dataclass(frozen=True)
class ContextPosition(Position):
    """:class:`Position` of the places that this rank holds. ``group`` is the context group."""

    group: Group = field(kw_only=True)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Add positions to ``x`` (samples, places, features).

        Collective over ``group``, unless ``run`` knows the length.
        """
        zigzag = placed(run, x, self.group)[1]
        y: Array = namespace(x).array(x)
        self.add(params["weight"], y, zigzag)
        return y, zigzag

    def add(self, weight: Array, x: Array, zigzag: Zigzag) -> None:
        """Add the rows of the places that this rank holds to ``x``, in place. Not collective."""
        for here, run in zigzag.pieces(self.group.rank):
            x[:, here] += weight[run]

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradient with the sum of ``dy`` over samples, zero where this rank has no place.

        Not collective.
        """
        gradient = grads["weight"]
        gradient[...] = 0
        for here, run in cache.pieces(self.group.rank):
            namespace(pending).sum(pending[:, here], axis=0, out=gradient[run])


@dataclass(frozen=True)
class ContextEmbedding(TokenEmbedding):
    """:class:`TokenEmbedding` of the places that this rank holds. ``group`` is the context group."""

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

        Collective over ``group``, unless ``run`` knows the length.

        Raises
        ------
        DataError
            For ids outside the vocabulary; on all ranks alike: for sequences longer than ``sequence``, and for inputs
            that are not parts of the same sequences.
        """
        run, zigzag = placed(run, x, self.group)
        if x.ndim != 2 or zigzag.length > self.sequence:
            raise DataError(
                f"the model takes ids of shape (samples, length <= {self.sequence}), the input has shape "
                f"{tuple(x.shape)} of sequences of {zigzag.length}; cut the input or build the model with a longer "
                "sequence"
            )
        token, position, dropout = self._layers
        vectors, ids = token.forward(params["token"], x, run)
        position.add(params["position"]["weight"], vectors, zigzag)
        y, mask = dropout.forward({}, vectors, run)
        return y, (ids, mask, zigzag)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite both tables' gradients with this rank's share. Not collective."""
        token, position, _ = self._layers
        token.backward_weights(params["token"], cache[0], pending, grads["token"])
        position.backward_weights(params["position"], cache[2], pending, grads["position"])


@dataclass(frozen=True)
class ContextBlock(TransformerBlock):
    """:class:`TransformerBlock` of the places that this rank holds. ``group`` is the context group."""

    group: Group = field(kw_only=True)

    @cached_property
    def _layers(self) -> tuple[LayerNorm, CausalSelfAttention, LayerNorm, FeedForward]:
        whole = TransformerBlock(**{item.name: getattr(self, item.name) for item in fields(TransformerBlock)})
        norm1, attention, norm2, feed_forward = whole._layers
        return norm1, _cut(attention, RingSelfAttention, self.group), norm2, feed_forward

    @cached_property
    def _dropouts(self) -> tuple[Dropout, Dropout]:
        return (
            ContextDropout(self.dropout, self.site + 1, group=self.group),
            ContextDropout(self.dropout, self.site + 2, group=self.group),
        )

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (samples, places, dim) to the same shape. Collective over ``group``."""
        return super().forward(params, x, placed(run, x, self.group)[0])


@dataclass(frozen=True)
class ContextModel:
    """A model whose blocks work on this rank's part of each sequence; made by :func:`context_model`.

    Parameters have the names and shapes of ``model``'s. Their gradients on one rank are its share of the sum, and so
    are the loss and its weight: both add up over ``group``.
    """

    model: BlockModel
    group: Group

    @cached_property
    def blocks(self) -> Mapping[str, Layer]:
        """The blocks by name, in order."""
        return {name: _on_part(layer, self.group, f"block {name!r}") for name, layer in self.model.blocks.items()}

    @property
    def loss(self) -> Loss:
        """The model's loss, which takes this rank's part of the targets."""
        return self.model.loss

    @property
    def dtype(self) -> np.dtype[Any]:
        """The model's."""
        return self.model.dtype

    @property
    def seed(self) -> int:
        """The model's."""
        return self.model.seed

    def whole_prediction(self, y: Array) -> Array:
        """Put the ranks' parts ``y`` (samples, places, ...) together in the order of the sequence.

        Collective over ``group``; every rank gets the whole.
        """
        lengths = agreed_lengths(y, self.group)
        parts = self.group.all_gather(y, 1, lengths, tag="context predictions")
        zigzag, whole = Zigzag(sum(lengths), self.group.size), namespace(y).empty_like(parts)
        start = 0
        for rank, length in enumerate(lengths):
            for here, run in zigzag.pieces(rank):
                whole[:, run] = parts[:, start + here.start : start + here.stop]
            start += length
        result: Array = whole
        return result


def context_model(model: BlockModel, group: Group) -> BlockModel:
    """Make the form of ``model`` that works on parts of sequences, as :func:`cut_batch` cuts them.

    Not collective. A layer of the user's says how it does so by a method ``context(group)`` that returns such a layer,
    itself if it works place by place.

    Parameters
    ----------
    model : BlockModel
        A GPT, or a model of the library's layers and of layers with ``context``. Its loss is a :class:`CrossEntropy`.
    group : Group
        The context group.

    Returns
    -------
    BlockModel
        ``model`` itself where the group has one rank, a :class:`ContextModel` otherwise.

    Raises
    ------
    ConfigError
        A layer, or the loss, does not work on parts of sequences; or no layer looks along a sequence.
    """
    if group.size == 1:
        return model
    cut = ContextModel(model, group)
    name = type(model).__name__
    if not any(map(_attends, cut.blocks.values())):
        raise ConfigError(
            f"{name} has no attention along a sequence, so there is nothing for a context group of {group.size} ranks "
            "to cut; set context=1 and use those ranks for data"
        )
    if not isinstance(model.loss, CrossEntropy):
        raise ConfigError(
            f"{name}: the loss {type(model.loss).__name__} does not add up over parts of a sequence; "
            "use CrossEntropy, or set context=1"
        )
    return cut


def cut_batch(x: Array, y: Array, group: Group) -> tuple[Array, Array]:
    """Copy this rank's places out of a batch: chunks r and 2 * size - 1 - r of 2 * size.

    Not collective; every rank of ``group`` must have the same batch.

    Parameters
    ----------
    x, y : Array
        Ids and targets, (samples, length, ...); any length of at least 1.
    group : Group
        The context group.

    Returns
    -------
    tuple of Array
        Contiguous arrays (samples, places, ...); ``x`` and ``y`` themselves where the group has one rank.

    Raises
    ------
    DataError
        On all ranks alike: the arrays have no sequence axis, or different ones.
    """
    if x.ndim < 2 or x.shape[1] < 1 or y.shape[:2] != x.shape[:2]:
        raise DataError(
            "context parallelism cuts inputs and targets of (samples, length >= 1), "
            f"it was given {tuple(x.shape)} and {tuple(y.shape)}; set context=1 for data without a sequence axis"
        )
    if group.size == 1:
        return x, y
    first, second = Zigzag(x.shape[1], group.size).runs(group.rank)
    cut_x, cut_y = (namespace(a).concatenate([a[:, first], a[:, second]], axis=1) for a in (x, y))
    return cut_x, cut_y


def _cut(layer: Layer, form: Callable[..., L], group: Group) -> L:
    """Describe ``layer`` in its form for parts of sequences, which has the same fields and ``group``."""
    return form(**{item.name: getattr(layer, item.name) for item in fields(cast(Any, layer))}, group=group)


_FORMS: Mapping[type[Layer], type[Layer]] = {
    CausalSelfAttention: RingSelfAttention,
    Dropout: ContextDropout,
    Position: ContextPosition,
    TokenEmbedding: ContextEmbedding,
    TransformerBlock: ContextBlock,
}
_PLACE_BY_PLACE = (Embedding, FeedForward, LanguageHead, LayerNorm, Linear, Projection, RMSNorm, Select)


def _attends(layer: Any) -> bool:
    """Tell whether a layer in its form for parts of sequences looks along them; a user's says so by ``context``."""
    if isinstance(layer, RingSelfAttention) or hasattr(layer, "context"):
        return True
    inside = [layer.layer] if isinstance(layer, Checkpointed | Frozen) else layer.children().values()
    return any(map(_attends, inside))


def _on_part(layer: Any, group: Group, where: str) -> Any:
    """Return the form of ``layer`` for parts of sequences; itself if it works place by place."""
    if hasattr(layer, "context"):
        return layer.context(group)
    if form := _FORMS.get(type(layer)):
        return _cut(layer, form, group)
    if isinstance(layer, Checkpointed | Frozen):
        inner = _on_part(layer.layer, group, where)
        return layer if inner is layer.layer else type(layer)(inner)
    if isinstance(layer, Sequential):
        inside = {name: _on_part(child, group, f"{where}, {name!r}") for name, child in layer.layers}
        return layer if all(inside[name] is child for name, child in layer.layers) else Sequential(inside)
    if type(layer) in _PLACE_BY_PLACE or isinstance(layer, Activation):
        return layer
    raise ConfigError(
        f"{where}: {type(layer).__name__} does not say how it works on a part of a sequence; context parallelism "
        "takes GPT, layers of mpizero.nn, and layers with a method context(group); set context=1 for other models"
    )
