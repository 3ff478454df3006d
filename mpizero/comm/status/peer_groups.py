"""Keep the groups of ranks that share a communicator with this process, and read and write their status boards.

[Note: peer groups] Ranks that make a communicator from one of the user's make a peer group with it: a status board on
each node, and status servers. The last communicator of the same ranks closes the group; both are collective, so all
ranks of a group know at any moment that it exists. Communicators that are split off make no group. Ranks without a
communicator take no part, so a process can belong to several groups, and other processes to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mpizero.comm.status.remote_status import RemoteStatus
from mpizero.comm.status.startup_board import StartupBoard
from mpizero.comm.status.status_board import Slot, StatusBoard, open_status_board

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PeerGroup:
    """Hold what a group of ranks has opened to see each other's status.

    Attributes
    ----------
    members : tuple of int
        World ranks, in order.
    control : MPI.Intracomm
        Joins them, in this order; only the guard uses it.
    status_board : StatusBoard
        The status board of this rank's node.
    remote_status : RemoteStatus or None
        Reads those of other nodes; None where it could not be opened.
    """

    members: tuple[int, ...]
    control: Any
    status_board: StatusBoard
    remote_status: RemoteStatus | None

    def close(self) -> None:
        """Stop serving, and close the status board. Not collective."""
        if self.remote_status is not None:
            self.remote_status.close()
        self.status_board.close()


class PeerGroups:
    """Read and write the status boards of all groups of this process as one."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        #: In increasing size, the order in which :meth:`claim` asks them.
        self.groups: list[PeerGroup] = []
        #: Shows the ranks of this node with which this one has no communicator, too; None where there is none.
        self.startup_board: StartupBoard | None = None

    # ------------------------------------------------------------------ groups

    def has_group(self, members: Sequence[int]) -> bool:
        """Tell whether there is a group of exactly these ranks; they all know the same. Not collective."""
        return tuple(sorted(members)) in (group.members for group in self.groups)

    def add_group(
        self, comm: Any, members: Sequence[int], host: str, warn_once: Callable[[BaseException], None]
    ) -> None:
        """Open status board and servers for the ranks of ``comm``, an mpi4py communicator. Collective over it.

        A rank on which something fails goes on without it, and warns; the others do not wait for it.
        """
        ranks = tuple(sorted(members))
        control = comm.Split(0, self.rank)
        ask = control.allgather
        status_board = make_on_all(ask, lambda gather: open_status_board(self.rank, ranks, host, gather), warn_once)
        status_board = status_board or StatusBoard((self.rank,), self.rank, None)
        remote_status = make_on_all(ask, lambda gather: RemoteStatus(status_board, host, gather), warn_once)
        self.groups = sorted([*self.groups, PeerGroup(ranks, control, status_board, remote_status)], key=_size)

    def remove_group(self, members: Sequence[int], *, free: bool) -> None:
        """Close the group of ``members``. Collective over them if ``free``, which says that MPI still runs."""
        ranks = tuple(sorted(members))
        for group in [group for group in self.groups if group.members == ranks]:
            self.groups = [other for other in self.groups if other is not group]
            group.close()
            if free:
                group.control.Free()

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks of all groups, without this one."""
        return tuple(sorted({rank for group in self.groups for rank in group.members} - {self.rank}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks whose slots can be read on this node."""
        return tuple(sorted({rank for group in self.groups for rank in group.status_board.ranks}))

    @property
    def leads(self) -> bool:
        """True where this node has the lowest rank of each group."""
        return all(group.members[0] in group.status_board.ranks for group in self.groups)

    # ------------------------------------------------------------------ status boards

    def write(self, slot: Slot) -> None:
        """Replace this rank's slot. Not collective; one thread at a time."""
        if self.startup_board is not None:
            self.startup_board.write(slot)
        for group in self.groups:
            group.status_board.write(slot)

    def read(self) -> dict[int, Slot]:
        """Return the last slot of every rank of this node that has written one. Not collective."""
        return {rank: slot for group in self.groups for rank, slot in group.status_board.read().items()}

    def read_startup_board(self) -> dict[int, Slot]:
        """Return the last slots of other ranks on the startup board. Not collective."""
        return {} if self.startup_board is None else self.startup_board.read()

    def read_one(self, rank: int) -> Slot | None:
        """Return the last slot of one of :attr:`ranks`; None if it has written none. Not collective."""
        return next((g.status_board.read_one(rank) for g in self.groups if rank in g.status_board.ranks), None)

    def read_all(self, *, rarely: bool = False) -> dict[int, Slot]:
        """Return every slot that can be read; with ``rarely`` other nodes are asked after ever longer pauses.

        Not collective.
        """
        found: dict[int, Slot] = {}
        for group in self.groups:
            if group.remote_status is not None and set(group.members).difference(group.status_board.ranks):
                found |= group.remote_status.read_rarely() if rarely else group.remote_status.read()
        return found | self.read()

    def request_records(self, key: str) -> None:
        """Request that the ranks of this node write their calls of the communicator ``key``. Not collective."""
        for group in self.groups:
            group.status_board.request_records(key)

    def requested_keys(self) -> list[str]:
        """Return the keys that were requested last, one for each group. Not collective."""
        return sorted({key for group in self.groups if (key := group.status_board.requested_key())})

    def claim(self) -> bool:
        """Return True on the rank that reports for its node: the first that calls this. Not collective."""
        if not self.groups and self.startup_board is not None:
            return self.startup_board.claim()
        return all(group.status_board.claim() for group in self.groups)

    def close(self) -> None:
        """Close all groups and the startup board. Not collective."""
        for group in self.groups:
            group.close()
        self.close_startup_board()

    def close_startup_board(self, *, all_joined: bool = False) -> None:
        """Close the startup board; it is removed when a communicator joins all ranks (``all_joined``).

        Not collective.
        """
        startup_board, self.startup_board = self.startup_board, None
        if startup_board is not None:
            startup_board.close(remove=all_joined)


def _size(group: PeerGroup) -> tuple[int, tuple[int, ...]]:
    return len(group.members), group.members


def make_on_all(
    allgather: Callable[[Any], list[Any]],
    make: Callable[[Callable[[Any], list[Any]]], T],
    warn_once: Callable[[BaseException], None],
) -> T | None:
    """Return ``make(allgather)``; on a rank where it raises, warn and return None, and let no other rank wait.

    Collective over the ranks of ``allgather`` (picklable object -> list of every rank's): a rank whose ``make`` has
    ended takes part in the others' calls, with None, until all have ended.
    """
    result: T | None = None
    alone = False

    def ask(value: Any) -> list[Any]:
        nonlocal alone
        gathered = allgather((True, value))
        alone |= not all(busy for busy, _ in gathered)
        return [value for _, value in gathered]

    try:
        result = make(ask)
    except Exception as error:
        if not alone:  # else the cause is on another rank, which warns
            warn_once(error)
    while any(busy for busy, _ in allgather((False, None))):
        pass
    return result
