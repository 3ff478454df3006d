"""Make the communicators of a job: one for each axis of parallelism, one inside each node, and one between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Self

from mpizero._util.text import notice
from mpizero.comm.communicator import Communicator
from mpizero.comm.threads import InMemoryCommunicator
from mpizero.errors import GridError
from mpizero.layout.mesh import (
    GROUPS,
    WINDOW_GROUPS,
    Axes,
    Coordinates,
    NodeOrder,
    by_node,
    inside_nodes,
    node_major,
    order_inside_nodes,
    shard_groups,
    uneven_counts,
)

if TYPE_CHECKING:
    from mpizero.comm.model_group import CommunicatorGroup


@dataclass(eq=False)
class ProcessGrid(NodeOrder):
    """Hold the communicators of all groups that this rank belongs to.

    Of the groups ``data`` to ``model`` below, those with the same ranks use one communicator, because MPICH has room
    for only about 2000 communicators. All groups that contain this rank alone use one InMemoryCommunicator instead of
    an MPI communicator, except ``data``, ``batch`` and ``node`` in a job of one rank.

    Attributes
    ----------
    world : Communicator
        All ranks. The caller made it and closes it.
    axes : Axes
        The sizes and the order of the axes.
    coordinates : Coordinates
        The coordinates of this rank on the axes.
    data : Communicator
        The data group: the ranks that hold the same parameters. Gradients are summed and state is sharded over it. Its
        ranks differ from one another in the coordinates data and context only; they are ordered by data, then context.
    batch : Communicator
        The ranks that redistribute samples among themselves; they differ from one another in the coordinate data only.
        Without context groups this is the same communicator as ``data``.
    pipeline, tensor, context : Communicator
        The group of that axis: this rank, and the ranks that differ from it in the coordinate on that axis only.
    model : Communicator
        The ranks of this rank's replica, which get the same samples; ordered by pipeline, then tensor, then context.
    node : Communicator
        The ranks of ``data`` that share memory with this one, in rank order.
    inter_node : Communicator
        The ranks of ``data`` with the same number inside their nodes, one per node, in the order of ``nodes``.
    gradients : Communicator
        A second communicator of the ranks of ``inter_node``, for sums of gradients. Their exchanges begin while ranks
        still compute, so the order of these messages and those that gather parameters may differ from rank to rank.
        That is allowed, because parameters are gathered over the other communicators.
    shard_group : Communicator
        The ranks of ``inter_node`` in this rank's group of nodes, over which ZeRO-3 shards and gathers parameters.
    replicas : Communicator
        The ranks that keep the same shards as this rank: one in each group of nodes, in the order of ``shard_groups``.
    nodes : tuple of tuple of int
        For every node of the data group, its ranks, numbered as in ``data``; nodes are ordered by their first rank.
    position : tuple of int
        For every rank of ``data``, its number when the ranks are counted node by node. Grains (fixed slices of the
        global batch) are assigned in this order.
    shard_groups : tuple of tuple of int
        For every group of nodes over which parameters are sharded, its nodes, as indices into ``nodes``.
    is_open : bool
        Whether :meth:`close` has not been called.

    Examples
    --------
    >>> import mpizero as mz
    >>> def sizes(comm):
    ...     with mz.comm.ProcessGrid.create(comm, axes=mz.layout.Axes(tensor=2, data=2)) as grid:
    ...         at = grid.coordinates
    ...         return at.tensor, at.data, grid.tensor.size, grid.data.allgather_object(comm.rank)
    >>> mz.testing.run_in_threads(4, sizes)
    [(0, 0, 2, [0, 1]), (0, 1, 2, [0, 1]), (1, 0, 2, [2, 3]), (1, 1, 2, [2, 3])]
    """

    world: Communicator
    axes: Axes
    coordinates: Coordinates
    data: Communicator
    batch: Communicator
    pipeline: Communicator
    tensor: Communicator
    context: Communicator
    model: Communicator
    node: Communicator
    inter_node: Communicator
    gradients: Communicator
    shard_group: Communicator
    replicas: Communicator
    nodes: tuple[tuple[int, ...], ...]
    position: tuple[int, ...]
    shard_groups: tuple[tuple[int, ...], ...]
    is_open: bool = field(default=True, init=False)
    _ranks_per_node: int | None = field(default=None, repr=False)
    _made: dict[str, CommunicatorGroup] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def create(
        cls,
        world: Communicator,
        *,
        share_node_memory: bool = True,
        ranks_per_node: int | None = None,
        shard_nodes: int | None = None,
        axes: Axes | None = None,
    ) -> ProcessGrid:
        """Find the nodes of the job, and make the communicators of all groups.

        Collective over ``world``. With ``share_node_memory=False`` every rank counts as a node of its own, and the
        inter-node group is the data group. Every rank also counts as its own node, and rank 0 prints a notice, when the
        nodes of a data group have unequal numbers of ranks. ``ranks_per_node=k`` cuts each real node into simulated
        nodes of ``k`` consecutive ranks. ``shard_nodes=k`` shards parameters over groups of ``k`` nodes instead of over
        all nodes. ``axes=None`` means data parallelism over all ranks.

        Raises
        ------
        GridError
            If ``ranks_per_node`` is not a positive integer, the product of the sizes of ``axes`` is not the size of
            ``world``, ``shard_nodes`` does not divide the number of nodes of a data group, or the groups of nodes have
            different numbers of ranks.
        """
        if ranks_per_node is not None and (not isinstance(ranks_per_node, int) or ranks_per_node < 1):
            raise GridError(f"ranks_per_node must be a positive integer or None, got {ranks_per_node!r}")
        axes = Axes(data=world.size) if axes is None else axes
        if axes.size != world.size:
            sizes = " x ".join(f"{name}={size}" for name, size in axes.sizes.items())
            raise GridError(f"{sizes} needs {axes.size} ranks, the world has {world.size}")
        host = world.split_node(ranks_per_node, name="node") if share_node_memory else None
        hosts = tuple(range(world.size)) if host is None else _hosts(world, host)
        uneven = uneven_counts(axes, hosts)
        real = hosts
        if shard_nodes is not None and host is None:
            with world.split_node(ranks_per_node, name="nodes") as found:
                real = _hosts(world, found)
        try:
            groups_of_nodes = shard_groups(axes, real, shard_nodes, share=host is not None and not uneven)
        except GridError:  # on all ranks
            if host is not None:
                host.close()
            raise
        alone: Communicator = InMemoryCommunicator.group(1, name="alone")[0]
        groups = _split(world, host, hosts, axes, alone)
        data = groups["data"]
        if uneven and world.rank == 0:
            whose = "" if data.size == world.size else " of a data group"
            notice(
                f"nodes have {', '.join(map(str, uneven))} ranks{whose}; memory is shared only where all "
                "nodes have the same number, so every rank keeps its own copy"
            )
        members = axes.group(world.rank, GROUPS["data"])
        sharing = groups_of_nodes[members]
        nodes = by_node(range(data.size) if uneven else [hosts[rank] for rank in members])
        if data.size == 1 < world.size:
            node = data
        elif host is None or uneven:
            node = data.split(data.rank, name="node")
        else:
            node = host if members == tuple(range(world.size)) else host.split(min(members), data.rank, name="node")
        if host is not None and host is not node:
            host.close()
        position = node_major(nodes)
        inter_node, gradients = (
            alone if len(nodes) == 1 else data.split(node.rank, key=position[data.rank], name=name)
            for name in ("inter_node", "gradients")
        )
        shard_group, replicas = _divide(inter_node, sharing, alone)
        coordinates = axes.coordinates(world.rank)
        return cls(
            world, axes, coordinates, **groups, node=node, inter_node=inter_node, gradients=gradients,
            shard_group=shard_group, replicas=replicas, nodes=nodes, position=position, shard_groups=sharing,
            _ranks_per_node=ranks_per_node,
        )  # fmt: skip

    @property
    def tensor_group(self) -> CommunicatorGroup:
        """The object by which layers that are split over the tensor axis sum and gather arrays.

        The first access is collective over ``tensor``.
        """
        return self._group("tensor", self.tensor)

    @property
    def context_group(self) -> CommunicatorGroup:
        """The object by which layers that are split over the context axis sum and gather arrays.

        The first access is collective over ``context``.
        """
        return self._group("context", self.context)

    def _group(self, name: str, comm: Communicator) -> CommunicatorGroup:
        if name not in self._made:
            from mpizero.comm.model_group import CommunicatorGroup

            self._made[name] = CommunicatorGroup(comm, comm if comm.shares_memory else None)
        return self._made[name]

    @property
    def local_size(self) -> int:
        """Number of ranks of the data group on each node; 1 if every rank counts as its own node."""
        return self.node.size

    @cached_property
    def batch_ranks(self) -> list[int]:
        """The ranks of the group ``batch``, as ranks of ``world``."""
        return list(self.axes.group(self.world.rank, GROUPS["batch"]))

    @cached_property
    def communicators(self) -> tuple[Communicator, ...]:
        """The communicators that the grid has made (not ``world``), each once, in the same order on every rank."""
        between = (self.inter_node, self.gradients, self.shard_group, self.replicas)
        communicators = (*(getattr(self, name) for name in GROUPS), self.node, *between)
        return tuple({id(communicator): communicator for communicator in communicators}.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other ranks through the grid's communicators, ``world`` included."""
        return sum(c.counters.bytes_sent for c in (self.world, *self.communicators))

    def describe(self) -> str:
        """Return a table, as text, of every rank's coordinates and the node that it runs on.

        Collective over ``world``. Nodes, also simulated ones, are numbered in the order of their first ranks, whether
        memory is shared or not.
        """
        with self.world.split_node(self._ranks_per_node, name="describe") as host:
            hosts = _hosts(self.world, host)
        numbers = {leader: number for number, leader in enumerate(sorted(set(hosts)))}
        return self.axes.describe([numbers[leader] for leader in hosts])

    def close(self) -> None:
        """Close the communicators that the grid has made; ``world`` stays open. Collective over ``world``."""
        self.is_open = False
        while self._made:
            self._made.popitem()[1].close()
        for communicator in reversed(self.communicators):
            communicator.close()

    def __enter__(self) -> Self:
        """Return the grid. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the grid if the block has not raised; this is collective over ``world``."""
        if error is None:
            self.close()


