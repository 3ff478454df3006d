"""Implement :class:`.Communicator` over threads of one process, without MPI: for notebooks, debuggers and tests.

:func:`run_in_threads` calls a function on several ranks that are threads, without a launcher.

[Note: threads] Every collective is one numbered exchange. Each rank posts a copy of its data and goes on; to wait for
the collective means to wait until all ranks have posted their data. Each rank also posts the hash of its calls, so
different calls raise an error on every rank. A failure is stored once for the whole job (the first group and all groups
split off from it). A result that is the same for all ranks, such as a sum, is computed by one thread only.

[Note: waiting threads] A thread that waits sleeps on a lock of its own. The thread that posts the last missing data
releases this lock. So a thread is woken only once per wait, however many other threads wait. A woken thread is removed
from the list of waiting threads immediately, before it runs. So if all threads of a job are in the list, they are in a
deadlock, and the thread that was added last raises an error. A thread that fails wakes all others; a thread that ends
wakes those that wait for its data.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, Self, TypeVar

import numpy as np

from mpizero._util.checks import require, whole
from mpizero.comm.communicator import Communicator, Request, SharedMemory
from mpizero.errors import ArgumentError, CollectiveError, PeerFailure, SharedMemoryError, StateError
from mpizero.guard.call_trace import CallTrace, mismatch
from mpizero.layout import Span
from mpizero.types import Array

T = TypeVar("T")


def run_in_threads(size: int, function: Callable[[InMemoryCommunicator], T]) -> list[T]:
    """Call ``function(comm)`` on ``size`` threads, one for each rank, and return the results as a list in rank order.

    When a thread raises, all other threads raise PeerFailure in their present or next call of ``comm``. This function
    then raises the first error that is not a PeerFailure. An error is also raised if a thread ends while others wait
    for it, or if all threads wait, so a deadlock of the threads ends with an error.

    Raises
    ------
    StateError
        If the operating system does not start ``size`` threads.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.testing import run_in_threads
    >>> def train(comm):
    ...     with mz.ShardingConfig(comm=comm) as config, mz.FSDPModel(mz.nn.MLP(2, [8], 2), config) as model:
    ...         return comm.rank, model.shard_size
    >>> run_in_threads(3, train)
    [(0, 14), (1, 14), (2, 14)]
    """
    if not callable(function):
        raise ArgumentError(f"run_in_threads: function must be one of a communicator, got {function!r}")
    communicators = InMemoryCommunicator.group(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(comm: InMemoryCommunicator) -> None:
        try:
            results[comm.rank] = function(comm)
        except BaseException as error:
            errors.append(error)
            comm.abort(error)
        finally:
            comm.leave()

    threads = [threading.Thread(target=work, args=(c,), name=f"rank {c.rank}", daemon=True) for c in communicators]
    try:
        for number, thread in enumerate(threads):
            _start(thread, number, size)
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C reaches the main thread alone
        communicators[0].abort(error)
        raise
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerFailure)), errors[0])
    return [results[rank] for rank in range(size)]


def _start(thread: threading.Thread, started: int, size: int) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise StateError(
            f"run_in_threads: only {started} of {size} threads have started ({error}): allow this user more processes "
            "and threads (ulimit -u; in a container its pids limit), give each thread a smaller stack (ulimit -s), or "
            "use fewer ranks"
        ) from error


ALIGNMENT = 64
_ADD: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class InMemoryCommunicator(Communicator):
    """Communicate between threads of this process; :meth:`group` makes one communicator for each thread.

    Results have the same bits as over MPI, except sums, which are added in rank order. A thread that fails must call
    :meth:`abort`; ``mpizero.testing.run_in_threads`` and the ``with`` statement of a communicator call it. Every other
    thread of the job then raises PeerFailure in its present or next call.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.InMemoryCommunicator.group(1)[0] as comm:
    ...     comm.rank, comm.size
    (0, 1)
    >>> mz.testing.run_in_threads(3, lambda comm: comm.broadcast_object(comm.rank, root=2))  # makes a group of three
    [2, 2, 2]
    """

    def __init__(self, group: _Group, rank: int, name: str, shares_memory: bool = False) -> None:
        super().__init__(rank, len(group.members), name, shares_memory)
        self._group = group
        self._posted = 0
        self._closed = False
        self._member = group.members[rank]
        group.traces[self._member] = self.trace

    @classmethod
    def group(cls, size: int, name: str = "world") -> list[Self]:
        """Make the ``size`` communicators of a new group, one for each thread. Not collective."""
        require("size", size, whole(1, of=" of ranks"))
        group = _Group(ThreadJob(size), range(size))
        return [cls(group, rank, name) for rank in range(size)]

    # ------------------------------------------------------------------ failures

    def abort(self, error: BaseException | None = None) -> None:
        """Make all threads of the job raise PeerFailure, caused by ``error``, in their present or next calls.

        Not collective.
        """
        self._group.job.fail(self._member, error if error is not None else RuntimeError("abort() was called"))

    def leave(self) -> None:
        """Declare that this thread makes no more calls: threads that wait for it raise PeerFailure. Not collective."""
        self._group.job.leave(self._member)

    def traces(self) -> list[CallTrace]:
        """Return the traces of all ranks of the communicator. Not collective."""
        return list(self._group.traces.copy().values())

    def close(self) -> None:
        """Refuse further calls; a second call does nothing. Collective over the communicator."""
        self._closed = True

    def _leave_failed(self, error: BaseException) -> None:
        if self._group.job.size > 1:
            self.abort(error)
        else:  # nobody waits, and a notebook goes on with what this one was split off from
            self.close()

    def _check_ranks(self, arrival: Arrival | None = None) -> None:
        """Raise PeerFailure if the job has failed, or a rank has ended whose data is missing in ``arrival``."""
        job, members = self._group.job, self._group.members
        if job.failure is not None:
            rank, cause = job.failure
            raise PeerFailure(
                f"[rank {self.rank}] the thread of rank {rank} failed: {type(cause).__name__}: {cause}"
            ) from cause
        if job.gone and arrival is not None and (gone := [r for r in arrival.missing() if members[r] in job.gone]):
            trace = self.trace
            raise PeerFailure(
                f"[rank {self.rank}] waits in {trace.operation} #{trace.sequence} on {self.name!r} for ranks {gone}, "
                "whose threads have ended"
            )

    # ------------------------------------------------------------------ exchange

    def _post(self, payload: Any, finish: Callable[[Exchange], None], describe: Array | None = None) -> _ThreadRequest:
        trace = self.trace
        if self._closed:
            raise self.error(trace.operation, trace.tag, "the communicator is closed", describe)
        group, number = self._group, self._posted
        with group.job.lock:
            self._check_ranks()
            if (exchange := group.exchanges.get(number)) is None:
                exchange = group.exchanges[number] = Exchange(self.size)
            if exchange.post(self.rank, trace.number, payload):
                del group.exchanges[number]
                group.job.finish(exchange)
        self._posted += 1

        def end() -> None:
            if exchange.differs:
                raise self.mismatch()
            finish(exchange)

        return _ThreadRequest(self, exchange, end)

    def mismatch(self) -> CollectiveError:
        """Return the error that names the first collective that the ranks have called differently. Not collective."""
        records = {member: trace.records() for member, trace in self._group.traces.items()}
        return mismatch(self.name, records) or super().mismatch()

    def _swap(self, payload: Any, make: Callable[[list[Any]], Any] = tuple) -> Any:
        """Return ``make(payloads of all ranks in rank order)``, the same object on every rank. Collective."""
        result: list[Any] = []
        self._post(payload, lambda exchange: result.append(exchange.once(make)))._wait()
        return result[0]

    def _barrier(self) -> None:
        self._ibarrier()._wait()

    def _ibarrier(self) -> _ThreadRequest:
        return self._post(None, lambda _: None)

    def _ibroadcast(self, buffer: Array, root: int) -> Request:
        def finish(exchange: Exchange) -> None:
            if self.rank != root:
                buffer.reshape(-1)[:] = exchange.payloads[root]

        payload = buffer.reshape(-1).copy() if self.rank == root else None
        return self._post(payload, finish, buffer)

    def _iallgather(self, send: Array, recv: Array) -> Request:
        def finish(exchange: Exchange) -> None:
            recv.reshape(-1)[:] = exchange.once(np.concatenate)

        return self._post(send.reshape(-1).copy(), finish, send)

    def _allgatherv(self, send: Array, recv: Array, counts: Sequence[int]) -> None:
        self._iallgather(send, recv).wait()

    def _igather_spans(self, send: Array, recv: Array, spans: Sequence[Span]) -> Request:
        def finish(exchange: Exchange) -> None:
            for rank, (span, payload) in enumerate(zip(spans, exchange.payloads, strict=True)):
                if rank != self.rank:
                    recv.reshape(-1)[span.start : span.stop] = payload

        return self._post(send.reshape(-1).copy(), finish, send)

    def _ialltoallv(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Request:
        def finish(exchange: Exchange) -> None:
            arrived = [blocks[self.rank] for blocks in exchange.payloads]
            if (lengths := [b.size for b in arrived]) != [int(c) for c in recv_counts]:
                reason = f"expects blocks of {list(map(int, recv_counts))} elements, is sent {lengths}"
                raise self.error("alltoallv", self.trace.tag, reason, recv)
            np.concatenate(arrived, out=recv.reshape(-1))

        blocks = np.split(send.reshape(-1).copy(), np.cumsum(send_counts)[:-1])
        return self._post(blocks, finish, send)

    def _reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> None:
        start = int(sum(counts[: self.rank]))
        rows = self._swap(send.reshape(-1).copy())
        recv.reshape(-1)[:] = _fold([row[start : start + recv.size] for row in rows], "sum")

    def _iallreduce(self, buffer: Array, op: str) -> Request:
        def finish(exchange: Exchange) -> None:
            buffer.reshape(-1)[:] = exchange.once(lambda rows: _fold(rows, op))

        return self._post(buffer.reshape(-1).copy(), finish, buffer)

    def _allgather_bytes(self, payload: bytes) -> list[bytes]:
        return list(self._swap(payload))

    def _broadcast_bytes(self, payload: bytes | None, root: int) -> bytes:
        return bytes(self._swap(payload)[root])

    # ------------------------------------------------------------------ point to point

    def _isend(self, buffer: Array, peer: int, tag: int) -> Request:
        group, message = self._group, buffer.reshape(-1).copy()
        with group.job.lock:
            self._check_ranks()
            if (receipt := group.box(self.rank, peer, tag).put(message)) is not None:
                group.job.finish(receipt)
        return _ThreadRequest(self, None, _nothing)

    def _irecv(self, buffer: Array, peer: int, tag: int) -> Request:
        group = self._group
        with group.job.lock:
            self._check_ranks()
            receipt = group.box(peer, self.rank, tag).receive()

        def finish() -> None:
            message = receipt.message
            assert message is not None
            if message.size != buffer.size or message.dtype != buffer.dtype:
                reason = f"the message from rank {peer} is {message.dtype}[{message.size}]"
                raise self.error("irecv", tag, reason, buffer)
            buffer.reshape(-1)[:] = message

        return _ThreadRequest(self, receipt, finish)

    # ------------------------------------------------------------------ groups

    def _split(self, color: int, key: int, name: str) -> Communicator:
        return self._regroup(color, key, name, self.shares_memory)

    def _split_node(self, ranks_per_node: int | None, name: str) -> Communicator:
        return self._regroup(self.rank // (ranks_per_node or self.size), self.rank, name, shares_memory=True)

    def _regroup(self, color: int, key: int, name: str, shares_memory: bool) -> Communicator:
        def regrouped(requests: list[tuple[int, int]]) -> dict[int, _Group]:
            members: dict[int, list[int]] = {}
            for index, (chosen, _) in sorted(enumerate(requests), key=lambda request: (request[1][1], request[0])):
                members.setdefault(chosen, []).append(self._group.members[index])
            return {chosen: _Group(self._group.job, those) for chosen, those in members.items()}

        group: _Group = self._swap((color, key), regrouped)[color]
        return type(self)(group, group.ranks[self._member], name, shares_memory)

    def _allocate_shared(self, nbytes: int) -> SharedMemory:
        memory = None
        with suppress(MemoryError):
            memory = np.zeros(nbytes + ALIGNMENT, np.uint8) if self.rank == 0 else None
        gathered = self._swap((nbytes, memory))
        if len(sizes := {size for size, _ in gathered}) > 1:
            raise SharedMemoryError(f"ranks of {self.name!r} ask for windows of {min(sizes)} to {max(sizes)} bytes")
        buffer = gathered[0][1]
        if buffer is None:
            raise SharedMemoryError(f"a window of {nbytes} bytes for {self.name!r} does not fit into this process")
        offset = -buffer.ctypes.data % ALIGNMENT
        return ThreadSharedMemory(buffer[offset : offset + nbytes])


def _fold(rows: Sequence[Array], op: str) -> Array:
    """Combine ``rows``, one array from each rank, by ``op`` in rank order, and return the result."""
    flat = rows[0].copy()
    for row in rows[1:]:
        _ADD[op](flat, row, out=flat)
    return flat


class _Group:
    """Hold the state that the threads of one communicator share: its members, its collectives and its messages."""

    def __init__(self, job: ThreadJob, members: Sequence[int]) -> None:
        self.job = job
        self.members = tuple(members)
        self.ranks = {member: rank for rank, member in enumerate(members)}
        self.exchanges: dict[int, Exchange] = {}
        self.mail: dict[tuple[int, int, int], Mailbox] = {}
        self.traces: dict[int, CallTrace] = {}

    def box(self, sender: int, receiver: int, tag: int) -> Mailbox:
        return self.mail.setdefault((sender, receiver, tag), Mailbox(sender))


class _ThreadRequest(Request):
    """Represent a non-blocking operation, which is complete when ``arrival`` (data that other ranks post) is complete.

    The first :meth:`wait` or :meth:`test` after that calls ``finish``, which writes the result. The operation is
    complete from the start, and ``finish`` is not called, if ``arrival`` is None.
    """

    __slots__ = ("_arrival", "_communicator", "_finish", "_operation", "_sequence", "_tag")

    def __init__(self, communicator: InMemoryCommunicator, arrival: Arrival | None, finish: Callable[[], None]) -> None:
        trace = communicator.trace
        self._communicator = communicator
        self._arrival = arrival
        self._finish = finish
        self._operation, self._tag, self._sequence = trace.operation, trace.tag, trace.sequence

    def wait(self) -> None:
        """Return when the operation has ended on this rank. Not collective; a second call returns immediately."""
        if self._arrival is not None:
            self._communicator._run(self._operation, self._tag, self._sequence, self._wait)

    def _wait(self) -> None:
        arrival, communicator = self._arrival, self._communicator
        if arrival is not None and not arrival.complete:
            group = communicator._group
            if not group.job.wait(arrival, communicator._member, group.ranks, communicator._check_ranks):
                error = communicator.error(self._operation, self._tag, "all threads wait, none can go on")
                communicator.abort(error)
                raise error
        self._end()

    def test(self) -> bool:
        """Make progress and tell whether the operation has ended. Not collective."""
        if self._arrival is not None:
            if not self._arrival.complete:
                with self._communicator._group.job.lock:  # else it may come, and its sender end, during the check
                    if not self._arrival.complete:
                        self._communicator._check_ranks(self._arrival)
                        return False
            self._end()
        return True

    def _end(self) -> None:
        arrival, self._arrival = self._arrival, None  # an exchange holds the data of all ranks
        if arrival is not None:
            finish, self._finish = self._finish, _nothing
            finish()


def _nothing() -> None:
    """Do nothing; set in place of the function ``finish`` of a request that has ended."""


class ThreadSharedMemory(SharedMemory):
    """Provide shared memory for threads: one array that all of them use."""

    def __init__(self, buffer: Array) -> None:
        self.buffer = buffer

    def synchronize(self) -> None:
        """Do nothing: the lock of the next barrier orders memory between threads. Not collective."""

    def close(self) -> None:
        """Release the memory; ``buffer`` becomes an empty array. Collective over the communicator that allocated it."""
        self.buffer = np.empty(0, np.uint8)


class ThreadJob:
    """Hold the state that all threads of a job share: a lock, the first failure, and which threads wait or have ended.

    The job is the group that :meth:`.InMemoryCommunicator.group` made, with all groups split off from it. A *member* is
    the number of a thread in the first group, also in the smaller groups. ``lock`` is held during changes of the job
    and of all its groups.
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
            The data that the calling thread waits for.
        member : int
            Number of the calling thread in the first group.
        ranks : mapping of int to int
            The rank of each member of the communicator in which the thread waits.
        check : callable
            Called with ``arrival`` and with the lock held, whenever a thread may have failed or ended; raises if the
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
        """Mark ``arrival`` (data) as complete, and wake the threads that wait for it. The caller holds the lock."""
        arrival.complete = True
        for waiter in arrival.waiters:
            self._wake(waiter)
        arrival.waiters.clear()

    def fail(self, member: int, error: BaseException) -> None:
        """Store that thread ``member`` failed with ``error``, unless one has failed before, and wake all threads."""
        with self.lock:
            if self.failure is None:
                self.failure = (member, error)
            for waiter in tuple(self._waiting):
                self._wake(waiter)

    def leave(self, member: int) -> None:
        """Store that thread ``member`` makes no more calls; wake those that wait for it, or one if all others wait."""
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


