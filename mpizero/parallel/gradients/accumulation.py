"""Whole rows of gradients of contiguous grains: folded as they come, and summed at the end of a step or behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpizero.comm import ProcessGrid
from mpizero.comm.reduce.exact import RowsToSum
from mpizero.comm.reduce.segments import program_array, tree_sum
from mpizero.errors import StateError
from mpizero.layout import FlatLayout, RowsPlan, Span, Unit, rows_plan
from mpizero.parallel.batch.grain_owners import contiguous_shares
from mpizero.parallel.batch.redistribute import GlobalBatch
from mpizero.parallel.gradients.exchange import GradientExchange
from mpizero.parallel.gradients.overlap import SumsBehind
from mpizero.parallel.gradients.wave_buffer import Allocator, GradientViews, Job, MicroFold
from mpizero.parallel.parameters.allocator import on_all_ranks, paged
from mpizero.parallel.parameters.shards import Share
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.types import Array


class GradientRows:
    """Whole gradients of contiguous grains in rows, in the window of the group.

    Collective methods are collective over the data group.
    """

    def __init__(
        self,
        layout: FlatLayout,
        grid: ProcessGrid,
        memory: Allocator,
        dtype: Any,
        accumulate: int,
        named: GradientViews,
    ) -> None:
        self.layout, self.grid, self.memory, self.named = layout, grid, memory, named
        self.dtype = np.dtype(dtype)
        self.stride = paged(layout.gradient_size * self.dtype.itemsize) // self.dtype.itemsize
        self.window: Array = np.zeros((0, self.stride), dtype)
        self._storage = self.window
        self.micro = MicroFold(memory, layout.gradient_size, dtype, accumulate)
        self._views: dict[tuple[int, int], Any] = {}
        self._plans: dict[int, RowsPlan] = {}
        self._reserved: set[int] = set()
        self.plan: RowsPlan | None = None
        self._behind: SumsBehind | None = None
        self.one = np.ones(1, dtype)

    def planned(self, count: int) -> RowsPlan:
        """Return the plan for ``count`` grains."""
        if count not in self._plans:
            self._plans[count] = rows_plan(contiguous_shares(self.grid, count), self.grid.group_sizes, count)
        return self._plans[count]

    def row(self, number: int) -> Array:
        """Return one of this rank's rows."""
        row: Array = self.window[self._place(number)]
        return row[: self.layout.gradient_size]

    def _place(self, number: int) -> int:
        rows: int = self.window.shape[0] // self.grid.node.size
        return self.grid.node.rank * rows + number

    def jobs(
        self, batch: GlobalBatch, rounds: int, behind: tuple[GradientExchange, ParameterStore] | None = None
    ) -> list[Job]:
        """Return this rank's micro-batches, whose gradients are folded as they come.

        Collective over all ranks where the number of grains is a new one. ``rounds`` is the number of jobs that every
        rank takes part in; 0 where nothing is gathered, so that absent grains cost nothing. With ``behind``, an
        exchange and whose gradients these are, rows are summed for all peers as the last job goes on: [Note: buckets of
        rows].
        """
        self.finish()  # of a step that an error has broken off on all ranks
        plan, self.plan, self._behind = self.planned(batch.count), None, None
        self.reserve(batch.count)
        self.plan = plan
        if behind is not None:
            exchange, store = behind
            spans, rows = self._ranges(store.peer_shares), (self.window, self.row(0))
            self._behind = SumsBehind(store, exchange, spans, plan, rows)
        jobs: list[Job] = []
        for index, row, additions in plan.folds[self.grid.place].folds:
            grain = batch.grains[index]
            last = len(grain.micro_batches) - 1
            for number in range(last + 1):
                done = partial(self._done, row, number, additions if number == last else None)
                jobs.append(Job(grain, number, partial(self._target, row), done, partial(self._flat, row)))
        if self._behind is not None and jobs:
            whole: Any = jobs[-1].done
            fold = partial(self._fold, *whole.args)
            jobs[-1] = jobs[-1]._replace(
                done=lambda unit: self._ended(unit.blocks, fold), ended=lambda block: self._ended((block,), fold)
            )
        return jobs + [Job(None, 0, _no_target, _nothing, _no_target)] * (rounds - len(jobs))

    def _ended(self, blocks: Sequence[str], fold: Callable[[int, int], None]) -> None:
        if self._behind is not None:
            self._behind.ended(blocks, fold)

    def poll(self) -> None:
        """Let sums that are on their way move on. Not collective."""
        if self._behind is not None:
            self._behind.poll()

    def finish(self) -> None:
        """Wait for the sums that jobs have begun. Collective over the data group where they were to be."""
        if self._behind is not None:
            self._behind.finish()

    def _done(self, row: int, number: int, additions: Sequence[tuple[int, int]] | None, unit: Unit) -> None:
        """Fold one unit's part of a row; ``additions`` come with the last micro-batch of a grain."""
        base = self.layout.gradient_bases[unit.index]
        self._fold(row, number, additions, base, base + unit.gradients)

    def _flat(self, row: int, unit: Unit) -> Array:
        base = self.layout.gradient_bases[unit.index]
        return self.row(row)[base : base + unit.gradients]

    def _fold(self, row: int, number: int, additions: Sequence[tuple[int, int]] | None, start: int, stop: int) -> None:
        part = self.row(row)[start:stop]
        self.micro.fold(part, start, number)
        if additions is not None:
            self.micro.finish(part, start)
            for target, source in additions:
                total = self.row(target)[start:stop]
                total += self.row(source)[start:stop]

    def local_sum(self) -> Array:
        """Return the sum of this rank's grains as a new array: their nodes added in order. Not collective."""
        plan = self._current()
        held = [row for _, row in plan.folds[self.grid.place].held]
        total = np.zeros(self.layout.gradient_size, self.dtype)
        for number, row in enumerate(held):
            total = self.row(row).copy() if number == 0 else total + self.row(row)
        return total

    def pieces(self, exchange: GradientExchange, shares: Sequence[Share]) -> tuple[Any, Array]:
        """Return an iterator over what this rank has to sum, and the program that sums it. Collective."""
        plan = self._current()
        rows = RowsToSum(self.window, self._ranges(shares), plan.group_programs, "gradients", exchange.residuals())
        return exchange.pieces(rows), program_array(plan.root)

    def reduce(self, exchange: GradientExchange, shares: Sequence[Share], divisor: Array, out: Array | None) -> Array:
        """Sum this rank's ranges and divide by ``divisor``.

        Collective. Without ``out`` the result stands in this rank's first row, at its place in the row space; else in
        ``out``, the concatenation of the ranges. What has been summed behind the backward pass stands in the first row,
        for all peers, and is only divided.
        """
        if self._behind is not None and out is None:
            for span in (span for spans in self._behind.spans for span in spans):
                part = self.row(0)[span.start : span.stop]
                np.divide(part, divisor, out=part)
            return self.row(0)
        pieces, program = self.pieces(exchange, shares)
        result = self.row(0) if out is None else out
        for piece in pieces:
            start = piece.target if out is None else piece.position
            tree_sum(piece.rows, piece.first, program, divisor, result[start : start + piece.size])
        return result

    def replicate(self, exchange: GradientExchange, shares: Sequence[Share]) -> None:
        """Give the reduced ranges in the first row to all peers, unless they have them already. Collective."""
        if self._behind is None:
            exchange.replicate(self.row(0), self._ranges(shares))

    def _ranges(self, shares: Sequence[Share]) -> list[list[Span]]:
        return [[s for unit in self.layout.units for s in share.row_spans(unit.index)] for share in shares]

    def _current(self) -> RowsPlan:
        if self.plan is None:
            raise StateError("no gradient exists yet: call train or compute_gradients first")
        return self.plan

    def reserve(self, count: int) -> None:
        """Take the memory of a batch of ``count`` grains. Collective over all ranks where that is a new number."""
        needed = self.planned(count).rows * self.grid.node.size
        if count not in self._reserved:  # some data groups may have room for it that others have to make
            reserved, self._reserved = self._reserved, set()  # where this fails, rows of before may be gone
            with on_all_ranks(self.grid.world, "gradients"):
                self._reserve(needed)
            self._reserved = reserved | {count}
        self.window = self._storage[:needed]  # a rank's rows stand where the plan of this batch looks for them

    def _reserve(self, needed: int) -> None:
        if self._storage.shape[0] < needed:
            self._views.clear()
            self.window, held = self.window[:0], self._storage
            self._storage = self._storage[:0]
            if held.size:
                self.memory.free_shared("gradients", (held,))
            (self._storage,) = self.memory.shared("gradients", [(needed, self.stride)], self.dtype)

    def _target(self, row: int, unit: Unit) -> Any:
        key = (self._place(row), unit.index)
        if key not in self._views:
            self._views[key] = self.named.unit(unit, self._flat(row, unit))
        return self._views[key]


def _nothing(unit: Unit) -> None:
    """Rows need nothing when a unit's backward ends."""


def _no_target(unit: Unit) -> Any:
    raise RuntimeError("an absent grain has no gradient")
