"""Allocate and count every array that holds model state."""

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
from mpizero.parallel.message_progress import MessageProgress
from mpizero.types import Array

#: Rows that different ranks touch first start on their own page.
PAGE = 4096


def paged(nbytes: int) -> int:
    """Return the bytes of the whole pages that ``nbytes`` take. Not collective."""
    return -(-nbytes // PAGE) * PAGE


#: What needs less memory for the state, and for computing.
STATE_ADVICE = (
    "shard more (FSDPModel keeps 1/ranks of parameters, gradients and optimizer state), use more ranks or nodes, or "
    "split the model (HybridShardedModel); `mpizero plan` tells what a layout needs"
)
COMPUTING_ADVICE = "choose a smaller micro_batch, more micro-batches (accumulate), or checkpointed blocks"


def refused(error: MemoryError, what: str, advice: str) -> OutOfMemoryError:
    """Return the error that says what refused memory was for; one that says so already stays. Not collective."""
    if isinstance(error, OutOfMemoryError):
        return error
    reason = f" ({error})" if str(error) else ""
    return OutOfMemoryError(f"no memory for {what}{reason}; {advice}").with_traceback(error.__traceback__)


@contextmanager
def needing(what: str, advice: str) -> Iterator[None]:
    """Say what memory was for where the system refuses it. Not collective.

    Raises
    ------
    OutOfMemoryError
        In place of any other MemoryError of the block.
    """
    try:
        yield
    except MemoryError as error:
        raise refused(error, what, advice) from None


@contextmanager
def on_all_ranks(world: Communicator, what: str) -> Iterator[None]:
    """Take memory on all ranks, or raise on all of them.

    Collective over ``world``, all ranks of the model: they come here in the same steps, whatever their nodes are.
    What a node has taken while another had no room stays taken: the caller gives it back.

    Raises
    ------
    SharedMemoryError
        On all ranks, if the node of any of them has no room.
    Exception
        As :func:`mpizero.comm.agreement.all_ranks`.
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
    """Give arrays and count them: :class:`Memory`, or the memory of a GPU."""

    def private(self, kind: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return a zeroed array of this rank alone. Not collective."""

    def release(self, kind: str, array: Array) -> None:
        """Stop counting a private array that its owner drops. Not collective."""

    def shared(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: Any) -> tuple[Array, ...]:
        """Return zeroed arrays that all ranks of the node read and write. Collective over the node."""

    def free_shared(self, kind: str, arrays: Sequence[Array]) -> None:
        """Give back what :meth:`shared` returned. Collective over the node."""


class Memory:
    """Allocate private arrays and node-shared windows, and count their bytes by kind.

    Parameters
    ----------
    node : Communicator
        The ranks that share memory with this one; of size 1 when memory is private.
    progress : MessageProgress, optional
        Finishes messages in flight before every collective of the node.

    Attributes
    ----------
    private_bytes, shared_bytes : Counter of str to int
        What this rank holds alone, and what its node holds together, by kind ("parameters", "gradients",
        "optimizer state", "buffers", "exchange buffers").
    peak_bytes : int
        The most that this rank held alone plus its equal part of what its node shares.
    """

    def __init__(self, node: Communicator, progress: MessageProgress | None = None) -> None:
        self.node, self.progress = node, progress or MessageProgress()
        self.private_bytes: Counter[str] = Counter()
        self.shared_bytes: Counter[str] = Counter()
        self.peak_bytes = 0
        self._windows: list[tuple[SharedMemory, tuple[Array, ...]]] = []
        self._scratch: dict[str, Array] = {}

    def private(self, kind: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return a zeroed array of this rank alone. Not collective."""
        with self._wanted(kind, shape, dtype):
            array = np.zeros(shape, dtype)
        self.private_bytes[kind] += array.nbytes
        self._note_peak()
        return array

    def release(self, kind: str, array: Array) -> None:
        """Stop counting a private array that its owner drops. Not collective."""
        self.private_bytes[kind] -= array.nbytes

    def scratch(self, name: str, size: int, dtype: Any) -> Array:
        """Return room for a message: not zeroed, the same memory for every message of this name. Not collective.

        Messages are cut into pieces of a bucket's size, or of ``comm.exact.EXCHANGE_ELEMENTS``: see
        [Note: buckets] in ``parallel/gradients/bucket_tuner.py``.
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
        """Give the room of messages back; the next ones make it anew. Not collective; nothing may be in flight."""
        for held in self._scratch.values():
            self.release("exchange buffers", held)
        self._scratch.clear()

    def shared(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: Any) -> tuple[Array, ...]:
        """Return zeroed arrays that all ranks of the node read and write, in one window.

        Collective over the node. With private memory these are this rank's own arrays.

        Raises
        ------
        SharedMemoryError
            On all ranks of the node, if it has no room; see :func:`on_all_ranks` for the other nodes.
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
        """Free the window whose arrays :meth:`shared` returned. Collective over the node; no view may be used after."""
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
        """Make what every rank of the node wrote before visible to all of them after. Collective over the node."""
        if self.node.size > 1:
            self.progress.finish()
            self.node.node_barrier(self._windows[0][0], tag, counted=True)

    def ibarrier(self, tag: str = "") -> Request | None:
        """Start what :meth:`barrier` does; None where a rank is alone. Collective over the node.

        Once the request has ended, :meth:`synchronize` makes what was written before visible.
        """
        if self.node.size == 1:
            return None
        self.synchronize()
        return self.node.ibarrier(tag)

    def synchronize(self) -> None:
        """Order this rank's loads and stores to the node's windows. Not collective."""
        if self.node.size > 1:
            self._windows[0][0].synchronize()

    @property
    def rank_bytes(self) -> int:
        """Bytes this rank holds now: its private arrays and its equal part of the node's windows."""
        return sum(self.private_bytes.values()) + sum(self.shared_bytes.values()) // self.node.size

    def kinds(self) -> dict[str, int]:
        """Bytes of this rank by kind, its equal part of the node's windows included."""
        kinds = sorted({*self.private_bytes, *self.shared_bytes})
        return {kind: self.private_bytes[kind] + self.shared_bytes[kind] // self.node.size for kind in kinds}

    def close(self) -> None:
        """Free all windows. Collective over the node."""
        self.progress.close()
        while self._windows:
            self._windows.pop()[0].close()
        self._scratch.clear()
        self.shared_bytes.clear()
        self.private_bytes.clear()

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.rank_bytes)
