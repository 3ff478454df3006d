"""Split transformer blocks over a tensor group, sequence-parallel between (Korthikanti et al., 2022, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mpizero.nn.layer import known, require_sequences
from mpizero.nn.layers.activation import Activation
from mpizero.nn.layers.block import FeedForward, FeedForwardBase, TransformerBlock, TransformerBlockBase
from mpizero.nn.layers.dropout import Dropout, SamplePart
from mpizero.nn.layers.norm import LayerNorm
from mpizero.nn.layers.wrapper import Wrapper
from mpizero.nn.regions import Gather, Split
from mpizero.nn.split.attention import SplitAttention
from mpizero.nn.split.linear import ColumnLinear, RowLinear
from mpizero.nn.split.parts import complete_shared, own_range, require_length
from mpizero.types import EVALUATE, Array, Group, Params, Run


@dataclass(frozen=True)
class SplitFeedForward(FeedForwardBase):
    """Apply two linear layers with an activation between them, split along the hidden features.

    Parameters
    ----------
    whole : FeedForward
        The unsplit layer; hidden features are split by the shard rule.
    group : Group
        The ranks it is split over.
    sequence : bool
        Whether inputs and outputs are parts of sequences, (samples, own places, dim). The gradient of the
        projection's bias is then the own part's term.
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
    """Compute a pre-norm block with split heads and hidden features; all else is split by places of the sequence.

    Between its column-row pairs a rank works on its own places only, so norms, dropouts and the residual stream take
    1 / size of the time and memory. Messages of a pass: forward a gather and a reduce-scatter for each of the two
    pairs; backward the same again, another gather for each pair in the weight half, since inputs of the column
    products are kept in parts, and one sum of the gradients of all parameters that every rank holds whole.

    Parameters
    ----------
    whole : TransformerBlock
        The unsplit layer.
    group : Group
        The ranks it is split over.
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
        """Map the own places ``x`` (samples, places, dim) to the same shape. Collective over the group."""
        return super().forward(params, x, require_length(run, x, self.group))

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the own parts' gradients, and those of what every rank holds whole. Collective over the group."""
        super().backward_weights(params, cache, pending, grads)
        complete_shared(self, self.group, grads, "block: shared gradients")


def dropped(dropout: Dropout, x: Array, run: Run, group: Group) -> Array:
    """Mask the own places ``x`` (samples, places, features) as the unsplit model masks the whole sequence.

    The gradient is the same function of ``dy``.
    """
    if not dropout.drops(x, run):
        return x
    start, stop = own_range(run.length, group)
    return dropout.mask(x, run, SamplePart(start * x.shape[2], (stop - start) * x.shape[2]))


@dataclass(frozen=True)
class SequenceParallel(Wrapper):
    """Run a layer that works on parts of sequences between activations that are whole on every rank."""

    group: Group

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Run the layer on this rank's places of ``x`` (samples, length, ...) and gather the results. Collective."""
        require_sequences(x, None, "TransformerBlock")
        cut, join = Split(self.group, 1, x.shape[1]), Gather(self.group, 1, x.shape[1])
        y, cache = self.layer.forward(params, cut.forward(x), replace(run, length=x.shape[1]))
        return join.forward(y), (cut, cache, join)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the gradient of ``x``, whole. Collective over the group."""
        cut, inner, join = cache
        dx, pending = self.layer.backward_input(params, inner, join.backward(dy))
        return cut.backward(known(dx)), pending

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Run the wrapped layer's weight half. Collective as it is."""
        self.layer.backward_weights(params, cache[1], pending, grads)
