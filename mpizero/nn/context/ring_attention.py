"""Compute causal attention over sequences that are divided among ranks: keys and values travel around a ring.

This is ring attention (Liu, Zaharia and Abbeel, 2023). The softmax is updated as keys arrive (Milakov and Gimelshein,
2018; Rabe and Staats, 2021), so a rank never holds more than one tile of the scores at a time. The backward pass
computes the scores again (Dao et al., 2022). For that the forward pass keeps two numbers for each query: the maximum of
its scores, and the sum of their exponentials relative to the maximum. It does not keep their log-sum-exp, whose
rounding error grows with the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mpizero import kernels
from mpizero.nn.arrays import multiply, namespace, operand, vector
from mpizero.nn.attention.batched import view_heads, view_kinds
from mpizero.nn.attention.workspace import Workspace
from mpizero.nn.context.ring import KEYS, QUERIES, ContextLayer, Tile, Zigzag, poll_function, ring_pass
from mpizero.nn.layers.attention import CausalSelfAttention
from mpizero.nn.operations import Operations
from mpizero.nn.sample_part import SamplePart
from mpizero.types import Array, Group, Run, ShiftRequest

#: Largest number of scores computed at once, for as many samples as fit: 2 MiB of float32 stay in a core's cache.
SCORES = 1 << 19
#: Pairs of some samples and a tile.
_Parts = Iterator[tuple[slice, Tile]]


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
        xp, tiles = namespace(qkv), _Tiles(self, qkv, run, first_head)
        rows = (*qkv.shape[:2], self.heads)
        maxima, sums = xp.full(rows, -math.inf, qkv.dtype), xp.zeros(rows, qkv.dtype)
        mixed = xp.zeros((*qkv.shape[:2], self.dim), qkv.dtype)
        q, out = view_kinds(qkv, self.heads)[0], view_heads(mixed, self.heads)
        for source, pair, coming in ring_pass(self.group, self._packed(qkv, tiles.zigzag), "ring keys"):
            k, v = self._pair(pair)
            for some, tile in tiles.of(source, poll_function(coming)):
                weights = tiles.product("scores", q[some, :, tile.queries], k[some, :, tile.keys].swapaxes(-1, -2))
                factors = tiles.running_softmax(weights, some, tile, maxima, sums)
                kept = tiles.dropped(weights, some, tile)
                total = out[some, :, tile.queries]
                total *= factors[..., None]
                total += tiles.product("values", kept, v[some, :, tile.keys])
        shares = xp.divide(1, sums, out=sums)
        whole = mixed.reshape(*rows, self.dim // self.heads)
        whole *= shares[..., None]
        return mixed, _Saved(qkv, mixed, maxima, shares, run, first_head)

    def attend_backward(self, seen: Any, dmixed: Array) -> Array:
        """Return the gradient of ``qkv``.

        ``seen`` is the cache that :meth:`attend` returned, and ``dmixed`` is the gradient of its first result. The
        gradient of keys and values travels around the ring one message after the keys and values themselves. Collective
        over ``group``.
        """
        qkv = seen.qkv
        xp, adjoint = namespace(qkv), _RingBackward(self, seen, dmixed)
        dqkv: Array = xp.zeros_like(qkv)
        dq, dk, dv = view_kinds(dqkv, self.heads)
        request: ShiftRequest | None = None
        for source, pair, coming in ring_pass(self.group, self._packed(qkv, adjoint.tiles.zigzag), "ring keys"):
            tiles = adjoint.tiles.of(source, poll_function(coming, request))
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
        """View (samples, longest, 2 dim) as keys and as values, each (samples, heads, longest, dim / heads)."""
        samples, length, _ = pair.shape
        k, v = pair.reshape(samples, length, 2, self.heads, self.dim // self.heads).transpose(2, 0, 3, 1, 4)
        return k, v


class _Saved(NamedTuple):
    """Hold the cache that the forward pass keeps for the backward pass.

    Attributes
    ----------
    qkv, mixed : Array
        The input with the bias added, and the output.
    maxima, shares : Array
        For each query and head the greatest score, and the inverse of the sum of the exponentials.
    run : Run
        The argument ``run`` of the forward pass.
    first_head : int
        Number of the first head in the whole layer.
    """

    qkv: Array
    mixed: Array
    maxima: Array
    shares: Array
    run: Run
    first_head: int


class _Tiles:
    """Compute one tile of scores after the other, forward and backward, in memory that is reused."""

    def __init__(self, layer: RingSelfAttention, qkv: Array, run: Run, first_head: int) -> None:
        self.zigzag = Zigzag(run.length, layer.group.size)
        self.kernels = kernels.backend(qkv).ring
        self.scale = vector(qkv, layer.scale)
        self._run, self._dropout, self._first_head = run, layer.probability_dropout, first_head
        self._heads, self._rank, self._samples = layer.heads, layer.group.rank, qkv.shape[0]
        self._work = Workspace(qkv)

    def of(self, source: int, poll: Callable[[], None]) -> _Parts:
        """Yield (samples, tile) for all tiles with the keys of rank ``source``; call ``poll`` after each.

        If the scores of all samples are too many at once, the samples are cut into ranges, and each range gets all
        tiles.
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
    """Compute the gradients that come from this rank's queries, tile by tile."""

    def __init__(self, layer: RingSelfAttention, seen: _Saved, dmixed: Array) -> None:
        self.tiles = _Tiles(layer, seen.qkv, seen.run, seen.first_head)
        self._seen, self._q, self._dout = seen, view_kinds(seen.qkv, layer.heads)[0], view_heads(dmixed, layer.heads)
        heads = (*dmixed.shape[:2], layer.heads, layer.dim // layer.heads)
        self._dots = namespace(dmixed).einsum("...f,...f->...", dmixed.reshape(heads), seen.mixed.reshape(heads))

    def add(self, over: _Parts, pair: tuple[Array, Array], dq: Array, dpair: tuple[Array, Array]) -> None:
        """Add to ``dq`` and ``dpair`` the gradients from the scores of this rank's queries with one rank's keys.

        ``over`` yields the tiles of these scores. ``pair`` are that rank's keys and values, ``dpair`` their gradients.
        """
        (k, v), (dk, dv), tiles = pair, dpair, self.tiles
        for some, tile in over:
            queries, keys = (some, slice(None), tile.queries), (some, slice(None), tile.keys)
            place = (tiles.scale, tile.offset, tile.queries.start)
            probs = tiles.product("scores", self._q[queries], k[keys].swapaxes(-1, -2))
            tiles.kernels.known_softmax(probs, *place, self._seen.maxima[some], self._seen.shares[some])
            dprobs = tiles.product("gradients", self._dout[queries], v[keys].swapaxes(-1, -2))
            kept, dprobs = tiles.dropped(probs, some, tile), tiles.dropped(dprobs, some, tile)
            dv[keys] += tiles.product("keys", kept.swapaxes(-1, -2), self._dout[queries])
            tiles.kernels.known_softmax_backward(probs, dprobs, *place, self._dots[some])
            dq[queries] += tiles.product("queries", dprobs, k[keys])
            dk[keys] += tiles.product("keys", dprobs.swapaxes(-1, -2), self._q[queries])
