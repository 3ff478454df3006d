"""The ranks that this process has a communicator with, and what they can tell each other past MPI.

[Note: who meets] A board and doors are made by ranks that make a communicator of a user's anyway, the first of these
ranks, and closed with the last of these ranks, which they close together: so all of them know at any moment whether
they have met. What is split off it meets nobody. Ranks that make no communicator are asked for nothing, so a process
can belong to several such groups, which need not be the same as any other's.
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
    """Ranks that have met.

    Attributes
    ----------
    members : tuple of int
        World ranks, in order.
    control : MPI.Intracomm
        Joins them, in this order; nothing but the guard uses it.
    board : Board
        Of this rank's node.
    elsewhere : Elsewhere or None
        The boards of other nodes; None where it cannot be had.
    """

    members: tuple[int, ...]
    control: Any
    board: StatusBoard
    remote_status: RemoteStatus | None

    def close(self) -> None:
        """Answer no more, and write no more. Not collective."""
        if self.remote_status is not None:
            self.remote_status.close()
        self.board.close()


class PeerGroups:
    """All groups of this process, read and written as one board."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        #: The larger ones last, which is the order in which :meth:`claim` asks.
        self.groups: list[PeerGroup] = []
        #: Of those ranks of this node, too, with which this one has no communicator yet; None where there is none.
        self.startup_board: StartupBoard | None = None

    # ------------------------------------------------------------------ who

    def has_group(self, members: Sequence[int]) -> bool:
        """Tell whether just these ranks have met, which is the same on all of them. Not collective."""
        return tuple(sorted(members)) in (group.members for group in self.groups)

    def add_group(
        self, comm: Any, members: Sequence[int], host: str, warn_once: Callable[[BaseException], None]
    ) -> None:
        """Open board and doors for the ranks of ``comm``, an mpi4py communicator. Collective over it.

        What cannot be had on a rank is missing there, with a complaint; the others do not wait for it.
        """
        ranks = tuple(sorted(members))
        control = comm.Split(0, self.rank)
        ask = control.allgather
        board = make_on_all(ask, lambda told: open_status_board(self.rank, ranks, host, told), warn_once)
        board = board or StatusBoard((self.rank,), self.rank, None)
        remote_status = make_on_all(ask, lambda told: RemoteStatus(board, host, told), warn_once)
        self.groups = sorted([*self.groups, PeerGroup(ranks, control, board, remote_status)], key=_size)

    def remove_group(self, members: Sequence[int], *, free: bool) -> None:
        """Close what ``members``, who have met, have opened. Collective over them if ``free``: if MPI lives."""
        ranks = tuple(sorted(members))
        for group in [group for group in self.groups if group.members == ranks]:
            self.groups = [other for other in self.groups if other is not group]
            group.close()
            if free:
                group.control.Free()

    @property
    def members(self) -> tuple[int, ...]:
        """All world ranks that this one has met, without itself."""
        return tuple(sorted({rank for group in self.groups for rank in group.members} - {self.rank}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world ranks whose slots can be read here."""
        return tuple(sorted({rank for group in self.groups for rank in group.board.ranks}))

    @property
    def leads(self) -> bool:
        """True where this node has the lowest rank of each group."""
        return all(group.members[0] in group.board.ranks for group in self.groups)

    # ------------------------------------------------------------------ boards

    def write(self, slot: Slot) -> None:
        """Replace this rank's slot. Not collective; one thread at a time."""
        if self.startup_board is not None:
            self.startup_board.write(slot)
        for group in self.groups:
            group.board.write(slot)

    def read(self) -> dict[int, Slot]:
        """Return the last slot of every rank of this node that has written one. Not collective."""
        return {rank: slot for group in self.groups for rank, slot in group.board.read().items()}

    def read_startup_board(self) -> dict[int, Slot]:
        """Return the last slots of other ranks that are on the roll. Not collective."""
        return {} if self.startup_board is None else self.startup_board.read()

    def read_one(self, rank: int) -> Slot | None:
        """Return the last slot of one of :attr:`ranks`; None if it has written none. Not collective."""
        return next((g.board.read_one(rank) for g in self.groups if rank in g.board.ranks), None)

    def read_all(self, *, rarely: bool = False) -> dict[int, Slot]:
        """Return every slot that can be had; ``rarely`` asks other nodes ever more seldom. Not collective."""
        found: dict[int, Slot] = {}
        for group in self.groups:
            if group.remote_status is not None and set(group.members).difference(group.board.ranks):
                found |= group.remote_status.read_rarely() if rarely else group.remote_status.read()
        return found | self.read()

    def request_records(self, key: str) -> None:
        """Ask the ranks of this node for their calls of the communicator ``key``. Not collective."""
        for group in self.groups:
            group.board.request_records(key)

    def requested_keys(self) -> list[str]:
        """Return what was asked for last. Not collective."""
        return sorted({key for group in self.groups if (key := group.board.requested_key())})

    def claim(self) -> bool:
        """Tell whether this rank is the first of its node to ask; larger groups decide. Not collective."""
        if not self.groups and self.startup_board is not None:
            return self.startup_board.claim()
        return all(group.board.claim() for group in self.groups)

    def close(self) -> None:
        """Answer no more, and strike this rank off the roll. Not collective."""
        for group in self.groups:
            group.close()
        self.close_startup_board()

    def close_startup_board(self, *, all_met: bool = False) -> None:
        """Close the roll; when all ranks have met, or the job ends, nobody needs it any more. Not collective."""
        startup_board, self.startup_board = self.startup_board, None
        if startup_board is not None:
            startup_board.close(remove=all_met)


def _size(group: PeerGroup) -> tuple[int, tuple[int, ...]]:
    return len(group.members), group.members


def make_on_all(
    allgather: Callable[[Any], list[Any]],
    make: Callable[[Callable[[Any], list[Any]]], T],
    warn_once: Callable[[BaseException], None],
) -> T | None:
    """Return ``make(allgather)``, or None on a rank where that raises, with a complaint; nobody waits for it.

    Collective over the ranks of ``allgather`` (picklable object -> list of every rank's): a rank whose ``make`` has
    ended answers the others' calls with None until all have ended.
    """
    result: T | None = None
    alone = False

    def ask(value: Any) -> list[Any]:
        nonlocal alone
        told = allgather((True, value))
        alone |= not all(busy for busy, _ in told)
        return [value for _, value in told]

    try:
        result = make(ask)
    except Exception as error:
        if not alone:  # else what others lack is missing here
            warn_once(error)
    while any(busy for busy, _ in allgather((False, None))):
        pass
    return result
