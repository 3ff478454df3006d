"""Sum and gather arrays of ranks on one node through a shared window: each rank writes once, all read, nothing is sent.

[Note: two halves] The window has two halves. A call writes into one half, waits at one barrier, and reads. The next
call uses the other half. Before a rank writes into the first half again, it has passed the barrier of the call in
between. Every rank enters that barrier only after it has finished reading the first half, so no second barrier is
needed.

[Note: signatures] With its array each rank writes a number that identifies its call. All ranks compare these numbers
after the barrier, so different calls raise the same error on every rank. A window that is too small is replaced only
after the numbers have been compared, because replacing it is collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.text import notice
from mpizero.comm.communicator import Communicator
from mpizero.comm.group.messages import MessageGroup
from mpizero.comm.transport import SharedMemory
from mpizero.errors import SharedMemoryError
from mpizero.guard.call_trace import describe_call, mismatch
from mpizero.kernels.fold import fold
from mpizero.layout import Partition
from mpizero.types import Array

#: Bytes of a cache line, on which every array starts.
LINE = 64
#: Bytes of each half before an array needs more.
FIRST_HALF = 1 << 16
#: With at least so many ranks and bytes, each rank sums one part and then copies the whole sum, which needs a second
#: barrier. Below, every rank sums the whole array for itself.
SHARED_SUM_RANKS, SHARED_SUM_BYTES = 4, 1 << 18
#: Number of different calls whose views of the window are cached.
_REMEMBERED = 512


class _Place(NamedTuple):
    """Hold the array views that a call uses in each half of the window, and the number that identifies the call.

    A call is an operation with a dtype and shapes; repeated calls reuse the views.
    """

    signature: int
    halves: tuple[tuple[Array, ...], tuple[Array, ...]]


class WindowGroup:
    """Implement :class:`mpizero.comm.group.messages.GroupTransport` through memory that all ranks of the group share.

    The window is allocated at the first call, and replaced by a larger one when a call needs more memory. If there is
    too little shared memory, all ranks use ``messages`` instead, and rank 0 of the group prints a notice.

    Parameters
    ----------
    node : Communicator
        The ranks of the group, with ``shares_memory``.
    messages : MessageGroup
        The same ranks. Their numbers in its communicator, which may differ from those in ``node``, are the leaves of
        the tree in whose order sums are added.
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
        self._places: dict[tuple[object, ...], _Place] = {}

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
        own = Partition(x.size, self._size).shard(self._rank)
        fold(operation, [term[own] for term in terms], rows[-1][own])
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
        mine = rows[self._rank]
        mine[:, :start] = x[:, :start]
        mine[:, stop:] = x[:, stop:]
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
        whole, start = arrays[0], sum(sizes[: self._rank])
        whole[:, start : start + sizes[self._rank]] = x
        self._compare(call, tag)
        return whole.copy()

    def close(self) -> None:
        """Free the window and the message buffers. Collective over the group."""
        self._drop()
        self._message_group.close()

    # ------------------------------------------------------------------ the window

    def _open(
        self, call: tuple[object, ...], shapes: Sequence[tuple[int, ...]], dtype: Any, tag: str
    ) -> tuple[Array, ...] | None:
        """Return views with these shapes in the current half of the window; None if there is too little shared memory.

        ``call`` identifies the call: the operation, the dtype character and the sizes.
        """
        place = self._places.get(call)
        if place is None:
            if not self._has_room:
                return None
            sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape in shapes]
            starts = list(accumulate((-(-size // LINE) * LINE for size in sizes), initial=0))
            if starts[-1] > self._capacity and not self._grow(call, starts[-1], tag):
                return None
            if len(self._places) >= _REMEMBERED:
                self._places.clear()
            assert self._memory is not None
            halves = []
            for half in range(2):
                room = self._memory.buffer[2 * self._size * LINE + half * self._capacity :]
                parts = zip(starts, sizes, shapes, strict=False)
                halves.append(tuple(room[start:][:size].view(dtype).reshape(shape) for start, size, shape in parts))
            place = self._places[call] = _Place(_signature(call), (halves[0], halves[1]))
        return place.halves[self._half]

    def _compare(self, call: tuple[object, ...], tag: str) -> None:
        """Wait at the barrier until every rank has written, and switch to the other half of the window.

        Raises on every rank if the ranks have written different calls; ``call`` is as for :meth:`_open`.
        """
        place = self._places.get(call)
        number = _signature(call) if place is None else place.signature
        numbers = self._signatures[self._half]
        self._half ^= 1
        numbers[self._rank] = number
        self._barrier(tag)
        if numbers.tolist() != [number] * self._size:
            mine = self._node.trace.records()[-1]._replace(what=describe_call((call[0], tag, *call[1:])), number=number)
            gathered = dict(self._node.allgather_object((self._rank, mine), "contract"))
            raise (
                mismatch(self._node.name, {rank: [record] for rank, record in gathered.items()})
                or self._node.mismatch()
            )

    def _barrier(self, tag: str) -> None:
        assert self._memory is not None
        self._node.node_barrier(self._memory, tag)

    def _grow(self, call: tuple[object, ...], nbytes: int, tag: str) -> bool:
        """Allocate or replace the window so that each half has ``nbytes`` bytes; return False if memory is short."""
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
        self._places.clear()
        self._signatures = ()
        self._capacity = -1
        if memory is not None:
            memory.close()


def _signature(call: tuple[object, ...]) -> int:
    """Return a 56-bit hash of a call, the same in every process."""
    return int.from_bytes(blake2b(repr(call).encode(), digest_size=7).digest(), "little")
