"""Decide whether the other ranks can finish without a rank that has reached the end of its program.

[Note: who may go on] While this rank waits at the end of its program, other ranks may work as long as they like: pack
files, run other programs, train with one another. The job is ended only if another rank cannot finish without this one.
That is so if the other rank waits in a collective, or is in a training step, in which this rank must take part too. It
is also so if the other rank waits for a message and no rank of the job is working any more. A rank whose status cannot
be read, because its node does not reply, counts as working.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

import numpy as np

from mpizero.comm.recording.call_trace import MAKING
from mpizero.comm.recording.registry import CommunicatorRegistry
from mpizero.comm.status.peer_groups import PeerGroups
from mpizero.comm.status.status_board import Slot
from mpizero.comm.supervision.arrival import range_of

#: Seconds that others must have waited for this rank before its exit counts as early.
BLOCKED = 1.0
#: Seconds after which ranks that all wait for messages count as stuck.
PATIENCE = 120.0
#: Seconds in which the other ranks must end too when this rank ends with an exit status other than 0.
_ALONE = 2.0
#: Seconds between two checks, and the most seconds that one pause counts, since the process may have been stopped.
_LOOK, _COUNTED = 0.1, 0.5
#: Operations in which a rank waits for one message.
_MESSAGES = ("isend", "irecv")


def waits_for_this_rank(register: CommunicatorRegistry, other: int, slot: Slot) -> str:
    """Return a text that tells in which call rank ``other`` waits for this rank; "" if it does not wait for this rank.

    Not collective. ``register`` lists this rank's communicators; ``slot`` is the last status slot of rank ``other``.
    """
    known = register.counts()
    for key, name, sequence, operation, tag, since in slot["calls"]:
        if since >= BLOCKED and sequence > known.get(key, sequence):
            label = f" {tag!r}" if tag else ""
            return f"rank {other} waits in {operation} #{sequence}{label} of {name!r} at {slot['place']}"
    for key, ended, what, since in slot["joint_tasks"]:
        entry = register.find(key)
        if since >= BLOCKED and entry is not None and entry.trace.joint_tasks <= ended:
            return f"rank {other} is in {what} {ended + 1} of {entry.trace.name!r} at {slot['place']}"
    if slot.get("library") and slot["still"] >= 2 * BLOCKED:
        return f"rank {other} waits in {slot['library']} at {slot['place']}"
    return ""


class EarlyExit:
    """Wait at the end of this rank's program for the other ranks; end the job if they cannot finish without this rank.

    Parameters
    ----------
    peers, register
        The status boards and the communicators of this process.
    status : object
        Exit status that the program has requested by ``sys.exit``; 0 and None are success.
    patience : float
        Seconds after which ranks that all wait for messages count as stuck.
    end : callable
        Ends the job; it is called with the reason.
    """

    def __init__(
        self,
        peers: PeerGroups,
        register: CommunicatorRegistry,
        status: Any,
        patience: float,
        end: Callable[[str], None],
    ) -> None:
        self._peers, self._register, self._status, self._patience = peers, register, status, patience
        self._end = end
        self._looked = 0.0

    def look(self, waited: float) -> bool:
        """End the job if other ranks cannot finish without this one; else return False. Not collective.

        ``waited`` is the number of seconds since this rank has reached the end of its program. The result False makes
        :func:`agree_range`, which calls this as its ``give_up``, go on waiting.
        """
        if waited - self._looked >= _LOOK:
            self._looked = waited
            if reason := self.reason_to_end(waited):
                self._end(reason)
        return False

    def reason_to_end(self, waited: float) -> str:
        """Return why the other ranks cannot finish without this one; "" if they can. Not collective.

        ``waited`` is the number of seconds since this rank has reached the end of its program.
        """
        if waited < BLOCKED:
            return ""
        slots = self._peers.read_all(rarely=True)
        everyone = self._peers.read_startup_board() | slots
        for rank in sorted(set(everyone).difference({self._peers.rank})):
            slot = everyone[rank]
            if reason := waits_for_this_rank(self._register, rank, slot) or self._awaits(rank, slot):
                return reason
        if not self._peers.groups:
            return ""
        if waited > _ALONE and self._status not in (None, 0):
            return f"with exit status {self._status!r}, and the others go on"
        return self._standstill(slots)

    def wait(self) -> None:
        """Wait until no other rank on the startup board of this node is working or starting. Not collective."""
        begun = monotonic()
        while self._peers.others_work(waited := monotonic() - begun):
            self.look(waited)
            time.sleep(_LOOK)

    def _awaits(self, other: int, slot: Slot) -> str:
        """Return a text about a communicator of both ranks that ``other`` waits to make; "" if there is none.

        ``slot`` is the last status slot of rank ``other``.
        """
        known = self._register.counts()
        making, own = slot.get("making", {}), self._peers.rank
        for key, name, _, operation, _, since in slot["calls"]:
            lasts = operation == MAKING and since >= BLOCKED
            if lasts and key not in known and any(first <= own <= last for first, last in making.get(key, ())):
                return f"rank {other} is {MAKING} {name!r} with it at {slot['place']}"
        return ""

    def _standstill(self, slots: Mapping[int, Slot]) -> str:
        """Return a text about a rank that waits for a message which no rank can send any more; "" if there is none.

        That is so if all ranks of its communicator wait for messages too or have reached the end of their programs.
        """
        waiting = {rank: members for rank, slot in slots.items() if (members := self._messages_of(slot))}
        idle = {self._peers.rank, *waiting, *(rank for rank, slot in slots.items() if slot["state"] == "leaving")}
        if not waiting or not idle.issuperset(*waiting.values()):
            return ""
        rank = min(waiting)
        return f"rank {rank} waits for a message at {slots[rank]['place']}, and nobody is at work any more"

    def _messages_of(self, slot: Slot) -> tuple[int, ...]:
        """Return the world ranks of the communicator on which the rank of ``slot`` waits too long for a message.

        Returns () if it does not wait so long for a message.
        """
        for key, _, _, operation, _, since in slot["calls"]:
            if operation in _MESSAGES and since > self._patience and (entry := self._register.find(key)):
                return entry.members
        return ()


def agree_range(
    mpi: Any, controls: Sequence[Any], value: int, give_up: Callable[[float], bool]
) -> tuple[int, int] | None:
    """Return the least and the greatest ``value`` over all ranks of ``controls``; None if waiting was stopped.

    Collective over each of the mpi4py communicators ``controls``. ``mpi`` is the module ``mpi4py.MPI``. ``give_up`` is
    called regularly with the seconds waited so far, and returns True to stop waiting. A rank that makes a communicator
    takes part by :func:`.range_of`, so the message of a rank that fails meanwhile has its counterpart.
    """
    send, recv = range_of(value), np.empty((len(controls), 2), np.int64)
    rows = zip(controls, recv, strict=True)
    requests = [c.Iallreduce([send, mpi.INT64_T], [row, mpi.INT64_T], mpi.MIN) for c, row in rows]
    waited, last, pause = 0.0, monotonic(), 20e-6
    while not mpi.Request.Testall(requests):
        now = monotonic()
        waited, last = waited + min(now - last, _COUNTED), now
        if give_up(waited):
            return None
        time.sleep(pause)
        pause = min(1.5 * pause, 5e-3)
    least, opposite = recv.min(axis=0)
    return int(least), -int(opposite)
