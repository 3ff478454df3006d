"""List the communicators of a process, under keys that are the same on all ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from mpizero.comm.recording.call_trace import MODULUS, CallTrace, weighted_sum
from mpizero.errors import StateError

#: Number of closed communicators whose traces are kept.
_CLOSED = 32
#: Communicators that may be open at once. MPICH has 2,048 numbers for communicators and windows, and crashes when they
#: are used up: seen at 1,300 communicators with their models' windows.
MOST_LIVE = 1200


@dataclass(eq=False)
class CommunicatorEntry:
    """Describe a communicator of this process: its trace, its world ranks, its key and its weight.

    The key is the same on all its ranks. It is made of the world ranks and of an ordinal, since ranks make their common
    communicators in the same order. ``weight`` belongs to this rank: the weights of all ranks of a communicator add up
    to 0, see [Note: one sum].
    """

    trace: CallTrace
    members: tuple[int, ...]
    key: str
    weight: int = 0


@dataclass
class CommunicatorRegistry:
    """List all communicators of this process, and the resources of them that an error has left open."""

    live: list[CommunicatorEntry] = field(default_factory=list)
    #: The last closed communicators by key; other ranks may still wait in calls of them.
    closed: dict[str, CommunicatorEntry] = field(default_factory=dict)
    #: Functions that free what an error has left open, each with its communicator; see :meth:`run_deferred_closes`.
    left: list[tuple[CommunicatorEntry, Callable[[], None]]] = field(default_factory=list)
    _ordinals: dict[tuple[int, ...], int] = field(default_factory=dict)
    _inside: dict[CallTrace, list[CommunicatorEntry]] = field(default_factory=dict)
    _terms: dict[CallTrace, list[tuple[int, CallTrace]]] = field(default_factory=dict)

    def add(self, trace: CallTrace, members: Sequence[int], place: int = 0) -> CommunicatorEntry:
        """Add the communicator with this trace, in which this rank has number ``place``. Not collective.

        Raises
        ------
        StateError
            If so many communicators are open that MPI may not be able to make another one.
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
        """Move the communicator with this trace to the closed ones. Not collective."""
        for entry in [entry for entry in self.live if entry.trace is trace]:
            self.live.remove(entry)
            self.closed[entry.key] = entry
            if len(self.closed) > _CLOSED:
                del self.closed[next(iter(self.closed))]
        self._inside.clear()
        self._terms.clear()

    def defer_close(self, trace: CallTrace, close: Callable[[], None]) -> None:
        """Store ``close``, which frees what an error left open, collectively over ``trace``'s ranks. Not collective."""
        self.left += [(entry, close) for entry in self.live if entry.trace is trace]

    def run_deferred_closes(self, trace: CallTrace, allgather: Callable[[Any], list[Any]]) -> None:
        """Call the stored functions that all ranks of ``trace`` have stored. Collective over them, as ``allgather`` is.

        [Note: deferred closes] When a rank leaves a model because of an error, it does not know whether the other ranks
        fail too. Closing the model is collective, so it is deferred. When the same ranks next make something together,
        they compare what each has left open. What all of them have left open, after the same calls, is closed. The rest
        stays open, because its ranks have made different calls.
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
        """Return, by key, the number of collectives begun: newest open communicators first, closed ones last."""
        return {entry.key: entry.trace.started for entry in (*reversed(self.live), *self.closed.values())}

    def marks(self) -> dict[str, tuple[int, int]]:
        """Return, by key, the number of collectives begun and their hash, in the order of :meth:`counts`."""
        entries = (*reversed(tuple(self.live)), *tuple(self.closed.values()))
        return {entry.key: entry.trace.last() for entry in entries}

    def find(self, key: str) -> CommunicatorEntry | None:
        """Return the open or closed communicator with this key, or None."""
        return next((entry for entry in (*self.live, *self.closed.values()) if entry.key == key), None)

    def inside(self, trace: CallTrace) -> list[CommunicatorEntry]:
        """Return the open communicators of two or more ranks that are all members of the communicator of ``trace``."""
        if trace not in self._inside:
            whole = next((set(entry.members) for entry in self.live if entry.trace is trace), set[int]())
            entries = [e for e in self.live if len(e.members) > 1 and whole.issuperset(e.members)]
            self._inside[trace] = entries
        return self._inside[trace]

    def mismatch_term(self, trace: CallTrace) -> int:
        """Return this rank's number for the check of calls: over all ranks they add up to 0 if calls match.

        Not collective.

        [Note: one sum] One number from each rank is enough to compare the calls of all communicators among the ranks of
        ``trace``. A rank multiplies the hash of each of its communicators by its weight there, and adds the products.
        The weights of all ranks of a communicator add up to 0. So equal hashes cancel in the sum over the ranks, modulo
        :data:`MODULUS`; different ones do not, except by a chance of one in the modulus.
        """
        terms = self._terms.get(trace)
        if terms is None:
            terms = self._terms[trace] = [(entry.weight, entry.trace) for entry in self.inside(trace)]
        return weighted_sum(terms) % MODULUS


def _weight(key: str, place: int, size: int) -> int:
    if place:
        return int.from_bytes(blake2b(f"{key}/{place}".encode(), digest_size=8).digest(), "little") % MODULUS
    return -sum(_weight(key, other, size) for other in range(1, size)) % MODULUS
