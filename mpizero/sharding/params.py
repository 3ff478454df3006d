"""Store a rank's parameters: which rank owns which ranges, where they are stored, how updates reach all nodes.

:class:`Shard` computes the ranges of parameters and gradients that a rank owns, :func:`update_pieces` the ranges that
it updates. :class:`Memory` allocates all arrays of model state, privately or in windows that a node shares, and counts
their bytes. :class:`ParameterStore` holds the parameters in this memory: all of them on every node, or only the shards
of the node's ranks, from which units are gathered when they are needed. :class:`ParameterAllGather` sends updated
parameters to the other nodes during the next forward pass (ZeRO-1 and 2, and ZeRO-3 over groups of nodes).
:func:`fits_shared_memory` checks in advance whether parameters and gradients fit into shared memory.

[Note: regions] The parameters are cut into regions, in the order in which blocks use them. Each region has an
all-gather of its own, between the nodes that own parts of it; the all-gathers begin in this order. Before a rank reads
the parameters of a block, it waits for all regions up to the last one that the block uses. If the ranks of a node share
one copy, each of them receives a part of the region, and the region is complete when all of them have received their
parts. Each region therefore has a non-blocking barrier of the node; a rank begins the barrier as soon as its own
messages of the region have arrived.

[Note: nobody waits for a rank that waits] The barrier of a region ends only when every rank of the node has begun it.
So a rank must begin the barriers of all regions before it blocks in any other call. :meth:`ParameterAllGather.wait`
begins them: it is called at the end of a rank's forward and backward passes, before any other collective of the node
(``MessageProgress.finish``), and before any other use of the parameters.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpizero import kernels
from mpizero._util.text import notice
from mpizero.comm import Communicator, ProcessGrid, Request, SharedMemory
from mpizero.comm.agreement import all_ranks
from mpizero.comm.communicator import Timeline
from mpizero.comm.reduce import Gathering, begin_gather, keep_testing
from mpizero.comm.startup import available_memory
from mpizero.errors import CollectiveError, MpizeroError, OutOfMemoryError, PeerFailure, SharedMemoryError
from mpizero.guard.reports import SHARED_FOLDER, taken_by_leftovers
from mpizero.kernels.memory import PAGE
from mpizero.layout import Span
from mpizero.layout.batch import DEFAULT_GRAINS, contiguous_parts, max_dynamic_rows
from mpizero.layout.flat import FlatLayout, ParameterUse, Unit, united, views
from mpizero.layout.sum_tree import RowsPlan, rows_plan
from mpizero.sharding.config import Config, Placement, gathers_units, round_buffer_sizes, schedules_dynamically
from mpizero.sharding.integer_arrays import IntegerState
from mpizero.types import Array, ParameterSpec


@dataclass(frozen=True)
class Shard:
    """Describe the shard that one rank of a data group owns: one range of each unit's parameters.

    The rank has number ``rank`` in the data group, which has ``parts`` ranks. It also owns the gradients of these
    parameters. All offsets and sizes are in elements.
    """

    layout: FlatLayout
    rank: int
    parts: int

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """For each unit, the range of the flat vector of all parameters that the rank owns."""
        return self.layout.shards(self.rank, self.parts)

    @cached_property
    def size(self) -> int:
        """Number of parameter elements that the rank owns."""
        return sum(span.size for span in self.spans)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """For each unit, where the owned range begins in the concatenation of the owned ranges of all units."""
        return _running([span.size for span in self.spans])

    def pieces(self) -> Iterator[tuple[ParameterUse, Span, int]]:
        """Yield each parameter of which the rank owns elements, the owned range, and its offset in the shard.

        The range is in the flat vector of all parameters. The shard is the concatenation of all owned ranges.
        """
        for span, offset in zip(self.spans, self.offsets, strict=True):
            for entry, part in self.layout.pieces(span):
                yield entry, part, offset + part.start - span.start

    @cached_property
    def gradient_spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each unit, the owned ranges of the array of the unit's gradients; tied uses have ranges of their own."""
        return tuple(self.layout.gradient_spans(unit, self.spans) for unit in self.layout.units)

    @cached_property
    def gradient_offsets(self) -> tuple[int, ...]:
        """For each unit, where its owned gradients begin in the concatenation of the owned gradients of all units."""
        return _running([sum(span.size for span in spans) for spans in self.gradient_spans])

    @cached_property
    def gradient_size(self) -> int:
        """Number of gradient elements that the rank owns."""
        return sum(span.size for spans in self.gradient_spans for span in spans)

    def flat_spans(self, unit: int) -> tuple[Span, ...]:
        """Return the owned ranges of the gradients of unit number ``unit``, as ranges of the flat gradient."""
        base = self.layout.gradient_bases[unit]
        return tuple(span.shift(base) for span in self.gradient_spans[unit])

    @cached_property
    def gradient_kinds(self) -> tuple[tuple[Span, bool], ...]:
        """Ranges of the concatenated owned gradients, each with True if it holds new values that samples average.

        Such values, running means for one, stand in the place of gradients; see :attr:`FlatLayout.averages`.
        """
        kinds: list[tuple[Span, bool]] = []
        position = 0
        for unit in self.layout.units:
            for span in self.flat_spans(unit.index):
                for part, averaged in span.split(self.layout.averages):
                    start = position + part.start - span.start
                    if kinds and kinds[-1][1] == averaged:
                        start = kinds.pop()[0].start
                    kinds.append((Span(start, position + part.stop - span.start), averaged))
                position += span.size
        return tuple(kinds)

    def shard_position(self, unit: int, gradient: int) -> int:
        """Return the index, in the concatenated owned gradients, of an element that the rank owns.

        ``gradient`` is the index of the element in the gradients of unit number ``unit``.
        """
        position = self.gradient_offsets[unit]
        for span in self.gradient_spans[unit]:
            if span.start <= gradient < span.stop:
                return position + gradient - span.start
            position += span.size
        return position


