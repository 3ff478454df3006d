"""Predict the memory of a rank during its micro-batches: caches of blocks, and arrays of the running block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from mpizero.layout import Instruction
from mpizero.parallel.execution.pipeline import AHEAD
from mpizero.planning.block_trial import BlockTrial
from mpizero.planning.model_part import ModelPart


@dataclass(frozen=True)
class ChunkActivations:
    """Compute the memory that one micro-batch needs on a chunk, from the trials of the chunk's blocks.

    [Note: borders] A border is the array between two blocks: the output of one and the input of the next. It is counted
    once, and stays in memory as long as either block keeps it. The input of the model's first block is not counted; it
    belongs to the data.

    Attributes
    ----------
    trials : tuple of BlockTrial
        The trials of the chunk's blocks, and of the loss after the model's last block.
    entry : int
        Bytes of the chunk's input.
    """

    trials: tuple[BlockTrial, ...]
    entry: int

    @cached_property
    def _borders(self) -> tuple[int, ...]:
        """Bytes of the borders: before each block, and after the last; 0 if a block returns its input unchanged."""
        return (self.entry, *(0 if trial.passes else trial.output.nbytes for trial in self.trials))

    @cached_property
    def _kept_borders(self) -> tuple[int, ...]:
        """Bytes of the borders that caches keep for the backward pass; 0 for the others."""
        return self._borders_kept_by(self.trials)

    def _borders_kept_by(self, trials: Sequence[BlockTrial]) -> tuple[int, ...]:
        kept = [False] * len(self._borders)
        place = 0
        for number, trial in enumerate(trials):
            kept[place] |= trial.kept.input
            place = place if trial.passes else number + 1
            kept[place] |= trial.kept.output
        return tuple(size if alive else 0 for size, alive in zip(self._borders, kept, strict=True))

    @cached_property
    def whole(self) -> int:
        """Bytes that the chunk keeps between its forward and its backward pass."""
        return sum(trial.kept.own for trial in self.trials) + sum(self._kept_borders)

    @cached_property
    def deferred(self) -> int:
        """Bytes that the chunk keeps between the two halves of its backward pass, for inputs and for weights."""
        blocks = [trial for trial in self.trials if not trial.is_loss]
        return sum(trial.kept.deferred for trial in blocks) + sum(self._borders_kept_by(blocks))

    @cached_property
    def _levels(self) -> tuple[int, ...]:
        """Bytes that all blocks before each block keep, without that block's input."""
        each = (trial.kept.own + border for trial, border in zip(self.trials, self._kept_borders, strict=False))
        return tuple(accumulate(each, initial=0))

    @cached_property
    def forward_peak(self) -> int:
        """The most bytes that the forward pass needs at once."""
        parts = zip(self._levels, self._borders, self.trials, strict=False)
        return max(level + border + trial.peaks.forward for level, border, trial in parts)

    @cached_property
    def backward_peak(self) -> int:
        """The most bytes that a whole backward pass needs at once; each block frees its cache when it has run."""
        parts = zip(self._levels[1:], self._kept_borders[1:], self.trials, strict=True)
        return max(level + border * trial.kept.output + trial.backward_peak for level, border, trial in parts)

    @cached_property
    def input_peak(self) -> int:
        """The most bytes that the backward pass for inputs needs at once; it replaces caches by what weights need."""
        more = accumulate((t.kept.deferred - t.kept.own for t in reversed(self.trials)), initial=0)
        found = (extra + trial.peaks.input for extra, trial in zip(more, reversed(self.trials), strict=False))
        return self.whole + max(found)

    @cached_property
    def weights_peak(self) -> int:
        """The most bytes that the backward pass for weights needs at once."""
        return self.deferred + max(trial.peaks.weights for trial in self.trials)

    @property
    def ends(self) -> int:
        """Bytes of the prediction and of the arrays that the loss keeps."""
        return self._borders[-2] + self.trials[-1].kept.own

    def peak(self, kind: str) -> int:
        """Return the most bytes that an instruction of this kind needs at once for this micro-batch. Not collective."""
        found: int = getattr(self, f"{kind.removeprefix('backward_')}_peak")
        return found


