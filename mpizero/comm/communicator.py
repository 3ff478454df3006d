"""Define the interface of communicators, and implement what MPI and threads have in common.

:class:`Communicator` has the methods that callers use. Each method checks its arguments on this rank, counts its bytes,
records the call in the trace, and then runs one primitive. :class:`Transport` declares the primitives; over MPI they
are implemented in ``comm/mpi.py``, over threads of one process in ``comm/threads.py``. The check of arguments takes
less than a microsecond, sends nothing, and raises CollectiveError if an argument is wrong. A :class:`Timeline` records,
while tracing is on, when the phases of a rank's work, such as communicator calls, begin and end.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from mpizero.errors import CollectiveError, SharedMemoryError
from mpizero.guard.call_trace import CallTrace, Signature
from mpizero.layout import Span
from mpizero.types import Array

T = TypeVar("T")


#: Name under which :class:`Counters` counts all messages of ``send`` and ``isend``, whatever their tags.
POINT_TO_POINT = "point to point"


class Counters:
    """Count what one rank has sent to *other* ranks through one communicator.

    [Note: bytes on the wire] The bytes of a call are computed from its arguments, whatever algorithm the MPI library
    chooses. ``size`` is the number of ranks:

    - ``allgather``, ``allgatherv``, ``igather_spans``: bytes of this rank's block x (size - 1);
    - ``alltoallv``, ``reduce_scatter``: bytes of the blocks for other ranks;
    - ``broadcast``: bytes of the buffer x (size - 1) on the root, 0 on the others;
    - ``allreduce``: 2 x bytes of the buffer x (size - 1) / size, rounded down;
    - ``send``: bytes of the buffer, 0 if a rank sends to itself;
    - ``allgather_object``, ``broadcast_object``: as ``allgatherv`` and ``broadcast``, for the pickled object;
    - barriers, splits and shared memory: 0.

    Non-blocking calls count like blocking ones. ``bytes_sent`` is the sum over all calls, and ``messages`` is the
    number of calls that sent data. ``bytes_by_tag`` and ``messages_by_tag`` hold the same numbers for each tag of
    collectives, and under :data:`POINT_TO_POINT` for all point-to-point messages.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def sent(comm):
    ...     comm.allreduce(np.zeros(100), tag="norms")
    ...     return comm.counters.bytes_sent, comm.counters.messages, dict(comm.counters.bytes_by_tag)
    >>> mz.testing.run_in_threads(2, sent)[0]
    (800, 1, {'norms': 800})
    """

    __slots__ = ("bytes_by_tag", "bytes_sent", "messages", "messages_by_tag")

    def __init__(self) -> None:
        self.bytes_by_tag: Counter[str] = Counter()
        self.messages_by_tag: Counter[str] = Counter()
        self.reset()

    def add(self, sent: int, tag: str = "") -> None:
        """Count one call that sends ``sent`` bytes. Not collective."""
        if sent:
            self.bytes_sent += sent
            self.messages += 1
            self.bytes_by_tag[tag] += sent
            self.messages_by_tag[tag] += 1

    def reset(self) -> None:
        """Set all counts to zero. Not collective."""
        self.bytes_sent = 0
        self.messages = 0
        self.bytes_by_tag.clear()
        self.messages_by_tag.clear()

    def __repr__(self) -> str:
        """Return the bytes and the messages as text. Not collective."""
        return f"Counters(bytes_sent={self.bytes_sent}, messages={self.messages})"


class Request(ABC):
    """Represent a non-blocking operation in flight, and keep its buffers alive until the operation has ended.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def overlapped(comm):
    ...     values = np.array([comm.rank + 1])
    ...     request = comm.iallreduce(values)
    ...     assert isinstance(request, mz.comm.Request)  # compute something else here, then
    ...     request.wait()
    ...     return int(values[0])
    >>> mz.testing.run_in_threads(2, overlapped)
    [3, 3]
    """

    @abstractmethod
    def wait(self) -> None:
        """Wait until the operation has ended on this rank; a second call returns immediately. Not collective."""

    @abstractmethod
    def test(self) -> bool:
        """Let the messages make progress, and tell whether the operation has ended. Not collective."""


class SharedMemory(ABC):
    """Hold memory that all ranks of a node communicator read and write; made by ``Communicator.allocate_shared``.

    Attributes
    ----------
    buffer : numpy.ndarray
        The whole window, the same memory on every rank: one-dimensional, uint8, 64-byte aligned, zero at first. Views
        of it must not be used after :meth:`close`, which unmaps the memory.

    Examples
    --------
    >>> import mpizero as mz
    >>> def written(comm):
    ...     with comm.split_node() as node:
    ...         shared = node.allocate_shared(8)
    ...         shared.buffer[node.rank] = node.rank + 1
    ...         node.node_barrier(shared)
    ...         found = shared.buffer[:3].tolist()
    ...         shared.close()
    ...         return found
    >>> mz.testing.run_in_threads(2, written)
    [[1, 2, 0], [1, 2, 0]]
    """

    buffer: Array

    @abstractmethod
    def synchronize(self) -> None:
        """Order this rank's loads and stores of the memory, as ``Win.Sync`` does. Not collective.

        To see the stores of another rank, both ranks call this before and after a common barrier.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the memory; ``buffer`` becomes empty. A second call does nothing.

        Collective over the communicator that allocated the memory.
        """


class Transport(ABC):
    """Hold rank, size, counters and trace of a communicator, and declare the primitives that subclasses implement.

    The primitives (``_barrier``, ``_iallgather`` ...) are called with arguments that have been checked.
    """

    #: Exceptions of the message library that are converted to CollectiveError.
    _native_errors: tuple[type[BaseException], ...] = ()

    def __init__(self, rank: int, size: int, name: str, shares_memory: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self.shares_memory = shares_memory or size == 1
        self.counters = Counters()
        self.trace = CallTrace(name)
        #: Called before a GPU array is passed to MPI, to wait for the GPU's own work. If None, GPU arrays are refused.
        self.wait_for_device: Callable[[], None] | None = None
        #: The error that was raised when ranks had called different operations; it is raised again from then on.
        self.out_of_step: CollectiveError | None = None
        #: Records the times of calls; None if there is no timeline.
        self.timeline: Timeline | None = None

    def __repr__(self) -> str:
        """Return name, rank and size as text. Not collective."""
        return f"{type(self).__name__}({self.name!r}, rank {self.rank} of {self.size})"

    def error(self, operation: str, tag: object, reason: object, array: object = None) -> CollectiveError:
        """Return, without raising it, the error for a failed call. Not collective.

        The error's text names the rank, operation, tag, communicator and reason, and the dtype and size of ``array`` if
        given.
        """
        what = f" {array.dtype}[{array.size}]" if hasattr(array, "dtype") and hasattr(array, "size") else ""
        label = f" {tag!r}" if tag != "" else ""
        return CollectiveError(f"[rank {self.rank}] {operation}{label} on {self.name!r}{what}: {reason}")

    def _call(self, call: Signature, primitive: Callable[..., T], *arguments: Any) -> T:
        """Record a collective in the trace, then run ``primitive(*arguments)`` and return its result.

        ``call`` is the record: the operation, the tag, and all other arguments that must be the same on all ranks.
        """
        return self._run(call[0], call[1], self.trace.begin(call), primitive, *arguments)

    def _count(self, operation: str, tag: str, primitive: Callable[..., T], *arguments: Any) -> T:
        """Count a collective in the trace without recording it, then run ``primitive(*arguments)``; return its result.

        See [Note: counted calls] in guard/call_trace.py.
        """
        return self._run(operation, tag, self.trace.count(), primitive, *arguments)

    def _run(self, operation: str, tag: str, sequence: int, primitive: Callable[..., T], *arguments: Any) -> T:
        """Run ``primitive(*arguments)`` and return its result; meanwhile the trace shows the call as the current one.

        Errors of the message library are converted to CollectiveError.
        """
        trace = self.trace
        trace.sequence = sequence
        trace.operation = operation
        trace.tag = tag
        trace.entered = entered = monotonic()
        try:
            return primitive(*arguments)
        except self._native_errors as error:
            raise self._failure(operation, tag, error, arguments[0] if arguments else None) from error
        finally:
            trace.entered = 0.0
            if self.timeline is not None:
                self.timeline.add(MESSAGE, CommunicatorCall(self.name, operation, tag, sequence), entered)

    def _failure(self, operation: str, tag: str, reason: object, array: object = None) -> CollectiveError:
        """Return the error to raise when the message library has failed in a call; subclasses may name a cause."""
        return self.error(operation, tag, reason, array)

    def mismatch_term(self) -> int:
        """Return this rank's number for the check of calls: if calls match, the sum of all ranks' numbers is 0.

        Sends nothing, but all ranks must call it between the same two collectives. The sum is taken modulo ``MODULUS``,
        see [Note: one sum] in guard/call_trace.py. The number covers the calls of this communicator and of
        communicators of subsets of its ranks. A communicator that compares the calls in every collective anyway
        returns 0.
        """
        return 0

    def mismatch(self) -> CollectiveError:
        """Return the error to raise when the sum of :meth:`mismatch_term` over the ranks is not 0.

        Collective over the communicator. The error names the first call that differs, if that is known.
        """
        return self.error("contract", "", "the ranks have called different collectives")

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _ibarrier(self) -> Request: ...

    def _node_barrier(self, shared: SharedMemory) -> None:
        shared.synchronize()
        self._barrier()
        shared.synchronize()

    @abstractmethod
    def _ibroadcast(self, buffer: Array, root: int) -> Request: ...

    @abstractmethod
    def _iallgather(self, send: Array, recv: Array) -> Request: ...

    @abstractmethod
    def _igather_spans(self, send: Array, recv: Array, spans: Sequence[Span]) -> Request: ...

    @abstractmethod
    def _ialltoallv(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Request: ...

    @abstractmethod
    def _allgatherv(self, send: Array, recv: Array, counts: Sequence[int]) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> None: ...

    @abstractmethod
    def _iallreduce(self, buffer: Array, op: str) -> Request: ...

    # Blocking forms by default; a subclass overrides those for which it has a faster one.

    def _broadcast(self, buffer: Array, root: int) -> None:
        self._ibroadcast(buffer, root).wait()

    def _allgather(self, send: Array, recv: Array) -> None:
        self._iallgather(send, recv).wait()

    def _alltoallv(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> None:
        self._ialltoallv(send, recv, send_counts, recv_counts).wait()

    def _allreduce(self, buffer: Array, op: str) -> None:
        self._iallreduce(buffer, op).wait()

    @abstractmethod
    def _allgather_bytes(self, payload: bytes) -> list[bytes]: ...

    @abstractmethod
    def _broadcast_bytes(self, payload: bytes | None, root: int) -> bytes: ...

    @abstractmethod
    def _isend(self, buffer: Array, peer: int, tag: int) -> Request: ...

    @abstractmethod
    def _irecv(self, buffer: Array, peer: int, tag: int) -> Request: ...

    @abstractmethod
    def _allocate_shared(self, nbytes: int) -> SharedMemory: ...


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
        """Return the communicator. Not collective."""
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
        return self._call(("ibarrier", tag), self._ibarrier)

    def node_barrier(self, shared: SharedMemory, tag: str = "", *, counted: bool = False) -> None:
        """Make what every rank wrote to ``shared`` before the call visible to every rank after it.

        Collective over the communicator that allocated ``shared``. With ``counted`` the trace only counts this call and
        does not record it, which is faster; see [Note: counted calls] in guard/call_trace.py.
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
        return self._call(call, self._ibroadcast, buffer, root)

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
        return self._call(call, self._iallgather, send, recv)

    def allgatherv(self, send: Array, recv: Array, counts: Sequence[int], tag: str = "") -> None:
        """Concatenate ``send`` of all ranks, in rank order, into ``recv``; rank i sends ``counts[i]`` elements.

        Collective over the communicator; ``counts`` is the same on every rank and may contain zeros. ``send`` and
        ``recv`` do not overlap.
        """
        check_pair(self, "allgatherv", tag, send, recv)
        check_blocks(self, "allgatherv", tag, recv, counts)
        check_block_size(self, "allgatherv", tag, send, counts)
        self.counters.add(send.nbytes * (self.size - 1), tag)
        call = "allgatherv", tag, send.dtype.char, tuple(counts)
        self._call(call, self._allgatherv, send, recv, counts)

    def igather_spans(self, send: Array, recv: Array, spans: Sequence[Span], tag: str = "") -> Request:
        """Start an all-gather: ``send`` of rank i is received in the elements ``spans[i]`` of ``recv`` of every rank.

        Collective over the communicator; ``spans`` is the same on every rank, and no two spans overlap. ``send`` may be
        a view of this rank's span of ``recv``; otherwise this call copies ``send`` to that span. Neither array may be
        written, nor the spans of other ranks in ``recv`` read, before the request has ended.
        """
        check_pair(self, "igather_spans", tag, send, recv)
        check_spans(self, "igather_spans", tag, recv, spans)
        counts = tuple(span.size for span in spans)
        check_block_size(self, "igather_spans", tag, send, counts)
        self.counters.add(send.nbytes * (self.size - 1), tag)
        target = recv.reshape(-1)[spans[self.rank].start : spans[self.rank].stop]
        if send.size and send.ctypes.data != target.ctypes.data:
            target[:] = send.reshape(-1)
        call = ("igather_spans", tag, send.dtype.char, counts)
        return self._call(call, self._igather_spans, send, recv, spans)

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
        return self._call(call, self._ialltoallv, send, recv, send_counts, recv_counts)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], tag: str = "") -> None:
        """Sum ``send`` over the ranks, in an order that MPI chooses; write this rank's block of the sum to ``recv``.

        Collective over the communicator. The sum is cut into one block for each rank, of ``counts[i]`` elements for
        rank i; ``counts`` is the same on every rank.
        """
        check_pair(self, "reduce_scatter", tag, send, recv)
        check_blocks(self, "reduce_scatter", tag, send, counts)
        check_block_size(self, "reduce_scatter", tag, recv, counts)
        check_reduction(self, "reduce_scatter", tag, send, "sum")
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
        return self._call(call, self._iallreduce, buffer, op)

    def allgather_object(self, value: Any, tag: str = "") -> list[Any]:
        """Return a list of the ``value`` of every rank, in rank order. Collective over the communicator.

        Each ``value`` is a picklable object; it should be small.
        """
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self.counters.add(len(payload) * (self.size - 1), tag)
        return [pickle.loads(p) for p in self._call(("allgather_object", tag), self._allgather_bytes, payload)]

    def broadcast_object(self, value: Any, root: int = 0, tag: str = "") -> Any:
        """Return the picklable ``value`` of ``root`` on every rank. Collective over the communicator."""
        check_peer(self, "broadcast_object", tag, root)
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if self.rank == root else None
        if payload is not None:
            self.counters.add(len(payload) * (self.size - 1), tag)
        return pickle.loads(self._call(("broadcast_object", tag, root), self._broadcast_bytes, payload, root))

    def run(self, operation: str, function: Callable[[], T], tag: str = "") -> T:
        """Call a collective function of another library, such as parallel HDF5, and return its result.

        Collective over the communicator. The watchdog supervises the call like a collective of this class;
        ``operation`` is the name of the function in its reports.
        """
        return self._call((operation, tag), function)

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
        return self._run("isend", str(tag), self.trace.started, self._isend, buffer, peer, tag)

    def irecv(self, buffer: Array, peer: int, tag: int = 0) -> Request:
        """Start :meth:`recv`; ``buffer`` must not be used before the request has ended. Not collective."""
        self._check_message("irecv", buffer, peer, tag)
        return self._run("irecv", str(tag), self.trace.started, self._irecv, buffer, peer, tag)

    # ------------------------------------------------------------------ groups

    def split(self, color: int, key: int | None = None, name: str = "") -> Communicator:
        """Return a communicator of the ranks with the same ``color`` (>= 0), ordered by ``key`` (default: rank).

        Collective over the communicator. ``name`` is the name of the result. The caller closes the result; MPICH has
        room for about 2000 open communicators.
        """
        if not 0 <= color < 2**31:
            raise self.error("split", name, f"color must be in 0..2**31-1, got {color}")
        label = name or f"{self.name}/{color}"
        return self._call(("split", ""), self._split, color, self.rank if key is None else key, label)

    def split_node(self, ranks_per_node: int | None = None, name: str = "") -> Communicator:
        """Return a communicator of the ranks that share memory with this rank, in rank order.

        Collective over the communicator. ``ranks_per_node=k`` cuts each real node into simulated nodes of ``k``
        consecutive ranks. The caller closes the result.
        """
        if ranks_per_node is not None and ranks_per_node < 1:
            raise self.error("split_node", name, f"ranks_per_node must be >= 1 or None, got {ranks_per_node}")
        label = name or f"{self.name}/node"
        return self._call(("split_node", "", ranks_per_node), self._split_node, ranks_per_node, label)

    def allocate_shared(self, nbytes: int, tag: str = "") -> SharedMemory:
        """Allocate zeroed memory of ``nbytes`` bytes that every rank of the communicator can read and write.

        Collective over the communicator, which must have ``shares_memory``.

        Raises
        ------
        SharedMemoryError
            On all ranks: if ``shares_memory`` is false, there is too little memory, or ranks pass different ``nbytes``.
            Nothing stays allocated then.
        """
        if not self.shares_memory:
            raise SharedMemoryError(
                f"[rank {self.rank}] communicator {self.name!r} may span nodes: allocate on split_node()'s result"
            )
        if nbytes < 0:
            raise self.error("allocate_shared", tag, f"nbytes must be >= 0, got {nbytes}")
        return self._call(("allocate_shared", tag), self._allocate_shared, nbytes)

    def traces(self) -> list[CallTrace]:
        """Return the traces of the ranks of this communicator that run in this process. Not collective.

        Over MPI this is the trace of this rank; if ranks are threads, these are the traces of all ranks.
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
        cannot be called now. An InMemoryCommunicator ignores ``close``, because Python frees its memory.
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
        check_peer(self, operation, tag, root)
        check_array(self, operation, tag, buffer, written=self.rank != root)
        if self.rank == root:
            self.counters.add(buffer.nbytes * (self.size - 1), tag)
        return operation, tag, buffer.dtype.char, buffer.size, root

    def _count_allgather(self, operation: str, tag: str, send: Array, recv: Array) -> Signature:
        check_pair(self, operation, tag, send, recv)
        if send.size * self.size != recv.size:
            raise self.error(operation, tag, f"{self.size} blocks of {send.size} elements do not fill it", recv)
        self.counters.add(send.nbytes * (self.size - 1), tag)
        return operation, tag, send.dtype.char, send.size

    def _count_alltoallv(
        self, operation: str, tag: str, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int]
    ) -> Signature:
        check_pair(self, operation, tag, send, recv)
        check_blocks(self, operation, tag, send, send_counts)
        check_blocks(self, operation, tag, recv, recv_counts)
        if send_counts[self.rank] != recv_counts[self.rank]:
            raise self.error(
                operation, tag, f"own block: sends {send_counts[self.rank]}, receives {recv_counts[self.rank]}", send
            )
        self.counters.add(send.nbytes - int(send_counts[self.rank]) * send.itemsize, tag)
        return operation, tag, send.dtype.char

    def _count_allreduce(self, operation: str, tag: str, buffer: Array, op: str) -> Signature:
        check_array(self, operation, tag, buffer, written=True)
        check_reduction(self, operation, tag, buffer, op)
        self.counters.add(2 * buffer.nbytes * (self.size - 1) // self.size, tag)
        return operation, tag, buffer.dtype.char, buffer.size, op

    def _check_message(self, operation: str, buffer: Array, peer: int, tag: int) -> None:
        check_array(self, operation, tag, buffer, written=operation == "irecv")
        check_peer(self, operation, tag, peer)
        if not 0 <= tag < TAG_LIMIT:
            raise self.error(operation, tag, f"tag must be in 0..{TAG_LIMIT - 1}", buffer)


#: Characters of the NumPy dtypes that can be sent, and of those that can be reduced. float16 is sent as 16-bit integers
#: and cannot be reduced. An array of bfloat16 must be viewed as uint16 to be sent.
MOVABLE = frozenset("?bBhHiIlLqQefdFD")
REDUCIBLE = frozenset("bBhHiIlLqQfd")
REDUCTIONS = ("sum", "max", "min")
#: Upper limit of the tags of ``send`` and ``recv``, not included. MPI guarantees tags up to 32767.
TAG_LIMIT = 32000


def check_array(comm: Transport, operation: str, tag: object, value: Array, written: bool = False) -> None:
    """Raise CollectiveError if ``value`` is not a C-contiguous array whose dtype and byte order can be sent.

    GPU arrays are allowed if ``comm`` passes them to MPI directly. With ``written`` the array must also be writable.
    ``operation`` and ``tag`` name the call in the error.
    """
    flags = value.flags if isinstance(value, np.ndarray) else _flags_of_device_array(comm, operation, tag, value)
    if not flags.c_contiguous:
        raise comm.error(operation, tag, "the array is not C-contiguous; send a copy", value)
    if written and not getattr(flags, "writeable", True):  # CuPy's are always
        raise comm.error(operation, tag, "the array to receive into is read-only", value)
    if value.dtype.char not in MOVABLE:
        raise comm.error(operation, tag, "this dtype has no message type; view it as integers of its width", value)
    if not value.dtype.isnative:
        reason = "another byte order than this machine's; convert it: a.astype(a.dtype.newbyteorder('='))"
        raise comm.error(operation, tag, reason, value)


def _flags_of_device_array(comm: Transport, operation: str, tag: object, value: Array) -> Any:
    if comm.wait_for_device is None or not hasattr(value, "__cuda_array_interface__"):
        raise comm.error(operation, tag, f"expected a NumPy array, got {type(value).__name__}")
    comm.wait_for_device()
    return value.flags


def check_peer(comm: Transport, operation: str, tag: object, rank: int) -> None:
    """Raise CollectiveError if ``rank`` is not a rank of the communicator."""
    if not 0 <= rank < comm.size:
        raise comm.error(operation, tag, f"rank {rank} is not in 0..{comm.size - 1}")


def check_pair(comm: Transport, operation: str, tag: str, send: Array, recv: Array) -> None:
    """Raise CollectiveError if ``send`` cannot be sent, ``recv`` cannot be received into, or their dtypes differ."""
    check_array(comm, operation, tag, send)
    check_array(comm, operation, tag, recv, written=True)
    if send.dtype != recv.dtype:
        raise comm.error(operation, tag, f"sends {send.dtype} but receives into {recv.dtype}", send)


def check_blocks(comm: Transport, operation: str, tag: str, value: Array, counts: Sequence[int]) -> None:
    """Raise CollectiveError if ``counts`` are not one length >= 0 for each rank, with ``value.size`` as their sum."""
    if len(counts) != comm.size or min(counts) < 0 or sum(counts) != value.size:
        raise comm.error(
            operation, tag, f"counts {list(counts)} are not {comm.size} blocks of {value.size} elements", value
        )


def check_spans(comm: Transport, operation: str, tag: str, value: Array, spans: Sequence[Span]) -> None:
    """Raise CollectiveError if ``spans`` are not one range of elements of ``value`` for each rank."""
    wrong = [tuple(span) for span in spans if span.size and not 0 <= span.start < span.stop <= value.size]
    if len(spans) != comm.size or wrong:
        raise comm.error(operation, tag, f"{len(spans)} places of {comm.size} ranks, outside of it: {wrong}", value)


def check_block_size(comm: Transport, operation: str, tag: str, value: Array, counts: Sequence[int]) -> None:
    """Raise CollectiveError if the size of ``value`` is not this rank's entry in ``counts``."""
    if counts[comm.rank] != value.size:
        raise comm.error(operation, tag, f"counts[{comm.rank}] is {counts[comm.rank]}", value)


