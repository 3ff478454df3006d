"""Keep gradients in rows, copies of the whole gradient vector, and sum the rows of all ranks (DDP, ZeRO-1).

A rank computes a contiguous run of grains, or those that it claims. Rows are summed at the end of a step, or during its
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from mpizero.comm.reduce import RowRange, RowsToSum, program_array, tree_sum
from mpizero.errors import StateError
from mpizero.layout import Span
from mpizero.layout.batch import claimed_rows, contiguous_owners, contiguous_shares
from mpizero.layout.flat import Unit
from mpizero.layout.sum_tree import Folding, FoldStep, RowsPlan, rows_plan
from mpizero.parallel.batch.node_claims import NodeClaims
from mpizero.parallel.batch.redistribute import GlobalBatch, Grain
from mpizero.parallel.batch.step_scalars import Divisors
from mpizero.parallel.gradients.exchange import GradientExchange
from mpizero.parallel.gradients.gradient_views import GradientViews, MicroBatchSum, block_parts, largest_block
from mpizero.parallel.gradients.overlap import OverlappedReduction
from mpizero.parallel.gradients.reducer import Job, SumOperands, forget_plans
from mpizero.parallel.parameters.allocator import Allocator, on_all_ranks, paged
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.parallel.step_rules import ScratchUse, overlaps_reduction
from mpizero.types import Array


class RowBuffer:
    """Add up the gradients of this rank's grains in rows: a row is one copy of the whole gradient vector.

    Implements :class:`~mpizero.parallel.gradients.reducer.GradientReducer`. The rows of all ranks of a node are in one
    shared window. The sum over all ranks is written to this rank's first row, or to the array that ``shard`` returns.

    [Note: scratch] A grain whose gradient is added to a row at once (a right child in the tree) needs no row of its
    own, if its blocks end their backward passes one after the other. Then all blocks write their gradients to the same
    scratch array, as large as the gradients of the largest block, and each block's part is added to the row when the
    block has ended. Every element is added in the same order as without the scratch array. With several micro-batches
    to a grain, the first one of each grain is written to the grain's row, and those after it to the scratch array.

    Parameters
    ----------
    store : ParameterStore
        The parameters, with their layout, the process grid, the allocator of other memory, and the timeline.
    allocator : Allocator
        Allocates rows, in host memory or on a GPU.
    views : GradientViews
        Makes named views of gradients.
    exchange : GradientExchange
        Sends partial sums to the peers that own the elements.
    accumulate : int
        Number of micro-batches of a full grain.
    by_block : bool
        Whether it is reported when each block's gradients are complete, so that the sum may overlap with the backward
        pass.
    scratch : "grains", "micro-batches" or None
        Which gradients are written to a scratch array (see :func:`~mpizero.parallel.step_rules.scratch_use`).
    shard : callable, optional
        Returns the array to which the sums of the ranges that this rank owns are written, concatenated. None: they are
        written to this rank's first row.
    claims : NodeClaims, optional
        Tells which grains each rank of the node has claimed. None: no batch is claimed.
    """

    waves = False

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
        claims: NodeClaims | None = None,
    ) -> None:
        self.store, self.layout, self.grid, self.dtype = store, store.layout, store.grid, store.dtype
        self.allocator, self.exchange, self.accumulate = allocator, exchange, accumulate
        self._named, self._by_block, self._scratch_use, self._shard = views, by_block, scratch, shard
        self._ranges = [[s for unit in self.layout.units for s in p.row_spans(unit.index)] for p in store.peer_shares]
        self.stride = paged(self.layout.gradient_size * self.dtype.itemsize) // self.dtype.itemsize
        self.window: Array = np.zeros((0, self.stride), self.dtype)
        self._storage, self._scratch = self.window, self.window[:0].reshape(-1)
        apart = 1 if scratch else accumulate  # with scratch memory, micro-batches are added in their grain's row
        self._micro_batches = MicroBatchSum(allocator, self.layout.gradient_size, self.dtype, apart)
        self._views: dict[tuple[int | None, int, str | None], Any] = {}  # by row, unit and block; None is all blocks
        self._plans: dict[int, RowsPlan] = {}
        self._reserved: set[int] = set()
        self._plan: RowsPlan | None = None
        self.claims = claims
        self._claimed = 0  # number of grains of the batch, if its ranks claim them
        self.overlapped: OverlappedReduction | None = None
        store.progress.register("rows", self.poll)

    @property
    def overlaps(self) -> bool:
        """Tell whether rows are summed while the backward pass still fills them. Not collective."""
        peers, stages = self.grid.peers.size, self.grid.pipeline.size
        return self._by_block and overlaps_reduction(self.exchange.placement, peers, stages, self.exchange.codec)

    @property
    def largest(self) -> int:
        """The largest number of elements that could be in flight between peers at once; 0 if there is only one peer.

        It is the size of a row if the sum overlaps with the backward pass, else the number of peers times the size of
        the largest shard.
        """
        sizes = [sum(span.size for span in ranges) for ranges in self._ranges]
        if len(sizes) == 1:
            return 0
        return self.layout.gradient_size if self.overlaps else len(sizes) * max(sizes)

    def owners(self, count: int) -> list[int]:
        """Return, for each of ``count`` grains, the rank of ``grid.batch`` that computes it. Not collective."""
        return contiguous_owners(self.grid, count)

    def row(self, number: int) -> Array:
        """Return row ``number`` of this rank: one copy of the whole gradient vector. Not collective."""
        row: Array = self.window[self._place(number)]
        return row[: self.layout.gradient_size]

    def _place(self, number: int) -> int:
        return self.grid.node.rank * self._rows_a_rank + number

    @property
    def _rows_a_rank(self) -> int:
        rows: int = self.window.shape[0] // self.grid.node.size
        return rows

    # ------------------------------------------------------------------ micro-batches

    def jobs(self, batch: GlobalBatch, *, summed: bool) -> Iterable[Job]:
        """Return this rank's jobs, one for each micro-batch; they add up the gradients in this rank's rows.

        Collective over all ranks if there was no batch of as many grains before. ``summed`` tells whether the rows are
        summed after the jobs; then the sum may begin during the last job: see [Note: buckets of rows] in
        ``parallel/gradients/overlap.py``. If parameters are sharded, jobs without samples are appended, so that all
        ranks have equally many. If the grains of the batch are claimed, each part is when its first job is asked for.
        """
        self.finish()  # of a step that an error has broken off on all ranks
        self._plan, self.overlapped = None, None
        self._claimed = batch.count if batch.claimed else 0
        self.reserve(batch.count)
        if batch.claimed:
            return self._claimed_jobs(batch)
        self._plan = plan = self._planned(batch.count)
        if summed and self.overlaps:
            rows = (self.window, self.row(0))
            self.overlapped = OverlappedReduction(self.store, self.exchange, self._ranges, plan, rows)
        jobs: list[Job] = []
        for step in plan.folds[self.grid.place].folds:
            jobs += self._jobs_of(batch.grains[step.grain], step)
        if self.overlapped is not None and jobs:
            jobs[-1] = self._overlapping(jobs[-1], self.overlapped)
        absent = Job(None, 0, _no_target, _nothing, lambda unit, block: _no_target(unit))
        return jobs + [absent] * (self.rounds(batch.count) - len(jobs))

    def _claimed_jobs(self, batch: GlobalBatch) -> Iterator[Job]:
        assert self.claims is not None
        folding = Folding(batch.count, self._rows_a_rank)
        while part := self.claims.claim(self._rows_a_rank - len(folding.held)):
            for grain in part:
                yield from self._jobs_of(batch.grains[grain], folding.add(grain))

    def _jobs_of(self, grain: Grain, step: FoldStep) -> Iterator[Job]:
        """Yield the jobs of the micro-batches of a grain, whose gradients are added as ``step`` says."""
        for number in range(len(grain.micro_batches)):
            row = None if number and self._scratch_use else step.row
            ended = partial(self._ended, step, number, number == len(grain.micro_batches) - 1)
            target, parts = partial(self._target, row), partial(self._parts, row)
            yield Job(grain, number, target, _nothing, parts, ended, in_scratch=row is None)

    @staticmethod
    def _overlapping(job: Job, overlapped: OverlappedReduction) -> Job:
        """Return ``job``, the last one of a step, changed so that ``overlapped`` exchanges what is complete."""

        def ended(unit: Unit, block: str) -> None:
            assert job.ended is not None
            job.ended(unit, block)
            overlapped.ended((block,))

        return job._replace(ended=ended, done=lambda unit: overlapped.ended(unit.blocks))

    def rounds(self, count: int) -> int:
        """Return how many micro-batches every rank must compute or join, for a batch of ``count`` grains.

        Not collective. It is 0 if parameters are not sharded, because then no rank waits for another's micro-batch.
        """
        return -(-count // self.grid.data.size) * self.accumulate if self.store.sharded else 0

    def poll(self) -> None:
        """Let partial sums that are in flight between peers progress. Not collective."""
        if self.overlapped is not None:
            self.overlapped.poll()

    def finish(self) -> None:
        """Wait for the sums that the jobs have begun. Collective over the data group if there are any."""
        if self.overlapped is not None:
            self.overlapped.finish()

    def _ended(self, step: FoldStep, number: int, last: bool, unit: Unit, block: str) -> None:
        """Add the gradients of ``block``, from micro-batch ``number``, to the sum over the grain of ``step``.

        After the grain's last micro-batch, that sum is added to the rows that ``step`` names.
        """
        base, later = self.layout.gradient_bases[unit.index], number > 0 and self._scratch_use is not None
        parts = self._parts(None if later else step.row, unit, block)
        for span, part in zip(unit.gradient_ranges[block], parts, strict=True):
            start, stop = span.shift(base)
            if later:
                assert step.row is not None
                own = self.row(step.row)[start:stop]
                own += part
                part = own
            self._micro_batches.add(part, start, number)
            if last:
                self._micro_batches.finish(part, start)
                for target in step.targets:
                    total = self.row(target)[start:stop]
                    total += part
                    part = total

    def _parts(self, row: int | None, unit: Unit, block: str) -> list[Array]:
        """Return where the gradients of ``block`` are written, an array for each range: in a row, or in the scratch."""
        key = (None if row is None else self._place(row), unit.index, block)
        if key not in self._views:
            if row is None:
                self._views[key] = block_parts(unit, block, self._scratch)
            else:
                own = self._unit(row, unit)
                self._views[key] = [own[span.start : span.stop] for span in unit.gradient_ranges[block]]
        found: list[Array] = self._views[key]
        return found

    def _unit(self, row: int, unit: Unit) -> Array:
        base = self.layout.gradient_bases[unit.index]
        return self.row(row)[base : base + unit.gradients]

    def _target(self, row: int | None, unit: Unit) -> Any:
        key = (None if row is None else self._place(row), unit.index, None)
        if key not in self._views:
            buffer = self._scratch if row is None else self._unit(row, unit)
            self._views[key] = self._named.unit(unit, buffer, by_block=row is None)
        return self._views[key]

    # ------------------------------------------------------------------ sums

    def operands(self) -> SumOperands:
        """Return the rows of all ranks of the node, which a fused update sums. Collective over the node."""
        self._meet()
        return SumOperands(self.window, program_array(self._current().root), self.row(0))

    def sum(self, divisors: Divisors) -> Array:
        """Sum the rows of all ranks over the ranges that this rank owns, divide by ``divisors``, and return the result.

        Collective over the data group. The result is the array that ``shard`` returns, else this rank's first row. If
        the rows were summed during the backward pass, the first row already has the sums of the ranges of all peers,
        and all of them are divided.
        """
        if self.overlapped is not None:
            for span in (span for spans in self._ranges for span in spans):
                for part, averaged in span.split(self.layout.averages):
                    values = self.row(0)[part.start : part.stop]
                    np.divide(values, divisors.of(averaged=averaged), out=values)
            return self.row(0)
        self._meet()
        pieces, program = self._pieces()
        result = self.row(0) if self._shard is None else self._shard()
        for piece in pieces:
            start = piece.target if self._shard is None else piece.position
            for part, averaged in Span(piece.target, piece.target + piece.size).split(self.layout.averages):
                inside, divisor = part.start - piece.target, divisors.of(averaged=averaged)
                out = result[start + inside : start + inside + part.size]
                tree_sum(piece.rows, piece.first + inside, program, divisor, out)
        return result

    def replicate(self) -> None:
        """Send the sums of every peer to all peers, if all of them need the sums and do not have them yet.

        Collective over the data group.
        """
        if self.exchange.replicated and self.overlapped is None:
            self.exchange.replicate(self.row(0), self._ranges)

    def local_sum(self) -> Array:
        """Return the sum of the gradients of this rank's grains, as a new array like a row. Not collective."""
        held = [row for _, row in self._current().folds[self.grid.place].held]
        total = np.zeros(self.layout.gradient_size, self.dtype)
        for number, row in enumerate(held):
            total = self.row(row).copy() if number == 0 else total + self.row(row)
        return total

    def _meet(self) -> None:
        """Wait until the rows of all ranks of the node are complete. Collective over the node."""
        with self.store.timeline.span("reduction", "rows"):
            self.store.memory.barrier("rows")
        if self._claimed and self._plan is None:
            assert self.claims is not None
            assigned, groups = self.claims.assigned(self._claimed), self.grid.group_sizes
            self._plan = rows_plan(assigned, groups, self._claimed, rows=self._rows_a_rank)

    def _pieces(self) -> tuple[Iterator[RowRange], Array]:
        """Exchange partial sums; return an iterator over the pieces that this rank must sum, and the tree program.

        Collective over the data group. The program says which rows of a piece are added in which order.
        """
        plan, residuals = self._current(), self.exchange.residuals()
        rows = RowsToSum(self.window, self._ranges, plan.group_programs, "gradients", residuals, self.exchange.exact)
        return self.exchange.pieces(rows), program_array(plan.root)

    def _current(self) -> RowsPlan:
        if self._plan is None:
            raise StateError("no gradient exists yet: call train or compute_gradients first")
        return self._plan

    def _planned(self, count: int) -> RowsPlan:
        """Return the plan that says in which order, and by which ranks, the gradients of ``count`` grains are added."""
        if count not in self._plans:
            shares, groups = contiguous_shares(self.grid, count), self.grid.group_sizes
            forget_plans(self._plans)
            self._plans[count] = rows_plan(shares, groups, count, scratch=self._scratch_use == "grains")
        return self._plans[count]

    # ------------------------------------------------------------------ memory

    def reserve(self, count: int) -> None:
        """Allocate the rows for a batch of ``count`` grains, and the scratch array if this rank writes to it.

        Collective over all ranks if there was no batch of as many grains before.
        """
        plan, rows = self._planned(count), self._planned(count).rows
        most = rows if self.claims is None else max(rows, claimed_rows(self.grid, count))
        needed = (most if self._claimed else rows) * self.grid.node.size
        if count not in self._reserved:  # some data groups may have room for it that others have to make
            own, several = plan.folds[self.grid.place], self._scratch_use == "micro-batches"
            # A grain of several micro-batches, perhaps one that this rank only claims, is added in scratch memory.
            scratch = own.uses_scratch or (several and (len(own.folds) > 0 or self.claims is not None))
            reserved, self._reserved = self._reserved, set()  # where this fails, earlier rows may be gone
            with on_all_ranks(self.grid.world, "gradients"):
                self._take(most * self.grid.node.size)
                if scratch and not self._scratch.size:
                    self._scratch = self.allocator.private("gradients", largest_block(self.layout), self.dtype)
            self._reserved = reserved | {count}
        self.window = self._storage[:needed]  # a rank's rows stand where the plan of this batch looks for them

    def _take(self, needed: int) -> None:
        if self._storage.shape[0] < needed:
            self._views.clear()
            self.window, held = self.window[:0], self._storage
            self._storage = self._storage[:0]
            if held.size:
                self.allocator.free_shared("gradients", (held,))
            (self._storage,) = self.allocator.shared("gradients", [(needed, self.stride)], self.dtype)


def _nothing(unit: Unit) -> None:
    """Do nothing: a job without samples has no gradients to add."""


def _no_target(unit: Unit) -> Any:
    raise RuntimeError("an absent grain has no gradient")
