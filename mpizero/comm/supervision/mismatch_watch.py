"""Compare the calls of the ranks of a node in the background, and end the job if they differ."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpizero.comm.recording.call_trace import CallRecord, CallTrace
from mpizero.comm.recording.mismatch import mismatch
from mpizero.comm.recording.registry import CommunicatorRegistry
from mpizero.comm.status.peer_groups import PeerGroups
from mpizero.comm.status.status_board import Slot
from mpizero.comm.supervision.heartbeat import Heartbeat
from mpizero.errors import CollectiveMismatch

#: Seconds in a call after which a rank waits. At each tick it compares with a few other ranks of its node, in turn, and
#: with more if it waits. If it compared with all, the cost of a node would grow with the square of its ranks.
_PATIENCE = 0.2
_RUNNING, _WAITING = 4, 8
#: Seconds for the others to write their calls.
_ANSWER = 1.0


class MismatchWatch:
    """Compare this rank's calls with those of the other ranks of its node, in the heartbeat's thread.

    Parameters
    ----------
    heartbeat : Heartbeat
        Provides the status boards and the registry of communicators. The caller adds :meth:`look` to its listeners.
    end : callable
        Ends the job because of an error; does not return.
    """

    def __init__(self, heartbeat: Heartbeat, end: Callable[[CollectiveMismatch], None]) -> None:
        self._heartbeat = heartbeat
        self._peers: PeerGroups = heartbeat.peers
        self._register: CommunicatorRegistry = heartbeat.register
        self._end = end
        self._reported: set[str] = set()
        self._next = -1

    def look(self, slot: Slot) -> None:
        """End the job if a rank of this node has made different calls; ``slot`` is this rank's current status slot."""
        waits = any(call[5] >= _PATIENCE for call in slot["calls"])
        if (key := self._differing(_WAITING if waits else _RUNNING)) and (error := self._explain(key)):
            self._end(error)

    def explain(self, trace: CallTrace) -> CollectiveMismatch | None:
        """Return the error that says how the ranks' calls on the communicator of ``trace`` differ.

        Returns None if the calls are the same or the communicator is not open. The caller raises the error, so
        :meth:`look` no longer ends the job for this communicator.
        """
        entry = next((entry for entry in self._register.live if entry.trace is trace), None)
        error = None if entry is None else self._explain(entry.key)
        if entry is not None and error is not None:
            self._reported.add(entry.key)
        return error

    def search(self, seconds: float) -> CollectiveMismatch | None:
        """Look for different calls for up to ``seconds``, because other ranks may still write their calls.

        Returns the error that says how they differ; None if no difference is found.
        """
        self._heartbeat.beat()
        limit = time.monotonic() + seconds
        while not (key := self._differing(None)) and time.monotonic() < limit:
            time.sleep(0.01)
        return self._explain(key) if key else None

    def compare_at_exit(self) -> CollectiveMismatch | None:
        """Compare this rank's calls, at the end of its program, with the last known calls of the node's other ranks.

        Returns the error that says how they differ; None if no difference is found.
        """
        key = self._differing(None)
        return self._explain(key) if key else None

    def ignore(self, trace: CallTrace) -> None:
        """Stop reporting mismatches on the communicator of ``trace`` and its subgroups: the caller raises an error."""
        self._reported.update(entry.key for entry in self._register.inside(trace))

    def _differing(self, limit: int | None) -> str:
        """Return the key of a communicator on which another rank of the node has made different calls; "" if none.

        With ``limit`` only so many of the other ranks are compared, different ones at each call; the first are those
        after this rank, so that together the ranks of a node compare with all of them in every tick.
        """
        others = [rank for rank in self._peers.ranks if rank != self._peers.rank]
        if limit is not None and len(others) > limit:
            if self._next < 0:
                self._next = sum(rank < self._peers.rank for rank in others)
            others, self._next = (others[self._next :] + others)[:limit], (self._next + limit) % len(others)
        mine = {entry.key: entry.trace for entry in (*self._register.live, *self._register.closed.values())}
        for rank in others:
            slot = self._peers.read_one(rank)
            for key, (started, number) in (slot or {}).get("marks", {}).items():
                if key in mine and key not in self._reported and mine[key].number_at(started) not in (None, number):
                    return str(key)
        return ""

    def _explain(self, key: str) -> CollectiveMismatch | None:
        """Request the last calls on the communicator with this key from all ranks of the node, and compare them.

        Returns the error that says how they differ; None if no difference is found.
        """
        entry = self._register.find(key)
        if entry is None:
            return None
        expected = set(entry.members).intersection(self._peers.ranks)
        self._peers.request_records(key)
        self._heartbeat.beat()
        limit = time.monotonic() + _ANSWER
        while True:
            slots = self._peers.read()
            shown = {rank: slot["records"][key] for rank, slot in slots.items() if key in slot.get("records", {})}
            if expected.issubset(shown) or time.monotonic() > limit:
                return mismatch(
                    entry.trace.name, {rank: [CallRecord(*r) for r in rows] for rank, rows in shown.items()}
                )
            time.sleep(0.01)
