"""Keep the gradients of a step in buffers, and sum them over the ranks of the data group.

The module has three parts, in this order. :class:`ReduceScatterBuffer` keeps the gradients of one unit, and sums them
into the shards of the ranks as soon as the unit's backward pass ends (ZeRO-2 and 3, and ZeRO-1 with a context group).
:class:`AllReduceBuffer` keeps whole gradients, for DDP and otherwise ZeRO-1, and with any strategy for gradients that
are summed later (``auto_sync_gradients=False``). It sums gradients at the end of a step or, by
:class:`OverlappedReduction`, during the step's backward pass. :class:`GradientExchange` sends the partial sums of both
buffers between peers, compressed or not, and keeps the residuals of compression (error feedback). Both buffers sum by
the same tree, so the bits are the same.

The engine runs the micro-batches (:class:`MicroBatch`) that a buffer returns, and that write their gradients to it.
Then the engine asks the buffer for the sum of these gradients.

[Note: words] The gradient vector is the gradients of all units, one unit after the other. A *row* is memory for one
gradient vector. A :class:`ReduceScatterBuffer` has no rows: its *slots* hold the gradients of one unit, and its *stack*
has *levels*, each as long as this rank's shard of the gradient vector.

[Note: buckets] A bucket is the part of the gradients that peers exchange together: one segment of the exchange in
``comm/reduce.py``, of which a few are in flight at a time (``SegmentQueue``). The bucket size decides into how many
messages an exchange is cut. It changes neither the number of bytes sent nor the results. All ranks use the same size in
the same step, so they cut an exchange into equally many segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import lru_cache, partial, reduce
from itertools import accumulate, pairwise
from operator import add
from typing import Any, NamedTuple, Self

import numpy as np

from mpizero import kernels
from mpizero._util.pytree import map_leaves
from mpizero.comm.agreement import all_ranks
from mpizero.comm.reduce import (
    Codec,
    ExactExchange,
    Gathering,
    RowRange,
    RowsToSum,
    Segment,
    SegmentQueue,
    begin_gather,
    bucket_size,
    exchange_step,
    gather_packed,
    gather_spans,
    tree_sum,
)
from mpizero.errors import StateError
from mpizero.layout import Partition, Span
from mpizero.layout.batch import contiguous_owners, max_dynamic_rows, round_owners
from mpizero.layout.flat import FlatLayout, Unit, united, views
from mpizero.layout.sum_tree import Folding, FoldStep, Round, RowsPlan, round_plan, rows_plan
from mpizero.sharding.batch import Divisors, DynamicScheduler, GlobalBatch, Grain
from mpizero.sharding.config import Placement, ScratchUse, gradient_codec, overlaps_reduction, round_buffer_sizes
from mpizero.sharding.integer_arrays import IntegerState
from mpizero.sharding.integrity import GradientDict
from mpizero.sharding.params import Allocator, ParameterStore, Shard, grid_rows_plan, on_all_ranks, paged
from mpizero.types import Array


class MicroBatch:
    """Represent a micro-batch of a step: where its gradients are written, and what happens when they are complete.

    An object of this base class is a micro-batch that only other ranks compute, and whose collectives this rank joins.
    Other micro-batches are objects of :class:`ReduceScatterMicroBatch` or :class:`AllReduceMicroBatch`, by the
    strategy.

    Attributes
    ----------
    grain : Grain or None
        The grain that contains the micro-batch; None if this rank does not compute the micro-batch.
    number : int
        Index of the micro-batch in its grain, from 0.
    in_scratch : bool
        Whether the views of all blocks are views of the same memory. Then only one block may be written at a time:
        :meth:`accumulate` is called for a block before the next one is written.
    accumulates_blocks : bool
        Whether :meth:`accumulate` does anything; it should then be called as soon as a block's gradients are complete.
    """

    in_scratch = accumulates_blocks = False

    def __init__(self, grain: Grain | None = None, number: int = 0) -> None:
        self.grain, self.number = grain, number

    @property
    def samples(self) -> tuple[Any, Any, int]:
        """The micro-batch: inputs, targets, and the index of the first sample in the global batch."""
        assert self.grain is not None
        return self.grain.micro_batches[self.number]

    @property
    def sample_range(self) -> tuple[int, int]:
        """The index of the micro-batch's first sample in the global batch, and its number of samples."""
        assert self.grain is not None
        return self.grain.sample_range(self.number)

    def with_samples(self, micro_batches: tuple[tuple[Any, Any, int], ...]) -> Self:
        """Return a copy whose grain has the samples ``micro_batches``, which are on a device. Not collective."""
        assert self.grain is not None
        moved = copy(self)
        moved.grain = self.grain._replace(micro_batches=micro_batches)
        return moved

    def gradients(self, unit: Unit) -> Any:
        """Return the views that layers write a unit's gradients to. Not collective."""
        return {}

    def flat_gradients(self, unit: Unit, blocks: Sequence[str]) -> Sequence[Array]:
        """Return the gradients of some blocks of a unit as 1-D arrays. Not collective."""
        return ()

    def accumulate(self, unit: Unit, block: str) -> None:
        """Add a block's gradients, which are complete, to the sum over this rank's micro-batches.

        Called once for each block, before :meth:`reduce` of its unit. Collective over the data group if gradients are
        summed over ranks during the backward pass.
        """

    def reduce(self, unit: Unit) -> None:
        """Reduce a unit's gradients, which are complete on this rank, over the ranks.

        Collective over the data group if gradients are sharded, or are summed during the backward pass; otherwise
        gradients are reduced after the last micro-batch.
        """


class ReduceScatterMicroBatch(MicroBatch):
    """Represent a micro-batch whose gradients are reduce-scattered unit by unit, with the other ranks' gradients.

    ``grain`` is the grain that this rank computes in ``this_round``, or None. The rank joins the reductions of the
    round even if its grain has fewer micro-batches than others.
    """

    def __init__(self, buffer: ReduceScatterBuffer, grain: Grain | None, number: int, this_round: Round) -> None:
        present = grain is not None and number < len(grain.micro_batches)
        super().__init__(grain if present else None, number)
        self._buffer, self._round, self._in_grain = buffer, this_round, grain is not None

    def gradients(self, unit: Unit) -> Any:
        """Return views of this rank's part of the slot (buffer for one unit's gradients)."""
        return self._buffer.views_of(unit)

    def flat_gradients(self, unit: Unit, blocks: Sequence[str]) -> Sequence[Array]:
        """Return the arrays of this rank's slot (buffer for a unit's gradients) that hold some blocks' gradients."""
        gradients = self._buffer.gradients_of(unit)
        if len(blocks) == len(unit.blocks):
            return (gradients,)
        return [gradients[span.start : span.stop] for block in blocks for span in unit.gradient_ranges[block]]

    def reduce(self, unit: Unit) -> None:
        """Add the unit's gradients to the sum over the grain; after the last micro-batch, reduce-scatter this sum."""
        buffer = self._buffer
        base, gradients = buffer.layout.gradient_bases[unit.index], buffer.gradients_of(unit)
        if self.grain is not None:
            buffer.grain_sum.add(gradients, base, self.number)
        if self.number == buffer.accumulate - 1:
            if self._in_grain:
                buffer.grain_sum.finish(gradients, base)
                buffer.exchange.round_gradients(gradients, base)
            with buffer.timeline.span("reduction", unit):
                buffer.reduce_scatter(unit, self._round)


