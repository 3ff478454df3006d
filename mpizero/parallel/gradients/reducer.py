"""Define what the engine asks of gradients: jobs that write them, and their exact sum over the data ranks.

Two classes implement it. :class:`~mpizero.parallel.gradients.row_buffer.RowBuffer` keeps whole gradients of contiguous
grains in rows (DDP, ZeRO-1, and every strategy whose gradients stay local for a while).
:class:`~mpizero.parallel.gradients.wave_buffer.WaveBuffer` keeps the gradients of one unit, and sums them into shards
as soon as the unit's backward pass ends (ZeRO-2 and 3). Both sum by the same tree, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mpizero.layout import Unit
from mpizero.parallel.batch.redistribute import GlobalBatch, Grain
from mpizero.types import Array


class Job(NamedTuple):
    """Describe one micro-batch that a rank takes part in; the jobs of a step are done in order, unit by unit.

    Attributes
    ----------
    grain : Grain or None
        The samples; None where the rank has nothing to compute but others need it in their collectives.
    number : int
        Which of the grain's micro-batches.
    target : callable
        Returns the views that a unit's gradients are written to.
    done : callable
        Called when they are written; collective over the data group where gradients are sharded.
    flat : callable
        Returns all gradients of a unit as one array, when they are written.
    ended : callable or None
        Called with every block whose gradients are complete, before ``done`` of its unit, if that is of use; collective
        over the data group then, as ``done`` is.
    """

    grain: Grain | None
    number: int
    target: Callable[[Unit], Any]
    done: Callable[[Unit], None]
    flat: Callable[[Unit], Array]
    ended: Callable[[str], None] | None = None


class SumOperands(NamedTuple):
    """Hold what a fused update sums by itself.

    Attributes
    ----------
    rows : 2-D array
        The partial sums, in the space in which the updater's pieces know their gradients.
    program : int32 array
        The tree that sums them.
    out : 1-D array
        One of the rows, which takes the directions of an optimizer that needs norms.
    """

    rows: Array
    program: Array
    out: Array


class GradientReducer(Protocol):
    """Hold the gradients of a step and sum them over the ranks of the data group."""

    #: Whether grains are assigned in waves.
    waves: bool

    @property
    def largest(self) -> int:
        """The most elements that could travel at once, between groups of ranks; 0 where nothing does."""

    def owners(self, count: int) -> list[int]:
        """Return the rank of ``grid.batch`` that computes each of ``count`` grains. Not collective."""

    def reserve(self, count: int) -> None:
        """Take the memory that a batch of ``count`` grains needs. Collective over all ranks."""

    def jobs(self, batch: GlobalBatch, *, summed: bool) -> list[Job]:
        """Return this rank's micro-batches of a step. Collective over all ranks where their number is a new one.

        ``summed`` tells that :meth:`sum` or :meth:`operands` follows, so that the reduction may begin meanwhile.
        """

    def poll(self) -> None:
        """Let sums in flight move on. Not collective."""

    def finish(self) -> None:
        """Wait for the sums that jobs have begun. Collective over the data group."""

    def operands(self) -> SumOperands:
        """Return what a fused update sums, where nothing has to travel before it. Collective over the data group."""

    def sum(self, divisor: Array) -> Array:
        """Sum the ranges that this rank owns, divide, and return where they stand. Collective over the data group."""

    def replicate(self) -> None:
        """Give the sums to all peers, where they keep the whole optimizer state. Collective over the data group."""
