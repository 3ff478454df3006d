"""Keep the communicators of a process under keys that are the same on all of their ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from mpizero.comm.recording.call_trace import MODULUS, CallTrace, weighted_sum
from mpizero.errors import StateError

#: Closed communicators that are remembered.
_CLOSED = 32
#: Communicators that may be open at once. MPICH has 2,048 numbers for communicators and windows, and crashes when they
#: are used up: seen at 1,300 communicators with their models' windows.
MOST_LIVE = 1200


@dataclass(eq=False)
class CommunicatorEntry:
    """Describe a communicator of this process: its trace, its world ranks, and a key that is the same on all of them.

    Communicators of the same ranks are made in the same order on each of them, so (members, ordinal) names one.
    ``weight`` is this rank's: the weights of all members add up to 0, see :meth:`CommunicatorRegistry.mismatch_term`.
    """

    trace: CallTrace
    members: tuple[int, ...]
    key: str
    weight: int = 0


@dataclass
class CommunicatorRegistry:
    """Keep all communicators of this process, and what errors have left open in them."""

    live: list[CommunicatorEntry] = field(default_factory=list)
    #: The last closed communicators: other ranks may still wait in them.
    closed: dict[str, CommunicatorEntry] = field(default_factory=dict)
    #: What errors have left open, with the communicator that it belongs to; see :meth:`run_deferred_closes`.
    left: list[tuple[CommunicatorEntry, Callable[[], None]]] = field(default_factory=list)
    _ordinals: dict[tuple[int, ...], int] = field(default_factory=dict)
    _inside: dict[CallTrace, list[CommunicatorEntry]] = field(default_factory=dict)
    _terms: dict[CallTrace, list[tuple[int, CallTrace]]] = field(default_factory=dict)

    def add(self, trace: CallTrace, members: Sequence[int], place: int = 0) -> CommunicatorEntry:
        """Add the communicator of ``trace``, in which this rank has number ``place``. Not collective.

        Raises
        ------
        StateError
            If MPI may have no room for another communicator.
        """
        if (live := len(self.live)) >= MOST_LIVE:
            raise StateError(
                f"{live} communicators of mpizero are open in this process, and MPI has room for about 2,000, windows "
                "included: close models and configurations that are no longer needed, by close() or a with statement, "
                "or give all models one configuration"
            )
        group = tuple(members)
        ordinal = self._ordinals[group] = self._ordinals.get(group, -1) + 1
        key = f"{blake2b(repr(group).encode(), digest_size=4).hexdigest()}.{ordinal}"
        entry = CommunicatorEntry(trace, group, key, _weight(key, place, len(group)))
        self.live.append(entry)
        self._inside.clear()
        self._terms.clear()
        return entry

    def remove(self, trace: CallTrace) -> None:
        """Move the communicator of ``trace`` to the closed ones. Not collective."""
        for entry in [entry for entry in self.live if entry.trace is trace]:
            self.live.remove(entry)
            self.closed[entry.key] = entry
            if len(self.closed) > _CLOSED:
                del self.closed[next(iter(self.closed))]
        self._inside.clear()
        self._terms.clear()

    def defer_close(self, trace: CallTrace, close: Callable[[], None]) -> None:
        """Remember what an error leaves open; ``close`` is collective over the ranks of ``trace``. Not collective."""
        self.left += [(entry, close) for entry in self.live if entry.trace is trace]

    def run_deferred_closes(self, trace: CallTrace, allgather: Callable[[Any], list[Any]]) -> None:
        """Close what errors have left open on all ranks of ``trace``, over which it and ``allgather`` are collective.

        [Note: deferred closes] Where a rank leaves a model by an error, it does not know whether the others do too, and
        closing is collective. When the same ranks next make something together, they compare what each has left open.
        What all of them have left open after the same calls is closed. The rest stays open: its ranks are not in step.
        """
        members = next((entry.members for entry in self.live if entry.trace is trace), None)
        mine = [left for left in self.left if left[0].members == members]
        gathered = allgather([(entry.key, self.mismatch_term(entry.trace)) for entry, _ in mine])
        for left, *theirs in zip(mine, *gathered, strict=False):
            in_step = sum(number for _, number in theirs) % MODULUS == 0
            if in_step and all(key == left[0].key for key, _ in theirs) and left in self.left:
                self.left.remove(left)
                left[1]()

    def counts(self) -> dict[str, int]:
        """Return the number of collectives begun by key; open communicators first, the newest first."""
        return {entry.key: entry.trace.started for entry in (*reversed(self.live), *self.closed.values())}

    def marks(self) -> dict[str, tuple[int, int]]:
        """Return the number of collectives begun and their hash by key, in the order of :meth:`counts`."""
        entries = (*reversed(tuple(self.live)), *tuple(self.closed.values()))
        return {entry.key: entry.trace.last() for entry in entries}

    def find(self, key: str) -> CommunicatorEntry | None:
        """Return the communicator, open or closed, with this key."""
        return next((entry for entry in (*self.live, *self.closed.values()) if entry.key == key), None)

    def inside(self, trace: CallTrace) -> list[CommunicatorEntry]:
        """Return the open communicators of several ranks, all of which belong to the communicator of ``trace``."""
        if trace not in self._inside:
            whole = next((set(entry.members) for entry in self.live if entry.trace is trace), set[int]())
            entries = [e for e in self.live if len(e.members) > 1 and whole.issuperset(e.members)]
            self._inside[trace] = entries
        return self._inside[trace]

    def mismatch_term(self, trace: CallTrace) -> int:
        """Return this rank's term of a sum that is 0 while all ranks of ``trace`` have called alike. Not collective.

        [Note: one sum] Ranks belong to different communicators, yet one number a rank is enough to compare them all:
        each communicator's hash is multiplied by its member's weight, and the weights add up to 0. So equal hashes
        cancel in the sum over the ranks, and different ones do not (except by a chance of one in the modulus).
        """
        terms = self._terms.get(trace)
        if terms is None:
            terms = self._terms[trace] = [(entry.weight, entry.trace) for entry in self.inside(trace)]
        return weighted_sum(terms) % MODULUS


def _weight(key: str, place: int, size: int) -> int:
    if place:
        return int.from_bytes(blake2b(f"{key}/{place}".encode(), digest_size=8).digest(), "little") % MODULUS
    return -sum(_weight(key, other, size) for other in range(1, size)) % MODULUS
