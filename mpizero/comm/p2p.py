"""Send activations and their gradients between pipeline stages, and GPU arrays of stages and of split layers.

Stages exchange trees of arrays. A :class:`TreeForm` describes a tree without its values, so that another rank can
allocate the arrays and build the tree. :class:`PipelineP2P` sends host arrays. GPU arrays are passed to MPI directly if
:func:`prove` has found that MPI accepts GPU memory ("CUDA-aware"); else they are copied through host memory.

[Note: shapes] A receive that is posted before its message arrives must know the message's size. The form of a chunk's
output (its shape, or the structure of a tree and the shapes of its arrays) depends only on the shapes and dtypes of the
micro-batch. So the first message for a new shape of micro-batch is preceded by a header that describes the output, and
both stages store the output's form. The description of a tree follows the header in a message of its own. Each array of
a tree is sent as a message, in the order of the tree. If micro-batches are not arrays, every output is preceded by a
header. If a chunk raises and the form of its output is not known yet, the header says that the chunk failed. If the
form is known, the stage sends zeros instead of the output. Results computed from these zeros are never used, because
the step ends with an agreement on errors, which raises on every rank.

[Note: direct messages] An MPI library without GPU support treats a GPU address as a host address, and the process
crashes. So GPU arrays are passed to MPI only if the library of every rank claims to support them. A library's claim may
be wrong, or may not hold for the network between two nodes. So short and long test patterns are first sent between
GPUs, from rank to rank and by the collectives that layers use, and are compared on arrival.
"""

from __future__ import annotations

import ctypes
import pickle
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np

from mpizero._util.checks import native
from mpizero._util.pytree import leaves_of, map_leaves, outline, paths_of
from mpizero.comm.communicator import Communicator, Request
from mpizero.comm.model_group import CommunicatorGroup, GpuAwareGroup, contiguous
from mpizero.errors import ConfigError, LayoutError, MpizeroError
from mpizero.kernels import to_host
from mpizero.kernels.gpu import Device, gpus
from mpizero.types import Array, Group, ShiftRequest


class ArrayShape(NamedTuple):
    """Hold the shape of an array and the name of its dtype."""

    dims: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.dims) * np.dtype(self.dtype).itemsize

    def __repr__(self) -> str:
        """Return dtype and shape, such as ``float32[4, 7]``."""
        return f"{self.dtype}{list(self.dims)}"


@dataclass(frozen=True)
class TreeForm:
    """Describe a tree of arrays: its structure, and the shape and dtype of each array.

    A tree is an array, or tuples, lists, dictionaries and dataclasses of trees; None may stand in place of a tree. Two
    forms are equal if their structures, shapes and dtypes are equal.

    Attributes
    ----------
    shapes : tuple of ArrayShape
        The arrays, in the order of the tree.
    structure : str
        The structure as text: "*" for a single array.
    template : tree
        The tree with the number of each array in place of the array.
    """

    shapes: tuple[ArrayShape, ...]
    structure: str
    template: Any = field(compare=False)

    @classmethod
    def of(cls, value: Any, what: str) -> Self:
        """Return the description of the tree ``value``; ``what`` names the tree in error messages. Not collective.

        Raises
        ------
        LayoutError
            If a leaf is not an array.
        DataError
            If a dictionary has a key that is neither a string nor an integer.
        """
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return cls((ArrayShape(tuple(value.shape), value.dtype.name),), "*", 0)
        leaves = leaves_of(value)
        for index, leaf in enumerate(leaves):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                path, _ = list(paths_of(**{what: value}))[index]
                raise LayoutError(f"{path} is of type {type(leaf).__name__}; expected an array, or None")
        shapes = tuple(ArrayShape(tuple(leaf.shape), leaf.dtype.name) for leaf in leaves)
        numbers = count()
        return cls(shapes, repr(outline(value, what)), map_leaves(lambda _: next(numbers), value))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(shape.nbytes for shape in self.shapes)

    def __str__(self) -> str:
        """Return the shapes of the arrays, for error messages."""
        return str(self.build(self.shapes))

    def build(self, arrays: Sequence[object]) -> Any:
        """Return a tree of this form with the arrays ``arrays``, given in the order of the tree. Not collective."""
        return map_leaves(lambda number: arrays[number], self.template)

    def packed(self) -> bytes:
        """Return the form as bytes, for :meth:`unpacked` on another rank. Not collective.

        Raises
        ------
        LayoutError
            If the tree contains an instance of a class that cannot be pickled.
        """
        try:
            return pickle.dumps((self.shapes, self.structure, self.template))
        except Exception as error:  # pickle raises errors of any kind
            raise LayoutError(
                f"{self} cannot be sent to another rank: {type(error).__name__}: {error}; use tuples, lists, "
                "dictionaries, or classes at the top level of a module"
            ) from error

    @classmethod
    def unpacked(cls, data: bytes) -> Self:
        """Return the description of a message's arrays that :meth:`packed` made on another rank. Not collective."""
        return cls(*pickle.loads(data))


