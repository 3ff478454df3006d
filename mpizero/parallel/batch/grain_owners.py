"""Assign the grains of a global batch to ranks: a contiguous run of grains to each, or one grain to each in waves.

Where the ranks of a node claim grains, the runs of these ranks together are the node's grains.
"""

from __future__ import annotations

from mpizero.layout import Grains
from mpizero.layout.claims import claim_parts, claim_rows
from mpizero.layout.nodes import NodeOrder


def contiguous_owners(grid: NodeOrder, count: int) -> list[int]:
    """Return, for each of ``count`` grains, the rank of ``grid.batch`` that computes it.

    Every rank is assigned a contiguous run of grains; the runs follow one another in the order of the ranks, node after
    node. The ranks of a context group compute a grain together: each computes its positions of the sequences.
    """
    owner = [0] * count
    for position, rank in enumerate(_batch_order(grid)):
        for grain in Grains(count, 1).assigned(position, grid.batch.size):
            owner[grain] = rank
    return owner


def contiguous_shares(grid: NodeOrder, count: int) -> list[range]:
    """Return the numbers of the grains of every data rank; the ranks are listed node after node.

    The grains are assigned as by :func:`contiguous_owners`. With context groups, the part of a grain that one rank of
    the group computes counts as a grain: ``count`` is then the number of parts of all grains, and the returned numbers
    are those that :func:`grain_part_number` gives to the parts. Between two numbers of a rank are those of the other
    ranks of its group.
    """
    contexts, shares = grid.context.size, []
    for place in range(grid.data.size):
        data, context = divmod(place, contexts)
        own = Grains(count // contexts, 1).assigned(data, grid.batch.size)
        start, stop = (grain_part_number(grain, context, contexts) for grain in (own.start, own.stop))
        shares.append(range(start, stop, contexts))
    return shares


def node_blocks(grid: NodeOrder, count: int) -> list[range]:
    """Return the grains of each node, of ``count`` grains: those of all its ranks by :func:`contiguous_shares`."""
    shares, blocks, first = contiguous_shares(grid, count), [], 0
    for size in grid.group_sizes:
        blocks.append(range(shares[first].start, shares[first + size - 1].stop))
        first += size
    return blocks


def claimed_rows(grid: NodeOrder, count: int) -> int:
    """Return how many rows the ranks of any node need to claim ``count`` grains."""
    sizes = zip(node_blocks(grid, count), grid.group_sizes, strict=True)
    return max(claim_rows(claim_parts(block, size), size, count) for block, size in sizes)


def wave_owners(grid: NodeOrder, count: int) -> list[int]:
    """Return, for each of ``count`` grains, the rank of ``grid.batch`` that computes it if grains come in waves.

    In a wave every rank computes one grain: successive grains are assigned to the ranks one after the other, node after
    node.
    """
    order = _batch_order(grid)
    return [order[grain % len(order)] for grain in range(count)]


def _batch_order(grid: NodeOrder) -> tuple[int, ...]:
    return grid.order if grid.context.size == 1 else tuple(range(grid.batch.size))


def grain_part_number(grain: int, context: int, contexts: int) -> int:
    """Return the number of a part of grain number ``grain``: the part that one rank of a context group computes.

    ``context`` is the rank in the group, ``contexts`` the size of the group. The parts of all grains are numbered from
    0 and count as grains. The parts of one grain have successive numbers, whatever the strategy: the order in which
    gradients and losses are added depends on these numbers.
    """
    return grain * contexts + context
