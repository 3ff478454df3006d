"""Let the ranks of a node claim grains of a batch, whose samples they share, one part after the other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import prod

import numpy as np

from mpizero.comm import ProcessGrid
from mpizero.comm.model_group import BlockLocks
from mpizero.layout import Grains
from mpizero.layout.batch import contiguous_shares, node_blocks
from mpizero.layout.sum_tree import claim_parts, rows_of_part
from mpizero.parallel.parameters.allocator import Memory, on_all_ranks
from mpizero.types import Array

#: Kind of the node's memory for samples and claims, in counts of bytes.
KIND = "samples"
_ALIGNMENT = 64


def starts_of(parts: int, sizes: Sequence[int]) -> list[int]:
    """Return where arrays of ``sizes`` bytes start in a node's memory, after a table of ``parts`` claims; and its end.

    The table has a whole number of int64: the number of parts that have been claimed, then the claimant of each.
    """
    return list(accumulate((_aligned(size) for size in sizes), initial=_aligned(8 * (1 + parts))))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class NodeClaims:
    """Share the samples of a node's grains in its memory, and count which parts of them its ranks have claimed.

    Every node has a fixed run of grains, which :func:`claim_parts` cuts into parts. A rank claims the next part when it
    has computed the part before. [Note: claims] The number of the next part and the rank that has claimed each are in
    the node's shared memory, where one rank at a time writes, under a lock of the operating system: a rank inside of a
    long computation need not receive any message. So who computes a grain depends on time. The result does not, because
    a part is a node of the tree in which gradients are summed.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks; the constructor is collective over all of them.
    memory : Memory
        Allocates the memory of the node.
    """

    def __init__(self, grid: ProcessGrid, memory: Memory) -> None:
        self.grid, self._memory = grid, memory
        with on_all_ranks(grid.world, "claims"):
            self._locks = BlockLocks(grid.node)
        self._reserved: set[Hashable] = set()
        self._storage = np.zeros(0, np.uint8)
        self._table = self._storage.view(np.int64)
        self._parts: tuple[range, ...] = ()

    def begin(self, leaves: Sequence[Array], grains: Grains) -> tuple[Array, ...]:
        """Share the samples of the node's grains, and begin a step in which its ranks claim them.

        Collective over the node; over all ranks if there was no such batch before. The ranks must have ended the step
        before, for which a collective of all ranks has to come between.

        Parameters
        ----------
        leaves : sequence of Array
            Arrays of samples: the part of each that belongs to the grains that are this rank's by a fixed assignment.
        grains : Grains
            The grains of the global batch.

        Returns
        -------
        tuple of Array
            Each array with all samples of the node, in memory that its ranks share.
        """
        block, own = self.block(grains.count), contiguous_shares(self.grid, grains.count)[self.grid.place]
        before, first, stop = (min(at * grains.size, grains.samples) for at in (block.start, own.start, block.stop))
        self._parts = claim_parts(block, self.grid.node.size)
        shapes = [(stop - before, *leaf.shape[1:]) for leaf in leaves]
        sizes = [prod(shape) * leaf.itemsize for shape, leaf in zip(shapes, leaves, strict=True)]
        starts = starts_of(len(self._parts), sizes)
        self._reserve(starts[-1], (grains, *((leaf.dtype, leaf.shape[1:]) for leaf in leaves)))
        self._table = self._storage[: starts[0]].view(np.int64)
        if self.grid.node.rank == 0:
            self._table[0] = 0
        shared = []
        for leaf, shape, start, size in zip(leaves, shapes, starts[:-1], sizes, strict=True):
            whole = self._storage[start : start + size].view(leaf.dtype).reshape(shape)
            whole[first - before :][: len(leaf)] = leaf
            shared.append(whole)
        self._memory.barrier(KIND)
        return tuple(shared)

    def block(self, count: int) -> range:
        """Return the grains of this node, of ``count`` grains. Not collective."""
        return node_blocks(self.grid, count)[self.grid.nodes.index(self.grid.node_ranks)]

    def most(self, count: int) -> int:
        """Return the largest number of grains of a node, of ``count`` grains. Not collective."""
        return max(map(len, node_blocks(self.grid, count)))

    def _reserve(self, nbytes: int, batch: Hashable) -> None:
        """Allocate the node's memory for a batch. Collective over all ranks if there was no such batch before."""
        if batch in self._reserved:  # other nodes may have room for it where this one has to make some
            return
        reserved, self._reserved = self._reserved, set()  # where this fails, the memory is gone
        with on_all_ranks(self.grid.world, KIND):
            if self._storage.size < nbytes:
                held, self._storage, self._table = self._storage, self._storage[:0], self._table[:0]
                if held.size:
                    self._memory.free_shared(KIND, (held,))
                (self._storage,) = self._memory.shared(KIND, [(nbytes,)], np.uint8)
        self._reserved = reserved | {batch}

    def claim(self, rows: int) -> range | None:
        """Claim the next part; return its grains, or None if there is none, or if it needs more than ``rows`` rows.

        Not collective.
        """
        with self._locks.hold(0):
            number = int(self._table[0])
            if number == len(self._parts) or rows_of_part(self._parts[number]) > rows:
                return None
            self._table[0] = number + 1
            self._table[1 + number] = self.grid.node.rank
        return self._parts[number]

    def assigned(self, count: int) -> list[list[int]]:
        """Return the grains that each data rank has computed, listed node after node, after a barrier of the node.

        Not collective. For other nodes the lists are those of a fixed assignment: partial sums that a node sends are
        the same, whichever of its ranks has computed what.
        """
        found = [list(share) for share in contiguous_shares(self.grid, count)]
        first = self.grid.place - self.grid.node.rank
        owners = self._table[1 : 1 + len(self._parts)].tolist()
        for rank in range(self.grid.node.size):
            parts = (part for part, owner in zip(self._parts, owners, strict=True) if owner == rank)
            found[first + rank] = [grain for part in parts for grain in part]
        return found

    def close(self) -> None:
        """Close the file of the lock. Not collective; :class:`Memory` frees the window."""
        self._locks.close()
