"""Sum, gather and shift arrays over the ranks that a layer is split over; and lock blocks of shared memory.

Layers use a :class:`CommunicatorGroup`. Its arrays are exchanged by one of two implementations of
:class:`GroupTransport`: by messages, or, if the ranks are on one node, through a shared window, into which each rank
writes once and which all read. Both implementations add in the order of the binary tree over the ranks' numbers, so a
sum has the same bits with either. :class:`BlockLocks` lets ranks exclude each other without MPI.

[Note: two halves] The shared window has two halves. Each call writes into one half, waits at one barrier, and reads;
the next call uses the other half. Before a rank writes into the first half again, it has passed the barrier of the call
that used the second half. Every rank enters that barrier only after it has finished reading the first half, so no
second barrier is needed.

[Note: signatures] With its array each rank writes a number that identifies its call. All ranks compare these numbers
after the barrier, so different calls raise the same error on every rank. A window that is too small is replaced only
after the numbers have been compared, because replacing it is collective.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpizero._util.checks import native
from mpizero._util.text import notice
from mpizero.comm.agreement import all_ranks
from mpizero.comm.communicator import MOVABLE, Communicator, Request, SharedMemory
from mpizero.errors import SharedMemoryError
from mpizero.guard.call_trace import describe_call, mismatch
from mpizero.kernels import namespace
from mpizero.kernels.matmul_tile import fold
from mpizero.layout import Partition
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.kernels.gpu import Device


class CommunicatorGroup:
    """Sum, gather and shift arrays over the ranks of a communicator; implements :class:`mpizero.types.Group`.

    All ranks pass arrays of the same dtype and of shapes that fit together. An array that is not C-contiguous is copied
    first. Sums and gathers return new, C-contiguous arrays; in a group of one rank these are copies. Sums are added in
    the order of the binary tree over the ranks' numbers, so they have the same bits on every rank and in every run.

    Parameters
    ----------
    comm : Communicator
        The ranks of the group. The caller closes this communicator.
    node_comm : Communicator, optional
        A communicator of the same ranks that shares memory (``comm`` itself if it does). Sums and gathers then go
        through one shared window, and only shifts send messages. ``node_comm`` is ignored if it has fewer ranks than
        ``comm``.

    Attributes
    ----------
    comm : Communicator
        The ranks of the group; the communicator's ``counters`` hold the bytes that this rank has sent.
    rank, size : int
        Number of this rank in the group, and number of its ranks.
    counts : Counter of str to int
        Number of calls of each method on this rank.
    """

    def __init__(self, comm: Communicator, node_comm: Communicator | None = None) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.counts: Counter[str] = Counter()
        self._message_group = MessageGroup(comm)
        self._window: WindowGroup | None = None
        if node_comm is not None and 1 < comm.size == node_comm.size and node_comm.shares_memory:
            self._window = WindowGroup(node_comm, self._message_group)
        self._transport: GroupTransport = self._window or self._message_group

    def __repr__(self) -> str:
        """Return the class and the communicator as text. Not collective."""
        return f"{type(self).__name__}({self.comm!r})"

    @property
    def private_bytes(self) -> int:
        """Bytes of the message buffers that this rank keeps."""
        return self._message_group.nbytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the shared window, counted once for the whole group."""
        return 0 if self._window is None else self._window.nbytes

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Return the sum of the ranks' arrays, all of the shape of ``x``. Collective over the group.

        ``x`` is float32 or float64.
        """
        return self._reduce("all_reduce", x, np.add, tag)

    def all_max(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise maximum of the ranks' arrays; NaN if any is NaN. Collective over the group.

        ``x`` is float32 or float64.
        """
        return self._reduce("all_max", x, np.maximum, tag)

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return the arrays of all ranks, concatenated along ``axis``.

        Collective over the group. The array of rank i has length ``sizes[i]`` along ``axis``. All dtypes of
        :data:`mpizero.comm.communicator.MOVABLE` are accepted.
        """
        axis, sizes = self._along("all_gather", x, axis, sizes, tag)
        if x.shape[axis] != sizes[self.rank]:
            raise self._error("all_gather", tag, f"sizes[{self.rank}] is {sizes[self.rank]} along axis {axis}", x)
        self.counts["all_gather"] += 1
        if self.size == 1:
            return _copy(x)
        with self._timed("all_gather", tag):
            gathered = self._transport.gather(_cube(x, axis), sizes, tag)
        return gathered.reshape(*x.shape[:axis], sum(sizes), *x.shape[axis + 1 :])

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return this rank's block, of length ``sizes[rank]`` along ``axis``, of the sum of the ranks' arrays.

        Collective over the group. ``x`` is float32 or float64, and has length ``sum(sizes)`` along ``axis``.
        """
        self._check_float("reduce_scatter", x, tag)
        axis, sizes = self._along("reduce_scatter", x, axis, sizes, tag)
        if x.shape[axis] != sum(sizes):
            raise self._error("reduce_scatter", tag, f"sizes {sizes} do not add up to its length along axis {axis}", x)
        self.counts["reduce_scatter"] += 1
        if self.size == 1:
            return _copy(x)
        with self._timed("reduce_scatter", tag):
            block = self._transport.scatter(_cube(x, axis), sizes, tag)
        return block.reshape(*x.shape[:axis], sizes[self.rank], *x.shape[axis + 1 :])

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> GroupShift:
        """Start to send ``arrays`` to rank + ``by`` and to receive arrays of the same shapes from rank - ``by``.

        Collective over the group: all ranks pass the same shapes and the same ``by``. Rank numbers are taken modulo the
        size of the group. C-contiguous arrays are not copied, so they must not change before ``wait()`` of the result
        has returned. If ``by`` is a multiple of the size, nothing is sent and ``wait()`` returns ``arrays`` themselves.
        """
        for x in arrays:
            self._check("shift", x, tag)
        self.counts["shift"] += 1
        target, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        if target == self.rank:
            return GroupShift((), tuple(arrays))
        received = tuple(self._empty(x.shape, x.dtype) for x in arrays)
        requests = [self.comm.irecv(x, source, SHIFT_TAG) for x in received]
        requests += [self.comm.isend(contiguous(x), target, SHIFT_TAG) for x in arrays]
        return GroupShift(requests, received)

    def all_to_all(self, parts: Sequence[Array], counts: Array, tag: str = "") -> list[Array]:
        """Send the flat array ``parts[r]`` to rank r; return what each rank has sent to this one.

        Collective over the group. All arrays have the same dtype. The integer ``counts[s, r]`` is the number of
        elements that rank s sends to rank r; all ranks pass the same ``counts``. This rank's own part is not sent, and
        not copied. The returned arrays are valid until the next call.
        """
        for part in parts:
            self._check("all_to_all", part, tag)
        own, sizes, row = parts[self.rank], [part.size for part in parts], counts[self.rank].tolist()
        if sizes != row:
            raise self._error("all_to_all", tag, f"the parts have {sizes} elements; counts[{self.rank}] is {row}", own)
        self.counts["all_to_all"] += 1
        if self.size == 1:
            return [own]
        others = [own[:0] if r == self.rank else part for r, part in enumerate(parts)]
        table = tuple(map(tuple, (counts * ~np.eye(self.size, dtype=bool)).tolist()))
        with self._timed("all_to_all", tag):
            blocks = self._transport.exchange(others, table, tag)
        blocks[self.rank] = own
        return blocks

    def close(self) -> None:
        """Free the window and the buffers, but not ``comm``; a second call does nothing. Collective over the group."""
        self._transport.close()

    # ------------------------------------------------------------------ checks

    #: Description, in errors, of the arrays that :meth:`_takes` accepts.
    _expected = "a NumPy array"

    def _takes(self, x: object) -> bool:
        return isinstance(x, np.ndarray)

    def _empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, dtype)

    def _reduce(self, kind: str, x: Array, operation: np.ufunc, tag: str) -> Array:
        self._check_float(kind, x, tag)
        self.counts[kind] += 1
        if self.size == 1:
            return _copy(x)
        with self._timed(kind, tag):
            return self._transport.reduce(contiguous(x).reshape(-1), operation, tag).reshape(x.shape)

    def _timed(self, kind: str, tag: str) -> AbstractContextManager[object]:
        """Return a context manager that records the time of a call, including copies and sums, while tracing is on."""
        timeline = self.comm.timeline
        return nullcontext() if timeline is None else timeline.span("layers' messages", f"{kind} {tag!r}")

    def _check(self, kind: str, x: Array, tag: str) -> None:
        if not self._takes(x):
            raise self._error(kind, tag, f"expected {self._expected}, got {type(x).__name__}")
        if x.dtype.char not in MOVABLE:
            raise self._error(kind, tag, "this dtype has no message type; view it as integers of its width", x)

    def _check_float(self, kind: str, x: Array, tag: str) -> None:
        self._check(kind, x, tag)
        if x.dtype.char not in "fd":
            raise self._error(kind, tag, "expected float32 or float64", x)

    def _along(self, kind: str, x: Array, axis: int, sizes: Sequence[int], tag: str) -> tuple[int, tuple[int, ...]]:
        """Check ``axis`` and ``sizes``; return the axis counted from the front, and the sizes as a tuple."""
        self._check(kind, x, tag)
        if not -x.ndim <= axis < x.ndim:
            raise self._error(kind, tag, f"axis {axis} does not exist in shape {x.shape}", x)
        sizes = tuple(map(int, sizes))
        if len(sizes) != self.size or min(sizes) < 0:
            raise self._error(kind, tag, f"sizes {sizes} are not one length >= 0 for each of {self.size} ranks", x)
        return axis % x.ndim, sizes

    def _error(self, kind: str, tag: str, reason: str, x: Array | None = None) -> Exception:
        shape = "" if x is None else f" (shape {x.shape})"
        return self.comm.error(kind, tag, reason + shape, x)


