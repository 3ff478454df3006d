"""Predict the memory that a rank's micro-batches need: caches of blocks, and arrays of the block that runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from mpizero.comm.p2p import TreeForm
from mpizero.layout import Instruction
from mpizero.planning.block_trial import BlockTrial
from mpizero.planning.model_part import ModelPart
from mpizero.sharding.pipeline import AHEAD


class _BorderArray(NamedTuple):
    """Describe an array that goes from block to block: the first border that it passes, its place there, its bytes."""

    border: int
    place: int
    nbytes: int


def _bytes_of(arrays: Iterable[_BorderArray], border: int) -> int:
    """Return the bytes of those ``arrays`` that pass ``border`` first; each counts once."""
    return sum(array.nbytes for array in frozenset(arrays) if array.border == border)


@dataclass(frozen=True)
class ChunkActivations:
    """Compute the memory that one micro-batch needs on a chunk, from trial runs of the chunk's blocks.

    [Note: borders] A border is what goes from one block to the next: an array, or the arrays of a tree. Each array is
    counted once, at the first border that it passes, and stays in memory as long as one of the blocks keeps it. The
    input of the model's first block is not counted; it belongs to the data.

    Attributes
    ----------
    trials : tuple of BlockTrial
        The results of the trial runs of the chunk's blocks. For the model's last chunk, the result of the loss follows.
    entry : TreeForm or None
        The chunk's input; None if it is not counted.
    """

    trials: tuple[BlockTrial, ...]
    entry: TreeForm | None

    @cached_property
    def _arrays(self) -> tuple[tuple[_BorderArray, ...], ...]:
        """The arrays of the borders: of the one before the first block, and of those after each block."""
        count = len(self.trials[0].kept.input)
        sizes = [0] * count if self.entry is None else [shape.nbytes for shape in self.entry.shapes]
        borders = [tuple(_BorderArray(0, place, size) for place, size in enumerate(sizes))]
        for number, trial in enumerate(self.trials, 1):
            given = zip(trial.passes, trial.output.shapes, strict=True)
            borders.append(
                tuple(
                    _BorderArray(number, place, shape.nbytes) if source is None else borders[-1][source]
                    for place, (source, shape) in enumerate(given)
                )
            )
        return tuple(borders)

    @cached_property
    def _borders(self) -> tuple[int, ...]:
        """Bytes of the borders, without arrays that an earlier border has, too."""
        return tuple(_bytes_of(arrays, number) for number, arrays in enumerate(self._arrays))

    @cached_property
    def _kept_borders(self) -> tuple[int, ...]:
        """Bytes of the borders' arrays that caches keep for the backward pass."""
        return self._borders_kept_by(self.trials)

    def _borders_kept_by(self, trials: Sequence[BlockTrial]) -> tuple[int, ...]:
        kept = {array for number, trial in enumerate(trials) for array in self._kept_by(number, trial)}
        return tuple(_bytes_of(kept, number) for number in range(len(self._arrays)))

    def _kept_by(self, number: int, trial: BlockTrial) -> set[_BorderArray]:
        """Return the arrays before and after block ``number``, which ``trial`` describes, that its cache keeps."""
        sides = zip(self._arrays[number : number + 2], (trial.kept.input, trial.kept.output), strict=True)
        return {array for arrays, kept in sides for array, keeps in zip(arrays, kept, strict=True) if keeps}

    @cached_property
    def whole(self) -> int:
        """Bytes that the chunk keeps from its forward pass to its backward pass."""
        return sum(trial.kept.own for trial in self.trials) + sum(self._kept_borders)

    @cached_property
    def deferred(self) -> int:
        """Bytes that the chunk keeps from its backward pass for inputs to its backward pass for weights."""
        blocks = [trial for trial in self.trials if not trial.is_loss]
        return sum(trial.kept.deferred for trial in blocks) + sum(self._borders_kept_by(blocks))

    @cached_property
    def _levels(self) -> tuple[int, ...]:
        """For each block, the bytes that all blocks before it keep, without its own input; then the bytes of all."""
        each = (trial.kept.own + border for trial, border in zip(self.trials, self._kept_borders, strict=False))
        return tuple(accumulate(each, initial=0))

    @cached_property
    def forward_peak(self) -> int:
        """The most bytes that the chunk needs at once in the forward pass."""
        parts = zip(self._levels, self._borders, self.trials, strict=False)
        return max(level + border + trial.peaks.forward for level, border, trial in parts)

    @cached_property
    def backward_peak(self) -> int:
        """The most bytes that the chunk needs at once in a whole backward pass.

        Each block frees its cache at the end of its own backward pass.
        """
        parts = enumerate(zip(self._levels[1:], self.trials, strict=True))
        return max(
            level + _bytes_of(self._kept_by(number, trial), number + 1) + trial.backward_peak
            for number, (level, trial) in parts
        )

    @cached_property
    def input_peak(self) -> int:
        """The most bytes that the chunk needs at once in the backward pass for inputs.

        In it each block's cache is replaced by what the block keeps for the backward pass for weights.
        """
        more = accumulate((t.kept.deferred - t.kept.own for t in reversed(self.trials)), initial=0)
        found = (extra + trial.peaks.input for extra, trial in zip(more, reversed(self.trials), strict=False))
        return self.whole + max(found)

    @cached_property
    def weights_peak(self) -> int:
        """The most bytes that the chunk needs at once in the backward pass for weights."""
        return self.deferred + max(trial.peaks.weights for trial in self.trials)

    @property
    def ends(self) -> int:
        """Bytes of the model's prediction and of the arrays that the loss keeps."""
        return self._borders[-2] + self.trials[-1].kept.own

    def peak(self, kind: str) -> int:
        """Return the most bytes that an instruction needs at once for this micro-batch. Not collective.

        ``kind`` is "forward", "backward", "backward_input" or "backward_weights".
        """
        found: int = getattr(self, f"{kind.removeprefix('backward_')}_peak")
        return found


