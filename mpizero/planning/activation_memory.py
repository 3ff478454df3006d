"""Compute the memory of a rank during its micro-batches: caches of blocks, and arrays of the block that runs."""

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
    """Compute the memory that one micro-batch of a chunk keeps, block by block.

    [Note: borders] An array between two blocks is the output of one and the input of the next; it lives once, and as
    long as either keeps it. What the first block of the model is given belongs to the data.

    Attributes
    ----------
    trials : tuple of BlockTrial
        Of the chunk's blocks, and of the loss after the last.
    entry : int
        Bytes of the chunk's input.
    """

    trials: tuple[BlockTrial, ...]
    entry: int

    @cached_property
    def _borders(self) -> tuple[int, ...]:
        """Bytes of the array before each block, and of that after the last; 0 where a block passes its input on."""
        return (self.entry, *(0 if trial.passes else trial.output.nbytes for trial in self.trials))

    @cached_property
    def _kept_borders(self) -> tuple[int, ...]:
        """The same, 0 for those that no cache keeps."""
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
        """Bytes between forward and backward."""
        return sum(trial.kept.own for trial in self.trials) + sum(self._kept_borders)

    @cached_property
    def deferred(self) -> int:
        """Bytes between input half and weight half; of the loss nothing is left by then."""
        blocks = [trial for trial in self.trials if not trial.is_loss]
        return sum(trial.kept.deferred for trial in blocks) + sum(self._borders_kept_by(blocks))

    @cached_property
    def _levels(self) -> tuple[int, ...]:
        """Bytes kept by all blocks before each one, its own input not included."""
        each = (trial.kept.own + border for trial, border in zip(self.trials, self._kept_borders, strict=False))
        return tuple(accumulate(each, initial=0))

    @cached_property
    def forward_peak(self) -> int:
        """The most that a forward takes."""
        parts = zip(self._levels, self._borders, self.trials, strict=False)
        return max(level + border + trial.peaks.forward for level, border, trial in parts)

    @cached_property
    def backward_peak(self) -> int:
        """The most that both halves of a backward take, one block after the other giving up its cache."""
        parts = zip(self._levels[1:], self._kept_borders[1:], self.trials, strict=True)
        return max(level + border * trial.kept.output + trial.backward_peak for level, border, trial in parts)

    @cached_property
    def input_peak(self) -> int:
        """The most that an input half takes, while what it defers takes the place of caches."""
        more = accumulate((t.kept.deferred - t.kept.own for t in reversed(self.trials)), initial=0)
        found = (extra + trial.peaks.input for extra, trial in zip(more, reversed(self.trials), strict=False))
        return self.whole + max(found)

    @cached_property
    def weights_peak(self) -> int:
        """The most that a weight half takes."""
        return self.deferred + max(trial.peaks.weights for trial in self.trials)

    @property
    def ends(self) -> int:
        """Bytes of the prediction and of what the loss keeps."""
        return self._borders[-2] + self.trials[-1].kept.own

    def peak(self, kind: str) -> int:
        """Return the most bytes that an instruction takes of this micro-batch. Not collective."""
        found: int = getattr(self, f"{kind.removeprefix('backward_')}_peak")
        return found


class ActivationPeaks(NamedTuple):
    """Hold the bytes at the fullest moments of a step.

    Attributes
    ----------
    kept : int
        The most bytes that wait for a backward pass.
    caches : int
        The most caches, each of one chunk and one micro-batch, that do.
    most : int
        The most bytes of all while a block runs.
    total : int
        The same with messages in flight.
    """

    kept: int
    caches: int
    most: int
    total: int


class StageActivations:
    """Follow the memory of one rank through its micro-batches, from forward to backward.

    Parameters
    ----------
    part : ModelPart
        What the rank computes.
    jobs : sequence of int
        The samples of its micro-batches; 0 is an absent one.
    program : sequence of Instruction
        What it does with them.
    """

    def __init__(self, part: ModelPart, jobs: Sequence[int], program: Sequence[Instruction]) -> None:
        self.part, self.jobs, self.program = part, jobs, program
        self._chunks: dict[tuple[int, int], ChunkActivations] = {}

    def chunk(self, chunk: int, samples: int) -> ChunkActivations:
        """Return what one micro-batch of a chunk keeps. Not collective."""
        if (chunk, samples) not in self._chunks:
            entry = self.part.output(chunk - 1, samples) if chunk else 0
            self._chunks[chunk, samples] = ChunkActivations(tuple(self.part.tried(chunk, samples)), entry)
        return self._chunks[chunk, samples]

    @cached_property
    def figures(self) -> ActivationPeaks:
        """Return the bytes at the fullest moments of a step."""
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
        """Return the bytes of the receives posted ahead while an instruction runs, and of what was sent before it."""
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