class AllReduceMicroBatch(MicroBatch):
    """Represent a micro-batch whose gradients are written to memory of this rank, and added to its partial sums.

    ``step`` (:class:`FoldStep`) says to which partial sums the gradients of the micro-batch's grain are added.
    ``row`` is the index of the row (memory for one gradient vector) that the gradients are written to; None is the
    scratch array. ``overlapped``, if not None, sums the rows over ranks while this micro-batch, the last one of the
    training step, completes them.
    """

    accumulates_blocks = True

    def __init__(self, buffer: AllReduceBuffer, grain: Grain, number: int, step: FoldStep, row: int | None) -> None:
        super().__init__(grain, number)
        self._buffer, self._step, self._row, self.in_scratch = buffer, step, row, row is None
        self.overlapped: OverlappedReduction | None = None

    def gradients(self, unit: Unit) -> Any:
        """Return views of the row (memory for one gradient vector) to write to, or of the scratch array."""
        return self._buffer.views_of(self._row, unit)

    def flat_gradients(self, unit: Unit, blocks: Sequence[str]) -> Sequence[Array]:
        """Return the arrays of the row (memory for one gradient) or scratch array that hold some blocks' gradients."""
        if len(blocks) == 1:
            return self._buffer.parts_of(self._row, unit, blocks[0])
        return [part for block in blocks for part in self._buffer.parts_of(self._row, unit, block)]

    def accumulate(self, unit: Unit, block: str) -> None:
        """Add the block's gradients to the sum over the grain's micro-batches.

        After the grain's last micro-batch, that sum is added to partial sums over earlier grains.
        """
        assert self.grain is not None
        last = self.number == len(self.grain.micro_batches) - 1
        self._buffer.accumulate_block(self._step, self.number, last, unit, block)
        if self.overlapped is not None:
            self.overlapped.ended((block,))

    def reduce(self, unit: Unit) -> None:
        """Begin to sum over ranks the gradients that are complete, if that is done during this backward pass."""
        if self.overlapped is not None:
            self.overlapped.ended(unit.blocks)


class Operands(NamedTuple):
    """Hold the arguments of a fused update, one that also sums the gradients.

    Attributes
    ----------
    rows : 2-D array
        The partial sums of gradients. An element along the first axis is a row, as long as the gradient vector, or a
        level of the stack, as long as this rank's shard ([Note: words]). ``UpdatePiece.gradient`` is an index along the
        second axis.
    programs : (array, array)
        Tree programs, which say in which order which rows are added: one for elements whose sums are not rounded, and
        one for elements whose sums are rounded.
    out : 1-D array
        The row or level (an element of ``rows``) to which an optimizer that needs norms (LAMB) writes update
        directions.
    """

    rows: Array
    programs: tuple[Array, Array]
    out: Array


class GradientViews:
    """Make named views of gradient buffers, and of the arrays that new values of integer arrays are written to.

    A frozen parameter's gradient is a view of memory that is never read.
    """

    def __init__(self, layout: FlatLayout, memory: Allocator, dtype: Any, integers: IntegerState) -> None:
        self.integers = integers
        self.unread = memory.private("buffers", layout.largest_frozen, dtype)

    def unit(self, unit: Unit, buffer: Array, *, by_block: bool = False) -> dict[str, Any]:
        """Return nested views, by block and parameter, of the gradients of ``unit``, which ``buffer`` holds.

        With ``by_block``, the buffer holds the gradients of one block at a time, in the order of :func:`block_parts`.
        """
        result = {}
        for block in unit.blocks:
            entries = [entry for entry in unit.entries if entry.block == block]
            trained = sorted((e for e in entries if e.gradient >= 0), key=lambda entry: entry.gradient)
            starts = accumulate([0, *(e.spec.size for e in trained)]) if by_block else (e.gradient for e in trained)
            tree = views(buffer, [(e.local_name, start, e.spec) for e, start in zip(trained, starts, strict=False)])
            frozen = views(self.unread, [(e.local_name, 0, e.spec) for e in entries if e.gradient < 0])
            result[block] = GradientDict(united(united(tree, frozen), self.integers.targets(block)))
        return result


