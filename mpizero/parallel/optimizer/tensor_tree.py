"""Sum squares and products of the elements of each parameter, for norms and dot products that no layout changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate, groupby, islice, pairwise
from typing import NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.comm import ProcessGrid
from mpizero.layout import Span
from mpizero.layout.flat import FlatLayout
from mpizero.layout.sum_tree import Program, TreeNode, cover, evaluate, leaves_program, merge
from mpizero.layout.tensor_parts import PartRows, elements_within, row_runs, take_rows, tile_rows
from mpizero.parallel.parameters.shards import Share, UpdatePiece
from mpizero.types import Array

#: Elements of a tile that is not contiguous which are copied at once, a power of two: so many stay in a CPU's cache.
HOST_BLOCK = 1 << 17
#: The same on a GPU, where each block costs a few launches.
DEVICE_BLOCK = 1 << 24


class TensorTree:
    """Sum the squares of each parameter's elements in float64, in the order of a binary tree over the elements.

    A parameter of which a rank holds several tiles (:class:`~mpizero.types.Part`) has one sum for each of them, over
    the elements of the tile in its own C order: the sum that a rank with this tile alone computes.

    [Note: scalar sums] A rank computes the sums of the largest subtrees that lie inside its ranges. These few numbers
    are gathered from all ranks, and every rank adds them in the same order. So norms have the same bits on every
    layout.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks.
    layout : FlatLayout
        The parameters.
    pieces : sequence of UpdatePiece
        The ranges of parameters that this rank updates. Only the pieces in its own shard are summed by this rank; they
        are kept as ``own``.
    """

    def __init__(self, grid: ProcessGrid, layout: FlatLayout, pieces: Sequence[UpdatePiece]) -> None:
        self.grid, self._layout = grid, layout
        share = Share(layout, grid.data.rank, grid.data.size)
        self.own = [piece for piece in pieces if _inside(piece.span, share.spans[piece.entry.unit])]

    @property
    def counts(self) -> list[int]:
        """Number of sums that each rank of the data group computes."""
        return self._all_sums[0]

    @cached_property
    def _tiles(self) -> dict[str, tuple[PartRows, ...]]:
        """The tiles of each optimized parameter, by its name."""
        return {e.spec.name: tile_rows(e.spec) for e in self._layout.parameters if e.spec.optimized}

    @cached_property
    def _all_sums(self) -> tuple[list[int], dict[str, tuple[Program, ...]]]:
        """The number of sums of each rank, and how to add all ranks' to those of each parameter's tiles.

        Made when first needed: the time that it takes grows with the number of ranks, and many trainings need no norm.
        """
        counts = [0] * self.grid.data.size
        arrivals: dict[tuple[str, int], list[tuple[TreeNode, Program]]] = {
            (name, tile): [] for name, rows in self._tiles.items() for tile in range(len(rows))
        }
        place = 0
        for rank in range(self.grid.data.size):
            for name, tile, nodes in _held(Share(self._layout, rank, self.grid.data.size), self._tiles):
                arrivals[name, tile] += [(node, (place + i,)) for i, node in enumerate(nodes)]
                place += len(nodes)
                counts[rank] += len(nodes)
        programs = {
            name: tuple(_root(arrivals[name, tile], rows.size) for tile, rows in enumerate(held))
            for name, held in self._tiles.items()
        }
        return counts, programs

    @cached_property
    def _own_sums(self) -> tuple[Array, list[tuple[int, int, StridedTile]]]:
        """The plan of this rank's sums: of contiguous ranges of a piece in place, of others from copies."""
        cuts: list[tuple[int, int, int, int]] = []
        strided: list[tuple[int, int, StridedTile]] = []
        place = 0
        for number, piece in enumerate(self.own):
            origin = piece.span.start - piece.entry.offset
            for rows in self._tiles[piece.entry.spec.name]:
                held = elements_within(rows, origin, origin + piece.size)
                nodes = cover(held.start, held.stop, rows.size)
                runs = list(islice(row_runs(rows, held.start, held.stop), 2))
                if len(runs) > 1:
                    strided.append((number, place, StridedTile(rows, origin, nodes)))
                else:
                    leaves = [node.leaves(rows.size) for node in nodes]
                    first = runs[0].whole - runs[0].local - origin if runs else 0
                    cuts += [(number, place + i, first + r.start, first + r.stop) for i, r in enumerate(leaves)]
                place += len(nodes)
        return np.array(cuts, np.int64).reshape(-1, 4).T, strided

    def square_sums(self, values: Array, starts: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return, for every optimized parameter of the layout, by name, the sum of squares of each tile's elements.

        A parameter without tiles has one sum. Collective over the data group. ``values`` holds this rank's elements;
        those of piece ``own[i]`` begin at index ``starts[i]``.
        """
        return self._sums((values,), starts)

    def dots(self, x: Array, y: Array, starts: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return the dot products of each tile's elements in two arrays, like :meth:`square_sums` of one."""
        return self._sums((x, y), starts)

    def _sums(self, arrays: tuple[Array, ...], starts: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return the sums of squares of one array, or the dot products of two. Collective over the data group."""
        (counts, programs), ((piece, place, first, stop), strided) = self._all_sums, self._own_sums
        local = np.empty(counts[self.grid.data.rank], np.float64)
        begin, found = np.array(starts, np.int64)[piece], np.empty(piece.size, np.float64)
        _tree_sums(arrays, first + begin, stop + begin, found)
        local[place] = found
        for number, at, tile in strided:
            held = [array[starts[number] : starts[number] + self.own[number].size] for array in arrays]
            local[at : at + len(tile.nodes)] = tile.sums(held)
        everyone = np.empty(sum(counts), np.float64)
        self.grid.data.allgatherv(local, everyone, counts, "tensor sums")
        return {name: tuple(evaluate(tile, everyone) for tile in held) for name, held in programs.items()}


class _Block(NamedTuple):
    """Describe elements of a tile that are copied at once, and the ranges of the copy that are summed.

    ``start`` is the first element, as an index into the tile. ``starts`` and ``stops`` are the ends of the ranges,
    counted from there; ``size`` is the number of elements.
    """

    start: int
    size: int
    starts: Array
    stops: Array


class StridedTile:
    """Sum squares or products of elements of a tile that are not contiguous in the values that a rank holds.

    They are copied a block at a time into a small array, which stays in the cache until it is summed.

    Parameters
    ----------
    rows : PartRows
        The tile's elements of the rows of the local array, from :func:`~mpizero.layout.tensor_parts.tile_rows`.
    origin : int
        Index in the local array of the first value that is given.
    nodes : sequence of TreeNode
        The subtrees to sum, of the tree over the tile's elements: consecutive ones.
    """

    def __init__(self, rows: PartRows, origin: int, nodes: Sequence[TreeNode]) -> None:
        self.rows, self.origin, self.nodes = rows, origin, nodes
        self._blocks = cache(self._cut)

    def sums(self, arrays: Sequence[Array]) -> list[float]:
        """Return the sum of squares of each subtree's elements in one array, or their dot product in two.

        Not collective. The arrays hold the elements of the local array that the rank holds, on the host or on a GPU.
        """
        step = HOST_BLOCK if isinstance(arrays[0], np.ndarray) else DEVICE_BLOCK
        blocks, ends = self._blocks(step)
        size = max(block.size for block in blocks)
        copies = [kernels.namespace(array).empty(size, array.dtype) for array in arrays]
        sums, place = np.empty(ends[-1], np.float64), 0
        for block in blocks:
            taken = tuple(copied[: block.size] for copied in copies)
            for array, copied in zip(arrays, taken, strict=True):
                take_rows(self.rows, array, block.start, copied, self.origin)
            _tree_sums(taken, block.starts, block.stops, sums[place : place + block.starts.size])
            place += block.starts.size
        return [evaluate(leaves_program(stop - start), sums[start:stop]) for start, stop in pairwise(ends)]

    def _cut(self, step: int) -> tuple[list[_Block], list[int]]:
        """Cut the subtrees into ranges of at most ``step`` elements, a power of two, so that each is a subtree, too.

        Return the blocks, and 0 and for each subtree the number of ranges up to its end.
        """
        leaves = [node.leaves(self.rows.size) for node in self.nodes]
        cuts = [[range(i, min(i + step, r.stop)) for i in range(r.start, r.stop, step)] for r in leaves]
        blocks = []
        for _, ranges in groupby((part for parts in cuts for part in parts), lambda part: part.start // step):
            ends = np.array([(part.start, part.stop) for part in ranges], np.int64)
            first = int(ends[0, 0])
            blocks.append(_Block(first, int(ends[-1, 1]) - first, *np.ascontiguousarray((ends - first).T)))
        return blocks, list(accumulate((len(parts) for parts in cuts), initial=0))


def _tree_sums(arrays: tuple[Array, ...], starts: Array, stops: Array, out: Array) -> None:
    """Write the sums of squares of ranges of one array, or the dot products of two, to ``out``. Not collective."""
    reduction = kernels.backend(arrays[0]).reduction
    (reduction.tree_square_sums if len(arrays) == 1 else reduction.tree_dots)(*arrays, starts, stops, out)


def _inside(span: Span, other: Span) -> bool:
    return other.start <= span.start and span.stop <= other.stop


def _held(share: Share, tiles: Mapping[str, Sequence[PartRows]]) -> Iterator[tuple[str, int, tuple[TreeNode, ...]]]:
    """Yield name, tile and subtrees of each sum that a rank computes, in the order in which it sends them."""
    for span in share.spans:
        for entry, part in share.layout.pieces(span):
            if entry.spec.optimized:
                for tile, rows in enumerate(tiles[entry.spec.name]):
                    held = elements_within(rows, part.start - entry.offset, part.stop - entry.offset)
                    yield entry.spec.name, tile, cover(held.start, held.stop, rows.size)


def _root(held: Sequence[tuple[TreeNode, Program]], total: int) -> Program:
    whole = merge(held, total)
    return whole[0][1] if whole else ()
