"""Build the context-parallel form of a model: each rank computes on its part of every sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpizero._util.pytree import leaves_of, map_leaves
from mpizero.errors import ConfigError, DataError
from mpizero.nn.arrays import namespace
from mpizero.nn.context.context_layers import (
    ContextBlock,
    ContextDropout,
    ContextEmbedding,
    ContextPosition,
    Positionwise,
    cut_layer,
)
from mpizero.nn.context.ring import Zigzag, gather_lengths, located
from mpizero.nn.context.ring_attention import RingSelfAttention
from mpizero.nn.layer import Layer
from mpizero.nn.layers.activation import Activation
from mpizero.nn.layers.attention import CausalSelfAttention
from mpizero.nn.layers.block import FeedForward, TransformerBlock
from mpizero.nn.layers.checkpointed import Checkpointed
from mpizero.nn.layers.dropout import Dropout
from mpizero.nn.layers.embedding import Embedding, Position, TokenEmbedding
from mpizero.nn.layers.frozen import Frozen, PartlyFrozen
from mpizero.nn.layers.language_head import LanguageHead
from mpizero.nn.layers.linear import Linear, Projection
from mpizero.nn.layers.norm import LayerNorm, RMSNorm
from mpizero.nn.losses.cross_entropy import CrossEntropy
from mpizero.nn.losses.element_losses import ElementLoss
from mpizero.nn.models.mlp import Select
from mpizero.nn.sequential import Sequential
from mpizero.nn.split.attention import SplitAttention
from mpizero.nn.split.block import SequenceParallel, SplitBlock, SplitFeedForward
from mpizero.nn.split.embedding import SplitEmbedding, SplitTokenEmbedding
from mpizero.nn.split.head import SplitCrossEntropy, SplitHead
from mpizero.nn.split.linear import ColumnLinear, RowLinear, SplitLinear, SplitProjection
from mpizero.nn.split.model import JoinedLoss, SplitModel, split_model, whole_prediction
from mpizero.types import Array, BlockModel, Group, Loss, Run


@dataclass(frozen=True)
class PartLoss:
    """Compute an element loss of this rank's positions of every sequence; the sums of all ranks are the whole loss.

    Parameters
    ----------
    loss : ElementLoss
        The loss of whole sequences.
    group : Group
        The context group.
    """

    loss: ElementLoss
    group: Group

    def forward(self, prediction: Array, target: Any) -> tuple[float, float, Any]:
        """Return this rank's terms of the loss sum and of the weight, and the cache for :meth:`backward`.

        ``prediction`` is (samples, positions of this rank, ...). Collective over the group (one small message).
        """
        lengths = gather_lengths(prediction.shape, self.group)
        share = lengths[self.group.rank] / sum(lengths)
        loss_sum, weight, cache = self.loss.forward(prediction, target)
        return loss_sum * share, weight * share, (cache, share)

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum at this rank's positions. Not collective."""
        inner, share = cache
        return self.loss.backward(inner, scale * share)


