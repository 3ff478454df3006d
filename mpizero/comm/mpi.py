"""Implement the interface :class:`.Communicator` over MPI, by mpi4py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Self, cast

import numpy as np
from mpi4py import MPI

from mpizero.comm.checks import TAG_LIMIT
from mpizero.comm.communicator import Communicator
from mpizero.comm.requests import OPERATIONS, TYPES, MpiReceive, MpiRequest, VerifiedRequest, Waiting, spec
from mpizero.comm.shared import MpiSharedMemory, free_space
from mpizero.comm.supervision.verification import CallVerifier
from mpizero.comm.transport import Request, SharedMemory
from mpizero.errors import ArgumentError, CollectiveError, CollectiveMismatch, ExitStatus, MpizeroError, PeerFailure
from mpizero.guard import guard
from mpizero.guard.call_trace import Signature, first_mismatch
from mpizero.guard.heartbeat import ARRIVAL_PATIENCE, range_of
from mpizero.layout import Span
from mpizero.types import Array

#: Most bytes of one message; longer ones go in pieces. Open MPI 4 counts bytes in 32 bits, MPI before 4 displacements.
MESSAGE_LIMIT = 1 << 30
#: The tag of the pieces of long blocks; user tags are below :data:`mpizero.comm.checks.TAG_LIMIT`.
_PIECES = TAG_LIMIT + 1
#: Pickled objects of fewer bytes, header included, are sent in one collective; longer ones take two.
OBJECT_SLOT = 512
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


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]


class MpiCommunicator(Communicator):
    """Communicate by MPI, on a new communicator that the constructor splits off from ``comm``.

    Collective over ``comm``, an mpi4py intracommunicator. All ranks must call this within ``timeout`` seconds (None:
    no limit). Operations of more than ``limit`` bytes are cut into several messages. While the communicator is open,
    the process is supervised (supervision/guard.py); with ``guest`` (mpizero embedded in another program) it is not.
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
            own = comm.Split(0, comm.Get_rank())
            own.Set_errhandler(MPI.ERRORS_RETURN)
            figures = np.array([holder.verifies, holder.ranks_per_core])
            waiting.end(own.Iallreduce(MPI.IN_PLACE, spec(figures), MPI.MAX))  # what is so on one rank is so on all
            holder.verifies, waiting = bool(figures[0]), Waiting(float(figures[1]))
            members = connect(own, waiting.meet)
        self._adopt(own, limit, waiting, members, guest=guest)

    def _adopt(self, own: MPI.Comm, limit: int, waiting: Waiting, members: tuple[int, ...], *, guest: bool) -> None:
        self._comm = cast("MPI.Intracomm", own)
        self._waiting = waiting
        self._limit, self._guest = limit, guest
        self._verifier: CallVerifier | None = None
        if guard.current().verifies and self.size > 1:
            self._verifier = CallVerifier(self._comm, self.trace, members)

    def _of(self, own: MPI.Comm, name: str, *, shares_memory: bool) -> Self:
        made = type(self).__new__(type(self))
        Communicator.__init__(made, own.Get_rank(), own.Get_size(), name, shares_memory)
        members = guard.current().register_split(made.trace, own, guest=self._guest)
        made._adopt(own, self._limit, self._waiting, members, guest=self._guest)
        return made

    @property
    def mpi(self) -> MPI.Intracomm:
        """The wrapped mpi4py communicator, for HDF5 and one-sided windows; other code must not send messages on it."""
        return self._comm

    # ------------------------------------------------------------------ comparison of calls

    def mismatch_term(self) -> int:
        """Return this rank's number for the check of calls: its sum over ranks is 0 mod ``MODULUS`` if calls match.

        Sends nothing, but all ranks must call it before the same collective. See [Note: one sum] in registry.py.
        """
        return guard.current().register.mismatch_term(self.trace)

    def mismatch(self) -> CollectiveError:
        """Return the error for the first call that differs, here or in a subgroup. Collective over the communicator."""
        holder = guard.current()
        if holder.mismatch_watch is not None:
            holder.mismatch_watch.ignore(self.trace)
        mine = {e.key: (e.trace.name, e.trace.records()) for e in holder.register.inside(self.trace)}
        found = first_mismatch(self.allgather_object((holder.rank, mine), "contract"))
        return found or self.error("contract", "", "the ranks have called different collectives")

    def _call(self, call: Signature, primitive: Callable[..., Any], *arguments: Any) -> Any:
        sequence = self.trace.begin(call)
        if self._verifier is not None:
            primitive = partial(self._verified, self._verifier, primitive)
        return self._run(call[0], call[1], sequence, primitive, *arguments)

    def _count(self, operation: str, tag: str, primitive: Callable[..., Any], *arguments: Any) -> Any:
        if self._verifier is not None:
            return self._call((operation, tag), primitive, *arguments)
        return super()._count(operation, tag, primitive, *arguments)

    def _verified(self, verifier: CallVerifier, primitive: Callable[..., Any], *arguments: Any) -> Any:
        """Compare the calls of all ranks, then run ``primitive``; a non-blocking one starts while they are compared."""
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
        found = None if mismatch_watch is None or point_to_point else mismatch_watch.explain(self.trace)
        return found or self.error(operation, tag, reason, array)

    def _request(self, requests: list[MPI.Request], buffers: object) -> Request:
        return MpiRequest(self, self._waiting, requests, buffers)

    # ------------------------------------------------------------------ collectives

    def _barrier(self) -> None:
        self._waiting.call(self._comm.Barrier, self._comm.Ibarrier)

    def _ibarrier(self) -> Request:
        return self._request([self._comm.Ibarrier()], None)

    # Blocking calls are native: 20 to 30 % faster than their non-blocking twins for small messages (MPICH, 2-8 ranks).

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

    def _iallgatherv(self, send: Array, recv: Array, counts: Sequence[int]) -> Request:
        if recv.nbytes >= min(GATHER_DIRECTLY, self._limit):
            return self._start(*self._to_all(send, recv, counts))
        request = self._comm.Iallgatherv(spec(send), [recv, counts, None, TYPES[recv.dtype.char]])
        return self._request([request], (send, recv))

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
        starts, others = _starts(send_counts), _starts(recv_counts)
        self._exchange((send, send_counts, starts), (recv, recv_counts, others))

    def _ialltoallv(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Request:
        starts, others = _starts(send_counts), _starts(recv_counts)
        return self._start((send, send_counts, starts), (recv, recv_counts, others))

    def _reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> None:
        self._waiting.meet(self._comm)
        if send.nbytes <= self._limit:
            self._comm.Reduce_scatter(spec(send), spec(recv), counts, MPI.SUM)
            return
        flat, own, start = send.reshape(-1), list(self._pieces(recv)), 0
        for root, count in enumerate(counts):
            for i, piece in enumerate(self._pieces(flat[start : start + count])):
                self._comm.Reduce(spec(piece), spec(own[i]) if root == self.rank else None, MPI.SUM, root)
            start += count

    def _allreduce(self, buffer: Array, op: str) -> None:
        for piece in self._pieces(buffer):
            self._waiting.allreduce(self._comm, piece, OPERATIONS[op])

    def _iallreduce(self, buffer: Array, op: str) -> Request:
        operation = OPERATIONS[op]
        pieces = self._pieces(buffer)
        return self._request([self._comm.Iallreduce(MPI.IN_PLACE, spec(p), operation) for p in pieces], buffer)

    def _allgather_bytes(self, payload: bytes) -> list[bytes]:
        room = OBJECT_SLOT - _HEADER
        slot = (len(payload).to_bytes(_HEADER, "little") + payload[:room]).ljust(OBJECT_SLOT, b"\0")
        table = bytearray(OBJECT_SLOT * self.size)
        blocks = [slot, OBJECT_SLOT, MPI.BYTE], [table, OBJECT_SLOT, MPI.BYTE]
        self._waiting.call(self._comm.Allgather, self._comm.Iallgather, *blocks)
        slots = [bytes(table[i : i + OBJECT_SLOT]) for i in range(0, len(table), OBJECT_SLOT)]
        lengths = [int.from_bytes(s[:_HEADER], "little") for s in slots]
        heads = [s[_HEADER : _HEADER + n] for s, n in zip(slots, lengths, strict=True)]
        counts = [max(0, n - room) for n in lengths]
        if not any(counts):
            return heads
        rest = np.empty(sum(counts), np.uint8)
        self._allgatherv(np.frombuffer(payload[room:], np.uint8), rest, counts)
        stops = list(accumulate(counts))
        return [h + rest[b - n : b].tobytes() for h, n, b in zip(heads, counts, stops, strict=True)]

    def _broadcast_bytes(self, payload: bytes | None, root: int) -> bytes:
        room = OBJECT_SLOT - _HEADER
        slot = bytearray(OBJECT_SLOT)
        if payload is not None:
            slot[:_HEADER] = len(payload).to_bytes(_HEADER, "little")
            slot[_HEADER : _HEADER + len(payload[:room])] = payload[:room]
        self._waiting.call(self._comm.Bcast, self._comm.Ibcast, [slot, OBJECT_SLOT, MPI.BYTE], root)
        length = int.from_bytes(slot[:_HEADER], "little")
        head = bytes(slot[_HEADER : _HEADER + length])
        if length <= room:
            return head
        rest = np.empty(length - room, np.uint8) if payload is None else np.frombuffer(payload[room:], np.uint8)
        self._broadcast(rest, root)
        return head + rest.tobytes()

    # ------------------------------------------------------------------ point to point

    def _isend(self, buffer: Array, peer: int, tag: int) -> Request:
        return self._request([self._comm.Isend(spec(p), peer, tag) for p in self._pieces(buffer)], buffer)

    def _irecv(self, buffer: Array, peer: int, tag: int) -> Request:
        return MpiReceive(
            self, self._waiting, [self._comm.Irecv(spec(p), peer, tag) for p in self._pieces(buffer)], buffer
        )

    # ------------------------------------------------------------------ groups

    def _split(self, color: int, key: int, name: str) -> Communicator:
        self._waiting.meet(self._comm)
        return self._of(self._comm.Split(color, key), name, shares_memory=self.shares_memory)

    def _split_node(self, ranks_per_node: int | None, name: str) -> Communicator:
        self._waiting.meet(self._comm)
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        if ranks_per_node is not None:
            whole, place = node, node.Get_rank()
            node = whole.Split(place // ranks_per_node, place)
            whole.Free()
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
        """End every rank of the job with the exit status of ``error``; with ``guest`` only raise it. Not collective."""
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
        return (send, [send.size] * self.size, [0] * self.size), (recv, counts, _starts(counts))

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
        still use the same collective. For small buffers it is as fast as Alltoallv (measured, MPICH, 2-8 ranks).

        [Note: long blocks] Only the sender and the receiver of a block know its length. If a block is longer than one
        message, its first piece is sent in the collective, and the rest by point-to-point messages.
        """
        derived: list[MPI.Datatype] = []
        rest = self._rest(self._comm.Irecv, recv) + self._rest(self._comm.Isend, send)
        try:
            begun = exchange(self._plan(*send, derived), self._plan(*recv, derived))
        finally:
            for datatype in derived:
                datatype.Free()
        return rest if begun is None else [*rest, begun]

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
