"""Compute the coordinates of ranks in the grid pipeline x tensor x data x context, and the process groups of the grid.

:class:`Axes` numbers the ranks. The functions of the module tell which ranks form a group, and which groups lie within
nodes. All of them compute from integers alone, without MPI, so they also work for jobs that have not been started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, product
from math import prod
from typing import NamedTuple, Protocol

from mpizero._util.checks import is_whole
from mpizero.errors import GridError
from mpizero.layout.sum_tree import Leaves

#: The four axes, slowest first: the default order of ranks.
AXES = ("pipeline", "tensor", "data", "context")


class Coordinates(NamedTuple):
    """Hold a rank's coordinates in the grid, each counted from 0.

    Attributes
    ----------
    pipeline : int
        Number of the rank's pipeline stage.
    tensor : int
        Which part the rank holds of every layer that is split over a tensor group.
    data : int
        Number of the replica that the rank belongs to.
    context : int
        Which part the rank holds of every sequence.

    Examples
    --------
    >>> import mpizero as mz
    >>> here = mz.layout.Axes(pipeline=2, tensor=2, data=2).coordinates(5)
    >>> here
    Coordinates(pipeline=1, tensor=0, data=1, context=0)
    >>> here.pipeline == 1  # the second stage
    True
    """

    pipeline: int
    tensor: int
    data: int
    context: int = 0


@dataclass(frozen=True)
class Axes:
    """Hold the sizes of the grid's four axes, and the order of the axes in which ranks are numbered.

    With the default order ``rank = ((p * T + t) * D + d) * C + c``, where p, t, d, c are the rank's coordinates and T,
    D, C are the sizes of the axes tensor, data and context.

    Parameters
    ----------
    pipeline, tensor, data, context : int
        Number of pipeline stages, of parts of a split layer, of replicas, and of parts of a sequence.
    order : tuple of str
        Names of the four axes, slowest first: from one rank to the next, the coordinate on the last axis changes.

    Raises
    ------
    GridError
        If a size is not a positive integer or ``order`` is not a permutation of the four names.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.layout.Axes(8, 8, 8).coordinates(75)
    Coordinates(pipeline=1, tensor=1, data=3, context=0)
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    context: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        """Raise :class:`GridError` if a size is not a positive integer or ``order`` is not a permutation."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        for axis, size in sizes.items():
            if not is_whole(size, 1):
                listed = ", ".join(f"{name}={value!r}" for name, value in sizes.items())
                raise GridError(f"{axis}={size!r} is not allowed among {listed}; expected an integer >= 1")
        if sorted(self.order) != sorted(AXES):
            raise GridError(f"order={self.order!r} is not allowed; expected {', '.join(AXES)}, each once, in any order")

    @classmethod
    def build(
        cls,
        world: int,
        *,
        pipeline: int = 1,
        tensor: int = 1,
        data: int = -1,
        context: int = 1,
        order: str = "pipeline,tensor,data",
    ) -> Axes:
        """Make the axes of a grid that has ``world`` ranks.

        Parameters
        ----------
        world : int
            Number of ranks.
        pipeline, tensor, data, context : int
            Sizes of the axes. ``data=-1`` means ``world`` divided by the product of the other three sizes.
        order : str
            Names of the axes, slowest first, separated by commas. If "context" is not among them, it is added at the
            end (as the fastest axis).

        Raises
        ------
        GridError
            If a size is not a positive integer, the product of the sizes is not ``world``, or ``order`` has an
            unknown, missing or repeated name.
        """
        if not is_whole(world, 1):
            raise GridError(f"a grid needs at least one rank, got {world=!r}")
        names = _order(order)
        sizes = {"pipeline": pipeline, "tensor": tensor, "data": data, "context": context}
        for axis, size in sizes.items():
            if not is_whole(size, 1) and not (axis == "data" and size == -1):
                allowed = "an integer >= 1, or -1 for all remaining ranks" if axis == "data" else "an integer >= 1"
                raise GridError(
                    f"{axis}={size!r} is not allowed for {_text(sizes)} on {world} ranks; expected {allowed}"
                )
        if data == -1:
            replica = pipeline * tensor * context
            if world % replica:
                raise GridError(
                    f"{world} ranks are not a multiple of pipeline={pipeline} x tensor={tensor} x context={context} = "
                    f"{replica} ranks of one replica; start a multiple of {replica} ranks or change a size"
                )
            sizes["data"] = world // replica
        if prod(sizes.values()) != world:
            raise GridError(
                f"{_text(sizes)} = {prod(sizes.values())} ranks, but there are {world}; "
                f"the product of the sizes must be the number of ranks (data=-1 takes all remaining ones)"
            )
        return cls(order=names, **sizes)

    @property
    def size(self) -> int:
        """Number of ranks: the product of the four sizes."""
        return self.pipeline * self.tensor * self.data * self.context

    @cached_property
    def strides(self) -> dict[str, int]:
        """By axis name, the increase of a rank's number when its coordinate on that axis increases by 1."""
        strides, stride = {}, 1
        for axis in reversed(self.order):
            strides[axis] = stride
            stride *= getattr(self, axis)
        return strides

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank.

        Raises
        ------
        GridError
            If ``rank`` is not in ``0:size``.
        """
        if not 0 <= rank < self.size:
            raise GridError(f"rank {rank} does not exist: {_text(self.sizes)} has ranks 0 to {self.size - 1}")
        return Coordinates(*(rank // self.strides[axis] % getattr(self, axis) for axis in AXES))

    def rank_of(self, coordinates: Coordinates) -> int:
        """Return the rank that has the given coordinates.

        Raises
        ------
        GridError
            If a coordinate is negative, or not less than the size of its axis.
        """
        for axis, size in self.sizes.items():
            if not 0 <= getattr(coordinates, axis) < size:
                raise GridError(f"{coordinates} is outside {_text(self.sizes)}: {axis} goes from 0 to {size - 1}")
        return sum(getattr(coordinates, axis) * stride for axis, stride in self.strides.items())

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return ``rank`` and all ranks whose coordinates differ from those of ``rank`` on the axes ``axes`` only.

        The ranks are sorted by their coordinates, first by pipeline, then tensor, data and context. This sorting does
        not depend on the attribute ``order`` or on the order of ``axes``.

        Raises
        ------
        GridError
            If ``rank`` is not in ``0:size``, or a name in ``axes`` is not the name of an axis.
        """
        if unknown := set(axes) - set(AXES):
            raise GridError(f"unknown axis {', '.join(map(repr, sorted(unknown)))}; expected some of {', '.join(AXES)}")
        coordinates, strides = self.coordinates(rank), self.strides
        first = rank - sum(getattr(coordinates, axis) * strides[axis] for axis in set(axes))
        steps = (range(0, getattr(self, a) * strides[a], strides[a]) for a in AXES if a in axes)
        return tuple(first + sum(moved) for moved in product(*steps))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by the axis's name, in the order pipeline, tensor, data, context."""
        return {axis: getattr(self, axis) for axis in AXES}

    def describe(self, nodes: Sequence[int] | None = None) -> str:
        """Return a text table: two lines of headings, then one line per rank with its coordinates (and its node).

        Parameters
        ----------
        nodes : sequence of int, optional
            The number of every rank's node, indexed by rank. Without it, the table does not show nodes.

        Raises
        ------
        GridError
            If the length of ``nodes`` is not the number of ranks.
        """
        if nodes is not None and len(nodes) != self.size:
            raise GridError(f"nodes has {len(nodes)} numbers, but {_text(self.sizes)} has {self.size} ranks")
        return "\n".join(self._lines(nodes))

    def _lines(self, nodes: Sequence[int] | None) -> Iterator[str]:
        header = ("rank", *AXES) if nodes is None else ("rank", *AXES, "node")
        yield f"{self.size} ranks: {_text(self.sizes)}, slowest to fastest {', '.join(self.order)}"
        yield "  ".join(header)
        for rank in range(self.size):
            row = (rank, *self.coordinates(rank)) if nodes is None else (rank, *self.coordinates(rank), nodes[rank])
            yield "  ".join(f"{value:>{len(name)}}" for value, name in zip(row, header, strict=True))