def packable(value: Any, what: str) -> TreeForm:
    """Return the form of the tree ``value`` (structure, shapes and dtypes) if it can be sent. Not collective.

    ``what`` names the tree in error messages.

    Raises
    ------
    LayoutError
        If the tree cannot be sent, see :meth:`TreeForm.of` and :meth:`TreeForm.packed`.
    """
    form = TreeForm.of(value, what)
    if form.structure != "*":
        form.packed()
    return form


def broadcast_tree(comm: Communicator, form: TreeForm | None, value: Any, root: int, tag: str) -> Any:
    """Return the tree ``value`` of rank ``root``, which has the given form, on all ranks. Collective over ``comm``.

    ``form`` describes the structure, shapes and dtypes of the tree. The arguments ``form`` and ``value`` of the other
    ranks are not used.
    """
    tree: TreeForm = comm.broadcast_object(form, root, tag)
    sends = comm.rank == root
    arrays = (
        [np.ascontiguousarray(native(a)) for a in leaves_of(value)] if sends else [np.empty(*s) for s in tree.shapes]
    )
    for array in arrays:
        comm.broadcast(array, root, tag)
    return tree.build(arrays)


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
    the previous chunk. ``border`` is the index of the chunk that receives.
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
        self._local_outputs: dict[tuple[Route, int], Any] = {}

    def send(self, route: Route, micro: int, key: Any, peer: int, value: Any) -> None:
        """Start to send a chunk's output for micro-batch ``micro`` to stage ``peer``.

        ``value`` is the output, an array or a tree of arrays, or None if the chunk failed. ``key`` is :func:`key_of` of
        the micro-batch, the same on both stages. If ``peer`` is this stage, the output is kept for :meth:`receive`.
        """
        if peer == self.comm.rank:
            self._local_outputs[route, micro] = value
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
        """Send a header (short message) that describes the next output on a route, or says that the chunk failed.

        ``form`` is the output's structure, shapes and dtypes; it is None if the chunk failed.
        """
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
        """Check that the stage that gets ``value``, an output for a micro-batch with this ``key``, can receive it.

        ``key`` is :func:`key_of` of the micro-batch; ``what`` names the output in error messages.

        Raises
        ------
        LayoutError
            If the structure, a shape or a dtype differs from that of an earlier micro-batch with the same key; if a
            leaf is not an array, or has an unsupported dtype or number of axes; or if the tree cannot be pickled.
        DataError
            If a dictionary has a key that is neither a string nor an integer.
        """
        known = self._known.get((route, key))
        form = packable(value, what) if known is None else TreeForm.of(value, what)
        if known is not None and form != known:
            raise LayoutError(
                f"{what} is {form} for a micro-batch that is like an earlier one (shape and dtype {key}), "
                f"for which it was {known}: between pipeline stages, shapes must follow from the shape of the input"
            )
        if any(shape.dtype not in _DTYPES or len(shape.dims) > _AXES for shape in form.shapes):
            raise LayoutError(
                f"{what} is {form}: between pipeline stages go {', '.join(_DTYPES)} of at most {_AXES} axes"
            )

    def post(self, route: Route, micro: int, key: Any, peer: int) -> None:
        """Start to receive the output that stage ``peer`` sends for micro-batch ``micro``, before it is needed.

        Does nothing if the form (structure, shapes and dtypes) of the output is not known yet, or if ``peer`` is this
        stage.
        """
        known = self._known.get((route, key))
        if peer != self.comm.rank and known is not None:
            self._expect(route, micro, known, peer)

    def receive(self, route: Route, micro: int, key: Any, peer: int) -> Any:
        """Wait for the array or tree that stage ``peer`` sends for micro-batch ``micro``, and return it.

        Returns None if the sending chunk failed before both stages knew the form (structure, shapes and dtypes) of its
        output.
        """
        if peer == self.comm.rank:
            return self._local_outputs.pop((route, micro))
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
        """Receive a header and return the structure, shapes and dtypes of the output that follows.

        Return None if the sending chunk failed.
        """
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


class HostStagedP2P(PipelineP2P):
    """Send GPU arrays between pipeline stages through copies in host memory."""

    def __init__(self, comm: Communicator, device: Device) -> None:
        super().__init__(comm)
        self.device = device

    def send(self, route: Route, micro: int, key: Any, peer: int, value: Any) -> None:
        """Copy an array, or the arrays of a tree, to the host and start to send them, as :meth:`PipelineP2P.send` does.

        If ``value`` is None, tell the other stage that the chunk failed.
        """
        super().send(route, micro, key, peer, value if peer == self.comm.rank else map_leaves(to_host, value))

    def receive(self, route: Route, micro: int, key: Any, peer: int) -> Any:
        """Wait for the output of stage ``peer`` and return it on the GPU; None if the chunk of that stage failed."""
        return map_leaves(self.device.put, super().receive(route, micro, key, peer))


