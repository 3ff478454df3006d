"""Ranks that call different collectives are told so at once, with both lines; see trace.py's [Note: contract].

[Note: three comparisons] Once a step the engine adds the contract numbers of all ranks up in a message that it sends
anyway, before it touches a weight. Between, the heartbeat threads of a node look at each other's numbers on the board,
which finds ranks that wait for one another in different calls, and programs without an engine. And with
MPIZERO_DEBUG=collectives every collective is compared before it starts (debug.py). All end in the same error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from mpizero.comm.exits.failure_report import ranks_text
from mpizero.comm.status.peers import Peers
from mpizero.comm.status.status_board import Slot
from mpizero.comm.supervision.heartbeat import Heartbeat
from mpizero.comm.supervision.registry import Register
from mpizero.comm.supervision.trace import REMEMBERED, CallTrace, Record
from mpizero.errors import CollectiveMismatch

#: Seconds in a call after which a rank looks at all others; until then it looks at a few in turn.
_PATIENCE = 0.2
_IN_TURN = 4
#: Seconds for the others to show what they have called.
_ANSWER = 1.0
#: Calls that are shown before and after the first difference.
_BEFORE, _AFTER = 2, 3


def mismatch(name: str, records: Mapping[int, Sequence[Record]]) -> CollectiveMismatch | None:
    """Describe the first collective that ranks have called differently; None if there is none. Not collective.

    Parameters
    ----------
    name : str
        What the communicator is called.
    records : mapping of int to sequence of Record
        The last collectives of each rank, the oldest first.
    """
    rows = {rank: {record.sequence: record for record in found} for rank, found in sorted(records.items())}
    for sequence in sorted({number for row in rows.values() for number in row}):
        here = {rank: row[sequence] for rank, row in rows.items() if sequence in row}
        if len({record.number for record in here.values()}) > 1:
            break
    else:
        return None
    if len({record.what for record in here.values()}) == 1:
        return CollectiveMismatch(
            f"the ranks of {name!r} have called different collectives more than {REMEMBERED} calls ago; "
            f"at #{sequence}, the oldest that is remembered: {_groups(here)}"
        )
    details = [f"  {what}" for what in _around(rows, sequence)]
    return CollectiveMismatch(f"collective #{sequence} of {name!r} differs between ranks: {_groups(here)}", details)


def first_mismatch(told: Sequence[tuple[int, Mapping[str, tuple[str, list[Record]]]]]) -> CollectiveMismatch | None:
    """Return the mismatch of the first communicator that has one. Not collective.

    ``told`` has each rank's number and, by key, the name and the records of its communicators.
    """
    for key in dict.fromkeys(key for _, calls in told for key in calls):
        those = {rank: calls[key] for rank, calls in told if key in calls}
        name = next(iter(those.values()))[0]
        if (found := mismatch(name, {rank: records for rank, (_, records) in those.items()})) is not None:
            return found
    return None


def _around(rows: Mapping[int, Mapping[int, Record]], sequence: int) -> list[str]:
    lines = []
    for number in range(sequence - _BEFORE, sequence + _AFTER + 1):
        here = {rank: row[number] for rank, row in rows.items() if number in row}
        if here:
            mark = "before" if number < sequence else "differs" if number == sequence else "after"
            lines.append(f"{mark:7} #{number}: {_groups(here)}")
    return lines


def _groups(records: Mapping[int, Record]) -> str:
    """Describe a collective, the ranks that called the same at the same line together."""
    calls: dict[str, list[int]] = {}
    for rank, record in records.items():
        calls.setdefault(f"{record.what} at {record.where}", []).append(rank)
    return "; ".join(f"{ranks_text(ranks)}: {call}" for call, ranks in calls.items())


class Lookout:
    """Compares this rank's calls with those of the other ranks of its node, in the heartbeat's thread.

    Parameters
    ----------
    heartbeat : Heartbeat
        Whose boards and register are looked at; the caller adds :meth:`look` to its listeners.
    end : callable
        Ends the job because of an error; does not return.
    """

    def __init__(self, heartbeat: Heartbeat, end: Callable[[CollectiveMismatch], None]) -> None:
        self._heartbeat = heartbeat
        self._peers: Peers = heartbeat.peers
        self._register: Register = heartbeat.register
        self._end = end
        self._told: set[str] = set()
        self._turn = 0

    def look(self, slot: Slot) -> None:
        """End the job if another rank has called something else. Not collective."""
        waits = any(call[5] >= _PATIENCE for call in slot["calls"])
        if (key := self._differing(None if waits else _IN_TURN)) and (error := self._explain(key)):
            self._end(error)

    def explain(self, trace: CallTrace) -> CollectiveMismatch | None:
        """Return how the others' calls of a communicator differ; None if they do not, or do not tell in time.

        Not collective. Whoever gets an error raises it: this rank will not end the job for it.
        """
        entry = next((entry for entry in self._register.live if entry.trace is trace), None)
        error = None if entry is None else self._explain(entry.key)
        if entry is not None and error is not None:
            self._told.add(entry.key)
        return error

    def search(self, seconds: float) -> CollectiveMismatch | None:
        """Look for a difference for some seconds, in which others may still show what they call. Not collective."""
        self._heartbeat.beat()
        limit = time.monotonic() + seconds
        while not (key := self._differing(None)) and time.monotonic() < limit:
            time.sleep(0.01)
        return self._explain(key) if key else None

    def farewell(self) -> CollectiveMismatch | None:
        """Compare all that was ever called with the other ranks, which are leaving too. Not collective."""
        key = self._differing(None)
        return self._explain(key) if key else None

    def forgive(self, trace: CallTrace) -> None:
        """Leave the communicators inside that of ``trace`` alone: their mismatch is being raised. Not collective."""
        self._told.update(entry.key for entry in self._register.inside(trace))

    def _differing(self, limit: int | None) -> str:
        """Return the key of a communicator in which one of ``limit`` other ranks has called something else, or ""."""
        others = [rank for rank in self._peers.ranks if rank != self._peers.rank]
        if limit is not None and len(others) > limit:
            self._turn = (self._turn + limit) % len(others)
            others = (others + others)[self._turn :][:limit]
        mine = {entry.key: entry.trace for entry in (*self._register.live, *self._register.closed.values())}
        for rank in others:
            slot = self._peers.read_one(rank)
            for key, (started, number) in (slot or {}).get("marks", {}).items():
                if key in mine and key not in self._told and mine[key].number_at(started) not in (None, number):
                    return str(key)
        return ""

    def _explain(self, key: str) -> CollectiveMismatch | None:
        """Ask all ranks of the node for their last calls of one communicator, and compare them."""
        entry = self._register.find(key)
        if entry is None:
            return None
        expected = set(entry.members).intersection(self._peers.ranks)
        self._peers.ask(key)
        self._heartbeat.beat()
        limit = time.monotonic() + _ANSWER
        while True:
            slots = self._peers.read()
            shown = {rank: slot["records"][key] for rank, slot in slots.items() if key in slot.get("records", {})}
            if expected.issubset(shown) or time.monotonic() > limit:
                return mismatch(entry.trace.name, {rank: [Record(*r) for r in rows] for rank, rows in shown.items()})
            time.sleep(0.01)
