"""Define the interface of communicators; ``mpi.py`` implements it over MPI and ``inmemory.py`` over threads."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from mpizero.comm import checks
from mpizero.comm.transport import POINT_TO_POINT, Counters, Request, SharedMemory, Transport
from mpizero.errors import SharedMemoryError
from mpizero.guard.call_trace import CallTrace, Signature
from mpizero.layout import Span
from mpizero.types import Array

T = TypeVar("T")

__all__ = ["CallTrace", "Communicator", "Counters", "Request", "SharedMemory"]


class Communicator(Transport):
    """Exchange C-contiguous NumPy arrays among a group of ranks.

    The arrays of one call have the same dtype. All ranks must call the collectives of a communicator in the same order
    and with counts that fit together. Wrong arguments on this rank raise CollectiveError before anything is sent.
    A string ``tag`` is a label of the call in counters, traces and errors; an integer ``tag`` is an MPI tag. A
    communicator is a context manager, closed at the end of the block. If the block raises, an InMemoryCommunicator is
    aborted. An MpiCommunicator stays open, because closing is collective; if the program does not catch the error, the
    supervision of the process ends the job.

    Attributes
    ----------
    rank, size : int
        Number of this rank in the communicator, and number of its ranks.
    name : str
        Name of the communicator in errors and reports.
    shares_memory : bool
        Whether :meth:`allocate_shared` works: true for results of :meth:`split_node`, for communicators split off from
        these, and for communicators of one rank.
    counters : Counters
        Bytes and messages sent by this rank through this communicator.
    trace : CallTrace
        The call that this rank is in now, if any, and the last collectives before it.

    Examples
    --------
    >>> import mpizero as mz
    >>> mz.testing.run_in_threads(2, lambda comm: comm.allgather_object(10 * comm.rank))
    [[0, 10], [0, 10]]
    """

    def __enter__(self) -> Self:
        """Return itself. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the communicator; after an error, abort it (threads) or leave it open (MPI).

        Collective over the communicator if the block has not raised.
        """
        if error is None:
            self.close()
        else:
            self._leave_failed(error)

    # ------------------------------------------------------------------ collectives

    def barrier(self, tag: str = "") -> None:
        """Wait until every rank has called this. Collective over the communicator."""
        self._call(("barrier", tag), self._barrier)

    def ibarrier(self, tag: str = "") -> Request:
        """Start a barrier: the request ends when all ranks have called this. Collective over the communicator."""
        request: Request = self._call(("ibarrier", tag), self._ibarrier)
        return request

    def node_barrier(self, shared: SharedMemory, tag: str = "", *, counted: bool = False) -> None:
        """Make what every rank wrote to ``shared`` before the call visible to every rank after it.

        Collective over the communicator that allocated ``shared``. With ``counted`` the trace only counts this call and
        makes no record of it, which is faster; see [Note: counted calls] in call_trace.py.
        """
        if counted:
            self._count("node_barrier", tag, self._node_barrier, shared)
        else:
            self._call(("node_barrier", tag), self._node_barrier, shared)

    def broadcast(self, buffer: Array, root: int = 0, tag: str = "") -> None:
        """Copy ``buffer`` of ``root`` into ``buffer`` of every other rank. Collective over the communicator."""
        call = self._count_broadcast("broadcast", tag, buffer, root)
        self._call(call, self._broadcast, buffer, root)

    def ibroadcast(self, buffer: Array, root: int = 0, tag: str = "") -> Request:
        """Start :meth:`broadcast`, which uses ``buffer`` until the request ends. Collective over the communicator."""
        call = self._count_broadcast("ibroadcast", tag, buffer, root)
        request: Request = self._call(call, self._ibroadcast, buffer, root)
        return request

    def allgather(self, send: Array, recv: Array, tag: str = "") -> None:
        """Concatenate ``send`` of all ranks, in rank order, into ``recv`` of every rank.

        Collective over the communicator. ``send`` has the same size on all ranks, and ``recv`` is as large as all of
        them together. ``send`` and ``recv`` do not overlap.
        """
        call = self._count_allgather("allgather", tag, send, recv)
        self._call(call, self._allgather, send, recv)

    def iallgather(self, send: Array, recv: Array, tag: str = "") -> Request:
        """Start :meth:`allgather`; neither array may be written, nor ``recv`` read, before the request has ended.

        Collective over the communicator.
        """
        call = self._count_allgather("iallgather", tag, send, recv)
        request: Request = self._call(call, self._iallgather, send, recv)
        return request

    def allgatherv(self, send: Array, recv: Array, counts: Sequence[int], tag: str = "") -> None:
        """Concatenate ``send`` of all ranks, in rank order, into ``recv``; rank i sends ``counts[i]`` elements.

        Collective over the communicator; ``counts`` is the same on every rank and may contain zeros. ``send`` and
        ``recv`` do not overlap.
        """
        call = self._count_allgatherv("allgatherv", tag, send, recv, counts)
        self._call(call, self._allgatherv, send, recv, counts)

    def iallgatherv(self, send: Array, recv: Array, counts: Sequence[int], tag: str = "") -> Request:
        """Start :meth:`allgatherv`; neither array may be written, nor ``recv`` read, before the request has ended.

        Collective over the communicator.
        """
        call = self._count_allgatherv("iallgatherv", tag, send, recv, counts)
        request: Request = self._call(call, self._iallgatherv, send, recv, counts)
        return request

    def igather_spans(self, send: Array, recv: Array, spans: Sequence[Span], tag: str = "") -> Request:
        """Start to gather ``send`` of every rank into ``recv`` of every rank: rank i's into the elements ``spans[i]``.

        Collective over the communicator; ``spans`` is the same on every rank, and no two spans overlap. ``send`` may be
        a view of this rank's span of ``recv``; otherwise it is copied there at once. Neither array may be written, nor
        the spans of other ranks in ``recv`` read, before the request has ended.
        """
        call = self._count_gather_spans("igather_spans", tag, send, recv, spans)
        place = recv.reshape(-1)[spans[self.rank].start : spans[self.rank].stop]
        if send.size and send.ctypes.data != place.ctypes.data:
            place[:] = send.reshape(-1)
        request: Request = self._call(call, self._igather_spans, send, recv, spans)
        return request

    def alltoallv(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], tag: str = ""
    ) -> None:
        """Send block i of ``send`` to rank i, and receive rank i's block as block i of ``recv``.

        Collective over the communicator. The counts are the lengths of the blocks in elements; blocks lie one after
        another in both arrays. ``recv_counts[i]`` of rank j must equal ``send_counts[j]`` of rank i. ``send`` and
        ``recv`` do not overlap.
        """
        call = self._count_alltoallv("alltoallv", tag, send, send_counts, recv, recv_counts)
        self._call(call, self._alltoallv, send, recv, send_counts, recv_counts)

    def ialltoallv(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], tag: str = ""
    ) -> Request:
        """Start :meth:`alltoallv`; neither array may be written, nor ``recv`` read, before the request has ended.

        Collective over the communicator.
        """
        call = self._count_alltoallv("ialltoallv", tag, send, send_counts, recv, recv_counts)
        request: Request = self._call(call, self._ialltoallv, send, recv, send_counts, recv_counts)
        return request

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], tag: str = "") -> None:
        """Sum ``send`` over the ranks, in an order that MPI chooses, and write this rank's block of it to ``recv``.

        Collective over the communicator. The sum is cut into one block for each rank, of ``counts[i]`` elements for
        rank i; ``counts`` is the same on every rank.
        """
        checks.pair(self, "reduce_scatter", tag, send, recv)
        checks.blocks(self, "reduce_scatter", tag, send, counts)
        checks.own_block(self, "reduce_scatter", tag, recv, counts)
        checks.reduction(self, "reduce_scatter", tag, send, "sum")
        self.counters.add(send.nbytes - recv.nbytes, tag)
        call = ("reduce_scatter", tag, send.dtype.char, tuple(counts))
        self._call(call, self._reduce_scatter, send, recv, counts)

    def allreduce(self, buffer: Array, op: str = "sum", tag: str = "") -> None:
        """Replace ``buffer`` by its elementwise "sum", "max" or "min" over the ranks.

        Collective over the communicator. MPI chooses the order in which a sum is added, so its bits may differ between
        MPI libraries. The results of max and min are not defined if there is a NaN.
        """
        call = self._count_allreduce("allreduce", tag, buffer, op)
        self._call(call, self._allreduce, buffer, op)

    def iallreduce(self, buffer: Array, op: str = "sum", tag: str = "") -> Request:
        """Start :meth:`allreduce`, which uses ``buffer`` until the request ends. Collective over the communicator."""
        call = self._count_allreduce("iallreduce", tag, buffer, op)
        request: Request = self._call(call, self._iallreduce, buffer, op)
        return request

    def allgather_object(self, value: Any, tag: str = "") -> list[Any]:
        """Return a list of the ``value`` of every rank, in rank order. Collective over the communicator.

        Each ``value`` is a picklable object; it should be small.
        """
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self.counters.add(len(payload) * (self.size - 1), tag)
        return [pickle.loads(p) for p in self._call(("allgather_object", tag), self._allgather_bytes, payload)]

    def broadcast_object(self, value: Any, root: int = 0, tag: str = "") -> Any:
        """Return the picklable ``value`` of ``root`` on every rank. Collective over the communicator."""
        checks.peer(self, "broadcast_object", tag, root)
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if self.rank == root else None
        if payload is not None:
            self.counters.add(len(payload) * (self.size - 1), tag)
        return pickle.loads(self._call(("broadcast_object", tag, root), self._broadcast_bytes, payload, root))

    def run(self, operation: str, function: Callable[[], T], tag: str = "") -> T:
        """Call a collective function of another library, such as parallel HDF5, and return its result.

        Collective over the communicator. The watchdog supervises the call like a collective of this class;
        ``operation`` is the name of the function in its reports.
        """
        result: T = self._call((operation, tag), function)
        return result

    # ------------------------------------------------------------------ point to point

    def send(self, buffer: Array, peer: int, tag: int = 0) -> None:
        """Send ``buffer`` to rank ``peer``; may wait until that rank receives. Not collective."""
        self.isend(buffer, peer, tag).wait()

    def recv(self, buffer: Array, peer: int, tag: int = 0) -> None:
        """Receive exactly ``buffer.size`` elements from rank ``peer``. Not collective."""
        self.irecv(buffer, peer, tag).wait()

    def isend(self, buffer: Array, peer: int, tag: int = 0) -> Request:
        """Start :meth:`send`; ``buffer`` must not be written before the request has ended. Not collective."""
        self._check_message("isend", buffer, peer, tag)
        if peer != self.rank:
            self.counters.add(buffer.nbytes, POINT_TO_POINT)
        request: Request = self._run("isend", str(tag), self.trace.started, self._isend, buffer, peer, tag)
        return request

    def irecv(self, buffer: Array, peer: int, tag: int = 0) -> Request:
        """Start :meth:`recv`; ``buffer`` must not be used before the request has ended. Not collective."""
        self._check_message("irecv", buffer, peer, tag)
        request: Request = self._run("irecv", str(tag), self.trace.started, self._irecv, buffer, peer, tag)
        return request

    # ------------------------------------------------------------------ groups

    def split(self, color: int, key: int | None = None, name: str = "") -> Communicator:
        """Return a communicator of the ranks with the same ``color`` (>= 0), ordered by ``key`` (default: rank).

        Collective over the communicator. ``name`` is the name of the result. The caller closes the result; MPICH has
        room for about 2000 open communicators.
        """
        if not 0 <= color < 2**31:
            raise self.error("split", name, f"color must be in 0..2**31-1, got {color}")
        label = name or f"{self.name}/{color}"
        group: Communicator = self._call(("split", ""), self._split, color, self.rank if key is None else key, label)
        return group

    def split_node(self, ranks_per_node: int | None = None, name: str = "") -> Communicator:
        """Return a communicator of the ranks that share memory with this rank, in rank order.

        Collective over the communicator. ``ranks_per_node=k`` cuts each real node into simulated nodes of ``k``
        consecutive ranks. The caller closes the result.
        """
        if ranks_per_node is not None and ranks_per_node < 1:
            raise self.error("split_node", name, f"ranks_per_node must be >= 1 or None, got {ranks_per_node}")
        label = name or f"{self.name}/node"
        group: Communicator = self._call(("split_node", "", ranks_per_node), self._split_node, ranks_per_node, label)
        return group

    def allocate_shared(self, nbytes: int, tag: str = "") -> SharedMemory:
        """Allocate zeroed memory of ``nbytes`` bytes that every rank of the communicator can read and write.

        Collective over the communicator, which must have ``shares_memory``.

        Raises
        ------
        SharedMemoryError
            On all ranks: if ``shares_memory`` is false, or there is too little memory. Nothing is allocated then.
        """
        if not self.shares_memory:
            raise SharedMemoryError(
                f"[rank {self.rank}] communicator {self.name!r} may span nodes: allocate on split_node()'s result"
            )
        if nbytes < 0:
            raise self.error("allocate_shared", tag, f"nbytes must be >= 0, got {nbytes}")
        shared: SharedMemory = self._call(("allocate_shared", tag), self._allocate_shared, nbytes)
        return shared

    def traces(self) -> list[CallTrace]:
        """Return the traces of the ranks of this communicator that run in this process. Not collective.

        That is one rank over MPI, and all ranks if they are threads.
        """
        return [self.trace]

    def shared_space(self) -> int | None:
        """Return how many bytes :meth:`allocate_shared` may still allocate on this node; None if no limit is known.

        Not collective: ranks may get different numbers.
        """
        return None

    def defer_close(self, close: Callable[[], None]) -> None:
        """Store ``close``, a collective function that frees resources, for :meth:`run_deferred_closes`. Not collective.

        Used after an error: other ranks may not have failed, so ``close``, which is collective over the communicator,
        cannot be called at once. An InMemoryCommunicator ignores it, because Python frees its memory.
        """

    def run_deferred_closes(self) -> None:
        """Call the functions that every rank has stored by :meth:`defer_close`. Collective over the communicator."""

    @abstractmethod
    def close(self) -> None:
        """Free the communicator; a second call does nothing. Collective over the communicator."""

    @abstractmethod
    def abort(self, error: BaseException | None = None) -> None:
        """End every rank of the job (MPI) or of the group of threads, because of ``error``. Not collective."""

    @abstractmethod
    def _leave_failed(self, error: BaseException) -> None: ...

    @abstractmethod
    def _split(self, color: int, key: int, name: str) -> Communicator: ...

    @abstractmethod
    def _split_node(self, ranks_per_node: int | None, name: str) -> Communicator: ...

    # ------------------------------------------------------------------ checks and counts

    def _count_broadcast(self, operation: str, tag: str, buffer: Array, root: int) -> Signature:
        checks.peer(self, operation, tag, root)
        checks.array(self, operation, tag, buffer, written=self.rank != root)
        if self.rank == root:
            self.counters.add(buffer.nbytes * (self.size - 1), tag)
        return operation, tag, buffer.dtype.char, buffer.size, root

    def _count_allgather(self, operation: str, tag: str, send: Array, recv: Array) -> Signature:
        checks.pair(self, operation, tag, send, recv)
        if send.size * self.size != recv.size:
            raise self.error(operation, tag, f"{self.size} blocks of {send.size} elements do not fill it", recv)
        self.counters.add(send.nbytes * (self.size - 1), tag)
        return operation, tag, send.dtype.char, send.size

    def _count_allgatherv(self, operation: str, tag: str, send: Array, recv: Array, counts: Sequence[int]) -> Signature:
        checks.pair(self, operation, tag, send, recv)
        checks.blocks(self, operation, tag, recv, counts)
        checks.own_block(self, operation, tag, send, counts)
        self.counters.add(send.nbytes * (self.size - 1), tag)
        return operation, tag, send.dtype.char, tuple(counts)

    def _count_gather_spans(
        self, operation: str, tag: str, send: Array, recv: Array, spans: Sequence[Span]
    ) -> Signature:
        checks.pair(self, operation, tag, send, recv)
        checks.places(self, operation, tag, recv, spans)
        counts = tuple(span.size for span in spans)
        checks.own_block(self, operation, tag, send, counts)
        self.counters.add(send.nbytes * (self.size - 1), tag)
        return operation, tag, send.dtype.char, counts

    def _count_alltoallv(
        self, operation: str, tag: str, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int]
    ) -> Signature:
        checks.pair(self, operation, tag, send, recv)
        checks.blocks(self, operation, tag, send, send_counts)
        checks.blocks(self, operation, tag, recv, recv_counts)
        if send_counts[self.rank] != recv_counts[self.rank]:
            raise self.error(
                operation, tag, f"own block: sends {send_counts[self.rank]}, receives {recv_counts[self.rank]}", send
            )
        self.counters.add(send.nbytes - int(send_counts[self.rank]) * send.itemsize, tag)
        return operation, tag, send.dtype.char

    def _count_allreduce(self, operation: str, tag: str, buffer: Array, op: str) -> Signature:
        checks.array(self, operation, tag, buffer, written=True)
        checks.reduction(self, operation, tag, buffer, op)
        self.counters.add(2 * buffer.nbytes * (self.size - 1) // self.size, tag)
        return operation, tag, buffer.dtype.char, buffer.size, op

    def _check_message(self, operation: str, buffer: Array, peer: int, tag: int) -> None:
        checks.array(self, operation, tag, buffer, written=operation == "irecv")
        checks.peer(self, operation, tag, peer)
        if not 0 <= tag < checks.TAG_LIMIT:
            raise self.error(operation, tag, f"tag must be in 0..{checks.TAG_LIMIT - 1}", buffer)
