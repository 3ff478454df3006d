"""Compute what the ranks of one pipeline stage, tensor part and context part hold, compute and put out."""

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
        Its blocks.
    trials : BlockTrials
        Tries of the blocks of all stages.
    asked : tuple of GroupCall
        What ranks ask each other before a chunk's forward.
    shape : tuple of int
        Of one whole sample.
    layouts : mapping of int to FlatLayout
        The parameters of every stage with this tensor part.
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
        """Split the model as a rank would. Not collective.

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
        """The parameters of this stage."""
        return self.layouts[self.partitioned.stage]

    @cached_property
    def shards(self) -> ShardSizes:
        """Return the sizes of what every rank of the data group owns."""
        return ShardSizes(self.layout, self.parts)

    def blocks(self, chunk: int) -> tuple[str, ...]:
        """Return the names of a chunk's blocks. Not collective."""
        return self.partitioned.cuts[chunk]

    @property
    def last_chunk(self) -> int:
        """The chunk with the model's last block."""
        return len(self.partitioned.cuts) - 1

    def tried(self, chunk: int, samples: int) -> list[BlockTrial]:
        """Return the trials of a chunk's blocks, the loss included in the last. Not collective."""
        found = self.trials.of(samples)
        names = [*self.blocks(chunk), *([""] if chunk == self.last_chunk else [])]
        return [found[name] for name in names]

    def calls(self, chunk: int, samples: int) -> list[GroupCall]:
        """Return what a chunk's layers call for one micro-batch. Not collective."""
        return [*self.asked, *(call for trial in self.tried(chunk, samples) for call in trial.calls)]

    def output(self, chunk: int, samples: int) -> int:
        """Return the bytes that a chunk sends on. Not collective."""
        return self.trials.of(samples)[self.blocks(chunk)[-1]].output.nbytes

    def gradient(self, chunk: int, samples: int) -> int:
        """Return the bytes that a chunk sends back. Not collective."""
        form = self.trials.of(samples)[self.blocks(chunk)[0]].gradient
        return 0 if form is None else form.nbytes

    @cached_property
    def operations(self) -> dict[str, Operations] | None:
        """The floating-point work of every block for one sample; None where a block does not count it."""
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
        """Return this part with the tries of another, if they are the same by all that can be seen. Not collective.

        Equal are shapes of inputs and parameters, and of the blocks that calls cut arrays into, with few or with
        ``samples`` samples.
        """
        mine, theirs = (part.trials for part in (self, other))
        even = all(len(set(call.sizes)) <= 1 for trial in theirs.of(min(FEW, samples)).values() for call in trial.calls)
        return replace(self, trials=theirs) if even and mine.shapes == theirs.shapes else self

    def on(self, stage: int) -> ModelPart:
        """Return the same part of another stage. Not collective."""
        return replace(self, partitioned=replace(self.partitioned, stage=stage))


def _local(
    sample: TrialSample, partitioned: PartitionedModel, group: RecordingGroup
) -> tuple[TrialSample, tuple[GroupCall, ...]]:
    """Return what the blocks of a part are given of a sample and are told, and what it takes to know that.

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