def _text(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())


def _order(text: str) -> tuple[str, ...]:
    """Cut a comma-separated text into a tuple of axis names; add "context" at the end if the text does not name it.

    Raises :class:`GridError` if a name is unknown, repeated or missing.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in AXES]
    repeated = sorted({name for name in names if names.count(name) > 1})
    missing = [axis for axis in AXES[:-1] if axis not in names]
    for what, wrong in (("unknown", unknown), ("repeated", repeated), ("missing", missing)):
        if wrong:
            raise GridError(
                f"order={text!r} has {what} {', '.join(map(repr, wrong))}; expected pipeline, tensor and data, each "
                "once, slowest first, and optionally context"
            )
    return tuple(names) if "context" in names else (*names, "context")


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
WINDOW_GROUPS = ("tensor", "context")


class RankedGroup(Protocol):
    """Define what this module needs of a process group: this process's rank in the group, and the group's size."""

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""

    @property
    def size(self) -> int:
        """Number of ranks of the group."""


class NodeOrder:
    """Compute the order of a data group's ranks and the inter-node group from its nodes; a base class of process grids.

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
    shard_groups : tuple of tuple of int
        The groups of nodes over which parameters are sharded, as indices into ``nodes``: see :func:`shard_groups`.
    """

    data: RankedGroup
    batch: RankedGroup
    context: RankedGroup
    node: RankedGroup
    nodes: tuple[tuple[int, ...], ...]
    position: tuple[int, ...]
    shard_groups: tuple[tuple[int, ...], ...]

    def leaves(self, count: int) -> Leaves:
        """Return which leaves of the tree (in which gradients are added) ``count`` parts of grains are. Not collective.

        A part of a grain is what one rank of a context group computes of it.
        """
        return Leaves(count, self.context.size)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The data ranks listed node after node: the order in which grains are assigned."""
        return tuple(rank for ranks in self.nodes for rank in ranks)

    @cached_property
    def order_index(self) -> int:
        """The position of this rank when the data ranks are listed node after node (see :attr:`order`)."""
        return self.position[self.data.rank]

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The data ranks on this rank's node, indexed by their rank in the group ``node``."""
        return next(ranks for ranks in self.nodes if self.data.rank in ranks)

    @property
    def inter_node_ranks(self) -> tuple[int, ...]:
        """The data ranks of the inter-node group, one from each node, this rank included, in the order of the nodes."""
        return tuple(ranks[self.node.rank] for ranks in self.nodes)

    @property
    def shard_group_ranks(self) -> tuple[int, ...]:
        """The data ranks of the inter-node group that are on this rank's group of nodes, in the order of the nodes.

        A group of nodes is one of :attr:`shard_groups`.
        """
        every, node = self.inter_node_ranks, self.nodes.index(self.node_ranks)
        return tuple(every[other] for other in next(group for group in self.shard_groups if node in group))

    @property
    def held_ranks(self) -> tuple[int, ...]:
        """The data ranks whose shards of parameters this node keeps.

        They are, for each rank of the node, the rank itself and those with the same shard (:meth:`replicas_of`).
        """
        return tuple(other for rank in self.node_ranks for other in self.replicas_of(rank))

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """The data ranks that keep the same shards of parameters as this rank: one in each of :attr:`shard_groups`."""
        return self.replicas_of(self.data.rank)

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """Return the data ranks that hold the same shard as data rank ``rank``: one in each of :attr:`shard_groups`.

        They are in the order of these groups.

        Not collective.
        """
        return self._replicas[rank] if len(self.shard_groups) > 1 else (rank,)

    @cached_property
    def _replicas(self) -> dict[int, tuple[int, ...]]:
        """For each data rank, the data ranks that keep the same shards: one in each of :attr:`shard_groups`."""
        places = (
            zip(*(self.nodes[node] for node in place), strict=True) for place in zip(*self.shard_groups, strict=True)
        )
        return {rank: ranks for replicas in places for ranks in replicas for rank in ranks}

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
    positions = enumerate(map(axes.coordinates, range(axes.size)))
    return tuple(axes.group(r, differing) for r, at in positions if not any(getattr(at, a) for a in differing))


