"""Define GPT, a decoder-only transformer language model (Radford et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mpizero._util.checks import require, seed
from mpizero._util.names import explains
from mpizero.errors import UnsupportedError
from mpizero.nn.layer import Layer
from mpizero.nn.layers.block import TransformerBlock
from mpizero.nn.layers.embedding import TokenEmbedding
from mpizero.nn.layers.language_head import LanguageHead
from mpizero.nn.losses.cross_entropy import CrossEntropy
from mpizero.nn.models.block_model import export_computation_graph, model_dtype
from mpizero.nn.settings import require_positive, require_rate
from mpizero.types import Array, BlockModel, Group, Params

_TOKEN_TABLE = "embedding.token.weight"
#: Each dropout has a number, its site, that keys its random mask: 0 is the embedding's, then each block has three.
_SITES_PER_BLOCK = 3


@explains
@dataclass(frozen=True)
class GPT:
    """Describe a GPT, made of the blocks "embedding", "blocks.0", ..., "head".

    Inputs are integer ids (samples, length). Targets are ids of the same shape; a target below 0 is ignored.

    Parameters
    ----------
    dim, layers, heads : int
        Number of features, of transformer blocks, and of attention heads (which must divide ``dim``).
    sequence : int
        Greatest length of an input.
    vocabulary : int
        Number of different ids; 256 if ids are the bytes of a text.
    dropout : float
        Rate of every dropout: after the embedding, of attention probabilities, and of both branches of a block.
    tied : bool
        Whether the head uses the embedding's token table as its weight.
    activation_checkpointing : bool
        Whether a transformer block keeps only its input for the backward pass, and computes its other activations
        again.
    dtype : dtype
        float32 or float64.
    seed : int
        Seed of the start values.

    Raises
    ------
    ConfigError
        A size, rate or dtype is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> gpt = mz.nn.GPT(dim=8, layers=1, heads=2, sequence=16)
    >>> list(gpt.blocks)
    ['embedding', 'blocks.0', 'head']
    >>> ids = np.frombuffer(b"to be, or not to be", np.uint8).astype(int)[np.newaxis, :17]
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     with mz.DDPModel(gpt, config, optimizer=mz.AdamW(lr=0.01)) as model:
    ...         losses = [model.train(ids[:, :-1], ids[:, 1:]) for step in range(5)]
    >>> losses[-1] < losses[0] < 5.6  # log 256 at the start
    True
    """

    dim: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int = 256
    dropout: float = 0.0
    tied: bool = True
    activation_checkpointing: bool = False
    dtype: Any = "float32"
    seed: int = 0
    #: What the model is for: in `mpizero train` it is told its perplexity.
    task: ClassVar[str] = "language"

    def __post_init__(self) -> None:
        require_positive("GPT", dim=self.dim, layers=self.layers, heads=self.heads)
        require_positive("GPT", sequence=self.sequence, vocabulary=self.vocabulary)
        require_rate("GPT", self.dropout)
        require("GPT: seed", self.seed, seed)
        object.__setattr__(self, "dtype", model_dtype("GPT", self.dtype))
        self._transformer(0)

    def _transformer(self, index: int) -> TransformerBlock:
        site, residual_scale = 1 + _SITES_PER_BLOCK * index, (2 * self.layers) ** -0.5
        return TransformerBlock(self.dim, self.heads, self.dropout, site, residual_scale)

    def _kept(self, block: Layer) -> Layer:
        if not self.activation_checkpointing:
            return block
        from mpizero.nn.layers.checkpointed import Checkpointed

        return Checkpointed(block)

    @cached_property
    def _ends(self) -> tuple[TokenEmbedding, LanguageHead]:
        embedding = TokenEmbedding(self.vocabulary, self.sequence, self.dim, self.dropout, site=0)
        return embedding, LanguageHead(self.dim, self.vocabulary, _TOKEN_TABLE if self.tied else None)

    @cached_property
    def blocks(self) -> Mapping[str, Layer]:
        """The blocks by name, in the order in which they run."""
        embedding, head = self._ends
        blocks = {f"blocks.{i}": self._kept(self._transformer(i)) for i in range(self.layers)}
        return {"embedding": embedding, **blocks, "head": head}

    @cached_property
    def loss(self) -> CrossEntropy:
        """Cross-entropy of the next token."""
        return CrossEntropy()

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of the longest sample that the model takes."""
        return (self.sequence,)

    def split(self, group: Group) -> BlockModel:
        """Return the tensor-parallel form: heads, hidden features and vocabulary are split over ``group``.

        Between the blocks a rank holds the activations of its positions of the sequences: (samples, positions of this
        rank, dim). It holds the logits of its vocabulary items: (samples, length, items of this rank). No rank holds
        all logits. Positions, hidden features and vocabulary items are divided among the ranks by the shard rule.

        Raises
        ------
        ConfigError
            The group's size does not divide the number of heads.
        """
        if group.size == 1:
            return self
        from mpizero.nn.split.block import SplitBlock
        from mpizero.nn.split.embedding import SplitTokenEmbedding
        from mpizero.nn.split.head import SplitCrossEntropy, SplitHead
        from mpizero.nn.split.model import SplitModel

        embedding, head = self._ends
        layers = {f"blocks.{i}": self._kept(SplitBlock(self._transformer(i), group)) for i in range(self.layers)}
        first = SplitTokenEmbedding(embedding, group, sequence=True)
        blocks = {"embedding": first, **layers, "head": SplitHead(head, group)}
        cuts = {"embedding": 0, **dict.fromkeys(layers, 0), "head": -1}
        loss = SplitCrossEntropy(self.loss, group, self.vocabulary)
        return SplitModel(self, group, blocks, loss, cuts, self.vocabulary, sequences=True)

    def feature_importance(self, params: Mapping[str, Params]) -> dict[str, float]:
        """Return, for each vocabulary item, its share of the sum of the norms of the token table's rows.

        The share is the Euclidean norm of the item's embedding, divided by the sum of the norms of all items. Items
        that did not occur in training keep the norm of their start values. The returned keys are the items' ids as
        text: "0", "1", ...
        """
        table = np.asarray(params["embedding"]["token"]["weight"], np.float64)
        norms = np.sqrt(np.square(table).sum(axis=1))
        return {str(i): float(share) for i, share in enumerate(norms / (norms.sum() or 1.0))}

    @property
    def active_feature_indices(self) -> tuple[int, ...]:
        """The ids of all vocabulary items."""
        return tuple(range(self.vocabulary))

    def with_active_features(self, indices: tuple[int, ...]) -> GPT:
        """Raise :class:`UnsupportedError`, because a text may hold any item of the vocabulary."""
        raise UnsupportedError("a GPT cannot ignore vocabulary items: every id of a text takes part in its context")

    def export_computation_graph(self) -> dict[str, Any]:
        """Describe the model as a dict of JSON values; see :func:`mpizero.nn.export_computation_graph`."""
        return export_computation_graph(self, self.sample_shape)

    def compile_predictor(self, params: Mapping[str, Params]) -> Callable[[Array], Array]:
        """Compile a function that computes logits from ids, and keeps a copy of the parameters.

        Its results equal those of :func:`mpizero.nn.evaluate` within rounding. It takes ids of any length up to
        ``sequence`` and needs no BLAS. It is meant for small batches, where one call costs less than the many calls of
        the layers.
        """
        from mpizero.nn.models.predictor import compile_gpt

        return compile_gpt(self, params)