def block_parts(unit: Unit, block: str, buffer: Array) -> list[Array]:
    """Return, for each gradient range of ``block``, a view of ``buffer``, which holds this block's gradients only.

    The views follow one another in the order of ``unit.gradient_ranges``. Not collective.
    """
    sizes = [span.size for span in unit.gradient_ranges[block]]
    return [buffer[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def apart(value: Any, parts: Sequence[Array]) -> Any:
    """Return ``value``, an array or a tree of arrays, with copies of the arrays that share memory with ``parts``.

    Not collective.
    """
    if isinstance(value, np.ndarray):
        return value.copy() if any(np.may_share_memory(value, part) for part in parts) else value
    if value is None:
        return None
    return map_leaves(lambda leaf: apart(leaf, parts) if isinstance(leaf, np.ndarray) else leaf, value)


def largest_block(layout: FlatLayout) -> int:
    """Return the number of gradient elements of the block that has the most of them. Not collective."""
    blocks = [ranges for unit in layout.units for ranges in unit.gradient_ranges.values()]
    return max((sum(span.size for span in ranges) for ranges in blocks), default=0)


class MicroBatchSum:
    """Add the gradients of a grain's micro-batches, in their order, in a buffer of ``size`` elements.

    The buffer is allocated when it is first needed. With ``accumulate`` 1, one micro-batch in a grain, it is never
    needed.
    """

    def __init__(self, memory: Allocator, size: int, dtype: Any, accumulate: int) -> None:
        self.memory, self.size, self.dtype = memory, size if accumulate > 1 else 0, dtype
        self.partial: Array = np.empty(0, dtype)

    def add(self, target: Array, base: int, number: int) -> None:
        """Add ``target``, a gradient of micro-batch ``number``, to the buffer's elements from ``base`` on.

        Micro-batch 0 overwrites these elements.
        """
        if not self.size:
            return
        if not self.partial.size:
            self.partial = self.memory.private("gradients", self.size, self.dtype)
        partial = self.partial[base : base + target.size]
        if number == 0:
            partial[:] = target
        else:
            partial += target

    def finish(self, target: Array, base: int) -> None:
        """Copy the sum, in the buffer's elements from ``base`` on, to ``target``."""
        if self.partial.size:
            target[:] = self.partial[base : base + target.size]


#: The most sizes of batches whose plans a buffer keeps; a plan of a thousand grains takes a MiB.
CACHED_PLANS = 16
#: The most lists of sums of a unit and round that a buffer keeps.
_MOST_SUMS = 1 << 14


class ReduceScatterBuffer:
    """Keep the gradients of the current unit in a slot, and partial sums of this rank's gradient shard in a stack.

    A unit is a group of parameters whose gradients are reduced together. A slot is a shared window with one array for
    each rank of the node. With several ranks there are two slots: one is filled while the other is summed. The stack is
    an array of a few levels, each as long as this rank's shard of the gradients. A level holds a partial sum (a node of
    the tree over grains, slices of the batch) that is not yet added to another one.

    [Note: in place] A functional model that writes its gradients in place is given the arrays of all units together.
    Then there is only one slot, which holds the gradients of all units one after the other. When the last unit of a
    round has been summed, the ranks of the node wait for each other, before any of them writes the gradients of the
    next round.

    Parameters
    ----------
    store, views, exchange, accumulate
        As in :class:`AllReduceBuffer`.
    in_place : bool
        Whether a function writes the gradients of all units in one call; see [Note: in place].
    """

    in_rounds = True

    def __init__(
        self,
        store: ParameterStore,
        views: GradientViews,
        exchange: GradientExchange,
        accumulate: int,
        *,
        in_place: bool,
    ) -> None:
        self.layout, self.grid, self.memory, self.dtype = store.layout, store.grid, store.memory, store.dtype
        self.exchange, self.timeline, self.accumulate = exchange, store.timeline, accumulate
        self.shards, self.shard = store.group_shards, store.shard
        self._in_place, node, item = in_place, self.grid.node.size, self.dtype.itemsize
        sizes = round_buffer_sizes(self.layout, self.grid.data.size, in_place=in_place)
        strides = [paged(size * item) // item for size in sizes]
        with on_all_ranks(self.grid.world, "gradients"):
            self.slots = self.memory.shared("gradients", [(node, stride) for stride in strides], self.dtype)
            self.stack = self.memory.private("gradients", (1, self.shard.gradient_size), self.dtype)
        self.grain_sum = MicroBatchSum(self.memory, self.layout.gradient_size, self.dtype, accumulate)
        self._named = views
        #: Takes the number of grains, and returns the rank of ``grid.batch`` that computes each.
        self.owners = lru_cache(CACHED_PLANS)(partial(round_owners, self.grid))
        self._planned = lru_cache(CACHED_PLANS)(
            lambda count: round_plan(self.grid.leaves(count), self.grid.group_sizes)
        )
        self._views: dict[tuple[int, int], Any] = {}
        #: Of each slot, unit and round, the round, and the sums that this rank computes in it if nothing is exchanged.
        self._sums: dict[tuple[int, int, int], tuple[Round, list[partial[None]]]] = {}
        self._next = self._root = 0
        self._queue = SegmentQueue(exchange)
        self._one = np.ones(1, self.dtype)
        if exchange.comm.size > 1:
            store.progress.register("rounds", self.poll)

    def reserve(self, count: int) -> None:
        """Do nothing, because the shared memory does not depend on the number of grains. Not collective."""

    def micro_batches(self, batch: GlobalBatch, *, summed: bool) -> list[MicroBatch]:
        """Return this rank's micro-batches of all rounds; those of a round in which it has no grain have no samples.

        Collective over the data group. The methods of the micro-batches are collective, too. They always reduce the
        gradients over ranks, also if ``summed`` is False.
        """
        self.finish()  # of a step that an error has broken off on all ranks
        plan = self._planned(batch.count)
        self._root = plan.root
        if self.stack.shape[0] < plan.rows:
            self.memory.release("gradients", self.stack)
            with all_ranks(self.grid.data, "gradients"):
                self.stack = self.memory.private("gradients", (plan.rows, self.shard.gradient_size), self.dtype)
            self._sums.clear()
        micro_batches: list[MicroBatch] = []
        for this_round in plan.rounds:
            index = this_round.grains[self.grid.order_index]
            grain = None if index is None else batch.grains[index]
            micro_batches += [
                ReduceScatterMicroBatch(self, grain, number, this_round) for number in range(self.accumulate)
            ]
        return micro_batches

    def poll(self) -> None:
        """Let partial sums that are in flight between peers progress. Not collective."""
        self._queue.poll()

    def finish(self) -> None:
        """Wait for the partial sums in flight, and add each to this rank's stack of partial sums. Not collective.

        [Note: sums in flight] in :meth:`reduce_scatter` says when they are in flight.
        """
        self._queue.finish()

    def operands(self) -> Operands:
        """Return the arguments of an update from the final sums of this rank's shard. Not collective.

        They are the stack of partial sums, the tree programs that read only its level with the final sums (there is
        nothing left to add), and this level.
        """
        return Operands(self.stack, self.exchange.both_programs((self._root,)), self.stack[self._root])

    def sum(self, divisors: Divisors) -> Array:
        """Divide the final sums of this rank's shard by ``divisors``, and return them. Not collective."""
        reduced: Array = self.stack[self._root]
        for span, averaged in self.shard.gradient_kinds:
            part = reduced[span.start : span.stop]
            np.divide(part, divisors.of(averaged=averaged), out=part)
        return reduced

    def replicate(self) -> None:
        """Do nothing: each rank has the optimizer state of its shard only, and needs no other sums. Not collective."""

    def first_level(self) -> Array:
        """Return the stack's first level, an array as long as this rank's shard of the gradients. Not collective.

        An :class:`AllReduceBuffer` can write the sums of this shard to it.
        """
        level: Array = self.stack[0]
        return level

    # ------------------------------------------------------------------ a unit

    def gradients_of(self, unit: Unit) -> Array:
        """Return this rank's array in the current slot (buffer for one unit's gradients), cut to the size of ``unit``.

        Not collective.
        """
        first = self.layout.gradient_bases[unit.index] if self._in_place else 0
        part: Array = self.slots[self._next][self.grid.node.rank][first : first + unit.gradients]
        return part

    def views_of(self, unit: Unit) -> Any:
        """Return nested views, by block and parameter, of the array that :meth:`gradients_of` returns.

        Not collective.
        """
        key = (self._next, unit.index)
        if key not in self._views:
            self._views[key] = self._named.unit(unit, self.gradients_of(unit))
        return self._views[key]

    def reduce_scatter(self, unit: Unit, this_round: Round) -> None:
        """Sum the gradients of ``unit`` that the ranks have computed in this round, one grain each.

        Each rank adds the partial sums of the range that it owns to its stack. Collective over the data group.

        [Note: sums in flight] With several peers, the segments of a unit's exchange are in flight while the next unit
        is computed, in the order of units and rounds. A slot holds the gradients of a unit until all segments of the
        unit's exchange have begun. Where there are two slots, the segments begin before the barrier of the next unit,
        after which the slot is written again. Where there is only one ([Note: in place]), this call begins them all.
        """
        self._queue.begin()
        self.memory.barrier("unit gradients")
        if self.exchange.comm.size > 1:
            merge = partial(self._merge, unit, this_round)
            self._queue.add(self.exchange.segments(self._to_sum(unit, this_round)), merge)
        else:
            for one in self._local_sums(unit, this_round):
                one()
        if len(self.slots) == 1:
            self._queue.begin()
        self._next = (self._next + 1) % len(self.slots)
        if self._in_place and unit.index == 0:
            self.memory.barrier("gradients in place")

    def _to_sum(self, unit: Unit, this_round: Round) -> RowsToSum:
        """Describe the gradients of ``unit`` in the current slot, and which rank owns which of them."""
        in_place, base = self._in_place, self.layout.gradient_bases[unit.index]
        ranges = [(s.flat_spans if in_place else s.gradient_spans.__getitem__)(unit.index) for s in self.shards]
        exact = [span if in_place else span.shift(-base) for span in self.exchange.exact]
        residuals = self.exchange.residuals(unit.index)
        rows, programs = self.slots[self._next], this_round.group_programs
        return RowsToSum(rows, ranges, programs, "unit gradients", residuals, exact)

    def _local_sums(self, unit: Unit, this_round: Round) -> list[partial[None]]:
        """Return the sums of a unit that this rank computes in a round, where it exchanges nothing with other ranks."""
        key = self._next, unit.index, id(this_round)
        if key not in self._sums:
            if len(self._sums) >= _MOST_SUMS:
                self._sums.clear()
            pieces = self.exchange.pieces(self._to_sum(unit, this_round))
            self._sums[key] = this_round, [*self._merges(unit, this_round, pieces)]  # so no other round has this id
        return self._sums[key][1]

    def _merge(self, unit: Unit, this_round: Round, pieces: Iterable[RowRange]) -> None:
        """Add the rows of ``pieces`` to the stack of partial sums."""
        for one in self._merges(unit, this_round, pieces):
            one()

    def _merges(self, unit: Unit, this_round: Round, pieces: Iterable[RowRange]) -> Iterator[partial[None]]:
        """Yield the sums that add the rows of ``pieces`` to the stack of partial sums, in their order."""
        tree_sum, base = kernels.backend(self.stack).update.tree_sum, self.shard.gradient_offsets[unit.index]
        programs = [(level, self.exchange.both_programs(program)) for level, program in this_round.merges]
        for piece in pieces:
            rows, at = piece.rows[: this_round.arrivals], base + piece.position
            for level, both in programs:
                out = self.stack[level, at : at + piece.size]
                first, program = piece.first, both[piece.rounded]
                yield partial(tree_sum, rows, first, self.stack, at, program, self._one, out, 0, piece.size)


class AllReduceBuffer:
    """Add up the gradients of this rank's grains in rows, each as long as the gradient vector ([Note: words]).

    The rows of all ranks of a node are in one shared window. The sum over all ranks is written to this rank's first
    row, or to the array that ``shard`` returns.

    [Note: scratch] The gradient of a grain that is a right child in the tree of sums is added to an existing row as
    soon as it is computed. It needs no row of its own, if blocks end their backward passes one after the other. Then
    all blocks write their gradients to the same scratch array, as large as the gradients of the largest block, and each
    block's part is added to the row when the block has ended. Every element is added in the same order as without the
    scratch array. With several micro-batches to a grain, the first one of each grain is written to the grain's row, and
    those after it to the scratch array.

    Parameters
    ----------
    store : ParameterStore
        The parameters, with their layout, the process grid, the allocator of memory other than rows, and the timeline.
    allocator : Allocator
        Allocates rows, in host memory or on a GPU.
    views : GradientViews
        Makes named views of gradients.
    exchange : GradientExchange
        Sends partial sums to the peers that own the elements.
    accumulate : int
        Number of micro-batches of a full grain.
    by_block : bool
        Whether :meth:`MicroBatch.accumulate` is called as soon as a block's gradients are complete, so that the sum may
        overlap with the backward pass.
    scratch : "grains", "micro-batches" or None
        Which gradients are written to a scratch array (see :func:`~mpizero.sharding.config.scratch_use`).
    shard : callable, optional
        Returns the array to which the sums of the ranges that this rank owns are written, concatenated. None: the sums
        are written to this rank's first row.
    scheduler : DynamicScheduler, optional
        Tells which grains each rank of the node has taken. None: no batch is scheduled dynamically.
    """

    in_rounds = False

    def __init__(
        self,
        store: ParameterStore,
        allocator: Allocator,
        views: GradientViews,
        exchange: GradientExchange,
        accumulate: int,
        *,
        by_block: bool,
        scratch: ScratchUse,
        shard: Callable[[], Array] | None = None,
        scheduler: DynamicScheduler | None = None,
    ) -> None:
        self.store, self.layout, self.grid, self.dtype = store, store.layout, store.grid, store.dtype
        self.allocator, self.exchange, self.accumulate = allocator, exchange, accumulate
        self._named, self._by_block, self._scratch_use, self._shard = views, by_block, scratch, shard
        self._ranges = [[s for unit in self.layout.units for s in p.flat_spans(unit.index)] for p in store.group_shards]
        self.stride = paged(self.layout.gradient_size * self.dtype.itemsize) // self.dtype.itemsize
        self.window: Array = np.zeros((0, self.stride), self.dtype)
        self._storage, self._scratch = self.window, self.window[:0].reshape(-1)
        apart = 1 if scratch else accumulate  # with scratch memory, micro-batches are added in their grain's row
        self.grain_sum = MicroBatchSum(allocator, self.layout.gradient_size, self.dtype, apart)
        self._views: dict[tuple[int | None, int, str | None], Any] = {}  # by row, unit and block; None is all blocks
        self._sums: dict[Any, list[tuple[int, Array, list[Array]]]] = {}  # by rows, step, unit and block
        self._planned = lru_cache(CACHED_PLANS)(partial(grid_rows_plan, self.grid, scratch=scratch == "grains"))
        #: Takes the number of grains, and returns the rank of ``grid.batch`` that computes each.
        self.owners = lru_cache(CACHED_PLANS)(partial(contiguous_owners, self.grid))
        self._reserved, self._rows_a_rank = set[int](), 0
        self._plan: RowsPlan | None = None
        self.scheduler = scheduler
        self._dynamic_grains = 0  # number of grains of the batch if they are assigned dynamically, else 0
        self._one = np.ones(1, self.dtype)
        self.overlapped: OverlappedReduction | None = None
        if exchange.comm.size > 1:
            store.progress.register("rows", self.poll)

    @property
    def overlaps(self) -> bool:
        """Tell whether the sum over ranks begins while the backward pass still computes gradients. Not collective."""
        nodes, stages = self.grid.inter_node.size, self.grid.pipeline.size
        return self._by_block and overlaps_reduction(self.exchange.placement, nodes, stages, self.exchange.compression)

    def row(self, number: int) -> Array:
        """Return row ``number`` of this rank, memory for one gradient vector. Not collective."""
        row: Array = self.window[self._place(number)]
        return row[: self.layout.gradient_size]

    def _place(self, number: int) -> int:
        return self.grid.node.rank * self._rows_a_rank + number

    # ------------------------------------------------------------------ micro-batches

    def micro_batches(self, batch: GlobalBatch, *, summed: bool) -> Iterable[MicroBatch]:
        """Return this rank's micro-batches, which add up their gradients in rows (gradient vectors) of this rank.

        Collective over all ranks for the first batch with this number of grains. ``summed`` tells whether the rows are
        summed after the micro-batches; then the sum may begin during the last one: see [Note: buckets of rows]. If
        parameters are sharded, micro-batches without samples are appended, so that all ranks have equally many. With
        dynamic scheduling the iterable takes each part of the grains when its first micro-batch is requested.
        """
        self.finish()  # of a step that an error has broken off on all ranks
        self._plan, self.overlapped = None, None
        self._dynamic_grains = batch.count if batch.dynamic else 0
        self.reserve(batch.count)
        if batch.dynamic:
            return self._dynamic_micro_batches(batch)
        self._plan = plan = self._planned(batch.count)
        if summed and self.overlaps:
            rows = (self.window, self.row(0))
            self.overlapped = OverlappedReduction(self.store, self.exchange, self._ranges, plan, rows)
        micro_batches: list[MicroBatch] = []
        for step in plan.folds[self.grid.order_index].folds:
            micro_batches += self._micro_batches_of(batch.grains[step.grain], step)
        if self.overlapped is not None and micro_batches:
            last = micro_batches[-1]
            assert isinstance(last, AllReduceMicroBatch)
            last.overlapped = self.overlapped
        return micro_batches + [MicroBatch()] * (self.rounds(batch.count) - len(micro_batches))

    def _dynamic_micro_batches(self, batch: GlobalBatch) -> Iterator[MicroBatch]:
        assert self.scheduler is not None
        folding = Folding(self.grid.leaves(batch.count), self._rows_a_rank)
        while part := self.scheduler.next_part(self._rows_a_rank - len(folding.sums)):
            for grain in part:
                yield from self._micro_batches_of(batch.grains[grain], folding.add(grain))

    def _micro_batches_of(self, grain: Grain, step: FoldStep) -> Iterator[AllReduceMicroBatch]:
        """Yield the micro-batches of a grain.

        ``step`` says where the grain's gradients are written, and to which partial sums they are added.
        """
        for number in range(len(grain.micro_batches)):
            row = None if number and self._scratch_use else step.row
            yield AllReduceMicroBatch(self, grain, number, step, row)

    def rounds(self, count: int) -> int:
        """Return how many micro-batches every rank must compute or join, for a batch of ``count`` grains.

        Not collective. The number is 0 if parameters are not sharded, because then no rank waits for another rank's
        micro-batch.
        """
        return -(-count // self.grid.data.size) * self.accumulate if self.store.sharded else 0

    def poll(self) -> None:
        """Let partial sums that are in flight between peers progress. Not collective."""
        if self.overlapped is not None:
            self.overlapped.poll()

    def finish(self) -> None:
        """Finish the sums over ranks that the backward pass has begun; if any, collective over the data group."""
        if self.overlapped is not None:
            self.overlapped.finish()

    def accumulate_block(self, step: FoldStep, number: int, last: bool, unit: Unit, block: str) -> None:
        """Add the gradients of ``block``, from micro-batch ``number``, to the sum over the grain of ``step``.

        After the grain's last micro-batch, that sum is added to the partial sums that ``step.targets`` names: to the
        first of them, the result to the second, and so on.
        """
        later = number > 0 and self._scratch_use is not None
        added = self.parts_of(None, unit, block) if later else ()
        rounded, apart = self.exchange.rounded, self.grain_sum.size > 0
        for index, (start, part, totals) in enumerate(self._sums_of(step, unit, block)):
            if later:
                part += added[index]
            if apart:
                self.grain_sum.add(part, start, number)
            if not last:
                continue
            if apart:
                self.grain_sum.finish(part, start)
            if rounded:
                self.exchange.round_gradients(part, start)
            for total in totals:
                total += part
                if rounded:
                    self.exchange.round_gradients(total, start)
                part = total

    def _sums_of(self, step: FoldStep, unit: Unit, block: str) -> list[tuple[int, Array, list[Array]]]:
        """Return, for each range of a block's gradients, where it starts in a row, and views of it in several rows.

        A row is memory for one gradient vector. The first view is of the memory that the grain's gradients are written
        to; the list has a view of each row in ``step.targets``, to which they are then added.
        """
        key = self.window.shape[0], step.row, step.targets, unit.index, block
        if key not in self._sums:
            spans = [span.shift(self.layout.gradient_bases[unit.index]) for span in unit.gradient_ranges[block]]
            self._sums[key] = [
                (span.start, part, [self.row(target)[span.start : span.stop] for target in step.targets])
                for span, part in zip(spans, self.parts_of(step.row, unit, block), strict=True)
            ]
        return self._sums[key]

    def parts_of(self, row: int | None, unit: Unit, block: str) -> list[Array]:
        """Return the arrays that a block's gradients are written to, one for each of its ranges of the gradient vector.

        Not collective. They are views of row number ``row`` (memory for one gradient vector), or of scratch memory if
        ``row`` is None.
        """
        key = (None if row is None else self._place(row), unit.index, block)
        if key not in self._views:
            if row is None:
                self._views[key] = block_parts(unit, block, self._scratch)
            else:
                gradients = self._unit(row, unit)
                self._views[key] = [gradients[span.start : span.stop] for span in unit.gradient_ranges[block]]
        parts: list[Array] = self._views[key]
        return parts

    def _unit(self, row: int, unit: Unit) -> Array:
        base = self.layout.gradient_bases[unit.index]
        return self.row(row)[base : base + unit.gradients]

    def views_of(self, row: int | None, unit: Unit) -> Any:
        """Return nested views, by block and parameter, of a row (memory for one gradient vector) or scratch array.

        Not collective.
        """
        key = (None if row is None else self._place(row), unit.index, None)
        if key not in self._views:
            buffer = self._scratch if row is None else self._unit(row, unit)
            self._views[key] = self._named.unit(unit, buffer, by_block=row is None)
        return self._views[key]

    # ------------------------------------------------------------------ sums

    def operands(self) -> Operands:
        """Return the rows (gradients) of all ranks of the node, the programs that sum them, and this rank's first row.

        Collective over the node.
        """
        self._barrier()
        return Operands(self.window, self.exchange.both_programs(self._current().root), self.row(0))

    def sum(self, divisors: Divisors) -> Array:
        """Sum the gradients of all ranks in the ranges that this rank owns, and return the sum divided by ``divisors``.

        Collective over the data group. The result is the array that the constructor's ``shard`` returns; this rank's
        first row if ``shard`` is None. If the rows were summed during the backward pass, the first row already has the
        sums (with DDP those of all peers' ranges), and they are only divided. If DDP rounds sums, they are sent to all
        peers here, before they are divided.
        """
        if self.overlapped is not None:
            self._divide(divisors)
            return self.row(0)
        self._barrier()
        pieces, both = self._pieces()
        result = self.row(0) if self._shard is None else self._shard()
        for piece in pieces:
            start = piece.target if self._shard is None else piece.position
            for part, averaged in Span(piece.target, piece.target + piece.size).split(self.layout.averages):
                inside = part.start - piece.target
                divisor = self._one if self.exchange.sends_totals else divisors.of(averaged=averaged)
                out = result[start + inside : start + inside + part.size]
                tree_sum(piece.rows, piece.first + inside, both[piece.rounded], divisor, out)
        if self.exchange.sends_totals:
            self.exchange.replicate(result, self._ranges)
            self._divide(divisors)
        return result

    def _divide(self, divisors: Divisors) -> None:
        """Divide the sums in this rank's first row (memory for one gradient vector) by ``divisors``.

        Not collective. With replicated optimizer state the row has the sums of all peers' ranges, and all are divided;
        otherwise only the sums of the range that this rank owns.
        """
        summed = self._ranges if self.exchange.replicated else [self._ranges[self.exchange.comm.rank]]
        for span in (span for spans in summed for span in spans):
            for part, averaged in span.split(self.layout.averages):
                values = self.row(0)[part.start : part.stop]
                np.divide(values, divisors.of(averaged=averaged), out=values)

    def replicate(self) -> None:
        """Send the sums of every peer to all peers, if all peers need them and do not have them yet.

        Collective over the data group.
        """
        if self.exchange.replicated and self.overlapped is None and not self.exchange.sends_totals:
            self.exchange.replicate(self.row(0), self._ranges)

    def local_sum(self) -> Array:
        """Return the sum of the gradients of this rank's grains, as a new flat array of all gradients.

        Not collective.
        """
        rows = [self.row(row) for _, row in self._current().folds[self.grid.order_index].sums]
        return reduce(add, rows[1:], rows[0].copy()) if rows else np.zeros(self.layout.gradient_size, self.dtype)

    def _barrier(self) -> None:
        """Wait until all ranks of the node have written their gradients. Collective over the node.

        With dynamic scheduling it is only then known which rank has computed which grain; so the order in which the
        rows (gradient vectors) of all ranks are added is planned here.
        """
        with self.store.timeline.span("reduction", "rows"):
            self.store.memory.barrier("rows")
        if self._dynamic_grains and self._plan is None:
            assert self.scheduler is not None
            assigned, groups = self.scheduler.assigned(self._dynamic_grains), self.grid.group_sizes
            leaves = self.grid.leaves(self._dynamic_grains)
            self._plan = rows_plan(assigned, groups, leaves, rows=self._rows_a_rank)

    def _pieces(self) -> tuple[Iterator[RowRange], tuple[Array, Array]]:
        """Exchange partial sums; return an iterator over the ranges that this rank must sum, and the tree programs.

        Collective over the data group. The programs say in which order the rows of a range (gradients and partial sums)
        are added, see [Note: tree programs] in :mod:`mpizero.layout.sum_tree`.
        """
        plan, residuals = self._current(), self.exchange.residuals()
        rows = RowsToSum(self.window, self._ranges, plan.group_programs, "gradients", residuals, self.exchange.exact)
        return self.exchange.pieces(rows), self.exchange.both_programs(plan.root)

    def _current(self) -> RowsPlan:
        if self._plan is None:
            raise StateError("no gradient exists yet: call train or compute_gradients first")
        return self._plan

    # ------------------------------------------------------------------ memory

    def reserve(self, count: int) -> None:
        """Allocate the rows (gradient vectors) for ``count`` grains, and the scratch array if this rank writes to it.

        Collective over all ranks for the first batch with this number of grains.
        """
        plan, rows = self._planned(count), self._planned(count).rows
        most = rows if self.scheduler is None else max(rows, max_dynamic_rows(self.grid, count))
        self._rows_a_rank = most if self._dynamic_grains else rows
        if count not in self._reserved:  # the same decision on all data groups, also where memory suffices
            fold, several = plan.folds[self.grid.order_index], self._scratch_use == "micro-batches"
            # A grain of several micro-batches, perhaps one that is assigned dynamically, is added in scratch memory.
            scratch = fold.uses_scratch or (several and (len(fold.folds) > 0 or self.scheduler is not None))
            reserved, self._reserved = self._reserved, set()  # where this fails, earlier rows may be gone
            with on_all_ranks(self.grid.world, "gradients"):
                self._take(most * self.grid.node.size)
                if scratch and not self._scratch.size:
                    self._scratch = self.allocator.private("gradients", largest_block(self.layout), self.dtype)
            self._reserved = reserved | {count}
        self.window = self._storage[
            : self._rows_a_rank * self.grid.node.size
        ]  # so that the plan of this batch finds each rank's rows

    def _take(self, needed: int) -> None:
        if self._storage.shape[0] < needed:
            self._views.clear()
            self._sums.clear()
            self.window, previous = self.window[:0], self._storage
            self._storage = self._storage[:0]
            if previous.size:
                self.allocator.free_shared("gradients", (previous,))
            (self._storage,) = self.allocator.shared("gradients", [(needed, self.stride)], self.dtype)


#: The two buffers, which the engine uses alike.
GradientReducer = ReduceScatterBuffer | AllReduceBuffer


class OverlappedReduction:
    """Sum the rows of one step over the peers, bucket by bucket, while blocks end their backward pass.

    [Note: buckets of rows] A row is cut into buckets, which are exchanged from its end, because the backward pass goes
    from the last block to the first. A bucket's partial sums are exchanged as soon as every block in it has finished
    its backward pass on all ranks of the node; a barrier of the node makes sure of that. With ZeRO-1 there is a bucket
    for each unit, and each peer sums the elements that it owns. With DDP all buckets have one size, and each peer sums
    an equal part of each bucket, because one peer may own all of a bucket's elements. Then each peer sends its sums to
    all peers' first rows. A few exchanges of partial sums are in flight at a time (``SegmentQueue``), and any number of
    all-gathers of sums, because these need no buffers. Every element is added in the order of the tree, so it does not
    matter which rank adds it.

    Parameters
    ----------
    store : ParameterStore
        The parameters, with the layout of gradients in a row, the node's memory and the timeline.
    exchange : GradientExchange
        Sends partial sums between peers; it must not compress them with loss.
    spans : sequence over peers of sequences of Span
        The ranges of the gradient vector that each peer owns.
    plan : RowsPlan
        Which rows each node adds up, and how the sums of all nodes are added.
    rows : (2-D array, 1-D array)
        The shared window with all rows of the node, and this rank's first row, to which the sums are written.
    """

    def __init__(
        self,
        store: ParameterStore,
        exchange: GradientExchange,
        spans: Sequence[Sequence[Span]],
        plan: RowsPlan,
        rows: tuple[Array, Array],
    ) -> None:
        self._layout, self._memory, self._timeline = store.layout, store.memory, store.timeline
        self._exchange, self._peers, (self._rows, self.total) = exchange, store.grid.inter_node, rows
        self._roots = exchange.both_programs(plan.root)
        self._one = np.ones(1, self.total.dtype)
        self._buckets = list(self._by_size(plan, spans) if exchange.replicated else self._by_unit(plan))[::-1]
        self._ends = {block: 0 for unit in self._layout.units for block in unit.blocks}
        for entry in self._layout.entries:
            if entry.gradient >= 0:
                end = self._layout.gradient_bases[entry.unit] + entry.gradient + entry.spec.size
                self._ends[entry.block] = max(self._ends[entry.block], end)
        self._queue = SegmentQueue(exchange)
        self._gatherings: list[Gathering] = []

    def _by_size(self, plan: RowsPlan, spans: Sequence[Sequence[Span]]) -> Iterator[Bucket]:
        """Yield buckets (parts of the gradient vector) of equal sizes, for DDP.

        In each bucket every peer sums as many elements as the others, and sends its sums to all peers.
        """
        counts = [len(programs) for programs in plan.group_programs]
        exchange = self._exchange
        for start, parts in cut_buckets(spans, self.total.size, counts, exchange.elements):
            for form, inside in bucket_forms(parts, exchange.codec, exchange.exact):
                windows = [[(0, span) for span in part if span.size] for part in inside]
                sums = exchange.programs(plan.group_programs[self._peers.rank], form)
                segment = Segment(self._rows, windows, counts, sums, "gradients", codec=form)
                take = partial(self._sum_for_all, inside, halves=form is not None)
                yield Bucket(start, [segment] if any(windows) else [], take)

    def _by_unit(self, plan: RowsPlan) -> Iterator[Bucket]:
        """Yield a bucket (part of the gradient vector) for each unit; each peer sums its own elements of the unit."""
        for unit in reversed(self._layout.units):
            ranges = [shard.flat_spans(unit.index) for shard in self._exchange.shards]
            to_sum = RowsToSum(self._rows, ranges, plan.group_programs, "gradients", exact=self._exchange.exact)
            yield Bucket(self._layout.gradient_bases[unit.index], list(self._exchange.segments(to_sum)), self._sum)

    def ended(self, blocks: Sequence[str]) -> None:
        """Record that this rank's sums of ``blocks`` are complete, and begin to exchange the buckets now complete.

        Collective over the data group; every rank calls it for the same blocks in the same order. In ``blocks`` are the
        names of blocks whose gradients of the last micro-batch have been added to the gradients of earlier grains; a
        block may be named again in a later call.
        """
        for block in blocks:
            self._ends.pop(block, None)
        self._begin(max(self._ends.values(), default=0))

    def poll(self) -> None:
        """Let exchanges and all-gathers in flight progress. Not collective."""
        self._queue.poll()
        self._gatherings[:] = [gathering for gathering in self._gatherings if not gathering.test()]

    def finish(self) -> None:
        """Exchange the remaining buckets (parts of the gradient vector), and wait until :attr:`total` has all sums.

        Collective over the data group.
        """
        self._begin(0)
        self._queue.finish()
        for gathering in self._gatherings:
            gathering.wait()
        self._gatherings.clear()

    def _begin(self, final: int) -> None:
        """Begin to exchange the buckets that start at element ``final`` of the gradient vector or after it.

        Buckets of which the exchange has begun before are left out.

        Collective over the data group.
        """
        while self._buckets and self._buckets[-1].start >= final:
            bucket = self._buckets.pop()
            with self._timeline.span("reduction", "bucket"):
                self._memory.barrier("rows")  # one a bucket: ranks may end several blocks in one call
                self._queue.add(bucket.segments, bucket.take)

    def _sum(self, pieces: Iterable[RowRange]) -> None:
        """Add up the partial sums of ``pieces``, ranges of the gradient vector that have arrived from all peers."""
        for piece in pieces:
            out = self.total[piece.target : piece.target + piece.size]
            tree_sum(piece.rows, piece.first, self._roots[piece.rounded], self._one, out)

    def _sum_for_all(self, parts: Sequence[Sequence[Span]], pieces: Iterable[RowRange], *, halves: bool) -> None:
        """Add up partial sums that have arrived, and begin to send this rank's sums to all peers.

        ``parts`` are the ranges of the bucket that each peer sums. With ``halves`` the sums are rounded, and are sent
        in 16 bits.
        """
        self._sum(pieces)
        sums = [self.total[span.start : span.stop] for span in parts[self._peers.rank]]
        self._gatherings.append(begin_gather(self._peers, sums, self.total, parts, halves=halves))


class Bucket(NamedTuple):
    """Describe a part of the gradient vector that is exchanged as soon as all of its gradients are complete.

    Attributes
    ----------
    start : int
        Index of the bucket's first element in the gradient vector.
    segments : sequence of Segment
        The messages that exchange the bucket's partial sums, in one or more segments.
    take : callable
        Takes the partial sums of a segment that has arrived, and adds them up.
    """

    start: int
    segments: Sequence[Segment]
    take: Callable[[Iterator[RowRange]], None]


def cut_buckets(
    spans: Sequence[Sequence[Span]], size: int, counts: Sequence[int], elements: int | None
) -> list[tuple[int, tuple[tuple[Span, ...], ...]]]:
    """Cut a gradient vector of ``size`` elements into buckets, from its end to its start. Not collective.

    Parameters
    ----------
    spans : sequence over peers of sequences of Span
        The ranges of the gradient vector that each peer owns.
    size : int
        Number of elements of the gradient vector.
    counts : sequence of int
        For each peer, the number of partial sums that its node sends.
    elements : int or None
        Number of elements of a bucket; None is the default of the exchange.

    Returns
    -------
    list of (int, tuple of tuple of Span)
        For each bucket, beginning with the last one of the vector: the index of its first element, and the ranges that
        each peer sums. All peers have equally many ranges; some may be empty.
    """
    nodes = len(counts)
    bucket_size = nodes * exchange_step(counts, elements)
    ascending = sorted((span for group in spans for span in group if span.size), key=lambda span: span.start)
    buckets = []
    for stop in range(size, 0, -bucket_size):
        start = max(0, stop - bucket_size)
        inside = [span.intersect(Span(start, stop)) for span in ascending]
        buckets.append((start, _shared_evenly([span for span in inside if span.size], nodes)))
    return buckets


def bucket_forms(
    parts: Sequence[Sequence[Span]], codec: Codec | None, exact: Sequence[Span]
) -> list[tuple[Codec | None, Sequence[Sequence[Span]]]]:
    """Divide the ranges that each peer sums in a bucket into ranges sent uncompressed and ranges sent by ``codec``.

    Not collective. The result is a list of pairs: a codec (None for the uncompressed ranges), and the ranges of each
    peer; all peers have equally many ranges, and some are empty. ``exact`` are the ranges that are not compressed.
    """
    if codec is None:
        return [(None, parts)]
    forms: list[tuple[Codec | None, Sequence[Sequence[Span]]]] = []
    for form, chosen in ((None, True), (codec, False)) if exact else ((codec, False),):
        cut = [[p for span in group for p, inside in span.split(exact) if inside is chosen] for group in parts]
        longest = max(map(len, cut))
        forms.append((form, [ranges + [Span(0, 0)] * (longest - len(ranges)) for ranges in cut]))
    return forms


def _shared_evenly(spans: Sequence[Span], nodes: int) -> tuple[tuple[Span, ...], ...]:
    """Cut the concatenation of ``spans`` into equal shards, one for each of ``nodes`` peers.

    Return, for each peer, the range of its shard in every span; it is empty if they do not overlap.
    """
    total, parts = sum(span.size for span in spans), []
    for shard in Partition(total, nodes):
        shard_span = Span(shard.start, shard.stop)
        position, part = 0, []
        for span in spans:
            inside = shard_span.intersect(Span(position, position + span.size))
            part.append(inside.shift(span.start - position) if inside.size else Span(0, 0))
            position += span.size
        parts.append(tuple(part))
    return tuple(parts)


class GradientExchange(ExactExchange):
    """Send partial sums of gradients to the peers that own the elements, compressed as the configuration says.

    [Note: residuals] A compressed message leaves out a part of every value. The sender keeps this part, the residual,
    and adds it to the value in its next message. A rank keeps residuals of the partial sums that it sends to the other
    peers, an array for each of them. With replicated optimizer state it also sends its own range of the reduced
    gradient to all peers, and keeps residuals of it. A step changes only a copy of the residuals. The copy replaces the
    residuals when the parameters have been updated, so a skipped step leaves the residuals unchanged.

    [Note: units of means] A step divides its sum of gradients by its own total weight and loss scale (the divisor). So
    residuals are kept in units of the mean gradient, that is divided by the divisor, and the next step multiplies them
    by its own divisor. Rows are sent after the ranks have agreed on the total weight. Gradients that are summed unit by
    unit, in the backward pass, are sent before the total weight is known: their divisor is estimated from the mean
    weight of a sample in the last step, and the error of the estimate stays in the residuals. So all messages plus the
    residuals, converted to means, add up to the sum of all mean gradients, whatever the weights are.

    [Note: copies] A compressed value depends on its neighbours in a message, on its owner, and on the residuals of
    earlier messages. If other ranks hold a copy of a parameter that they update themselves (on another pipeline stage,
    or unsplit in a tensor group), the parameter's neighbours differ between the copies. Gradients of such a parameter
    are sent exactly, so that copies stay equal. New values of averaged parameters, which are not gradients, are sent
    exactly, too.

    Parameters
    ----------
    store : ParameterStore
        The parameters: the ranges that each peer owns, the data type, and the allocator for residuals and messages.
        Only float32 is compressed.
    placement : Placement
        The strategy. It says whether all peers keep the whole optimizer state and so need all reduced gradients.
    compression : str or None
        The setting ``ShardingConfig.gradient_compression``.
    elements : int or None
        Number of elements of a bucket; None is the default of :class:`ExactExchange`.
    exact : sequence of Span
        The ranges of the gradient vector that are neither compressed ([Note: copies]) nor rounded, in ascending order.
    wire : str or None
        The setting ``Config.wire``: "bfloat16" rounds sums ([Note: rounded sums] in ``comm/reduce.py``), and sends them
        in 16 bits.
    ties : bool
        Whether this pipeline stage shares parameters with other stages. Their gradients are added over the stages after
        the sums over ranks, and the results are not rounded.
    """

    def __init__(
        self,
        store: ParameterStore,
        placement: Placement,
        compression: str | None = None,
        *,
        elements: int | None = None,
        exact: Sequence[Span] = (),
        wire: str | None = None,
        ties: bool = False,
    ) -> None:
        super().__init__(store.grid.gradients, None, store.memory.scratch, elements, rounded=wire is not None)
        self.memory, self.shards, self.dtype, self.placement = store.memory, store.group_shards, store.dtype, placement
        self.replicated, self.exact, self.wire = not placement.shard_optimizer, exact, wire
        #: Whether DDP sends sums to all peers before it divides them by the weight, while they are bfloat16 numbers.
        self.sends_totals = self.rounded and self.replicated and self.comm.size > 1 and not ties
        self._residual = self._next = np.empty(0, np.float32)
        self.compress(compression)

    def compress(self, compression: str | None) -> None:
        """Use another compression from the next step on, and drop all residuals.

        Not collective, but all ranks must call it before the same step.
        """
        self.memory.release(RESIDUALS, self._residual)
        self.memory.release(RESIDUALS, self._next)
        self.compression, self.codec = compression, gradient_codec(compression, self.wire, self.dtype.itemsize)
        self._of_units = [compressed_sizes(shard, self.exact) for shard in self.shards]
        sizes = residual_sizes(
            [sum(units) for units in self._of_units], self.comm.rank, self.codec, replicated=self.replicated
        )
        self._bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self._residual, self._next = (self.memory.private(RESIDUALS, self._bounds[-1], np.float32) for _ in range(2))
        #: Whether this rank keeps residuals (what compression has left out of messages).
        self.feedback = self._residual.size > 0
        self.forget()

    def round_gradients(self, values: Array, start: int) -> None:
        """Round gradients in place, if sums are rounded; ``start`` is the index of the first in the gradient vector.

        Not collective.
        """
        for part, exact in Span(start, start + values.size).split(self.exact) if self.rounded else ():
            if not exact:
                kernels.backend(values).update.round_bfloat16(values[part.start - start : part.stop - start])

    @property
    def bucket_mb(self) -> float:
        """The number of MiB of gradients in a bucket; 0.0 if there is only one peer. Not collective."""
        return 0.0 if self.comm.size == 1 else bucket_size(self.elements) * self.dtype.itemsize / 2**20

    @property
    def owes(self) -> bool:
        """Tell whether any residual (what compression left out of messages) on this rank is not 0. Not collective."""
        return bool(self._residual.any())

    # ------------------------------------------------------------------ residuals

    def begin(self, samples: int, loss_scale: float) -> None:
        """Copy the residuals of compression for a step of ``samples`` samples; the step changes only the copy.

        Not collective. The copy is in units of the step's partial sums, with an estimate of the weight ([Note: units of
        means]). The copy of an earlier step that was not finished is overwritten.
        """
        self._samples, self._loss_scale = samples, loss_scale
        self._copy(samples * self._weight_of_a_sample * loss_scale)

    def weigh(self, weight: float, *, sent: bool) -> None:
        """Set the total weight of the step's batch, on which the ranks have agreed. Not collective.

        ``sent`` tells whether the step's partial sums have already been sent.
        """
        if not math.isfinite(weight):
            return  # of a step that is skipped
        self._divisor = weight * self._loss_scale
        if not sent:
            self._copy(self._divisor)

    def _copy(self, factor: float) -> None:
        self._factor = self._divisor = factor
        if self.feedback:
            self._next[:] = self._residual
            for part in self._partial_sums:
                self._next[part] *= np.float32(factor)

    @property
    def _partial_sums(self) -> list[slice]:
        """For each other peer, the slice of the array of residuals that is for the partial sums sent to this peer."""
        bounds = [slice(*pair) for pair in pairwise(self._bounds)]
        return [part for peer, part in enumerate(bounds) if peer != self.comm.rank]

    def finish(self, *, updated: bool) -> None:
        """End a step: keep the residuals that it has computed, if it has ``updated`` the parameters. Not collective.

        Otherwise the residuals (what compression has left out of messages) stay those from before the step.
        """
        if not updated or not self._divisor:
            return
        for part in self._partial_sums if self.feedback else ():
            left, residual = self._next[part], self._residual[part]
            left /= np.float32(self._divisor)
            if self._factor != self._divisor:
                left += residual * np.float32(1 - self._factor / self._divisor)
        self._residual, self._next = self._next, self._residual
        self._weight_of_a_sample = self._divisor / self._loss_scale / self._samples
        self._divisor = 0.0

    def forget(self) -> None:
        """Set all residuals (what compression has left out of messages) to 0. Not collective."""
        self._residual[:] = 0
        self._weight_of_a_sample, self._samples, self._loss_scale = 1.0, 0, 1.0
        self._factor = self._divisor = 0.0  # of the step that has begun; 0 if none has

    def copy_from(self, other: GradientExchange) -> None:
        """Use the compression of ``other``, an exchange of the same ranks, and copy its residuals. Not collective."""
        if self.compression != other.compression:
            self.compress(other.compression)
        self._residual[:] = other._residual
        self._weight_of_a_sample = other._weight_of_a_sample

    def left_for(self, peer: int, unit: int | None = None) -> Array:
        """Return the copy, for this step, of the residuals that this rank keeps for ``peer``. Not collective.

        ``unit`` selects the residuals of one unit's gradients; None: of all units. If ``peer`` is this rank itself, the
        result is the residuals of its range of the reduced gradient, in units of means.
        """
        left = self._next[self._bounds[peer] : self._bounds[peer + 1]]
        if unit is None or not left.size:
            return left
        start, sizes = sum(self._of_units[peer][:unit]), self._of_units[peer]
        return left[start : start + sizes[unit]]

    def residuals(self, unit: int | None = None) -> list[Array]:
        """Return, for every peer, what :meth:`left_for` returns; an empty list if this rank keeps no residuals.

        Not collective.
        """
        return [self.left_for(peer, unit) for peer in range(len(self.shards))] if self.feedback else []

    # ------------------------------------------------------------------ reduced gradients

    def replicate(self, row: Array, spans: Sequence[Sequence[Span]]) -> None:
        """All-gather a row (gradient vector): send the ranges that each peer owns to all peers.

        Collective over the peers. ``spans`` holds the ranges of every peer.
        """
        plain = spans
        if self.codec is not None and self.comm.size > 1 and self.sends_totals is self.rounded:
            plain, packed = (
                [
                    [part for span in ranges for part, exact in span.split(self.exact) if exact is chosen]
                    for ranges in spans
                ]
                for chosen in (True, False)
            )
            residual = self.left_for(self.comm.rank)
            gather_packed(self.comm, self.codec, row, packed, residual, self.scratch, elements=self.elements)
        ranges = [row[s.start : s.stop] for s in plain[self.comm.rank]]
        gather_spans(self.comm, ranges, row, plain, self.scratch, self.elements)


#: The kind under which the allocator counts the memory of residuals.
RESIDUALS = "residuals"


def residual_sizes(totals: Sequence[int], peer: int, codec: Codec | None, *, replicated: bool) -> list[int]:
    """Return how many residual values a rank keeps for each of the peers. Not collective.

    Parameters
    ----------
    totals : sequence of int
        Number of gradient elements that each peer owns and that are compressed.
    peer : int
        Index, among the peers, of the rank that keeps the residuals.
    codec : Codec or None
        The codec that compresses messages; None does not compress.
    replicated : bool
        Whether every rank sends its range of the reduced gradient to all peers, and so keeps residuals of it.
    """
    if codec is None or not codec.feedback or len(totals) == 1:
        return [0] * len(totals)
    return [0 if place == peer and not replicated else size for place, size in enumerate(totals)]


def compressed_sizes(shard: Shard, exact: Sequence[Span]) -> list[int]:
    """Return, for each unit, how many gradient elements of ``shard`` are compressed: all outside the ranges ``exact``.

    Not collective.
    """
    every = (shard.flat_spans(unit.index) for unit in shard.layout.units)
    return [sum(p.size for span in spans for p, inside in span.split(exact) if not inside) for spans in every]
