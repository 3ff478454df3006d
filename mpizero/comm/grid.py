"""Who works with whom: the data axis, the nodes that share memory, and the peers between nodes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from mpizero.comm.communicator import Communicator
from mpizero.errors import GridError


@dataclass(frozen=True)
class ProcessGrid:
    """The groups one rank belongs to; a value that is passed by hand.

    Attributes
    ----------
    world : Communicator
        All ranks; belongs to the caller.
    data : Communicator
        The ranks among which the grains of a batch are dealt: all of them.
    node : Communicator
        The ranks that share memory with this one, in rank order.
    peers : Communicator
        The ranks with the same place on their node, one per node, in the order of ``nodes``.
    nodes : tuple of tuple of int
        The data ranks of every node; nodes are ordered by their first rank.
    position : tuple of int
        Node-major place of every data rank: grains are dealt in this order.
    """

    world: Communicator
    data: Communicator
    node: Communicator
    peers: Communicator
    nodes: tuple[tuple[int, ...], ...]
    position: tuple[int, ...]

    @classmethod
    def create(
        cls, world: Communicator, *, share_node_memory: bool = True, ranks_per_node: int | None = None
    ) -> ProcessGrid:
        """Find the nodes and group the ranks.

        Collective over ``world``. With ``share_node_memory=False``, or when nodes have unequal numbers of ranks (said
        on rank 0), every rank is its own node and all ranks are peers. ``ranks_per_node=k`` simulates smaller nodes.

        Raises
        ------
        GridError
            If ``ranks_per_node`` is not a positive integer.
        """
        if ranks_per_node is not None and (not isinstance(ranks_per_node, int) or ranks_per_node < 1):
            raise GridError(f"ranks_per_node must be a positive integer or None, got {ranks_per_node!r}")
        alone = tuple((rank,) for rank in range(world.size))
        if not share_node_memory:
            return cls._build(world, world.split(world.rank, name="node"), alone)
        node = world.split_node(ranks_per_node, name="node")
        nodes = cls._find_nodes(world, node)
        if len({len(ranks) for ranks in nodes}) == 1:
            return cls._build(world, node, nodes)
        node.close()
        if world.rank == 0:
            counts = ", ".join(str(len(ranks)) for ranks in nodes)
            print(
                f"mpizero: nodes have {counts} ranks; memory is shared only where all nodes have the same number, "
                "so every rank keeps its own copy",
                file=sys.stderr,
            )
        return cls._build(world, world.split(world.rank, name="node"), alone)

    @staticmethod
    def _find_nodes(world: Communicator, node: Communicator) -> tuple[tuple[int, ...], ...]:
        leaders = world.allgather_object(node.broadcast_object(world.rank), tag="nodes")
        return tuple(tuple(r for r in range(world.size) if leaders[r] == lead) for lead in sorted(set(leaders)))

    @classmethod
    def _build(cls, world: Communicator, node: Communicator, nodes: tuple[tuple[int, ...], ...]) -> ProcessGrid:
        order = [rank for ranks in nodes for rank in ranks]
        position = [0] * world.size
        for place, rank in enumerate(order):
            position[rank] = place
        data = world.split(0, name="data")
        peers = world.split(node.rank, key=position[world.rank], name="peers")
        return cls(world, data, node, peers, nodes, tuple(position))

    @property
    def order(self) -> tuple[int, ...]:
        """The data ranks, node after node: the order in which grains are dealt."""
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
        """Number of ranks of every node."""
        return tuple(len(ranks) for ranks in self.nodes)

    @property
    def local_size(self) -> int:
        """Number of ranks on each node."""
        return self.node.size

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to others through the grid's communicators."""
        return sum(c.counters.bytes_sent for c in (self.world, self.data, self.node, self.peers))

    def close(self) -> None:
        """Free the groups, not ``world``. Collective over ``world``."""
        for communicator in (self.peers, self.node, self.data):
            communicator.close()

    def __enter__(self) -> Self:
        """Return itself. Not collective."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the grid unless the block raised. Collective over ``world``."""
        if error is None:
            self.close()