def check_reduction(comm: Transport, operation: str, tag: str, value: Array, op: str) -> None:
    """Raise CollectiveError if ``op`` is not "sum", "max" or "min", or the dtype of ``value`` cannot be reduced."""
    if op not in REDUCTIONS:
        raise comm.error(operation, tag, f"op must be one of {REDUCTIONS}, got {op!r}", value)
    if value.dtype.char not in REDUCIBLE:
        raise comm.error(operation, tag, "this dtype cannot be reduced; convert it to float32 or an integer", value)


#: Name of the phase of communicator calls; the detail of such a span is a :class:`CommunicatorCall`.
MESSAGE = "message"
_NOTHING = nullcontext()


class CommunicatorCall(NamedTuple):
    """Describe a call of a communicator; used as the ``detail`` of a :class:`TimeSpan`.

    Attributes
    ----------
    communicator : str
        Name of the communicator.
    operation, tag : str
        The call and its label, for example "allgatherv" and "gather".
    sequence : int
        Number of the collective, the same on all ranks of the communicator.
    """

    communicator: str
    operation: str
    tag: str
    sequence: int

    def __str__(self) -> str:
        """Return operation, tag and communicator as text."""
        return f"{self.operation} {self.tag!r} on {self.communicator!r}"


class TimeSpan(NamedTuple):
    """Hold the name of a phase of work, a detail (any object), and start and end in seconds of ``time.monotonic()``."""

    phase: str
    detail: Any
    start: float
    stop: float


