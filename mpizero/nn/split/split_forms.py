"""List the tensor-parallel (split) form of every layer that has one.

[Note: split forms] A layer does not know how it is split. :meth:`mpizero.nn.Layer.split` looks the layer's class up in
the table ``SPLIT_FORMS``. A user's own layer overrides ``split`` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpizero.nn.layer import Layer
from mpizero.nn.layers.attention import CausalSelfAttention
from mpizero.nn.layers.block import FeedForward, TransformerBlock
from mpizero.nn.layers.embedding import Embedding, TokenEmbedding
from mpizero.nn.layers.language_head import LanguageHead
from mpizero.nn.layers.linear import Linear, Projection
from mpizero.nn.sequential import Sequential
from mpizero.nn.split.attention import SplitAttention
from mpizero.nn.split.block import SequenceParallel, SplitBlock, SplitFeedForward
from mpizero.nn.split.embedding import SplitEmbedding, SplitTokenEmbedding
from mpizero.nn.split.linear import ColumnLinear, SplitLinear, SplitProjection
from mpizero.types import Group


def _split_head(head: LanguageHead, group: Group) -> Layer:
    """Return the head with its projection split by vocabulary items; every rank gets all logits."""
    layers = head.children()
    return Sequential({**layers, "projection": layers["projection"].split(group)})


#: The function that splits a layer over a group, by the layer's class.
SPLIT_FORMS: dict[type, Callable[[Any, Group], Layer]] = {
    CausalSelfAttention: SplitAttention,
    Embedding: SplitEmbedding,
    FeedForward: SplitFeedForward,
    LanguageHead: _split_head,
    Linear: lambda layer, group: SplitLinear(ColumnLinear(layer, group)),
    Projection: lambda layer, group: SplitProjection(layer, group, joined=True),
    TokenEmbedding: SplitTokenEmbedding,
    TransformerBlock: lambda layer, group: SequenceParallel(SplitBlock(layer, group), group),
}
