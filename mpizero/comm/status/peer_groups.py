"""Read and write the status of all ranks with which this process shares a communicator.

[Note: peer groups] When ranks make an mpizero communicator from one of the user's, they also open a peer group: a
status board on each node, and status servers between nodes. The group is closed with the last communicator of the same
ranks. Opening and closing are collective, so all ranks of a group know at any moment whether it exists. Communicators
that are split off from an mpizero communicator open no group. A process can belong to several groups, and to none if it
has no communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mpizero.comm.status.startup_board import StartupBoard, is_working
from mpizero.comm.status.status_board import Slot, StatusBoard, open_status_board

if TYPE_CHECKING:
    from mpizero.comm.status.remote_status import RemoteStatus

T = TypeVar("T")
#: Seconds for which a rank that ends waits for ranks that have not started yet: one of them may need it.
_STARTING = 3.0


@dataclass(frozen=True, eq=False)
class PeerGroup:
    """Hold the status board and the connections by which the ranks of a group see each other's status.

    Attributes
    ----------
    members : tuple of int
        World ranks of the group, in ascending order.
    control : MPI.Intracomm
        A communicator of these ranks, used only by the supervision of the process.
    status_board : StatusBoard
        The status board of this rank's node.
    remote_status : RemoteStatus or None
        Reads the status boards of other nodes; None if there are none, or it could not be opened.
    """

    members: tuple[int, ...]
    control: Any
    status_board: StatusBoard
    remote_status: RemoteStatus | None

    def close(self) -> None:
        """Stop this rank's status server, and close the status board. Not collective."""
        if self.remote_status is not None:
            self.remote_status.close()
        self.status_board.close()


