"""Send activations and their gradients between pipeline stages.

[Note: shapes] A receive that is posted before its message arrives must know the size. The shape of a chunk's output
depends only on the shape and dtype of the micro-batch. So the first message for a new shape of micro-batch is preceded
by a header with the shape of the output, and both stages remember this shape. If micro-batches are not arrays, every
message is preceded by a header. If a chunk raises and the shape of its output is not known yet, the header says so. If
the shape is known, the stage sends zeros instead of the output. Results that are computed from these zeros are never
used, because the step ends with an agreement that raises on every rank.
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

#: Most axes of an array that is sent.
_AXES = 8
#: Length of a header: 1 if an array follows (else 0), the index of its dtype, the number of axes, and their lengths.
_HEADER = 3 + _AXES
_DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool", "float16")


class Route(NamedTuple):
    """Identify the messages from one chunk of a pipeline to a neighbouring chunk.

    ``kind`` is "forward" for activations, which go to the next chunk, and "backward" for their gradients, which go to
    the previous chunk. ``border`` is the number of the chunk that receives.
    """

    kind: str
    border: int

    @property
    def tag(self) -> int:
        """MPI tag of the arrays on this route; the headers, which announce the shapes of arrays, have this tag + 1."""
        return 4 * self.border + (0 if self.kind == "forward" else 2)


class _Shape(NamedTuple):
    dims: tuple[int, ...]
    dtype: str


def key_of(x: Any) -> Any:
    """Return a key made of the shapes and dtypes of a micro-batch ``x``; None if ``x`` is not made of arrays.

    The outputs of a chunk for micro-batches with equal keys have equal shapes, see [Note: shapes].
    """
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return x.shape, x.dtype.str
    leaves = leaves_of(x)
    arrays = all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves)
    return tuple((leaf.shape, leaf.dtype.str) for leaf in leaves) if leaves and arrays else None


class PipelineP2P:
    """Send activations and their gradients between the stages of one pipeline.

    The messages of a :class:`Route` must be received in the order in which they are sent. Not thread-safe.

    Parameters
    ----------
    comm : Communicator
        The stages of the pipeline: rank i is stage i.

    Attributes
    ----------
    messages : int
        Number of messages sent so far, headers included.
    waited : float
        Seconds that this rank has waited so far for messages to and from other stages.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.messages, self.waited = 0, 0.0
        self._known: dict[tuple[Route, Any], _Shape] = {}
        self._sending: deque[tuple[Request, Array]] = deque()
        self._posted: dict[tuple[Route, int], tuple[Request, Array]] = {}
        self._kept: dict[tuple[Route, int], Array | None] = {}

    def send(self, route: Route, micro: int, key: Any, peer: int, array: Array | None) -> None:
        """Start to send a chunk's output for micro-batch ``micro`` to stage ``peer``.

        ``array`` is the output, or None if the chunk failed. ``key`` is :func:`key_of` of the micro-batch, the same on
        both stages. If ``peer`` is this stage, the array is kept for :meth:`receive`.
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
        """Check that the other stage can receive ``array``, an output for a micro-batch with this ``key``.

        Raises
        ------
        LayoutError
            If another shape or dtype was sent before for a micro-batch with the same key, or if the dtype or the number
            of axes is not supported.
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
        """Start to receive the array that stage ``peer`` sends for micro-batch ``micro``, before it is needed.

        Does nothing if the shape of the array is not known yet, or if ``peer`` is this stage.
        """
        known = self._known.get((route, key))
        if peer != self.comm.rank and known is not None:
            self._expect(route, micro, known, peer)

    def receive(self, route: Route, micro: int, key: Any, peer: int) -> Array | None:
        """Wait for the array that stage ``peer`` sends for micro-batch ``micro``, and return it.

        Returns None if the chunk that computes the array failed before its shape was known to both stages.
        """
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
        """Receive a header and return the shape and dtype of the array that follows; None if the other chunk failed."""
        header = np.empty(_HEADER, np.int64)
        self.comm.recv(header, peer, route.tag + 1)
        dims = tuple(int(n) for n in header[3 : 3 + int(header[2])])
        return _Shape(dims, _DTYPES[int(header[1])]) if header[0] else None

    def _expect(self, route: Route, micro: int, shape: _Shape, peer: int) -> None:
        if (route, micro) not in self._posted:
            array = self._empty(shape.dims, shape.dtype)
            self._posted[route, micro] = (self.comm.irecv(array, peer, route.tag), array)

    def _empty(self, dims: tuple[int, ...], dtype: str) -> Array:
        """Allocate an array to receive into."""
        return np.empty(dims, dtype)

    def _remember(self, route: Route, key: Any, shape: _Shape) -> None:
        if key is not None:
            self._known[route, key] = shape

    def progress(self) -> None:
        """Let MPI make progress on all messages, and release the arrays that have been sent. Does not wait."""
        for request, _ in self._posted.values():
            request.test()
        while self._sending and self._sending[0][0].test():
            self._sending.popleft()

    def finish(self) -> None:
        """Wait until all sends have completed."""
        started = time.perf_counter()
        while self._sending:
            self._sending.popleft()[0].wait()
        self.waited += time.perf_counter() - started

    def _start(self, array: Array, peer: int, tag: int) -> None:
        self.messages += 1
        self._sending.append((self.comm.isend(array, peer, tag), array))