class ActivationPeaks(NamedTuple):
    """Hold the largest amounts of memory that a rank needs for micro-batches at any moment of a step.

    Attributes
    ----------
    kept : int
        The most bytes that are kept for backward passes.
    caches : int
        The most caches, each of one chunk and one micro-batch, that are kept at once.
    most : int
        The most bytes while a block runs: the kept ones and those of the block.
    total : int
        The most bytes including messages in flight.
    """

    kept: int
    caches: int
    most: int
    total: int


class StageActivations:
    """Simulate the memory of one rank through the instructions of a step.

    Parameters
    ----------
    part : ModelPart
        The rank's part of the model.
    jobs : sequence of int
        The samples in each of its micro-batches; 0 for one that only other replicas have.
    program : sequence of Instruction
        The forward and backward passes of these micro-batches, in order.
    """

    def __init__(self, part: ModelPart, jobs: Sequence[int], program: Sequence[Instruction]) -> None:
        self.part, self.jobs, self.program = part, jobs, program
        self._chunks: dict[tuple[int, int], ChunkActivations] = {}

    def chunk(self, chunk: int, samples: int) -> ChunkActivations:
        """Return the memory that one micro-batch of a chunk needs. Not collective."""
        if (chunk, samples) not in self._chunks:
            entry = self.part.output(chunk - 1, samples) if chunk else 0
            self._chunks[chunk, samples] = ChunkActivations(tuple(self.part.tried(chunk, samples)), entry)
        return self._chunks[chunk, samples]

    @cached_property
    def figures(self) -> ActivationPeaks:
        """The largest amounts of memory at any moment of a step."""
        held: dict[tuple[int, int], int] = {}
        kept = caches = most = total = 0
        alone = self.part.partitioned.parallel_layout.pipeline == 1
        for place, (kind, chunk, micro) in enumerate(self.program):
            if not self.jobs[micro]:
                continue
            flow = self.chunk(chunk, self.jobs[micro])
            others = sum(size for key, size in held.items() if key != (chunk, micro))
            # Without a pipeline, prediction and loss live until the backward pass ends.
            here = others + flow.peak(kind) + (flow.ends if alone and kind == "backward" else 0)
            if kind == "forward":
                held[chunk, micro] = flow.whole
                caches = max(caches, len(held))
            elif kind == "backward_input":
                held[chunk, micro] = flow.deferred
            else:
                del held[chunk, micro]
            kept = max(kept, sum(held.values()))
            most, total = max(most, kept, here), max(total, kept, here + self._messages(place))
        return ActivationPeaks(kept, caches, most, total)

    def _messages(self, place: int) -> int:
        """Return the bytes of messages while an instruction runs: receives posted early, and the previous send."""
        if self.part.partitioned.parallel_layout.pipeline == 1:
            return 0
        ahead = sum(self._received(instruction) for instruction in self.program[place + 1 : place + AHEAD])
        return ahead + (self._sent(self.program[place - 1]) if place else 0)

    def _received(self, instruction: Instruction) -> int:
        kind, chunk, micro = instruction
        samples, stages = self.jobs[micro], self.part.partitioned.parallel_layout.chunks
        forward, last = kind == "forward", chunk == len(stages) - 1
        source = chunk - 1 if forward else chunk + 1
        if not samples or (chunk == 0 if forward else last or kind == "backward_weights"):
            return 0
        if stages[source] == self.part.partitioned.stage:
            return 0
        return self.part.output(source, samples) if forward else self.part.gradient(source, samples)

    def _sent(self, instruction: Instruction) -> int:
        kind, chunk, micro = instruction
        samples, stages = self.jobs[micro], self.part.partitioned.parallel_layout.chunks
        forward, last = kind == "forward", chunk == len(stages) - 1
        if not samples or (last if forward else chunk == 0 or kind == "backward_weights"):
            return 0
        if stages[chunk + 1 if forward else chunk - 1] == self.part.partitioned.stage:
            return 0
        return self.part.output(chunk, samples) if forward else self.part.gradient(chunk, samples)
