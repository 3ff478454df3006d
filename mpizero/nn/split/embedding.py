"""Split token tables over a tensor group by rows (Shoeybi et al., 2019, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpizero import kernels
from mpizero.nn.arrays import as_ids, namespace
from mpizero.nn.layer import Layer
from mpizero.nn.layers.dropout import Dropout
from mpizero.nn.layers.embedding import Embedding, Position, TokenEmbedding
from mpizero.nn.operations import Operations
from mpizero.nn.regions import Reduce, Region, Scatter
from mpizero.nn.split.block import dropped
from mpizero.nn.split.parts import Ranges, own_range, part_of, size_of
from mpizero.types import EVALUATE, Array, Group, ParameterSpec, Params, Run


@dataclass(frozen=True)
class SplitEmbedding(Layer):
    """Look up ids in a table whose rows are split over the ranks by the shard rule.

    One rank has the table's row for an id, and the other ranks take zeros instead; their sum is the vector. This sum is
    exact, so vectors and gradients have the same bits as those of the unsplit layer.

    Parameters
    ----------
    whole : Embedding
        The unsplit layer.
    group : Group
        The ranks that the layer is split over.
    sequence : bool
        Whether each rank gets only the vectors of its own positions of the sequences; then the input ids are (samples,
        length). Otherwise every rank gets all vectors.
    """

    whole: Embedding
    group: Group
    sequence: bool = False

    @cached_property
    def ranges(self) -> Ranges:
        """The one range (start, stop) of the table's rows that this rank holds."""
        return (own_range(self.whole.items, self.group),)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe this rank's rows of ``weight``. Not collective."""
        return tuple(part_of(spec, 0, self.ranges) for spec in self.whole.own_specs())

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map the ids ``x`` of all positions to vectors; return the vectors and the cache.

        The vectors are those of all positions, or with ``sequence`` those of this rank's positions. Collective over the
        group.
        """
        weight = params["weight"]
        ids = as_ids(x, self.whole.items, "Embedding").reshape(-1) - self.ranges[0][0]
        rows = namespace(weight).empty((ids.size, self.whole.features), weight.dtype)
        kernels.backend(weight).embedding.gather(weight, ids, rows)
        rows[(ids < 0) | (ids >= size_of(self.ranges))] = 0
        leave: Region = Scatter(self.group, 1, x.shape[1]) if self.sequence else Reduce(self.group)
        return leave.forward(rows.reshape(*x.shape, self.whole.features)), (ids, leave)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return None, because integer ids have no gradient, and ``dy`` for :meth:`backward_weights`.

        Not collective.
        """
        return None, dy

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradient of this rank's rows of the table. Collective over the group with ``sequence``."""
        self.add_rows(cache[0], cache[1].backward(pending), grads["weight"])

    def add_rows(self, ids: Array, dy: Array, gradient: Array) -> None:
        """Overwrite row ``id`` of ``gradient`` with the sum of ``dy`` over all occurrences of this id in ``ids``.

        Ids are counted from this rank's first row of the table; ids of rows that other ranks hold are ignored. Not
        collective.
        """
        gradient[...] = 0
        rows = namespace(dy).ascontiguousarray(dy.reshape(ids.size, self.whole.features))
        kernels.backend(gradient).embedding.scatter_add(rows, ids, gradient)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unsplit layer's output shape for one sample of ``shape``. Not collective."""
        return self.whole.output_shape(shape)


@dataclass(frozen=True)
class SplitTokenEmbedding(Layer):
    """Look up token ids in a table that is split by rows, add position vectors, and apply dropout.

    Every rank holds the whole table of position vectors. With ``sequence`` the forward pass sends a reduce-scatter, and
    :meth:`backward_weights` an all-gather. Without it the forward pass sends an all-reduce.

    Parameters
    ----------
    whole : TokenEmbedding
        The unsplit layer. If it is a context-parallel form, "all positions" are those of the context group's rank.
    group : Group
        The ranks that the layer is split over.
    sequence : bool
        Whether each rank gets only the vectors of its own positions of the sequences.
    """

    whole: TokenEmbedding
    group: Group
    sequence: bool = False

    @cached_property
    def _layers(self) -> tuple[SplitEmbedding, Position, Dropout]:
        token, position, dropout = self.whole._layers
        return SplitEmbedding(token, self.group, self.sequence), position, dropout

    def children(self) -> dict[str, Layer]:
        """Return the two tables by name: ``token`` and ``position``. Not collective."""
        token, position, _ = self._layers
        return {"token": token, "position": position}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map the ids ``x`` (samples, length) to vectors; return them and the cache.

        The vectors are (samples, length, features), or (samples, positions of this rank, features) with ``sequence``.
        Collective over the group.
        """
        run = self.whole.require_ids(x, run)
        token, position, dropout = self._layers
        vectors, cache = token.forward(params["token"], x, run)
        own = own_range(run.held, self.group) if self.sequence else (0, run.held)
        position.add(params["position"]["weight"], vectors, run.pieces(*own))
        return self._dropped(dropout, vectors, run), (cache, run)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return None, because integer ids have no gradient, and the gradient of the vectors before dropout.

        :meth:`backward_weights` needs the latter. Not collective.
        """
        return None, self._dropped(self._layers[2], dy, cache[1])

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of this rank's rows of the token table, and of the whole position table.

        Collective over the group with ``sequence``.
        """
        token, position, _ = self._layers
        ids, leave = cache[0]
        dy = leave.backward(pending)  # all places, which both tables need
        token.add_rows(ids, dy, grads["token"]["weight"])
        position.backward_weights(params["position"], cache[1].pieces(), dy, grads["position"])

    def _dropped(self, dropout: Dropout, x: Array, run: Run) -> Array:
        if self.sequence:
            return dropped(dropout, x, run, self.group)
        return dropout.mask(x, run) if dropout.drops(x, run) else x

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unsplit layer's output shape for one sample of ``shape``. Not collective."""
        return self.whole.output_shape(shape)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return zero operations, because a look-up has no matrix products. Not collective."""
        return Operations()
