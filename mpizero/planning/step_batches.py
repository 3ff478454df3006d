"""Assign the micro-batches of a step to ranks, and count the samples that they send to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mpizero.layout import Grains
from mpizero.layout.batch import claimed_rows, contiguous_owners, contiguous_shares, node_blocks, wave_owners
from mpizero.layout.sum_tree import RowsPlan, WavePlan, claim_parts, rows_plan, wave_plan
from mpizero.sharding.batch import starts_of

if TYPE_CHECKING:
    from mpizero.planning.planned_grid import PlannedGrid
    from mpizero.sharding.config import ScratchUse


@dataclass(frozen=True)
class StepBatches:
    """Assign the grains of a global batch to the ranks of a data group.

    Attributes
    ----------
    grains : Grains
        The grains of the global batch.
    accumulate : int
        Number of micro-batches in a full grain.
    waves : bool
        Whether grains are computed in waves.
    scratch : "grains", "micro-batches" or None
        Which gradients are written to scratch memory (see :func:`~mpizero.sharding.config.scratch_use`).
    claimed : bool
        Whether the ranks of a node claim its grains. Then work and sums are planned as if grains were assigned before
        the step, but memory as any claims may need it.
    """

    grains: Grains
    accumulate: int
    waves: bool
    scratch: ScratchUse
    claimed: bool = False

    def rows(self, grid: PlannedGrid) -> int:
        """Return the number of rows that every rank allocates, if grains are not computed in waves. Not collective."""
        rows = self.rows_plan(grid).rows
        return max(rows, claimed_rows(grid, self.grains.count)) if self.claimed else rows

    def most_grains(self, grid: PlannedGrid) -> int:
        """Return the largest number of grains, or of context ranks' parts of them, that a rank may compute."""
        if self.claimed:
            return max(map(len, node_blocks(grid, self.grains.count)))
        return -(-self.grains.count * grid.context.size // grid.data.size)

    def claimed_bytes(self, grid: PlannedGrid, sample_bytes: Sequence[int]) -> int:
        """Return the bytes of a node's memory for samples and claims; 0 if its ranks claim none. Not collective.

        ``sample_bytes`` holds the bytes of one sample in each array.
        """
        if not self.claimed:
            return 0
        block = node_blocks(grid, self.grains.count)[grid.nodes.index(grid.node_ranks)]
        start, stop = (min(grain * self.grains.size, self.grains.samples) for grain in (block.start, block.stop))
        parts = len(claim_parts(block, grid.node.size))
        return starts_of(parts, [(stop - start) * size for size in sample_bytes])[-1]

    def rows_plan(self, grid: PlannedGrid) -> RowsPlan:
        """Return the plan by which gradients are summed, if grains are not computed in waves. Not collective.

        All ranks whose groups have the sizes in ``grid`` have the same plan. Each context rank's part of a grain counts
        as a grain.
        """
        count, key = self.grains.count * grid.context.size, _kind(grid)
        if key not in self._rows_plans:
            shares = contiguous_shares(grid, count)
            self._rows_plans[key] = rows_plan(shares, grid.group_sizes, count, scratch=self.scratch == "grains")
        return self._rows_plans[key]

    def wave_plan(self, grid: PlannedGrid) -> WavePlan:
        """Return the plan by which gradients are summed, if grains are computed in waves. Not collective.

        All ranks whose groups have the sizes in ``grid`` have the same plan. Each context rank's part of a grain counts
        as a grain.
        """
        if (key := _kind(grid)) not in self._wave_plans:
            self._wave_plans[key] = wave_plan(self.grains.count * grid.context.size, grid.group_sizes)
        return self._wave_plans[key]

    @cached_property
    def _rows_plans(self) -> dict[tuple[int, ...], RowsPlan]:
        return {}

    @cached_property
    def _wave_plans(self) -> dict[tuple[int, ...], WavePlan]:
        return {}

    def jobs(self, grid: PlannedGrid) -> tuple[int, ...]:
        """Return the number of samples in each micro-batch of the rank of ``grid``, in the order of computation.

        For a micro-batch that only other ranks have the number is 0; this rank then only joins their collectives. Not
        collective.
        """
        contexts, count = grid.context.size, self.grains.count
        found: list[int] = []
        if self.waves:
            workers, parts = grid.data.size, count * contexts
            for first in range(0, parts, workers):
                number = first + grid.place
                sizes = self.micro_batches(number // contexts) if number < parts else ()
                found += [*sizes, *[0] * (self.accumulate - len(sizes))]
            return tuple(found)
        for number in contiguous_shares(grid, count * contexts)[grid.place]:
            found += self.micro_batches(number // contexts)
        return tuple(found)

    def micro_batches(self, grain: int) -> tuple[int, ...]:
        """Return the number of samples in each micro-batch of a grain. Not collective."""
        return tuple(part.stop - part.start for part in self.grains.micro_batches(grain, self.accumulate))

    def owners(self, grid: PlannedGrid) -> Sequence[int]:
        """Return, for each grain, the rank of ``grid.batch`` that computes it. Not collective."""
        return (wave_owners if self.waves else contiguous_owners)(grid, self.grains.count)

    def samples_moved(self, grid: PlannedGrid) -> int:
        """Return how many samples the rank of ``grid`` sends to the ranks that compute them.

        Not collective. At first each rank is assumed to have a contiguous run of whole grains; the runs are as equal as
        possible.
        """
        ranks, mine = grid.batch.size, grid.batch.rank
        own = self.grains.samples_of(mine, ranks)
        owners, moved = self.owners(grid), 0
        for grain in range(own.start // self.grains.size, self.grains.count):
            span = self.grains.span(grain)
            if span.start >= own.stop:
                break
            if owners[grain] != mine:
                moved += min(span.stop, own.stop) - max(span.start, own.start)
        return moved

    @cached_property
    def largest(self) -> int:
        """Number of samples in the largest micro-batch."""
        return max(
            (size for grain in range(min(1, self.grains.count)) for size in self.micro_batches(grain)), default=0
        )


def _kind(grid: PlannedGrid) -> tuple[int, ...]:
    """Return a key that is equal for ranks for which grains are assigned, and gradients summed, in the same way."""
    return grid.data.size, grid.batch.size, grid.context.size, *grid.group_sizes
