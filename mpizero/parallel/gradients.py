"""Two ways of holding gradients until their owners have summed them: whole rows, or a ring of units.

Rows: every rank folds contiguous grains into rows of the whole gradient, summed once at the end (DDP, ZeRO-1, and every
strategy whose gradients stay local for a while). Ring: grains come in waves, and each unit's gradient is summed into
its owners' stacks as soon as its backward ends (ZeRO-2 and 3). The tree is the same, so the bits are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.comm import ProcessGrid
from mpizero.comm.timeline import Timeline
from mpizero.comm.turns import Arriving, Piece, program_array, tree_sum
from mpizero.layout import FlatLayout, Grains, RowsPlan, Unit, Wave, WavePlan, rows_plan, wave_plan
from mpizero.layout.flat import views
from mpizero.parallel.dealing import GlobalBatch, Grain
from mpizero.parallel.feedback import GradientExchange
from mpizero.parallel.memory import PAGE, Memory
from mpizero.parallel.ownership import Share
from mpizero.types import Array


class Job(NamedTuple):
    """One micro-batch that a rank takes part in; the jobs of a step are done in order, unit by unit.

    Attributes
    ----------
    grain : Grain or None
        What is computed; None where the rank has nothing to compute but others need it in their collectives.
    number : int
        Which of the grain's micro-batches.
    target : callable
        Lends the views that a unit's gradients are written to.
    done : callable
        Is told when they are; collective over the data group where gradients are sharded.
    """

    grain: Grain | None
    number: int
    target: Callable[[Unit], Any]
    done: Callable[[Unit], None]


def contiguous_owners(grid: ProcessGrid, count: int) -> list[int]:
    """Return the rank of ``grid.batch`` that computes each of ``count`` grains: contiguous, node after node.

    The ranks of a context group compute a grain together, each its places of the sequence.
    """
    contexts = grid.context.size
    order = grid.order if contexts == 1 else range(grid.batch.size)
    owner = [0] * count
    for position, rank in enumerate(order):
        for grain in Grains(count, 1).dealt(position, grid.batch.size):
            owner[grain] = rank
    return owner


def contiguous_shares(grid: ProcessGrid, count: int) -> list[range]:
    """Return the grains of each place of ``grid.data``, as :func:`contiguous_owners` deals them.

    With contexts, ``count`` counts each part of a grain: part c of grain g is number ``c * (count / contexts) + g``, so
    that a rank's are contiguous.
    """
    contexts, whole = grid.context.size, count // grid.context.size
    shares = []
    for place in range(grid.data.size):
        data, context = divmod(place, contexts)
        own = Grains(whole, 1).dealt(data, grid.batch.size)
        shares.append(range(context * whole + own.start, context * whole + own.stop))
    return shares


class GradientViews:
    """Named views of gradient buffers; frozen parameters get a scratch place whose values nobody reads."""

    def __init__(self, layout: FlatLayout, memory: Memory, dtype: Any) -> None:
        frozen = max((e.spec.size for e in layout.entries if e.gradient < 0), default=0)
        self.scratch = memory.private("buffers", frozen, dtype)
        self.layout = layout

    def unit(self, unit: Unit, buffer: Array) -> dict[str, Any]:
        """Return nested views, by block, of a buffer that holds the gradient space of ``unit``."""
        result = {}
        for block in unit.blocks:
            entries = [entry for entry in unit.entries if entry.block == block]
            tree = views(buffer, [(e.local_name, e.gradient, e.spec.shape) for e in entries if e.gradient >= 0])
            frozen = views(self.scratch, [(e.local_name, 0, e.spec.shape) for e in entries if e.gradient < 0])
            result[block] = _united(tree, frozen)
        return result


def _united(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    for name, value in second.items():
        first[name] = _united(first[name], value) if isinstance(first.get(name), dict) else value
    return first


class _MicroFold:
    """Add the micro-batches of a grain in order, in one buffer besides the target, made when it is first needed."""

    def __init__(self, memory: Memory, size: int, dtype: Any, accumulate: int) -> None:
        self.memory, self.size, self.dtype = memory, size if accumulate > 1 else 0, dtype
        self.partial: Array = np.empty(0, dtype)

    def fold(self, target: Array, base: int, number: int) -> None:
        """Add micro-batch ``number``, whose gradient stands in ``target``, to the running sum."""
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
        """Write the sum to ``target``."""
        if self.partial.size:
            target[:] = self.partial[base : base + target.size]


class GradientRows:
    """Whole gradients of contiguous grains in rows, in the window of the group.

    Collective methods are collective over the data group.
    """

    def __init__(
        self, layout: FlatLayout, grid: ProcessGrid, memory: Memory, dtype: Any, accumulate: int, named: GradientViews
    ) -> None:
        self.layout, self.grid, self.memory, self.named = layout, grid, memory, named
        self.dtype = np.dtype(dtype)
        self.stride = -(-layout.gradient_size * self.dtype.itemsize // PAGE) * PAGE // self.dtype.itemsize
        self.window: Array = np.zeros((0, self.stride), dtype)
        self._storage = self.window
        self.micro = _MicroFold(memory, layout.gradient_size, dtype, accumulate)
        self._views: dict[tuple[int, int], Any] = {}
        self._plans: dict[int, RowsPlan] = {}
        self.plan: RowsPlan | None = None
        self.one = np.ones(1, dtype)

    def owners(self, count: int) -> list[int]:
        """Return the rank of ``grid.batch`` that computes each of ``count`` grains."""
        return contiguous_owners(self.grid, count)

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

    def jobs(self, batch: GlobalBatch, rounds: int) -> list[Job]:
        """Return this rank's micro-batches, whose gradients are folded as they come.

        Collective over the node where rows have to be made. ``rounds`` is the number of jobs that every rank takes
        part in; 0 where nothing is gathered, so that absent grains cost nothing.
        """
        self.plan = plan = self.planned(batch.count)
        self._reserve(plan.rows)
        jobs: list[Job] = []
        for index, row, additions in plan.folds[self.grid.place].folds:
            grain = batch.grains[index]
            last = len(grain.micro_batches) - 1
            for number in range(last + 1):
                done = partial(self._done, row, number, additions if number == last else None)
                jobs.append(Job(grain, number, partial(self._target, row), done))
        return jobs + [Job(None, 0, _no_target, _nothing)] * (rounds - len(jobs))

    def _done(self, row: int, number: int, additions: Sequence[tuple[int, int]] | None, unit: Unit) -> None:
        """Fold one unit's part of a row; ``additions`` come with the last micro-batch of a grain."""
        base = self.layout.gradient_bases[unit.index]
        part = self.row(row)[base : base + unit.gradients]
        self.micro.fold(part, base, number)
        if additions is not None:
            self.micro.finish(part, base)
            for target, source in additions:
                total = self.row(target)[base : base + unit.gradients]
                total += self.row(source)[base : base + unit.gradients]

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
        ranges = [[s for unit in self.layout.units for s in share.row_spans(unit.index)] for share in shares]
        pieces = exchange.pieces(self.window, ranges, plan.group_programs, "gradients", exchange.residuals())
        return pieces, program_array(plan.root)

    def reduce(self, exchange: GradientExchange, shares: Sequence[Share], divisor: Array, out: Array | None) -> Array:
        """Sum this rank's ranges and divide by ``divisor``.

        Collective. Without ``out`` the result stands in this rank's first row, at its place in the row space; else in
        ``out``, the concatenation of the ranges.
        """
        pieces, program = self.pieces(exchange, shares)
        result = self.row(0) if out is None else out
        for piece in pieces:
            start = piece.target if out is None else piece.position
            tree_sum(piece.rows, piece.first, program, divisor, result[start : start + piece.size])
        return result

    def replicate(self, exchange: GradientExchange, shares: Sequence[Share]) -> None:
        """Give the reduced ranges in the first row to all peers. Collective."""
        exchange.replicate(
            self.row(0), [[s for unit in self.layout.units for s in share.row_spans(unit.index)] for share in shares]
        )

    def _current(self) -> RowsPlan:
        if self.plan is None:
            raise RuntimeError("no gradient exists yet: call train or compute_gradients first")
        return self.plan

    def _reserve(self, rows: int) -> None:
        needed = rows * self.grid.node.size
        if self._storage.shape[0] < needed:
            if self._storage.size:
                self.memory.free_shared("gradients", (self._storage,))
            self._views.clear()
            (self._storage,) = self.memory.shared("gradients", [(needed, self.stride)], self.dtype)
        self.window = self._storage[:needed]  # a rank's rows stand where the plan of this batch looks for them

    def _target(self, row: int, unit: Unit) -> Any:
        key = (self._place(row), unit.index)
        if key not in self._views:
            base = self.layout.gradient_bases[unit.index]
            self._views[key] = self.named.unit(unit, self.row(row)[base : base + unit.gradients])
        return self._views[key]


