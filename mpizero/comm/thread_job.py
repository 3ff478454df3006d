"""Let the threads of one process wait for one another, so that an event wakes only the threads that wait for it.

[Note: waiting threads] A thread that waits sleeps on a lock of its own. The thread that brings the last thing that it
waits for releases this lock. So a thread is woken once for each time that it waits, however many others wait. Threads
that are woken leave the list of those that wait at once, before they run. So if all threads of a job are in the list,
none of them can go on, and the last one to come raises an error. A thread that fails wakes all; one that ends wakes
those that wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

from mpizero.types import Array


class Arrival:
    """Represent what a thread waits for: data of other ranks, which has come when ``complete`` is true."""

    __slots__ = ("complete", "waiters")

    def __init__(self, complete: bool = False) -> None:
        self.complete = complete
        self.waiters: list[_Waiter] = []

    def missing(self) -> Sequence[int]:
        """Return the ranks of the communicator whose data has not come. The caller holds the job's lock."""
        return ()


class _Waiter:
    """Represent one thread that sleeps: the member that it is, what it waits for, and the lock that wakes it."""

    __slots__ = ("arrival", "member", "ranks", "wakes")

    def __init__(self, member: int, ranks: Mapping[int, int], arrival: Arrival) -> None:
        self.member, self.ranks, self.arrival = member, ranks, arrival
        self.wakes = Lock()
        self.wakes.acquire()


class ThreadJob:
    """Hold the state that all threads of a job share: a lock, the first failure, and which threads wait or have ended.

    The job is the group that :meth:`.InMemoryCommunicator.group` made, with all groups split off from it. A *member* is
    the number of a thread in the first group. ``lock`` is held during changes of the job and of all its groups.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = Lock()
        self.failure: tuple[int, BaseException] | None = None
        self.gone: set[int] = set()
        self._waiting: dict[_Waiter, None] = {}

    def wait(self, arrival: Arrival, member: int, ranks: Mapping[int, int], check: Callable[[Arrival], None]) -> bool:
        """Sleep until ``arrival`` is complete and return True; if all threads would sleep for ever, return False.

        Parameters
        ----------
        arrival : Arrival
            What the calling thread waits for.
        member : int
            The member that the thread is.
        ranks : mapping of int to int
            The members of the communicator in which it waits, with the rank of each.
        check : callable
            Called with ``arrival`` and with the lock held, whenever a thread may have failed or ended; it raises if the
            calling thread must not wait any longer.
        """
        while True:
            with self.lock:
                if arrival.complete:
                    return True
                check(arrival)
                waiter = _Waiter(member, ranks, arrival)
                self._waiting[waiter] = None
                if self._all_wait():
                    del self._waiting[waiter]
                    return False
                arrival.waiters.append(waiter)
            try:
                waiter.wakes.acquire()
            except BaseException:  # Ctrl-C
                with self.lock:
                    self._waiting.pop(waiter, None)
                raise

    def finish(self, arrival: Arrival) -> None:
        """Complete ``arrival``, and wake the threads that wait for it. The caller holds the lock."""
        arrival.complete = True
        for waiter in arrival.waiters:
            self._wake(waiter)
        arrival.waiters.clear()

    def fail(self, member: int, error: BaseException) -> None:
        """Store that a member has failed, unless one has failed before, and wake all threads."""
        with self.lock:
            if self.failure is None:
                self.failure = (member, error)
            for waiter in tuple(self._waiting):
                self._wake(waiter)

    def leave(self, member: int) -> None:
        """Store that a member makes no more calls; wake the threads that wait for it, or one if all wait."""
        with self.lock:
            self.gone.add(member)
            waiting = tuple(self._waiting)
            for waiter in waiting:
                if (rank := waiter.ranks.get(member)) is not None and rank in waiter.arrival.missing():
                    self._wake(waiter)
            if waiting and self._all_wait():
                self._wake(waiting[0])  # which finds out that all wait

    def _all_wait(self) -> bool:
        alive = self.size - len(self.gone)
        return len(self._waiting) >= alive and len({waiter.member for waiter in self._waiting}) >= alive

    def _wake(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            del self._waiting[waiter]
            waiter.wakes.release()


class Exchange(Arrival):
    """Hold one collective in progress: the data that each rank has posted, and whether all have made the same calls.

    ``differs`` is true if the hashes of the ranks' calls are not equal.
    """

    __slots__ = ("_first", "_making", "_posted", "_result", "called", "differs", "payloads")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.called: list[int | None] = [None] * size
        self.payloads: list[Any] = [None] * size
        self.differs = False
        self._posted = self._first = 0
        self._making = Lock()
        self._result: Any = None

    def post(self, rank: int, called: int, payload: Any) -> bool:
        """Add a rank's data and the hash of its calls; return True if it is the last. The caller holds the lock."""
        self.called[rank], self.payloads[rank] = called, payload
        if not self._posted:
            self._first = called
        self.differs |= called != self._first
        self._posted += 1
        return self._posted == len(self.payloads)

    def missing(self) -> Sequence[int]:
        """Return the ranks that have not posted their data. The caller holds the job's lock."""
        return [rank for rank, called in enumerate(self.called) if called is None]

    def once(self, make: Callable[[list[Any]], Any]) -> Any:
        """Return ``make(payloads)``, which is called for the first rank that asks; the others get the same object.

        Called when the exchange is complete. The result must not be None.
        """
        with self._making:
            if self._result is None:
                self._result = make(self.payloads)
        return self._result


class Mailbox:
    """Hold the messages from one sender to one receiver with one tag; the k-th receive gets the k-th message."""

    __slots__ = ("_awaited", "_claimed", "_messages", "_sent", "sender")

    def __init__(self, sender: int) -> None:
        self.sender = sender
        self._messages: dict[int, Array] = {}
        self._awaited: dict[int, Receipt] = {}
        self._sent = self._claimed = 0

    def put(self, message: Array) -> Receipt | None:
        """Add a message; return the receipt of the receive that waits for it, or None. The caller holds the lock."""
        receipt = self._awaited.pop(self._sent, None)
        if receipt is None:
            self._messages[self._sent] = message
        else:
            receipt.message = message
        self._sent += 1
        return receipt

    def claim(self) -> Receipt:
        """Return the receipt of the next receive. The caller holds the lock."""
        receipt = Receipt(self.sender, self._messages.pop(self._claimed, None))
        if not receipt.complete:
            self._awaited[self._claimed] = receipt
        self._claimed += 1
        return receipt


class Receipt(Arrival):
    """Represent one message that a rank receives; ``message`` is None until it has come."""

    __slots__ = ("_sender", "message")

    def __init__(self, sender: int, message: Array | None) -> None:
        super().__init__(complete=message is not None)
        self.message, self._sender = message, sender

    def missing(self) -> Sequence[int]:
        """Return the sender. The caller holds the job's lock."""
        return (self._sender,)
