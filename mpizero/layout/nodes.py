"""Find the ranks of each group, and those that share a node: for real and for planned jobs alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from mpizero.layout.axes import Axes

#: The groups of a rank and the axes in which their members differ, in the order in which they are made.
GROUPS = {
    "tensor": ("tensor",),
    "context": ("context",),
    "data": ("data", "context"),
    "batch": ("data",),
    "pipeline": ("pipeline",),
    "model": ("pipeline", "tensor", "context"),
}
#: The groups that share a window where each of them lies inside one node.
SHARING = ("tensor", "context")


class RankedGroup(Protocol):
    """Give the place of this rank in a group, and the group's size."""

    @property
    def rank(self) -> int:
        """Place of this rank in the group."""

    @property
    def size(self) -> int:
        """Number of ranks of the group."""


class NodeOrder:
    """Derive orders and groups from the nodes of a data group; a base of grids, which have these attributes.

    Attributes
    ----------
    data, batch, context, node : RankedGroup
        The data group, those of its ranks that share samples and those that share sequences, and those that share
        memory with this one.
    nodes : tuple of tuple of int
        The data ranks of every node.
    position : tuple of int
        TreeNode-major place of every data rank.
    """

    data: RankedGroup
    batch: RankedGroup
    context: RankedGroup
    node: RankedGroup
    nodes: tuple[tuple[int, ...], ...]
    position: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The data ranks, node after node: the order in which grains are assigned."""
        return tuple(rank for ranks in self.nodes for rank in ranks)

    @property
    def place(self) -> int:
        """Place of this rank in :attr:`order`."""
        return self.position[self.data.rank]

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The data ranks of this rank's node, by their rank in ``node``."""
        return next(ranks for ranks in self.nodes if self.data.rank in ranks)

    @property
    def peer_ranks(self) -> tuple[int, ...]:
        """The data ranks of ``peers``, by their rank there."""
        return tuple(ranks[self.node.rank] for ranks in self.nodes)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Number of ranks of every node of the data group."""
        return tuple(len(ranks) for ranks in self.nodes)


@lru_cache(maxsize=64)
def groups_of(axes: Axes, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of all groups of one name. Not collective."""
    differing = GROUPS[name]
    places = enumerate(map(axes.coordinates, range(axes.size)))
    return tuple(axes.group(r, differing) for r, here in places if not any(getattr(here, a) for a in differing))


def inside_nodes(axes: Axes, name: str, hosts: Sequence[int]) -> bool:
    """Tell whether every group of one name lies on one node. Not collective.

    ``hosts`` names the node of every rank.
    """
    return all(len({hosts[rank] for rank in members}) == 1 for members in groups_of(axes, name))


def uneven_counts(axes: Axes, hosts: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks on each node of the first data group with unequal numbers; empty if there is none.

    Not collective.
    """
    for members in groups_of(axes, "data"):
        counts = tuple(len(places) for places in by_node([hosts[rank] for rank in members]))
        if len(set(counts)) > 1:
            return counts
    return ()


def by_node(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Group places by node, in the order of their first place. Not collective."""
    found: dict[int, list[int]] = {}
    for place, host in enumerate(hosts):
        found.setdefault(host, []).append(place)
    return tuple(map(tuple, found.values()))


def node_major(nodes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the place of every rank when ranks stand node after node. Not collective."""
    order = [rank for ranks in nodes for rank in ranks]
    return tuple(order.index(rank) for rank in range(len(order)))
