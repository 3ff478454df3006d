"""Compute the groups of every rank of a planned job, the same that :class:`mpizero.comm.ProcessGrid` finds in a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpizero.layout import Axes, Coordinates
from mpizero.layout.mesh import GROUPS, SHARING, NodeOrder, by_node, inside_nodes, node_major, uneven_counts
from mpizero.planning.byte_counts import GroupCall, RecordingGroup


class PlannedGroup(NamedTuple):
    """Describe a group of ranks, as seen by one of its ranks.

    Attributes
    ----------
    rank, size : int
        The rank's number in the group, and the size of the group.
    shares_memory : bool
        Whether the members may share memory in a window.
    """

    rank: int
    size: int
    shares_memory: bool = False


@dataclass(frozen=True)
class PlannedGrid(NodeOrder):
    """Hold the groups of one rank of a planned job, under the names that :class:`mpizero.comm.ProcessGrid` uses.

    ``here`` holds the rank's coordinates on ``axes``, the axes of parallelism. ``nodes`` and ``position`` are described
    in :class:`NodeOrder`.
    """

    axes: Axes
    here: Coordinates
    world: PlannedGroup
    data: PlannedGroup
    batch: PlannedGroup
    pipeline: PlannedGroup
    tensor: PlannedGroup
    context: PlannedGroup
    model: PlannedGroup
    node: PlannedGroup
    peers: PlannedGroup
    nodes: tuple[tuple[int, ...], ...]
    position: tuple[int, ...]

    @cached_property
    def group_calls(self) -> list[GroupCall]:
        """The calls of the tensor and the context group, in order, since the list was last emptied."""
        return []

    @cached_property
    def tensor_group(self) -> RecordingGroup:
        """An object that takes the place of the tensor group and records the calls of split layers."""
        return RecordingGroup("tensor", self.tensor.rank, self.tensor.size, self.group_calls)

    @cached_property
    def context_group(self) -> RecordingGroup:
        """An object that takes the place of the context group and records the calls of context-parallel layers."""
        return RecordingGroup("context", self.context.rank, self.context.size, self.group_calls)


@dataclass(frozen=True)
class PlannedRanks:
    """Hold the nodes of all ranks of a planned job, and compute each rank's groups.

    Parameters
    ----------
    axes : Axes
        Sizes and order of the axes of parallelism.
    hosts : tuple of int
        For every rank, the first rank of its node.
    share : bool
        Whether ranks of a node share memory.
    """

    axes: Axes
    hosts: tuple[int, ...]
    share: bool = True

    @classmethod
    def build(
        cls, axes: Axes, *, ranks_per_node: int | None = None, simulated: int | None = None, share: bool = True
    ) -> PlannedRanks:
        """Return the ranks of a job in which consecutive ranks are on the same node. Not collective.

        Parameters
        ----------
        axes : Axes
            Sizes and order of the axes of parallelism.
        ranks_per_node : int or None
            Number of ranks of a real node; None puts all ranks on one node.
        simulated : int or None
            Number of ranks of a simulated node (``ShardingConfig.ranks_per_node``), into which each real node is cut.
        share : bool
            Whether ranks of a node share memory.
        """
        real = ranks_per_node or axes.size
        small = min(simulated or real, real)
        hosts = tuple(rank - rank % real % small for rank in range(axes.size))
        ranks = cls(axes, hosts, share)
        if not share or axes.context == 1:
            return ranks
        # The context ranks that share a grain must follow one another in the order in which a wave assigns grains. With
        # shared memory that order goes node by node, and may separate them: such a run has no shared memory.
        grid = ranks.grid(0)
        return ranks if grid.order == tuple(range(grid.data.size)) else ranks.private()

    def private(self) -> PlannedRanks:
        """Return the ranks of the same job without shared memory. Not collective."""
        return PlannedRanks(self.axes, self.hosts, share=False)

    @property
    def size(self) -> int:
        """Number of ranks of the job."""
        return self.axes.size

    @cached_property
    def uneven(self) -> bool:
        """Tell whether memory cannot be shared because a data group has unequal numbers of ranks on its nodes."""
        return self.share and bool(uneven_counts(self.axes, self.hosts))

    def inside_nodes(self, group: str) -> bool:
        """Tell whether each group of the kind ``group`` ("tensor", for example) is inside one node. Not collective."""
        return inside_nodes(self.axes, group, self.hosts)

    def grid(self, rank: int) -> PlannedGrid:
        """Return the groups of one rank. Not collective."""
        here = self.axes.coordinates(rank)
        members = {name: self.axes.group(rank, differing) for name, differing in GROUPS.items()}
        data = PlannedGroup(members["data"].index(rank), len(members["data"]))
        nodes = by_node([self.hosts[other] for other in members["data"]])
        if not self.share or self.uneven:
            nodes = tuple((place,) for place in range(data.size))
        mine = next(place for place, ranks in enumerate(nodes) if data.rank in ranks)
        groups = {name: self._group(name, rank, ranks) for name, ranks in members.items() if name != "data"}
        return PlannedGrid(
            axes=self.axes,
            here=here,
            world=PlannedGroup(rank, self.size),
            data=data,
            node=PlannedGroup(nodes[mine].index(data.rank), len(nodes[mine]), True),
            peers=PlannedGroup(mine, len(nodes)),
            nodes=nodes,
            position=node_major(nodes),
            **groups,
        )

    def _group(self, name: str, rank: int, members: tuple[int, ...]) -> PlannedGroup:
        shares = name in SHARING and self.share and self.inside_nodes(name)
        return PlannedGroup(members.index(rank), len(members), shares)