class GpuAwareP2P(PipelineP2P):
    """Send GPU arrays between pipeline stages by passing them to MPI, which must accept GPU memory."""

    def __init__(self, comm: Communicator, device: Device) -> None:
        super().__init__(comm)
        self.device, comm.wait_for_device = device, device.synchronize

    def _empty(self, dims: tuple[int, ...], dtype: str) -> Array:
        return self.device.empty(prod(dims), dtype).reshape(dims)


class _LayerGroup(ABC):
    """Hold the group of ranks that layers are split over, and the GPU of this rank.

    Methods take GPU arrays and return GPU arrays, or take host arrays and return host arrays.
    """

    def __init__(self, group: Group, device: Device) -> None:
        self._group, self._device = group, device
        self.rank, self.size = group.rank, group.size

    @abstractmethod
    def _call(self, method: str, x: Array, *arguments: Any) -> Array: ...

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise sum of ``x`` over the ranks. Collective over the group."""
        return self._call("all_reduce", x, tag)

    def all_max(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise maximum of ``x`` over the ranks. Collective over the group."""
        return self._call("all_max", x, tag)

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return ``x`` of all ranks, concatenated along ``axis``.

        Collective over the group. ``x`` of rank i has length ``sizes[i]`` along ``axis``.
        """
        return self._call("all_gather", x, axis, sizes, tag)

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return this rank's block, of length ``sizes[rank]`` along ``axis``, of the sum of ``x`` over the ranks.

        Collective over the group.
        """
        return self._call("reduce_scatter", x, axis, sizes, tag)


class HostStagedGroup(_LayerGroup):
    """Sum, gather and shift GPU arrays of layers through host memory; implements :class:`mpizero.types.Group`."""

    def _call(self, method: str, x: Array, *arguments: Any) -> Array:
        result: Array = getattr(self._group, method)(to_host(x), *arguments)
        return result if isinstance(x, np.ndarray) else self._device.put(result)

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> ShiftRequest:
        """Start to send ``arrays`` to rank + ``by`` and to receive arrays of the same shapes from rank - ``by``.

        Collective over the group. Rank numbers are taken modulo the size of the group.
        """
        device = None if all(isinstance(x, np.ndarray) for x in arrays) else self._device
        return _DeviceShift(self._group.shift([to_host(x) for x in arrays], by, tag), device)


class _DeviceShift:
    """Wait for the arrays of a shift through host memory, and copy them to ``device`` unless it is None."""

    def __init__(self, request: ShiftRequest, device: Device | None) -> None:
        self._request, self._device = request, device

    def wait(self) -> tuple[Array, ...]:
        """Wait for the arrays and return them on the GPU, or on the host if host arrays were sent. Not collective."""
        arrays = self._request.wait()
        return arrays if self._device is None else tuple(map(self._device.put, arrays))

    def test(self) -> bool:
        """Make progress and tell whether :meth:`wait` would return without waiting. Not collective."""
        return self._request.test()


class GpuAwareLayerGroup(_LayerGroup):
    """Sum, gather and shift GPU arrays of layers by passing them to MPI; implements :class:`mpizero.types.Group`."""

    def __init__(self, group: CommunicatorGroup, device: Device) -> None:
        super().__init__(group, device)
        self._devices = GpuAwareGroup(group, device)

    def _for(self, x: Array) -> Group:
        return self._group if isinstance(x, np.ndarray) else self._devices

    def _call(self, method: str, x: Array, *arguments: Any) -> Array:
        result: Array = getattr(self._for(x), method)(x, *arguments)
        return result

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> ShiftRequest:
        """Start to send ``arrays`` to rank + ``by`` and to receive arrays of the same shapes from rank - ``by``.

        Collective over the group. Rank numbers are taken modulo the size of the group. ``arrays`` are either all GPU
        arrays or all host arrays.
        """
        return self._for(arrays[0]).shift(arrays, by, tag)


#: Bytes of the patterns: one that MPI sends at once (eager), and one so long that it uses its protocol for large data.
PATTERNS = (64, 1 << 22)
#: Seconds after which a pattern that has not arrived counts as lost.
PATIENCE = 60.0
#: Length after which a pattern repeats: a prime, so that pieces of a message that are swapped are noticed.
_PERIOD = 251
_TAG = 31_500
#: Function that sends a pattern of so many bytes, and returns what is wrong with the received ones, or "".
Send = Callable[[Communicator, Device, int], str]
#: File in which Linux lists the libraries that this process has loaded.
_LOADED = "/proc/self/maps"