class ActivationPeaks(NamedTuple):
    """Hold the largest amounts of memory that a rank needs for its micro-batches at any moment of a step.

    Attributes
    ----------
    kept : int
        The most bytes that are kept for backward passes.
    caches : int
        Largest number of caches that are kept at once. There is one cache for each chunk and micro-batch.
    most : int
        The most bytes in use while a block runs: those kept for backward passes, and those of the block.
    total : int
        The most bytes in use, including those of messages in flight.
    """

    kept: int
    caches: int
    most: int
    total: int


class StageActivations:
    """Simulate how one rank's memory changes with the instructions of a step.

    Parameters
    ----------
    part : ModelPart
        The rank's part of the model.
    jobs : sequence of int
        The number of samples in each of the rank's micro-batches; 0 for a micro-batch that only other replicas have.
    program : sequence of Instruction
        The forward and backward passes of the micro-batches, in order.
    """

    def __init__(self, part: ModelPart, jobs: Sequence[int], program: Sequence[Instruction]) -> None:
        self.part, self.jobs, self.program = part, jobs, program
        self._chunks: dict[tuple[int, int], ChunkActivations] = {}

    def chunk(self, chunk: int, samples: int) -> ChunkActivations:
        """Return the memory that a micro-batch of ``samples`` samples needs on a chunk. Not collective."""
        if (chunk, samples) not in self._chunks:
            entry = self.part.output(chunk - 1, samples) if chunk else None
            self._chunks[chunk, samples] = ChunkActivations(tuple(self.part.tried(chunk, samples)), entry)
        return self._chunks[chunk, samples]

    @cached_property
    def figures(self) -> ActivationPeaks:
        """The largest amounts of memory that the micro-batches need at any moment of a step."""
        if self.part.trials is None:
            return ActivationPeaks(0, 0, 0, 0)
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
        return ActivationPeaks(0, caches, 0, 0) if self.part.untried else ActivationPeaks(kept, caches, most, total)

    def _messages(self, place: int) -> int:
        """Return the bytes of messages in flight while instruction number ``place`` runs.

        These are the receives that are posted early, and the send of the instruction before.
        """
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
        return (self.part.output(source, samples) if forward else self.part.gradient(source, samples)).nbytes

    def _sent(self, instruction: Instruction) -> int:
        kind, chunk, micro = instruction
        samples, stages = self.jobs[micro], self.part.partitioned.parallel_layout.chunks
        forward, last = kind == "forward", chunk == len(stages) - 1
        if not samples or (last if forward else chunk == 0 or kind == "backward_weights"):
            return 0
        if stages[chunk + 1 if forward else chunk - 1] == self.part.partitioned.stage:
            return 0
        return (self.part.output(chunk, samples) if forward else self.part.gradient(chunk, samples)).nbytes
