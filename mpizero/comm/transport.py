"""Define the parts of communicators: counters, requests, shared memory, and the primitives to be implemented."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from mpizero.comm.recording.timeline import MESSAGE, CommunicatorCall, Timeline
from mpizero.errors import CollectiveError
from mpizero.guard.call_trace import CallTrace, Signature
from mpizero.layout import Span
from mpizero.types import Array

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

    Non-blocking calls count like blocking ones. ``bytes_sent`` is the sum, and ``messages`` is the number of calls that
    sent data. ``bytes_by_tag`` and ``messages_by_tag`` hold the same numbers for each tag of collectives, and under
    :data:`POINT_TO_POINT` for all point-to-point messages.

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
        """Wait until the operation has ended on this rank; a second call returns at once. Not collective."""

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

        Its text names the rank, operation, tag, communicator and reason, and the dtype and size of ``array`` if given.
        """
        what = f" {array.dtype}[{array.size}]" if hasattr(array, "dtype") and hasattr(array, "size") else ""
        label = f" {tag!r}" if tag != "" else ""
        return CollectiveError(f"[rank {self.rank}] {operation}{label} on {self.name!r}{what}: {reason}")

    def _call(self, call: Signature, primitive: Callable[..., Any], *arguments: Any) -> Any:
        """Record a collective in the trace, then run ``primitive(*arguments)`` and return its result.

        ``call`` is the record: operation, tag, and all else that must be the same on all ranks.
        """
        return self._run(call[0], call[1], self.trace.begin(call), primitive, *arguments)

    def _count(self, operation: str, tag: str, primitive: Callable[..., Any], *arguments: Any) -> Any:
        """Count a collective in the trace without recording it, then run ``primitive(*arguments)``; return its result.

        See [Note: counted calls] in call_trace.py.
        """
        return self._run(operation, tag, self.trace.count(), primitive, *arguments)

    def _run(self, operation: str, tag: str, sequence: int, primitive: Callable[..., Any], *arguments: Any) -> Any:
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
        """Return the error to raise when the message library has failed in a call; subclasses may find its cause."""
        return self.error(operation, tag, reason, array)

    def mismatch_term(self) -> int:
        """Return this rank's number for the check of calls: its sum over ranks is 0 mod ``MODULUS`` if calls match.

        Sends nothing, but all ranks must call it before the same collective. The number covers the calls of this
        communicator and of communicators of subsets of its ranks, see [Note: one sum] in registry.py. Communicators
        that compare every call anyway return 0.
        """
        return 0

    def mismatch(self) -> CollectiveError:
        """Return the error to raise when the sum of all ranks' :meth:`mismatch_term` is not 0.

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
    def _iallgatherv(self, send: Array, recv: Array, counts: Sequence[int]) -> Request: ...

    @abstractmethod
    def _igather_spans(self, send: Array, recv: Array, spans: Sequence[Span]) -> Request: ...

    @abstractmethod
    def _ialltoallv(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Request: ...

    @abstractmethod
    def _reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> None: ...

    @abstractmethod
    def _iallreduce(self, buffer: Array, op: str) -> Request: ...

    # Blocking forms by default; a subclass overrides those for which it has a faster one.

    def _broadcast(self, buffer: Array, root: int) -> None:
        self._ibroadcast(buffer, root).wait()

    def _allgather(self, send: Array, recv: Array) -> None:
        self._iallgather(send, recv).wait()

    def _allgatherv(self, send: Array, recv: Array, counts: Sequence[int]) -> None:
        self._iallgatherv(send, recv, counts).wait()

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
