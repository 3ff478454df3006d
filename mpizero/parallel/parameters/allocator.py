"""Allocate the arrays that hold model state, and count their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Protocol

import numpy as np

from mpizero.comm import Communicator, Request, SharedMemory
from mpizero.comm.agreement import all_ranks
from mpizero.errors import CollectiveError, OutOfMemoryError, PeerFailure, SharedMemoryError
from mpizero.parallel.parameters.message_progress import MessageProgress
from mpizero.types import Array

#: Bytes of a memory page. Arrays that different ranks write begin on pages of their own.
PAGE = 4096


def paged(nbytes: int) -> int:
    """Round ``nbytes`` up to whole memory pages. Not collective."""
    return -(-nbytes // PAGE) * PAGE


#: Advice in errors: how to need less memory for model state, and for computing.
STATE_ADVICE = (
    "shard more (FSDPModel keeps 1/ranks of parameters, gradients and optimizer state), use more ranks or nodes, or "
    "split the model (HybridShardedModel); `mpizero plan` tells what a layout needs"
)
COMPUTING_ADVICE = "choose a smaller micro_batch, more micro-batches (accumulate), or checkpointed blocks"


def refused(error: MemoryError, what: str, advice: str) -> OutOfMemoryError:
    """Return an ``OutOfMemoryError`` that says what the memory was for, followed by ``advice``. Not collective.

    If ``error`` is one already, it is returned unchanged.
    """
    if isinstance(error, OutOfMemoryError):
        return error
    reason = f" ({error})" if str(error) else ""
    return OutOfMemoryError(f"no memory for {what}{reason}; {advice}").with_traceback(error.__traceback__)


@contextmanager
def needing(what: str, advice: str) -> Iterator[None]:
    """Replace a ``MemoryError`` raised in the ``with`` block by an error that says what the memory was for.

    Not collective.

    Raises
    ------
    OutOfMemoryError
        If the ``with`` block raises a ``MemoryError``.
    """
    try:
        yield
    except MemoryError as error:
        raise refused(error, what, advice) from None


@contextmanager
def on_all_ranks(world: Communicator, what: str) -> Iterator[None]:
    """Raise on all ranks if allocating memory in the ``with`` block has failed on some rank.

    Collective over ``world``, all ranks of the model. If one node has too little memory, what other nodes have
    allocated in the ``with`` block stays allocated, and the caller must free it. ``what`` names the memory in errors.

    Raises
    ------
    SharedMemoryError
        On all ranks, if any node has too little shared memory.
    Exception
        Any other error, as :func:`mpizero.comm.agreement.all_ranks` raises it.
    """
    try:
        with all_ranks(world, what):
            yield
    except (CollectiveError, PeerFailure):  # the ranks may not come to an agreement any more
        raise
    except Exception as error:  # on all ranks
        reasons = world.allgather_object(str(error) if isinstance(error, SharedMemoryError) else "", what)
        if reason := next(filter(None, reasons), ""):
            raise SharedMemoryError(reason) from None
        raise


class Allocator(Protocol):
    """Allocate arrays and count their bytes: on the host by :class:`Memory`, or on a GPU."""

    def private(self, kind: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return a new array of zeros for this rank alone, and count its bytes under ``kind``. Not collective."""

    def release(self, kind: str, array: Array) -> None:
        """Stop counting the bytes of a private array; the caller then drops its last reference. Not collective."""

    def shared(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: Any) -> tuple[Array, ...]:
        """Return new arrays of zeros, one for each shape, that all ranks of the node read and write.

        Collective over the node.
        """

    def free_shared(self, kind: str, arrays: Sequence[Array]) -> None:
        """Free the arrays that :meth:`shared` returned. Collective over the node."""