#: Tag of the messages of a shift; other messages of the same communicator use lower ones.
SHIFT_TAG = 31_000


class GroupShift:
    """Represent the messages of one :meth:`CommunicatorGroup.shift`; implements :class:`mpizero.types.ShiftRequest`."""

    __slots__ = ("_received", "_requests")

    def __init__(self, requests: Sequence[Request], received: tuple[Array, ...]) -> None:
        self._requests = requests
        self._received = received

    def wait(self) -> tuple[Array, ...]:
        """Wait for the messages and return the received arrays; the sent arrays may be overwritten afterwards.

        Not collective; a second call returns the same arrays immediately.
        """
        for request in self._requests:
            request.wait()
        self._requests = ()
        return self._received

    def test(self) -> bool:
        """Make progress and tell whether :meth:`wait` would return without waiting. Not collective."""
        return all([request.test() for request in self._requests])


class GpuAwareGroup(CommunicatorGroup):
    """Sum, gather and shift GPU arrays by passing them to MPI directly; see [Note: direct messages] in comm/p2p.py.

    Parameters
    ----------
    group : CommunicatorGroup
        The ranks; calls are counted in its ``counts``.
    device : Device
        The GPU of this rank.
    """

    _expected = "an array of a GPU"

    def __init__(self, group: CommunicatorGroup, device: Device) -> None:
        super().__init__(group.comm)
        self.counts, self._device = group.counts, device
        self.comm.wait_for_device = device.synchronize
        self._transport = self._message_group = MessageGroup(self.comm, self._empty)

    def _takes(self, x: object) -> bool:
        return hasattr(x, "__cuda_array_interface__")

    def _empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        return self._device.empty(prod(shape) if isinstance(shape, tuple) else shape, dtype).reshape(shape)


