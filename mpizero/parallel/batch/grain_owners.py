"""Assign the grains of a global batch to ranks: a contiguous run each, or in waves of one grain each."""

from __future__ import annotations

from mpizero.layout import Grains
from mpizero.layout.nodes import NodeOrder


def contiguous_owners(grid: NodeOrder, count: int) -> list[int]:
    """Return the rank of ``grid.batch`` that computes each of ``count`` grains, in contiguous runs, node after node.

    The ranks of a context group compute a grain together; each computes its places of the sequence.
    """
    owner = [0] * count
    for position, rank in enumerate(_batch_order(grid)):
        for grain in Grains(count, 1).assigned(position, grid.batch.size):
            owner[grain] = rank
    return owner


def contiguous_shares(grid: NodeOrder, count: int) -> list[range]:
    """Return the grains of each data rank, ranks in the order of nodes, as :func:`contiguous_owners` assigns them.

    In context groups each rank's part of a grain counts as a grain. ``count`` is then the number of all parts, and
    :func:`grain_part_number` is the number of a part.
    """
    contexts, whole = grid.context.size, count // grid.context.size
    shares = []
    for place in range(grid.data.size):
        data, context = divmod(place, contexts)
        own = Grains(whole, 1).assigned(data, grid.batch.size)
        shares.append(range(context * whole + own.start, context * whole + own.stop))
    return shares


def wave_owners(grid: NodeOrder, count: int) -> list[int]:
    """Return the rank of ``grid.batch`` that computes each of ``count`` grains in waves: one grain a rank in each."""
    order = _batch_order(grid)
    return [order[grain % len(order)] for grain in range(count)]


def _batch_order(grid: NodeOrder) -> tuple[int, ...]:
    return grid.order if grid.context.size == 1 else tuple(range(grid.batch.size))


def grain_part_number(grain: int, count: int, context: int, contexts: int, *, waves: bool) -> int:
    """Return the number of the part of one of ``count`` grains that one rank of a context group computes.

    In waves the parts of one grain have successive numbers, so that they are in the same wave. Otherwise the parts of
    one rank have successive numbers.
    """
    return grain * contexts + context if waves else context * count + grain
