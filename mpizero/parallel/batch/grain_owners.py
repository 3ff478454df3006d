"""Assign the grains of a global batch to ranks: a contiguous run of grains to each, or one grain to each in waves."""

from __future__ import annotations

from mpizero.layout import Grains
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
    are those that :func:`grain_part_number` gives to the parts.
    """
    contexts, whole = grid.context.size, count // grid.context.size
    shares = []
    for place in range(grid.data.size):
        data, context = divmod(place, contexts)
        own = Grains(whole, 1).assigned(data, grid.batch.size)
        shares.append(range(context * whole + own.start, context * whole + own.stop))
    return shares


def wave_owners(grid: NodeOrder, count: int) -> list[int]:
    """Return, for each of ``count`` grains, the rank of ``grid.batch`` that computes it if grains come in waves.

    In a wave every rank computes one grain: successive grains are assigned to the ranks one after the other, node after
    node.
    """
    order = _batch_order(grid)
    return [order[grain % len(order)] for grain in range(count)]


def _batch_order(grid: NodeOrder) -> tuple[int, ...]:
    return grid.order if grid.context.size == 1 else tuple(range(grid.batch.size))


def grain_part_number(grain: int, count: int, context: int, contexts: int, *, waves: bool) -> int:
    """Return the number of a part of a grain: the part that one rank of a context group computes.

    The parts of all grains are numbered from 0 and count as grains. With ``waves`` the parts of one grain have
    successive numbers, so that they are in the same wave. Otherwise the parts of one rank have successive numbers.

    Parameters
    ----------
    grain, count : int
        Number of the grain, and number of grains in the global batch.
    context, contexts : int
        Rank in the context group, and size of the group.
    waves : bool
        Whether grains are computed in waves.
    """
    return grain * contexts + context if waves else context * count + grain
