"""The pre-norm transformer block and its feed-forward half."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mpizero.names import explains
from mpizero.nn.graph import Graph, Place
from mpizero.nn.layer import Layer, require_positive, splits
from mpizero.nn.layers.activation import Activation, named_activation
from mpizero.nn.layers.attention import CausalSelfAttention
from mpizero.nn.layers.dropout import Dropout
from mpizero.nn.layers.forms import BlockForm, FeedForwardForm
from mpizero.nn.layers.linear import Linear
from mpizero.nn.layers.norm import LayerNorm
from mpizero.nn.split.block import AlongSequence, SplitBlock, SplitFeedForward
from mpizero.types import Group, Init


@explains
@dataclass(frozen=True)
class FeedForward(FeedForwardForm):
    """Two linear layers with an activation between them, place by place.

    Parameters
    ----------
    dim : int
        Features of input and output.
    hidden : int or None
        Features in between; None is ``4 * dim``.
    activation : str
        "gelu", "silu", "relu" or "tanh".
    init, projection_init : Init or None
        Start values of the first and the second weight; None takes :class:`Linear`'s.
    """

    dim: int
    hidden: int | None = None
    activation: str = "gelu"
    init: Init | None = None
    projection_init: Init | None = None

    def __post_init__(self) -> None:
        require_positive("FeedForward", dim=self.dim, hidden=self.width)
        named_activation(self.activation)

    @property
    def width(self) -> int:
        """Features between the two linear layers."""
        return 4 * self.dim if self.hidden is None else self.hidden

    @cached_property
    def _layers(self) -> tuple[Linear, Activation, Linear]:
        return (
            Linear(self.dim, self.width, init=self.init),
            named_activation(self.activation),
            Linear(self.width, self.dim, init=self.projection_init),
        )

    def split(self, group: Group) -> Layer:
        """Split the hidden features. Not collective."""
        return SplitFeedForward(self, group) if splits(self, FeedForward, group) else self

    def trace(self, graph: Graph, name: str, source: Place) -> Place:
        """Add the three layers in a row. Not collective."""
        expand, act, projection = self._layers
        place = expand.trace(graph, f"{name}.expand", source)
        place = act.trace(graph, f"{name}.activation", place)
        return projection.trace(graph, f"{name}.projection", place)


@explains
@dataclass(frozen=True)
class TransformerBlock(BlockForm):
    """Pre-norm block: ``h = x + attention(norm1(x))``, then ``h + feed_forward(norm2(h))``.

    Parameters
    ----------
    dim, heads : int
        Features and attention heads.
    dropout : float
        Rate of the three dropouts: of attention probabilities and of what each branch adds.
    site : int
        The first of three consecutive dropout numbers that belong to this block.
    residual_scale : float
        Factor on the start values of the two projections that write into the residual stream; GPT-2 takes
        1/sqrt(2 * layers), so that the stream's variance does not grow with depth.
    """

    dim: int
    heads: int
    dropout: float = 0.0
    site: int = 0
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        self.children()

    @cached_property
    def _layers(self) -> tuple[LayerNorm, CausalSelfAttention, LayerNorm, FeedForward]:
        init, residual = Init("normal", 0.02), Init("normal", 0.02 * self.residual_scale)
        attention = CausalSelfAttention(self.dim, self.heads, self.dropout, self.site, init, residual)
        feed_forward = FeedForward(self.dim, init=init, projection_init=residual)
        return LayerNorm(self.dim), attention, LayerNorm(self.dim), feed_forward

    @cached_property
    def _dropouts(self) -> tuple[Dropout, Dropout]:
        return Dropout(self.dropout, self.site + 1), Dropout(self.dropout, self.site + 2)

    def split(self, group: Group) -> Layer:
        """Split heads, hidden features and places; :class:`ConfigError` if heads cannot be dealt. Not collective."""
        return AlongSequence(SplitBlock(self, group), group) if splits(self, TransformerBlock, group) else self

    def trace(self, graph: Graph, name: str, source: Place) -> Place:
        """Add both branches and their residual sums. Not collective."""
        norm1, attention, norm2, feed_forward = self._layers
        drop1, drop2 = self._dropouts
        place = norm1.trace(graph, f"{name}.norm1", source)
        place = attention.trace(graph, f"{name}.attention", place)
        place = drop1.trace(graph, f"{name}.dropout1", place)
        middle = graph.add("Add", f"{name}.residual1", (source, place), source.shape)
        place = norm2.trace(graph, f"{name}.norm2", middle)
        place = feed_forward.trace(graph, f"{name}.feed_forward", place)
        place = drop2.trace(graph, f"{name}.dropout2", place)
        return graph.add("Add", f"{name}.residual2", (middle, place), source.shape)
