"""Define layers that look up vectors in tables by integer ids or by position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero._util.names import explains
from mpizero.errors import DataError
from mpizero.nn.arrays import as_ids, namespace, require_array, require_numbers
from mpizero.nn.graph import Graph, NodeOutput
from mpizero.nn.layer import Layer
from mpizero.nn.layers.dropout import Dropout
from mpizero.nn.layers.sequence_layer import SequenceLayer
from mpizero.nn.operations import Operations
from mpizero.nn.settings import require_positive
from mpizero.types import EVALUATE, Array, Init, ParameterSpec, Params, Pieces, Run


@explains
@dataclass(frozen=True)
class Embedding(Layer):
    """Look up row ``id`` of ``weight`` (items, features) for every integer id; the weight has no weight decay.

    Ids of any shape become vectors ``(*shape, features)`` in the dtype of ``weight``. The input has no gradient, so
    ``backward_input`` returns None for it. No method is collective.

    Parameters
    ----------
    items, features : int
        Number of rows of ``weight``, and of elements of a row. An id that is not in [0, ``items``) is a
        :class:`~mpizero.errors.DataError`.
    init : Init
        Start values of the weight.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> table = {"weight": np.array([[0.0, 0.1], [1.0, 1.1], [2.0, 2.1]])}
    >>> vectors, cache = mz.nn.Embedding(items=3, features=2).forward(table, np.array([[2, 0]]))
    >>> vectors
    array([[[2. , 2.1],
            [0. , 0.1]]])
    """

    items: int
    features: int
    init: Init = Init("normal", 0.02)

    def __post_init__(self) -> None:
        require_positive("Embedding", items=self.items, features=self.features)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe ``weight``, which has no weight decay."""
        return (ParameterSpec("weight", (self.items, self.features), self.init, decay=False),)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ids of any shape to vectors of shape ``(*shape, features)``; return them and the cache.

        Raises :class:`DataError` for an id that is not in [0, ``items``).
        """
        weight = params["weight"]
        ids = as_ids(x, self.items, "Embedding").reshape(-1)
        rows = namespace(weight).empty((ids.size, self.features), weight.dtype)
        kernels.backend(weight).embedding.gather(weight, ids, rows)
        return rows.reshape(*x.shape, self.features), ids

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return None, because integer ids have no gradient, and ``dy`` for :meth:`backward_weights`."""
        return None, dy

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite row ``id`` of the weight's gradient with the sum of ``dy`` over all occurrences of this id."""
        gradient = grads["weight"]
        gradient[...] = 0
        rows = namespace(pending).ascontiguousarray(pending.reshape(cache.size, self.features))
        kernels.backend(gradient).embedding.scatter_add(rows, cache, gradient)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with ``features`` appended."""
        return (*shape, self.features)


@explains
@dataclass(frozen=True)
class Position(SequenceLayer):
    """Add row t of ``weight`` (sequence, features) to position t of every sample; the weight has no weight decay.

    Inputs and outputs are (samples, length, features). No method is collective.

    Parameters
    ----------
    sequence, features : int
        Greatest length of an input, and size of its last axis. A longer input is a
        :class:`~mpizero.errors.DataError`.
    init : Init
        Start values of the weight.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> weight = np.array([[0.5, 0.0], [0.0, 0.5], [9.0, 9.0]])
    >>> y, cache = mz.nn.Position(sequence=3, features=2).forward({"weight": weight}, np.ones((1, 2, 2)))
    >>> y
    array([[[1.5, 1. ],
            [1. , 1.5]]])
    """

    sequence: int
    features: int
    init: Init = Init("normal", 0.02)

    def __post_init__(self) -> None:
        require_positive("Position", sequence=self.sequence, features=self.features)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe ``weight``, which has no weight decay."""
        return (ParameterSpec("weight", (self.sequence, self.features), self.init, decay=False),)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` (samples, length <= sequence, features) plus the weight's rows for its positions.

        The cache says where these positions lie in the whole sequences (:meth:`mpizero.types.Run.pieces`).

        Raises
        ------
        DataError
            ``x`` has another shape.
        """
        require_numbers(x, "Position")
        run = self.located(run, x.shape)
        if x.ndim != 3 or run.length > self.sequence or x.shape[2] != self.features:
            raise DataError(
                f"Position: takes (samples, length <= {self.sequence}, {self.features}), the input has shape "
                f"{tuple(x.shape)}{run.described}"
            )
        xp, weight, pieces = namespace(x), params["weight"], run.pieces()
        y: Array = xp.array(x, np.result_type(x.dtype, weight.dtype))
        self.add(weight, y, pieces)
        return y, pieces

    def add(self, weight: Array, x: Array, pieces: Pieces) -> None:
        """Add the rows of ``weight`` for the positions ``pieces`` to ``x`` (samples, positions, features), in place.

        Not collective.
        """
        for here, there in pieces:
            x[:, here] += weight[there]

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy`` twice: it is the gradient of ``x``, and :meth:`backward_weights` needs it."""
        return dy, dy

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the weight's gradient with the sum of ``dy`` over the samples.

        Rows for positions that the input does not have get zeros.
        """
        gradient, done = grads["weight"], 0
        for here, there in cache:
            gradient[done : there.start] = 0
            namespace(pending).sum(pending[:, here], axis=0, out=gradient[there])
            done = there.stop
        gradient[done:] = 0


@explains
@dataclass(frozen=True)
class TokenEmbedding(SequenceLayer):
    """Look up token ids, add position vectors and apply dropout: a language model's first block.

    Inputs are integer ids (samples, length), outputs are (samples, length, features). No method is collective.

    Parameters
    ----------
    vocabulary, sequence, features : int
        Number of token ids, greatest length of a sequence, and number of features of a vector.
    dropout : float
        Dropout rate.
    site : int
        Number that keys the dropout's random mask; unique in the model.

    Examples
    --------
    >>> import mpizero as mz
    >>> first = mz.nn.TokenEmbedding(vocabulary=256, sequence=8, features=4)
    >>> [(spec.name, spec.shape) for spec in first.specs()]
    [('token.weight', (256, 4)), ('position.weight', (8, 4))]
    >>> first.output_shape((6,))  # of one sample of 6 ids
    (6, 4)
    """

    vocabulary: int
    sequence: int
    features: int
    dropout: float = 0.0
    site: int = 0

    def __post_init__(self) -> None:
        self.children()

    @cached_property
    def _layers(self) -> tuple[Embedding, Position, Dropout]:
        return (
            Embedding(self.vocabulary, self.features),
            Position(self.sequence, self.features),
            Dropout(self.dropout, self.site),
        )

    def children(self) -> dict[str, Layer]:
        """Return the two tables by name: ``token`` and ``position``."""
        token, position, _ = self._layers
        return {"token": token, "position": position}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ids (samples, length) to vectors (samples, length, features); return them and the cache.

        Raises
        ------
        DataError
            An id is outside the vocabulary, a sample has more than ``sequence`` ids, or ``x`` does not have two axes.
        """
        run = self.require_ids(x, run)
        token, position, dropout = self._layers
        vectors, ids = token.forward(params["token"], x, run)
        pieces = run.pieces()
        position.add(params["position"]["weight"], vectors, pieces)
        y, mask = dropout.forward({}, vectors, run)
        return y, (ids, mask, pieces)

    def require_ids(self, x: Array, run: Run) -> Run:
        """Raise :class:`DataError` unless ``x`` has the shape (samples, length <= sequence).

        Returns what :meth:`located` returns for ``x``. Collective where that is.
        """
        require_array(x, "TokenEmbedding")
        run = self.located(run, x.shape)
        if x.ndim != 2 or run.length > self.sequence:
            raise DataError(
                f"TokenEmbedding: takes ids of shape (samples, length <= {self.sequence}), the input has shape "
                f"{tuple(x.shape)}{run.described}; cut the input or build the model with a longer sequence"
            )
        return run

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return None, because integer ids have no gradient, and the gradient of the vectors before dropout.

        :meth:`backward_weights` needs the latter.
        """
        return None, self._layers[2].backward_input({}, cache[1], dy)[0]

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of the token and the position table."""
        token, position, _ = self._layers
        token.backward_weights(params["token"], cache[0], pending, grads["token"])
        position.backward_weights(params["position"], cache[2], pending, grads["position"])

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with ``features`` appended."""
        return (*shape, self.features)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return zero operations, because a look-up has no matrix products."""
        return Operations()

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add nodes for the token table, the positions and the dropout to the computation graph; return the output."""
        token, position, dropout = self._layers
        node = token.trace(graph, f"{name}.token", source)
        node = position.trace(graph, f"{name}.position", node)
        return dropout.trace(graph, f"{name}.dropout", node)
