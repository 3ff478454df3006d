"""Compute the ranks of each process group, and which of them share a node, without MPI (also for planned jobs)."""

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
    """Define the interface of a process group for this module: this process's rank in the group, and its size."""

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""

    @property
    def size(self) -> int:
        """Number of ranks of the group."""


class NodeOrder:
    """Compute, from its nodes, the order of a data group's ranks and this rank's peers; a base class of process grids.

    A *data rank* is the number of a rank in the data group, not in the world.

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
        For every data rank, its position when the data ranks are listed node after node.
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
        """The position of this rank when the data ranks are listed node after node (see :attr:`order`)."""
        return self.position[self.data.rank]

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The data ranks on this rank's node, indexed by their rank in the group ``node``."""
        return next(ranks for ranks in self.nodes if self.data.rank in ranks)

    @property
    def peer_ranks(self) -> tuple[int, ...]:
        """The data ranks of this rank's peers, one from each node and this rank included, in the order of the nodes."""
        return tuple(ranks[self.node.rank] for ranks in self.nodes)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """For every node, the number of ranks of the data group that are on it."""
        return tuple(len(ranks) for ranks in self.nodes)


@lru_cache(maxsize=64)
def groups_of(axes: Axes, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the members of every group of the kind ``name`` ("tensor", "data", ...), as ranks of the world.

    :data:`GROUPS` lists the kinds. Groups are in ascending order of their smallest rank.
    """
    differing = GROUPS[name]
    places = enumerate(map(axes.coordinates, range(axes.size)))
    return tuple(axes.group(r, differing) for r, here in places if not any(getattr(here, a) for a in differing))


def inside_nodes(axes: Axes, name: str, hosts: Sequence[int]) -> bool:
    """Tell whether each group of the kind ``name`` ("tensor", "data", ...) has all its ranks on one node.

    ``hosts`` holds, for every rank of the world, the number of its node.
    """
    return all(len({hosts[rank] for rank in members}) == 1 for members in groups_of(axes, name))


def uneven_counts(axes: Axes, hosts: Sequence[int]) -> tuple[int, ...]:
    """Find a data group that has different numbers of ranks on its nodes; return these numbers, one per node.

    Return () if every data group has the same number of ranks on each of its nodes. ``hosts`` holds, for every rank of
    the world, the number of its node.
    """
    for members in groups_of(axes, "data"):
        counts = tuple(len(places) for places in by_node([hosts[rank] for rank in members]))
        if len(set(counts)) > 1:
            return counts
    return ()


def by_node(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return, for every node, the indices of ``hosts`` that hold its number.

    ``hosts`` holds the number of each rank's node. Nodes come in the order in which their numbers first appear.
    """
    found: dict[int, list[int]] = {}
    for place, host in enumerate(hosts):
        found.setdefault(host, []).append(place)
    return tuple(map(tuple, found.values()))


def node_major(nodes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return, for every rank, its position when the ranks of ``nodes`` are listed node after node.

    ``nodes`` holds the ranks of every node: together, each rank from 0 on exactly once.
    """
    order = [rank for ranks in nodes for rank in ranks]
    return tuple(order.index(rank) for rank in range(len(order)))