class PeerGroups:
    """Hold the peer groups of this process, and read and write the status boards of all these groups.

    A status slot is a dictionary that a rank writes about itself; its keys are listed in received_slots.py.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        #: The groups, smallest first, which is the order in which :meth:`claim` asks their status boards.
        self.groups: list[PeerGroup] = []
        #: Status of all ranks of this node, with a common communicator or without; None if it is not open.
        self.startup_board: StartupBoard | None = None

    # ------------------------------------------------------------------ groups

    def has_group(self, members: Sequence[int]) -> bool:
        """Tell whether there is a peer group of exactly these world ranks; they all get the same result.

        Not collective.
        """
        return tuple(sorted(members)) in (group.members for group in self.groups)

    def add_group(
        self,
        comm: Any,
        members: Sequence[int],
        host: str,
        warn_once: Callable[[BaseException], None],
        meet: Callable[[Any], None],
    ) -> None:
        """Open a peer group for the ranks of ``comm``, an mpi4py communicator. Collective over ``comm``.

        ``members`` are the world ranks of ``comm``, and ``host`` is the name of this rank's host. If the status board
        or the status server cannot be opened on a rank, this rank calls ``warn_once`` with the error and goes on
        without it; the other ranks do not wait for this rank. ``meet`` is :meth:`.Waiting.meet`.
        """
        ranks = tuple(sorted(members))
        meet(comm)
        control = comm.Split(0, self.rank)

        def ask(value: Any) -> list[Any]:
            meet(control)
            return list(control.allgather(value))

        hosts = dict(zip(ranks, ask(host), strict=True))
        status_board = make_on_all(ask, lambda gather: open_status_board(self.rank, hosts, gather), warn_once)
        status_board = status_board or StatusBoard((self.rank,), self.rank, None)

        def opened(gather: Callable[[Any], list[Any]]) -> RemoteStatus:
            from mpizero.comm.status.remote_status import RemoteStatus

            return RemoteStatus(status_board, host, gather)

        remote_status = make_on_all(ask, opened, warn_once) if len(set(hosts.values())) > 1 else None
        self.groups = sorted([*self.groups, PeerGroup(ranks, control, status_board, remote_status)], key=_size)

    def remove_group(self, members: Sequence[int], *, free: bool) -> None:
        """Close the peer group of the world ranks ``members``, if there is one.

        With ``free`` its MPI communicator is freed too. Then the call is collective over ``members``, and MPI must not
        have been finalized.
        """
        ranks = tuple(sorted(members))
        for group in [group for group in self.groups if group.members == ranks]:
            self.groups = [other for other in self.groups if other is not group]
            group.close()
            if free:
                group.control.Free()

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks of all peer groups of this process, without this rank."""
        return tuple(sorted({rank for group in self.groups for rank in group.members} - {self.rank}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks on this node whose status slots can be read from a status board."""
        return tuple(sorted({rank for group in self.groups for rank in group.status_board.ranks}))

    @property
    def leads(self) -> bool:
        """True if the lowest rank of every peer group of this process is on this node."""
        return all(group.members[0] in group.status_board.ranks for group in self.groups)

    # ------------------------------------------------------------------ status boards

    def write(self, slot: Slot) -> None:
        """Write the status of this rank to all status boards. Not collective; one thread at a time may call it."""
        if self.startup_board is not None:
            self.startup_board.write(slot)
        for group in self.groups:
            group.status_board.write(slot)

    def read(self) -> dict[int, Slot]:
        """Return the last status slot of each rank of this node that has written one, by rank. Not collective."""
        return {rank: slot for group in self.groups for rank, slot in group.status_board.read().items()}

    def read_startup_board(self) -> dict[int, Slot]:
        """Return the last status slots of other ranks on the startup board, by rank. Not collective."""
        return {} if self.startup_board is None else self.startup_board.read()

    def others_work(self, waited: float) -> bool:
        """Tell whether another rank on the startup board of this node works, or may still be starting. Not collective.

        ``waited`` is the number of seconds since this rank has reached the end of its program. Ranks that have written
        nothing yet may be starting during the first ``_STARTING`` seconds.
        """
        if self.startup_board is None:
            return False
        starting = waited < _STARTING and not self.startup_board.all_started()
        return starting or any(map(is_working, self.startup_board.read().values()))

    def read_one(self, rank: int) -> Slot | None:
        """Return the last status slot of a rank in :attr:`ranks`; None if it has written none. Not collective."""
        return next((g.status_board.read_one(rank) for g in self.groups if rank in g.status_board.ranks), None)

    def read_all(self, *, rarely: bool = False) -> dict[int, Slot]:
        """Return the status slots of all ranks that can be read, also of ranks on other nodes, by rank.

        Not collective. With ``rarely`` other nodes are queried only after a pause, which grows with every query; until
        then their last known slots are returned.
        """
        found: dict[int, Slot] = {}
        for group in self.groups:
            if group.remote_status is not None and set(group.members).difference(group.status_board.ranks):
                found |= group.remote_status.read_rarely() if rarely else group.remote_status.read()
        return found | self.read()

    def request_records(self, key: str) -> None:
        """Ask the ranks of this node to write their last calls on a communicator to the status board. Not collective.

        ``key`` identifies the communicator, see :class:`.CommunicatorEntry`.
        """
        for group in self.groups:
            group.status_board.request_records(key)

    def requested_keys(self) -> list[str]:
        """Return, for each peer group, the key last passed to :meth:`request_records` on any rank of this node.

        Not collective.
        """
        return sorted({key for group in self.groups if (key := group.status_board.requested_key())})

    def claim(self) -> bool:
        """Return True on the first rank of the node that calls this, else False. Not collective.

        The rank that gets True reports why the job ends.
        """
        if not self.groups and self.startup_board is not None:
            return self.startup_board.claim()
        return all(group.status_board.claim() for group in self.groups)

    def close(self) -> None:
        """Close all peer groups and the startup board. Not collective."""
        for group in self.groups:
            group.close()
        self.close_startup_board()

    def close_startup_board(self, *, all_joined: bool = False) -> None:
        """Close the startup board; with ``all_joined`` also remove its file. Not collective.

        ``all_joined`` says that a communicator of all ranks exists, or that the job ends.
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
    """Return ``make(gather)`` on each rank; on a rank where it raises, call ``warn_once(error)`` and return None.

    Collective over the ranks of ``allgather``, which takes a picklable object and returns the list of all ranks'
    objects. ``gather`` is a function like ``allgather``, which ``make`` may call. A rank whose ``make`` has returned or
    raised takes part in the remaining calls of other ranks, with None, so no rank waits for it.
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
