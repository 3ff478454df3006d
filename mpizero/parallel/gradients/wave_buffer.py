"""What gradients are written to, and a ring of units that holds them until their owners have summed them.

Ring: grains come in waves, and each unit's gradient is summed into its owners' stacks as soon as its backward ends
(ZeRO-2 and 3). The other way is to fold contiguous grains into rows of the whole gradient (``rows.py``: DDP, ZeRO-1,
and every strategy whose gradients stay local for a while). The tree is the same, so the bits are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpizero import kernels
from mpizero.comm import ProcessGrid
from mpizero.comm.agreement import all_ranks
from mpizero.comm.recording.timeline import Timeline
from mpizero.comm.reduce.exact import RowsToSum
from mpizero.comm.reduce.segments import Arriving, Piece, program_array
from mpizero.layout import FlatLayout, Unit, Wave, WavePlan, wave_plan
from mpizero.layout.flat import views
from mpizero.parallel.batch.redistribute import GlobalBatch, Grain
from mpizero.parallel.gradients.exchange import GradientExchange
from mpizero.parallel.gradients.unwritten_gradients import LentGradients
from mpizero.parallel.parameters.allocator import Memory, paged
from mpizero.parallel.parameters.shards import Share
from mpizero.parallel.step_rules import wave_buffers
from mpizero.types import Array


class Allocator(Protocol):
    """What gives arrays and counts them: :class:`mpizero.parallel.parameters.allocator.Memory`, or a GPU."""

    def private(self, kind: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return a zeroed array of this rank alone. Not collective."""

    def release(self, kind: str, array: Array) -> None:
        """Stop counting a private array that its owner drops. Not collective."""

    def shared(self, kind: str, shapes: Sequence[tuple[int, ...]], dtype: Any) -> tuple[Array, ...]:
        """Return zeroed arrays that all ranks of the node read and write. Collective over the node."""

    def free_shared(self, kind: str, arrays: Sequence[Array]) -> None:
        """Give back what :meth:`shared` returned. Collective over the node."""


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
    flat : callable
        Gives all gradients of a unit as one array, when they are written.
    ended : callable or None
        Is told of every block whose gradients are complete, before its unit's are, if that is of use; collective over
        the data group then, as ``done`` is.
    """

    grain: Grain | None
    number: int
    target: Callable[[Unit], Any]
    done: Callable[[Unit], None]
    flat: Callable[[Unit], Array]
    ended: Callable[[str], None] | None = None


class GradientViews:
    """Named views of gradient buffers; frozen parameters get a scratch place whose values nobody reads."""

    def __init__(self, layout: FlatLayout, memory: Allocator, dtype: Any) -> None:
        self.scratch = memory.private("buffers", layout.largest_frozen, dtype)
        self.layout = layout

    def unit(self, unit: Unit, buffer: Array) -> dict[str, Any]:
        """Return nested views, by block, of a buffer that holds the gradient space of ``unit``."""
        result = {}
        for block in unit.blocks:
            entries = [entry for entry in unit.entries if entry.block == block]
            tree = views(buffer, [(e.local_name, e.gradient, e.spec.shape) for e in entries if e.gradient >= 0])
            frozen = views(self.scratch, [(e.local_name, 0, e.spec.shape) for e in entries if e.gradient < 0])
            result[block] = LentGradients(_united(tree, frozen))
        return result


def _united(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    for name, value in second.items():
        first[name] = _united(first[name], value) if isinstance(first.get(name), dict) else value
    return first


class MicroFold:
    """Add the micro-batches of a grain in order, in one buffer besides the target, made when it is first needed."""

    def __init__(self, memory: Allocator, size: int, dtype: Any, accumulate: int) -> None:
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
        stride = paged(layout.largest_gradient * self.dtype.itemsize) // self.dtype.itemsize
        self.slots = memory.shared("gradients", [(grid.node.size, stride)] * wave_buffers(grid.node.size), dtype)
        self.micro = MicroFold(memory, layout.gradient_size, dtype, accumulate)
        self.accumulate = accumulate
        self.stack = memory.private("gradients", (1, self.share.gradient_size), dtype)
        self._plans: dict[int, WavePlan] = {}
        self._views: dict[tuple[int, int], Any] = {}
        self._next = 0
        self._coming: _Coming | None = None
        self.one = np.ones(1, dtype)
        #: Is told when units are summed.
        self.timeline = Timeline()

    def planned(self, count: int) -> WavePlan:
        """Return the plan for ``count`` grains."""
        if count not in self._plans:
            self._plans[count] = wave_plan(count, self.grid.group_sizes)
        return self._plans[count]

    def jobs(self, batch: GlobalBatch, exchange: GradientExchange) -> list[Job]:
        """Return the micro-batches of all waves. Collective over the data group, as the jobs are.

        When they are done and :meth:`finish` has returned, row ``planned(count).root`` of the stack is the sum over
        this rank's ranges.
        """
        self.finish()  # of a step that an error has broken off on all ranks
        plan = self.planned(batch.count)
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
                done = partial(self._done, grain, number, wave, exchange)
                jobs.append(Job(grain if number < count else None, number, self._target, done, self._current))
        return jobs

    def _current(self, unit: Unit) -> Array:
        """Return this rank's place in the ring for the unit that is computed now."""
        place: Array = self.slots[self._next][self.grid.node.rank][: unit.gradients]
        return place

    def _done(self, grain: Grain | None, number: int, wave: Wave, exchange: GradientExchange, unit: Unit) -> None:
        base, target = self.layout.gradient_bases[unit.index], self._current(unit)
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
            self._views[key] = self.named.unit(unit, self._current(unit))
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
        to_sum = RowsToSum(rows, ranges, wave.group_programs, "unit gradients", exchange.residuals(unit.index))
        if exchange.peers.size == 1:
            for piece in exchange.pieces(to_sum):
                self._merge(piece, base + piece.position, programs, wave.arrivals)
        else:
            for turn in exchange.turns(to_sum):
                self.finish()
                self._coming = _Coming(exchange.begin_turn(turn), base, programs, wave.arrivals)
        self._next = (self._next + 1) % len(self.slots)

    def _merge(self, piece: Piece, at: int, programs: Sequence[tuple[int, Array]], arrivals: int) -> None:
        fused = kernels.backend(self.stack).fused
        rows = piece.rows[:arrivals]
        for row, program in programs:
            out = self.stack[row, at : at + piece.size]
            fused.tree_sum(rows, piece.first, self.stack, at, program, self.one, out, 0, piece.size)
