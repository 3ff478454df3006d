"""Implement the interface Communicator over threads of one process, without MPI: for notebooks, debuggers and tests.

[Note: threads] Every collective is one numbered exchange. Each rank posts a copy of its data and goes on; to wait for
the collective means to wait until all ranks have posted their data. Each rank also posts the hash of its calls, so
different calls raise an error on every rank. A failure is stored once for the whole job (the first group and all groups
split off from it) and wakes all waiting threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Condition
from typing import Any, Self

import numpy as np

from mpizero.comm.communicator import Communicator
from mpizero.comm.recording.call_trace import CallTrace
from mpizero.comm.recording.mismatch import mismatch
from mpizero.comm.transport import Request, SharedMemory
from mpizero.errors import CollectiveError, PeerFailure, SharedMemoryError
from mpizero.layout import Span
from mpizero.types import Array
from mpizero.validation import require, whole

ALIGNMENT = 64
_ADD: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class _Job:
    """Hold the state that all threads of a job share: a lock, the first failure, and which threads wait or have ended.

    The job is the group that :meth:`InMemoryCommunicator.group` made, with all groups split off from it. A ``member``
    is the number of a thread in the first group.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = Condition()
        self.failure: tuple[int, BaseException] | None = None
        self.sleeping: dict[int, Callable[[], bool]] = {}
        self.gone: set[int] = set()

    def sleep(self, member: int, ready: Callable[[], bool]) -> bool:
        """Sleep until the shared state changes and return True; if all threads would then sleep for ever, return False.

        The caller holds the lock ``changed``. ``ready`` tells whether the thread ``member``, the caller, could go on.
        """
        self.sleeping[member] = ready
        alive = self.size - len(self.gone)
        if len(self.sleeping) == alive and not any(is_ready() for is_ready in self.sleeping.values()):
            del self.sleeping[member]
            return False
        self.changed.wait()
        del self.sleeping[member]
        return True


class _Exchange:
    """Hold one collective in progress: for each rank the hash of its calls and the data that it posted."""

    def __init__(self, size: int) -> None:
        self.numbers: list[int | None] = [None] * size
        self.payloads: list[Any] = [None] * size
        self.posted = 0
        self.taken = 0


class _Mailbox:
    """Hold the messages from one sender to one receiver with one tag; the k-th receive gets the k-th message."""

    def __init__(self) -> None:
        self.messages: dict[int, Array] = {}
        self.sent = 0
        self.claimed = 0


class _Group:
    """Hold the state that the threads of one communicator share: its members, its collectives and its messages."""

    def __init__(self, job: _Job, members: Sequence[int]) -> None:
        self.job = job
        self.members = tuple(members)
        self.exchanges: dict[int, _Exchange] = {}
        self.mail: dict[tuple[int, int, int], _Mailbox] = {}
        self.traces: dict[int, CallTrace] = {}

    def exchange(self, number: int) -> _Exchange:
        if number not in self.exchanges:
            self.exchanges[number] = _Exchange(len(self.members))
        return self.exchanges[number]


