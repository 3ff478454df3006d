"""Split transformer blocks over a tensor group, with sequence parallelism (Korthikanti et al., 2022, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpizero.nn.arrays import known, require_sequences
from mpizero.nn.layers.activation import Activation
from mpizero.nn.layers.block import FeedForward, FeedForwardBase, TransformerBlock, TransformerBlockBase
from mpizero.nn.layers.dropout import Dropout
from mpizero.nn.layers.norm import LayerNorm
from mpizero.nn.layers.wrapper import Wrapper
from mpizero.nn.regions import Gather, Split
from mpizero.nn.split.attention import SplitAttention
from mpizero.nn.split.linear import ColumnLinear, RowLinear
from mpizero.nn.split.parts import complete_shared, located, own_range
from mpizero.types import EVALUATE, Array, Group, Params, Run


@dataclass(frozen=True)
class SplitFeedForward(FeedForwardBase):
    """Apply two linear layers with an activation between them; the hidden features are split over the ranks.

    Parameters
    ----------
    whole : FeedForward
        The unsplit layer; its hidden features are split by the shard rule.
    group : Group
        The ranks that the layer is split over.
    sequence : bool
        Whether inputs and outputs hold only this rank's positions of the sequences: (samples, positions of this rank,
        dim). The gradient of the projection's bias is then computed from these positions only; the block that uses the
        layer sums it over the ranks.
    """

    whole: FeedForward
    group: Group
    sequence: bool = False

    @cached_property
    def _layers(self) -> tuple[ColumnLinear, Activation, RowLinear]:
        expand, activation, projection = self.whole._layers
        column = ColumnLinear(expand, self.group, sequence=self.sequence)
        return column, activation, RowLinear(projection, self.group, self.sequence)


@dataclass(frozen=True)
class SplitBlock(TransformerBlockBase):
    """Compute a pre-norm block with heads and hidden features split over the ranks; activations are split by positions.

    Attention and feed-forward each are a pair of linear maps: the first is split by columns, the second by rows.
    Outside of these pairs a rank works on its own positions of the sequences only. So norms, dropouts and the residual
    stream take 1 / size of the time and memory, where ``size`` is the number of ranks. For each of the two pairs the
    forward pass sends an all-gather and a reduce-scatter, and ``backward_input`` sends the same.
    :meth:`backward_weights` sends another all-gather for each pair, because a rank keeps only its own positions of the
    pair's input. It also sends one all-reduce of the gradients of all parameters that every rank holds whole.

    Parameters
    ----------
    whole : TransformerBlock
        The unsplit layer. If it is a context-parallel form, "the sequences" are the part of the context group's rank.
    group : Group
        The ranks that the layer is split over.
    """

    whole: TransformerBlock
    group: Group

    def __post_init__(self) -> None:
        self.children()

    @cached_property
    def _layers(self) -> tuple[LayerNorm, SplitAttention, LayerNorm, SplitFeedForward]:
        norm1, attention, norm2, feed_forward = self.whole._layers
        return (
            norm1,
            SplitAttention(attention, self.group, sequence=True),
            norm2,
            SplitFeedForward(feed_forward, self.group, sequence=True),
        )

    @cached_property
    def _dropouts(self) -> tuple[Dropout, Dropout]:
        return self.whole._dropouts

    def _dropped(self, dropout: Dropout, x: Array, run: Run) -> Array:
        return dropped(dropout, x, run, self.group)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` (samples, positions of this rank, dim), of the same shape, and the cache.

        Collective over the group.
        """
        return super().forward(params, x, located(run, x, self.group, self.whole))

    def own_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a sample that the group works on. Not collective."""
        return self.whole.own_shape(shape)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of this rank's parts of parameters, and of parameters that every rank holds whole.

        Collective over the group.
        """
        super().backward_weights(params, cache, pending, grads)
        complete_shared(self, self.group, grads, "block: shared gradients")


def dropped(dropout: Dropout, x: Array, run: Run, group: Group) -> Array:
    """Apply dropout to ``x`` (samples, positions of this rank, features) with the mask of the unsplit model.

    The backward pass calls this function with ``dy``.
    """
    if not dropout.drops(x, run):
        return x
    return dropout.mask_pieces(x, run, run.pieces(*own_range(run.held, group)))


@dataclass(frozen=True)
class SequenceParallel(Wrapper):
    """Run a split block on this rank's positions, with inputs and outputs of all positions of the group."""

    layer: SplitBlock
    group: Group

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Run the layer on this rank's positions of ``x`` (samples, length, ...), and gather the outputs of all ranks.

        Returns the whole output and the cache. Collective over the group.
        """
        require_sequences(x, None, "TransformerBlock")
        cut, join = Split(self.group, 1, x.shape[1]), Gather(self.group, 1, x.shape[1])
        y, cache = self.layer.forward(params, cut.forward(x), self.layer.whole.located(run, x.shape))
        return join.forward(y), (cut, cache, join)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the whole gradient of ``x``, and what :meth:`backward_weights` needs. Collective over the group."""
        cut, inner, join = cache
        dx, pending = self.layer.backward_input(params, inner, join.backward(dy))
        return cut.backward(known(dx)), pending

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Call the wrapped layer's ``backward_weights``. Collective over the group."""
        self.layer.backward_weights(params, cache[1], pending, grads)
