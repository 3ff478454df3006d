"""Describe a pipeline schedule: which stage computes what, in which order.

A model is cut into *chunks* (contiguous runs of its blocks), a batch into micro-batches. A schedule assigns each chunk
to a stage, and gives each stage a program, a sequence of instructions. A stage runs its program in order; sends do not
block, receives wait.
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
        Number of stages, and number of chunks on all stages together.
    micro_batches : int
        Number of micro-batches. Some schedules need a multiple of the number of stages; empty micro-batches at the end
        pad to it and are counted.
    stage_of : tuple of int
        The stage of every chunk.
    programs : tuple of tuple of Instruction
        The instructions of every stage, in order.
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
        """Return, for every stage, the largest number of activation caches that it holds at once.

        A cache belongs to one chunk and one micro-batch. It lives from the start of its forward pass to the end of its
        backward pass or weight half.
        """
        return tuple(round(peak) for peak in self.peaks([1.0] * self.chunks))

    def peaks(self, sizes: Sequence[float], deferred: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return, for every stage, the largest total size of the activation caches that it holds at once.

        Parameters
        ----------
        sizes : sequence of float
            Size (for example in bytes) of one cache of each chunk.
        deferred : sequence of float, optional
            Size of what is left of a cache between input half and weight half; ``sizes`` by default.

        Returns
        -------
        tuple of float
            One size for each stage.
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