@dataclass(frozen=True)
class ContextModel:
    """Hold the context-parallel form of a model, which computes on this rank's part of each sequence.

    :func:`context_model` makes it. Parameters have the same names and shapes as in ``model``. The gradients, loss sum
    and weight that a rank computes are those of its part of the sequences. Their sums over ``group`` are those of
    ``model``, which may be split over a tensor group (:class:`mpizero.nn.SplitModel`): that group then cuts the part of
    a context rank as it cuts whole sequences.
    """

    model: BlockModel
    group: Group
    blocks: Mapping[str, Layer]

    @property
    def loss(self) -> Loss:
        """The model's loss, which takes this rank's part of the predictions and of the targets."""
        return self._on_places(self.model.loss)

    def loss_on_parts(self, loss: Loss) -> Loss:
        """Adapt a loss of whole sequences to this rank's positions; the ranks' sums and weights add up to the whole.

        If the model is split over a tensor group, the loss takes this rank's part of the predictions at these
        positions. Not collective. Raises :class:`ConfigError` if the loss does not add up over positions.
        """
        own = self._on_places(loss)
        return self.model.loss_on_parts(own) if isinstance(self.model, SplitModel) else own

    def _on_places(self, loss: Loss) -> Loss:
        if isinstance(loss, CrossEntropy | SplitCrossEntropy):
            return loss
        if isinstance(loss, JoinedLoss):
            return replace(loss, loss=self._on_places(loss.loss))
        if isinstance(loss, ElementLoss):
            return PartLoss(loss, self.group)
        raise ConfigError(
            f"{type(_whole(self.model)).__name__}: the loss {type(loss).__name__} does not add up over parts of a "
            "sequence; use CrossEntropy or a loss that averages over elements, such as MeanSquaredError, or context=1"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the whole model."""
        return self.model.dtype

    @property
    def seed(self) -> int:
        """The seed of the whole model."""
        return self.model.seed

    def run_on(self, x: Array, run: Run) -> Run:
        """Return ``run`` with the length of the whole sequences.

        ``x`` (samples, positions) is this rank's part of the sequences. Without the length the blocks would need
        messages of their own to find it. Collective over ``group`` (one small message) if ``run.length`` is 0.
        """
        return located(run, x.shape, self.group)

    def split(self, group: Group) -> BlockModel:
        """Return the context-parallel form of the model split over the tensor group ``group``. Not collective."""
        return context_model(split_model(self.model, group), self.group)

    @property
    def cuts(self) -> Mapping[str, int]:
        """The blocks of whose output the ranks of a tensor group hold parts, as in :class:`mpizero.nn.SplitModel`."""
        return self.model.cuts if isinstance(self.model, SplitModel) else {}

    @property
    def outputs(self) -> int | None:
        """Length of the prediction's last axis if tensor ranks hold parts, as in :class:`mpizero.nn.SplitModel`."""
        return self.model.outputs if isinstance(self.model, SplitModel) else None

    def held_shape(self, block: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what this rank holds of a block's output, for one sample. Not collective.

        ``shape`` (length, ...) is the shape of the whole output for one sample.
        """
        own = (Zigzag(shape[0], self.group.size).sizes[self.group.rank], *shape[1:])
        return self.model.held_shape(block, own) if isinstance(self.model, SplitModel) else own

    def whole_scores(self, y: Array) -> Array:
        """Join the parts of the predictions that the ranks of a tensor group have, at this rank's positions.

        ``y`` is what the last block returned on this rank. Collective over the tensor group if the model is split.
        """
        return whole_prediction(self.model, y)

    def whole_prediction(self, y: Array) -> Array:
        """Join the ranks' parts of the predictions in the order of the sequence, and return the result on every rank.

        ``y`` (samples, positions, ...) is what the last block returned on this rank. Collective over ``group``, and
        first over the tensor group if each of its ranks has a part of the predictions.
        """
        y = self.whole_scores(y)
        lengths = gather_lengths(y.shape, self.group)
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
    """Return the context-parallel form of ``model``, in which each rank works on its part of every sequence.

    :func:`cut_batch` cuts the sequences. A user's own layer needs a method ``context(group)`` that returns its
    context-parallel form. If the layer treats each position of a sequence by itself, this form is the layer itself.

    Parameters
    ----------
    model : BlockModel
        A GPT, or a model of mpizero's layers and of layers with a method ``context``, maybe split over a tensor group
        by :func:`split_model`. Its loss must be a :class:`CrossEntropy`, or average over elements as
        :class:`MeanSquaredError` does.
    group : Group
        The context group.

    Returns
    -------
    BlockModel
        ``model`` itself if the group has one rank, otherwise a :class:`ContextModel`.

    Raises
    ------
    ConfigError
        A layer or the loss does not work on parts of sequences, or no layer (such as attention) mixes the positions of
        a sequence.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.layout import Axes
    >>> from mpizero.testing import run_in_threads
    >>> gpt, ids = mz.nn.GPT(dim=8, layers=1, heads=2, sequence=8), np.arange(9).reshape(1, 9)
    >>> def loss(comm):
    ...     group = mz.ProcessGrid.create(comm, axes=Axes(context=comm.size)).context_group
    ...     part, batch = mz.nn.context_model(gpt, group), mz.nn.cut_batch(ids[:, :-1], ids[:, 1:], group)
    ...     return mz.nn.loss_and_gradients(part, mz.nn.initial_parameters(gpt), batch)[:2]
    >>> parts, whole = run_in_threads(2, loss), run_in_threads(1, loss)[0]
    >>> [weight for loss_sum, weight in parts], whole[1]  # positions
    ([4.0, 4.0], 8.0)
    >>> abs(sum(loss_sum for loss_sum, weight in parts) - whole[0]) < 1e-4
    True
    """
    if group.size == 1:
        return model
    blocks = {name: _on_part(layer, group, f"block {name!r}") for name, layer in model.blocks.items()}
    whole = _whole(model)
    name = type(whole).__name__
    if not any(map(_attends, whole.blocks.values())):
        raise ConfigError(
            f"{name} has no attention along a sequence, so there is nothing for a context group of {group.size} ranks "
            "to cut; set context=1 and use those ranks for data"
        )
    found = ContextModel(model, group, blocks)
    _ = found.loss
    return found


def cut_batch(x: Any, y: Any, group: Group, tiles: int | None = None) -> tuple[Any, Any]:
    """Return copies of this rank's positions of a batch's sequences.

    Each sequence is cut into 2 * size chunks, where ``size`` is the number of ranks; rank r gets chunks r and 2 * size
    - 1 - r (:class:`Zigzag`). Not collective; every rank of ``group`` must have the same batch.

    Parameters
    ----------
    x, y : Array, or tree of arrays
        Inputs and targets: arrays (samples, length, ...), all of the same length, which is at least 1.
    group : Group
        The context group.
    tiles : int, optional
        Number of tiles, a multiple of the group's size: a rank gets the positions that each of its tiles would get in
        a group of so many ranks, tile after tile. The default is the group's size.

    Returns
    -------
    tuple
        This rank's part of ``x`` and of ``y``: contiguous arrays (samples, positions of this rank, ...). If the group
        has one rank, ``x`` and ``y`` themselves.

    Raises
    ------
    DataError
        The arrays have no sequence axis, or their lengths differ. All ranks raise this error.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.layout import Axes
    >>> from mpizero.testing import run_in_threads
    >>> ids = np.arange(8).reshape(1, 8)
    >>> def part(comm):
    ...     group = mz.ProcessGrid.create(comm, axes=Axes(context=comm.size)).context_group
    ...     return mz.nn.cut_batch(ids, ids + 1, group)[0].tolist()
    >>> run_in_threads(2, part)
    [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    """
    shapes = [tuple(getattr(leaf, "shape", ())) for value in (x, y) for leaf in leaves_of(value)] or [()]
    if len(shapes[0]) < 2 or shapes[0][1] < 1 or any(shape[:2] != shapes[0][:2] for shape in shapes):
        raise DataError(
            "context parallelism cuts inputs and targets of (samples, length >= 1), "
            f"it was given {' and '.join(map(str, shapes))}; set context=1 for data without a sequence axis"
        )
    tiles = tiles or group.size
    if tiles == 1:
        return x, y
    zigzag, hosted = Zigzag(shapes[0][1], tiles), tiles // group.size
    own = [run for tile in range(group.rank * hosted, (group.rank + 1) * hosted) for run in zigzag.runs(tile)]

    def cut(a: Array) -> Array:
        places: Array = namespace(a).concatenate([a[:, run] for run in own], axis=1)
        return places

    return map_leaves(cut, x), map_leaves(cut, y)


_FORMS: Mapping[type[Layer], type[Layer]] = {
    CausalSelfAttention: RingSelfAttention,
    Dropout: ContextDropout,
    Position: ContextPosition,
    TokenEmbedding: ContextEmbedding,
    TransformerBlock: ContextBlock,
}
_WRAPPERS = (Checkpointed, Frozen, PartlyFrozen, SequenceParallel)
_SPLIT = (SplitAttention, SplitBlock, SplitTokenEmbedding)
_PRODUCTS = (
    *(ColumnLinear, FeedForward, LanguageHead, Linear, Projection, RowLinear),
    *(SplitFeedForward, SplitHead, SplitLinear, SplitProjection),
)
_PLACE_BY_PLACE = (Embedding, LayerNorm, RMSNorm, Select, SplitEmbedding)


def _whole(model: BlockModel) -> BlockModel:
    """Return a model as it was before it was split over a tensor group."""
    return model.whole if isinstance(model, SplitModel) else model


def _attends(layer: Any) -> bool:
    """Tell whether a layer mixes the positions of a sequence.

    A user's layer with a method ``context`` is assumed to do so.
    """
    if isinstance(layer, CausalSelfAttention) or hasattr(layer, "context"):
        return True
    inside = [layer.layer] if isinstance(layer, _WRAPPERS) else layer.children().values()
    return any(map(_attends, inside))


def _on_part(layer: Any, group: Group, where: str) -> Any:
    """Return the context-parallel form of ``layer``, or ``layer`` itself if it treats each position by itself.

    ``where`` names the layer in errors.
    """
    if hasattr(layer, "context"):
        return layer.context(group)
    if form := _FORMS.get(type(layer)):
        return cut_layer(layer, form, group)
    if isinstance(layer, _SPLIT):  # its ranks split the context rank's part as they split whole sequences
        return replace(layer, whole=_on_part(layer.whole, group, where))
    if isinstance(layer, _WRAPPERS):
        inner = _on_part(layer.layer, group, where)
        return layer if inner is layer.layer else replace(layer, layer=inner)
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
