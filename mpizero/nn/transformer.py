"""Define a transformer's layers: embeddings, causal self-attention, feed-forward, the pre-norm block, and the head.

:class:`CausalSelfAttention` (Vaswani et al., 2017) is computed by the kernels of :mod:`mpizero.kernels.attention` on
CPUs, in this rank's threads (:func:`kernel_attention`). On GPUs, and with dropout, it is computed by batched products
that skip most of the masked scores (:class:`BatchedHeads`): a few samples or heads at a time, so that their scores stay
in the CPU's cache. Classes whose names end in ``Base`` have the code that a layer shares with its split form. The head,
the last block of a language model, computes the logits of the vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero._util.names import explains
from mpizero.errors import ConfigError, DataError
from mpizero.kernels.jit import parts_of, run_tasks
from mpizero.kernels.matmul import by_kernels, threads_for
from mpizero.kernels.recording import assign, temporary
from mpizero.nn.arrays import (
    add_bias,
    add_to,
    as_ids,
    contiguous,
    copied,
    known,
    multiply,
    namespace,
    operand,
    require_array,
    require_numbers,
    require_sequences,
    sum_samples,
    vector,
)
from mpizero.nn.layer import (
    Affine,
    Composite,
    Graph,
    Layer,
    NodeOutput,
    Operations,
    SamplePart,
    SequenceLayer,
    poll,
    require_positive,
    traced,
)
from mpizero.nn.layers import Activation, Dropout, LayerNorm, Linear, Projection, named_activation
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
        Number of rows of ``weight``, and of elements of a row. An id that is not in [0, ``items``) raises
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
        """Map ids of any shape to vectors of shape ``(*shape, features)``; return the vectors and the cache.

        Raises :class:`DataError` for an id that is not in [0, ``items``).
        """
        weight = params["weight"]
        ids = as_ids(x, self.items, "Embedding").reshape(-1)
        rows = namespace(weight).empty((ids.size, self.features), weight.dtype)
        kernels.backend(weight).layers.gather(weight, ids, rows)
        return rows.reshape(*x.shape, self.features), ids

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return None, because integer ids have no gradient, and ``dy`` for :meth:`backward_weights`."""
        return None, dy

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite row ``id`` of the weight's gradient with the sum of ``dy`` over all occurrences of this id."""
        gradient = grads["weight"]
        assign(gradient, 0)
        rows = contiguous(pending.reshape(cache.size, self.features))
        kernels.backend(gradient).layers.scatter_add(rows, cache, gradient)

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
        Greatest length of an input, and size of its last axis. A longer input raises
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
        weight, pieces = params["weight"], run.pieces()
        y = copied(x, np.result_type(x.dtype, weight.dtype))
        self.add(weight, y, pieces)
        return y, pieces

    def add(self, weight: Array, x: Array, pieces: Pieces) -> None:
        """Add the rows of ``weight`` for the positions ``pieces`` to ``x`` (samples, positions, features), in place.

        Not collective.
        """
        for local, positions in pieces:
            add_to(x[:, local], weight[positions])

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy`` as the gradient of ``x``, and once more for :meth:`backward_weights`."""
        return dy, dy

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the weight's gradient with the sum of ``dy`` over the samples.

        Rows of this gradient for positions that the input does not hold are set to zero.
        """
        gradient, done = grads["weight"], 0
        for local, positions in cache:
            assign(gradient[done : positions.start], 0)
            sum_samples(pending[:, local], gradient[positions])
            done = positions.stop
        assign(gradient[done:], 0)


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
        """Map ids (samples, length) to vectors (samples, length, features); return the vectors and the cache.

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

        Returns ``run`` with the positions that :meth:`located` adds. Collective if :meth:`located` is.
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
        """Return two values: None (integer ids have no gradient), and the gradient of the vectors before dropout.

        The second value is for :meth:`backward_weights`.
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
        return traced(graph, name, source, token=token, position=position, dropout=dropout)