def contiguous(x: Array) -> Array:
    """Return ``x`` if it is C-contiguous and in this machine's byte order, else a copy that is, on the same device.

    Not collective.
    """
    return namespace(x).ascontiguousarray(native(x))


def _copy(x: Array) -> Array:
    return namespace(x).array(x, order="C")


def _cube(x: Array, axis: int) -> Array:
    """Return ``x`` reshaped to three axes: all axes before ``axis`` as one, ``axis`` itself, all axes after it as one.

    The result is C-contiguous: a view of ``x`` if ``x`` is C-contiguous, else a copy.
    """
    return contiguous(x).reshape(prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :]))


class GroupTransport(Protocol):
    """Describe a way to sum and gather arrays of a group of ranks: by messages, or through shared memory.

    Sums are always added by :func:`~mpizero.kernels.matmul_tile.fold`, in the order of the binary tree over the ranks'
    numbers, so their bits do not depend on the transport. Every method is collective over the group. Arrays are
    C-contiguous. ``sizes[i]`` is the length of rank i's block.
    """

    def reduce(self, x: Array, operation: np.ufunc, tag: str) -> Array:
        """Combine the arrays ``x`` of all ranks by ``operation``, element by element, into a new array.

        ``x`` has one dimension and the same length on all ranks.
        """

    def scatter(self, x: Array, sizes: Sequence[int], tag: str) -> Array:
        """Sum ``x`` over the ranks, and return this rank's block of the sum along axis 1 as a new array.

        ``x`` has shape (outer, sum(sizes), inner), and the result (outer, sizes[rank], inner).
        """

    def gather(self, x: Array, sizes: Sequence[int], tag: str) -> Array:
        """Concatenate ``x`` of all ranks, of shape (outer, sizes[rank], inner), along axis 1 into a new array."""

    def exchange(self, parts: Sequence[Array], counts: Sequence[tuple[int, ...]], tag: str) -> list[Array]:
        """Send the flat array ``parts[r]`` to rank r; return what each rank has sent to this one.

        ``counts[s][r]`` is the number of elements that rank s sends to rank r, 0 for s = r. The returned arrays are
        valid until the next call.
        """

    def close(self) -> None:
        """Free the message buffers or the shared window."""


