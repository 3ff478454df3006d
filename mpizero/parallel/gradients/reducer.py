"""Define the interface between the engine and gradient buffers: jobs that write gradients, and their exact sum.

Two classes implement it. :class:`~mpizero.parallel.gradients.row_buffer.RowBuffer` keeps gradients in rows: a row is
one copy of the whole gradient vector (DDP, ZeRO-1, and every strategy while gradients stay local).
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
    """Describe one micro-batch that a rank computes, or whose collectives it joins; jobs are done in order.

    Attributes
    ----------
    grain : Grain or None
        The samples; None if the rank computes nothing but must join the collectives of the others.
    number : int
        Number of the micro-batch in its grain.
    target : callable
        Returns the views that a unit's gradients are written to.
    done : callable
        Called when a unit's gradients are written; collective over the data group if gradients are sharded.
    flat : callable
        Returns all gradients of a unit as one array, when they are written.
    ended : callable or None
        Called with every block whose gradients are complete, before ``done`` of its unit; collective over the data
        group, as ``done`` then is. None: the buffer does not need it.
    """

    grain: Grain | None
    number: int
    target: Callable[[Unit], Any]
    done: Callable[[Unit], None]
    flat: Callable[[Unit], Array]
    ended: Callable[[str], None] | None = None


class SumOperands(NamedTuple):
    """Hold the arrays from which a fused update sums the gradients by itself.

    Attributes
    ----------
    rows : 2-D array
        The partial sums; the offsets in the updater's pieces refer to one of its rows.
    program : int32 array
        The tree program that sums the rows.
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
        """The most elements that could be in flight between peers at once; 0 if there is only one peer."""

    def owners(self, count: int) -> list[int]:
        """Return the rank of ``grid.batch`` that computes each of ``count`` grains. Not collective."""

    def reserve(self, count: int) -> None:
        """Allocate the memory that a batch of ``count`` grains needs. Collective over all ranks."""

    def jobs(self, batch: GlobalBatch, *, summed: bool) -> list[Job]:
        """Return this rank's jobs in a step. Collective over all ranks if the number of grains is a new one.

        ``summed`` says that :meth:`sum` or :meth:`operands` follows, so that the reduction may begin meanwhile.
        """

    def poll(self) -> None:
        """Make sums in flight progress. Not collective."""

    def finish(self) -> None:
        """Wait for the sums that jobs have begun. Collective over the data group."""

    def operands(self) -> SumOperands:
        """Return what a fused update sums; only if nothing has to be sent before. Collective over the data group."""

    def sum(self, divisor: Array) -> Array:
        """Sum the ranges that this rank owns, divide, and return their array. Collective over the data group."""

    def replicate(self) -> None:
        """Send the sums to all peers, if they keep the whole optimizer state. Collective over the data group."""
