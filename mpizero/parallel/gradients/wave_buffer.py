"""Sum the gradients of one unit at a time, in each wave of grains, into the shards of the ranks (ZeRO-2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.comm.agreement import all_ranks
from mpizero.comm.reduce import Arriving, RowRange, RowsToSum, program_array
from mpizero.layout.batch import wave_owners
from mpizero.layout.flat import Unit
from mpizero.layout.sum_tree import Wave, WavePlan, wave_plan
from mpizero.parallel.batch.redistribute import GlobalBatch, Grain
from mpizero.parallel.batch.step_scalars import Divisors
from mpizero.parallel.gradients.exchange import GradientExchange
from mpizero.parallel.gradients.gradient_views import GradientViews, MicroBatchSum
from mpizero.parallel.gradients.reducer import Job, SumOperands, forget_plans
from mpizero.parallel.parameters.allocator import on_all_ranks, paged
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.parallel.step_rules import wave_slots
from mpizero.types import Array


class _InFlight(NamedTuple):
    """Hold partial sums of a unit's gradients that are in flight, and how they are added to this rank's stack.

    ``base`` is the index, in this rank's shard, of the unit's first element. ``programs`` are pairs of the number of a
    row of the stack and the tree program that computes the row. ``arrivals`` is the number of partial sums that arrive.
    """

    arriving: Arriving
    base: int
    programs: Sequence[tuple[int, Array]]
    arrivals: int


class WaveBuffer:
    """Keep the gradients of the current unit in a slot, and the sums over this rank's shard in a stack.

    Implements :class:`~mpizero.parallel.gradients.reducer.GradientReducer`. A slot is a shared window with one row for
    each rank of the node. A node of several ranks has two slots: one is filled while the other is summed. The stack is
    an array of a few rows, each as long as this rank's shard of the gradients. A row holds a partial sum (a node of the
    tree over grains) that is not added to another yet.

    [Note: in place] A black box that writes its gradients in place is given those of all units at once. There is one
    slot then, in which the gradients of all units lie one after the other. When the last unit of a wave has been
    summed, the ranks of the node wait for each other, before any of them writes the gradients of the next wave.

    Parameters
    ----------
    store, views, exchange, accumulate
        As in :class:`~mpizero.parallel.gradients.row_buffer.RowBuffer`.
    in_place : bool
        Whether the gradients of all units are written at once; see [Note: in place].
    """

    waves = True

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
        self.shares, self.share = store.peer_shares, store.share
        self._in_place, node, item = in_place, self.grid.node.size, self.dtype.itemsize
        strides = [paged(size * item) // item for size in wave_slots(self.layout, node, in_place=in_place)]
        with on_all_ranks(self.grid.world, "gradients"):
            self.slots = self.memory.shared("gradients", [(node, stride) for stride in strides], self.dtype)
            self.stack = self.memory.private("gradients", (1, self.share.gradient_size), self.dtype)
        self._micro_batches = MicroBatchSum(self.memory, self.layout.gradient_size, self.dtype, accumulate)
        self._named = views
        self._plans: dict[int, WavePlan] = {}
        self._views: dict[tuple[int, int], Any] = {}
        self._next = self._root = 0
        self._in_flight: _InFlight | None = None
        self._one = np.ones(1, self.dtype)
        store.progress.register("waves", self.poll)

    @property
    def largest(self) -> int:
        """The largest number of elements that could be in flight between peers at once; 0 if there is only one peer.

        It is the number of peers times the size of the largest range of one unit that a rank owns.
        """
        peers = len(self.shares)
        sizes = [sum(span.size for span in spans) for share in self.shares for spans in share.gradient_spans]
        return peers * max(sizes, default=0) if peers > 1 else 0

    def owners(self, count: int) -> list[int]:
        """Return, for each of ``count`` grains, the rank of ``grid.batch`` that computes it. Not collective."""
        return wave_owners(self.grid, count)

    def reserve(self, count: int) -> None:
        """Do nothing, because the shared memory does not depend on the number of grains. Not collective."""

    def jobs(self, batch: GlobalBatch, *, summed: bool) -> list[Job]:
        """Return this rank's jobs of all waves; for a wave in which it has no grain, jobs without samples.

        Collective over the data group, and so are the jobs.
        """
        self.finish()  # of a step that an error has broken off on all ranks
        if batch.count not in self._plans:
            forget_plans(self._plans)
            self._plans[batch.count] = wave_plan(batch.count, self.grid.group_sizes)
        plan = self._plans[batch.count]
        self._root = plan.root
        if self.stack.shape[0] < plan.rows:
            self.memory.release("gradients", self.stack)
            with all_ranks(self.grid.data, "gradients"):
                self.stack = self.memory.private("gradients", (plan.rows, self.share.gradient_size), self.dtype)
        jobs = []
        for wave in plan.waves:
            index = wave.grains[self.grid.place]
            grain = None if index is None else batch.grains[index]
            count = 0 if grain is None else len(grain.micro_batches)
            for number in range(self.accumulate):
                done = partial(self._done, grain, number, wave)
                jobs.append(Job(grain if number < count else None, number, self._target, done, self._parts))
        return jobs

    @property
    def in_flight(self) -> bool:
        """Tell whether partial sums of a unit are in flight between peers. Not collective."""
        return self._in_flight is not None

    def poll(self) -> None:
        """Let partial sums that are in flight between peers progress. Not collective."""
        if self._in_flight is not None:
            self._in_flight.arriving.test()

    def finish(self) -> None:
        """Wait for the partial sums in flight and add them to the stack. Not collective.

        [Note: sums in flight] in :meth:`_reduce` says when they are in flight.
        """
        if self._in_flight is not None:
            found, self._in_flight = self._in_flight, None
            for piece in found.arriving.pieces():
                self._merge(piece, found.base + piece.position, found.programs, found.arrivals)

    def operands(self) -> SumOperands:
        """Return the stack, and the tree program that reads the row with the final sums of this rank's shard.

        Not collective.
        """
        return SumOperands(self.stack, program_array((self._root,)), self.stack[self._root])

    def sum(self, divisors: Divisors) -> Array:
        """Divide the final sums of this rank's shard by ``divisors``, and return them. Not collective."""
        reduced: Array = self.stack[self._root]
        for span, averaged in self.share.gradient_kinds:
            part = reduced[span.start : span.stop]
            np.divide(part, divisors.of(averaged=averaged), out=part)
        return reduced

    def replicate(self) -> None:
        """Do nothing: each rank has the optimizer state of its shard only, and needs no other sums. Not collective."""

    def first_row(self) -> Array:
        """Return the first row of the stack, as memory for the sums of gradients that a :class:`RowBuffer` collects.

        Not collective.
        """
        row: Array = self.stack[0]
        return row

    # ------------------------------------------------------------------ a unit

    def _current(self, unit: Unit) -> Array:
        """Return a view of this rank's row of the current slot, as long as the gradients of ``unit``."""
        first = self.layout.gradient_bases[unit.index] if self._in_place else 0
        place: Array = self.slots[self._next][self.grid.node.rank][first : first + unit.gradients]
        return place

    def _parts(self, unit: Unit, block: str) -> list[Array]:
        place = self._current(unit)
        return [place[span.start : span.stop] for span in unit.gradient_ranges[block]]

    def _target(self, unit: Unit) -> Any:
        key = (self._next, unit.index)
        if key not in self._views:
            self._views[key] = self._named.unit(unit, self._current(unit))
        return self._views[key]

    def _done(self, grain: Grain | None, number: int, wave: Wave, unit: Unit) -> None:
        base, target = self.layout.gradient_bases[unit.index], self._current(unit)
        if grain is not None and number < len(grain.micro_batches):
            self._micro_batches.add(target, base, number)
        if number == self.accumulate - 1:
            if grain is not None:
                self._micro_batches.finish(target, base)
            begun = self.timeline.begin()
            self._reduce(unit, wave)
            self.timeline.end("reduction", unit, begun)

    def _reduce(self, unit: Unit, wave: Wave) -> None:
        """Sum the gradients of ``unit`` from all ranks' grains of this wave into the stacks of the ranks that own them.

        Collective over the data group.

        [Note: sums in flight] With several peers, the last segment of a unit's exchange stays in flight while the next
        unit is computed. Before the next exchange begins, the buffer waits for that segment and adds it to the stack.
        So one segment is in flight at a time, in the order of units and waves.
        """
        self.finish()
        self.memory.barrier("unit gradients")
        rows = self.slots[self._next]
        ranges = [(s.row_spans if self._in_place else s.gradient_spans.__getitem__)(unit.index) for s in self.shares]
        base = self.share.gradient_offsets[unit.index]
        programs = [(row, program_array(program)) for row, program in wave.merges]
        residuals = self.exchange.residuals(unit.index)
        exact = [s if self._in_place else s.shift(-self.layout.gradient_bases[unit.index]) for s in self.exchange.exact]
        to_sum = RowsToSum(rows, ranges, wave.group_programs, "unit gradients", residuals, exact)
        if self.exchange.peers.size == 1:
            for piece in self.exchange.pieces(to_sum):
                self._merge(piece, base + piece.position, programs, wave.arrivals)
        else:
            for segment in self.exchange.segments(to_sum):
                self.finish()
                self._in_flight = _InFlight(self.exchange.begin_segment(segment), base, programs, wave.arrivals)
        self._next = (self._next + 1) % len(self.slots)
        if self._in_place and unit.index == 0:
            self.memory.barrier("gradients in place")

    def _merge(self, piece: RowRange, at: int, programs: Sequence[tuple[int, Array]], arrivals: int) -> None:
        fused = kernels.backend(self.stack).fused
        rows = piece.rows[:arrivals]
        for row, program in programs:
            out = self.stack[row, at : at + piece.size]
            fused.tree_sum(rows, piece.first, self.stack, at, program, self._one, out, 0, piece.size)
