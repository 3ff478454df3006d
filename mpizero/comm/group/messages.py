"""Sum and gather arrays of a small group of ranks by messages; sums are added in the order of a binary tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpizero.comm.communicator import Communicator
from mpizero.kernels.fold import fold
from mpizero.layout import Partition
from mpizero.types import Array


class GroupTransport(Protocol):
    """Describe a way to sum and gather arrays of a group of ranks: by messages, or through shared memory.

    Sums are always added by :func:`~mpizero.kernels.fold.fold`, in the order of the binary tree over the ranks'
    numbers, so their bits do not depend on the way that is used. Every method is collective over the group. Arrays are
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
            for place, block in self._blocks(send, x, sizes):
                place[...] = block
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
        for block, place in self._blocks(arrived, result, sizes):
            place[...] = block
        return result

    def close(self) -> None:
        """Free the message buffers. Not collective."""
        self._buffers.clear()

    @staticmethod
    def _blocks(packed: Array, whole: Array, sizes: Sequence[int]) -> list[tuple[Array, Array]]:
        """Return for each rank two views: its block in ``packed``, and its block of ``whole`` along axis 1.

        In ``packed`` the blocks of the ranks lie one after another, each C-contiguous.
        """
        outer, _, inner = whole.shape
        pairs, start = [], 0
        for size in sizes:
            place = packed[outer * start * inner :][: outer * size * inner].reshape(outer, size, inner)
            pairs.append((place, whole[:, start : start + size]))
            start += size
        return pairs

    def _buffer(self, name: str, size: int, dtype: Any) -> Array:
        """Return a message buffer of that size and dtype; calls with the same name return the same memory."""
        nbytes = size * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[name] = self._empty(nbytes, np.uint8)
        view: Array = buffer[:nbytes].view(dtype)
        return view
