"""Describe a pipeline schedule: which stage computes what, in which order.

A model is cut into *chunks* (contiguous runs of its blocks), a batch into micro-batches. A schedule gives each chunk a
stage and each stage a program. A stage runs its program in order; sends do not block, receives wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpizero.layout.instructions import BACKWARD, BACKWARD_INPUT, FORWARD, Instruction


@dataclass(frozen=True)
class Schedule:
    """Hold the programs of all stages; made by :func:`~mpizero.layout.schedules.build_schedule`.

    Attributes
    ----------
    name : str
        One of :data:`~mpizero.layout.schedules.SCHEDULES`.
    stages, chunks : int
        Number of stages, and of chunks on all of them.
    micro_batches : int
        Number of micro-batches, those included that pad it to a multiple which the schedule needs; the absent ones are
        the last.
    stage_of : tuple of int
        The stage of every chunk.
    programs : tuple of tuple of Instruction
        What every stage does, in order.
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    stage_of: tuple[int, ...]
    programs: tuple[tuple[Instruction, ...], ...]

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the chunks of a stage, in the order of the model."""
        return tuple(chunk for chunk, owner in enumerate(self.stage_of) if owner == stage)

    def caches(self) -> tuple[int, ...]:
        """Return the largest number of caches (of one chunk and one micro-batch) that every stage holds.

        A cache lives from the start of its forward to the end of its backward or weight half.
        """
        return tuple(round(peak) for peak in self.peaks([1.0] * self.chunks))

    def peaks(self, sizes: Sequence[float], deferred: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return the largest total weight of the caches of every stage.

        Parameters
        ----------
        sizes : sequence of float
            Weight (for example bytes) of one cache of each chunk.
        deferred : sequence of float, optional
            Weight that is left between input half and weight half; ``sizes`` by default.

        Returns
        -------
        tuple of float
            One a stage.
        """
        left = sizes if deferred is None else deferred
        peaks = []
        for program in self.programs:
            held = peak = 0.0
            for kind, chunk, _ in program:
                if kind == FORWARD:
                    held += sizes[chunk]
                elif kind == BACKWARD:
                    held -= sizes[chunk]
                else:
                    held += left[chunk] - sizes[chunk] if kind == BACKWARD_INPUT else -left[chunk]
                peak = max(peak, held)
            peaks.append(peak)
        return tuple(peaks)