class MessageGroup:
    """Implement :class:`GroupTransport` by MPI messages, on a communicator of at least two ranks.

    Message buffers are kept for the next call. Returned arrays are always new.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    empty : callable
        ``empty(shape, dtype)`` allocates results and buffers. For GPU arrays, pass one that allocates on the GPU.
    """

    def __init__(self, comm: Communicator, empty: Callable[..., Array] = np.empty) -> None:
        self.comm, self._empty = comm, empty
        self._buffers: dict[str, Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the message buffers that this rank keeps."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reduce(self, x: Array, operation: np.ufunc, tag: str) -> Array:
        """Combine ``x`` of all ranks element by element: a reduce-scatter of equal blocks, then an all-gather.

        Collective over the group. Every rank sends ``x.nbytes * (size - 1) / size`` bytes twice, up to rounding. In a
        group of two, each rank instead sends its whole array in one message, which is the same number of bytes.
        """
        size, rank = self.comm.size, self.comm.rank
        result = self._empty(x.shape, x.dtype)
        if size == 2:
            both = self._buffer("arrived", 2 * x.size, x.dtype)
            self.comm.allgather(x, both, tag)
            operation(both[: x.size], both[x.size :], out=result)
            return result
        sizes = Partition(x.size, size).sizes()
        arrived = self._buffer("arrived", size * sizes[rank], x.dtype)
        self.comm.alltoallv(x, sizes, arrived, [sizes[rank]] * size, tag)
        total = self._buffer("total", sizes[rank], x.dtype)
        fold(operation, arrived.reshape(size, sizes[rank]), total)
        self.comm.allgatherv(total, result, sizes, tag)
        return result

    def scatter(self, x: Array, sizes: Sequence[int], tag: str) -> Array:
        """Sum ``x`` over the ranks and return this rank's block, see :meth:`GroupTransport.scatter`.

        Collective over the group. Rank i receives block i of ``x`` from every other rank, and adds these blocks.
        """
        size, rank = self.comm.size, self.comm.rank
        outer, _, inner = x.shape
        result = self._empty((outer, sizes[rank], inner), x.dtype)
        send, counts = x.reshape(-1), [outer * n * inner for n in sizes]
        if outer > 1:
            send = self._buffer("packed", x.size, x.dtype)
            for target, block in self._blocks(send, x, sizes):
                target[...] = block
        arrived = self._buffer("arrived", size * result.size, x.dtype)
        self.comm.alltoallv(send, counts, arrived, [result.size] * size, tag)
        fold(np.add, arrived.reshape(size, result.size), result.reshape(-1))
        return result

    def gather(self, x: Array, sizes: Sequence[int], tag: str) -> Array:
        """Concatenate ``x`` of all ranks along axis 1, see :meth:`GroupTransport.gather`. Collective over the group.

        Each rank sends its array to all other ranks.
        """
        outer, _, inner = x.shape
        counts = [outer * n * inner for n in sizes]
        result = self._empty((outer, sum(sizes), inner), x.dtype)
        if outer <= 1:
            self.comm.allgatherv(x, result, counts, tag)
            return result
        arrived = self._buffer("arrived", result.size, x.dtype)
        self.comm.allgatherv(x, arrived, counts, tag)
        for block, target in self._blocks(arrived, result, sizes):
            target[...] = block
        return result

    def exchange(self, parts: Sequence[Array], counts: Sequence[tuple[int, ...]], tag: str) -> list[Array]:
        """Send ``parts[r]`` to rank r, see :meth:`GroupTransport.exchange`. Collective over the group."""
        wanted = [row[self.comm.rank] for row in counts]
        received = self._empty(sum(wanted), parts[0].dtype)
        self.comm.alltoallv(np.concatenate(parts), counts[self.comm.rank], received, wanted, tag)
        return np.split(received, np.cumsum(wanted)[:-1])

    def close(self) -> None:
        """Free the message buffers. Not collective."""
        self._buffers.clear()

    @staticmethod
    def _blocks(packed: Array, full: Array, sizes: Sequence[int]) -> list[tuple[Array, Array]]:
        """Return for each rank two views: its block in ``packed``, and its block of ``full`` along axis 1.

        In ``packed`` the blocks of the ranks lie one after another, each C-contiguous.
        """
        outer, _, inner = full.shape
        pairs, start = [], 0
        for size in sizes:
            block = packed[outer * start * inner :][: outer * size * inner].reshape(outer, size, inner)
            pairs.append((block, full[:, start : start + size]))
            start += size
        return pairs

    def _buffer(self, name: str, size: int, dtype: Any) -> Array:
        """Return a message buffer of ``size`` elements; calls with the same ``name`` return the same memory."""
        nbytes = size * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[name] = self._empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype)