class _Coming(NamedTuple):
    """Partial sums on their way to the stack: where their ranges begin there, and what is done with them."""

    arriving: Arriving
    base: int
    programs: Sequence[tuple[int, Array]]
    arrivals: int


class GradientRing:
    """Units of gradients in a small ring, summed into the owners' stacks wave by wave."""

    def __init__(
        self, layout: FlatLayout, grid: ProcessGrid, memory: Memory, dtype: Any, accumulate: int, named: GradientViews
    ) -> None:
        self.layout, self.grid, self.memory, self.named = layout, grid, memory, named
        self.dtype = np.dtype(dtype)
        self.shares = tuple(Share(layout, rank, grid.data.size) for rank in grid.peer_ranks)
        self.share = Share(layout, grid.data.rank, grid.data.size)
        largest = max((unit.gradients for unit in layout.units), default=0)
        slots = 2 if grid.node.size > 1 else 1
        stride = -(-largest * self.dtype.itemsize // PAGE) * PAGE // self.dtype.itemsize
        self.slots = memory.shared("gradients", [(grid.node.size, stride)] * slots, dtype)
        self.micro = _MicroFold(memory, layout.gradient_size, dtype, accumulate)
        self.accumulate = accumulate
        self.stack = memory.private("gradients", (1, self.share.gradient_size), dtype)
        self._plans: dict[int, WavePlan] = {}
        self._views: dict[tuple[int, int], Any] = {}
        self._next = 0
        self._coming: _Coming | None = None
        self.one = np.ones(1, dtype)
        #: Is told when units are summed.
        self.timeline = Timeline()

    def owners(self, count: int) -> list[int]:
        """Return the rank of ``grid.batch`` that computes each of ``count`` grains: one after the other, in waves."""
        order = self.grid.order if self.grid.context.size == 1 else range(self.grid.batch.size)
        return [order[grain % len(order)] for grain in range(count)]

    def planned(self, count: int) -> WavePlan:
        """Return the plan for ``count`` grains."""
        if count not in self._plans:
            self._plans[count] = wave_plan(count, self.grid.group_sizes)
        return self._plans[count]

    def jobs(self, batch: GlobalBatch, exchange: GradientExchange) -> list[Job]:
        """Return the micro-batches of all waves. Not collective, but the jobs are.

        When they are done and :meth:`finish` has returned, row ``planned(count).root`` of the stack is the sum over
        this rank's ranges.
        """
        self.finish()  # of a step that an error has broken off on all ranks
        plan = self.planned(batch.count)
        if self.stack.shape[0] < plan.rows:
            self.memory.release("gradients", self.stack)
            self.stack = self.memory.private("gradients", (plan.rows, self.share.gradient_size), self.dtype)
        jobs = []
        for wave in plan.waves:
            index = wave.grains[self.grid.place]
            grain = None if index is None else batch.grains[index]
            count = 0 if grain is None else len(grain.micro_batches)
            for number in range(self.accumulate):
                done = partial(self._done, grain, number, wave, exchange)
                jobs.append(Job(grain if number < count else None, number, self._target, done))
        return jobs

    def _done(self, grain: Grain | None, number: int, wave: Wave, exchange: GradientExchange, unit: Unit) -> None:
        base = self.layout.gradient_bases[unit.index]
        target = self.slots[self._next][self.grid.node.rank][: unit.gradients]
        if grain is not None and number < len(grain.micro_batches):
            self.micro.fold(target, base, number)
        if number == self.accumulate - 1:
            if grain is not None:
                self.micro.finish(target, base)
            begun = self.timeline.begin()
            self._reduce(unit, wave, exchange)
            self.timeline.end("reduction", unit, begun)

    def _target(self, unit: Unit) -> Any:
        key = (self._next, unit.index)
        if key not in self._views:
            buffer = self.slots[self._next][self.grid.node.rank][: unit.gradients]
            self._views[key] = self.named.unit(unit, buffer)
        return self._views[key]

    @property
    def in_flight(self) -> bool:
        """Whether sums of a unit are on their way between groups. Not collective."""
        return self._coming is not None

    def poll(self) -> None:
        """Let sums that are on their way move on. Not collective."""
        if self._coming is not None:
            self._coming.arriving.test()

    def finish(self) -> None:
        """Wait for what is on its way and add it to the stack. Not collective; see [Note: sums behind computing]."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            for piece in coming.arriving.pieces():
                self._merge(piece, coming.base + piece.position, coming.programs, coming.arrivals)

    def _reduce(self, unit: Unit, wave: Wave, exchange: GradientExchange) -> None:
        """Sum one unit's gradients of this wave into the stacks of its owners, but for what is on its way. Collective.

        [Note: sums behind computing] Between groups of ranks the last turn of a unit's exchange is left on its way
        while the next unit computes; layers let it move on whenever they take a parameter. It is waited for, and added
        to the stack, before anything else of the ring: so there is one turn at a time, in the order of units and waves.
        """
        self.finish()
        self.memory.barrier("unit gradients")
        rows = self.slots[self._next]
        ranges = [share.gradient_spans[unit.index] for share in self.shares]
        base = self.share.gradient_offsets[unit.index]
        programs = [(row, program_array(program)) for row, program in wave.merges]
        if exchange.peers.size == 1:
            for piece in exchange.pieces(rows, ranges, wave.group_programs, "unit gradients"):
                self._merge(piece, base + piece.position, programs, wave.arrivals)
        else:
            residuals = exchange.residuals(unit.index)
            for turn in exchange.turns(rows, ranges, wave.group_programs, "unit gradients", residuals):
                self.finish()
                self._coming = _Coming(exchange.begin_turn(turn), base, programs, wave.arrivals)
        self._next = (self._next + 1) % len(self.slots)

    def _merge(self, piece: Piece, at: int, programs: Sequence[tuple[int, Array]], arrivals: int) -> None:
        fused = kernels.backend(self.stack).fused
        rows = piece.rows[:arrivals]
        for row, program in programs:
            out = self.stack[row, at : at + piece.size]
            fused.tree_sum(rows, piece.first, self.stack, at, program, self.one, out, 0, piece.size)


def _nothing(unit: Unit) -> None:
    """Rows need nothing when a unit's backward ends."""


def _no_target(unit: Unit) -> Any:
    raise RuntimeError("an absent grain has no gradient")