class Arrival:
    """Represent data of other ranks that threads wait for; ``complete`` is true when all of it has been posted."""

    __slots__ = ("complete", "waiters")

    def __init__(self, complete: bool = False) -> None:
        self.complete = complete
        self.waiters: list[_Waiter] = []

    def missing(self) -> Sequence[int]:
        """Return the ranks of the communicator whose data is missing. The caller holds the job's lock."""
        return ()


class _Waiter:
    """Represent one sleeping thread: its member number, the data that it waits for, and the lock that wakes it."""

    __slots__ = ("arrival", "member", "ranks", "wakes")

    def __init__(self, member: int, ranks: Mapping[int, int], arrival: Arrival) -> None:
        self.member, self.ranks, self.arrival = member, ranks, arrival
        self.wakes = Lock()
        self.wakes.acquire()


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
        """Add a rank's data and the hash of its calls; return True for the last rank. The caller holds the lock."""
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
        """Return ``make(payloads)``, computed by the first call; later calls return the same object.

        Must be called after the exchange is complete. The result of ``make`` must not be None.
        """
        with self._making:
            if self._result is None:
                self._result = make(self.payloads)
        return self._result


class Mailbox:
    """Hold the messages from one sender to one receiver with one tag; the k-th receive gets the k-th message."""

    __slots__ = ("_awaited", "_messages", "sender")

    def __init__(self, sender: int) -> None:
        self.sender = sender
        self._messages: deque[Array] = deque()
        self._awaited: deque[Receipt] = deque()

    def put(self, message: Array) -> Receipt | None:
        """Add a message; return the :class:`Receipt` that waits for it, or None. The caller holds the job's lock."""
        if not self._awaited:
            self._messages.append(message)
            return None
        receipt = self._awaited.popleft()
        receipt.message = message
        return receipt

    def receive(self) -> Receipt:
        """Return a :class:`Receipt` of the next message, which may not have come. The caller holds the job's lock."""
        receipt = Receipt(self.sender, self._messages.popleft() if self._messages else None)
        if not receipt.complete:
            self._awaited.append(receipt)
        return receipt


class Receipt(Arrival):
    """Represent one message that a rank receives; ``message`` is None until the sender has posted it."""

    __slots__ = ("_sender", "message")

    def __init__(self, sender: int, message: Array | None) -> None:
        super().__init__(complete=message is not None)
        self.message, self._sender = message, sender

    def missing(self) -> Sequence[int]:
        """Return the rank of the sender, as a tuple. The caller holds the job's lock."""
        return (self._sender,)
