"""Define the interface between the engine and gradient buffers: jobs that write gradients, and their sum over ranks.

Two classes implement the interface. :class:`~mpizero.parallel.gradients.row_buffer.RowBuffer` keeps gradients in rows;
a row is one copy of the whole gradient vector. It serves DDP and ZeRO-1, and any strategy for gradients that are not
reduced yet. :class:`~mpizero.parallel.gradients.wave_buffer.WaveBuffer` keeps the gradients of one unit, and sums them
into shards as soon as the unit's backward pass ends (ZeRO-2 and 3). Both sum by the same tree, so the bits are the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from mpizero.layout.flat import Unit
from mpizero.parallel.batch.redistribute import GlobalBatch, Grain
from mpizero.parallel.batch.step_scalars import Divisors
from mpizero.types import Array

#: The most sizes of batches whose plans a buffer keeps; a plan of a thousand grains takes a MiB.
KEPT_PLANS = 16


class Job(NamedTuple):
    """Describe one micro-batch that a rank computes, or whose collectives it only joins. Jobs are run in order.

    Attributes
    ----------
    grain : Grain or None
        The grain that has the micro-batch; None if this rank computes nothing but must join the other ranks'
        collectives.
    number : int
        Index of the micro-batch in its grain, from 0.
    target : callable
        Takes a unit and returns the views that the unit's gradients are written to.
    done : callable
        Called with a unit when its gradients are written; collective over the data group if gradients are sharded, or
        if rows are summed during the backward pass.
    parts : callable
        Takes a unit and one of its blocks whose gradients are written, and returns these gradients as 1-D arrays: one
        for each of the block's ranges in ``Unit.gradient_ranges``.
    ended : callable or None
        Called once with each unit and block when the block's gradients are written, before ``done`` is called with the
        unit; collective over the data group if rows are summed during the backward pass. None: nothing is to be called.
    in_scratch : bool
        Whether the views of all blocks are views of the same memory. Then only one block may be written at a time:
        ``ended`` is called for it before the next one is written.
    """

    grain: Grain | None
    number: int
    target: Callable[[Unit], Any]
    done: Callable[[Unit], None]
    parts: Callable[[Unit, str], Sequence[Array]]
    ended: Callable[[Unit, str], None] | None = None
    in_scratch: bool = False


class SumOperands(NamedTuple):
    """Hold the arrays from which a fused update, one that also sums the gradients, reads them.

    Attributes
    ----------
    rows : 2-D array
        Partial sums of gradients, one in each row. ``UpdatePiece.gradient`` is an index into a row.
    program : int32 array
        The tree program: says which rows are added in which order.
    out : 1-D array
        One of the rows, to which an optimizer that needs norms (LAMB) writes its update directions.
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
        """The largest number of elements that could be in flight between peers at once; 0 if there is only one peer."""

    def owners(self, count: int) -> list[int]:
        """Return, for each of ``count`` grains, the rank of ``grid.batch`` that computes it. Not collective."""

    def reserve(self, count: int) -> None:
        """Allocate the memory that a batch of ``count`` grains needs. Collective over all ranks."""

    def jobs(self, batch: GlobalBatch, *, summed: bool) -> Iterable[Job]:
        """Return this rank's jobs in a step, each to be run before the next one is asked for.

        Collective over all ranks if there was no batch of as many grains before. ``summed`` tells whether :meth:`sum`
        or :meth:`operands` is called after the jobs; then the reduction may begin while they run.
        """

    def poll(self) -> None:
        """Let partial sums that are in flight between peers progress. Not collective."""

    def finish(self) -> None:
        """Wait for the sums over peers that jobs have begun to compute. Collective over the data group."""

    def operands(self) -> SumOperands:
        """Return the arrays that a fused update sums; call it only if no partial sums have to be sent to peers.

        Collective over the data group.
        """

    def sum(self, divisors: Divisors) -> Array:
        """Sum the gradients of the ranges that this rank owns, divide them by ``divisors``, and return them.

        Collective over the data group.
        """

    def replicate(self) -> None:
        """If all peers keep the whole optimizer state, send the sums of every peer to all of them.

        Collective over the data group.
        """


def forget_plans(plans: dict[int, Any]) -> None:
    """Empty ``plans``, those of sizes of batches, if there are ``KEPT_PLANS``: other sizes may come without end.

    Not collective.
    """
    if len(plans) >= KEPT_PLANS:
        plans.clear()
