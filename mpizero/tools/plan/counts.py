"""Describe the parts of a planned training that are equal for all ranks, and count the bytes of its collectives.

:func:`exchange_cost`, :func:`gather_cost` and :func:`direct_gather_cost` compute the bytes that peers (the ranks of an
inter-node group) send. :class:`GroupCall` computes the bytes that tensor and context groups send. The formulas count
the same bytes as the counters in ``comm/`` ([Note: bytes on the wire] in ``comm/communicator.py``), cut messages as
``comm/reduce.py`` does, and use messages or windows as ``comm/model_group.py`` does. :class:`RecordingGroup` records
the group calls of split layers on one rank.

:class:`StepBatches` assigns the micro-batches of a step to ranks, and counts the samples that ranks send to each other.
:class:`PlannedRanks` computes the groups of every rank, as :class:`mpizero.comm.ProcessGrid` does in a run.
:class:`PlannedTraining` holds all parts of one planned training that are equal for all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpizero.comm import model_group
from mpizero.comm.reduce import WIRE, Codec, exchange_step, gather_step, pieces_of
from mpizero.layout import Axes, Coordinates, Grains, Partition, Span
from mpizero.layout.batch import contiguous_owners, contiguous_parts, max_dynamic_rows, node_blocks, round_owners
from mpizero.layout.fields import Cut
from mpizero.layout.mesh import (
    GROUPS,
    WINDOW_GROUPS,
    NodeOrder,
    by_node,
    inside_nodes,
    node_major,
    shard_groups,
    uneven_counts,
)
from mpizero.layout.sum_tree import RoundPlan, RowsPlan, dynamic_parts, round_plan, rows_plan
from mpizero.nn.virtual_ranks import Arrived
from mpizero.sharding.batch import starts_of
from mpizero.sharding.config import Placement, gradient_codec, needs_norm
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.sharding.config import Config, ScratchUse


class Sent(NamedTuple):
    """Hold the bytes that one rank sends to others, and ``messages``, the number of calls that send any bytes."""

    bytes: int = 0
    messages: int = 0

    def __add__(self, other: object) -> Sent:
        """Return the sum of the bytes and the sum of the messages."""
        if not isinstance(other, Sent):
            return NotImplemented
        return Sent(self.bytes + other.bytes, self.messages + other.messages)

    def times(self, count: int) -> Sent:
        """Return ``count`` times the bytes and the messages. Not collective."""
        return Sent(self.bytes * count, self.messages * count)


def total_sent(parts: Iterable[Sent]) -> Sent:
    """Return the bytes and messages of all ``parts`` together. Not collective."""
    total = Sent()
    for part, count in Counter(parts).items():
        total += part.times(count)
    return total


def one_call(nbytes: int) -> Sent:
    """Return the traffic of one call that sends ``nbytes`` bytes, or of no call if ``nbytes`` is 0. Not collective."""
    return Sent(nbytes, 1) if nbytes else Sent()


class Buffers(NamedTuple):
    """Hold the bytes of the buffers of one segment (elements that are sent and received together) of an exchange.

    Attributes
    ----------
    send, receive : int
        Of the buffers for elements that are sent and received.
    packed_send, packed_receive : int
        Of the buffers for compressed messages that are sent and received; 0 without compression.
    """

    send: int
    receive: int
    packed_send: int = 0
    packed_receive: int = 0


class ExchangeCost(NamedTuple):
    """Hold what a rank sends in a reduction or an all-gather between peers, and the buffers of each segment.

    A segment is a number of elements that are sent and received together; large vectors are sent in several segments.
    """

    sent: Sent
    buffers: tuple[Buffers, ...] = ()


def exchange_cost(
    totals: Sequence[int],
    peer: int,
    counts: Sequence[int],
    itemsize: int,
    codec: Codec | None = None,
    elements: int | None = None,
) -> ExchangeCost:
    """Return the cost of one :class:`mpizero.comm.reduce.ExactExchange`.

    The exchange sends partial sums of gradients to the peers that own the elements. Not collective.

    Parameters
    ----------
    totals : sequence of int
        For each peer, the number of elements that it owns.
    peer : int
        The peer whose cost is computed.
    counts : sequence of int
        For each peer, the number of partial sums that its node sends.
    itemsize : int
        Bytes of an element.
    codec : Codec or None
        The codec that compresses the messages; None leaves them uncompressed.
    elements : int or None
        Number of elements in a bucket; None is the default.
    """
    if len(totals) == 1 or not max(totals):
        return ExchangeCost(Sent())
    arrivals, sums = sum(counts), counts[peer]
    step = exchange_step(counts, elements)
    others = [elements for rank, elements in enumerate(totals) if rank != peer]
    segments = -(-max(others) // step) if sums else 0

    def buffers(low: int) -> Buffers:
        widths = [max(0, min(step, elements - low)) for elements in totals]
        received = arrivals * widths[peer] * itemsize
        if codec is None:
            return Buffers(sums * sum(widths) * itemsize, received)
        to_others = [width for rank, width in enumerate(widths) if rank != peer]
        packed = sums * sum(map(codec.packed, to_others)), (arrivals - sums) * codec.packed(widths[peer])
        return Buffers(max(to_others) * itemsize if sums else 0, received, *packed)

    sent = sum(others) * itemsize if codec is None else sum(_packed(elements, step, codec) for elements in others)
    return ExchangeCost(Sent(sums * sent, segments), tuple(map(buffers, range(0, max(totals), step))))


def _packed(elements: int, step: int, codec: Codec) -> int:
    """Return the compressed bytes of ``elements`` elements that are sent in messages of at most ``step`` elements."""
    full, rest = divmod(elements, step)
    return full * codec.packed(step) + codec.packed(rest)


def gather_cost(
    totals: Sequence[int], peer: int, itemsize: int, codec: Codec | None = None, elements: int | None = None
) -> ExchangeCost:
    """Return the cost of an all-gather in which peer i sends ``totals[i]`` elements to every other peer.

    ``peer`` is the peer whose cost is computed; the other parameters are those of :func:`exchange_cost`. The all-gather
    is :func:`mpizero.comm.reduce.gather_spans`, or ``gather_packed`` with a codec. Not collective.
    """
    if len(totals) == 1 or not max(totals):
        return ExchangeCost(Sent())
    step = gather_step(len(totals), elements)
    widths = [min(step, elements) for elements in totals]
    segments, others = -(-totals[peer] // step), len(totals) - 1
    if codec is None:
        sent = Sent(totals[peer] * itemsize * others, segments)
        return ExchangeCost(sent, (Buffers(widths[peer] * itemsize, sum(widths) * itemsize),))
    sizes = [codec.packed(width) for width in widths]
    sent = Sent(_packed(totals[peer], step, codec) * others, segments)
    return ExchangeCost(sent, (Buffers(widths[peer] * itemsize, max(widths) * itemsize, sizes[peer], sum(sizes)),))


def direct_gather_cost(columns: Iterable[Sequence[int]], peer: int, itemsize: int) -> ExchangeCost:
    """Return the cost of :func:`mpizero.comm.reduce.begin_gather`, which needs no buffers. Not collective.

    The all-gather sends several spans (ranges of neighbouring elements) together: ``columns[j][i]`` is how many
    elements span j of peer i has. ``peer`` is the peer whose cost is computed.
    """
    pieces = [piece for sizes in columns for piece in pieces_of([Span(0, size) for size in sizes])]
    return ExchangeCost(total_sent(one_call(piece[peer].size * itemsize * (len(piece) - 1)) for piece in pieces))


class WindowCopies(NamedTuple):
    """Hold the copies that a rank makes in one call of its group, if the group's ranks share a window.

    Attributes
    ----------
    passes : tuple of (int, int)
        For each pass over memory, the bytes that it reads and the bytes that it writes.
    barriers : int
        Number of barriers of the group in the call.
    """

    passes: tuple[tuple[int, int], ...]
    barriers: int


class GroupCall(NamedTuple):
    """Describe one collective call of a method of :class:`mpizero.types.Group`.

    Attributes
    ----------
    kind : str
        "reduce", "gather", "scatter", "shift" or "exchange" (all to all).
    unit : int
        Number of elements of the array, or of those that an exchange sends to other ranks; for "gather" and "scatter"
        the number at one index of the axis along which the array is cut.
    sizes : tuple of int
        For "gather" and "scatter", the length of each rank's part along that axis; otherwise empty.
    outer : int
        For "gather" and "scatter", the product of the lengths of the axes before that axis; for "exchange" the largest
        number of elements that any rank of the group sends to others; otherwise 1.
    itemsize : int
        Bytes of an element.
    axis : str
        The axis along which the group's ranks differ: "tensor" or "context".
    """

    kind: str
    unit: int
    sizes: tuple[int, ...]
    outer: int
    itemsize: int
    axis: str

    def sent(self, rank: int, size: int, *, in_window: bool) -> Sent:
        """Return the bytes and messages that rank ``rank`` of a group of ``size`` ranks sends. Not collective.

        If the ranks share a window (``in_window``), only shifts send messages.
        """
        if self.kind == "shift":
            return one_call(self.unit * self.itemsize)
        if in_window:
            return Sent()
        if self.kind == "exchange":
            return one_call(self.unit * self.itemsize)
        if self.kind == "gather":
            return one_call(self.unit * self.sizes[rank] * self.itemsize * (size - 1))
        if self.kind == "scatter":
            return one_call(self.unit * (sum(self.sizes) - self.sizes[rank]) * self.itemsize)
        if size == 2:
            return one_call(self.unit * self.itemsize)
        part = Partition(self.unit, size).sizes()[rank]
        return one_call((self.unit - part) * self.itemsize) + one_call(part * self.itemsize * (size - 1))

    def copies(self, rank: int, size: int) -> WindowCopies:
        """Return the copies that rank ``rank`` makes in a window of ``size`` ranks, as in ``comm/model_group.py``.

        Not collective.
        """
        if self.kind == "shift":
            return WindowCopies((), 0)
        total = self.unit * (sum(self.sizes) if self.sizes else 1) * self.itemsize
        part = self.unit * self.sizes[rank] * self.itemsize if self.sizes else total
        if self.kind == "exchange":
            return WindowCopies(((total, total),), 1)
        if self.kind == "gather":
            return WindowCopies(((part, part), (total, total)), 1)
        if self.kind == "scatter":
            return WindowCopies(((total - part, total - part), (size * part, part)), 1)
        if self._sums_parts(size):
            part = Partition(self.unit, size).sizes()[rank] * self.itemsize
            return WindowCopies(((total, total), (size * part, part), (total, total)), 2)
        return WindowCopies(((total, total), (size * total, total)), 1)

    def _sums_parts(self, size: int) -> bool:
        """Tell whether each rank sums one part of an array in the window, before all ranks copy the whole sum."""
        return size >= model_group.SHARED_SUM_RANKS and self.unit * self.itemsize >= model_group.SHARED_SUM_BYTES

    def message_buffers(self, rank: int, size: int) -> dict[str, int]:
        """Return the bytes of the message buffers that rank ``rank`` of ``size`` keeps, by the buffer's name.

        Not collective.
        """
        if self.kind == "gather":
            return {"arrived": self.unit * sum(self.sizes) * self.itemsize} if self.outer > 1 else {}
        if self.kind == "scatter":
            packed = {"packed": self.unit * sum(self.sizes) * self.itemsize} if self.outer > 1 else {}
            return {**packed, "arrived": size * self.unit * self.sizes[rank] * self.itemsize}
        if self.kind in ("shift", "exchange"):
            return {}
        if size == 2:
            return {"arrived": 2 * self.unit * self.itemsize}
        part = Partition(self.unit, size).sizes()[rank] * self.itemsize
        return {"arrived": size * part, "total": part}

    def half(self, size: int) -> int:
        """Return the bytes that the call needs in one half of a window; calls use the two halves alternately."""
        if self.kind == "shift":
            return 0
        elements = self.outer if self.kind == "exchange" else self.unit * (sum(self.sizes) if self.sizes else 1)
        nbytes = elements * self.itemsize
        rows = {"gather": 1, "scatter": size}.get(self.kind, size)
        if self.kind == "reduce" and self._sums_parts(size):
            rows += 1
        return rows * -(-nbytes // model_group.LINE) * model_group.LINE


def window_bytes(calls: Iterable[GroupCall], size: int) -> int:
    """Return the bytes of the window that a group of ``size`` ranks needs for these calls. Not collective."""
    needed = max((call.half(size) for call in calls), default=0)
    if not needed:
        return 0
    return 2 * size * model_group.LINE + 2 * (-(-max(needed, model_group.FIRST_HALF) // 4096) * 4096)


class RecordingGroup:
    """Replace the group of split layers on one rank: record their calls, and return arrays of the right shapes.

    The class implements :class:`mpizero.types.Group`, but no method is collective, and the values of returned arrays
    have no meaning.

    Parameters
    ----------
    axis : str
        The axis along which the group's ranks differ: "tensor" or "context".
    rank, size : int
        The rank's number in the group, and the size of the group.
    calls : list of GroupCall
        The list to which calls are appended; tensor and context group of one rank share it.
    """

    def __init__(self, axis: str, rank: int, size: int, calls: list[GroupCall]) -> None:
        self.axis, self.rank, self.size, self.calls = axis, rank, size, calls

    def __repr__(self) -> str:
        """Return a text that names the size but not the rank, because layers are compared by their texts."""
        return f"{self.axis} group of {self.size}"

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Record the call, and return a copy of ``x``."""
        self.calls.append(GroupCall("reduce", x.size, (), 1, x.itemsize, self.axis))
        return np.array(x, order="C")

    all_max = all_reduce

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Record the call, and return an array of zeros in which this rank's part is ``x``."""
        call = self._along("gather", x, axis, sizes)
        shape = list(x.shape)
        shape[axis] = sum(call.sizes)
        gathered = np.zeros(shape, x.dtype)
        start = sum(call.sizes[: self.rank])
        np.moveaxis(gathered, axis, 0)[start : start + call.sizes[self.rank]] = np.moveaxis(x, axis, 0)
        return gathered

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Record the call, and return a copy of this rank's part of ``x``."""
        call = self._along("scatter", x, axis, sizes)
        start = sum(call.sizes[: self.rank])
        block = np.moveaxis(x, axis, 0)[start : start + call.sizes[self.rank]]
        return np.array(np.moveaxis(block, 0, axis), order="C")

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> Arrived:
        """Record the call, and return a finished request with copies of ``arrays``."""
        if by % self.size:
            self.calls += [GroupCall("shift", x.size, (), 1, x.itemsize, self.axis) for x in arrays]
        return Arrived(tuple(np.array(x, order="C") for x in arrays))

    def all_to_all(self, parts: Sequence[Array], counts: Array, tag: str = "") -> list[Array]:
        """Record the call, and return zeros in place of other ranks' parts."""
        own = parts[self.rank]
        if self.size == 1:
            return [own]
        sent = counts.sum(axis=1) - np.diag(counts)
        call = GroupCall("exchange", int(sent[self.rank]), (), int(sent.max()), own.itemsize, self.axis)
        self.calls.append(call)
        return [own if rank == self.rank else np.zeros(row[self.rank], own.dtype) for rank, row in enumerate(counts)]

    def _along(self, kind: str, x: Array, axis: int, sizes: Sequence[int]) -> GroupCall:
        axis %= x.ndim
        outer = prod(x.shape[:axis])
        unit = outer * prod(x.shape[axis + 1 :])
        call = GroupCall(kind, unit, tuple(map(int, sizes)), outer, x.itemsize, self.axis)
        self.calls.append(call)
        return call


