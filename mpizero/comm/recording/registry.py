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
    """Describe a communicator of this process: its trace, its world ranks (``members``), its key and its weight.

    The key identifies the communicator, and is the same on all its ranks. It is made of the world ranks and of an
    ordinal among the communicators of the same ranks, because ranks make their common communicators in the same order.
    Each rank has its own ``weight``: the weights of all ranks of a communicator add up to 0 modulo :data:`MODULUS`, see
    [Note: one sum].
    """

    trace: CallTrace
    members: tuple[int, ...]
    key: str
    weight: int = 0


@dataclass
class CommunicatorRegistry:
    """List all communicators of this process, and the functions that free resources which an error has left open.

    Each communicator is identified by a key, a string that is the same on all its ranks.
    """

    live: list[CommunicatorEntry] = field(default_factory=list)
    #: The last closed communicators by key; other ranks may still wait in calls of them.
    closed: dict[str, CommunicatorEntry] = field(default_factory=dict)
    #: Functions that free what an error has left open, each with its communicator; see :meth:`run_deferred_closes`.
    left: list[tuple[CommunicatorEntry, Callable[[], None]]] = field(default_factory=list)
    _ordinals: dict[tuple[int, ...], int] = field(default_factory=dict)
    _inside: dict[CallTrace, list[CommunicatorEntry]] = field(default_factory=dict)
    _terms: dict[CallTrace, list[tuple[int, CallTrace]]] = field(default_factory=dict)

    def add(self, trace: CallTrace, members: Sequence[int], place: int = 0) -> CommunicatorEntry:
        """Add the communicator of ``trace``, which joins the world ranks ``members``; return its entry. Not collective.

        ``place`` is the number of this rank in the communicator.

        Raises
        ------
        StateError
            If :data:`MOST_LIVE` communicators are open, because MPI may not be able to make another one.
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
        """Move the communicator of ``trace`` from the open communicators to the closed ones. Not collective."""
        for entry in [entry for entry in self.live if entry.trace is trace]:
            self.live.remove(entry)
            self.closed[entry.key] = entry
            if len(self.closed) > _CLOSED:
                del self.closed[next(iter(self.closed))]
        self._inside.clear()
        self._terms.clear()

    def defer_close(self, trace: CallTrace, close: Callable[[], None]) -> None:
        """Store ``close``, a function that frees what an error has left open, for :meth:`run_deferred_closes`.

        Not collective; ``close`` itself is collective over the communicator of ``trace``.
        """
        self.left += [(entry, close) for entry in self.live if entry.trace is trace]

    def run_deferred_closes(self, trace: CallTrace, allgather: Callable[[Any], list[Any]]) -> None:
        """Call the functions that every rank of the communicator of ``trace`` has stored. Collective over these ranks.

        ``allgather`` takes an object and returns the list of all these ranks' objects.

        [Note: deferred closes] When a rank leaves a model because of an error, it does not know whether the other ranks
        fail too. Closing the model is collective, so it is deferred. When the same ranks next make a model together,
        they compare the resources that each has left open. A resource that all ranks have left open, after the same
        calls, is closed. The others stay open, because their ranks have made different calls.
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
        """Return the number of collectives begun on each communicator, by its key.

        The open communicators come first, the newest before the older ones; the closed ones come last.
        """
        return {entry.key: entry.trace.started for entry in (*reversed(self.live), *self.closed.values())}

    def marks(self) -> dict[str, tuple[int, int]]:
        """Return the number of collectives begun on each communicator and the hash of them all, by its key.

        The order is the same as in :meth:`counts`.
        """
        entries = (*reversed(tuple(self.live)), *tuple(self.closed.values()))
        return {entry.key: entry.trace.last() for entry in entries}

    def find(self, key: str) -> CommunicatorEntry | None:
        """Return the entry of the open or closed communicator with this key; None if there is none."""
        return next((entry for entry in (*self.live, *self.closed.values()) if entry.key == key), None)

    def inside(self, trace: CallTrace) -> list[CommunicatorEntry]:
        """Return the open communicators of two or more ranks that lie inside the communicator of ``trace``.

        That is so if all their ranks are ranks of that communicator; the communicator itself is included.
        """
        if trace not in self._inside:
            whole = next((set(entry.members) for entry in self.live if entry.trace is trace), set[int]())
            entries = [e for e in self.live if len(e.members) > 1 and whole.issuperset(e.members)]
            self._inside[trace] = entries
        return self._inside[trace]

    def mismatch_term(self, trace: CallTrace) -> int:
        """Return this rank's number for the check of calls: its sum over ranks is 0 mod ``MODULUS`` if calls match.

        Not collective.

        [Note: one sum] One number from each rank is enough to compare the calls of all communicators among the ranks of
        the communicator of ``trace``. For each of its communicators, a rank multiplies the hash of its calls by its
        weight in that communicator; it adds the products. The weights of all ranks of a communicator add up to 0. So
        equal hashes cancel in the sum over the ranks, modulo :data:`MODULUS`. Different hashes do not cancel, except
        with a probability of 1 / MODULUS.
        """
        terms = self._terms.get(trace)
        if terms is None:
            terms = self._terms[trace] = [(entry.weight, entry.trace) for entry in self.inside(trace)]
        return weighted_sum(terms) % MODULUS


def _weight(key: str, place: int, size: int) -> int:
    if place:
        return int.from_bytes(blake2b(f"{key}/{place}".encode(), digest_size=8).digest(), "little") % MODULUS
    return -sum(_weight(key, other, size) for other in range(1, size)) % MODULUS