def group_buffers(grid: ProcessGrid) -> dict[str, int]:
    """Return ``{"group buffers": bytes}``: memory of this rank for messages of its tensor and context groups.

    Each rank counts an equal part of a window that the group shares. Not collective.
    """
    split = [name for name in ("tensor", "context") if getattr(grid, name).size > 1]
    groups = [getattr(grid, f"{name}_group") for name in split]
    return {"group buffers": sum(group.private_bytes + group.shared_bytes // group.size for group in groups)}


def _tell_better_orders(axes: Axes, hosts: Sequence[int]) -> None:
    """Print a notice if tensor or context groups are on several nodes and another order of the axes avoids that.

    ``hosts`` holds, for every rank, the lowest rank on its node.
    """
    for name in WINDOW_GROUPS:
        if order := order_inside_nodes(axes, name, hosts):
            kind = "context or domain" if name == "context" else name
            notice(
                f"ranks of one {kind} group are on several nodes, so what they send each other in every layer goes "
                f"between nodes: order={order!r} puts each {kind} group on one node"
            )


def _hosts(world: Communicator, host: Communicator) -> tuple[int, ...]:
    """Return, for every rank of ``world``, the lowest rank on its node. Collective over ``world``.

    ``host`` is the communicator of this rank's node.
    """
    return tuple(world.allgather_object(host.broadcast_object(world.rank), tag="nodes"))


def _divide(
    inter_node: Communicator, sharing: Sequence[Sequence[int]], alone: Communicator
) -> tuple[Communicator, Communicator]:
    """Return the communicators ``shard_group`` and ``replicas`` of this rank. Collective over ``inter_node``.

    ``sharing`` holds, for each group of nodes over which parameters are sharded, the ranks of ``inter_node`` that are
    on these nodes; ``alone`` is a communicator of this rank alone.
    """
    if len(sharing) == 1:
        return inter_node, alone
    number, place = next(
        (n, group.index(inter_node.rank)) for n, group in enumerate(sharing) if inter_node.rank in group
    )
    replicas = inter_node.split(place, number, name="replicas")
    return (alone if len(sharing[0]) == 1 else inter_node.split(number, place, name="shard_group")), replicas


def _split(
    world: Communicator, host: Communicator | None, hosts: Sequence[int], axes: Axes, alone: Communicator
) -> dict[str, Communicator]:
    """Return the communicators of all groups by name; groups of the same ranks get the same communicator.

    Collective over ``world``. ``host`` is the communicator of this rank's node, or None if ranks share no memory;
    ``hosts`` holds, for every rank, the lowest rank on its node. ``axes`` and ``hosts`` alone decide which groups have
    the same ranks, and which groups lie within nodes. These two arguments are the same on all ranks, so all ranks split
    the same communicators. A group that contains only this rank gets the communicator ``alone``.
    """
    if host is not None and world.rank == 0:
        _tell_better_orders(axes, hosts)
    made: dict[tuple[int, ...], Communicator] = {}
    groups: dict[str, Communicator] = {}
    for name, differing in GROUPS.items():
        members = axes.group(world.rank, differing)
        if len(members) == 1 and not (world.size == 1 and name in ("data", "batch")):  # checkpoints may need MPI's own
            groups[name] = alone
            continue
        if members not in made:
            parent = world
            if host is not None and name in WINDOW_GROUPS and inside_nodes(axes, name, hosts):
                parent = host  # ranks of one node share memory
            made[members] = parent.split(min(members), members.index(world.rank), name=name)
        groups[name] = made[members]
    return groups