class Memory:
    """Allocate private arrays and node-shared windows, and count their bytes by kind.

    Parameters
    ----------
    node : Communicator
        The ranks that share memory with this one; a communicator of size 1 if ranks share no memory.
    progress : MessageProgress, optional
        Finishes messages in flight before every collective of the node.

    Attributes
    ----------
    private_bytes, shared_bytes : Counter of str to int
        Bytes of the arrays that this rank holds alone, and of those that its node holds together, by kind:
        "parameters", "gradients", "optimizer state", "buffers" or "exchange buffers".
    peak_bytes : int
        The largest :attr:`rank_bytes` so far.
    """

    def __init__(self, node: Communicator, progress: MessageProgress | None = None) -> None:
        self.node, self.progress = node, progress or MessageProgress()
        self.private_bytes: Counter[str] = Counter()
        self.shared_bytes: Counter[str] = Counter()
        self.peak_bytes = 0
        self._windows: list[tuple[SharedMemory, tuple[Array, ...]]] = []
        self._scratch: dict[str, Array] = {}

    def private(self, kind: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return a new array of zeros for this rank alone, and count its bytes under ``kind``. Not collective."""
        with self._wanted(kind, shape, dtype):
            array = np.zeros(shape, dtype)
        self.private_bytes[kind] += array.nbytes
        self._note_peak()
        return array

    def release(self, kind: str, array: Array) -> None:
        """Stop counting the bytes of a private array; the caller then drops its last reference. Not collective."""
        self.private_bytes[kind] -= array.nbytes

    def scratch(self, name: str, size: int, dtype: Any) -> Array:
        """Return a message buffer of ``size`` elements, uninitialized. Not collective.

        Every call with the same name returns the same memory; if a larger buffer is needed, new memory replaces it.
        Buffers stay small, because an exchange is cut into segments: see [Note: buckets] in
        ``parallel/gradients/bucket_tuner.py``.
        """
        nbytes = size * np.dtype(dtype).itemsize
        held = self._scratch.get(name)
        if held is None or held.nbytes < nbytes:
            if held is not None:
                self.release("exchange buffers", held)
                self._scratch.pop(name)
            with self._wanted("exchange buffers", nbytes, np.uint8):
                held = self._scratch[name] = np.empty(nbytes, np.uint8)
            self.private_bytes["exchange buffers"] += nbytes
            self._note_peak()
        return held[:nbytes].view(dtype)

    @contextmanager
    def _wanted(self, kind: str, shape: int | tuple[int, ...], dtype: Any) -> Iterator[None]:
        size = prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
        with needing(f"{kind}: {size} bytes wanted, {self.rank_bytes} held", STATE_ADVICE):
            yield

    def drop_scratch(self) -> None:
        """Free all message buffers; :meth:`scratch` allocates new ones. Not collective.

        Call it only while no message is in flight.
        """
        for held in self._scratch.values():
            self.release("exchange buffers", held)
        self._scratch.clear()

    def shared(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: Any) -> tuple[Array, ...]:
        """Return new arrays of zeros, one for each shape, that all ranks of the node read and write, in one window.

        Collective over the node. If ranks share no memory, the arrays are this rank's alone.

        Raises
        ------
        SharedMemoryError
            On all ranks of the node, if the node has too little shared memory. Other nodes do not learn of it, unless
            the call is made inside :func:`on_all_ranks`.
        """
        if self.node.size == 1:
            return tuple(self.private(kind, shape, dtype) for shape in shapes)
        self.progress.finish()
        dtype = np.dtype(dtype)
        sizes = [prod(shape) * dtype.itemsize for shape in shapes]
        starts = np.concatenate([[0], np.cumsum([paged(size) for size in sizes])])
        window = self.node.allocate_shared(int(starts[-1]), kind)
        self.shared_bytes[kind] += int(starts[-1])
        self._note_peak()
        arrays = tuple(
            window.buffer[start : start + size].view(dtype).reshape(shape)
            for start, size, shape in zip(starts[:-1].tolist(), sizes, shapes, strict=True)
        )
        self._windows.append((window, arrays))
        return arrays

    def free_shared(self, kind: str, arrays: Sequence[Array]) -> None:
        """Free the window of arrays that :meth:`shared` returned, after their last use. Collective over the node."""
        if self.node.size == 1:
            for array in arrays:
                self.release(kind, array)
            return
        self.progress.finish()
        place = next(i for i, (_, held) in enumerate(self._windows) if held[0] is arrays[0])
        window, _ = self._windows.pop(place)
        self.shared_bytes[kind] -= window.buffer.nbytes
        window.close()

    def barrier(self, tag: str = "") -> None:
        """Wait for all ranks of the node, and make their earlier writes to shared arrays visible to all of them.

        Collective over the node.
        """
        if self.node.size > 1:
            self.progress.finish()
            self.node.node_barrier(self._windows[0][0], tag, counted=True)

    def ibarrier(self, tag: str = "") -> Request | None:
        """Begin a non-blocking barrier of the node; return its request, or None if the node has one rank.

        Collective over the node. After the request has completed, :meth:`synchronize` makes the writes that the ranks
        made before the barrier visible to this rank.
        """
        if self.node.size == 1:
            return None
        self.synchronize()
        return self.node.ibarrier(tag)

    def synchronize(self) -> None:
        """Order this rank's loads and stores to the node's windows, as ``MPI_Win_sync`` does. Not collective."""
        if self.node.size > 1:
            self._windows[0][0].synchronize()

    @property
    def rank_bytes(self) -> int:
        """The number of bytes that this rank holds now: its private arrays, and an equal part of the node's windows."""
        return sum(self.private_bytes.values()) + sum(self.shared_bytes.values()) // self.node.size

    def kinds(self) -> dict[str, int]:
        """Return the bytes that make up :attr:`rank_bytes`, by kind of array."""
        kinds = sorted({*self.private_bytes, *self.shared_bytes})
        return {kind: self.private_bytes[kind] + self.shared_bytes[kind] // self.node.size for kind in kinds}

    def close(self) -> None:
        """Free all windows and message buffers. Collective over the node."""
        self.progress.close()
        while self._windows:
            self._windows.pop()[0].close()
        self._scratch.clear()
        self.shared_bytes.clear()
        self.private_bytes.clear()

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.rank_bytes)
