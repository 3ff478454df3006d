"""Divide sequences among the ranks of a context group: each rank computes on its positions of every sequence.

:class:`Zigzag` assigns positions to ranks. :class:`RingSelfAttention` computes causal attention over the divided
sequences, whose keys and values travel around a ring; the other layers compute each position by itself, or need only
the indices of their positions. :func:`context_model` builds the context-parallel form of a model, :func:`cut_batch`
cuts its batches.

The algorithm is ring attention (Liu, Zaharia and Abbeel, 2023). The softmax is updated as keys arrive (Milakov and
Gimelshein, 2018; Rabe and Staats, 2021), so a rank never holds more than one small block of the scores at a time. The
backward pass computes the scores again (Dao et al., 2022). To do so, it needs two numbers for each query from the
forward pass: the maximum of its scores, and the sum of their exponentials relative to the maximum. The log-sum-exp of
the scores would be one number, but its rounding error grows with the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from mpizero import kernels
from mpizero._util.pytree import leaves_of, map_leaves
from mpizero.errors import ConfigError, DataError
from mpizero.layout import Partition
from mpizero.nn.arrays import multiply, namespace, operand, vector
from mpizero.nn.layer import Layer, Operations, SamplePart, SequenceLayer, Wrapper
from mpizero.nn.layers import (
    Activation,
    Checkpointed,
    Dropout,
    Frozen,
    LayerNorm,
    Linear,
    PartlyFrozen,
    Projection,
    RMSNorm,
    Sequential,
)
from mpizero.nn.losses import CrossEntropy, ElementLoss
from mpizero.nn.models import Select
from mpizero.nn.tensor_parallel import (
    ColumnLinear,
    JoinedLoss,
    RowLinear,
    SequenceParallel,
    SplitAttention,
    SplitBlock,
    SplitCrossEntropy,
    SplitEmbedding,
    SplitFeedForward,
    SplitHead,
    SplitLinear,
    SplitModel,
    SplitProjection,
    SplitTokenEmbedding,
    split_model,
    whole_prediction,
)
from mpizero.nn.transformer import (
    CausalSelfAttention,
    Embedding,
    FeedForward,
    LanguageHead,
    Position,
    TokenEmbedding,
    TransformerBlock,
    Workspace,
    view_heads,
    view_kinds,
)
from mpizero.types import EVALUATE, Array, BlockModel, Group, Loss, Params, Run, ShiftRequest

#: Number of queries and of keys in one tile of scores. Tiles of this size stay in the cache; larger tiles would compute
#: more scores that the causal mask hides.
QUERIES, KEYS = 128, 512


class Tile(NamedTuple):
    """Describe a rectangle of attention scores that the causal mask does not hide completely.

    ``queries`` are indices into this rank's part of the sequence. ``keys`` are indices into the part of the rank that
    the keys come from. ``row`` and ``column`` are the positions of the first query and the first key in the whole
    sequence.
    """

    queries: slice
    keys: slice
    row: int
    column: int

    @property
    def offset(self) -> int:
        """``row - column``: query i of the tile attends to key j of the tile if j <= i + offset."""
        return self.row - self.column


@dataclass(frozen=True)
class Zigzag:
    """Cut a sequence into 2 * ranks chunks of about equal length; rank r holds chunks r and 2 * ranks - 1 - r.

    The chunks are the shards of a :class:`~mpizero.layout.flat.Partition`. With this cut the numbers of unmasked scores
    that ranks compute are about equal, both in total and in each step of ring attention, that is, with the keys of one
    rank. The numbers of positions that two ranks hold differ by one at most.

    Parameters
    ----------
    length : int
        Number of positions of the whole sequence; if it is less than 2 * ranks, some chunks are empty.
    ranks : int
        Size of the context group.

    Examples
    --------
    >>> import mpizero as mz
    >>> [mz.nn.Zigzag(10, 2).positions(rank).tolist() for rank in range(2)]
    [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]
    """

    length: int
    ranks: int

    @cached_property
    def _chunks(self) -> tuple[tuple[slice, slice], ...]:
        slices = tuple(Partition(self.length, 2 * self.ranks))
        return tuple((slices[rank], slices[-1 - rank]) for rank in range(self.ranks))

    def chunks(self, rank: int) -> tuple[slice, slice]:
        """Return the two ranges of positions in the whole sequence that rank ``rank`` holds, in ascending order."""
        return self._chunks[rank]

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of :meth:`chunks` as pairs (start, stop), the form of :attr:`mpizero.types.Run.ranges`."""
        return tuple((chunk.start, chunk.stop) for chunk in self._chunks[rank])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions that each rank holds."""
        return tuple(sum(chunk.stop - chunk.start for chunk in chunks) for chunks in self._chunks)

    @property
    def longest(self) -> int:
        """The largest of :attr:`sizes`; all ranks pad their messages to this number of positions."""
        return -(-self.length // self.ranks)

    def pieces(self, rank: int) -> Iterator[tuple[slice, slice]]:
        """Yield two slices for each of the two ranges that rank ``rank`` holds.

        The first slice selects the range in the rank's part of the sequence, the second in the whole sequence.
        """
        done = 0
        for chunk in self._chunks[rank]:
            size = chunk.stop - chunk.start
            yield slice(done, done + size), chunk
            done += size

    def positions(self, rank: int) -> Array:
        """Return, for each index into the part of rank ``rank``, the position in the whole sequence, as int64."""
        return np.concatenate([np.arange(chunk.start, chunk.stop, dtype=np.int64) for chunk in self._chunks[rank]])

    def scores(self, rank: int) -> int:
        """Count the scores that rank ``rank`` computes: all tiles of its queries with the keys of all ranks."""
        queries = [
            (first, min(first + QUERIES, chunk.stop))
            for chunk in self._chunks[rank]
            for first in range(chunk.start, chunk.stop, QUERIES)
        ]
        return sum((stop - first) * stop for first, stop in queries)

    def tiles(self, rank: int, source: int) -> Iterator[Tile]:
        """Yield the tiles into which the scores of rank ``rank``'s queries with the keys of rank ``source`` are cut.

        Tiles that the causal mask hides completely are left out, because all their keys come after all their queries.
        """
        for local, chunk in self.pieces(rank):
            for first in range(chunk.start, chunk.stop, QUERIES):
                count = min(QUERIES, chunk.stop - first)
                queries = slice(local.start + first - chunk.start, local.start + first - chunk.start + count)
                for source_local, keys in self.pieces(source):
                    last_key = min(keys.stop, first + count)
                    for column in range(keys.start, last_key, KEYS):
                        begin = source_local.start + column - keys.start
                        visible = slice(begin, begin + min(KEYS, last_key - column))
                        yield Tile(queries, visible, first, column)


class ContextLayer(SequenceLayer):
    """Define a layer that computes this rank's positions of each sequence, as :class:`Zigzag` assigns them."""

    #: The context group.
    group: Group

    def located(self, run: Run, shape: tuple[int, ...] | None) -> Run:
        """Return a copy of ``run`` with the length of whole sequences and the positions that this rank holds.

        See the function :func:`located`.
        """
        return located(run, shape, self.group)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a sample whose whole shape is ``shape`` (length, ...)."""
        return (Zigzag(shape[0], self.group.size).sizes[self.group.rank], *shape[1:])


def located(run: Run, shape: tuple[int, ...] | None, group: Group) -> Run:
    """Return a copy of ``run`` with the length of whole sequences and the positions that this rank holds.

    ``shape`` (samples, positions, ...) is the shape of this rank's part of the sequences; None if ``run.length`` is
    known. Collective over ``group`` if ``run.length`` is 0 (unknown).

    Raises
    ------
    DataError
        The numbers of positions on the ranks are not those of a zigzag cut, or the numbers of samples differ. If the
        call is collective, all ranks raise this error.
    """
    if not run.length and shape is not None:
        run = replace(run, length=sum(gather_lengths(shape, group)), ranges=())
    if not run.ranges:
        run = replace(run, ranges=Zigzag(run.length, group.size).ranges(group.rank))
    if shape is not None and (len(shape) < 2 or shape[1] != run.held):
        raise DataError(
            f"rank {group.rank} of {group.size} holds {run.held} places of a sequence of "
            f"{run.length}, but the input has shape {tuple(shape)}; cut batches with mpizero.nn.cut_batch"
        )
    return run


def gather_lengths(shape: tuple[int, ...], group: Group) -> tuple[int, ...]:
    """Return the number of positions on each rank.

    ``shape`` (samples, positions, ...) is the shape of this rank's part of the sequences. Collective over ``group``.

    Raises
    ------
    DataError
        The numbers of positions are not those of a zigzag cut, or the numbers of samples differ. All ranks raise this
        error.
    """
    local = np.array([shape[:2] if len(shape) >= 2 else (-1, -1)], np.int64)
    shapes = group.all_gather(local, 0, (1,) * group.size, tag="context lengths") if group.size > 1 else local
    lengths = tuple(int(length) for length in shapes[:, 1])
    if min(lengths) < 0 or len(set(shapes[:, 0].tolist())) > 1 or lengths != Zigzag(sum(lengths), group.size).sizes:
        raise DataError(
            "the ranks of a context group hold inputs of (samples, length) = "
            f"{', '.join(str((int(s), int(n))) for s, n in shapes)}, which are not parts of the same sequences; "
            "cut the same batch on every rank with mpizero.nn.cut_batch"
        )
    return lengths


def ring_pass(group: Group, array: Array, tag: str) -> Iterator[tuple[int, Array, ShiftRequest | None]]:
    """Pass arrays around a ring of ranks; yield (rank, that rank's array, request for the next array).

    The first array is this rank's own ``array``; then come those of the other ranks. While the caller works with an
    array, it is also being sent to the next rank, so it must not be written to. The last request is None. All ranks'
    arrays have the same shape. Collective over ``group``: each rank sends size - 1 messages, where size is the number
    of ranks.
    """
    for hop in range(group.size):
        request = group.shift([array], 1, tag) if hop < group.size - 1 else None
        yield (group.rank - hop) % group.size, array, request
        if request is not None:
            (array,) = request.wait()


def poll_function(*requests: ShiftRequest | None) -> Callable[[], None]:
    """Return a function that lets the messages of the given requests make progress; a request may be None.

    Most MPI implementations move large messages only while a rank is inside an MPI call. Not collective.
    """
    coming = [request for request in requests if request is not None]

    def poll() -> None:
        for request in coming:
            request.test()

    return poll


@dataclass(frozen=True)
class RingSelfAttention(ContextLayer, CausalSelfAttention):
    """Apply :class:`CausalSelfAttention`, with the same parameters, to this rank's positions of each sequence.

    ``group`` is the context group. The gradients of the parameters are computed from this rank's positions only; their
    sum over the group is the whole gradient. Each rank sends size - 1 messages in the forward pass and 2 * (size - 1)
    in the backward pass, each of 2 * samples * ceil(length / size) * dim numbers, where ``size`` is the number of
    ranks.
    """

    group: Group = field(kw_only=True)

    def attend(self, qkv: Array, bias: Array | None, run: Run, first_head: int = 0) -> tuple[Array, Any]:
        """Compute the attention of this rank's queries to the keys and values of all ranks.

        ``qkv`` (samples, positions of this rank, 3 dim) holds this rank's queries, keys and values; ``bias`` is added
        to it in place. Returns the weighted sums of the values (samples, positions of this rank, dim), and the cache
        for :meth:`attend_backward`. Collective over ``group``.
        """
        if bias is not None:
            qkv += bias
        run = self.located(run, qkv.shape)
        xp, scores = namespace(qkv), _TileScores(self, qkv, run, first_head)
        rows = (*qkv.shape[:2], self.heads)
        maxima, sums = xp.full(rows, -math.inf, qkv.dtype), xp.zeros(rows, qkv.dtype)
        mixed = xp.zeros((*qkv.shape[:2], self.dim), qkv.dtype)
        q, out = view_kinds(qkv, self.heads)[0], view_heads(mixed, self.heads)
        for source, pair, coming in ring_pass(self.group, self._packed(qkv, scores.zigzag), "ring keys"):
            k, v = self._pair(pair)
            for some, tile in scores.of(source, poll_function(coming)):
                weights = scores.product("scores", q[some, :, tile.queries], k[some, :, tile.keys].swapaxes(-1, -2))
                factors = scores.running_softmax(weights, some, tile, maxima, sums)
                dropped = scores.dropped(weights, some, tile)
                total = out[some, :, tile.queries]
                total *= factors[..., None]
                total += scores.product("values", dropped, v[some, :, tile.keys])
        reciprocals = xp.divide(1, sums, out=sums)
        heads_mixed = mixed.reshape(*rows, self.dim // self.heads)
        heads_mixed *= reciprocals[..., None]
        return mixed, _Saved(qkv, mixed, maxima, reciprocals, run, first_head)

    def attend_backward(self, saved: Any, dmixed: Array) -> Array:
        """Return the gradient of ``qkv``.

        ``saved`` is the cache that :meth:`attend` returned, and ``dmixed`` is the gradient of its first result. The
        gradient of keys and values travels around the ring one message after the keys and values themselves. Collective
        over ``group``.
        """
        qkv = saved.qkv
        xp, adjoint = namespace(qkv), _RingBackward(self, saved, dmixed)
        dqkv: Array = xp.zeros_like(qkv)
        dq, dk, dv = view_kinds(dqkv, self.heads)
        request: ShiftRequest | None = None
        for source, pair, coming in ring_pass(self.group, self._packed(qkv, adjoint.scores.zigzag), "ring keys"):
            tiles = adjoint.scores.of(source, poll_function(coming, request))
            if source == self.group.rank:
                adjoint.add(tiles, self._pair(pair), dq, (dk, dv))
                continue
            dpair = xp.zeros_like(pair)
            adjoint.add(tiles, self._pair(pair), dq, self._pair(dpair))
            if request is not None:
                dpair += request.wait()[0]
            request = self.group.shift([dpair], 1, "ring gradients")
        if request is not None:
            dqkv[:, :, self.dim :] += request.wait()[0][:, : qkv.shape[1]]
        return dqkv

    def attend_operations(self, length: int) -> Operations:
        """Count the operations of attention on this rank for one sample.

        ``length`` is the number of the sample's positions on all ranks together. For each tile of scores there are two
        products in the forward pass, and five in the backward pass. Not collective.
        """
        product = 2 * self.dim * Zigzag(length, self.group.size).scores(self.group.rank)
        return Operations(2 * product, 5 * product)

    def _packed(self, qkv: Array, zigzag: Zigzag) -> Array:
        """Copy this rank's keys and values to (samples, longest, 2 dim), padded with zeros.

        ``longest`` is the largest number of positions that a rank holds.
        """
        xp = namespace(qkv)
        pair: Array = xp.empty((qkv.shape[0], zigzag.longest, 2 * self.dim), qkv.dtype)
        pair[:, : qkv.shape[1]] = qkv[:, :, self.dim :]
        pair[:, qkv.shape[1] :] = 0
        return pair

    def _pair(self, pair: Array) -> tuple[Array, Array]:
        """Return views of the keys and of the values in ``pair``, the result of :meth:`_packed`.

        Each is (samples, heads, longest, dim / heads).
        """
        samples, length, _ = pair.shape
        k, v = pair.reshape(samples, length, 2, self.heads, self.dim // self.heads).transpose(2, 0, 3, 1, 4)
        return k, v


class _Saved(NamedTuple):
    """Hold what the forward pass of :class:`RingSelfAttention` keeps for the backward pass.

    Attributes
    ----------
    qkv, mixed : Array
        The queries, keys and values with the bias added, and the weighted sums of the values.
    maxima, reciprocals : Array
        For each query and head the greatest score, and the reciprocal of the sum of the exponentials.
    run : Run
        The argument ``run`` of the forward pass, with the length of whole sequences and this rank's positions.
    first_head : int
        Number of the first head in the whole layer.
    """

    qkv: Array
    mixed: Array
    maxima: Array
    reciprocals: Array
    run: Run
    first_head: int


#: Largest number of scores computed at once, for as many samples as fit: 2 MiB of float32 stay in a core's cache.
SCORES = 1 << 19
#: Pairs of a range of samples and a tile.
_Parts = Iterator[tuple[slice, Tile]]


class _TileScores:
    """Compute one :class:`Tile` (rectangle) of scores after the other, forward and backward, in memory used again."""

    def __init__(self, layer: RingSelfAttention, qkv: Array, run: Run, first_head: int) -> None:
        self.zigzag = Zigzag(run.length, layer.group.size)
        self.kernels = kernels.backend(qkv).attention
        self.scale = vector(qkv, layer.scale)
        self._run, self._dropout, self._first_head = run, layer.probability_dropout, first_head
        self._heads, self._rank, self._samples = layer.heads, layer.group.rank, qkv.shape[0]
        self._work = Workspace(qkv)

    def of(self, source: int, poll: Callable[[], None]) -> _Parts:
        """Yield a range of samples and a :class:`Tile`, for all tiles with the keys of rank ``source``.

        If a tile of all samples has more than :data:`SCORES` scores, the samples are cut into ranges, and all tiles are
        yielded for each range. ``poll`` is called after each tile.
        """
        chunk = self.zigzag.longest // 2 + 1
        batch = max(1, SCORES // (self._heads * min(QUERIES, chunk) * min(KEYS, chunk)))
        for first in range(0, self._samples, batch):
            for tile in self.zigzag.tiles(self._rank, source):
                yield slice(first, min(first + batch, self._samples)), tile
                poll()

    def product(self, name: str, a: Array, b: Array) -> Array:
        """Return ``a @ b``, computed in the workspace memory called ``name``."""
        out = self._work.room(name, (*a.shape[:-1], b.shape[-1]))
        multiply(operand(a), operand(b), out)
        return out

    def running_softmax(self, scores: Array, some: slice, tile: Tile, maxima: Array, sums: Array) -> Array:
        """Replace ``scores`` by their exponentials relative to each query's greatest score so far.

        ``some`` is the range of samples. ``maxima`` and ``sums`` are updated in place. Returns, for each query, the
        factor by which earlier weighted sums of values must be multiplied.
        """
        factors = self._work.room("factors", scores.shape[:3])
        start = tile.queries.start
        self.kernels.running_softmax(scores, self.scale, tile.offset, start, maxima[some], sums[some], factors)
        return factors

    def dropped(self, x: Array, some: slice, tile: Tile) -> Array:
        """Apply dropout to ``x``, a tile of probabilities or of their gradient; return a new array, or ``x`` itself.

        ``some`` is the range of samples. ``x`` itself is returned if nothing is dropped.
        """
        if not self._dropout.drops(x, self._run):
            return x
        length, (queries, keys) = self.zigzag.length, x.shape[2:]
        first = (self._first_head * length + tile.row) * length + tile.column
        run = replace(self._run, first_sample=self._run.first_sample + some.start)
        return self._dropout.mask(x, run, SamplePart(first, keys, queries, length, length * length))


class _RingBackward:
    """Compute the gradients from the scores of this rank's queries, one :class:`Tile` of scores after the other."""

    def __init__(self, layer: RingSelfAttention, saved: _Saved, dmixed: Array) -> None:
        self.scores = _TileScores(layer, saved.qkv, saved.run, saved.first_head)
        self._saved, self._q, self._dout = saved, view_kinds(saved.qkv, layer.heads)[0], view_heads(dmixed, layer.heads)
        heads = (*dmixed.shape[:2], layer.heads, layer.dim // layer.heads)
        self._dots = namespace(dmixed).einsum("...f,...f->...", dmixed.reshape(heads), saved.mixed.reshape(heads))

    def add(self, over: _Parts, pair: tuple[Array, Array], dq: Array, dpair: tuple[Array, Array]) -> None:
        """Add to ``dq`` and ``dpair`` the gradients from the scores of this rank's queries with one rank's keys.

        ``over`` yields the tiles of these scores. ``pair`` are that rank's keys and values, ``dpair`` their gradients.
        """
        (k, v), (dk, dv), scores = pair, dpair, self.scores
        for some, tile in over:
            queries, keys = (some, slice(None), tile.queries), (some, slice(None), tile.keys)
            masking = (scores.scale, tile.offset, tile.queries.start)
            probs = scores.product("scores", self._q[queries], k[keys].swapaxes(-1, -2))
            scores.kernels.known_softmax(probs, *masking, self._saved.maxima[some], self._saved.reciprocals[some])
            dprobs = scores.product("gradients", self._dout[queries], v[keys].swapaxes(-1, -2))
            dropped, dprobs = scores.dropped(probs, some, tile), scores.dropped(dprobs, some, tile)
            dv[keys] += scores.product("keys", dropped.swapaxes(-1, -2), self._dout[queries])
            scores.kernels.known_softmax_backward(probs, dprobs, *masking, self._dots[some])
            dq[queries] += scores.product("queries", dprobs, k[keys])
            dk[keys] += scores.product("keys", dprobs.swapaxes(-1, -2), self._q[queries])


@dataclass(frozen=True)
class ContextDropout(Dropout):
    """Apply :class:`Dropout` to this rank's positions, with the mask that they have in the whole sequence.

    ``x`` is (samples, positions of this rank, ...); ``group`` is the context group.
    """

    group: Group = field(kw_only=True)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` with the mask applied, or ``x`` itself if not in training; and the cache.

        Collective over ``group`` in training if ``run.length`` is 0 (unknown).
        """
        training = run.training and self.rate > 0.0  # not drops(), which is False on ranks without positions
        return super().forward(params, x, located(run, x.shape, self.group) if training else run)

    def mask(self, x: Array, run: Run, window: SamplePart | None = None) -> Array:
        """Return a copy of ``x`` with the mask applied.

        ``x`` holds this rank's positions of each sample, or the elements that ``window`` describes. Collective over
        ``group`` if ``run.length`` is 0 (unknown) and ``window`` is None.
        """
        if window is not None:
            return super().mask(x, run, window)
        return self.mask_pieces(x, run, located(run, x.shape, self.group).pieces())


@dataclass(frozen=True)
class ContextPosition(ContextLayer, Position):
    """Apply :class:`Position` to the positions that this rank holds; ``group`` is the context group.

    Rows of the weight's gradient for positions that other ranks hold are set to zero. The forward pass is collective
    over ``group`` if ``run.length`` is 0 (unknown).
    """

    group: Group = field(kw_only=True)


@dataclass(frozen=True)
class ContextEmbedding(ContextLayer, TokenEmbedding):
    """Apply :class:`TokenEmbedding` to the positions that this rank holds; ``group`` is the context group.

    The gradients of both tables are computed from this rank's positions only; their sums over the ranks are the whole
    gradients. The forward pass is collective over ``group`` if ``run.length`` is 0 (unknown). All ranks raise the
    errors of the forward pass, except that only the ranks that hold an id outside the vocabulary raise an error for it.
    """

    group: Group = field(kw_only=True)

    @cached_property
    def _layers(self) -> tuple[Embedding, ContextPosition, ContextDropout]:
        token, position, dropout = super()._layers
        form = cut_layer(position, ContextPosition, self.group)
        return token, form, cut_layer(dropout, ContextDropout, self.group)


@dataclass(frozen=True)
class ContextBlock(ContextLayer, TransformerBlock):
    """Apply :class:`TransformerBlock` to the positions that this rank holds; ``group`` is the context group."""

    group: Group = field(kw_only=True)

    @cached_property
    def _layers(self) -> tuple[LayerNorm, CausalSelfAttention, LayerNorm, FeedForward]:
        norm1, attention, norm2, feed_forward = super()._layers
        return norm1, cut_layer(attention, RingSelfAttention, self.group), norm2, feed_forward

    @cached_property
    def _dropouts(self) -> tuple[Dropout, Dropout]:
        first, second = super()._dropouts
        return cut_layer(first, ContextDropout, self.group), cut_layer(second, ContextDropout, self.group)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` (samples, positions of this rank, dim), of the same shape, and the cache.

        Collective over ``group``.
        """
        return super().forward(params, x, self.located(run, x.shape))


@dataclass(frozen=True)
class Positionwise(ContextLayer, Wrapper):
    """Run a layer that treats each position by itself, and count its operations for this rank's positions only."""

    group: Group

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the wrapped layer's operations for this rank's positions of a sample of ``shape``."""
        return self.layer.operations(self.local_shape(shape))


L = TypeVar("L")


def cut_layer(layer: Layer, form: Callable[..., L], group: Group) -> L:
    """Return the context-parallel form of ``layer``: an object of class ``form`` with the same fields and ``group``."""
    return form(**{item.name: getattr(layer, item.name) for item in fields(cast(Any, layer))}, group=group)


@dataclass(frozen=True)
class PartLoss:
    """Compute an element loss at this rank's positions of every sequence; the sum over the ranks is the whole loss.

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
        fraction = lengths[self.group.rank] / sum(lengths)
        loss_sum, weight, cache = self.loss.forward(prediction, target)
        return loss_sum * fraction, weight * fraction, (cache, fraction)

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum at this rank's positions. Not collective."""
        inner, fraction = cache
        return self.loss.backward(inner, scale * fraction)


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
        Number T of tiles, a multiple of the group's size. In a group of T ranks, T / size neighbouring ranks would get
        the positions that one rank gets here, in the order of those ranks. The default is the group's size.

    Returns
    -------
    tuple
        This rank's part of ``x`` and of ``y``: contiguous arrays (samples, positions of this rank, ...). If there is
        only one tile, ``x`` and ``y`` themselves.

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
    ...     group = mz.comm.ProcessGrid.create(comm, axes=Axes(context=comm.size)).context_group
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
    chunks = [chunk for tile in range(group.rank * hosted, (group.rank + 1) * hosted) for chunk in zigzag.chunks(tile)]

    def cut(a: Array) -> Array:
        return namespace(a).concatenate([a[:, chunk] for chunk in chunks], axis=1)

    return map_leaves(cut, x), map_leaves(cut, y)


@dataclass(frozen=True)
class ContextModel:
    """Hold the context-parallel form of a model, which computes on this rank's part of each sequence.

    Use :func:`context_model` to make one. Parameters have the same names and shapes as in ``model``. The gradients,
    loss sum and weight that a rank computes are those of its part of the sequences. Summed over ``group``, gradients,
    loss sum and weight are those of ``model``. If ``model`` is split over a tensor group
    (:class:`mpizero.nn.SplitModel`), the tensor group splits the positions that one context rank holds as it would
    split whole sequences.
    """

    model: BlockModel
    group: Group
    blocks: Mapping[str, Layer]

    @property
    def loss(self) -> Loss:
        """The model's loss, which takes this rank's part of the predictions and of the targets."""
        return self._on_positions(self.model.loss)

    def loss_on_parts(self, loss: Loss) -> Loss:
        """Adapt a loss of whole sequences to this rank's positions; loss sums and weights add up over the ranks.

        If the model is split over a tensor group, the loss takes this rank's part of the predictions at these
        positions. Not collective. Raises :class:`ConfigError` if the loss does not add up over positions.
        """
        on_positions = self._on_positions(loss)
        return self.model.loss_on_parts(on_positions) if isinstance(self.model, SplitModel) else on_positions

    def _on_positions(self, loss: Loss) -> Loss:
        if isinstance(loss, CrossEntropy | SplitCrossEntropy):
            return loss
        if isinstance(loss, JoinedLoss):
            return replace(loss, loss=self._on_positions(loss.loss))
        if isinstance(loss, ElementLoss):
            return PartLoss(loss, self.group)
        raise ConfigError(
            f"{type(_unsplit(self.model)).__name__}: the loss {type(loss).__name__} does not add up over parts of a "
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

        ``x`` (samples, positions) is this rank's part of the sequences. Without the length in ``run``, each block would
        need messages to find it. Collective over ``group`` (one small message) if ``run.length`` is 0 (unknown).
        """
        return located(run, x.shape, self.group)

    def split(self, group: Group) -> BlockModel:
        """Return the context-parallel form of the model split over the tensor group ``group``. Not collective."""
        return context_model(split_model(self.model, group), self.group)

    @property
    def cuts(self) -> Mapping[str, int]:
        """The axis of each block's output that is cut over a tensor group, as in :class:`mpizero.nn.SplitModel`."""
        return self.model.cuts if isinstance(self.model, SplitModel) else {}

    @property
    def outputs(self) -> int | None:
        """Length of the whole prediction's last axis if it is cut over a tensor group; otherwise None."""
        return self.model.outputs if isinstance(self.model, SplitModel) else None

    def local_shape(self, block: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a block's output, for one sample. Not collective.

        ``shape`` (length, ...) is the shape of the whole output for one sample.
        """
        local = (Zigzag(shape[0], self.group.size).sizes[self.group.rank], *shape[1:])
        return self.model.local_shape(block, local) if isinstance(self.model, SplitModel) else local

    def gather_scores(self, y: Array) -> Array:
        """Gather the predictions at this rank's positions from the ranks of a tensor group.

        ``y`` is the last block's output on this rank. Collective over the tensor group if the model is split.
        """
        return whole_prediction(self.model, y)

    def whole_prediction(self, y: Array) -> Array:
        """Join the ranks' parts of the predictions in the order of the sequence, and return the result on every rank.

        ``y`` (samples, positions, ...) is the last block's output on this rank. Collective over ``group``, and first
        over the tensor group if each of its ranks has a part of the predictions.
        """
        y = self.gather_scores(y)
        lengths = gather_lengths(y.shape, self.group)
        parts = self.group.all_gather(y, 1, lengths, tag="context predictions")
        zigzag, prediction = Zigzag(sum(lengths), self.group.size), namespace(y).empty_like(parts)
        start = 0
        for rank, length in enumerate(lengths):
            for local, chunk in zigzag.pieces(rank):
                prediction[:, chunk] = parts[:, start + local.start : start + local.stop]
            start += length
        return prediction


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
    ...     group = mz.comm.ProcessGrid.create(comm, axes=Axes(context=comm.size)).context_group
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
    unsplit = _unsplit(model)
    name = type(unsplit).__name__
    if not any(map(_attends, unsplit.blocks.values())):
        raise ConfigError(
            f"{name} has no attention along a sequence, so there is nothing for a context group of {group.size} ranks "
            "to cut; set context=1 and use those ranks for data"
        )
    split = ContextModel(model, group, blocks)
    _ = split.loss
    return split


def _unsplit(model: BlockModel) -> BlockModel:
    """Return the model from which a tensor-parallel model was made, or ``model`` itself."""
    return model.whole if isinstance(model, SplitModel) else model


def _attends(layer: Any) -> bool:
    """Tell whether a layer mixes the positions of a sequence.

    A user's layer with a method ``context`` is assumed to do so.
    """
    if isinstance(layer, CausalSelfAttention) or hasattr(layer, "context"):
        return True
    inside = [layer.layer] if isinstance(layer, _WRAPPERS) else layer.children().values()
    return any(map(_attends, inside))


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
_POSITIONWISE = (Embedding, LayerNorm, RMSNorm, Select, SplitEmbedding)


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
    if type(layer) in _POSITIONWISE or isinstance(layer, Activation):
        return layer
    raise ConfigError(
        f"{where}: {type(layer).__name__} does not say how it works on a part of a sequence; context parallelism "
        "takes GPT, layers of mpizero.nn, and layers with a method context(group); set context=1 for other models"
    )