def inside_nodes(axes: Axes, name: str, hosts: Sequence[int]) -> bool:
    """Tell whether each group of the kind ``name`` ("tensor", "data", ...) has all its ranks on one node.

    ``hosts`` holds, for every rank of the world, the number of its node.
    """
    return all(len({hosts[rank] for rank in members}) == 1 for members in groups_of(axes, name))


def order_inside_nodes(axes: Axes, name: str, hosts: Sequence[int]) -> str:
    """Return an order of the axes with which each group of the axis ``name`` lies on one node; "" if none is needed.

    "" is returned too if no other place of the axis in the order helps. (The last place can help if ranks are numbered
    node after node, the first place if successive ranks are on different nodes.) ``hosts`` holds, for every rank of the
    world, the number of its node.
    """
    if getattr(axes, name) == 1 or inside_nodes(axes, name, hosts):
        return ""
    others = [axis for axis in axes.order if axis != name]
    orders = ((*others[:place], name, *others[place:]) for place in reversed(range(len(axes.order))))
    return next((",".join(order) for order in orders if inside_nodes(replace(axes, order=order), name, hosts)), "")


def uneven_counts(axes: Axes, hosts: Sequence[int]) -> tuple[int, ...]:
    """Find a data group that has different numbers of ranks on its nodes; return these numbers, one per node.

    Return () if every data group has the same number of ranks on each of its nodes. ``hosts`` holds, for every rank of
    the world, the number of its node.
    """
    for members in groups_of(axes, "data"):
        counts = tuple(len(members_of_node) for members_of_node in by_node([hosts[rank] for rank in members]))
        if len(set(counts)) > 1:
            return counts
    return ()