class UpdatePiece(NamedTuple):
    """Describe a contiguous range of one parameter that this rank updates.

    ``span`` is the range in the flat vector of all parameters. ``store``, ``gradient`` and ``state`` are the indices of
    the range's first element in the parameter store, in the reduced gradient and in the arrays of the optimizer state.
    ``uses`` holds the index in the reduced gradient for each tied use of the parameter. ``group`` is the number of the
    optimizer group. For an averaged parameter (a running mean, say), which has no state and no group, ``state`` and
    ``group`` are -1.
    """

    entry: ParameterUse
    span: Span
    store: int
    gradient: int
    uses: tuple[int, ...]
    state: int
    group: int

    @property
    def size(self) -> int:
        """Number of elements in the range."""
        return self.span.size


class StatePiece(NamedTuple):
    """Describe consecutive elements of one array of optimizer state that a rank keeps.

    ``spec`` describes the whole array like a parameter; its name is that of the parameter to which the array belongs.
    ``start`` is the index of the first element in the flattened array, ``state`` its index in this rank's state;
    ``size`` is the number of elements.
    """

    spec: ParameterSpec
    start: int
    state: int
    size: int


class UpdateRun(NamedTuple):
    """Describe contiguous pieces of parameters that one kernel call updates together.

    ``store``, ``gradient`` and ``state`` are the indices of the first element in the parameter store, in the reduced
    gradient and in the arrays of the optimizer state; ``size`` is the number of elements, ``group`` the number of the
    optimizer group.
    """

    store: int
    gradient: int
    state: int
    size: int
    group: int


def update_pieces(
    shards: Sequence[Shard], groups: dict[ParameterSpec, int], store_bases: Sequence[int] | None, flat: bool
) -> tuple[UpdatePiece, ...]:
    """Return the pieces (ranges of single parameters) that a rank updates, averaged parameters included.

    Parameters
    ----------
    shards : sequence of Shard
        The shards that the rank updates: its own or, with replicated optimizer state, the shards of its whole
        inter-node group.
    groups : dict
        The number of the optimizer group of each parameter; averaged parameters may be left out.
    store_bases : sequence of int or None
        For each shard, the index of its first element in a sharded store; None for a store that holds all parameters.
    flat : bool
        Whether the reduced gradient holds the gradients of all parameters (a flat gradient), or only those that the
        rank owns.
    """
    pieces: list[UpdatePiece] = []
    state = 0
    for number, shard in enumerate(shards):
        for entry, part, offset in shard.pieces():
            if not entry.spec.trainable:
                continue
            inside = part.start - entry.offset
            store = part.start if store_bases is None else store_bases[number] + offset
            uses = tuple(_locate(shard, use, inside, flat) for use in shard.layout.uses.get(entry.spec.name, ()))
            gradient = _locate(shard, entry, inside, flat)
            state_fields = (-1, -1) if entry.spec.averaged else (state, groups[entry.spec])
            pieces.append(UpdatePiece(entry, part, store, gradient, uses, *state_fields))
            state += 0 if entry.spec.averaged else part.size
    return tuple(pieces)


def _locate(shard: Shard, entry: ParameterUse, inside: int, flat: bool) -> int:
    gradient = entry.gradient + inside
    if flat:
        return shard.layout.gradient_bases[entry.unit] + gradient
    return shard.shard_position(entry.unit, gradient)


def _running(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))[:-1]


def tensors_last(pieces: Sequence[UpdatePiece], names: Container[str]) -> tuple[UpdatePiece, ...]:
    """Return the pieces in the same order, with new offsets in the optimizer state: parameters ``names`` come last.

    ``names`` are the parameters that a matrix optimizer updates as whole tensors. A state array that these parameters
    do not use ends before their offsets.
    """
    sizes = [piece.size for piece in pieces]
    order = sorted(range(len(pieces)), key=lambda number: pieces[number].entry.spec.name in names)
    positions = dict(zip(order, _running([sizes[number] for number in order]), strict=True))
    return tuple(piece._replace(state=positions[number]) for number, piece in enumerate(pieces))


def runs_of(pieces: Sequence[UpdatePiece]) -> tuple[UpdateRun, ...]:
    """Join successive pieces (ranges of single parameters) of the same optimizer group into runs.

    Two pieces are joined if the second begins where the first ends in the parameter store, in the reduced gradient and
    in the optimizer state.
    """
    runs: list[UpdateRun] = []
    for piece in pieces:
        begins = (piece.store, piece.gradient, piece.state)
        if runs and piece.group == runs[-1].group and begins == tuple(at + runs[-1].size for at in runs[-1][:3]):
            runs[-1] = runs[-1]._replace(size=runs[-1].size + piece.size)
        else:
            runs.append(UpdateRun(*begins, piece.size, piece.group))
    return tuple(runs)


