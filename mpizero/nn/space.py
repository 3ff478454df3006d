"""Cut the space of fields over the ranks of a domain group: halos, redistribution, and sums over all of space.

Layers of fields ask a :class:`Space` for neighbouring positions and for sums over space. In a plain :class:`Space` one
rank has everything. In a :class:`Domain` each rank of a group has a box (:class:`mpizero.layout.fields.Cut`). A layer
that computes on a part asks :meth:`Space.fetch` for all positions that it needs, wherever they are; that is its halo
exchange. It does so with the gradient of its output as well, in place of the adjoint of the exchange: so each element
of the gradient of the input is one sum, on the rank that has it, with the bits of one process.

What is summed over space has one partial sum for each spatial tile, added by the binary tree. A rank adds up the nodes
of the tree whose tiles it has; :meth:`Space.add_up` adds the nodes of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np

from mpizero.errors import DataError
from mpizero.layout.fields import Box, Cut, axis_pieces, tile_boxes, tree_sum
from mpizero.layout.flat import Partition
from mpizero.layout.sum_tree import TreeNode, merge
from mpizero.nn.layer import Layer
from mpizero.types import Array, Group

#: For each axis, the positions that each of its parts wants: the first, and the one after the last; -1 is before the
#: first position of the axis.
Wanted = tuple[tuple[tuple[int, int], ...], ...]


class DomainGroup(Group, Protocol):
    """Describe what this module needs of a group besides the collectives of all groups."""

    def all_to_all(self, parts: Sequence[Array], counts: Array, tag: str = "") -> list[Array]:
        """Send the flat array ``parts[r]`` to rank r; return a list of what each rank has sent to this one.

        ``counts[s, r]`` is the number of elements that rank s sends to rank r. The result is valid until the next call.
        """


class Space:
    """Describe which positions of fields this rank has: in this class all, in the subclass :class:`Domain` a box."""

    rank = 0

    def cut_of(self, axes: int) -> Cut:
        """Return how a space of ``axes`` axes is cut over ranks."""
        return Cut((1,) * axes)

    def extents(self, x: Array, owner: object, settings: str = "") -> tuple[int, ...]:
        """Return the extents of the whole field of which ``x``, the input of layer ``owner``, is a part. Collective."""
        return x.shape[1:-1]

    def box(self, extents: Sequence[int]) -> Box:
        """Return this rank's positions of a field with the given extents."""
        return self.cut_of(len(extents)).box(extents, self.rank)

    def wanted(self, extents: Sequence[int], window: Callable[[int, int, int], tuple[int, int]]) -> Wanted:
        """Return which positions the ranks need to compute their parts of a field with these extents.

        The result has a range of positions for each axis and each of the parts into which the axis is cut.
        ``window(axis, first, stop)`` returns the range of positions on which positions ``first`` to ``stop`` of an axis
        depend.
        """
        starts = self.cut_of(len(extents)).starts(extents)
        return tuple(
            tuple(window(axis, *pair) for pair in zip(edges[:-1], edges[1:], strict=True))
            for axis, edges in enumerate(starts)
        )

    def fetch(
        self,
        x: Array,
        extents: Sequence[int],
        wanted: Wanted,
        tag: str,
        modes: Sequence[str] = (),
        target: Cut | None = None,
    ) -> Array:
        """Return the part of a field at the positions that this rank wants. Collective.

        If every rank wants just the positions that it has, the result is ``x`` itself, or a contiguous copy.

        Parameters
        ----------
        x : Array
            This rank's part (samples, space, channels) of the field.
        extents : sequence of int
            Extents of the whole field.
        wanted : Wanted
            Which positions each part of the cut ``target`` wants.
        tag : str
            Name of the exchange, for traces and errors.
        modes : sequence of str
            By axis, what is outside of the field: "periodic", "reflect", or anything else for zeros; () for zeros.
        target : Cut or None
            How the result is cut; None: as ``x`` is.
        """
        move = self._plan(extents, wanted, modes, target)
        if move.nothing:
            return np.ascontiguousarray(x)
        out = (np.empty if move.complete else np.zeros)((len(x), *move.shape, x.shape[-1]), x.dtype)
        for source, place in move.own:
            out[place] = x[source]
        self._exchange(x, move, out, tag)
        return out

    def fetch_adjoint(
        self,
        dy: Array,
        extents: Sequence[int],
        wanted: Wanted,
        tag: str,
        modes: Sequence[str] = (),
        target: Cut | None = None,
    ) -> Array:
        """Return the adjoint of :meth:`fetch`: each position gets the sum of all its copies. Collective.

        The copies of a position are added in the order of the ranks that hold them.
        """
        move = self._plan(extents, wanted, modes, target)
        if move.nothing:
            return np.ascontiguousarray(dy)
        out = np.zeros((len(dy), *self.shape(extents), dy.shape[-1]), dy.dtype)
        self._add_copies(dy, move, out, tag)
        return out

    def _plan(self, extents: Sequence[int], wanted: Wanted, modes: Sequence[str], target: Cut | None) -> HaloPlan:
        cut = self.cut_of(len(extents))
        return _transfer(
            cut, target or cut, tuple(extents), wanted, tuple(modes) or ("zeros",) * len(wanted), self.rank
        )

    def _exchange(self, x: Array, move: HaloPlan, out: Array, tag: str) -> None:
        """Write the values at positions that other ranks have to ``out``; ``move`` says what is sent, and to where."""

    def _add_copies(self, dy: Array, move: HaloPlan, out: Array, tag: str) -> None:
        """Add to ``out`` what all ranks hold in ``dy`` at copies of this rank's positions."""
        for source, target in move.own:
            out[source] += dy[target]

    def first(self, wanted: Wanted) -> list[int]:
        """Return, for each axis, the first of the positions that this rank needs; ``wanted`` is from :meth:`wanted`."""
        places = self.cut_of(len(wanted)).coordinates(self.rank)
        return [axis[i][0] for axis, i in zip(wanted, places, strict=True)]

    def resize(self, x: Array, extents: Sequence[int], target: Sequence[int], tag: str) -> Array:
        """Return this rank's part of a field with the extents ``target``, from its part ``x`` of one with ``extents``.

        Collective. At the end of an axis positions are left out, or zeros are put there. The adjoint of a call is the
        call with ``extents`` and ``target`` exchanged.
        """
        wanted = self.wanted(target, lambda axis, first, stop: (first, stop))
        return self.fetch(x, extents, wanted, tag)

    def shape(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Return the extents of this rank's part of a field with the given extents."""
        return tuple(part.stop - part.start for part in self.box(extents))

    def boxes(self, extents: Sequence[int]) -> tuple[Array, ...]:
        """Return, for each node of the tree that this rank adds up, the boxes of the spatial tiles below the node.

        The tree is the one over all spatial tiles. The boxes of a node are an array (tiles, 3, 2): the range [start,
        stop) of each tile on each of three axes, counted from the first position of this rank's part. Axes that the
        field does not have come first, with one position.
        """
        return _own_boxes(self.cut_of(len(extents)), tuple(extents), self.rank)

    def tiles(self, extents: Sequence[int]) -> list[Box]:
        """Return the box of each of this rank's spatial tiles, counted from the first position of this rank's part."""
        boxes = np.concatenate(self.boxes(extents))[:, 3 - len(extents) :]
        return [tuple(slice(*pair) for pair in box) for box in boxes.tolist()]

    def sum_of_tiles(self, values: Array, tag: str) -> Array:
        """Return the sum over all spatial tiles; ``values`` are those of this rank's tiles. Collective."""
        return tree_sum(self.gather_tiles(values, 0, tag), np.add)

    def add_up(self, nodes: Array, tag: str) -> Array:
        """Return this rank's share of a sum over space; the shares of all ranks add up to the sum. Collective.

        ``nodes`` are the partial sums, on the first axis, of the nodes that this rank adds up (:meth:`boxes`).
        """
        total: Array = nodes[0]
        return total

    def reduce_scatter(self, nodes: Array, axis: int, shards: Sequence[slice], tag: str) -> Array:
        """Return this rank's shard of a sum over space, cut into ``shards`` along ``axis`` of the sum. Collective.

        ``nodes`` are the partial sums as in :meth:`add_up`.
        """
        total: Array = nodes[0]
        return total

    def all_gather(self, values: Array, axis: int, shards: Sequence[slice], tag: str) -> Array:
        """Return the shards of all ranks side by side along ``axis``; ``values`` is this rank's shard. Collective."""
        return values

    def gather_tiles(self, values: Array, axis: int, tag: str) -> Array:
        """Return the values of all spatial tiles along ``axis``, in the order of the tiles. Collective.

        ``values`` are those of this rank's tiles.
        """
        return values

    def shards(self, length: int) -> list[slice]:
        """Return the shards of a range of ``length`` elements, one for each rank that has a part of space."""
        return [slice(0, length)]


#: The whole space.
WHOLE = Space()


class FieldLayer(Layer):
    """Define a layer of fields; a subclass for the parts of fields on a domain's ranks overrides :attr:`_space`."""

    @property
    def _space(self) -> Space:
        """The :class:`Space` that says which part of fields the layer is given: here whole fields."""
        return WHOLE


#: Largest number of calls of layers for which a domain remembers the extents of the input.
_MOST_KNOWN = 1 << 14


class Domain(Space):
    """Hold a rank's box of space; ``cut`` says which boxes the ranks of ``group`` have."""

    def __init__(self, cut: Cut, group: DomainGroup) -> None:
        self.cut, self.group, self.rank = cut, group, group.rank
        #: Extents of the model's input that all ranks have agreed on; () if unknown.
        self._input: tuple[int, ...] = ()
        self._calls: Counter[int] = Counter()  # number of calls in this pass, by the layer's id
        #: By the layer's id, the number of its call in a pass, and the extents of the model's input: the layer itself,
        #: so that no other object gets its id, and the extents of its input.
        self._known: dict[tuple[int, int, tuple[int, ...]], tuple[object, tuple[int, ...]]] = {}

    def begin_batch(self, extents: Sequence[int]) -> None:
        """Note the extents of all fields that the model is given from now on; all ranks give the same.

        Layers then ask the other ranks for the extents of their inputs only once. Not collective.
        """
        self._input = tuple(extents)
        self._calls.clear()

    def begin_pass(self) -> None:
        """Begin a forward pass: :meth:`extents` counts the calls of each layer anew. Not collective."""
        self._calls.clear()

    def cut_of(self, axes: int) -> Cut:
        """Return the cut that says which box of space each rank of the group has."""
        return self.cut

    def extents(self, x: Array, owner: object, settings: str = "") -> tuple[int, ...]:
        """Return the extents of the whole field of which ``x``, the input of layer ``owner``, is this rank's part.

        ``owner`` may be a function's name in place of a layer; then the ranks always ask each other, also whether all
        have called the function with the same ``settings``, dtype, and numbers of samples and channels.
        Collective, unless the extents are known: from the same call of the layer (its first in a pass, its second, ...)
        in an earlier pass, for an input of the model with the same extents. All ranks call their layers in the same
        order, so either all of them know the extents, or none.

        Raises
        ------
        DataError
            On all ranks, if the parts of the ranks are not the boxes of any field, or the calls differ.
        """
        if isinstance(owner, str):
            return self._gathered_extents(x, owner, settings)
        key = id(owner), self._calls[id(owner)], self._input
        self._calls[id(owner)] += 1
        _, known = self._known.get(key, (owner, ()))
        if known and self.shape(known) == x.shape[1:-1]:
            return known
        found = self._gathered_extents(x, type(owner).__name__.removeprefix("Domain"))
        if self._input:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = owner, found
        return found

    def _gathered_extents(self, x: Array, where: str, settings: str = "") -> tuple[int, ...]:
        """Return the extents of the whole field from those of all ranks' parts. Collective."""
        axes = len(self.cut.parts)
        space = x.shape[1:-1] if x.ndim == axes + 2 else (-x.ndim,) * axes
        call = f"{settings}: {len(x)} samples of {x.shape[-1]} channels, {x.dtype}"
        row = np.array([(*space, *([crc32(call.encode())] if settings else []))], np.int64)
        rows = self.group.all_gather(row, 0, (1,) * self.group.size, tag="extents")
        table, calls = rows[:, :axes], rows[:, axes:]
        cut = " x ".join(map(str, self.cut.parts))
        if wrong := np.flatnonzero(table[:, 0] < 0).tolist():
            raise DataError(
                f"{where}: rank {wrong[0]} of the domain {cut} has an array of {-table[wrong[0], 0]} axes; fields that "
                f"it cuts have {axes + 2}: samples, {axes} of space, channels; a domain has a number for each axis of "
                "space, 1 for one that is not cut"
            )
        if different := np.flatnonzero((calls != calls[0]).any(1)).tolist():
            raise DataError(
                f"{where}: rank {different[0]} of the domain {cut} calls it in another way than rank 0; rank "
                f"{self.rank} with {call}; give the same on all ranks"
            )
        places = [self.cut.coordinates(rank) for rank in range(self.group.size)]
        found = []
        for axis in range(axes):
            along = [rank for rank, at in enumerate(places) if not any(at[:axis] + at[axis + 1 :])]
            found.append(int(table[along, axis].sum()))
        for rank, given in enumerate(table.tolist()):
            box = self.cut.box(found, rank)
            if given != [part.stop - part.start for part in box]:
                raise DataError(
                    f"{where}: rank {rank} of the domain {cut} has a part of extents "
                    f"{tuple(given)}; of a field of extents {tuple(found)} its part is {_written(box)}: give each rank "
                    "the part that mesh.slab(shape) says"
                )
        return tuple(found)

    def _exchange(self, x: Array, move: HaloPlan, out: Array, tag: str) -> None:
        width = len(x) * x.shape[-1]
        parts = [_joined(x, pieces) for pieces in move.sent]
        blocks = self.group.all_to_all(parts, move.counts * width, tag)
        for flat, pieces in zip(blocks, move.received, strict=True):
            first = 0
            for target, count in pieces:
                view = out[target]
                view[...] = flat[first : first + count * width].reshape(view.shape)
                first += count * width

    def _add_copies(self, dy: Array, move: HaloPlan, out: Array, tag: str) -> None:
        parts = [_joined(dy, [target for target, _ in pieces]) for pieces in move.received]
        counts = move.counts.T * (len(dy) * dy.shape[-1])
        for rank, flat in enumerate(self.group.all_to_all(parts, counts, tag)):
            if rank == self.rank:
                super()._add_copies(dy, move, out, tag)
            first = 0
            for piece in move.sent[rank]:
                view = out[piece]
                view += flat[first : first + view.size].reshape(view.shape)
                first += view.size

    def add_up(self, nodes: Array, tag: str) -> Array:
        """Return this rank's share of a sum over space: one slice of the sum, and zeros elsewhere. Collective.

        The slices of all ranks make up the sum. ``nodes`` are the partial sums as in :meth:`Space.add_up`.
        """
        flat = nodes.reshape(len(nodes), -1)
        shards = self.shards(flat.shape[1])
        share: Array = np.zeros(flat.shape[1], flat.dtype)
        share[shards[self.rank]] = self.reduce_scatter(flat, 0, shards, tag)
        return share.reshape(nodes.shape[1:])

    def reduce_scatter(self, nodes: Array, axis: int, shards: Sequence[slice], tag: str) -> Array:
        """Return this rank's shard of a sum over space, added up by the binary tree. Collective."""
        nodes_of = [self.cut.nodes(rank) for rank in range(self.group.size)]
        parts = [nodes[(slice(None), *(slice(None),) * axis, shard)] for shard in shards]
        counts = np.outer([*map(len, nodes_of)], [part[0].size for part in parts])
        blocks = self.group.all_to_all([part.reshape(-1) for part in parts], counts, tag)
        shape = parts[self.rank].shape[1:]
        rows = (block.reshape(len(own), *shape) for block, own in zip(blocks, nodes_of, strict=True))
        leaves = zip((node for own in nodes_of for node in own), (row for block in rows for row in block), strict=True)
        return _tree_of_nodes(list(leaves))

    def all_gather(self, values: Array, axis: int, shards: Sequence[slice], tag: str) -> Array:
        """Return the shards of all ranks side by side along ``axis``; ``values`` is this rank's shard. Collective."""
        sizes = [shard.stop - shard.start for shard in shards]
        return self.group.all_gather(np.ascontiguousarray(values), axis, sizes, tag)

    def shards(self, length: int) -> list[slice]:
        """Return the shards of a range of ``length`` elements, one for each rank of the group."""
        return list(Partition(length, self.group.size))

    def gather_tiles(self, values: Array, axis: int, tag: str) -> Array:
        """Return the values of all spatial tiles along ``axis``, from those of this rank's tiles. Collective."""
        order = [number for rank in range(self.group.size) for number in _tiles_of(self.cut, rank)]
        sizes = [len(_tiles_of(self.cut, rank)) for rank in range(self.group.size)]
        found = self.group.all_gather(np.ascontiguousarray(values), axis, sizes, tag)
        return np.take(found, np.argsort(order), axis)


def _joined(x: Array, pieces: Sequence[Any]) -> Array:
    """Return the elements of ``x`` at each of ``pieces`` (indices of boxes), one after the other, as a flat array."""
    return np.concatenate([x[:0].reshape(-1), *(x[piece].reshape(-1) for piece in pieces)])


def _tree_of_nodes(leaves: list[tuple[TreeNode, Array]]) -> Array:
    """Return the sum over all spatial tiles: the value of the root of their binary tree.

    ``leaves`` are nodes of this tree with their values; each tile is below exactly one of these nodes.
    """
    total = sum(1 << node.level for node, _ in leaves)
    ((_, program),) = merge(((node, (row,)) for row, (node, _) in enumerate(leaves)), total)
    stack: list[Array] = []
    for v in program:
        if v >= 0:
            stack.append(leaves[v][1])
        elif v == -1:
            right = stack.pop()
            stack[-1] = stack[-1] + right
        else:
            stack[-1] = stack[-1] + leaves[-2 - v][1]
    return stack[0]


@lru_cache(maxsize=1024)
def _tiles_of(cut: Cut, rank: int) -> list[int]:
    """Return the indices of a rank's spatial tiles, in order."""
    total = sum(1 << node.level for other in range(cut.size) for node in cut.nodes(other))
    return [number for node in cut.nodes(rank) for number in node.leaves(total)]


@lru_cache(maxsize=1024)
def _own_boxes(cut: Cut, extents: tuple[int, ...], rank: int) -> tuple[Array, ...]:
    tiles, origin = tile_boxes(extents), cut.box(extents, rank)
    missing = [(0, 1)] * (3 - len(extents))

    def own(box: Box) -> list[tuple[int, int]]:
        pairs = ((part.start - at.start, part.stop - at.start) for part, at in zip(box, origin, strict=True))
        return [*missing, *pairs]

    found = [np.array([own(tiles[n]) for n in node.leaves(len(tiles))], np.int64) for node in cut.nodes(rank)]
    for boxes in found:
        boxes.setflags(write=False)
    return tuple(found)


class HaloPlan(NamedTuple):
    """Plan which positions of a field a rank copies, sends and receives.

    Attributes
    ----------
    shape : tuple of int
        Extents of what the rank wants.
    own : list of (index, index)
        The wanted positions that the rank itself has: where they are, and where they go.
    sent : list of list of index
        For each other rank, the positions that this rank sends to it.
    received : list of list of (index, int)
        For each other rank, where the positions that it sends to this rank go, and how many they are.
    counts : Array
        How many positions each rank sends to each rank.
    complete : bool
        Whether all wanted positions are in the field, so that none becomes zero.
    nothing : bool
        Whether every rank wants just the positions that it has, so that nothing moves.
    """

    shape: tuple[int, ...]
    own: list[tuple[Any, Any]]
    sent: list[list[Any]]
    received: list[list[tuple[Any, int]]]
    counts: Array
    complete: bool
    nothing: bool


@lru_cache(maxsize=1024)
def _transfer(
    cut: Cut, target: Cut, extents: tuple[int, ...], wanted: Wanted, modes: tuple[str, ...], rank: int
) -> HaloPlan:
    """Plan an exchange of a field cut by ``cut``; see :meth:`Space.fetch`."""
    starts = cut.starts(extents)
    found = [
        [axis_pieces(edges, low, high, mode) for low, high in axis]
        for edges, axis, mode in zip(starts, wanted, modes, strict=True)
    ]
    nothing = cut == target and all(
        axis == tuple(zip(edges[:-1], edges[1:], strict=True)) for edges, axis in zip(starts, wanted, strict=True)
    )
    numbers = {cut.coordinates(other): other for other in range(cut.size)}

    def pieces(of: int) -> list[tuple[int, Any, Any, int]]:
        """Return the pieces that rank ``of`` needs; a piece is a box of positions that one rank has.

        Each piece is a tuple: the rank that has it, its index in that rank's part of the field, its index in what rank
        ``of`` needs, and its number of positions.
        """
        by_axis = [axis[i] for axis, i in zip(found, target.coordinates(of), strict=True)]
        return [
            (
                numbers[tuple(segment.part for segment in chosen)],
                (slice(None), *(_slice(*segment.source, segment.length) for segment in chosen)),
                (slice(None), *(slice(segment.target, segment.target + segment.length) for segment in chosen)),
                prod(segment.length for segment in chosen),
            )
            for chosen in product(*by_axis)
        ]

    every = [pieces(of) for of in range(cut.size)]
    mine, counts = every[rank], np.zeros((cut.size, cut.size), np.int64)
    for of, wants in enumerate(every):
        for holder, _, _, count in wants:
            counts[holder, of] += count * (holder != of)
    shape = tuple(
        high - low for low, high in (axis[i] for axis, i in zip(wanted, target.coordinates(rank), strict=True))
    )
    return HaloPlan(
        shape=shape,
        own=[(source, target) for holder, source, target, _ in mine if holder == rank],
        sent=[
            [source for holder, source, _, _ in wants if holder == rank and of != rank]
            for of, wants in enumerate(every)
        ],
        received=[
            [(target, count) for holder, _, target, count in mine if holder == other and other != rank]
            for other in range(cut.size)
        ],
        counts=counts,
        complete=sum(count for *_, count in mine) == prod(shape),
        nothing=nothing,
    )


def _slice(first: int, step: int, count: int) -> slice:
    """Return the slice of ``count`` positions from ``first`` on, upwards or downwards."""
    stop = first + step * count
    return slice(first, stop if stop >= 0 else None, step)


def _written(box: Box) -> str:
    return " x ".join(f"{part.start}:{part.stop}" for part in box)
