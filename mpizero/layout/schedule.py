"""Describe a pipeline schedule: which stage computes what, in which order.

A model is cut into *chunks* (contiguous runs of its blocks), and a batch into micro-batches. A schedule assigns each
chunk to a stage, and gives each stage a *program*, a sequence of instructions. A stage runs its program in order. It
sends messages without blocking. Before it runs an instruction, it waits for the messages that the instruction needs.
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
        Number of micro-batches. If a schedule needs a multiple of the number of stages, empty micro-batches are added
        at the end, and this number includes them.
    stage_of : tuple of int
        The stage of every chunk. Chunks are numbered from the model's input.
    programs : tuple of tuple of Instruction
        The instructions of every stage, in order.

    Examples
    --------
    >>> import mpizero as mz
    >>> schedule = mz.layout.build_schedule("1f1b", stages=2, micro_batches=3)
    >>> [f"{step.kind[0]}{step.micro}" for step in schedule.programs[0]]  # forward and backward passes of stage 0
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    >>> schedule.caches()
    (2, 1)
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    stage_of: tuple[int, ...]
    programs: tuple[tuple[Instruction, ...], ...]

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the numbers of a stage's chunks, in ascending order."""
        return tuple(chunk for chunk, owner in enumerate(self.stage_of) if owner == stage)

    def caches(self) -> tuple[int, ...]:
        """Return, for every stage, the largest number of activation caches that it holds at once.

        An activation cache is what the forward pass of one chunk on one micro-batch keeps for its backward pass. It
        lives from the start of the forward pass to the end of the backward pass (or of its weight half).
        """
        return tuple(round(peak) for peak in self.peaks([1.0] * self.chunks))

    def peaks(self, sizes: Sequence[float], deferred: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return, for every stage, the largest total size of the activation caches that it holds at once.

        An activation cache is what the forward pass of one chunk on one micro-batch keeps for its backward pass.

        Parameters
        ----------
        sizes : sequence of float
            For every chunk, the size of its cache for one micro-batch, in any unit.
        deferred : sequence of float, optional
            For every chunk, the size of what is kept of a cache from the end of the input half to the end of the
            weight half; ``sizes`` by default.

        Returns
        -------
        tuple of float
            One size for each stage, in the unit of ``sizes``.
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
