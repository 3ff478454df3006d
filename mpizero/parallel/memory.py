"""The library's own allocator: every array that holds model state comes from here and is counted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from socket import gethostname
from typing import Any

import numpy as np

from mpizero.comm import Communicator, ProcessGrid, Request, SharedMemory
from mpizero.layout import FlatLayout
from mpizero.types import Array

#: Rows that different ranks touch first start on their own page.
PAGE = 4096


class Memory:
    """Allocate private arrays and node-shared windows, and count their bytes by kind.

    Parameters
    ----------
    node : Communicator
        The ranks that share memory with this one; of size 1 when memory is private.

    Attributes
    ----------
    private_bytes, shared_bytes : Counter of str to int
        What this rank holds alone, and what its node holds together, by kind ("parameters", "gradients",
        "optimizer state", "buffers", "exchange buffers").
    peak_bytes : int
        The most that this rank held alone plus its equal part of what its node shares.
    """

    def __init__(self, node: Communicator) -> None:
        self.node = node
        self.private_bytes: Counter[str] = Counter()
        self.shared_bytes: Counter[str] = Counter()
        self.peak_bytes = 0
        #: Is called before every collective of the node.
        self.before: Callable[[], None] = _nothing
        self._windows: list[tuple[SharedMemory, tuple[Array, ...]]] = []
        self._scratch: dict[str, Array] = {}

    def private(self, kind: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return a zeroed array of this rank alone. Not collective."""
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
        [Note: buckets] in ``parallel/buckets.py``.
        """
        nbytes = size * np.dtype(dtype).itemsize
        held = self._scratch.get(name)
        if held is None or held.nbytes < nbytes:
            if held is not None:
                self.release("exchange buffers", held)
            held = self._scratch[name] = np.empty(nbytes, np.uint8)
            self.private_bytes["exchange buffers"] += nbytes
            self._note_peak()
        return held[:nbytes].view(dtype)

    def drop_scratch(self) -> None:
        """Give the room of messages back; the next ones make it anew. Not collective; nothing may be on its way."""
        for held in self._scratch.values():
            self.release("exchange buffers", held)
        self._scratch.clear()

    def shared(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: Any) -> tuple[Array, ...]:
        """Return zeroed arrays that all ranks of the node read and write, in one window.

        Collective over the node. With private memory these are this rank's own arrays.
        """
        if self.node.size == 1:
            return tuple(self.private(kind, shape, dtype) for shape in shapes)
        self.before()
        dtype = np.dtype(dtype)
        sizes = [prod(shape) * dtype.itemsize for shape in shapes]
        starts = np.concatenate([[0], np.cumsum([-(-size // PAGE) * PAGE for size in sizes])])
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
        self.before()
        place = next(i for i, (_, held) in enumerate(self._windows) if held[0] is arrays[0])
        window, _ = self._windows.pop(place)
        self.shared_bytes[kind] -= window.buffer.nbytes
        window.close()

    def barrier(self, tag: str = "") -> None:
        """Make what every rank of the node wrote before visible to all of them after. Collective over the node."""
        if self.node.size > 1:
            self.before()
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
        self.before()
        self.before = _nothing
        while self._windows:
            self._windows.pop()[0].close()
        self._scratch.clear()
        self.shared_bytes.clear()
        self.private_bytes.clear()

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.rank_bytes)


def _nothing() -> None:
    """Nothing has to come before."""


def fits_shared_memory(grid: ProcessGrid, layout: FlatLayout, dtype: np.dtype[Any], *, waves: bool) -> bool:
    """Tell whether parameters and gradients fit the shared memory of every host; if not, say so on rank 0.

    Collective over all ranks, which get the same answer.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks.
    layout : FlatLayout
        What this rank's data group holds; other groups on the same host hold other parts of the model.
    dtype : numpy dtype
        Of parameters and gradients.
    waves : bool
        Whether gradients stand in a ring of units; otherwise every rank has at least one whole row.
    """
    if grid.local_size == 1 and grid.data.size == grid.world.size:
        return True
    gradients = 2 * max((unit.gradients for unit in layout.units), default=0) if waves else layout.gradient_size
    needed = (layout.size + grid.local_size * gradients) * dtype.itemsize
    shares = grid.node.rank == 0 and grid.local_size > 1  # the first rank of a node speaks for its window
    space = grid.node.shared_space() if grid.local_size > 1 else None
    told = grid.world.allgather_object((gethostname(), needed if shares else 0, space), "shared memory")
    asked: Counter[str] = Counter()
    room: dict[str, int] = {}
    for host, window, free in told:
        asked[host] += window
        if free is not None:
            room[host] = min(free, room.get(host, free))
    short = {host: asked[host] - free for host, free in room.items() if asked[host] > free}
    if short and grid.world.rank == 0:
        host, lacking = max(short.items(), key=lambda item: item[1])
        print(
            f"mpizero: the model needs {asked[host]} bytes of shared memory on {host}, which lacks {lacking} of them: "
            "every rank keeps its own copy instead (enlarge /dev/shm, or see `mpizero doctor` for leftovers in it)",
            file=sys.stderr,
        )
    return not short
