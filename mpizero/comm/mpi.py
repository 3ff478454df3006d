"""Implement :class:`.Communicator` over MPI, by mpi4py.

:class:`MpiCommunicator` cuts operations that are too long for one message, and its requests keep their buffers alive.
:class:`MpiSharedMemory` is memory that the ranks of a node share, an MPI window. :class:`CallVerifier` works only with
``MPIZERO_DEBUG=collectives``: before every collective it checks that all ranks call the same one. The check costs each
collective one more small message, on a separate communicator. The comparison of a non-blocking collective ends when its
request is waited for or tested, so that ranks may still start it at different times.

[Note: shared cores] MPI libraries poll while they wait. If a node has more ranks than cores, a rank that polls takes
processor time from the ranks that it waits for: with 64 ranks on two cores, polling takes nine tenths of the processor
time of small steps. On such a node a rank tests whether an operation has ended, and sleeps between the tests. Only
non-blocking operations can be tested. So a blocking collective that adds no floats is replaced by its non-blocking
form. Before other blocking calls the ranks wait in a non-blocking barrier, asleep, so no rank polls for long. MPI does
not match the blocking form of a collective with the non-blocking one, so all ranks of a communicator use the same form:
they agree on it when the first communicator is made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, repeat
from time import monotonic, sleep
from typing import Any, Self, TypeVar, cast

import numpy as np
from mpi4py import MPI

from mpizero.comm.communicator import TAG_LIMIT, Communicator, Request, SharedMemory, Transport
from mpizero.errors import (
    ArgumentError,
    CollectiveError,
    CollectiveMismatch,
    ExitStatus,
    MpizeroError,
    PeerFailure,
    SharedMemoryError,
)
from mpizero.guard import guard
from mpizero.guard.call_trace import CallTrace, Signature, first_mismatch, mismatch
from mpizero.guard.heartbeat import ARRIVAL_PATIENCE, range_of
from mpizero.guard.reports import SHARED_FOLDER, taken_by_leftovers
from mpizero.layout import Span
from mpizero.types import Array

T = TypeVar("T")

#: Most bytes of one message; longer ones go in pieces. Open MPI 4 counts bytes in 32 bits, MPI before 4 displacements.
MESSAGE_LIMIT = 1 << 30
#: The tag of the pieces of long blocks; user tags are below :data:`mpizero.comm.communicator.TAG_LIMIT`.
_PIECES = TAG_LIMIT + 1
#: Pickled objects of fewer bytes, header included, are sent in one collective; longer ones take two.
OBJECT_RECORD = 512
#: From so many bytes on, Alltoallw replaces Allgatherv. It sends blocks directly; MPICH's Allgatherv passes them from
#: neighbour to neighbour in pieces of 32 KB: 4 ranks on 2 cores take 4 (two hosts) to 40 times (one host) as long.
GATHER_DIRECTLY = 1 << 18
#: True if Ialltoallw and Wait are faster than Alltoallw. With Open MPI they are: 16 MB between two hosts by TCP,
#: 4 ranks on 2 cores, take 0.14 s instead of 0.21 s; small messages take equally long. The value is the same on all
#: ranks.
WAITS_FASTER = MPI.get_vendor()[0] == "Open MPI"
_HEADER = 8

#: An array, the length of each rank's block in it, and where each begins.
_Blocks = tuple[Array, Sequence[int], Sequence[int]]


def _in_turn(array: Array, counts: Sequence[int]) -> _Blocks:
    return array, counts, list(accumulate(counts, initial=0))[:-1]


class MpiCommunicator(Communicator):
    """Communicate by MPI, on a new communicator that the constructor splits off from ``comm``.

    Collective over ``comm``, an mpi4py intracommunicator. All ranks must call this within ``timeout`` seconds (None:
    no limit). Operations of more than ``limit`` bytes are cut into several messages. While the communicator is open,
    the process is supervised (``guard/guard.py``); with ``guest`` (mpizero embedded in another program) it is not.
    """

    _native_errors = (MPI.Exception, BufferError, OverflowError)

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        limit: int = MESSAGE_LIMIT,
        name: str = "world",
        timeout: float | None = ARRIVAL_PATIENCE,
        guest: bool = False,
    ) -> None:
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ArgumentError(f"comm must be a live mpi4py intracommunicator, got {comm!r}")
        super().__init__(comm.Get_rank(), comm.Get_size(), name, shares_memory=False)
        holder = guard.current()
        guest = holder.is_guest(guest)
        with holder.register_new(self.trace, comm, timeout, guest=guest) as connect:
            # [Note: split, never dup] A duplicate of a Cartesian communicator keeps its topology, with which Open MPI
            # 4.1.4 writes wrong HDF5 data; a split does not. User messages never mix with messages of a split.
            waiting, joining = Waiting(holder.ranks_per_core), range_of()
            waiting.end(comm.Iallreduce(MPI.IN_PLACE, spec(joining), MPI.MIN))  # asleep; ranks that fail take part
            made = comm.Split(0, comm.Get_rank())
            made.Set_errhandler(MPI.ERRORS_RETURN)
            flags = np.array([holder.verifies, holder.ranks_per_core])
            waiting.end(made.Iallreduce(MPI.IN_PLACE, spec(flags), MPI.MAX))  # a flag set on one rank holds on all
            holder.verifies, waiting = bool(flags[0]), Waiting(float(flags[1]))
            members = connect(made, waiting.barrier)
        self._adopt(made, limit, waiting, members, guest=guest)

    def _adopt(self, comm: MPI.Comm, limit: int, waiting: Waiting, members: tuple[int, ...], *, guest: bool) -> None:
        self._comm = cast("MPI.Intracomm", comm)
        self._waiting = waiting
        self._limit, self._guest = limit, guest
        self._verifier: CallVerifier | None = None
        if guard.current().verifies and self.size > 1:
            self._verifier = CallVerifier(self._comm, self.trace, members)

    def _of(self, comm: MPI.Comm, name: str, *, shares_memory: bool) -> Self:
        made = type(self).__new__(type(self))
        Communicator.__init__(made, comm.Get_rank(), comm.Get_size(), name, shares_memory)
        members = guard.current().register_split(made.trace, comm, guest=self._guest)
        made._adopt(comm, self._limit, self._waiting, members, guest=self._guest)
        return made

    @property
    def mpi(self) -> MPI.Intracomm:
        """The wrapped mpi4py communicator, for HDF5 and one-sided windows; other code must not send messages on it."""
        return self._comm

    # ------------------------------------------------------------------ comparison of calls

    def mismatch_term(self) -> int:
        """Return this rank's number for the check of calls: if calls match, the sum of all ranks' numbers is 0.

        Sends nothing, but all ranks must call it between the same two collectives. The sum is taken modulo ``MODULUS``,
        see [Note: one sum] in guard/call_trace.py.
        """
        return guard.current().register.mismatch_term(self.trace)

    def mismatch(self) -> CollectiveError:
        """Return the error for the first differing call on this communicator or a subset of its ranks. Collective."""
        holder = guard.current()
        if holder.mismatch_watch is not None:
            holder.mismatch_watch.ignore(self.trace)
        records = {e.key: (e.trace.name, e.trace.records()) for e in holder.register.inside(self.trace)}
        return first_mismatch(self.allgather_object((holder.rank, records), "contract")) or super().mismatch()

    def _call(self, call: Signature, primitive: Callable[..., T], *arguments: Any) -> T:
        sequence = self.trace.begin(call)
        if self._verifier is not None:
            primitive = partial(self._verified, self._verifier, primitive)
        return self._run(call[0], call[1], sequence, primitive, *arguments)

    def _count(self, operation: str, tag: str, primitive: Callable[..., T], *arguments: Any) -> T:
        if self._verifier is not None:
            return self._call((operation, tag), primitive, *arguments)
        return super()._count(operation, tag, primitive, *arguments)

    def _verified(self, verifier: CallVerifier, primitive: Callable[..., Any], *arguments: Any) -> Any:
        """Compare the calls of all ranks, then call ``primitive``; a non-blocking one is called during the comparison.

        ``primitive`` is the method that makes the MPI call.
        """
        verification, operation = verifier.start(), self.trace.operation
        if operation.startswith("i"):
            return VerifiedRequest(self, verification, primitive(*arguments))
        verification.wait()
        if operation == "alltoallv" and (wrong := verifier.blocks(arguments[2], arguments[3])):
            raise CollectiveMismatch(f"{operation} {self.trace.tag!r} on {self.name!r}: {wrong}")
        return primitive(*arguments)

    def _failure(self, operation: str, tag: str, reason: object, array: object = None) -> CollectiveError:
        mismatch_watch = guard.current().mismatch_watch
        point_to_point = operation in ("isend", "irecv")
        error = None if mismatch_watch is None or point_to_point else mismatch_watch.explain(self.trace)
        return error or self.error(operation, tag, reason, array)

    def _request(self, requests: list[MPI.Request], buffers: object) -> Request:
        return MpiRequest(self, self._waiting, requests, buffers)

    # ------------------------------------------------------------------ collectives

    def _barrier(self) -> None:
        self._waiting.call(self._comm.Barrier, self._comm.Ibarrier)

    def _ibarrier(self) -> Request:
        return self._request([self._comm.Ibarrier()], None)

    # Blocking calls are native: 20 to 30 % faster than their non-blocking forms for small messages (MPICH, 2-8 ranks).

    def _broadcast(self, buffer: Array, root: int) -> None:
        for piece in self._pieces(buffer):
            self._waiting.call(self._comm.Bcast, self._comm.Ibcast, spec(piece), root)

    def _ibroadcast(self, buffer: Array, root: int) -> Request:
        return self._request([self._comm.Ibcast(spec(p), root) for p in self._pieces(buffer)], buffer)

    def _allgather(self, send: Array, recv: Array) -> None:
        if recv.nbytes > self._limit:
            self._exchange(*self._to_all(send, recv, [send.size] * self.size))
        else:
            block = [recv, send.size, TYPES[recv.dtype.char]]
            self._waiting.call(self._comm.Allgather, self._comm.Iallgather, spec(send), block)

    def _iallgather(self, send: Array, recv: Array) -> Request:
        if recv.nbytes > self._limit:
            return self._start(*self._to_all(send, recv, [send.size] * self.size))
        request = self._comm.Iallgather(spec(send), [recv, send.size, TYPES[recv.dtype.char]])
        return self._request([request], (send, recv))

    def _allgatherv(self, send: Array, recv: Array, counts: Sequence[int]) -> None:
        if recv.nbytes >= min(GATHER_DIRECTLY, self._limit):
            self._exchange(*self._to_all(send, recv, counts))
        else:
            blocks = [recv, counts, None, TYPES[recv.dtype.char]]
            self._waiting.call(self._comm.Allgatherv, self._comm.Iallgatherv, spec(send), blocks)

    def _igather_spans(self, send: Array, recv: Array, spans: Sequence[Span]) -> Request:
        counts = [0 if rank == self.rank else span.size for rank, span in enumerate(spans)]
        # MPI refuses buffers that begin at one address, though nothing is received where something is sent.
        base = min((span.start for span, count in zip(spans, counts, strict=True) if count), default=0)
        arrives = recv.reshape(-1)[base:] if any(counts) else np.empty(0, recv.dtype)
        leaves = send if send.size else np.empty(0, send.dtype)
        starts = [span.start - base if count else 0 for span, count in zip(spans, counts, strict=True)]
        sizes = [0 if rank == self.rank else send.size for rank in range(self.size)]
        return self._start((leaves, sizes, [0] * self.size), (arrives, counts, starts))

    def _alltoallv(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> None:
        self._exchange(_in_turn(send, send_counts), _in_turn(recv, recv_counts))

    def _ialltoallv(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Request:
        return self._start(_in_turn(send, send_counts), _in_turn(recv, recv_counts))

    def _reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> None:
        self._waiting.barrier(self._comm)
        if send.nbytes <= self._limit:
            self._comm.Reduce_scatter(spec(send), spec(recv), counts, MPI.SUM)
            return
        flat, targets, start = send.reshape(-1), list(self._pieces(recv)), 0
        for root, count in enumerate(counts):
            for i, piece in enumerate(self._pieces(flat[start : start + count])):
                self._comm.Reduce(spec(piece), spec(targets[i]) if root == self.rank else None, MPI.SUM, root)
            start += count

    def _allreduce(self, buffer: Array, op: str) -> None:
        for piece in self._pieces(buffer):
            self._waiting.allreduce(self._comm, piece, OPERATIONS[op])

    def _iallreduce(self, buffer: Array, op: str) -> Request:
        operation = OPERATIONS[op]
        pieces = self._pieces(buffer)
        return self._request([self._comm.Iallreduce(MPI.IN_PLACE, spec(p), operation) for p in pieces], buffer)

    def _allgather_bytes(self, payload: bytes) -> list[bytes]:
        room = OBJECT_RECORD - _HEADER
        record = (len(payload).to_bytes(_HEADER, "little") + payload[:room]).ljust(OBJECT_RECORD, b"\0")
        table = bytearray(OBJECT_RECORD * self.size)
        blocks = [record, OBJECT_RECORD, MPI.BYTE], [table, OBJECT_RECORD, MPI.BYTE]
        self._waiting.call(self._comm.Allgather, self._comm.Iallgather, *blocks)
        records = [bytes(table[i : i + OBJECT_RECORD]) for i in range(0, len(table), OBJECT_RECORD)]
        lengths = [int.from_bytes(s[:_HEADER], "little") for s in records]
        heads = [s[_HEADER : _HEADER + n] for s, n in zip(records, lengths, strict=True)]
        counts = [max(0, n - room) for n in lengths]
        if not any(counts):
            return heads
        rest = np.empty(sum(counts), np.uint8)
        self._allgatherv(np.frombuffer(payload[room:], np.uint8), rest, counts)
        stops = list(accumulate(counts))
        return [h + rest[b - n : b].tobytes() for h, n, b in zip(heads, counts, stops, strict=True)]

    def _broadcast_bytes(self, payload: bytes | None, root: int) -> bytes:
        room = OBJECT_RECORD - _HEADER
        record = bytearray(OBJECT_RECORD)
        if payload is not None:
            record[:_HEADER] = len(payload).to_bytes(_HEADER, "little")
            record[_HEADER : _HEADER + len(payload[:room])] = payload[:room]
        self._waiting.call(self._comm.Bcast, self._comm.Ibcast, [record, OBJECT_RECORD, MPI.BYTE], root)
        length = int.from_bytes(record[:_HEADER], "little")
        head = bytes(record[_HEADER : _HEADER + length])
        if length <= room:
            return head
        rest = np.empty(length - room, np.uint8) if payload is None else np.frombuffer(payload[room:], np.uint8)
        self._broadcast(rest, root)
        return head + rest.tobytes()

    # ------------------------------------------------------------------ point to point

    def _isend(self, buffer: Array, peer: int, tag: int) -> Request:
        return self._request([self._comm.Isend(spec(p), peer, tag) for p in self._pieces(buffer)], buffer)

    def _irecv(self, buffer: Array, peer: int, tag: int) -> Request:
        requests = [self._comm.Irecv(spec(p), peer, tag) for p in self._pieces(buffer)]
        return MpiRequest(self, self._waiting, requests, buffer, received=buffer)

    # ------------------------------------------------------------------ groups

    def _split(self, color: int, key: int, name: str) -> Communicator:
        self._waiting.barrier(self._comm)
        return self._of(self._comm.Split(color, key), name, shares_memory=self.shares_memory)

    def _split_node(self, ranks_per_node: int | None, name: str) -> Communicator:
        self._waiting.barrier(self._comm)
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        if ranks_per_node is not None:
            host, local_rank = node, node.Get_rank()
            node = host.Split(local_rank // ranks_per_node, local_rank)
            host.Free()
        return self._of(node, name, shares_memory=True)

    def _allocate_shared(self, nbytes: int) -> SharedMemory:
        return MpiSharedMemory(self._comm, nbytes, self.name, self._waiting)

    def shared_space(self) -> int | None:
        """Return the free bytes of /dev/shm, where most MPI libraries put windows; None if unknown. Not collective."""
        return free_space()

    def defer_close(self, close: Callable[[], None]) -> None:
        """Store ``close``, which frees what an error left open, for :meth:`run_deferred_closes`. Not collective."""
        guard.current().register.defer_close(self.trace, close)

    def run_deferred_closes(self) -> None:
        """Call the functions that every rank has stored by :meth:`defer_close`. Collective over the communicator."""
        guard.current().register.run_deferred_closes(self.trace, partial(self.allgather_object, tag="left behind"))

    def close(self) -> None:
        """Free the communicator; a second call does nothing. Collective over the communicator."""
        guard.current().unregister(self.trace, free=not MPI.Is_finalized())
        if self._verifier is not None and not MPI.Is_finalized():
            self._verifier.close()
        self._verifier = None
        if self._comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self._comm.Free()
        self._comm = cast("MPI.Intracomm", MPI.COMM_NULL)

    def abort(self, error: BaseException | None = None) -> None:
        """End all ranks of the job with the exit status of ``error``; with ``guest`` only raise it. Not collective."""
        if self._guest:
            raise error or PeerFailure(f"{self.name!r} was given up on rank {self.rank}")
        if error is not None:
            print(f"[rank {self.rank}] {type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        MPI.COMM_WORLD.Abort(int(error.status if isinstance(error, MpizeroError) else ExitStatus.RANK_FAILED))

    def _leave_failed(self, error: BaseException) -> None:
        # Freeing is collective, and other ranks may not call it: the guard ends the job if the error is not caught.
        return None

    # ------------------------------------------------------------------ large buffers

    def _pieces(self, buffer: Array) -> Sequence[Array]:
        """Return ``buffer``, or if it is too long, flat slices of ``limit`` bytes at most, the same on every rank."""
        if buffer.nbytes <= self._limit:
            return (buffer,)
        flat, length = buffer.reshape(-1), self._length(buffer)
        return [flat[i : i + length] for i in range(0, flat.size, length)]

    def _length(self, buffer: Array) -> int:
        """Return the number of elements of ``buffer``'s type that fit in one message, at least 1."""
        return max(1, self._limit // buffer.itemsize)

    def _to_all(self, send: Array, recv: Array, counts: Sequence[int]) -> tuple[_Blocks, _Blocks]:
        """Return send and receive blocks of an all-to-all in which rank i sends its ``counts[i]`` elements to all."""
        return (send, [send.size] * self.size, [0] * self.size), _in_turn(recv, counts)

    def _start(self, send: _Blocks, recv: _Blocks) -> Request:
        return self._request(self._blocks(self._comm.Ialltoallw, send, recv), (send, recv))

    def _exchange(self, send: _Blocks, recv: _Blocks) -> None:
        started = WAITS_FASTER or self._waiting.asleep
        for request in self._blocks(self._comm.Ialltoallw if started else self._comm.Alltoallw, send, recv):
            self._waiting.end(request)

    def _blocks(self, exchange: Callable[..., Any], send: _Blocks, recv: _Blocks) -> list[MPI.Request]:
        """Call ``exchange``, an Alltoallw or Ialltoallw, on blocks of any length; return the requests to wait for.

        [Note: why Alltoallw] Displacements before MPI 4 have 32 bits, and a rank cannot know whether another rank needs
        more. Alltoallw takes a datatype for each rank, so a rank can describe distant blocks by derived datatypes and
        still use the same collective. For small buffers Alltoallw is as fast as Alltoallv (measured, MPICH, 2-8 ranks).

        [Note: own block] This rank copies the block that it sends to itself: in a non-blocking collective MPI would
        move it by pieces of a few KB, one each time that the rank tests (MPICH 5: 148 tests for 1 MB between two hosts,
        18 without the own block).

        [Note: long blocks] Only the sender and the receiver of a block know its length. If a block is longer than one
        message, its first piece is sent in the collective, and the rest by point-to-point messages.
        """
        send, recv = self._without_own(send, recv)
        derived: list[MPI.Datatype] = []
        rest = self._rest(self._comm.Irecv, recv) + self._rest(self._comm.Isend, send)
        try:
            begun = exchange(self._plan(*send, derived), self._plan(*recv, derived))
        finally:
            for datatype in derived:
                datatype.Free()
        return rest if begun is None else [*rest, begun]

    def _without_own(self, send: _Blocks, recv: _Blocks) -> tuple[_Blocks, _Blocks]:
        """Copy the block that this rank sends to itself; return ``send`` and ``recv`` with 0 as this block's length."""
        (values, send_counts, send_starts), (target, recv_counts, recv_starts) = send, recv
        if count := send_counts[self.rank]:
            start, to = send_starts[self.rank], recv_starts[self.rank]
            target.reshape(-1)[to : to + count] = values.reshape(-1)[start : start + count]
        send_counts, recv_counts = ([*counts] for counts in (send_counts, recv_counts))
        send_counts[self.rank] = recv_counts[self.rank] = 0
        return (values, send_counts, send_starts), (target, recv_counts, recv_starts)

    def _rest(self, start: Callable[..., MPI.Request], blocks: _Blocks) -> list[MPI.Request]:
        """Call ``start`` (Isend or Irecv) for all but the first piece of each long block; return the requests."""
        array, counts, starts = blocks
        length = self._length(array)
        if max(counts) <= length:
            return []
        flat, requests = array.reshape(-1), []
        for peer, (count, begin) in enumerate(zip(counts, starts, strict=True)):
            stop = begin + count
            pieces = (flat[i : min(i + length, stop)] for i in range(begin + length, stop, length))
            requests += [start(spec(piece), peer, _PIECES) for piece in pieces]
        return requests

    def _plan(
        self, array: Array, counts: Sequence[int], starts: Sequence[int], derived: list[MPI.Datatype]
    ) -> list[Any]:
        base, width, length = TYPES[array.dtype.char], array.itemsize, self._length(array)
        if array.nbytes <= self._limit:
            return [array, (counts, [s * width for s in starts]), [base] * self.size]
        types = []
        for count, start in zip(counts, starts, strict=True):
            derived.append(base.Create_hindexed([min(count, length)], [start * width]).Commit())
            types.append(derived[-1])
        return [array, ([1] * self.size, [0] * self.size), types]


#: Seconds in which a waiting rank only yields its core; seconds of its first sleep; seconds of its longest sleep per
#: rank that a core has (many ranks may run before the awaited one), and an upper bound of it; and the factor from one
#: sleep to the next. Measured on two cores: with a longest sleep of 1 ms steps of 3 and 8 ranks took nearly twice as
#: long as with 0.3 ms; with 5 ms steps of 32 ranks took twice as long as with 1 ms; with 2 ms and an eight times longer
#: first sleep steps of 64 ranks took 0.31 s instead of 0.36 s, and their start a tenth less.
_YIELD, _FIRST, _LONGEST, _AT_MOST, _GROWTH = 2e-4, 5e-5, 7.5e-5, 2e-3, 1.2

_INTEGERS = {
    ("i", 1): MPI.INT8_T, ("i", 2): MPI.INT16_T, ("i", 4): MPI.INT32_T, ("i", 8): MPI.INT64_T,
    ("u", 1): MPI.UINT8_T, ("u", 2): MPI.UINT16_T, ("u", 4): MPI.UINT32_T, ("u", 8): MPI.UINT64_T,
}  # fmt: skip
#: MPI's types by the character of the dtype; float16 has no MPI type and travels as 16-bit integers.
TYPES: dict[str, MPI.Datatype] = {
    "?": MPI.UINT8_T, "e": MPI.UINT16_T, "f": MPI.FLOAT, "d": MPI.DOUBLE,
    "F": MPI.C_FLOAT_COMPLEX, "D": MPI.C_DOUBLE_COMPLEX,
    **{c: _INTEGERS[np.dtype(c).kind, np.dtype(c).itemsize] for c in "bBhHiIlLqQ"},
}  # fmt: skip
OPERATIONS: dict[str, MPI.Op] = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


def spec(array: Array) -> list[Any]:
    """Return mpi4py's buffer specification of an array: [array, count, datatype]. Not collective."""
    return [array, array.size, TYPES[array.dtype.char]]


class Waiting:
    """Wait for operations of MPI: inside the library, or asleep; see [Note: shared cores].

    Parameters
    ----------
    ranks : float
        The number of ranks for each core of a node; more than 1 if they share cores. All ranks of a communicator pass
        the same number.

    Attributes
    ----------
    asleep : bool
        True if ranks share cores.
    """

    def __init__(self, ranks: float) -> None:
        self.asleep = ranks > 1.0
        self._longest = min(_AT_MOST, _LONGEST * ranks)
        crowd = max(1.0, ranks / 4)  # so many ranks come before the awaited one
        self._yield, self._first = _YIELD / crowd, min(self._longest, _FIRST * crowd)

    def end(self, request: MPI.Request, status: MPI.Status | None = None) -> None:
        """Wait until an operation has ended."""
        if not self.asleep:
            request.Wait(status)
        elif not request.Test(status):
            until, pause = monotonic() + self._yield, self._first
            while monotonic() < until:
                os.sched_yield()
                if request.Test(status):
                    return
            while not request.Test(status):
                sleep(pause)
                pause = min(self._longest, _GROWTH * pause)

    def call(self, blocking: Callable[..., None], started: Callable[..., MPI.Request], *arguments: Any) -> None:
        """Call ``blocking``; if ranks wait asleep, call ``started``, the non-blocking form, and wait. Collective."""
        if self.asleep:
            self.end(started(*arguments))
        else:
            blocking(*arguments)

    def allreduce(self, comm: MPI.Intracomm, buffer: Array, operation: MPI.Op) -> None:
        """Reduce an array in place over the ranks of ``comm``. Collective."""
        if self.asleep and buffer.dtype.kind in "biu":  # exact in every order of additions
            self.end(comm.Iallreduce(MPI.IN_PLACE, spec(buffer), operation))
        else:
            self.barrier(comm)
            comm.Allreduce(MPI.IN_PLACE, spec(buffer), operation)

    def barrier(self, comm: MPI.Intracomm) -> None:
        """If ranks wait asleep, wait until all ranks of ``comm`` have called this. Collective over ``comm``."""
        if self.asleep:
            self.end(comm.Ibarrier())


class MpiRequest(Request):
    """Wait for the MPI requests of one operation, and keep the operation's buffers alive until these have ended.

    An operation has several requests if its buffer was cut into several messages. For a receive, ``received`` is the
    buffer: the request raises if the message is shorter, which MPI itself accepts.
    """

    __slots__ = (
        "_buffers", "_communicator", "_operation", "_received", "_requests", "_sequence", "_statuses", "_tag",
        "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        communicator: Transport,
        waiting: Waiting,
        requests: list[MPI.Request],
        buffers: object,
        received: Array | None = None,
    ) -> None:
        trace = communicator.trace
        self._communicator = communicator
        self._waiting = waiting
        self._requests = requests
        self._buffers, self._received = buffers, received
        self._statuses = None if received is None else [MPI.Status() for _ in requests]
        self._operation, self._tag, self._sequence = trace.operation, trace.tag, trace.sequence

    def wait(self) -> None:
        """Wait until the operation has ended on this rank; a second call returns immediately."""
        if self._requests:
            self._communicator._run(self._operation, self._tag, self._sequence, self._wait_all, self._received)
            self._release()

    def test(self) -> bool:
        """Let MPI make progress, and tell whether the operation has ended; always True after MPI_Finalize."""
        if self._requests and (MPI.Is_finalized() or self._ended()):
            self._release()
        return not self._requests

    def _ended(self) -> bool:
        try:
            ended = MPI.Request.Testall(self._requests, self._statuses)
        except MPI.Exception as error:
            raise self._communicator._failure(self._operation, self._tag, error, self._received) from error
        if ended:
            self._check()
        return ended

    def _wait_all(self, _: object) -> None:
        for request, status in zip(self._requests, self._statuses or repeat(None), strict=False):
            self._waiting.end(request, status)  # Waitall would say only "error code in status"
        self._check()

    def _check(self) -> None:
        buffer = self._received
        if buffer is None or self._statuses is None:
            return
        if (arrived := sum(s.Get_elements(MPI.BYTE) for s in self._statuses)) != buffer.nbytes:
            reason = f"expected {buffer.nbytes} bytes, the message has {arrived}"
            raise self._communicator.error(self._operation, self._tag, reason, buffer)

    def _release(self) -> None:
        self._requests = []
        self._buffers = self._received = None


#: Windows start on a cache line.
ALIGNMENT = 64
#: Bytes of the folder of windows that are kept free, for data that MPI adds to each window.
RESERVE = 1 << 20
_ZEROS = "/dev/zero"
#: Most seconds to wait while another group of the node allocates memory.
_LOCK_WAIT = 30.0


def free_space(folder: str = SHARED_FOLDER) -> int | None:
    """Return how many bytes shared windows may still allocate in ``folder``; None if not known. Not collective.

    Unwritten parts of sparse files there do not count as free, because they will be written: Open MPI's queues are
    sparse at first.
    """
    promised = RESERVE
    try:
        status = os.statvfs(folder)
        with os.scandir(folder) as files:
            for file in files:
                with contextlib.suppress(OSError):  # removed meanwhile
                    entry = file.stat(follow_symlinks=False)
                    promised += max(0, entry.st_size - 512 * entry.st_blocks)
    except OSError:
        return None
    unlimited = status.f_blocks == 0
    return None if unlimited else max(0, status.f_bavail * status.f_frsize - promised)


@contextlib.contextmanager
def _one_at_a_time(first: bool) -> Iterator[None]:
    """Lock the folder of windows during the block, so that the communicators of a node allocate one after the other.

    Not collective: the rank that passes ``first=True`` takes the lock, the other ranks of its communicator do nothing.

    [Note: one at a time] When a group of ranks has found enough free memory, no other group may take this memory before
    the first has allocated it. Otherwise Open MPI, which checks the free memory again on one rank, fails on that rank
    while the other ranks wait for ever. All ranks of the group are already in this block, so the group that holds the
    lock finishes. The folder itself is locked, so no lock file can remain. A group that cannot lock the folder, or
    waits for too long, allocates without the lock; :func:`_take` then still detects missing memory.
    """
    file = -1
    if first:
        with contextlib.suppress(OSError):
            file = os.open(SHARED_FOLDER, os.O_RDONLY | os.O_CLOEXEC)
            limit = monotonic() + _LOCK_WAIT
            while monotonic() < limit:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    sleep(1e-3)
    try:
        yield
    finally:
        if file >= 0:
            os.close(file)


def _take(memory: Array) -> OSError | None:
    """Zero ``memory``, so that all of its pages are allocated; return the error if that fails. Not collective.

    [Note: pages] If memory is short, a process that stores to a new page of a window is killed by SIGBUS. If the kernel
    writes to the page, during a read from /dev/zero, the read fails with EFAULT instead. So :func:`_take` zeroes the
    pages by reads from /dev/zero. The error is returned and not raised, because the other ranks wait for the result.
    """
    done = 0
    try:
        with os.fdopen(os.open(_ZEROS, os.O_RDONLY | os.O_CLOEXEC), "rb", buffering=0) as file:
            while done < memory.size:
                if not (read := file.readinto(memory[done:].data)):
                    raise OSError(errno.ENODATA, "it ends, so it is not the device", _ZEROS)
                done += read
    except OSError as error:
        return error
    return None


class MpiSharedMemory(SharedMemory):
    """Allocate a window of ``nbytes`` bytes on the first rank of ``comm``, and map it on all ranks of ``comm``.

    Collective over ``comm``, whose ranks share memory. The window is in a passive-target epoch (``Lock_all``) for its
    whole life, as ``Win.Sync`` requires. Each rank zeroes an equal slice of the window, so that the pages are spread
    over the memory of the ranks' CPU sockets, and all pages are allocated when the constructor returns.

    Raises
    ------
    SharedMemoryError
        On all ranks, if there is not enough memory or ranks pass different ``nbytes``; nothing stays allocated then.
    """

    def __init__(self, comm: MPI.Intracomm, nbytes: int, name: str, waiting: Waiting) -> None:
        rank = comm.Get_rank()
        self._window, self.buffer = MPI.WIN_NULL, np.empty(0, np.uint8)
        most, opposite = _largest(comm, waiting, nbytes, -nbytes)
        if most != (least := -opposite):
            raise SharedMemoryError(f"ranks of {name!r} ask for windows of {least} to {most} bytes; they must agree")
        with _one_at_a_time(rank == 0):
            self._check(comm, waiting, free_space() if rank == 0 else None, nbytes, name)
            self._window, self.buffer = self._allocate(comm, waiting, nbytes, name)
            part = -(-nbytes // comm.Get_size() // 4096) * 4096
            self._window.Lock_all(MPI.MODE_NOCHECK)
            failure = _take(self.buffer[rank * part : (rank + 1) * part])
            self._window.Sync()
            (failed,) = _largest(comm, waiting, failure is not None)
        if failed:
            self.close()
            full = failure is None or failure.errno == errno.EFAULT
            reasons = comm.allgather("" if full else f"rank {rank} of its {comm.Get_size()} cannot zero it: {failure}")
            if reasons := list(filter(None, reasons)):
                raise SharedMemoryError(f"a window of {nbytes} bytes for {name!r} failed: {reasons[0]}")
            self._check(comm, waiting, 0 if rank == 0 else None, nbytes, name)
        self._window.Sync()

    @staticmethod
    def _check(comm: MPI.Intracomm, waiting: Waiting, room: int | None, nbytes: int, name: str) -> None:
        """Raise SharedMemoryError on all ranks if ``room`` is below ``nbytes`` on the first rank. Collective.

        ``room`` is the number of free bytes on the first rank, and None on the others, or if it is not known.
        """
        if not any(_largest(comm, waiting, room is not None and room < nbytes)):
            return
        reason = ""
        if comm.Get_rank() == 0:
            reason = (
                f"a window of {nbytes} bytes for {name!r} does not fit: {SHARED_FOLDER} has {free_space()} bytes left "
                f"on {MPI.Get_processor_name()}{taken_by_leftovers()}; enlarge it (in a container --shm-size), use "
                "fewer ranks per node, or share_node_memory=False"
            )
        raise SharedMemoryError(comm.bcast(reason, 0))

    @staticmethod
    def _allocate(comm: MPI.Intracomm, waiting: Waiting, nbytes: int, name: str) -> tuple[MPI.Win, Array]:
        """Allocate a window on the first rank; return the window and, as an array, its bytes. Collective."""
        reason, window_bytes, first = "", np.empty(0, np.uint8), comm.Get_rank() == 0
        try:
            window = MPI.Win.Allocate_shared(nbytes + ALIGNMENT if first else 0, 1, MPI.INFO_NULL, comm)
            memory, _ = window.Shared_query(0)
            window_bytes = np.frombuffer(cast("memoryview", memory), np.uint8)
        except MPI.Exception as error:
            reason, window = str(error), MPI.WIN_NULL
        # Every process maps the window at the same distance from a page, so one offset aligns it for all.
        failed, offset = _largest(comm, waiting, bool(reason), -window_bytes.ctypes.data % ALIGNMENT if first else 0)
        if failed:
            raise SharedMemoryError(f"a window of {nbytes} bytes for {name!r} failed: {reason or 'on another rank'}")
        return window, window_bytes[offset : offset + nbytes]

    def synchronize(self) -> None:
        """Order this rank's loads and stores of the window by ``Win.Sync``. Not collective.

        To see the stores of another rank, both ranks call this before and after a common barrier.
        """
        self._window.Sync()

    def close(self) -> None:
        """Free the window; ``buffer`` becomes empty. A second call does nothing. Collective over the window's ranks."""
        self.buffer = np.empty(0, np.uint8)
        if self._window != MPI.WIN_NULL and not MPI.Is_finalized():
            self._window.Unlock_all()
            self._window.Free()
        self._window = MPI.WIN_NULL


def _largest(comm: MPI.Intracomm, waiting: Waiting, *values: int) -> list[int]:
    """Return the maximum over the ranks of each of the integers ``values``. Collective."""
    largest = np.array(values, np.int64)
    waiting.allreduce(comm, largest, MPI.MAX)
    return [int(value) for value in largest]


class CallVerifier:
    """Compare the ranks' hashes of their calls on one communicator; if they differ, raise the same error on all ranks.

    Parameters
    ----------
    comm : MPI.Intracomm
        The checked communicator. The constructor is collective over it, and splits off another one for the comparisons.
    trace : CallTrace
        The calls of this rank on the communicator.
    members : sequence of int
        World ranks of the communicator, for the report.
    """

    def __init__(self, comm: MPI.Intracomm, trace: CallTrace, members: Sequence[int]) -> None:
        self._comm = comm.Split(0, comm.Get_rank())
        self._trace, self._members = trace, members

    def start(self) -> PendingComparison:
        """Start to compare the hashes of all ranks, and return the comparison. Collective over the communicator."""
        number, numbers = np.array([self._trace.number]), np.empty(self._comm.Get_size(), np.int64)
        request = self._comm.Iallgather([number, MPI.INT64_T], [numbers, 1, MPI.INT64_T])
        return PendingComparison(self, request, number, numbers)

    def error(self) -> CollectiveError:
        """Return the error that says which different calls the ranks have made. Collective over the communicator."""
        records = dict(self._comm.allgather((self._members[self._comm.Get_rank()], self._trace.records())))
        error = mismatch(self._trace.name, records)
        return error or CollectiveError(f"the ranks of {self._trace.name!r} have called different collectives")

    def blocks(self, send_counts: Sequence[int], recv_counts: Sequence[int]) -> str:
        """Return a text about a block of an alltoallv whose sender and receiver pass different lengths; "" if none.

        Collective over the communicator. The counts are the lengths of the blocks in elements.
        """
        size = self._comm.Get_size()
        counts = np.array([*send_counts, *recv_counts], np.int64)
        every = np.empty((size, 2, size), np.int64)
        self._comm.Allgather([counts, MPI.INT64_T], [every, 2 * size, MPI.INT64_T])
        wrong = np.argwhere(every[:, 0] != every[:, 1].T)
        if not wrong.size:
            return ""
        a, b = wrong[0]
        return (
            f"rank {self._members[a]} sends {every[a, 0, b]} elements to rank {self._members[b]}, which expects "
            f"{every[b, 1, a]}"
        )

    def close(self) -> None:
        """Free the communicator of the comparisons. Collective over its ranks."""
        self._comm.Free()


class PendingComparison:
    """Represent a comparison of hashes that :meth:`CallVerifier.start` has started."""

    def __init__(self, verifier: CallVerifier, request: MPI.Request, number: Array, numbers: Array) -> None:
        self._verifier, self._request = verifier, request
        self._number, self._numbers = number, numbers

    def wait(self) -> None:
        """Wait for the hashes of all ranks; if they differ, raise CollectiveMismatch on every rank.

        Collective over the communicator.
        """
        self._request.Wait()
        self._compare()

    def test(self) -> bool:
        """Tell whether the comparison has ended; raise like :meth:`wait` if hashes differ.

        Not collective, unless hashes differ: then this call waits until all ranks have called it or :meth:`wait`.
        """
        arrived = self._request.Test()
        if arrived:
            self._compare()
        return arrived

    def _compare(self) -> None:
        if (self._numbers != self._number).any():
            raise self._verifier.error()


class VerifiedRequest(Request):
    """Wait until all ranks' calls of a non-blocking collective have been compared, then for the collective itself."""

    def __init__(self, communicator: Transport, verification: PendingComparison, request: Request) -> None:
        trace = communicator.trace
        self._communicator, self._request = communicator, request
        self._verification: PendingComparison | None = verification
        self._call = (trace.operation, trace.tag, trace.sequence)

    def wait(self) -> None:
        """Return when the operation has ended on this rank. Not collective; a second call returns immediately."""
        if self._verification is not None:
            self._communicator._run(*self._call, self._verification.wait)
            self._verification = None
        self._request.wait()

    def test(self) -> bool:
        """Make progress and tell whether the operation has ended. Not collective."""
        if self._verification is not None:
            if not self._verification.test():
                return False
            self._verification = None
        return self._request.test()
