"""Compute how the space of fields is divided into tiles, and in which order sums over tiles are added.

A *field* is an array (samples, one to three axes of space, channels). Its space is divided into *spatial tiles*, 8
along each axis in one and two dimensions and 4 in three, whatever the number of ranks. What is summed over space
(gradients of weights, statistics, losses) has one partial sum for each tile; the partial sums are added by the binary
tree of :mod:`.sum_tree`. So the bits of such a sum do not depend on how ranks cut the space (:class:`Cut`), as long as
each rank has whole tiles.

Tile i of an axis of n positions begins at position ceil(i n / T), T being the number of tiles: so tile i of a field on
a grid half as fine covers the same part of space, within a position. Tiles are numbered in Morton order: an index is
made of the bits of the coordinates by turns, the first axis first. Half of an axis is then one subtree of the tree (or
few of them), so a rank that has half of the field has few partial sums.

Everything here is computed from integers, without MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from mpizero.errors import GridError
from mpizero.layout.sum_tree import TreeNode, cover
from mpizero.types import Array

#: Number of tiles along each axis, by the number of axes.
TILES = {1: 8, 2: 8, 3: 4}

#: The positions of a box along each axis of space: of a tile, or of the part of a rank.
Box = tuple[slice, ...]


def bounds(extent: int, tiles: int) -> list[int]:
    """Return the first position of each tile of an axis with ``extent`` positions, and ``extent`` after them."""
    return [-(-i * extent // tiles) for i in range(tiles + 1)]


def morton(coordinates: Sequence[int], tiles: int) -> int:
    """Return the index in Morton order of the tile with the given coordinates; each axis has ``tiles`` tiles.

    ``tiles`` is a power of two.
    """
    number = 0
    for bit in reversed(range(tiles.bit_length() - 1)):
        for at in coordinates:
            number = 2 * number + (at >> bit & 1)
    return number


@lru_cache(maxsize=1024)
def tile_boxes(extents: tuple[int, ...]) -> tuple[Box, ...]:
    """Return the box of each tile of a space with the given extents, in the order of the tiles' indices.

    On an axis with fewer positions than tiles, some tiles are empty; their boxes are included.

    Examples
    --------
    >>> from mpizero.layout.fields import tile_boxes
    >>> [(box.start, box.stop) for (box,) in tile_boxes((12,))]
    [(0, 2), (2, 3), (3, 5), (5, 6), (6, 8), (8, 9), (9, 11), (11, 12)]
    """
    tiles = TILES[len(extents)]
    axes = [[slice(*pair) for pair in pairwise(bounds(extent, tiles))] for extent in extents]
    numbers = {morton(at, tiles): at for at in product(range(tiles), repeat=len(extents))}
    return tuple(tuple(axis[i] for axis, i in zip(axes, numbers[n], strict=True)) for n in range(len(numbers)))


def tree_sum(values: Array, merge: Callable[[Array, Array], Array]) -> Array:
    """Return the sum of the values on the first axis, whose length is a power of two, in the order of the binary tree.

    The tree is that of :mod:`.sum_tree`. ``merge`` takes the values with even and those with odd indices, and returns
    the sum of each pair; it is ``numpy.add``, for example.
    """
    while len(values) > 1:
        values = merge(values[0::2], values[1::2])
    total: Array = values[0]
    return total


class AxisPiece(NamedTuple):
    """Describe successive positions of an axis that one part of the axis has and another one wants.

    Attributes
    ----------
    part : int
        The part that has these positions.
    source : tuple of int
        Index of the piece's first position among the positions of that part, and the step to the next one, 1 or -1.
    target : int
        Index of the piece's first position among all wanted positions.
    length : int
        Number of positions.
    """

    part: int
    source: tuple[int, int]
    target: int
    length: int


def inside(position: int, extent: int, mode: str) -> int | None:
    """Return which position of an axis has the value for ``position``, which may be outside; None if the value is 0.

    ``mode`` says which values surround the axis: with "periodic" the values of the axis, repeated; with "reflect" the
    values of the axis in reverse order; with anything else zeros.
    """
    if 0 <= position < extent:
        return position
    if mode == "periodic":
        return position % extent
    if mode == "reflect":
        return -position if position < 0 else 2 * (extent - 1) - position
    return None


@lru_cache(maxsize=4096)
def axis_pieces(starts: tuple[int, ...], low: int, high: int, mode: str) -> tuple[AxisPiece, ...]:
    """Return which part of an axis has which of the positions ``low:high``; the parts begin at ``starts``.

    Each piece is a range of these positions that one part has. The last number of ``starts`` is the extent of the axis.
    Positions outside of the axis have the values that ``mode`` says (:func:`inside`); positions whose value is zero are
    in no piece.
    """
    found: list[AxisPiece] = []
    part, end = 0, len(starts) - 1
    for target, position in enumerate(range(low, high)):
        if (at := inside(position, starts[-1], mode)) is None:
            continue
        if not starts[part] <= at < starts[part + 1]:
            part = next(i for i in range(end) if starts[i] <= at < starts[i + 1])
        if found and found[-1].part == part and found[-1].target + found[-1].length == target:
            first, step, count = *found[-1].source, found[-1].length
            moved = at - starts[part] - (first + step * (count - 1))
            if moved == step or (count == 1 and abs(moved) == 1):
                found[-1] = AxisPiece(part, (first, moved), found[-1].target, count + 1)
                continue
        found.append(AxisPiece(part, (at - starts[part], 1), target, 1))
    return tuple(found)


@dataclass(frozen=True)
class Cut:
    """Cut the space of fields into boxes, one for each rank of a domain group; a box consists of whole tiles.

    Ranks are numbered row by row: the last axis changes from one rank to the next.

    Parameters
    ----------
    parts : tuple of int
        Number of parts of each axis of space.

    Raises
    ------
    GridError
        If there are not one to three axes, or if an axis has no part, or more parts than tiles.

    Examples
    --------
    >>> from mpizero.layout.fields import Cut
    >>> cut = Cut((2, 2))
    >>> cut.box((37, 53), 1)
    (slice(0, 19, None), slice(27, 53, None))
    >>> cut.nodes(1)  # its tiles are a quarter of all
    (TreeNode(level=4, position=1),)
    """

    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise :class:`GridError` if the number of axes, or the number of parts of an axis, is not allowed."""
        if len(self.parts) not in TILES or any(not 1 <= n <= TILES[len(self.parts)] for n in self.parts):
            allowed = ", ".join(f"{tiles} with {axes}" for axes, tiles in TILES.items())
            raise GridError(
                f"domain={self.parts} is not allowed: expected one to three axes of space, each cut into at most as "
                f"many parts as it has tiles ({allowed} axes)"
            )

    @property
    def size(self) -> int:
        """The number of boxes: of ranks of the domain group."""
        return prod(self.parts)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return, for each axis, the index of the part that a rank has."""
        found = []
        for count in reversed(self.parts):
            rank, at = divmod(rank, count)
            found.append(at)
        return tuple(reversed(found))

    def starts(self, extents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return, for each axis, the first position of each part, and the extent after them."""
        tiles = TILES[len(self.parts)]
        edges = [bounds(tiles, count) for count in self.parts]
        return tuple(tuple(bounds(n, tiles)[i] for i in edge) for n, edge in zip(extents, edges, strict=True))

    def box(self, extents: Sequence[int], rank: int) -> Box:
        """Return the box of positions (a slice for each axis) that a rank has in a space with the given extents."""
        found = zip(self.starts(extents), self.coordinates(rank), strict=True)
        return tuple(slice(starts[i], starts[i + 1]) for starts, i in found)

    def nodes(self, rank: int) -> tuple[TreeNode, ...]:
        """Return the fewest nodes of the tree over all tiles that together are the sum of a rank's tiles, in order."""
        return self._nodes[rank]

    @cached_property
    def _nodes(self) -> tuple[tuple[TreeNode, ...], ...]:
        tiles, axes = TILES[len(self.parts)], len(self.parts)
        found = []
        for rank in range(self.size):
            box = self.box((tiles,) * axes, rank)
            numbers = sorted(morton(at, tiles) for at in product(*(range(part.start, part.stop) for part in box)))
            first, nodes = 0, list[TreeNode]()
            for i in range(1, len(numbers) + 1):
                if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
                    nodes += cover(numbers[first], numbers[i - 1] + 1, tiles**axes)
                    first = i
            found.append(tuple(nodes))
        return tuple(found)
