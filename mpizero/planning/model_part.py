"""Describe the part of a model on one pipeline stage, tensor rank and context rank: size, work and output."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from mpizero import nn
from mpizero.errors import DataError
from mpizero.layout import FlatLayout
from mpizero.nn.operations import Operations
from mpizero.parallel.partition.local_model import PartitionedModel, partition_model
from mpizero.parallel.partition.parallel_layout import ParallelLayout
from mpizero.parallel.placement import Placement
from mpizero.planning.block_trial import FEW, BlockTrial, BlockTrials, TrialSample
from mpizero.planning.byte_counts import GroupCall, RecordingGroup
from mpizero.planning.planned_grid import PlannedGrid
from mpizero.planning.shard_sizes import ShardSizes

if TYPE_CHECKING:
    from mpizero.comm import ProcessGrid


@dataclass(frozen=True)
class ModelPart:
    """Describe one rank's part of a model, the same for all ranks of its data group.

    Attributes
    ----------
    partitioned : PartitionedModel
        The rank's blocks.
    trials : BlockTrials
        Trial runs of the blocks of all stages.
    asked : tuple of GroupCall
        The group calls before a chunk's forward pass, in which ranks learn how long sequences are.
    shape : tuple of int
        Shape of one whole sample.
    layouts : mapping of int to FlatLayout
        The layout of the parameters of every stage, on this tensor rank.
    parts : int
        Ranks of the data group.
    """

    partitioned: PartitionedModel
    trials: BlockTrials
    asked: tuple[GroupCall, ...]
    shape: tuple[int, ...]
    layouts: dict[int, FlatLayout]
    parts: int

    @classmethod
    def build(
        cls,
        model: Any,
        grid: PlannedGrid,
        parallel_layout: ParallelLayout,
        sample: TrialSample,
        row: Placement,
        minimum_unit: int,
    ) -> ModelPart:
        """Split the model as the rank of ``grid`` would. Not collective.

        Raises
        ------
        ConfigError
            If the model cannot be split or cut like this.
        """
        partitioned = partition_model(model, cast("ProcessGrid", grid), parallel_layout)
        layouts = {
            stage: partitioned.layout(stage, one_unit=row.one_unit, minimum_unit=minimum_unit)
            for stage in range(grid.pipeline.size)
        }
        group = grid.context_group if grid.context.size > 1 else grid.tensor_group
        local, asked = _local(sample, partitioned, group)
        trials = BlockTrials(partitioned.split.blocks, partitioned.split.loss, local, group, model.dtype)
        return cls(partitioned, trials, asked, tuple(sample.x.shape[1:]), layouts, grid.data.size)

    @cached_property
    def layout(self) -> FlatLayout:
        """The layout of this stage's parameters."""
        return self.layouts[self.partitioned.stage]

    @cached_property
    def shards(self) -> ShardSizes:
        """The sizes of the shards of all ranks of the data group."""
        return ShardSizes(self.layout, self.parts)

    def blocks(self, chunk: int) -> tuple[str, ...]:
        """Return the names of a chunk's blocks. Not collective."""
        return self.partitioned.cuts[chunk]

    @property
    def last_chunk(self) -> int:
        """The number of the chunk with the model's last block."""
        return len(self.partitioned.cuts) - 1

    def tried(self, chunk: int, samples: int) -> list[BlockTrial]:
        """Return the trials of a chunk's blocks, and of the loss if it is the last chunk. Not collective."""
        found = self.trials.of(samples)
        names = [*self.blocks(chunk), *([""] if chunk == self.last_chunk else [])]
        return [found[name] for name in names]

    def calls(self, chunk: int, samples: int) -> list[GroupCall]:
        """Return the group calls of a chunk's layers for one micro-batch. Not collective."""
        return [*self.asked, *(call for trial in self.tried(chunk, samples) for call in trial.calls)]

    def output(self, chunk: int, samples: int) -> int:
        """Return the bytes of a chunk's output for one micro-batch. Not collective."""
        return self.trials.of(samples)[self.blocks(chunk)[-1]].output.nbytes

    def gradient(self, chunk: int, samples: int) -> int:
        """Return the bytes of the gradient of a chunk's input for one micro-batch. Not collective."""
        form = self.trials.of(samples)[self.blocks(chunk)[0]].gradient
        return 0 if form is None else form.nbytes

    @cached_property
    def operations(self) -> dict[str, Operations] | None:
        """The floating-point work of every block for one sample; None if a block does not count it."""
        shape: tuple[int, ...] = self.shape
        found: dict[str, Operations] = {}
        for name, layer in self.partitioned.split.blocks.items():
            if not isinstance(layer, nn.Layer):
                return None
            try:
                found[name] = layer.operations(shape)
                shape = layer.output_shape(shape)
            except NotImplementedError:
                return None
        return found

    def work(self, chunk: int) -> Operations:
        """Return the floating-point work of a chunk for one sample. Not collective."""
        counted = self.operations or {}
        total = Operations()
        for name in self.blocks(chunk):
            total += counted.get(name, Operations())
        return total

    def like(self, other: ModelPart, samples: int) -> ModelPart:
        """Return this part with the trials of ``other``, if these must be equal; else this part. Not collective.

        They are taken to be equal if inputs and parameters have the same shapes, and if all group calls, with at most
        ``samples`` samples, cut arrays into blocks of equal size.
        """
        mine, theirs = (part.trials for part in (self, other))
        even = all(len(set(call.sizes)) <= 1 for trial in theirs.of(min(FEW, samples)).values() for call in trial.calls)
        return replace(self, trials=theirs) if even and mine.shapes == theirs.shapes else self

    def on(self, stage: int) -> ModelPart:
        """Return the part on another stage, for the same tensor and context rank. Not collective."""
        return replace(self, partitioned=replace(self.partitioned, stage=stage))


def _local(
    sample: TrialSample, partitioned: PartitionedModel, group: RecordingGroup
) -> tuple[TrialSample, tuple[GroupCall, ...]]:
    """Return the part of a sample that a rank's blocks are given, and the group calls made before they run.

    Not collective.
    """
    x, y, run = sample.x[:1], sample.y[:1], sample.run
    cut = partitioned.parallel_layout.context > 1
    if cut:
        x, y, run = *nn.cut_batch(x, y, group), replace(run, length=x.shape[1])
    group.calls.clear()
    with suppress(DataError):  # a context group asks for lengths, without other ranks
        told = partitioned.run_on(x, sample.run)
        run = run if cut else told
    return TrialSample(x, y, run), tuple(group.calls)