def prove(comm: Communicator, open_device: Callable[[], Device]) -> str:
    """Test whether GPU arrays may be passed to MPI; return "" if so, else the reason why not, the same on all ranks.

    Collective over ``comm``. ``open_device`` returns this rank's GPU; it is called only if MPI claims GPU support.

    Raises
    ------
    ConfigError
        If a test pattern never arrives: its message cannot be cancelled, so the job cannot go on.
    """
    reason = _agreed(comm, unclaimed(comm))
    if reason:
        return reason
    device = open_device()
    comm.wait_for_device = device.synchronize
    try:
        return _agreed(comm, _tried(comm, device, _around)) or _agreed(comm, _tried(comm, device, _among_all))
    finally:
        comm.wait_for_device = None


def unclaimed(comm: Communicator) -> str:
    """Return why GPU arrays must not be passed to MPI, as far as one rank can tell; "" if it knows no reason.

    Not collective. The reasons are that ranks are threads, that the communicator has one rank, or that the MPI library
    does not claim to support GPU memory.
    """
    if getattr(comm, "mpi", None) is None:  # its class is not imported here: that would start MPI, also for a plan
        return "these ranks are threads of one process"
    if comm.size == 1:
        return "there is one rank"
    if gpus().in_host_memory:
        return ""
    return "" if _is_cuda_aware() else "this MPI does not say that it takes memory of CUDA devices"


def _is_cuda_aware() -> bool:
    """Tell whether the loaded MPI library claims to support CUDA memory, by its ``MPIX_Query_cuda_support``.

    MPICH, Open MPI and MPI libraries derived from them have this function. False if the library does not have it.
    """
    try:
        with open(_LOADED, encoding="utf-8") as maps:
            loaded = sorted({line.split()[-1] for line in maps if "/libmpi" in line})
    except OSError:
        return False
    for path in loaded:
        try:
            query = ctypes.CDLL(path).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        query.restype, query.argtypes = ctypes.c_int, ()
        return bool(query())
    return False


def _agreed(comm: Communicator, reason: str) -> str:
    """Return, on all ranks, the ``reason`` of the lowest rank that passes one; "" if none does. Collective."""
    return next((text for text in comm.allgather_object(reason, "direct messages") if text), "")


def _tried(comm: Communicator, device: Device, send: Send) -> str:
    try:
        return next((wrong for size in PATTERNS if (wrong := send(comm, device, size))), "")
    except ConfigError:
        raise
    except (MpizeroError, TypeError, ValueError, BufferError) as error:  # the others go on, to the agreement
        return f"rank {comm.rank}: {type(error).__name__}: {' '.join(str(error).split())}"


def _around(comm: Communicator, device: Device, size: int) -> str:
    """Send a pattern of ``size`` bytes to the next rank; return an error text if a wrong one is received, else ""."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arrived = device.put(np.zeros(size, np.uint8))
    requests = [comm.irecv(arrived, before, _TAG), comm.isend(device.put(_pattern(comm.rank, size)), after, _TAG)]
    _wait(requests)
    return _compared(arrived, [before], size, comm.rank)


def _among_all(comm: Communicator, device: Device, size: int) -> str:
    """Exchange ``size`` bytes by all-to-all and all-gather; return an error text if wrong bytes arrive, else ""."""
    ranks, part = comm.size, max(1, size // comm.size)
    blocks, gathered = (device.put(np.zeros(ranks * part, np.uint8)) for _ in range(2))
    pattern = _pattern(comm.rank, part)
    comm.alltoallv(device.put(np.tile(pattern, ranks)), [part] * ranks, blocks, [part] * ranks, "direct messages")
    comm.allgatherv(device.put(pattern), gathered, [part] * ranks, "direct messages")
    wrong = (_compared(arrived, range(ranks), part, comm.rank) for arrived in (blocks, gathered))
    return next(filter(None, wrong), "")


def _wait(requests: list[Request]) -> None:
    limit = time.monotonic() + PATIENCE
    while not all([request.test() for request in requests]):
        if time.monotonic() > limit:
            raise ConfigError(
                f"a message from one GPU to another has not arrived for {PATIENCE:.0f} s, though this MPI says that "
                "it takes memory of GPUs: train with direct_messages = false, which sends from memory of the host"
            )


def _pattern(rank: int, size: int) -> Array:
    return ((np.arange(size) + 7 * rank) % _PERIOD + 1).astype(np.uint8)


def _compared(arrived: Array, senders: range | list[int], size: int, rank: int) -> str:
    wanted = np.concatenate([_pattern(sender, size) for sender in senders])
    if np.array_equal(to_host(arrived), wanted):
        return ""
    return f"a pattern sent between GPUs arrived wrong on rank {rank}, though this MPI says that it takes their memory"