class Timeline:
    """Collect the time spans of one rank, in the order in which they end. Spans of one thread are nested or disjoint.

    Attributes
    ----------
    on : bool
        Whether spans are recorded.
    """

    __slots__ = ("_spans", "on")

    def __init__(self) -> None:
        self.on = False
        self._spans: list[TimeSpan] = []

    def span(self, phase: str, detail: Any = "") -> AbstractContextManager[object]:
        """Return a context manager that records its block as a time span; it does nothing while ``on`` is false."""
        return _Open(self, phase, detail) if self.on else _NOTHING

    def begin(self) -> float:
        """Return the current time, to be passed to :meth:`end`; 0 while ``on`` is false.

        For frequent operations: while ``on`` is false, :meth:`begin` and :meth:`end` together take a tenth of a
        microsecond, a third of the time of :meth:`span`.
        """
        return monotonic() if self.on else 0.0

    def end(self, phase: str, detail: Any, begun: float) -> None:
        """Record a span from ``begun``, the result of :meth:`begin`, until now; do nothing while ``on`` is false."""
        if self.on:
            self.add(phase, detail, begun)

    def add(self, phase: str, detail: Any, start: float) -> None:
        """Record a span from ``start``, in seconds of ``time.monotonic()``, until now, also while ``on`` is false."""
        self._spans.append(TimeSpan(phase, detail, start, monotonic()))

    def take(self) -> list[TimeSpan]:
        """Return the spans recorded since the last call of this method, and remove them from the timeline."""
        spans, self._spans = self._spans, []
        return spans


class _Open:
    """Record the time of a ``with`` block as a span of ``timeline``."""

    __slots__ = ("_detail", "_phase", "_start", "_timeline")

    def __init__(self, timeline: Timeline, phase: str, detail: Any) -> None:
        self._timeline, self._phase, self._detail = timeline, phase, detail

    def __enter__(self) -> None:
        self._start = monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._timeline.add(self._phase, self._detail, self._start)