def shard_groups(
    axes: Axes, hosts: Sequence[int], shard_nodes: int | None, *, share: bool = True
) -> dict[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Divide the nodes of data groups into groups of ``shard_nodes`` nodes, over each of which parameters are sharded.

    Return a dictionary: the key is a data group (its ranks in the world), the value has one tuple for each group of
    nodes, with the indices of these nodes among the nodes of the data group. If ranks share no memory, each rank counts
    as a node in the result, but not in ``shard_nodes``. There is one group with all nodes if ``shard_nodes`` is None,
    or not less than the number of nodes. The first nodes of all groups hold the same parameters, and so do the second
    nodes of all groups, and so on.

    Parameters
    ----------
    axes : Axes
        The axes of parallelism.
    hosts : sequence of int
        For every rank of the world, the index of its node.
    shard_nodes : int or None
        Number of nodes in a group.
    share : bool
        Whether ranks share memory.

    Raises
    ------
    GridError
        If ``shard_nodes`` does not divide the number of nodes of a data group, or groups have different numbers of
        ranks.
    """
    groups = {}
    for members in groups_of(axes, "data"):
        nodes = by_node([hosts[other] for other in members])
        size = len(nodes) if shard_nodes is None else min(shard_nodes, len(nodes))
        if len(nodes) % size:
            raise GridError(
                f"shard_nodes={shard_nodes} does not divide the {len(nodes)} nodes of a data group; choose one of "
                f"{', '.join(str(n) for n in range(1, len(nodes) + 1) if len(nodes) % n == 0)}"
            )
        cut = [nodes[start : start + size] for start in range(0, len(nodes), size)]
        counts = [sum(map(len, group)) for group in cut]
        if len(set(counts)) > 1:
            raise GridError(
                f"shard_nodes={shard_nodes} makes groups of {', '.join(map(str, counts))} ranks; they must have the "
                "same number"
            )
        numbers = {node: number for number, node in enumerate(nodes)}
        groups[members] = tuple(
            tuple(chain.from_iterable(group)) if not share else tuple(numbers[node] for node in group) for group in cut
        )
    return groups


def by_node(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return, for every node, the indices of ``hosts`` at which the node's number stands: its ranks.

    ``hosts`` holds the number of each rank's node. Nodes come in the order in which their numbers first appear.
    """
    nodes: dict[int, list[int]] = {}
    for index, host in enumerate(hosts):
        nodes.setdefault(host, []).append(index)
    return tuple(map(tuple, nodes.values()))


def node_major(nodes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return, for every rank, its position when the ranks of ``nodes`` are listed node after node.

    ``nodes`` holds the ranks of every node: together, each rank from 0 on exactly once.
    """
    order = [rank for ranks in nodes for rank in ranks]
    return tuple(order.index(rank) for rank in range(len(order)))