def paged(nbytes: int, page: int = PAGE) -> int:
    """Round ``nbytes`` up to whole memory pages, so that arrays of different ranks share no page.

    Not collective.
    """
    return -(-nbytes // page) * page


#: Advice in errors: how to need less memory for model state.
STATE_ADVICE = (
    'shard more (the strategy "zero3" keeps 1/ranks of parameters, gradients and optimizer state), use more ranks or '
    "nodes, or split the model (mz.Mesh(pipeline=...)); `mpizero plan` tells what a layout needs"
)
#: What errors say that the memory was for if layers find none, and the advice that follows.
COMPUTING = (
    "computing a micro-batch",
    "choose a smaller micro_batch, more micro-batches (accumulate), checkpointed blocks, or, for fields, more ranks "
    "that share their space (mz.Mesh(domain=...))",
)


def refused(error: MemoryError, what: str, advice: str) -> OutOfMemoryError:
    """Return an ``OutOfMemoryError`` that says what the memory was for, followed by ``advice``. Not collective.

    An ``error`` that is an ``OutOfMemoryError`` already is returned unchanged.
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

    Collective over ``world``, all ranks of the model. If one node has too little memory, the memory that other nodes
    have allocated in the ``with`` block stays allocated, and the caller must free it. ``what`` names the memory in
    errors.

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
    except (CollectiveError, PeerFailure):  # the ranks may be unable to communicate any more
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
        """Subtract an array of :meth:`private` from the count of bytes; the caller then drops it. Not collective."""

    def shared(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: Any) -> tuple[Array, ...]:
        """Return new arrays of zeros, one for each shape, that all ranks of the node read and write.

        Collective over the node.
        """

    def free_shared(self, kind: str, arrays: Sequence[Array]) -> None:
        """Free the arrays that :meth:`shared` returned. Collective over the node."""


class MessageProgress:
    """Call MPI regularly for this rank's messages in flight, so that they progress while the rank computes.

    MPI moves most messages only while the rank is inside an MPI call. Every object that leaves messages in flight
    registers its functions under a name: the parameter store ("parameters"), the gradient buffers ("rows", "rounds"),
    the pipeline ("pipeline"). Runners call :meth:`poll` between two blocks of the model, and layers with sublayers call
    it between two sublayers. The allocator calls :meth:`finish` before every collective of the node, so that no rank
    waits for messages of a rank that is blocked in the collective: [Note: nobody waits for a rank that waits].
    """

    def __init__(self) -> None:
        self._polls: dict[str, Callable[[], object]] = {}
        self._finishes: dict[str, Callable[[], object]] = {}
        self._closes: dict[str, Callable[[], object]] = {}

    def register(
        self,
        name: str,
        poll: Callable[[], object],
        finish: Callable[[], object] | None = None,
        close: Callable[[], object] | None = None,
    ) -> None:
        """Register an object's ``poll`` and ``finish``, in place of functions of the same name. Not collective.

        Parameters
        ----------
        name : str
            Name of the object that has messages in flight.
        poll : callable
            Lets the object's messages progress; not collective, and cheap if no message is in flight.
        finish : callable, optional
            Waits for the object's messages that other ranks of the node depend on.
        close : callable, optional
            Waits for all of the object's messages, before their memory is freed; None if ``finish`` does so.
        """
        self._polls[name] = poll
        if finish is not None:
            self._finishes[name] = finish
        if close is not None:
            self._closes[name] = close

    def poll(self) -> None:
        """Call all registered ``poll`` functions: make the messages in flight progress. Not collective."""
        for poll in self._polls.values():
            poll()

    def finish(self) -> None:
        """Call all registered ``finish`` functions: wait for the messages that other ranks of the node depend on.

        Collective over the data group.
        """
        for finish in self._finishes.values():
            finish()

    def close(self) -> None:
        """Wait for all messages, and remove all registered functions. Collective over the data group."""
        self.finish()
        for close in self._closes.values():
            close()
        for functions in (self._polls, self._finishes, self._closes):
            functions.clear()


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
        Bytes of this rank's private arrays, and of the windows that its node shares, by kind: "parameters",
        "gradients", "optimizer state", "buffers" or "exchange buffers".
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
        return self._counted(kind, np.zeros, shape, dtype)

    def release(self, kind: str, array: Array) -> None:
        """Subtract an array of :meth:`private` from the count of bytes; the caller then drops it. Not collective."""
        self.private_bytes[kind] -= array.nbytes

    def scratch(self, name: str, size: int, dtype: Any) -> Array:
        """Return a message buffer of ``size`` elements, uninitialized. Not collective.

        Every call with the same name returns the same memory; if a larger buffer is needed, new memory replaces it.
        Buffers stay small, because an exchange is cut into segments: see [Note: buckets] in
        ``sharding/grad_reduce.py``.
        """
        nbytes = size * np.dtype(dtype).itemsize
        buffer = self._scratch.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            if buffer is not None:
                self.release("exchange buffers", buffer)
                self._scratch.pop(name)
            buffer = self._scratch[name] = self._counted("exchange buffers", np.empty, nbytes, np.uint8)
        return buffer[:nbytes].view(dtype)

    def _counted(self, kind: str, make: Callable[..., Array], shape: int | tuple[int, ...], dtype: Any) -> Array:
        size = prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
        with needing(f"{kind}: {size} bytes wanted, {self.rank_bytes} held", STATE_ADVICE):
            array = make(shape, dtype)
        self.private_bytes[kind] += array.nbytes
        self._note_peak()
        return array

    def shared(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: Any) -> tuple[Array, ...]:
        """Return new arrays of zeros, one for each shape, that all ranks of the node read and write, in one window.

        Collective over the node. If ranks share no memory, the arrays are this rank's alone.

        Raises
        ------
        SharedMemoryError
            On all ranks of the node, if the node has too little shared memory. Other nodes raise only if the call is
            made inside :func:`on_all_ranks`.
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
        index = next(i for i, (_, views) in enumerate(self._windows) if views[0] is arrays[0])
        window, _ = self._windows.pop(index)
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


#: Number of buffers of a sharded store, each for one gathered unit.
UNIT_BUFFERS = 2


class ParameterViews(dict[str, Any]):
    """Hold nested views of parameters, by name; ``poll()`` lets messages in flight progress.

    A layer with sublayers calls ``poll`` between them, through :func:`mpizero.nn.layer.poll`. If ``gathered`` is true,
    the memory of the views is used for other units between the forward and the backward pass, so a layer must not keep
    the views in its cache.
    """

    __slots__ = ("gathered", "poll")

    def __init__(self, views: Mapping[str, Any], poll: Callable[[], None], *, gathered: bool = False) -> None:
        super().__init__(
            {k: ParameterViews(v, poll, gathered=gathered) if type(v) is dict else v for k, v in views.items()}
        )
        self.poll, self.gathered = poll, gathered


class ParameterProvider(Protocol):
    """Define the interface of a :class:`ParameterStore`, and of its copy on a GPU, to code that reads parameters."""

    layout: FlatLayout
    timeline: Timeline

    def unshard(
        self, unit: Unit, following: Unit | None = None, *, by_block: bool = False
    ) -> AbstractContextManager[dict[str, Any]]:
        """Yield nested views of a unit's parameters, by block; :meth:`ParameterStore.unshard` describes the arguments.

        Collective over the data group if parameters are sharded.
        """

    @property
    def progress(self) -> MessageProgress:
        """The object whose ``poll`` is called between layers, so that messages in flight progress."""

    def wait(self, block: str | None = None) -> None:
        """Wait until the updated parameters of ``block`` (None: of all blocks) have arrived from their owners."""


class ParameterStore:
    """Store the parameters: all of them on every node, or only the shards of the node's ranks.

    If there is a single node and its ranks share memory, its window holds all parameters, and no unit is ever gathered.

    [Note: the next unit] A sharded store has two slots, buffers for one gathered unit each. While one unit is used, the
    next one is gathered into the other slot (a prefetch). The prefetch begins when the current unit is complete on all
    ranks of the node, because from then on no rank reads the other slot. Every rank gathers the same units in the same
    order.

    [Note: groups of nodes] With ``shard_nodes`` a unit is gathered inside a group of nodes (``grid.shard_group``), so
    each group keeps all parameters. A rank still owns and updates its part of a division over all ranks. In each other
    group one rank corresponds to it (``grid.replicas``). A rank keeps copies of the shards of these ranks, which send
    it new values after each update. When a unit is gathered, each rank sends its own shard and these copies.

    [Note: newer values on a GPU] If a rank is alone in its data group and trains on a GPU, the GPU may have newer
    parameters than this store. These values are copied to the host when :attr:`values`, :meth:`owned` or
    :meth:`unshard` is used.

    Parameters
    ----------
    layout : FlatLayout
        The layout of the flat parameter vector.
    grid : ProcessGrid
        The process groups of this rank.
    memory : Memory
        Allocates the arrays.
    sharded : bool
        Whether each node keeps only its ranks' shards; units are then gathered when they are needed. It has no effect
        on a single node.
    dtype : numpy dtype
        The data type of all parameters.
    timeline : Timeline, optional
        Records when units are gathered, and when updated parameters are sent.
    rounded : bool
        Whether float32 parameters are rounded to bfloat16 whenever they change, and are sent in 16 bits.

    Attributes
    ----------
    dtype : numpy dtype
        The data type of all parameters.
    version : int
        Number of calls of :meth:`all_gather`; 1 while the parameters have their initial values.
    """

    def __init__(
        self,
        layout: FlatLayout,
        grid: ProcessGrid,
        memory: Memory,
        sharded: bool,
        dtype: Any,
        *,
        timeline: Timeline | None = None,
        rounded: bool = False,
    ) -> None:
        self.layout, self.grid, self.memory, self.dtype = layout, grid, memory, np.dtype(dtype)
        self.timeline, self._rounded = timeline or Timeline(), rounded
        self.sharded = sharded and grid.shard_group.size > 1
        self.shard = Shard(layout, grid.data.rank, grid.data.size)
        held = [Shard(layout, rank, grid.data.size) for rank in grid.held_ranks]
        self._bases = dict(zip(grid.held_ranks, _running([shard.size for shard in held]), strict=True))
        size = sum(shard.size for shard in held) if self.sharded else layout.size
        self.group_shards = tuple(Shard(layout, rank, grid.data.size) for rank in grid.inter_node_ranks)
        self._sent_by = [
            [Shard(layout, other, grid.data.size) for other in grid.replicas_of(r)] for r in grid.shard_group_ranks
        ]
        #: The shards of which this rank has a copy, and that it or a peer updates.
        self.kept_shards = self._sent_by[grid.shard_group.rank] if self.sharded else self.group_shards
        self._copy_group = grid.replicas if self.sharded else grid.inter_node
        self._buffers: tuple[Array, ...] = ()
        self._next = 0
        with on_all_ranks(grid.world, "parameters"):
            (self._values,) = memory.shared("parameters", [(size,)], dtype)
            if self.sharded:
                self._buffers = memory.shared("buffers", [(layout.largest_gathered,)] * UNIT_BUFFERS, dtype)
        self._coming: tuple[Unit, Gathering] | None = None
        self._regions = layout.regions(REGION) if self._copy_group.size > 1 else ()
        self._needed = {block: self._last_region(block) for unit in layout.units for block in unit.blocks}
        self._gathering: list[ParameterAllGather] = []
        self._begun: ParameterAllGather | None = None
        weakref.finalize(self, poll_pending, self._gathering)
        self.progress = memory.progress
        #: Whether parameters are sent to other ranks at all: within a node they lie in shared memory.
        self._sends = self.sharded or bool(self._regions)
        if self._sends:
            self.progress.register("parameters", self.poll, finish=self._finish_for_node, close=self.wait)
        self._source: Callable[[Array], None] | None = None
        self._outdated = False
        self._views: dict[tuple[int, int], dict[str, Any]] = {}
        self.version = 0
        #: Arrays that layers are given beside the parameters; None before they are set.
        self.integers: IntegerState | None = None

    @property
    def values(self) -> Array:
        """The array of all parameters that this node holds. Collective over the data group if some are in flight."""
        if self._gathering:
            self.wait()
        return self._local_values()

    def take_from(self, source: Callable[[Array], None]) -> None:
        """Record that a GPU has newer parameters, which ``source`` copies to the host array passed to it.

        Not collective. ``source`` is called when the parameters are needed on the host, and dropped by :meth:`owned`,
        because the caller then writes newer values on the host; see [Note: newer values on a GPU].
        """
        self._source, self._outdated = source, True

    def refresh(self) -> None:
        """Copy the parameters from the GPU to the host, even if they were copied since the last update. Not collective.

        Nothing is copied if the host's values were written after the last update on the GPU, and so are newer.
        """
        if self._source is not None:
            self._source(self._values)
            self._outdated = False

    def _local_values(self) -> Array:
        if self._outdated:
            self.refresh()
        return self._values

    @property
    def base(self) -> int:
        """The index of the first element of this rank's shard in the array of a sharded store."""
        return self._bases[self.grid.data.rank]

    def stored_span(self, shard: Shard, unit: int, part: Span) -> Span:
        """Return where a range of the flat parameter vector is in the store's array. Not collective.

        ``part`` is a range of unit number ``unit`` that belongs to ``shard``, one of :attr:`kept_shards`.
        """
        if not self.sharded:
            return part
        return part.shift(self._bases[shard.rank] + shard.offsets[unit] - shard.spans[unit].start)

    def owned(self, unit: int) -> Array:
        """Return a writable view of this rank's range of the parameters of unit number ``unit``. Not collective."""
        for gathering in (*self._gathering, *filter(None, [self._begun])):
            gathering.wait_requests()  # what is still being sent must not change
        self._begun = None  # of an update that was interrupted
        values, self._source = self._local_values(), None  # the caller writes newer values than the GPU's
        return values[slice(*self.stored_span(self.shard, unit, self.shard.spans[unit]))]

    def unshard(
        self, unit: Unit, following: Unit | None = None, *, by_block: bool = False
    ) -> AbstractContextManager[dict[str, Any]]:
        """Return a context that yields read-only nested views of a unit's parameters, by block.

        Collective over the data group if the store is sharded; the unit is gathered then, and the views are valid only
        inside the context.

        Parameters
        ----------
        unit : Unit
            The unit to gather now.
        following : Unit or None
            The unit that every rank gathers next, if it is known; its gather begins now. See [Note: the next unit].
        by_block : bool
            Whether the caller itself calls :meth:`wait` for each block before it reads the block's parameters.
        """
        number = 0
        if self._gathering and not by_block and not self.sharded:
            self.wait()
        self._local_values()
        if self.sharded:
            with self.timeline.span("publication", unit):
                number = self._bring(unit)
                if following is not None:
                    self._begin(following)
        key = (unit.index, number)
        if key not in self._views:
            buffer = (self._buffers[number] if self.sharded else self._values).view()
            buffer.flags.writeable = False
            self._views[key] = self.unit_views(unit, buffer)
        return nullcontext(self._views[key])

    def unsharded(self, unit: Unit) -> Array:
        """Return the array of the parameters of ``unit``, the unit that a sharded store has gathered last.

        Not collective.
        """
        return self._buffers[(self._next - 1) % len(self._buffers)][: unit.gathered]

    def all_gather(self, *, exchange: bool = True, later: bool = False) -> None:
        """All-gather the updated parameters: make them readable by all ranks. Collective over the data group.

        Parameters
        ----------
        exchange : bool
            Whether to send the ranges that each rank owns to the copies on all nodes. Pass False if the ranks of each
            node have written all of the node's copy.
        later : bool
            Whether to return while parameters are in flight. The next forward pass then waits for each block's
            parameters before it uses them; any other access waits for all parameters first.
        """
        with self.timeline.span("publication"):
            begun, self._begun = self._begun, None
            if begun is None:
                self.wait()
            if self._rounded:
                rest = Span(0 if begun is None else self.first_region.stop, self.layout.size)
                self._round((self.shard,) if exchange else self.group_shards, rest)
            if exchange and self._regions:
                begun = begun or self._all_gather_first()
            self.memory.barrier("all-gather")
            self._gathering[:] = [] if begun is None else [begun]
            if not later:
                self.wait()
        self.version += 1

    @property
    def first_region(self) -> Span:
        """The range of the flat parameter vector that is all-gathered first; all of it if nothing is sent."""
        return self._regions[0][1] if self._regions and not self.sharded else Span(0, self.layout.size)

    def begin_all_gather(self) -> None:
        """Begin to send the first region of the parameters while this rank still updates the others.

        A region is a range of parameters with an all-gather of its own; the next forward pass needs the first region
        first. A call of :meth:`all_gather` must follow, which sends the other regions.
        Collective over the data group, but a rank may omit this call: its :meth:`all_gather` then begins to send the
        region. At the time of the call the rank must have updated its parameters of the region, and no rank of its node
        may read them any more.
        """
        self.wait()
        if self._rounded:
            self._round((self.shard,), self.first_region)
        self._begun = self._all_gather_first()

    def _all_gather_first(self) -> ParameterAllGather:
        """Begin to all-gather the first region, the parameters that the next forward pass needs first.

        Collective over the data group.
        """
        regions = [
            [self.stored_span(s, n, s.spans[n].intersect(r)) for s in self.kept_shards] for n, r in self._regions
        ]
        window = None if self.sharded else self.memory
        return ParameterAllGather(self._copy_group, self._values, regions, window, halves=self._rounded)

    def _round(self, shards: Sequence[Shard], inside: Span) -> None:
        """Round the parameters of ``shards`` in the range ``inside``, which this rank has written. Not collective."""
        for shard in shards:
            for unit, span in enumerate(shard.spans):
                part = self.stored_span(shard, unit, span.intersect(inside))
                kernels.cpu.update.round_bfloat16(self._values[slice(*part)])

    def wait(self, block: str | None = None) -> None:
        """Wait until the updated parameters of ``block`` (None: of all blocks) have arrived from their owners.

        After each update, every rank of the data group must at some time wait for all blocks; see [Note: regions].
        """
        if self._gathering:
            with self.timeline.span("publication", block or ""):
                self._gathering[0].wait(None if block is None else self._needed[block])
            if self._gathering[0].ended:
                self._gathering.clear()

    def _finish_for_node(self) -> None:
        """Wait for the messages that other ranks of the node depend on. There are none if parameters are sharded."""
        if not self.sharded:
            self.wait()

    def begin_sending(self) -> None:
        """Begin to send all parameters that the last update has changed. Collective over the data group.

        See [Note: small messages first] in :class:`ParameterAllGather`.
        """
        for gathering in self._gathering:
            gathering.begin()

    @property
    def in_flight(self) -> bool:
        """Tell whether updated parameters are in flight. To wait for them is a collective call."""
        return bool(self._gathering)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other ranks for any purpose, with those of parameters that it will send."""
        return self.grid.bytes_sent + sum(gathering.bytes_left for gathering in self._gathering)

    def _last_region(self, block: str) -> int:
        """Return how many regions must have arrived before a rank reads ``block``: it reads none of the later ones.

        Regions are ranges of the parameters that arrive in order ([Note: regions]).
        """
        ends = [e.span.stop for e in self.layout.entries if e.block == block and e.spec.size]
        return sum(region.start < max(ends, default=0) for _, region in self._regions)

    def begin(self, model: Any) -> None:
        """Set all parameters to the initial values of ``model``; each rank computes the values of its own ranges.

        Collective over all ranks. Besides the store, a rank needs memory for at most one tensor at a time.
        """
        from mpizero.nn.arrays import start_values_of

        with all_ranks(self.grid.world, "start values"), needing("start values", STATE_ADVICE):
            fill = start_values_of(model)
            for entry, part, _ in self.shard.pieces():
                target = self.owned(entry.unit)[slice(*part.shift(-self.shard.spans[entry.unit].start))]
                fill(entry.spec, part.start - entry.offset, part.stop - entry.offset, target)
        self.all_gather()

    def gathered(self, unit: Unit) -> Array:
        """Return a new 1-D array of a unit's own parameters, without parameters of other units that the unit uses.

        Collective over the data group.
        """
        if not self.sharded:
            return self.values[unit.span.start : unit.span.stop].copy()
        with self.unshard(unit):
            values = self.unsharded(unit)[: unit.span.size].copy()
        self.memory.barrier("gathered")
        return values

    def fill(self, values: Array) -> None:
        """Set all parameters from ``values``, the flat vector of all parameters, which is equal on every rank.

        Collective over the data group.
        """
        self.memory.barrier("fill")  # other ranks may still read the old values
        for unit, span in enumerate(self.shard.spans):
            self.owned(unit)[:] = values[span.start : span.stop]
        self.all_gather()

    def owned_values(self) -> Array:
        """Return a copy of the parameters of this rank's shard, concatenated. Not collective."""
        return np.concatenate([self._values[:0], *(self.owned(unit.index) for unit in self.layout.units)])

    def fill_owned(self, values: Array) -> None:
        """Set all parameters; ``values`` are those of this rank's shard, concatenated.

        Collective over the data group.
        """
        self.memory.barrier("fill")  # other ranks may still read the old values
        for unit, offset in enumerate(self.shard.offsets):
            out = self.owned(unit)
            out[:] = values[offset : offset + out.size]
        self.all_gather()

    def copy_from(self, other: ParameterStore) -> None:
        """Copy all parameters of ``other``, a store of the same layout and grid. Collective over the data group."""
        for unit in self.layout.units:
            self.owned(unit.index)[:] = other.owned(unit.index)
        if self.integers is not None and other.integers is not None:
            self.integers.copy_from(other.integers)
        self.all_gather()

    def poll(self) -> None:
        """Let messages with parameters progress. Not collective."""
        if self._coming is not None:
            self._coming[1].test()
        if self._begun is not None:
            self._begun.test_first()
        if self._gathering:
            self._gathering[0].poll()

    def _begin(self, unit: Unit) -> None:
        """Begin to gather a unit into the slot (buffer) that is not in use. Collective over the data group."""
        if self._gathering:  # what other groups of nodes have updated
            self.wait(max(unit.blocks, key=lambda block: self._needed[block]))
        spans = [[span for shard in kept for span in self._buffer_spans(unit, shard)] for kept in self._sent_by]
        sent = [part for shard in self.kept_shards for part in self._sent(unit, shard)]
        target = self._buffers[self._next]
        self._coming = unit, begin_gather(self.grid.shard_group, sent, target, spans, halves=self._rounded)

    def _bring(self, unit: Unit) -> int:
        """Finish gathering a unit, and return the number of its slot (buffer). Collective over the data group."""
        if self._coming is not None and self._coming[0] is not unit:
            self._finish()  # another unit needs the slot of the prefetch, which must first end on all ranks
            self.memory.barrier("gather")
        if self._coming is None:
            self._begin(unit)
        self._finish()
        self.memory.barrier("gather")
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        return number

    def _finish(self) -> None:
        if self._coming is not None:
            self._coming[1].wait()
            self._coming = None

    def _buffer_spans(self, unit: Unit, shard: Shard) -> tuple[Span, ...]:
        """Return the ranges of a buffer with the gathered ``unit`` that the rank of ``shard`` owns.

        The buffer holds the unit's own parameters, and after them each parameter of another unit that a tied use refers
        to. The first range is of the unit's own parameters; one range for each parameter of another unit follows.
        """
        spans = [shard.spans[unit.index].shift(-unit.span.start)]
        offset = unit.span.size
        for entry in unit.aliases:
            part = entry.span.intersect(shard.spans[self._home(entry.spec.tied)])
            spans.append(part.shift(offset - entry.offset))
            offset += entry.spec.size
        return tuple(spans)

    def _sent(self, unit: Unit, shard: Shard) -> list[Array]:
        """Return what a gather of ``unit`` sends of a shard, in the order of :meth:`_buffer_spans`. Not collective."""
        parts = [self.stored_span(shard, unit.index, shard.spans[unit.index])]
        for entry in unit.aliases:
            home = self._home(entry.spec.tied)
            part = entry.span.intersect(shard.spans[home])
            parts.append(self.stored_span(shard, home, part) if part.size else part)
        values = self._local_values()
        return [values[part.start : part.stop] for part in parts]

    def _home(self, name: str | None) -> int:
        return self.layout.by_name[str(name)].unit

    def unit_views(self, unit: Unit, buffer: Array) -> dict[str, Any]:
        """Return nested views, by block, of a unit's parameters in ``buffer``. Not collective.

        ``buffer`` holds only the gathered unit if the store is sharded, else all parameters.
        """
        placed: dict[str, list[tuple[str, int, ParameterSpec]]] = {block: [] for block in unit.blocks}
        alias = unit.span.size
        for entry in unit.entries:
            start = entry.offset
            if self.sharded:
                start = entry.offset - unit.span.start
                if entry.spec.tied is not None:
                    start, alias = alias, alias + entry.spec.size
            placed[entry.block].append((entry.local_name, start, entry.spec))
        nested = {block: views(buffer, triples) for block, triples in placed.items()}
        if self.integers is not None:
            nested = {block: united(tree, self.integers.readonly_views(block)) for block, tree in nested.items()}
        if not self._sends:
            return nested
        return ParameterViews(nested, self.progress.poll, gathered=self.sharded)


#: The least number of elements in a region, unless its unit ends before: many small messages would take longer.
REGION = 1 << 16


class ParameterAllGather:
    """Send the parameters that one update has changed to the copies on all nodes, region by region.

    A region is a range of the flat parameter vector that has an all-gather of its own. Construction begins the
    all-gather of the region that the next forward pass uses first; it is collective over the data group.

    [Note: small messages first] The other all-gathers begin together, when the ranks have agreed on the next batch.
    Between two hosts MPI sends messages in the order in which they begin, so the small messages of this agreement wait
    only for the parameters that the first block needs anyway. A rank that computes nothing begins these all-gathers as
    well, before it waits for others. A rank begins them in its next call that uses parameters, so that call must be
    collective.

    Parameters
    ----------
    comm : Communicator
        The ranks that exchange parameters.
    values : 1-D array
        The node's copy of the parameters, in which this rank has updated its own ranges.
    regions : sequence of sequences of Span
        For each region, the range of ``values`` that each rank of ``comm`` has updated.
    memory : Memory, optional
        The allocator that has the shared window of ``values``. None if each rank reads only the ranges that it receives
        itself; a region is then complete when they have arrived.
    halves : bool
        Whether to send float32 values, which are bfloat16 numbers, in 16 bits.
    """

    def __init__(
        self,
        comm: Communicator,
        values: Array,
        regions: Sequence[Sequence[Span]],
        memory: Memory | None = None,
        *,
        halves: bool = False,
    ) -> None:
        self._comm, self._values, self._memory, self._halves = comm, values, memory, halves
        self._regions, self._gatherings = regions, list[Gathering]()
        self._barriers: list[Request | None] = []
        self._arrived = self._ready = 0
        self.begin(1)

    @property
    def ended(self) -> bool:
        """Tell whether this rank has waited for all regions of the parameters. Not collective."""
        return self._ready == len(self._regions)

    def begin(self, regions: int | None = None) -> None:
        """Begin the all-gathers of the parameters' first ``regions`` regions, or of all.

        Collective over the data group.
        """
        for spans in self._regions[len(self._gatherings) : regions]:
            own, targets = [self._values[slice(*spans[self._comm.rank])]], [(span,) for span in spans]
            self._gatherings.append(begin_gather(self._comm, own, self._values, targets, halves=self._halves))

    @property
    def bytes_left(self) -> int:
        """The number of bytes that this rank has yet to begin to send. Not collective."""
        own = sum(spans[self._comm.rank].size for spans in self._regions[len(self._gatherings) :])
        return own * (self._comm.size - 1) * (2 if self._halves else self._values.itemsize)

    def poll(self) -> bool:
        """Let messages progress, and tell whether all sends and receives that have begun have ended. Not collective."""
        while self._arrived < len(self._gatherings) and keep_testing(self._gatherings[self._arrived].test):
            self._note()
        return self._arrived == len(self._gatherings)

    def test_first(self) -> None:
        """Let the messages of the first region (parameters that the next forward pass needs first) progress.

        Not collective. Unlike :meth:`poll`, this begins no barrier of the node. It is for a rank that still updates
        parameters.
        """
        keep_testing(self._gatherings[0].test)

    def wait_requests(self) -> None:
        """Wait until all sends and receives that have begun have ended. Not collective."""
        for gathering in self._gatherings:
            gathering.wait()

    def wait(self, regions: int | None = None) -> None:
        """Wait until the first ``regions`` regions of the parameters are complete, or all of them if it is None.

        Collective over the data group: ranks may call this method at different times, but all must have waited for all
        regions before the next update. See [Note: small messages first].
        """
        self.begin()
        count = len(self._regions) if regions is None else regions
        while self._arrived < count:
            self._gatherings[self._arrived].wait()
            self._note()
        if self._ready < count:
            for barrier in self._barriers[self._ready : count]:
                if barrier is not None:
                    barrier.wait()
            self._ready = count
            if self._memory is not None:
                self._memory.synchronize()

    def _note(self) -> None:
        """Record that one more region of parameters has arrived on this rank, and begin the node's barrier for it."""
        self._arrived += 1
        self._barriers.append(None if self._memory is None else self._memory.ibarrier("all-gather"))


def poll_pending(gathering: list[ParameterAllGather], seconds: float = 10.0) -> None:
    """Wait, for at most ``seconds``, until the messages of an all-gather in flight have ended.

    Not collective. ``gathering`` is empty or has one all-gather, of a store whose memory is about to be freed. The
    function is called when a program ends, or drops a model, without closing the model.
    """
    limit = time.monotonic() + seconds
    with suppress(MpizeroError):  # others have ended or closed the communicator
        while gathering and not gathering[0].poll() and time.monotonic() < limit:
            time.sleep(1e-4)


def fits_shared_memory(
    grid: ProcessGrid,
    layout: FlatLayout,
    item: int,
    placement: Placement,
    config: Config,
    *,
    scratch: bool,
    in_place: bool = False,
) -> bool:
    """Tell whether parameters and gradients fit into the shared memory of every host; if not, print why on rank 0.

    Collective over all ranks; all get the same result.

    Parameters
    ----------
    grid : ProcessGrid
        The process groups of this rank.
    layout : FlatLayout
        The parameters of this rank's data group. Other data groups on the same host, with other parts of the model,
        are counted, too.
    item : int
        Bytes of one element of a parameter, or of a gradient.
    placement : Placement
        What the strategy shards.
    config : Config
        The settings. A row is memory for one flat gradient. If ``micro_batch`` is None, the batch may have any number
        of grains (slices): the check counts the rows that up to 16 of them can need. Otherwise it counts one row for
        each rank. If the first step needs more rows, and they do not fit, :mod:`mpizero.sharding.parameter_access`
        moves the model to private memory.
    scratch : bool
        Whether gradients of a grain that are immediately added to another row are written to scratch memory, and not
        to a row of their own.
    in_place : bool
        Whether the model is a function that writes the gradients of all units together.
    """
    if grid.local_size == 1 and grid.data.size == grid.world.size:
        return True
    needed, space = 0, None
    if grid.local_size > 1:
        space = grid.node.shared_space()
        if grid.node.rank == 0:  # one rank of each node counts its windows
            dynamic = schedules_dynamically(placement, config, grid, grid.model.size)
            rows = _rows(grid, config, scratch=scratch, dynamic=dynamic)
            needed = _window_bytes(grid, layout, item, placement, rows, in_place=in_place)
    reports = grid.world.allgather_object((os.uname().nodename, needed, space, available_memory()), "shared memory")
    needs, rooms = Counter[str](), dict[str, int]()
    for host, window, free, _ in reports:
        needs[host] += window
        if free is not None:
            rooms[host] = min(free, rooms.get(host, free))
    _warn_memory_limit(grid.world, needs, {host: memory for host, _, _, memory in reports if memory is not None})
    short = {host: needs[host] - free for host, free in rooms.items() if needs[host] > free}
    if short:
        host = max(short, key=lambda name: short[name])
        leftovers = dict(grid.world.allgather_object((os.uname().nodename, taken_by_leftovers()), "leftovers"))[host]
        warn_private(
            grid.world,
            f"the model needs {needs[host]} bytes of shared memory on {host}, where {SHARED_FOLDER} has {rooms[host]} "
            f"left{leftovers}; enlarge it (in a container --shm-size) or use fewer ranks per node",
        )
    return not short


def _warn_memory_limit(world: Communicator, needs: Mapping[str, int], left: Mapping[str, int]) -> None:
    """Print on rank 0 which host may need more shared memory than the job may take there. Not collective.

    ``needs`` and ``left`` are the bytes by host that the model may need, and that the job may take.
    """
    if world.rank == 0 and (host := next((host for host in left if needs[host] > left[host]), "")):
        notice(
            f"the model may need {needs[host]} bytes of shared memory on {host}, where this job may take {left[host]}: "
            "a job that takes more is killed; ask for more memory (sbatch --mem), or more nodes"
        )


def warn_private(world: Communicator, reason: str) -> None:
    """Print on rank 0 of ``world`` that every rank keeps its own copy of the model, and why. Not collective."""
    if world.rank == 0:
        notice(f"every rank keeps its own copy of the model: {reason}")


def _window_bytes(
    grid: ProcessGrid, layout: FlatLayout, item: int, placement: Placement, rows: int, *, in_place: bool
) -> int:
    """Return the bytes of all shared windows that the ranks of this data group allocate on this node.

    ``rows`` is the number of flat gradients that each rank stores; it is not used if gradients are summed in rounds.
    """

    def window(elements: int) -> int:
        return paged(elements * item)

    if gathers_units(placement, grid.shard_group.size):
        owned = sum(Shard(layout, rank, grid.data.size).size for rank in grid.held_ranks)
        parameters = window(owned) + UNIT_BUFFERS * window(layout.largest_gathered)
    else:
        parameters = window(layout.size)
    if placement.in_rounds:
        sizes = round_buffer_sizes(layout, grid.data.size, in_place=in_place)
        return parameters + grid.node.size * sum(window(size) for size in sizes)
    return parameters + rows * grid.node.size * window(layout.gradient_size)


def grid_rows_plan(grid: ProcessGrid, count: int, *, scratch: bool) -> RowsPlan:
    """Return the plan that says in which order, and by which ranks, the gradients of ``count`` grains are added."""
    return rows_plan(contiguous_parts(grid, count), grid.group_sizes, grid.leaves(count), scratch=scratch)


def _rows(grid: ProcessGrid, config: Config, *, scratch: bool, dynamic: bool) -> int:
    """Return how many rows (flat gradients) to count for each rank before the first batch is known.

    This is the largest number that a batch of up to 16 grains can need, or 1 if the user has set ``micro_batch``. If
    the first batch needs more memory than is left, the model is then moved out of shared memory.
    """
    if config.micro_batch is not None:
        return 1
    counts = [grid.context.size * count for count in range(1, DEFAULT_GRAINS + 1)]
    planned = [grid_rows_plan(grid, count, scratch=scratch).rows for count in counts]
    return max(planned + ([max_dynamic_rows(grid, count) for count in counts] if dynamic else []))
