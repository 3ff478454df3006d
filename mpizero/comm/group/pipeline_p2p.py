"""Send activations and their gradients between pipeline stages.

[Note: shapes] A receive that is posted before its message arrives must know the size. The form of a chunk's output (its
shape, or the structure of a tree and the shapes of its arrays) depends only on the shapes and dtypes of the
micro-batch. So the first message for a new shape of micro-batch is preceded by a header that describes the output, and
both stages remember its form. The description of a tree follows the header in a message of its own. Each array of a
tree is sent as a message, in the order of the tree. If micro-batches are not arrays, every output is preceded by a
header. If a chunk raises and the form of its output is not known yet, the header says so. If the form is known, the
stage sends zeros instead of the output. Results that are computed from these zeros are never used, because the step
ends with an agreement that raises on every rank.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.pytree import leaves_of
from mpizero.comm import Communicator, Request
from mpizero.comm.group.model_group import contiguous
from mpizero.comm.group.tree_form import ArrayShape, TreeForm, packable
from mpizero.errors import LayoutError
from mpizero.types import Array

#: Most axes of an array that is sent.
_AXES = 8
#: Length of a header. It begins with 0 if nothing follows. If an array does, with 1, the index of its dtype, the number
#: of axes, and their lengths. If a tree does, with 2 and the number of bytes that describe it.
_HEADER = 3 + _AXES
_NOTHING, _ARRAY, _TREE = range(3)
_DTYPES = (
    "float32", "float64", "int64", "int32", "uint8", "bool", "float16", "complex64", "complex128", "int8", "int16",
    "uint16", "uint32", "uint64",
)  # fmt: skip


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
    """Send activations and their gradients, arrays or trees of arrays, between the stages of one pipeline.

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
        self._known: dict[tuple[Route, Any], TreeForm] = {}
        self._sending: deque[tuple[Request, Array]] = deque()
        self._posted: dict[tuple[Route, int], tuple[TreeForm, list[tuple[Request, Array]]]] = {}
        self._kept: dict[tuple[Route, int], Any] = {}

    def send(self, route: Route, micro: int, key: Any, peer: int, value: Any) -> None:
        """Start to send a chunk's output for micro-batch ``micro`` to stage ``peer``.

        ``value`` is the output, an array or a tree of arrays, or None if the chunk failed. ``key`` is :func:`key_of` of
        the micro-batch, the same on both stages. If ``peer`` is this stage, the output is kept for :meth:`receive`.
        """
        if peer == self.comm.rank:
            self._kept[route, micro] = value
            return
        form = self._known.get((route, key))
        if form is None:
            form = None if value is None else TreeForm.of(value, "x")
            self._announce(route, peer, form)
            if form is None:
                return
            self._remember(route, key, form)
        arrays = [np.zeros(*shape) for shape in form.shapes] if value is None else leaves_of(value)
        for array in arrays:
            self._start(contiguous(array), peer, route.tag)

    def _announce(self, route: Route, peer: int, form: TreeForm | None) -> None:
        """Send a header that describes the next output on a route; ``form`` is None if the chunk failed."""
        header = np.zeros(_HEADER, np.int64)
        if form is not None and form.structure == "*":
            ((dims, dtype),) = form.shapes
            header[:3] = _ARRAY, _DTYPES.index(dtype), len(dims)
            header[3 : 3 + len(dims)] = dims
            form = None
        packed = b"" if form is None else form.packed()
        if packed:
            header[:2] = _TREE, len(packed)
        self._start(header, peer, route.tag + 1)
        if packed:
            self._start(np.frombuffer(packed, np.uint8), peer, route.tag + 1)

    def check(self, route: Route, key: Any, value: Any, what: str) -> None:
        """Check that the other stage can receive ``value``, an output for a micro-batch with this ``key``.

        ``what`` names the output in error messages.

        Raises
        ------
        LayoutError
            If the structure, a shape or a dtype is another one than before for a micro-batch with the same key, if a
            leaf is not an array, if its dtype or the number of its axes is not supported, or if it is part of an object
            that cannot be sent.
        DataError
            If a dictionary has a key that is neither a string nor an integer.
        """
        known = self._known.get((route, key))
        given = packable(value, what) if known is None else TreeForm.of(value, what)
        if known is not None and given != known:
            raise LayoutError(
                f"{what} is {given} for a micro-batch that is like an earlier one (shape and dtype {key}), "
                f"for which it was {known}: between pipeline stages, shapes must follow from the shape of the input"
            )
        if any(shape.dtype not in _DTYPES or len(shape.dims) > _AXES for shape in given.shapes):
            raise LayoutError(
                f"{what} is {given}: between pipeline stages go {', '.join(_DTYPES)} of at most {_AXES} axes"
            )

    def post(self, route: Route, micro: int, key: Any, peer: int) -> None:
        """Start to receive what stage ``peer`` sends for micro-batch ``micro``, before it is needed.

        Does nothing if its form is not known yet, or if ``peer`` is this stage.
        """
        known = self._known.get((route, key))
        if peer != self.comm.rank and known is not None:
            self._expect(route, micro, known, peer)

    def receive(self, route: Route, micro: int, key: Any, peer: int) -> Any:
        """Wait for the array or tree that stage ``peer`` sends for micro-batch ``micro``, and return it.

        Returns None if the chunk that computes it failed before its form was known to both stages.
        """
        if peer == self.comm.rank:
            return self._kept.pop((route, micro))
        started = time.perf_counter()
        value = self._take(route, micro, key, peer)
        self.waited += time.perf_counter() - started
        return value

    def _take(self, route: Route, micro: int, key: Any, peer: int) -> Any:
        if (route, micro) not in self._posted:
            form = self._known.get((route, key)) or self._announced(route, peer)
            if form is None:
                return None
            self._remember(route, key, form)
            self._expect(route, micro, form, peer)
        form, arriving = self._posted.pop((route, micro))
        for request, _ in arriving:
            request.wait()
        return form.build([array for _, array in arriving])

    def _announced(self, route: Route, peer: int) -> TreeForm | None:
        """Receive a header and return the form of the output that follows; None if the other chunk failed."""
        header = np.empty(_HEADER, np.int64)
        self.comm.recv(header, peer, route.tag + 1)
        kind, number, axes = header[:3].tolist()
        if kind == _ARRAY:
            return TreeForm((ArrayShape(tuple(header[3 : 3 + axes].tolist()), _DTYPES[number]),), "*", 0)
        if kind == _NOTHING:
            return None
        packed = np.empty(number, np.uint8)
        self.comm.recv(packed, peer, route.tag + 1)
        return TreeForm.unpacked(packed.tobytes())

    def _expect(self, route: Route, micro: int, form: TreeForm, peer: int) -> None:
        if (route, micro) not in self._posted:
            arrays = [self._empty(*shape) for shape in form.shapes]
            self._posted[route, micro] = form, [(self.comm.irecv(array, peer, route.tag), array) for array in arrays]

    def _empty(self, dims: tuple[int, ...], dtype: str) -> Array:
        """Allocate an array to receive into."""
        return np.empty(dims, dtype)

    def _remember(self, route: Route, key: Any, form: TreeForm) -> None:
        if key is not None:
            self._known[route, key] = form

    def progress(self) -> None:
        """Let MPI make progress on all messages, and release the arrays that have been sent. Does not wait."""
        for request, _ in (arriving for _, arrays in self._posted.values() for arriving in arrays):
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
