"""Compute the ranks of each process group, and which of them share a node, for running and for planned jobs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from mpizero.layout.axes import Axes

#: The process groups of a rank, each with the axes in which its members differ, in the order in which they are made.
GROUPS = {
    "tensor": ("tensor",),
    "context": ("context",),
    "data": ("data", "context"),
    "batch": ("data",),
    "pipeline": ("pipeline",),
    "model": ("pipeline", "tensor", "context"),
}
#: The groups that use a shared memory window, where each of these groups lies inside one node.
SHARING = ("tensor", "context")


class RankedGroup(Protocol):
    """Define what is needed of a group: this rank's number in it, and its size."""

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""

    @property
    def size(self) -> int:
        """Number of ranks of the group."""


class NodeOrder:
    """Compute the order of a data group's ranks and their peers from the nodes; a base class of process grids.

    A *data rank* is a rank's number in the data group.

    Attributes
    ----------
    data : RankedGroup
        The data group: the ranks that hold the same parameters.
    batch : RankedGroup
        The ranks of the data group that a global batch is divided among.
    context : RankedGroup
        The ranks of the data group that hold parts of the same sequences.
    node : RankedGroup
        The ranks of the data group that are on this rank's node.
    nodes : tuple of tuple of int
        The data ranks of every node.
    position : tuple of int
        For every data rank, its position when the ranks are listed node after node.
    """

    data: RankedGroup
    batch: RankedGroup
    context: RankedGroup
    node: RankedGroup
    nodes: tuple[tuple[int, ...], ...]
    position: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The data ranks listed node after node: the order in which grains are assigned."""
        return tuple(rank for ranks in self.nodes for rank in ranks)

    @property
    def place(self) -> int:
        """Return the position of this rank in :attr:`order`, the data ranks sorted node by node."""
        return self.position[self.data.rank]

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The data ranks on this rank's node, indexed by their rank in ``node``."""
        return next(ranks for ranks in self.nodes if self.data.rank in ranks)

    @property
    def peer_ranks(self) -> tuple[int, ...]:
        """The data ranks of the group ``peers`` (the same rank on every node), indexed by their rank in that group."""
        return tuple(ranks[self.node.rank] for ranks in self.nodes)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Number of the data group's ranks on every node."""
        return tuple(len(ranks) for ranks in self.nodes)


@lru_cache(maxsize=64)
def groups_of(axes: Axes, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each group called ``name``, one of :data:`GROUPS`."""
    differing = GROUPS[name]
    places = enumerate(map(axes.coordinates, range(axes.size)))
    return tuple(axes.group(r, differing) for r, here in places if not any(getattr(here, a) for a in differing))


def inside_nodes(axes: Axes, name: str, hosts: Sequence[int]) -> bool:
    """Tell whether every group called ``name`` lies on one node.

    ``hosts`` holds the number of every rank's node.
    """
    return all(len({hosts[rank] for rank in members}) == 1 for members in groups_of(axes, name))


def uneven_counts(axes: Axes, hosts: Sequence[int]) -> tuple[int, ...]:
    """Find the first data group with unequal numbers of ranks on its nodes; return these numbers, or () if none."""
    for members in groups_of(axes, "data"):
        counts = tuple(len(places) for places in by_node([hosts[rank] for rank in members]))
        if len(set(counts)) > 1:
            return counts
    return ()


def by_node(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Group the indices of ``hosts`` by node; nodes come in the order of their first index."""
    found: dict[int, list[int]] = {}
    for place, host in enumerate(hosts):
        found.setdefault(host, []).append(place)
    return tuple(map(tuple, found.values()))


def node_major(nodes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the position of every rank when the ranks are listed node after node."""
    order = [rank for ranks in nodes for rank in ranks]
    return tuple(order.index(rank) for rank in range(len(order)))