#: Bytes of a cache line, on which every array starts.
LINE = 64
#: Bytes of each half of the window until an array needs more.
FIRST_HALF = 1 << 16
#: With at least so many ranks and bytes, each rank sums one part and then copies the whole sum, which needs a second
#: barrier. Below, every rank sums the whole array for itself.
SHARED_SUM_RANKS, SHARED_SUM_BYTES = 4, 1 << 18
#: Number of different calls (combinations of operation, dtype and shapes) for which the views of the window and the
#: number of the call are cached.
_REMEMBERED = 512


class WindowGroup:
    """Implement :class:`GroupTransport` through memory that all ranks of the group share.

    The window is allocated at the first call, and replaced by a larger one when a call needs more memory. If there is
    too little shared memory, all ranks use ``messages`` instead, and rank 0 of the group prints a notice.

    Parameters
    ----------
    node : Communicator
        A communicator of the group's ranks, with ``shares_memory``.
    messages : MessageGroup
        A group of the same ranks, for use when shared memory is short. The leaves of the tree in whose order sums are
        added are the rank numbers in its communicator, which may differ from those in ``node``.
    """

    def __init__(self, node: Communicator, messages: MessageGroup) -> None:
        self._node = node
        self._message_group = messages
        self._rank, self._size = messages.comm.rank, messages.comm.size
        self._memory: SharedMemory | None = None
        self._has_room = True
        self._capacity = -1
        self._half = 0
        self._signatures: tuple[Array, ...] = ()
        self._views: dict[tuple[object, ...], list[tuple[Array, ...]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the shared window, counted once for the whole group."""
        return 0 if self._memory is None else self._memory.buffer.nbytes

    def reduce(self, x: Array, operation: np.ufunc, tag: str) -> Array:
        """Combine ``x`` of all ranks element by element, into a new array. Collective over the group."""
        shared_sum = self._size >= SHARED_SUM_RANKS and x.nbytes >= SHARED_SUM_BYTES
        call = (operation.__name__, x.dtype.char, x.size)
        rows = self._open(call, [x.shape] * (self._size + shared_sum), x.dtype, tag)
        if rows is None:
            return self._message_group.reduce(x, operation, tag)
        rows[self._rank][...] = x
        self._compare(call, tag)
        result = np.empty(x.shape, x.dtype)
        terms = [x if rank == self._rank else row for rank, row in enumerate(rows[: self._size])]
        if not shared_sum:
            fold(operation, terms, result)
            return result
        shard = Partition(x.size, self._size).shard(self._rank)
        fold(operation, [term[shard] for term in terms], rows[-1][shard])
        self._barrier(tag)
        result[...] = rows[-1]
        return result

    def scatter(self, x: Array, sizes: Sequence[int], tag: str) -> Array:
        """Sum ``x`` over the ranks and return this rank's block, see :meth:`GroupTransport.scatter`.

        Collective over the group. Each rank writes to the window only the blocks of ``x`` that other ranks need.
        """
        call = ("reduce_scatter", x.dtype.char, x.shape, tuple(sizes))
        rows = self._open(call, [x.shape] * self._size, x.dtype, tag)
        if rows is None:
            return self._message_group.scatter(x, sizes, tag)
        start = sum(sizes[: self._rank])
        stop = start + sizes[self._rank]
        local = rows[self._rank]
        local[:, :start] = x[:, :start]
        local[:, stop:] = x[:, stop:]
        self._compare(call, tag)
        result = np.empty((x.shape[0], stop - start, x.shape[2]), x.dtype)
        terms = [(x if rank == self._rank else row)[:, start:stop] for rank, row in enumerate(rows)]
        if len(result) == 1:
            fold(np.add, [term[0] for term in terms], result[0])
        else:
            fold(np.add, terms, result)
        return result

    def gather(self, x: Array, sizes: Sequence[int], tag: str) -> Array:
        """Concatenate ``x`` of all ranks along axis 1, see :meth:`GroupTransport.gather`. Collective over the group.

        Each rank writes its array to its block of the whole array in the window; then each rank copies the whole array.
        """
        outer, _, inner = x.shape
        call = ("all_gather", x.dtype.char, outer, inner, tuple(sizes))
        arrays = self._open(call, [(outer, sum(sizes), inner)], x.dtype, tag)
        if arrays is None:
            return self._message_group.gather(x, sizes, tag)
        gathered, start = arrays[0], sum(sizes[: self._rank])
        gathered[:, start : start + sizes[self._rank]] = x
        self._compare(call, tag)
        return gathered.copy()

    def exchange(self, parts: Sequence[Array], counts: Sequence[tuple[int, ...]], tag: str) -> list[Array]:
        """Give ``parts[r]`` to rank r, see :meth:`GroupTransport.exchange`. Collective over the group.

        Each rank writes its parts to the window, one after the other; the results are views of the window.
        """
        dtype, most = parts[0].dtype, max(map(sum, counts))
        call = ("all_to_all", dtype.char, counts)
        rows = self._open(call, [(most,)] * self._size, dtype, tag)
        if rows is None:
            return self._message_group.exchange(parts, counts, tag)
        np.concatenate(parts, out=rows[self._rank][: sum(counts[self._rank])])
        self._compare(call, tag)
        starts = (sum(row[: self._rank]) for row in counts)
        return [row[start:][: sizes[self._rank]] for row, start, sizes in zip(rows, starts, counts, strict=True)]

    def close(self) -> None:
        """Free the window and the message buffers. Collective over the group."""
        self._drop()
        self._message_group.close()

    # ------------------------------------------------------------------ the window

    def _open(
        self, call: tuple[object, ...], shapes: Sequence[tuple[int, ...]], dtype: Any, tag: str
    ) -> tuple[Array, ...] | None:
        """Return views with these shapes in the current half of the window; None if there is too little shared memory.

        Successive calls use the two halves in turn, see [Note: two halves].

        ``call`` identifies the call: the operation, the dtype character and the sizes.
        """
        halves = self._views.get(call)
        if halves is None:
            if not self._has_room:
                return None
            sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape in shapes]
            starts = list(accumulate((-(-size // LINE) * LINE for size in sizes), initial=0))
            if starts[-1] > self._capacity and not self._grow(call, starts[-1], tag):
                return None
            if len(self._views) >= _REMEMBERED:
                self._views.clear()
            assert self._memory is not None
            halves = []
            for half in range(2):
                room = self._memory.buffer[2 * self._size * LINE + half * self._capacity :]
                parts = zip(starts, sizes, shapes, strict=False)
                halves.append(tuple(room[start:][:size].view(dtype).reshape(shape) for start, size, shape in parts))
            self._views[call] = halves
        return halves[self._half]

    def _compare(self, call: tuple[object, ...], tag: str) -> None:
        """Wait at the barrier until every rank has written, and use the other half of the window for the next call.

        Raises on every rank if the ranks have made different calls; ``call`` is as for :meth:`_open`.
        """
        number, numbers = _signature(call), self._signatures[self._half]
        self._half ^= 1
        numbers[self._rank] = number
        self._barrier(tag)
        if numbers.tolist() != [number] * self._size:
            last = self._node.trace.records()[-1]._replace(what=describe_call((call[0], tag, *call[1:])), number=number)
            gathered = dict(self._node.allgather_object((self._rank, last), "contract"))
            raise (
                mismatch(self._node.name, {rank: [record] for rank, record in gathered.items()})
                or self._node.mismatch()
            )

    def _barrier(self, tag: str) -> None:
        assert self._memory is not None
        self._node.node_barrier(self._memory, tag)

    def _grow(self, call: tuple[object, ...], nbytes: int, tag: str) -> bool:
        """Allocate or replace the window so that each half has room for ``nbytes`` bytes; False if memory is short.

        Collective over the group. ``call`` is as for :meth:`_open`.
        """
        try:
            if self._memory is None:
                self._allocate(FIRST_HALF)
            if nbytes > self._capacity:
                self._compare(call, tag)
                self._drop()
                self._allocate(nbytes)
        except SharedMemoryError as error:  # raised on all ranks alike
            self._has_room = False
            if self._rank == 0:
                notice(f"{error}; group {self._node.name!r} goes on with messages")
        return self._has_room

    def _allocate(self, nbytes: int) -> None:
        heads = 2 * self._size * LINE
        capacity = -(-nbytes // 4096) * 4096
        self._memory = self._node.allocate_shared(heads + 2 * capacity, "group window")
        self._capacity = capacity
        numbers = self._memory.buffer[:heads].view(np.int64).reshape(2, self._size, LINE // 8)[:, :, 0]
        self._signatures = (numbers[0], numbers[1])
        self._half = 0

    def _drop(self) -> None:
        memory, self._memory = self._memory, None
        self._views.clear()
        self._signatures = ()
        self._capacity = -1
        if memory is not None:
            memory.close()


@lru_cache(maxsize=_REMEMBERED)
def _signature(call: tuple[object, ...]) -> int:
    """Return a 56-bit hash of a call, the same in every process."""
    return int.from_bytes(blake2b(repr(call).encode(), digest_size=7).digest(), "little")


class BlockLocks:
    """Lock numbered blocks of shared memory, each for one rank of a node at a time; collective over ``node``.

    [Note: locks] A lock is one byte of a file, which every rank has opened for itself (an open file description lock of
    Linux). So a thread that may not call MPI can lock, and ranks that are threads exclude each other too. The kernel
    frees the locks of a process that dies, so no rank waits for it for ever. The constructor unlinks the file.
    """

    def __init__(self, node: Communicator) -> None:
        self._file = -1
        path = ""
        with all_ranks(node, "block locks"):
            if node.rank == 0:
                import tempfile

                first, path = tempfile.mkstemp(prefix="mpizero-locks-")
                os.close(first)
        path = node.broadcast_object(path, tag="block locks")
        try:
            with all_ranks(node, "block locks"):
                self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        finally:
            if node.rank == 0:
                with suppress(OSError):
                    os.unlink(path)

    @contextmanager
    def hold(self, block: int) -> Iterator[None]:
        """Hold lock number ``block`` during the ``with`` block. Not collective."""
        self._set(fcntl.F_WRLCK, block)
        try:
            yield
        finally:
            self._set(fcntl.F_UNLCK, block)

    def _set(self, kind: int, block: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi", kind, os.SEEK_SET, block, 1, 0))

    def close(self) -> None:
        """Close the file; a second call does nothing. Not collective."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
