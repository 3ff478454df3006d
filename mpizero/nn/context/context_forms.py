"""Build the context-parallel form of a model: each rank computes on its part of every sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero.errors import ConfigError, DataError
from mpizero.nn.context.context_layers import (
    ContextBlock,
    ContextDropout,
    ContextEmbedding,
    ContextPosition,
    Positionwise,
    cut_layer,
)
from mpizero.nn.context.ring import Zigzag, gather_lengths, with_zigzag
from mpizero.nn.context.ring_attention import RingSelfAttention
from mpizero.nn.layer import Layer, namespace
from mpizero.nn.layers.activation import Activation
from mpizero.nn.layers.attention import CausalSelfAttention
from mpizero.nn.layers.block import FeedForward, TransformerBlock
from mpizero.nn.layers.checkpointed import Checkpointed
from mpizero.nn.layers.dropout import Dropout
from mpizero.nn.layers.embedding import Embedding, Position, TokenEmbedding
from mpizero.nn.layers.frozen import Frozen
from mpizero.nn.layers.language_head import LanguageHead
from mpizero.nn.layers.linear import Linear, Projection
from mpizero.nn.layers.norm import LayerNorm, RMSNorm
from mpizero.nn.loss import CrossEntropy
from mpizero.nn.models.mlp import Select
from mpizero.nn.sequential import Sequential
from mpizero.nn.split.model import SplitModel
from mpizero.sampletree import leaves_of, map_leaves
from mpizero.types import Array, BlockModel, Group, Loss, Run


@dataclass(frozen=True)
class ContextModel:
    """Hold the context-parallel form of a model, which computes on this rank's part of each sequence.

    Made by :func:`context_model`. Parameters have the names and shapes of those of ``model``. Gradients, loss and
    weight on one rank are this rank's terms; their sums over ``group`` are those of the whole model.
    """

    model: BlockModel
    group: Group
    blocks: Mapping[str, Layer]

    @property
    def loss(self) -> Loss:
        """The model's loss, which takes this rank's part of the targets."""
        return self.model.loss

    @property
    def dtype(self) -> np.dtype[Any]:
        """The same as in the whole model."""
        return self.model.dtype

    @property
    def seed(self) -> int:
        """The same as in the whole model."""
        return self.model.seed

    def run_on(self, x: Array, run: Run) -> Run:
        """Return ``run`` with the length of the whole sequences; ``x`` (samples, places) is this rank's part of them.

        Collective over ``group`` (one small message), unless ``run`` has the length already. With it the blocks need
        no messages of their own to find it.
        """
        return with_zigzag(run, x, self.group)[0]

    def split(self, group: Group) -> BlockModel:
        """Raise an error, because tensor and context parallelism cannot be combined. Not collective."""
        raise _not_both(group, self.group)

    def whole_prediction(self, y: Array) -> Array:
        """Join the ranks' parts ``y`` (samples, places, ...) in the order of the sequence.

        Collective over ``group``; every rank gets the whole.
        """
        lengths = gather_lengths(y, self.group)
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
    """Make the context-parallel form of ``model``, which works on the parts of sequences that :func:`cut_batch` cuts.

    A user's own layer needs a method ``context(group)`` that returns its context-parallel form. If the layer treats
    each place of a sequence on its own, that is the layer itself.

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
        A layer or the loss does not work on parts of sequences, or no layer mixes the places of a sequence (attention).
    """
    if group.size == 1:
        return model
    if isinstance(model, SplitModel):
        raise _not_both(model.group, group)
    blocks = {name: _on_part(layer, group, f"block {name!r}") for name, layer in model.blocks.items()}
    name = type(model).__name__
    if not any(map(_attends, model.blocks.values())):
        raise ConfigError(
            f"{name} has no attention along a sequence, so there is nothing for a context group of {group.size} ranks "
            "to cut; set context=1 and use those ranks for data"
        )
    if not isinstance(model.loss, CrossEntropy):
        raise ConfigError(
            f"{name}: the loss {type(model.loss).__name__} does not add up over parts of a sequence; "
            "use CrossEntropy, or set context=1"
        )
    return ContextModel(model, group, blocks)


def cut_batch(x: Any, y: Any, group: Group) -> tuple[Any, Any]:
    """Copy this rank's places out of a batch: each sequence is cut into 2 * size chunks, of which rank r gets two.

    These are chunks r and 2 * size - 1 - r (:class:`Zigzag`). Not collective; every rank of ``group`` must have the
    same batch.

    Parameters
    ----------
    x, y : Array, or tree of arrays
        Ids and targets: arrays (samples, length, ...), all of the same length, which is at least 1.
    group : Group
        The context group.

    Returns
    -------
    tuple
        Contiguous arrays (samples, places, ...); ``x`` and ``y`` themselves where the group has one rank.

    Raises
    ------
    DataError
        The arrays have no sequence axis, or their lengths differ. All ranks raise this error.
    """
    shapes = [tuple(getattr(leaf, "shape", ())) for value in (x, y) for leaf in leaves_of(value)] or [()]
    if len(shapes[0]) < 2 or shapes[0][1] < 1 or any(shape[:2] != shapes[0][:2] for shape in shapes):
        raise DataError(
            "context parallelism cuts inputs and targets of (samples, length >= 1), "
            f"it was given {' and '.join(map(str, shapes))}; set context=1 for data without a sequence axis"
        )
    if group.size == 1:
        return x, y
    first, second = Zigzag(shapes[0][1], group.size).runs(group.rank)

    def cut(a: Array) -> Array:
        places: Array = namespace(a).concatenate([a[:, first], a[:, second]], axis=1)
        return places

    return map_leaves(cut, x), map_leaves(cut, y)


def _not_both(tensor: Group, context: Group) -> ConfigError:
    return ConfigError(
        f"tensor parallelism over {tensor.size} ranks and context parallelism over {context.size} cannot be combined; "
        "set tensor=1 or context=1"
    )


_FORMS: Mapping[type[Layer], type[Layer]] = {
    CausalSelfAttention: RingSelfAttention,
    Dropout: ContextDropout,
    Position: ContextPosition,
    TokenEmbedding: ContextEmbedding,
    TransformerBlock: ContextBlock,
}
_WRAPPERS = (Checkpointed, Frozen)
_PRODUCTS = (FeedForward, LanguageHead, Linear, Projection)
_PLACE_BY_PLACE = (Embedding, LayerNorm, RMSNorm, Select)


def _attends(layer: Any) -> bool:
    """Tell whether a layer mixes the places of a sequence; assumed of every user's layer that has ``context``."""
    if isinstance(layer, CausalSelfAttention) or hasattr(layer, "context"):
        return True
    inside = [layer.layer] if isinstance(layer, _WRAPPERS) else layer.children().values()
    return any(map(_attends, inside))


def _on_part(layer: Any, group: Group, where: str) -> Any:
    """Return the context-parallel form of ``layer``; the layer itself if it treats each place on its own."""
    if hasattr(layer, "context"):
        return layer.context(group)
    if form := _FORMS.get(type(layer)):
        return cut_layer(layer, form, group)
    if isinstance(layer, _WRAPPERS):
        inner = _on_part(layer.layer, group, where)
        return layer if inner is layer.layer else type(layer)(inner)
    if isinstance(layer, Sequential):
        inside = {name: _on_part(child, group, f"{where}, {name!r}") for name, child in layer.layers}
        return layer if all(inside[name] is child for name, child in layer.layers) else Sequential(inside)
    if type(layer) in _PRODUCTS:
        return Positionwise(layer, group)
    if type(layer) in _PLACE_BY_PLACE or isinstance(layer, Activation):
        return layer
    raise ConfigError(
        f"{where}: {type(layer).__name__} does not say how it works on a part of a sequence; context parallelism "
        "takes GPT, layers of mpizero.nn, and layers with a method context(group); set context=1 for other models"
    )