class _ThreadRequest(Request):
    """Represent a non-blocking operation that has ended when ``ready()`` is true; then ``finish`` is called once.

    ``waits_for()`` returns the ranks for whose data the operation still waits.
    """

    __slots__ = ("_communicator", "_finish", "_operation", "_ready", "_sequence", "_tag", "_waits_for")

    def __init__(
        self,
        communicator: InMemoryCommunicator,
        ready: Callable[[], bool],
        finish: Callable[[], None],
        waits_for: Callable[[], Sequence[int]],
    ) -> None:
        trace = communicator.trace
        self._communicator = communicator
        self._ready: Callable[[], bool] = ready
        self._finish: Callable[[], None] | None = finish
        self._waits_for = waits_for
        self._operation, self._tag, self._sequence = trace.operation, trace.tag, trace.sequence

    def wait(self) -> None:
        """Return when the operation has ended on this rank. Not collective; a second call returns at once."""
        if self._finish is not None:
            self._communicator._run(self._operation, self._tag, self._sequence, self._wait)

    def _wait(self) -> None:
        job = self._communicator._group.job
        with job.changed:
            while not self._ready():
                self._communicator._check_peers(self._waits_for())
                if not job.sleep(self._communicator._member, self._ready):
                    error = self._communicator.error(self._operation, self._tag, "all threads wait, none can go on")
                    self._communicator.abort(error)
                    raise error
        self._end()

    def test(self) -> bool:
        """Make progress and tell whether the operation has ended. Not collective."""
        if self._finish is not None:
            with self._communicator._group.job.changed:
                if not self._ready():
                    self._communicator._check_peers(self._waits_for())
                    return False
            self._end()
        return True

    def _end(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class ThreadSharedMemory(SharedMemory):
    """Provide shared memory for threads: one array that all of them use."""

    def __init__(self, buffer: Array) -> None:
        self.buffer = buffer

    def synchronize(self) -> None:
        """Do nothing: the lock of the next barrier orders memory between threads. Not collective."""

    def close(self) -> None:
        """Release the memory; ``buffer`` becomes an empty array. Collective over the communicator that allocated it."""
        self.buffer = np.empty(0, np.uint8)


class InMemoryCommunicator(Communicator):
    """Communicate between threads of this process; :meth:`group` makes one communicator for each thread.

    Results have the same bits as over MPI, except sums, which are added in rank order. A thread that fails must call
    :meth:`abort`; ``mpizero.testing.run_in_threads`` and the ``with`` statement of a communicator do so. Every other
    thread of the job then raises PeerFailure in its present or next call.
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
        group = _Group(_Job(size), range(size))
        return [cls(group, rank, name) for rank in range(size)]

    # ------------------------------------------------------------------ failures

    def abort(self, error: BaseException | None = None) -> None:
        """Make every thread of the job raise PeerFailure, caused by ``error``, in its next call. Not collective."""
        job = self._group.job
        with job.changed:
            if job.failure is None:
                cause = error if error is not None else RuntimeError("abort() was called")
                job.failure = (self._member, cause)
            job.changed.notify_all()

    def leave(self) -> None:
        """Declare that this thread makes no more calls: threads that wait for it raise PeerFailure. Not collective."""
        job = self._group.job
        with job.changed:
            job.gone.add(self._member)
            job.changed.notify_all()

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

    def _check_peers(self, waits_for: Sequence[int] = ()) -> None:
        """Raise PeerFailure if the job has failed or a rank in ``waits_for`` has ended. The caller holds the lock."""
        job, members = self._group.job, self._group.members
        if job.failure is not None:
            rank, cause = job.failure
            raise PeerFailure(
                f"[rank {self.rank}] the thread of rank {rank} failed: {type(cause).__name__}: {cause}"
            ) from cause
        if gone := [r for r in waits_for if members[r] in job.gone]:
            trace = self.trace
            raise PeerFailure(
                f"[rank {self.rank}] waits in {trace.operation} #{trace.sequence} on {self.name!r} for ranks {gone}, "
                "whose threads have ended"
            )

    # ------------------------------------------------------------------ exchange

    def _post(self, payload: Any, finish: Callable[[list[Any]], None], describe: Array | None = None) -> Request:
        trace = self.trace
        if self._closed:
            raise self.error(trace.operation, trace.tag, "the communicator is closed", describe)
        group, number, size, called = self._group, self._posted, self.size, trace.number
        with group.job.changed:
            self._check_peers()
            exchange = group.exchange(number)
            exchange.numbers[self.rank] = called
            exchange.payloads[self.rank] = payload
            exchange.posted += 1
            if exchange.posted == size:
                group.job.changed.notify_all()
        self._posted += 1

        def end() -> None:
            if any(other != called for other in exchange.numbers):
                raise self.mismatch()
            finish(exchange.payloads)
            with group.job.changed:
                exchange.taken += 1
                if exchange.taken == size:
                    del group.exchanges[number]

        return _ThreadRequest(
            self,
            lambda: exchange.posted == size,
            end,
            lambda: [r for r, number in enumerate(exchange.numbers) if number is None],
        )

    def mismatch(self) -> CollectiveError:
        """Return the error that names the first collective that the ranks have called differently. Not collective."""
        records = {member: trace.records() for member, trace in self._group.traces.items()}
        return mismatch(self.name, records) or super().mismatch()

    def _swap(self, payload: Any) -> list[Any]:
        """Return the payloads of all ranks in rank order, by reference, without copies. Collective."""
        result: list[Any] = []
        request = self._post(payload, result.extend)
        assert isinstance(request, _ThreadRequest)
        request._wait()
        return result

    def _barrier(self) -> None:
        self._swap(None)

    def _ibarrier(self) -> Request:
        return self._post(None, lambda _: None)

    def _ibroadcast(self, buffer: Array, root: int) -> Request:
        def finish(payloads: list[Any]) -> None:
            if self.rank != root:
                buffer.reshape(-1)[:] = payloads[root]

        payload = buffer.reshape(-1).copy() if self.rank == root else None
        return self._post(payload, finish, buffer)

    def _iallgather(self, send: Array, recv: Array) -> Request:
        return self._iallgatherv(send, recv, [send.size] * self.size)

    def _iallgatherv(self, send: Array, recv: Array, counts: Sequence[int]) -> Request:
        def finish(payloads: list[Any]) -> None:
            np.concatenate(payloads, out=recv.reshape(-1))

        return self._post(send.reshape(-1).copy(), finish, send)

    def _igather_spans(self, send: Array, recv: Array, spans: Sequence[Span]) -> Request:
        def finish(payloads: list[Any]) -> None:
            for rank, (span, payload) in enumerate(zip(spans, payloads, strict=True)):
                if rank != self.rank:
                    recv.reshape(-1)[span.start : span.stop] = payload

        return self._post(send.reshape(-1).copy(), finish, send)

    def _ialltoallv(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Request:
        def finish(payloads: list[Any]) -> None:
            arrived = [blocks[self.rank] for blocks in payloads]
            if (lengths := [b.size for b in arrived]) != [int(c) for c in recv_counts]:
                reason = f"expects blocks of {list(map(int, recv_counts))} elements, is sent {lengths}"
                raise self.error("alltoallv", self.trace.tag, reason, recv)
            np.concatenate(arrived, out=recv.reshape(-1))

        blocks = np.split(send.reshape(-1).copy(), np.cumsum(send_counts)[:-1])
        return self._post(blocks, finish, send)

    def _reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> None:
        start = int(sum(counts[: self.rank]))
        rows = self._swap(send.reshape(-1).copy())
        _fold([row[start : start + recv.size] for row in rows], recv, "sum")

    def _iallreduce(self, buffer: Array, op: str) -> Request:
        return self._post(buffer.reshape(-1).copy(), lambda rows: _fold(rows, buffer, op), buffer)

    def _allgather_bytes(self, payload: bytes) -> list[bytes]:
        return self._swap(payload)

    def _broadcast_bytes(self, payload: bytes | None, root: int) -> bytes:
        result: bytes = self._swap(payload)[root]
        return result

    # ------------------------------------------------------------------ point to point

    def _isend(self, buffer: Array, peer: int, tag: int) -> Request:
        group = self._group
        with group.job.changed:
            self._check_peers()
            box = group.mail.setdefault((self.rank, peer, tag), _Mailbox())
            box.messages[box.sent] = buffer.reshape(-1).copy()
            box.sent += 1
            group.job.changed.notify_all()
        return _ThreadRequest(self, lambda: True, lambda: None, lambda: ())

    def _irecv(self, buffer: Array, peer: int, tag: int) -> Request:
        group = self._group
        with group.job.changed:
            self._check_peers()
            box = group.mail.setdefault((peer, self.rank, tag), _Mailbox())
            ticket = box.claimed
            box.claimed += 1

        def finish() -> None:
            message = box.messages.pop(ticket)
            if message.size != buffer.size or message.dtype != buffer.dtype:
                reason = f"the message from rank {peer} is {message.dtype}[{message.size}]"
                raise self.error("irecv", tag, reason, buffer)
            buffer.reshape(-1)[:] = message

        return _ThreadRequest(self, lambda: ticket in box.messages, finish, lambda: (peer,))

    # ------------------------------------------------------------------ groups

    def _split(self, color: int, key: int, name: str) -> Communicator:
        return self._regroup(color, key, name, self.shares_memory)

    def _split_node(self, ranks_per_node: int | None, name: str) -> Communicator:
        return self._regroup(self.rank // (ranks_per_node or self.size), self.rank, name, shares_memory=True)

    def _regroup(self, color: int, key: int, name: str, shares_memory: bool) -> Communicator:
        requests = self._swap((color, key))
        chosen = sorted((k, r) for r, (c, k) in enumerate(requests) if c == color)
        ranks = [r for _, r in chosen]
        mine = _Group(self._group.job, [self._group.members[r] for r in ranks]) if ranks[0] == self.rank else None
        group = self._swap(mine)[ranks[0]]
        return type(self)(group, ranks.index(self.rank), name, shares_memory)

    def _allocate_shared(self, nbytes: int) -> SharedMemory:
        whole = None
        with suppress(MemoryError):
            whole = np.zeros(nbytes + ALIGNMENT, np.uint8) if self.rank == 0 else None
        gathered = self._swap((nbytes, whole))
        if len(asked := {size for size, _ in gathered}) > 1:
            raise SharedMemoryError(f"ranks of {self.name!r} ask for windows of {min(asked)} to {max(asked)} bytes")
        buffer = gathered[0][1]
        if buffer is None:
            raise SharedMemoryError(f"a window of {nbytes} bytes for {self.name!r} does not fit into this process")
        offset = -buffer.ctypes.data % ALIGNMENT
        return ThreadSharedMemory(buffer[offset : offset + nbytes])


def _fold(rows: Sequence[Array], out: Array, op: str) -> None:
    """Combine ``rows``, the arrays of all ranks, by ``op`` in rank order, and write the result to ``out``."""
    flat = out.reshape(-1)
    flat[:] = rows[0]
    for row in rows[1:]:
        _ADD[op](flat, row, out=flat)
