"""Decide whether the other ranks can go on without a rank that has reached the end of its program.

[Note: who may go on] While this rank waits at its end, the others may work for as long as they like: pack files, run
other programs, train with one another. The job is ended only for a rank that cannot go on without this one: it waits in
a collective that takes both, or is in a step that takes both; or it waits for a message, and no rank of the job works
any more. A rank whose slot cannot be read, since its node does not reply, counts as working.
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
from mpizero.comm.status.startup_board import is_working
from mpizero.comm.status.status_board import Slot

#: Seconds that others must have waited for this rank before its exit counts as early.
BLOCKED = 1.0
#: Seconds after which ranks that all wait for messages count as stuck.
PATIENCE = 120.0
#: Seconds for the others to end too, after this rank has requested an exit status that is not 0.
_ALONE = 2.0
#: Seconds between two looks, and the most that one wait counts: this process may have been stopped in it.
_LOOK, _COUNTED = 0.1, 0.5
#: Operations in which a rank waits for one message.
_MESSAGES = ("isend", "irecv")


def waits_for_this_rank(register: CommunicatorRegistry, other: int, slot: Slot) -> str:
    """Describe what ``other`` waits for, "" if it does not wait for this rank.

    Not collective. ``register`` is this rank's, ``slot`` what the other has written last.
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
    """Wait at the end of this rank's program for the others to end, and end the job where they cannot.

    Parameters
    ----------
    peers, register
        Of this process.
    status : object
        Exit status that the program has requested by ``sys.exit``; 0 and None are success.
    patience : float
        See :data:`PATIENCE`.
    end : callable
        Ends the job for the reason that it is given.
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
        """End the job if the others cannot end without this rank; return False to wait on. Not collective.

        ``waited`` are the seconds since this rank's end.
        """
        if waited - self._looked >= _LOOK:
            self._looked = waited
            if reason := self.reason_to_end(waited):
                self._end(reason)
        return False

    def reason_to_end(self, waited: float) -> str:
        """Return why the others cannot end without this rank, "" if they can. Not collective."""
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
        """Wait while ranks of this node work that have no communicator with this one. Not collective."""
        begun = monotonic()
        while any(map(is_working, self._peers.read_startup_board().values())):
            self.look(monotonic() - begun)
            time.sleep(_LOOK)

    def _awaits(self, other: int, slot: Slot) -> str:
        """Describe the communicator with this rank that ``other`` is making, "" if there is none."""
        known = self._register.counts()
        making, own = slot.get("making", {}), self._peers.rank
        for key, name, _, operation, _, since in slot["calls"]:
            lasts = operation == MAKING and since >= BLOCKED
            if lasts and key not in known and any(first <= own <= last for first, last in making[key]):
                return f"rank {other} is {MAKING} {name!r} with it at {slot['place']}"
        return ""

    def _standstill(self, slots: Mapping[int, Slot]) -> str:
        """Describe ranks that wait for messages, if all ranks that could send them wait too or have ended."""
        waiting = {rank: members for rank, slot in slots.items() if (members := self._messages_of(slot))}
        idle = {self._peers.rank, *waiting, *(rank for rank, slot in slots.items() if slot["state"] == "leaving")}
        if not waiting or not idle.issuperset(*waiting.values()):
            return ""
        rank = min(waiting)
        return f"rank {rank} waits for a message at {slots[rank]['place']}, and nobody is at work any more"

    def _messages_of(self, slot: Slot) -> tuple[int, ...]:
        """Return the ranks of the communicator in which a rank has long waited for a message; () if it does not."""
        for key, _, _, operation, _, since in slot["calls"]:
            if operation in _MESSAGES and since > self._patience and (entry := self._register.find(key)):
                return entry.members
        return ()


def agree_minimum(mpi: Any, controls: Sequence[Any], value: int, give_up: Callable[[float], bool]) -> int | None:
    """Return the least ``value`` of all ranks of ``controls``, mpi4py communicators; None if ``give_up`` ends the wait.

    Collective over each of them. ``give_up`` is called with the seconds waited, and returns whether to stop waiting.
    """
    send, recv = np.array([value]), np.empty((len(controls), 1), np.int64)
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
    return int(recv.min())
