"""Send activations and their gradients between pipeline stages.

[Note: shapes] A receive that is posted ahead must know how much will come. The shape of what a chunk sends depends on
the shape and dtype of the micro-batch alone, so the first message for new ones is preceded by a header, and both ends
remember it. Of micro-batches that are not arrays nothing is known: every message has a header. A chunk that failed
before its shape was known says so in the header; later it sends zeros, whose results nobody uses: the step ends in an
agreement that raises on every rank.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from mpizero.comm import Communicator, Request
from mpizero.comm.group.model_group import contiguous
from mpizero.errors import LayoutError
from mpizero.sampletree import leaves_of
from mpizero.types import Array

#: The most axes of what is sent.
_AXES = 8
#: Numbers in a header: whether anything follows, the dtype, the number of axes, and the axes.
_HEADER = 3 + _AXES
_DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool", "float16")


class Route(NamedTuple):
    """Name one direction over one border between chunks: "forward" out of a chunk, or "backward" into it."""

    kind: str
    border: int

    @property
    def tag(self) -> int:
        """Tag of its messages; its headers have the next one."""
        return 4 * self.border + (0 if self.kind == "forward" else 2)


class _Shape(NamedTuple):
    dims: tuple[int, ...]
    dtype: str


def key_of(x: Any) -> Any:
    """Return what messages about a micro-batch ``x`` are known by: equal keys, equal messages. Not collective."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return x.shape, x.dtype.str
    leaves = leaves_of(x)
    arrays = all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves)
    return tuple((leaf.shape, leaf.dtype.str) for leaf in leaves) if leaves and arrays else None


class PipelineP2P:
    """Send and receive between the stages of one pipeline.

    Messages of one route are sent and taken in the same order on both ends. Not thread-safe.

    Parameters
    ----------
    comm : Communicator
        The stages, by number.

    Attributes
    ----------
    messages : int
        Sent so far, headers included.
    waited : float
        Seconds spent so far in waiting for other stages.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.messages, self.waited = 0, 0.0
        self._known: dict[tuple[Route, Any], _Shape] = {}
        self._sending: deque[tuple[Request, Array]] = deque()
        self._posted: dict[tuple[Route, int], tuple[Request, Array]] = {}
        self._kept: dict[tuple[Route, int], Array | None] = {}

    def send(self, route: Route, micro: int, key: Any, peer: int, array: Array | None) -> None:
        """Start to send what a chunk computed for micro-batch ``micro``; None if it failed. Not collective.

        ``key`` is :func:`key_of` the micro-batch on both ends.
        """
        if peer == self.comm.rank:
            self._kept[route, micro] = array
            return
        known = self._known.get((route, key))
        if known is None:
            header = np.zeros(_HEADER, np.int64)
            if array is not None:
                header[:3] = 1, _DTYPES.index(array.dtype.name), array.ndim
                header[3 : 3 + array.ndim] = array.shape
                self._remember(route, key, _Shape(array.shape, array.dtype.name))
            self._start(header, peer, route.tag + 1)
        elif array is None:
            array = np.zeros(known.dims, known.dtype)
        if array is not None:
            self._start(contiguous(array), peer, route.tag)

    def check(self, route: Route, key: Any, array: Array) -> None:
        """Refuse what the other end cannot take. Not collective.

        Raises
        ------
        LayoutError
            If another shape was sent for an equal micro-batch before, or no message can hold the array.
        """
        given = _Shape(array.shape, array.dtype.name)
        known = self._known.get((route, key), given)
        if given != known:
            raise LayoutError(
                f"a pipeline stage gave {given.dtype}{list(given.dims)} for a micro-batch that is like an earlier one "
                f"(shape and dtype {key}), for which it gave {known.dtype}{list(known.dims)}: between stages, shapes "
                "must follow from the shape of the input"
            )
        if given.dtype not in _DTYPES or array.ndim > _AXES:
            raise LayoutError(
                f"a pipeline stage gave {given.dtype}{list(given.dims)}: between stages go {', '.join(_DTYPES)} of at "
                f"most {_AXES} axes"
            )

    def post(self, route: Route, micro: int, key: Any, peer: int) -> None:
        """Start to receive ahead of need, where the shape is known. Not collective."""
        known = self._known.get((route, key))
        if peer != self.comm.rank and known is not None:
            self._expect(route, micro, known, peer)

    def receive(self, route: Route, micro: int, key: Any, peer: int) -> Array | None:
        """Return what the other end sent for micro-batch ``micro``; None if it failed. Waits; not collective."""
        if peer == self.comm.rank:
            return self._kept.pop((route, micro))
        started = time.perf_counter()
        array = self._take(route, micro, key, peer)
        self.waited += time.perf_counter() - started
        return array

    def _take(self, route: Route, micro: int, key: Any, peer: int) -> Array | None:
        if (route, micro) not in self._posted:
            shape = self._known.get((route, key)) or self._announced(route, peer)
            if shape is None:
                return None
            self._remember(route, key, shape)
            self._expect(route, micro, shape, peer)
        request, array = self._posted.pop((route, micro))
        request.wait()
        return array

    def _announced(self, route: Route, peer: int) -> _Shape | None:
        """Return what a header says will come; None if nothing will."""
        header = np.empty(_HEADER, np.int64)
        self.comm.recv(header, peer, route.tag + 1)
        dims = tuple(int(n) for n in header[3 : 3 + int(header[2])])
        return _Shape(dims, _DTYPES[int(header[1])]) if header[0] else None

    def _expect(self, route: Route, micro: int, shape: _Shape, peer: int) -> None:
        if (route, micro) not in self._posted:
            array = self._empty(shape.dims, shape.dtype)
            self._posted[route, micro] = (self.comm.irecv(array, peer, route.tag), array)

    def _empty(self, dims: tuple[int, ...], dtype: str) -> Array:
        """Return an array for what will come."""
        return np.empty(dims, dtype)

    def _remember(self, route: Route, key: Any, shape: _Shape) -> None:
        if key is not None:
            self._known[route, key] = shape

    def progress(self) -> None:
        """Let messages move on, and forget those that have arrived. Not collective."""
        for request, _ in self._posted.values():
            request.test()
        while self._sending and self._sending[0][0].test():
            self._sending.popleft()

    def finish(self) -> None:
        """Wait until everything sent has left. Not collective."""
        started = time.perf_counter()
        while self._sending:
            self._sending.popleft()[0].wait()
        self.waited += time.perf_counter() - started

    def _start(self, array: Array, peer: int, tag: int) -> None:
        self.messages += 1
        self._sending.append((self.comm.isend(array, peer, tag), array))
