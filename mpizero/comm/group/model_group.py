"""Sum, gather and shift arrays among the ranks that a layer is split over; sums are added in rank order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero._util.checks import native
from mpizero.comm.checks import MOVABLE
from mpizero.comm.communicator import Communicator
from mpizero.comm.group.messages import GroupTransport, MessageGroup
from mpizero.comm.group.window import WindowGroup
from mpizero.comm.transport import Request
from mpizero.kernels import namespace
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.kernels.device import Device

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

        Not collective; a second call returns the same arrays at once.
        """
        for request in self._requests:
            request.wait()
        self._requests = ()
        return self._received

    def test(self) -> bool:
        """Make progress and tell whether :meth:`wait` would return at once. Not collective."""
        return all([request.test() for request in self._requests])


class CommunicatorGroup:
    """Sum, gather and shift arrays over the ranks of a communicator; implements :class:`mpizero.types.Group`.

    All ranks pass arrays of the same dtype and of shapes that fit together. An array that is not C-contiguous is copied
    first. Results are new, C-contiguous arrays. Sums are added in the order of the binary tree over the ranks' numbers,
    so they have the same bits on every rank and in every run. In a group of one rank the results are copies.

    Parameters
    ----------
    comm : Communicator
        The ranks. The caller closes it.
    node_comm : Communicator, optional
        A communicator of the same ranks that shares memory (``comm`` itself if it does). Sums and gathers then go
        through one shared window, and only shifts send messages. It is ignored if it has fewer ranks than ``comm``.

    Attributes
    ----------
    comm : Communicator
        The ranks; its ``counters`` hold the bytes that this rank has sent.
    counts : Counter of str to int
        Number of calls of each method on this rank.
    """

    def __init__(self, comm: Communicator, node_comm: Communicator | None = None) -> None:
        self.comm = comm
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
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return self.comm.size

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
        :data:`mpizero.comm.checks.MOVABLE` are accepted.
        """
        axis, sizes = self._along("all_gather", x, axis, sizes, tag)
        if x.shape[axis] != sizes[self.rank]:
            raise self._error("all_gather", tag, f"sizes[{self.rank}] is {sizes[self.rank]} along axis {axis}", x)
        self.counts["all_gather"] += 1
        if self.size == 1:
            return _copy(x)
        with self._timed("all_gather", tag):
            whole = self._transport.gather(_cube(x, axis), sizes, tag)
        return whole.reshape(*x.shape[:axis], sum(sizes), *x.shape[axis + 1 :])

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
        """Return a context manager that records the time of a call, with its copies and sums, while tracing is on."""
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


class GpuAwareGroup(CommunicatorGroup):
    """Sum, gather and shift GPU arrays by passing them to MPI directly; see [Note: direct messages] in gpu_aware.py.

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
    """Return ``x`` if it is C-contiguous and in this machine's byte order, else such a copy, on the same device.

    Not collective.
    """
    found: Array = namespace(x).ascontiguousarray(native(x))
    return found


def _copy(x: Array) -> Array:
    copied: Array = namespace(x).array(x, order="C")
    return copied


def _cube(x: Array, axis: int) -> Array:
    """Return ``x`` reshaped to three axes: all axes before ``axis`` as one, ``axis`` itself, all axes after it as one.

    The result is C-contiguous: a view of ``x`` if that is, else a copy.
    """
    return contiguous(x).reshape(prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :]))