class Workspace:
    """Keep temporary arrays by name, to be reused by one computation after the other.

    Parameters
    ----------
    like : Array
        An array of the library (NumPy or CuPy) and dtype that the temporary arrays shall have.
    """

    def __init__(self, like: Array) -> None:
        self._like = like
        self._flat: dict[str, Array] = {}

    def room(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return a contiguous array of undefined contents, in the memory that is kept under ``name``.

        The memory is that of the previous array of this name, which must no longer be used. If it is too small, new
        memory is allocated.
        """
        size = prod(shape)
        if name not in self._flat or self._flat[name].size < size:
            self._flat[name] = namespace(self._like).empty_like(self._like, shape=(size,))
        return self._flat[name][:size].reshape(shape)

    def copy(self, name: str, x: Array) -> Array:
        """Return a contiguous copy of ``x`` in the memory that is kept under ``name``."""
        room = self.room(name, x.shape)
        namespace(self._like).copyto(room, x)
        return room


#: Number of queries per product. 64 was fastest for 128 and 256 tokens: smaller blocks skip more of the masked scores,
#: but their products are too small for the BLAS.
BLOCK = 64


def blocks(length: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Return ranges (start, stop) of at most ``size`` positions each, which cover ``length`` positions."""
    return ((start, min(start + size, length)) for start in range(0, length, size))


def view_kinds(qkv: Array, heads: int) -> Array:
    """Return queries, keys and values ``qkv`` (samples, length, 3 dim) as (3, samples, heads, length, dim / heads).

    The result is a view.
    """
    samples, length, width = qkv.shape
    return qkv.reshape(samples, length, 3, heads, width // (3 * heads)).transpose(2, 0, 3, 1, 4)


def view_heads(x: Array, heads: int) -> Array:
    """Return a view of ``x`` (samples, length, dim) as (samples, heads, length, dim / heads)."""
    samples, length, width = x.shape
    return x.reshape(samples, length, heads, width // heads).transpose(0, 2, 1, 3)


def _rows(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _matrices(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])


#: Number of queries per product on a GPU, where starting a product takes long. Not tuned on a GPU yet.
BLOCK_ON_DEVICE = 256
#: Largest number of bytes of scores computed at once, on CPUs and on GPUs.
CACHE, DEVICE = 1 << 18, 1 << 28
#: Ranges of the samples and of the heads that are computed together.
Part = tuple[slice, slice]


class BatchedHeads:
    """Compute attention for one group of heads after the other, forward and backward, in memory that is reused.

    A group, here a ``Part``, is a range of the samples and a range of the heads. ``apart`` (3, samples, heads, length,
    dim / heads) is the memory to which the queries, keys and values are copied, so that each head is contiguous.
    Strided views would need no copy, but the BLAS takes twice as long for their products.
    """

    def __init__(self, apart: Array, scale: float, dropout: Dropout, run: Run, first_head: int) -> None:
        self.apart = apart
        self.room = Workspace(apart).room
        self.run, self.first_head = run, first_head
        self._dropout = dropout
        self._scale = vector(apart, scale)
        self._kernels = kernels.backend(apart).attention

    def attend(self, take: Callable[[slice], None] | None, *, keep: bool) -> tuple[Array, Any]:
        """Compute attention of all heads; ``take``, if given, first copies the heads of some samples to ``apart``.

        ``keep`` says whether the probabilities are kept for the backward pass.
        """
        apart, xp = self.apart, namespace(self.apart)
        _, samples, heads, length, size = apart.shape
        mixed: Array = xp.empty_like(apart, shape=(samples, length, heads * size))
        out = view_heads(mixed, heads)
        stored = xp.empty_like(mixed, shape=(samples, heads, length, length)) if keep else None
        for part in self.parts():
            if take is not None and part[1].start == 0:
                take(part[0])
            scores = self.room("scores", self.score_shape(part)) if stored is None else stored[part]
            dropped = operand(self.dropped(self.probabilities(part, scores), part))
            v = operand(self.heads(2, part))
            for start, stop in self.blocks():
                multiply(dropped[:, :, start:stop, :stop], v[:, :, :stop], out[part][:, :, start:stop])
        return mixed, (apart, stored, self.run, self.first_head)

    def attend_backward(self, stored: Array | None, dmixed: Array) -> Array:
        """Return the gradient of ``qkv``, (samples, length, 3 dim).

        ``stored`` are the probabilities that :meth:`attend` kept, or None, and ``dmixed`` is the gradient of the
        weighted sums of the values.
        """
        apart, xp = self.apart, namespace(self.apart)
        samples, length, dim = dmixed.shape
        dqkv: Array = xp.empty_like(apart, shape=(samples, length, 3 * dim))
        gradients, dmixed = view_kinds(dqkv, apart.shape[2]), contiguous(dmixed)
        for part in self.parts():
            if stored is None:
                probabilities = self.probabilities(part, self.room("scores", self.score_shape(part)))
            else:
                probabilities = stored[part]
            dropped = operand(self.dropped(probabilities, part))
            do, v_transposed = operand(self.copied(dmixed, part)), operand(self.transposed(2, part))
            dq, dk, dv = (gradient[part] for gradient in gradients)
            dprobabilities = self.room("gradients", self.score_shape(part))
            for start, stop in self.blocks():
                block = dprobabilities[:, :, start:stop, :stop]  # the kernel does not read what lies beyond
                multiply(do[:, :, start:stop], v_transposed[..., :stop], block)
                multiply(dropped[:, :, start:, start:stop].swapaxes(-1, -2), do[:, :, start:], dv[:, :, start:stop])
            dscores = self.dropped(dprobabilities, part)
            self.softmax_backward(probabilities, dscores)
            dscores, q, k = (operand(x) for x in (dscores, self.heads(0, part), self.heads(1, part)))
            for start, stop in self.blocks():
                multiply(dscores[:, :, start:stop, :stop], k[:, :, :stop], dq[:, :, start:stop])
                multiply(dscores[:, :, start:, start:stop].swapaxes(-1, -2), q[:, :, start:], dk[:, :, start:stop])
        return dqkv

    def parts(self) -> Iterator[Part]:
        """Yield (samples, heads) whose scores fit the CPU's cache: whole samples, or some heads of one sample."""
        _, samples, heads, length, _ = self.apart.shape
        limit = CACHE if isinstance(self.apart, np.ndarray) else DEVICE
        fitting = max(1, limit // max(1, length * length * self.apart.itemsize))
        some, several = max(1, fitting // heads), min(fitting, heads)
        for first in range(0, samples, some):
            for head in range(0, heads, several):
                yield slice(first, min(first + some, samples)), slice(head, min(head + several, heads))

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of queries (start, stop) for which scores are computed together.

        The causal mask hides all keys from ``stop`` on from the queries of a range.
        """
        return blocks(self.apart.shape[3], BLOCK if isinstance(self.apart, np.ndarray) else BLOCK_ON_DEVICE)

    def take(self, qkv: Array, bias: Array | None, some: slice) -> None:
        """Write the queries, keys and values of ``qkv[some] + bias`` to ``self.apart``, head by head.

        If ``bias`` is None, nothing is added; ``qkv`` does not change.
        """
        rows = _rows(qkv[some])
        self._kernels.split_heads(rows, rows[:0].reshape(-1) if bias is None else bias, 0, some.start, self.apart)

    def score_shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape of the scores of ``part``: (samples, heads, queries, keys)."""
        some, heads = part
        length = self.apart.shape[3]
        return some.stop - some.start, heads.stop - heads.start, length, length

    def heads(self, kind: int, part: Part) -> Array:
        """Return queries (``kind`` 0), keys (1) or values (2) of ``part``, as a contiguous view.

        Its shape is (samples, heads, length, dim / heads).
        """
        heads: Array = self.apart[kind][part]
        return heads

    def transposed(self, kind: int, part: Part) -> Array:
        """Return a copy of the result of :meth:`heads`, transposed to (samples, heads, dim / heads, length)."""
        heads = self.heads(kind, part)
        out = self.room("transposed", (*heads.shape[:2], heads.shape[3], heads.shape[2]))
        self._kernels.transposed_heads(heads, out)
        return out

    def copied(self, x: Array, part: Part) -> Array:
        """Return samples and heads ``part`` of ``x`` (samples, length, dim), copied to the shape of :meth:`heads`."""
        some, heads = part
        rows, shape = _rows(x[some]), self.heads(0, part).shape
        out = self.room("copied", shape)
        self._kernels.split_heads(rows, rows[:0].reshape(-1), heads.start, 0, out.reshape(1, *shape))
        return out

    def probabilities(self, part: Part, scores: Array) -> Array:
        """Compute the attention probabilities of ``part`` in the memory of ``scores``, and return them."""
        q, k_transposed = operand(self.heads(0, part)), operand(self.transposed(1, part))
        for start, stop in self.blocks():
            multiply(q[:, :, start:stop], k_transposed[..., :stop], scores[:, :, start:stop, :stop])
        self._kernels.causal_softmax(_matrices(scores), self._scale)
        return scores

    def softmax_backward(self, probabilities: Array, dscores: Array) -> None:
        """Replace ``dscores``, the gradient of the given probabilities, by the gradient of the scores, in place."""
        self._kernels.causal_softmax_backward(_matrices(probabilities), _matrices(dscores), self._scale)

    def dropped(self, x: Array, part: Part) -> Array:
        """Apply dropout to ``x``, the probabilities of ``part`` or their gradient; return a new array, or ``x`` itself.

        ``x`` itself is returned if nothing is dropped.
        """
        dropout = self._dropout
        if not dropout.drops(x, self.run):
            return x
        some, heads = part
        per_head = x.shape[2] * x.shape[3]
        run = replace(self.run, first_sample=self.run.first_sample + some.start)
        return dropout.mask(x, run, SamplePart((self.first_head + heads.start) * per_head, x.shape[1] * per_head))


class Heads(NamedTuple):
    """Describe the memory layout of the queries, keys and values of all heads in an array.

    Attributes
    ----------
    qkv : Array
        The array: (samples, length, 3, heads, size), or (3, samples, heads, length, size) with each head contiguous.
    samples, heads, length, size : int
        Numbers of samples, heads, positions and features of a head.
    steps : tuple of int
        Strides, in elements: from queries to keys, from sample to sample, from head to head and from position to
        position.
    """

    qkv: Array
    samples: int
    heads: int
    length: int
    size: int
    steps: tuple[int, int, int, int]

    @classmethod
    def of_rows(cls, qkv: Array, heads: int) -> Heads:
        """Describe ``qkv`` (samples, length, 3 dim), the result of a linear map."""
        samples, length, width = qkv.shape
        dim = width // 3
        return cls(qkv, samples, heads, length, dim // heads, (dim, length * width, dim // heads, width))

    @classmethod
    def of_heads(cls, apart: Array) -> Heads:
        """Describe ``apart`` (3, samples, heads, length, size), an array in which each head is contiguous."""
        _, samples, heads, length, size = apart.shape
        head = length * size
        return cls(apart, samples, heads, length, size, (samples * heads * head, heads * head, head, size))

    @property
    def pairs(self) -> int:
        """Number of heads, counted over all samples."""
        return self.samples * self.heads

    @property
    def scores(self) -> int:
        """Number of attention scores of one head of one sample."""
        return self.length * self.length

    def geometry(self) -> Array:
        """Return sizes and strides as the integer array that the kernels take."""
        return np.array([self.heads, self.length, self.size, *self.steps], np.int64)

    def room(self, count: int) -> Array:
        """Return an uninitialized array of ``count`` elements."""
        return np.empty(count, self.qkv.dtype)

    def memory(self) -> Array:
        """Return an array of temporary memory for a kernel."""
        from mpizero.kernels.attention import memory_size

        return temporary(memory_size(self.length, self.size, self.qkv.itemsize), self.qkv.dtype)

    def run(self, task: Callable[[int, int], None], operations: int) -> None:
        """Call ``task(start, stop)`` for ranges of the :attr:`pairs`, in several threads if that pays.

        ``operations``, about the number of floating-point operations of all ranges, decides how many threads.
        """
        pairs = self.pairs
        if (threads := min(threads_for(operations), pairs)) <= 1:
            task(0, pairs)
            return
        run_tasks([partial(task, part.start, part.stop) for part in parts_of(pairs, threads)], threads)


def kernel_attention(heads: Heads, scale: float, *, keep: bool) -> tuple[Array, Array | None]:
    """Return the weighted sums of the values (samples, length, dim), and the attention probabilities or None.

    The probabilities are returned if ``keep`` is True.
    """
    from mpizero.kernels.attention import causal_attention

    mixed = heads.room(heads.pairs * heads.length * heads.size)
    stored = heads.room(heads.pairs * heads.scores) if keep else None
    geometry, qkv, scale1 = heads.geometry(), heads.qkv.reshape(-1), vector(heads.qkv, scale)

    def task(start: int, stop: int) -> None:
        probabilities = heads.room(heads.scores) if stored is None else stored
        causal_attention(qkv, geometry, start, stop, scale1, probabilities, mixed, heads.memory())

    heads.run(task, 2 * mixed.size * heads.length)
    mixed = mixed.reshape(heads.samples, heads.length, heads.heads * heads.size)
    return mixed, None if stored is None else stored.reshape(heads.samples, heads.heads, heads.length, heads.length)


def kernel_attention_backward(heads: Heads, scale: float, stored: Array | None, dmixed: Array) -> Array:
    """Return the gradient of queries, keys and values (samples, length, 3 dim).

    ``dmixed`` is the gradient of the weighted sums of the values. ``stored`` are the probabilities that
    :func:`kernel_attention` returned; if they are None, they are computed again.
    """
    from mpizero.kernels.attention import causal_attention_backward

    gradients = heads.room(3 * heads.pairs * heads.length * heads.size)
    geometry, qkv, scale1 = heads.geometry(), heads.qkv.reshape(-1), vector(heads.qkv, scale)
    above: Any = np.require(dmixed, requirements=("C", "W")).reshape(-1)

    def task(start: int, stop: int) -> None:
        probabilities = heads.room(heads.scores) if stored is None else stored.reshape(-1)
        parts = (probabilities, int(stored is not None), above, gradients, heads.room(heads.scores), heads.memory())
        causal_attention_backward(qkv, geometry, start, stop, scale1, *parts)

    heads.run(task, 2 * gradients.size * heads.length)
    return gradients.reshape(heads.samples, heads.length, 3 * heads.heads * heads.size)


class AttentionBase(Composite, Affine, SequenceLayer):
    """Compute queries, keys and values, attention, and a projection; the base class of unsplit and split attention."""

    @property
    @abstractmethod
    def _layers(self) -> tuple[Affine, Affine]: ...

    @property
    @abstractmethod
    def features(self) -> int:
        """Number of features of the input."""

    @property
    @abstractmethod
    def local_heads(self) -> tuple[CausalSelfAttention, int]:
        """A layer that computes the attention of this rank's heads, and the number of the first of them in all heads.

        Only the attention of the returned layer is used, not its linear maps.
        """

    def children(self) -> dict[str, Layer]:
        """Return the two linear layers by name: ``qkv`` and ``projection``. Not collective."""
        into_qkv, projection = self._layers
        return {"qkv": into_qkv, "projection": projection}

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` (samples, length, dim) without the projection's bias, and the cache.

        Collective if the layer is split.
        """
        require_sequences(x, self.features, "CausalSelfAttention")
        (into_qkv, projection), (local, first_head) = self._layers, self.local_heads
        qkv, qkv_cache = into_qkv.product(params["qkv"], x, run)
        poll(params)
        mixed, saved = local.attend(qkv, into_qkv.last_bias(params["qkv"]), run, first_head)
        poll(params)
        y, projection_cache = projection.product(params["projection"], mixed, run)
        return y, ((qkv_cache, projection_cache), saved)

    def last_bias(self, params: Params) -> Array | None:
        """Return the projection's bias, which :meth:`product` does not add. Not collective."""
        return self._layers[1].last_bias(params["projection"])

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs.

        Collective if the layer is split.
        """
        into_qkv, projection = self._layers
        (qkv_cache, projection_cache), saved = cache
        dmixed, projection_pending = projection.backward_input(params["projection"], projection_cache, dy)
        poll(params)
        dqkv = self.local_heads[0].attend_backward(saved, known(dmixed))
        poll(params)
        dx, qkv_pending = into_qkv.backward_input(params["qkv"], qkv_cache, dqkv)
        return dx, (qkv_pending, projection_pending)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of the two linear maps and of the attention between them, for one sample of ``shape``.

        Not collective.
        """
        (into_qkv, projection), part = self._layers, self.local_shape(shape)
        return into_qkv.operations(part) + projection.operations(part) + self.local_heads[0].attend_operations(shape[0])


@explains
@dataclass(frozen=True)
class CausalSelfAttention(AttentionBase):
    """Let each position of a sequence attend to itself and the positions before it.

    Inputs and outputs are (samples, length, dim). One linear map, ``qkv``, computes queries, keys and values as one
    array (samples, length, 3, heads, dim / heads) (Vaswani et al., 2017, section 3.2). No method is collective.

    Parameters
    ----------
    dim, heads : int
        Number of features, and number of heads that they are split into; ``heads`` must divide ``dim``.
    dropout : float
        Dropout rate of the attention probabilities.
    site : int
        Number that keys the dropout's random mask; unique in the model.
    init, projection_init : Init or None
        Start values of the weight of ``qkv`` and of the output projection; None takes the default of :class:`Linear`.

    Examples
    --------
    >>> import mpizero as mz
    >>> layer = mz.nn.CausalSelfAttention(dim=8, heads=2)
    >>> {spec.name: spec.shape for spec in layer.specs()}
    {'qkv.weight': (8, 24), 'qkv.bias': (24,), 'projection.weight': (8, 8), 'projection.bias': (8,)}
    >>> layer.operations((16, 8)).forward  # floating-point operations of one sequence of 16 positions
    16384
    """

    dim: int
    heads: int
    dropout: float = 0.0
    site: int = 0
    init: Init | None = None
    projection_init: Init | None = None

    def __post_init__(self) -> None:
        require_positive("CausalSelfAttention", dim=self.dim, heads=self.heads)
        if self.dim % self.heads:
            raise ConfigError(
                f"CausalSelfAttention: dim={self.dim} is not divisible by heads={self.heads}; "
                f"choose heads that divide dim, or dim={self.dim - self.dim % self.heads or self.heads}"
            )
        Dropout(self.dropout, self.site)

    @cached_property
    def _layers(self) -> tuple[Linear, Linear]:
        qkv = Linear(self.dim, 3 * self.dim, init=self.init)
        return qkv, Linear(self.dim, self.dim, init=self.projection_init)

    @cached_property
    def probability_dropout(self) -> Dropout:
        """The dropout of the attention probabilities."""
        return Dropout(self.dropout, self.site)

    @property
    def features(self) -> int:
        """Number of features of the input."""
        return self.dim

    @property
    def local_heads(self) -> tuple[CausalSelfAttention, int]:
        """The layer itself, which has all heads, and 0, the index of its first head."""
        return self, 0

    def attend(self, qkv: Array, bias: Array | None, run: Run, first_head: int = 0) -> tuple[Array, Any]:
        """Compute attention from queries, keys and values, ``qkv + bias`` (samples, length, 3 dim).

        Returns the weighted sums of the values (samples, length, dim), and the cache for :meth:`attend_backward`.
        ``qkv`` may be overwritten. If this layer has only some of the heads of a split layer, ``first_head`` is the
        number of its first head in the whole layer; dropout masks depend on it.
        """
        xp, (samples, length, width) = namespace(qkv), qkv.shape
        if not length:
            raise DataError("CausalSelfAttention: takes sequences of at least one place, the input has none")
        if self._by_kernels(qkv, run):
            qkv = contiguous(qkv)
            rows = qkv.reshape(-1, width)
            if bias is not None:
                kernels.backend(rows).layers.add_bias(rows, bias, rows)
            return self._attend_by_kernels(qkv, run, first_head)
        apart = xp.empty_like(qkv, shape=(3, samples, self.heads, length, self.dim // self.heads))
        work, qkv = self._batched(apart, run, first_head), contiguous(qkv)
        return work.attend(lambda some: work.take(qkv, bias, some), keep=self.keeps_probabilities(length))

    def attend_heads(self, apart: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Compute attention from the heads of queries, keys and values, (3, samples, heads, length, dim / heads).

        Not collective. Returns the two values of :meth:`attend`; the cache holds ``apart``, which must be contiguous.
        """
        if self._by_kernels(apart, run):
            return self._attend_by_kernels(apart, run, 0)
        return self._batched(apart, run, 0).attend(None, keep=self.keeps_probabilities(apart.shape[3]))

    def attend_backward(self, saved: Any, dmixed: Array) -> Array:
        """Return the gradient of ``qkv``, (samples, length, 3 dim).

        ``saved`` is the cache that :meth:`attend` returned, and ``dmixed`` the gradient of the first result of
        :meth:`attend`.
        """
        qkv, stored, run, first_head = saved
        if self._by_kernels(qkv, run):
            return kernel_attention_backward(self._kernel_heads(qkv), self.scale, stored, dmixed)
        return self._batched(qkv, run, first_head).attend_backward(stored, dmixed)

    def _batched(self, apart: Array, run: Run, first_head: int) -> BatchedHeads:
        return BatchedHeads(apart, self.scale, self.probability_dropout, run, first_head)

    def _by_kernels(self, x: Array, run: Run) -> bool:
        """Tell whether one kernel computes the whole attention; the kernel has no dropout."""
        return by_kernels(x) and not self.probability_dropout.drops(x, run)

    def _attend_by_kernels(self, qkv: Array, run: Run, first_head: int) -> tuple[Array, Any]:
        heads = self._kernel_heads(qkv)
        mixed, stored = kernel_attention(heads, self.scale, keep=self.keeps_probabilities(heads.length))
        return mixed, (qkv, stored, run, first_head)

    def _kernel_heads(self, qkv: Array) -> Heads:
        """Return the memory layout of the cached queries, keys and values, ``qkv``, for the kernels.

        ``qkv`` is the output of the linear map ``qkv``, or a copy of five axes in which each head is contiguous.
        """
        return Heads.of_heads(qkv) if qkv.ndim == 5 else Heads.of_rows(qkv, self.heads)

    def keeps_probabilities(self, length: int) -> bool:
        """Tell whether the attention probabilities of sequences of ``length`` are kept for the backward pass.

        Probabilities are kept if they are no larger than four arrays (samples, length, dim). For longer sequences the
        backward pass computes them again, with the same bits.
        """
        return length <= 4 * (self.dim // self.heads)

    @property
    def scale(self) -> float:
        """The factor on the scores, 1 / sqrt(dim / heads)."""
        return 1.0 / math.sqrt(self.dim // self.heads)

    def attend_operations(self, length: int) -> Operations:
        """Count the operations of :meth:`attend` and its backward pass for one sample of ``length`` positions.

        Scores are counted for blocks of 64 queries; keys that the causal mask hides from a whole block are left out.
        The kernels of a CPU skip some more scores, a GPU skips fewer: see
        :data:`mpizero.nn.transformer.BLOCK_ON_DEVICE`.
        """
        sizes = [(stop - start, stop, length - start) for start, stop in blocks(length)]
        products = sum(2 * self.dim * queries * before for queries, before, _ in sizes)
        seeing = sum(2 * self.dim * queries * after for queries, _, after in sizes)
        again = 0 if self.keeps_probabilities(length) else products
        return Operations(2 * products, again + 2 * products + 2 * seeing)

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add nodes for the two linear maps and the attention to the exported computation graph; return the output."""
        into_qkv, projection = self._layers
        node = into_qkv.trace(graph, f"{name}.qkv", source)
        settings = {"heads": self.heads, "scale": self.scale, "dropout": self.dropout}
        node = graph.add("CausalAttention", f"{name}.attend", (node,), source.shape, **settings)
        return projection.trace(graph, f"{name}.projection", node)


class FeedForwardBase(Composite, Affine):
    """Apply two linear layers with an activation between them; the base class of the unsplit and the split form."""

    @property
    @abstractmethod
    def _layers(self) -> tuple[Affine, Activation, Affine]: ...

    def children(self) -> dict[str, Layer]:
        """Return the two linear layers by name: ``expand`` and ``projection``. Not collective."""
        expand, _, projection = self._layers
        return {"expand": expand, "projection": projection}

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` (..., dim) without the last bias, and the cache.

        Collective if the layers are split.
        """
        expand, act, projection = self._layers
        hidden, expand_cache = expand.product(params["expand"], x, run)
        active, act_cache = act.forward_biased(hidden, expand.last_bias(params["expand"]))
        poll(params)
        y, projection_cache = projection.product(params["projection"], active, run)
        return y, ((expand_cache, projection_cache), act_cache)

    def last_bias(self, params: Params) -> Array | None:
        """Return the second linear layer's bias, which :meth:`product` does not add. Not collective."""
        return self._layers[2].last_bias(params["projection"])

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs.

        Collective if the layers are split.
        """
        expand, act, projection = self._layers
        (expand_cache, projection_cache), act_cache = cache
        dactive, projection_pending = projection.backward_input(params["projection"], projection_cache, dy)
        dhidden = act.backward_over(act_cache, known(dactive))  # the projection's result, which nobody else holds
        poll(params)
        dx, expand_pending = expand.backward_input(params["expand"], expand_cache, dhidden)
        return dx, (expand_pending, projection_pending)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the sum of both linear layers' operations for one sample of ``shape``. Not collective."""
        expand, _, projection = self._layers
        return expand.operations(shape) + projection.operations(expand.output_shape(shape))


@explains
@dataclass(frozen=True)
class FeedForward(FeedForwardBase):
    """Apply two linear layers with an activation between them, to each position of a sequence by itself.

    Inputs and outputs are (samples, length, dim). No method is collective.

    Parameters
    ----------
    dim : int
        Features of input and output.
    hidden : int or None
        Number of features between the two layers; None is ``4 * dim``.
    activation : str
        "gelu", "silu", "relu" or "tanh".
    init, projection_init : Init or None
        Start values of the first and the second weight; None takes the default of :class:`Linear`.

    Examples
    --------
    >>> import mpizero as mz
    >>> layer = mz.nn.FeedForward(dim=8, hidden=12, activation="silu")
    >>> {spec.name: spec.shape for spec in layer.specs()}
    {'expand.weight': (8, 12), 'expand.bias': (12,), 'projection.weight': (12, 8), 'projection.bias': (8,)}
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
        """Number of features between the two linear layers."""
        return 4 * self.dim if self.hidden is None else self.hidden

    @cached_property
    def _layers(self) -> tuple[Linear, Activation, Linear]:
        return (
            Linear(self.dim, self.width, init=self.init),
            named_activation(self.activation),
            Linear(self.width, self.dim, init=self.projection_init),
        )

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add nodes for the three layers, one after the other, to the exported computation graph; return the output."""
        expand, act, projection = self._layers
        return traced(graph, name, source, expand=expand, activation=act, projection=projection)


class TransformerBlockBase(Composite, SequenceLayer):
    """Compute a pre-norm transformer block; the base class of the unsplit and the split form."""

    @property
    @abstractmethod
    def _layers(self) -> tuple[LayerNorm, Affine, LayerNorm, Affine]: ...

    @property
    @abstractmethod
    def _dropouts(self) -> tuple[Dropout, Dropout]: ...

    def _dropped(self, dropout: Dropout, x: Array, run: Run) -> Array:
        """Return ``x``, or a split block's part of it, with dropout applied.

        The backward pass calls this method with ``dy`` as ``x``. Not collective.
        """
        return dropout.mask(x, run) if dropout.drops(x, run) else x

    def _joined(self, branch: Array, bias: Array | None, dropout: Dropout, stream: Array, run: Run) -> Array:
        """Return the residual ``stream`` plus dropout of ``branch + bias``; ``branch`` may be overwritten."""
        if bias is None or dropout.drops(branch, run):
            if bias is not None:
                add_bias(branch, bias)
            branch = self._dropped(dropout, branch, run)
            add_to(branch, stream)
            return branch
        rows = contiguous(branch).reshape(-1, branch.shape[-1])
        residual = contiguous(stream).reshape(rows.shape)
        kernels.backend(rows).layers.add_bias_residual(rows, bias, residual, rows)
        joined: Array = rows.reshape(branch.shape)
        return joined

    def children(self) -> dict[str, Layer]:
        """Return the four layers by name: ``norm1``, ``attention``, ``norm2`` and ``feed_forward``. Not collective."""
        norm1, attention, norm2, feed_forward = self._layers
        return {"norm1": norm1, "attention": attention, "norm2": norm2, "feed_forward": feed_forward}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` (samples, length, dim), of the same shape, and the cache.

        Collective if the layers are split.
        """
        norm1, attention, norm2, feed_forward = self._layers
        drop1, drop2 = self._dropouts
        require_sequences(x, norm1.features, "TransformerBlock")
        require_numbers(x, "TransformerBlock")
        x = contiguous(x, params["norm1"]["weight"].dtype)
        a, norm1_cache = norm1.forward(params["norm1"], x, run)
        poll(params)
        a, attention_cache = attention.product(params["attention"], a, run)
        h = self._joined(a, attention.last_bias(params["attention"]), drop1, x, run)
        poll(params)
        b, norm2_cache = norm2.forward(params["norm2"], h, run)
        poll(params)
        b, feed_cache = feed_forward.product(params["feed_forward"], b, run)
        y = self._joined(b, feed_forward.last_bias(params["feed_forward"]), drop2, h, run)
        return y, ((norm1_cache, attention_cache, norm2_cache, feed_cache), run)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs.

        Collective if the layers are split.
        """
        norm1, attention, norm2, feed_forward = self._layers
        drop1, drop2 = self._dropouts
        (norm1_cache, attention_cache, norm2_cache, feed_cache), run = cache
        db = self._dropped(drop2, dy, run)
        dfeed, feed_pending = feed_forward.backward_input(params["feed_forward"], feed_cache, db)
        poll(params)
        dh, norm2_pending = norm2.backward_joined(params["norm2"], norm2_cache, known(dfeed), dy)
        da = self._dropped(drop1, dh, run)
        poll(params)
        dattention, attention_pending = attention.backward_input(params["attention"], attention_cache, da)
        poll(params)
        dx, norm1_pending = norm1.backward_joined(params["norm1"], norm1_cache, known(dattention), dh)
        return dx, (norm1_pending, attention_pending, norm2_pending, feed_pending)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the sum of the operations of attention and feed-forward for one sample of ``shape``.

        Not collective.
        """
        _, attention, _, feed_forward = self._layers
        return attention.operations(shape) + feed_forward.operations(self.local_shape(shape))


@explains
@dataclass(frozen=True)
class TransformerBlock(TransformerBlockBase):
    """Compute a pre-norm block: ``h = x + attention(norm1(x))``, then ``h + feed_forward(norm2(h))``.

    Inputs and outputs are (samples, length, dim). No method is collective.

    Parameters
    ----------
    dim, heads : int
        Number of features and number of attention heads.
    dropout : float
        Rate of the block's three dropouts. One dropout acts on the attention probabilities, the others on the results
        of ``attention`` and ``feed_forward``.
    site : int
        First of the three consecutive numbers that key the random masks of this block's dropouts.
    residual_scale : float
        Factor on the start values of the two projections that write into the residual stream. GPT-2 uses
        1/sqrt(2 * layers), so that the stream's variance does not grow with depth.

    Examples
    --------
    >>> import mpizero as mz
    >>> block = mz.nn.TransformerBlock(dim=8, heads=2)
    >>> list(block.children())
    ['norm1', 'attention', 'norm2', 'feed_forward']
    >>> sum(spec.size for spec in block.specs())  # 12 dim**2 + 13 dim parameters
    872
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

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add nodes for attention, feed-forward and their residual sums to the computation graph; return the output."""
        norm1, attention, norm2, feed_forward = self._layers
        drop1, drop2 = self._dropouts
        node = traced(graph, name, source, norm1=norm1, attention=attention, dropout1=drop1)
        middle = graph.add("Add", f"{name}.residual1", (source, node), source.shape)
        node = traced(graph, name, middle, norm2=norm2, feed_forward=feed_forward, dropout2=drop2)
        return graph.add("Add", f"{name}.residual2", (middle, node), source.shape)


class LanguageHeadBase(Composite):
    """Apply a norm, then project onto the vocabulary; the base class of the unsplit and the split head.

    If the projection's weight is tied, only the gradient of its use in this layer is written.
    """

    @property
    @abstractmethod
    def _layers(self) -> tuple[Layer, Layer]: ...

    def children(self) -> dict[str, Layer]:
        """Return the two layers by name: ``norm`` and ``projection``. Not collective."""
        norm, projection = self._layers
        return {"norm": norm, "projection": projection}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (samples, length, dim) to logits (samples, length, vocabulary); return the logits and the cache.

        Collective if the projection is split.
        """
        norm, projection = self._layers
        normed, norm_cache = norm.forward(params["norm"], x, run)
        poll(params)
        logits, projection_cache = projection.forward(params["projection"], normed, run)
        return logits, ((norm_cache, projection_cache),)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs.

        Collective if the projection is split.
        """
        norm, projection = self._layers
        ((norm_cache, projection_cache),) = cache
        dnormed, projection_pending = projection.backward_input(params["projection"], projection_cache, dy)
        poll(params)
        dx, norm_pending = norm.backward_input(params["norm"], norm_cache, known(dnormed))
        return dx, (norm_pending, projection_pending)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the projection's operations for one sample of ``shape``. Not collective."""
        return self._layers[1].operations(shape)


@explains
@dataclass(frozen=True)
class LanguageHead(LanguageHeadBase):
    """Apply the final :class:`LayerNorm`, then project onto the vocabulary: a language model's last block.

    Inputs are (samples, length, dim), outputs are logits (samples, length, vocabulary). No method is collective.

    Parameters
    ----------
    dim, vocabulary : int
        Number of features, and number of different ids.
    tied : str or None
        Name of the parameter that the projection uses as its weight (the token table), or None for a separate weight.

    Examples
    --------
    >>> import mpizero as mz
    >>> head = mz.nn.LanguageHead(4, 256, tied="embedding.token.weight")
    >>> [spec.name for spec in head.specs()]
    ['norm.weight', 'norm.bias', 'projection.weight']
    >>> head.output_shape((6, 4))  # of one sample: 6 positions of 4 features
    (6, 256)
    """

    dim: int
    vocabulary: int
    tied: str | None = None

    @cached_property
    def _layers(self) -> tuple[LayerNorm, Projection]:
        return LayerNorm(self.dim), Projection(self.dim, self.vocabulary, self.tied)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with ``vocabulary`` as its last element."""
        return (*shape[:-1], self.vocabulary)

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add nodes for the norm and the projection to the exported computation graph; return the output."""
        norm, projection = self._layers
        return traced(graph, name, source, norm=norm, projection=projection)