class FieldExtents:
    """Store the extents (lengths along each axis of space) of each block's fields, to return them later in this order.

    A rank's part of a field does not say how large the field is. So blocks run first on whole fields, whose extents
    are stored, and then on a rank's parts, where the layers get the stored extents.
    """

    def __init__(self) -> None:
        self._of: dict[str | None, list[tuple[int, ...]]] = {}
        self._block: str | None = None
        self._told = 0

    def begin(self, block: str | None) -> None:
        """Begin to store or return the extents of the fields of a block, or of the loss (None). Not collective."""
        self._block, self._told = block, 0

    def note(self, extents: tuple[int, ...]) -> None:
        """Store the extents of the next field of the block. Not collective."""
        self._of.setdefault(self._block, []).append(extents)

    def tell(self) -> tuple[int, ...]:
        """Return the extents of the next field of the block, which may run several times. Not collective."""
        noted, self._told = self._of[self._block], self._told + 1
        return noted[(self._told - 1) % len(noted)]


class RecordingDomain(RecordingGroup):
    """Replace the group of a domain on one rank, as :class:`RecordingGroup`; ``extents`` has the sizes of fields.

    If the domain has one rank, the extents (lengths along the axes of space) of whole fields are stored in ``extents``;
    if it has several ranks, extents are read from there.
    """

    def __init__(self, cut: Cut, rank: int, calls: list[GroupCall], extents: FieldExtents) -> None:
        super().__init__("context", rank, cut.size, calls)
        self.cut, self.extents = cut, extents

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Record the call; return zeros in which this rank's part is ``x``, or the sizes of all parts of a field.

        Sizes (lengths along the axes of space) are returned if ``tag`` is "extents". Layers send the size of their part
        in the first step only, so those calls are not recorded. Functions of a domain send it in every call, with a
        checksum of the call in a further column of ``x``, so those calls are recorded.
        """
        if tag != "extents":
            return super().all_gather(x, axis, sizes, tag)
        axes = len(self.cut.parts)
        if x.shape[1] > axes:
            super().all_gather(x, axis, sizes, tag)
        if self.size == 1:
            self.extents.note(tuple(x[0, :axes].tolist()))
            return x
        extents, rows = self.extents.tell(), np.repeat(x, self.size, axis=0)
        rows[:, :axes] = [[part.stop - part.start for part in self.cut.box(extents, rank)] for rank in range(self.size)]
        return rows


@dataclass(frozen=True)
class StepBatches:
    """Assign the grains of a global batch to the ranks of a data group.

    Attributes
    ----------
    grains : Grains
        The grains of the global batch.
    accumulate : int
        Number of micro-batches in a full grain.
    in_rounds : bool
        Whether grains are computed in rounds.
    scratch : "grains", "micro-batches" or None
        Which gradients are written to scratch memory (see :func:`~mpizero.sharding.config.scratch_use`).
    dynamic : bool
        Whether the ranks of a node take its grains dynamically. Then work and sums are planned as if grains were
        assigned before the step, but memory is planned for every possible assignment.
    """

    grains: Grains
    accumulate: int
    in_rounds: bool
    scratch: ScratchUse
    dynamic: bool = False
    _rows_plans: dict[tuple[int, ...], RowsPlan] = field(default_factory=dict, init=False, compare=False)
    _round_plans: dict[tuple[int, ...], RoundPlan] = field(default_factory=dict, init=False, compare=False)

    def rows(self, grid: PlannedGrid) -> int:
        """Return how many rows (gradient vectors) a rank allocates if it does not compute in rounds. Not collective.

        A row is an array that holds a gradient or a partial sum.
        """
        rows = self.rows_plan(grid).rows
        return max(rows, max_dynamic_rows(grid, self.grains.count)) if self.dynamic else rows

    def most_grains(self, grid: PlannedGrid) -> int:
        """Return the largest number of grains, or of a context group's parts of grains, that a rank may compute."""
        if self.dynamic:
            return max(map(len, node_blocks(grid, self.grains.count)))
        return -(-self.grains.count * grid.context.size // grid.data.size)

    def dynamic_bytes(self, grid: PlannedGrid, sample_bytes: Sequence[int]) -> int:
        """Return the bytes that a node needs for the samples of grains that its ranks take dynamically.

        Not collective. The result is 0 if grains are not taken dynamically. ``sample_bytes`` holds the bytes of one
        sample in each array.
        """
        if not self.dynamic:
            return 0
        block = node_blocks(grid, self.grains.count)[grid.nodes.index(grid.node_ranks)]
        start, stop = (min(grain * self.grains.size, self.grains.samples) for grain in (block.start, block.stop))
        parts = len(dynamic_parts(block, grid.node.size))
        return starts_of(parts, [(stop - start) * size for size in sample_bytes])[-1]

    def rows_plan(self, grid: PlannedGrid) -> RowsPlan:
        """Return the plan of one sum of all gradients of a step, for strategies without rounds. Not collective.

        All ranks whose groups have the sizes in ``grid`` have the same plan. Each context rank's part of a grain counts
        as a grain.
        """
        count, key = self.grains.count * grid.context.size, _kind(grid)
        if key not in self._rows_plans:
            parts = contiguous_parts(grid, count)
            self._rows_plans[key] = rows_plan(
                parts, grid.group_sizes, grid.leaves(count), scratch=self.scratch == "grains"
            )
        return self._rows_plans[key]

    def round_plan(self, grid: PlannedGrid) -> RoundPlan:
        """Return the plan of sums in rounds, in each of which a rank computes at most one grain. Not collective.

        All ranks whose groups have the sizes in ``grid`` have the same plan. Each context rank's part of a grain counts
        as a grain.
        """
        if (key := _kind(grid)) not in self._round_plans:
            self._round_plans[key] = round_plan(grid.leaves(self.grains.count * grid.context.size), grid.group_sizes)
        return self._round_plans[key]

    def jobs(self, grid: PlannedGrid) -> tuple[int, ...]:
        """Return the number of samples in each micro-batch of the rank of ``grid``, in the order of computation.

        The number is 0 for a micro-batch that only other ranks have; this rank then only joins the collectives. Not
        collective.
        """
        contexts, count = grid.context.size, self.grains.count
        result: list[int] = []
        if self.in_rounds:
            workers, parts = grid.data.size, count * contexts
            for first in range(0, parts, workers):
                number = first + grid.order_index
                sizes = self.micro_batches(number // contexts) if number < parts else ()
                result += [*sizes, *[0] * (self.accumulate - len(sizes))]
            return tuple(result)
        for number in contiguous_parts(grid, count * contexts)[grid.order_index]:
            result += self.micro_batches(number // contexts)
        return tuple(result)

    def micro_batches(self, grain: int) -> tuple[int, ...]:
        """Return the number of samples in each micro-batch of a grain. Not collective."""
        return tuple(part.stop - part.start for part in self.grains.micro_batches(grain, self.accumulate))

    def owners(self, grid: PlannedGrid) -> Sequence[int]:
        """Return, for each grain, the rank in the group ``grid.batch`` that computes the grain. Not collective."""
        return (round_owners if self.in_rounds else contiguous_owners)(grid, self.grains.count)

    def samples_moved(self, grid: PlannedGrid) -> int:
        """Return how many samples the rank of ``grid`` sends to the ranks that compute them.

        Not collective. Before the samples are sent, each rank is assumed to have a contiguous range of whole grains;
        the ranges are as equal as possible.
        """
        ranks, rank = grid.batch.size, grid.batch.rank
        local_samples = self.grains.samples_of(rank, ranks)
        owners, moved = self.owners(grid), 0
        for grain in range(local_samples.start // self.grains.size, self.grains.count):
            span = self.grains.span(grain)
            if span.start >= local_samples.stop:
                break
            if owners[grain] != rank:
                moved += min(span.stop, local_samples.stop) - max(span.start, local_samples.start)
        return moved

    @cached_property
    def largest(self) -> int:
        """Number of samples in the largest micro-batch."""
        return max(self.micro_batches(0), default=0) if self.grains.count else 0


def _kind(grid: PlannedGrid) -> tuple[int, ...]:
    """Return a key that is equal for groups of ranks with the same grains and the same order of gradient sums."""
    return grid.data.size, grid.batch.size, grid.context.size, *grid.group_sizes


class PlannedGroup(NamedTuple):
    """Describe a group of ranks, as seen by one of its ranks.

    Attributes
    ----------
    rank, size : int
        The rank's number in the group, and the size of the group.
    shares_memory : bool
        Whether the members may share memory in a window.
    """

    rank: int
    size: int
    shares_memory: bool = False


@dataclass(frozen=True)
class PlannedGrid(NodeOrder):
    """Hold the groups of one rank of a planned job, under the names that :class:`mpizero.comm.ProcessGrid` uses.

    ``coordinates`` holds the rank's coordinates on ``axes``, the axes of parallelism. ``nodes`` and ``position`` are
    described in :class:`NodeOrder` (layout/mesh.py).
    """

    axes: Axes
    coordinates: Coordinates
    world: PlannedGroup
    data: PlannedGroup
    batch: PlannedGroup
    pipeline: PlannedGroup
    tensor: PlannedGroup
    context: PlannedGroup
    model: PlannedGroup
    node: PlannedGroup
    inter_node: PlannedGroup
    shard_group: PlannedGroup
    replicas: PlannedGroup
    nodes: tuple[tuple[int, ...], ...]
    position: tuple[int, ...]
    shard_groups: tuple[tuple[int, ...], ...]

    @cached_property
    def group_calls(self) -> list[GroupCall]:
        """The collective calls that ``tensor_group`` and ``context_group`` have recorded, in order."""
        return []

    @cached_property
    def tensor_group(self) -> RecordingGroup:
        """An object that takes the place of the tensor group and records the calls of split layers."""
        return RecordingGroup("tensor", self.tensor.rank, self.tensor.size, self.group_calls)

    @cached_property
    def context_group(self) -> RecordingGroup:
        """An object that takes the place of the context group and records the calls of context-parallel layers."""
        return RecordingGroup("context", self.context.rank, self.context.size, self.group_calls)


@dataclass(frozen=True)
class PlannedRanks:
    """Hold the nodes of all ranks of a planned job, and compute each rank's groups.

    Parameters
    ----------
    axes : Axes
        Sizes and order of the axes of parallelism.
    hosts : tuple of int
        For every rank, the first rank of its node.
    share : bool
        Whether ranks of a node share memory.
    shard_nodes : int or None
        Number of nodes over which parameters are sharded; None is all nodes.
    """

    axes: Axes
    hosts: tuple[int, ...]
    share: bool = True
    shard_nodes: int | None = None

    @classmethod
    def build(
        cls,
        axes: Axes,
        *,
        ranks_per_node: int | None = None,
        simulated: int | None = None,
        share: bool = True,
        shard_nodes: int | None = None,
    ) -> PlannedRanks:
        """Return the ranks of a job in which consecutive ranks are on the same node. Not collective.

        Parameters
        ----------
        axes : Axes
            Sizes and order of the axes of parallelism.
        ranks_per_node : int or None
            Number of ranks of a real node; None puts all ranks on one node.
        simulated : int or None
            Number of ranks of a simulated node (``ShardingConfig.ranks_per_node``), into which each real node is cut.
        share : bool
            Whether ranks of a node share memory.
        shard_nodes : int or None
            Number of nodes over which parameters are sharded; None is all nodes.
        """
        real = ranks_per_node or axes.size
        small = min(simulated or real, real)
        hosts = tuple(rank - rank % real % small for rank in range(axes.size))
        ranks = cls(axes, hosts, share, shard_nodes)
        if not share or axes.context == 1:
            return ranks
        # The context ranks that share a grain must follow one another in the order in which a round assigns grains.
        # With shared memory that order goes node by node, and may separate them: such a run has no shared memory.
        grid = ranks.grid(0)
        return ranks if grid.order == tuple(range(grid.data.size)) else replace(ranks, share=False)

    @cached_property
    def uneven(self) -> bool:
        """Tell whether memory cannot be shared because a data group has unequal numbers of ranks on its nodes."""
        return self.share and bool(uneven_counts(self.axes, self.hosts))

    @cached_property
    def _shard_groups(self) -> dict[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        return shard_groups(self.axes, self.hosts, self.shard_nodes, share=self.share and not self.uneven)

    def inside_nodes(self, group: str) -> bool:
        """Tell whether each group of the kind ``group`` ("tensor", for example) is inside one node. Not collective."""
        return inside_nodes(self.axes, group, self.hosts)

    def grid(self, rank: int) -> PlannedGrid:
        """Return the process groups of one rank of the planned job. Not collective."""
        coordinates = self.axes.coordinates(rank)
        members = {name: self.axes.group(rank, differing) for name, differing in GROUPS.items()}
        data = PlannedGroup(members["data"].index(rank), len(members["data"]))
        nodes = by_node([self.hosts[other] for other in members["data"]])
        if not self.share or self.uneven:
            nodes = tuple((index,) for index in range(data.size))
        node = next(index for index, ranks in enumerate(nodes) if data.rank in ranks)
        sharing = self._shard_groups[members["data"]]
        number, place = next((n, nodes.index(node)) for n, nodes in enumerate(sharing) if node in nodes)
        groups = {name: self._group(name, rank, ranks) for name, ranks in members.items() if name != "data"}
        return PlannedGrid(
            axes=self.axes,
            coordinates=coordinates,
            world=PlannedGroup(rank, self.axes.size),
            data=data,
            node=PlannedGroup(nodes[node].index(data.rank), len(nodes[node]), True),
            inter_node=PlannedGroup(node, len(nodes)),
            shard_group=PlannedGroup(place, len(sharing[0])),
            replicas=PlannedGroup(number, len(sharing)),
            nodes=nodes,
            position=node_major(nodes),
            shard_groups=sharing,
            **groups,
        )

    def _group(self, name: str, rank: int, members: tuple[int, ...]) -> PlannedGroup:
        shares_memory = name in WINDOW_GROUPS and self.share and self.inside_nodes(name)
        return PlannedGroup(members.index(rank), len(members), shares_memory)


@dataclass(frozen=True)
class PlannedTraining:
    """Hold the parts of a planned training that do not depend on the rank.

    Attributes
    ----------
    row : Placement
        Which of parameters, gradients and optimizer state the strategy shards.
    config : Config
        The settings; the communicator is not used.
    optimizer : optimizer
        The optimizer, as :func:`mpizero.optim.elementwise.adapt` returns it.
    step : StepBatches
        The grains of a global batch, and how they are assigned to ranks.
    itemsize : int
        Bytes of one element of a parameter.
    sample_bytes : tuple of int
        Bytes of each array of one sample's input and target.
    loss_scale : bool
        Whether the training has a loss scale.
    by_block : bool
        Whether the model is made of blocks; a functional model computes all gradients together.
    in_place : bool
        Whether the model is a functional model that writes its gradients in place.
    slab_bytes : int
        Bytes by which a rank of a domain describes its parts of fields to each other rank; 0 without a domain.
    """

    row: Placement
    config: Config
    optimizer: Any
    step: StepBatches
    itemsize: int
    sample_bytes: tuple[int, ...]
    loss_scale: bool = False
    by_block: bool = True
    in_place: bool = False
    slab_bytes: int = 0

    @property
    def codec(self) -> Codec | None:
        """The codec that compresses gradient messages between peers; None without compression."""
        return gradient_codec(self.config.gradient_compression, self.config.wire, self.itemsize)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that one element of a parameter takes in a message."""
        return WIRE.packed(1) if self.config.wire_parameters else self.itemsize

    @property
    def bucket(self) -> int | None:
        """Number of elements in a bucket of gradients; None is the default size.

        The default is also assumed if the size is tuned in a run.
        """
        return self.config.bucket_elements(self.itemsize)

    @property
    def needs_norm(self) -> bool:
        """Tell whether the norm of the summed gradient must be known before the update."""
        return needs_norm(self.config, self.codec, loss_scale=self.loss_scale)
