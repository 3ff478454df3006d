"""Describe the part of a model that one pipeline stage, tensor rank and context rank holds: size, work and output."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpizero import nn
from mpizero._util.pytree import SampleTree
from mpizero.comm.p2p import TreeForm
from mpizero.errors import ConfigError, DataError
from mpizero.layout.flat import FlatLayout
from mpizero.nn.layer import Operations
from mpizero.planning.block_trial import FEW, BlockTrial, BlockTrials, TrialSample
from mpizero.planning.byte_counts import GroupCall
from mpizero.planning.planned_grid import PlannedGrid
from mpizero.planning.shard_sizes import ShardSizes
from mpizero.sharding.config import Placement
from mpizero.sharding.partition import ParallelLayout, PartitionedModel, partition_model
from mpizero.types import BlockModel

if TYPE_CHECKING:
    from mpizero.comm import ProcessGrid


@dataclass(frozen=True)
class ModelPart:
    """Describe one rank's part of a model; it is the same for all ranks of a data group with the same context rank.

    Attributes
    ----------
    partitioned : PartitionedModel
        The blocks on the rank's stage, and the cut of the whole model.
    trials : BlockTrials or None
        Trial runs of the blocks of all stages; None if they cannot be tried.
    untried : str
        Why the trials do not tell the memory of the blocks; "" if they do.
    asked : tuple of GroupCall
        The calls of the context group before a chunk's forward pass, in which ranks find the length of sequences.
    shape : tuple of int
        Shape of one whole sample.
    layouts : mapping of int to FlatLayout
        For every stage, the layout of the parameters that this tensor rank would hold there.
    parts : int
        Number of ranks of the data group.
    """

    partitioned: PartitionedModel
    trials: BlockTrials | None
    untried: str
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
        *,
        known: BlockTrials | None = None,
        tries: bool = True,
    ) -> ModelPart:
        """Return the part of the model that the rank of ``grid`` would hold in a run. Not collective.

        ``known`` are the :meth:`even_trials` of another part: if inputs and parameters have the same shapes there, the
        results would be the same, and the blocks are not run again. With ``tries=False`` they are not run at all.

        Raises
        ------
        ConfigError
            The model cannot be split over the tensor or context group, or cannot be cut into stages.
        """
        partitioned = partition_model(model, cast("ProcessGrid", grid), parallel_layout)
        layouts = {
            stage: partitioned.layout(stage, one_unit=row.one_unit, minimum_unit=minimum_unit)
            for stage in range(grid.pipeline.size)
        }
        trials, untried, asked = (
            _try_blocks(partitioned, grid, sample, known) if tries else (None, "no block has been run", ())
        )
        first = SampleTree.of(x=sample.x).leaves[0]
        return cls(partitioned, trials, untried, asked, tuple(first.shape[1:]), layouts, grid.data.size)

    @cached_property
    def layout(self) -> FlatLayout:
        """The layout of the parameters on this part's stage."""
        return self.layouts[self.partitioned.stage]

    @cached_property
    def shards(self) -> ShardSizes:
        """The sizes of the shards of all ranks of this part's data group."""
        return ShardSizes(self.layout, self.parts)

    def blocks(self, chunk: int) -> tuple[str, ...]:
        """Return the names of the blocks of a chunk, which is counted from 0 in the whole model. Not collective."""
        return self.partitioned.cuts[chunk]

    @property
    def unseen(self) -> str:
        """The memory that another library takes for the blocks and that the trials do not see, in words; "" if none."""
        counters = (
            getattr(layer, "allocations", None) for layer in getattr(self.partitioned.split, "blocks", {}).values()
        )
        return next((counter.unseen for counter in counters if counter is not None), "")

    @property
    def last_chunk(self) -> int:
        """The number of the chunk that has the model's last block."""
        return len(self.partitioned.cuts) - 1

    @property
    def _trials(self) -> BlockTrials:
        assert self.trials is not None  # a model whose blocks cannot be tried is not split
        return self.trials

    def tried(self, chunk: int, samples: int) -> list[BlockTrial]:
        """Return the trial runs of a chunk's blocks, and of the loss if it is the last chunk. Not collective.

        ``samples`` is the number of samples of the micro-batch.
        """
        found = self._trials.of(samples)
        names = [*self.blocks(chunk), *([None] if chunk == self.last_chunk else [])]
        return [found[name] for name in names]

    def calls(self, chunk: int, samples: int) -> list[GroupCall]:
        """Return the calls of the tensor and context group for one micro-batch of ``samples`` samples on a chunk.

        Not collective.
        """
        return [*self.asked, *(call for trial in self.tried(chunk, samples) for call in trial.calls)]

    def output(self, chunk: int, samples: int) -> TreeForm:
        """Return the form of a chunk's output for one micro-batch of ``samples`` samples. Not collective."""
        return self._trials.of(samples)[self.blocks(chunk)[-1]].output

    def gradient(self, chunk: int, samples: int) -> TreeForm:
        """Return the form of the gradient of a chunk's input for one micro-batch of ``samples`` samples.

        It has no array if the chunk's first block computes no such gradient. Not collective.
        """
        form = self._trials.of(samples)[self.blocks(chunk)[0]].gradient
        return TreeForm.of(None, "") if form is None else form

    @cached_property
    def operations(self) -> dict[str, Operations] | None:
        """For each block, the floating-point operations for one sample; None if a block does not count them."""
        shape: tuple[int, ...] = self.shape
        found: dict[str, Operations] = {}
        for name, layer in getattr(self.partitioned.split, "blocks", {}).items():
            if not isinstance(layer, nn.Layer) or not _counts(layer):
                return None
            try:
                found[name] = layer.operations(shape)
                shape = layer.output_shape(shape)
            except NotImplementedError:
                return None
        return found or None

    def work(self, chunk: int) -> Operations:
        """Return the floating-point operations of a chunk for one sample; 0 if blocks do not count them.

        Not collective.
        """
        counted = self.operations or {}
        total = Operations()
        for name in self.blocks(chunk):
            total += counted.get(name, Operations())
        return total

    def even_trials(self, samples: int) -> BlockTrials | None:
        """Return the trial runs if they hold for other ranks of the tensor and context group, too; else None.

        They do where no group call, with at most ``samples`` samples, cuts an array into unequal parts. Not collective.
        """
        if self.trials is None:
            return None
        tried = self.trials.of(min(FEW, samples)).values()
        return self.trials if all(len(set(call.sizes)) <= 1 for trial in tried for call in trial.calls) else None

    def on(self, stage: int) -> ModelPart:
        """Return the part that the same tensor and context rank holds on another stage. Not collective."""
        return replace(self, partitioned=replace(self.partitioned, stage=stage))


def _try_blocks(
    partitioned: PartitionedModel, grid: PlannedGrid, sample: TrialSample, known: BlockTrials | None
) -> tuple[BlockTrials | None, str, tuple[GroupCall, ...]]:
    """Return the trials of a model's blocks, why they do not tell memory, and the group calls made before blocks run.

    Not collective. Where the model is split, its blocks must be tried: their outputs are messages.

    Raises
    ------
    ConfigError
        If the model is split, and a block cannot be tried.
    """
    model = partitioned.split
    if not isinstance(model, BlockModel):
        return None, f"{type(model).__name__} is a black box: what its function allocates and computes is its own", ()
    try:
        if not all(isinstance(part, np.ndarray) for part in (sample.x, sample.y)):
            raise ConfigError("blocks cannot be tried alone on samples that are trees of arrays")
        local, asked = _local(sample, partitioned, grid)
        trials = BlockTrials(model.blocks, model.loss, local, grid.group_calls, model.dtype)
        if known is not None and known.shapes == trials.shapes:
            trials = known
        trials.of(FEW)
    except ConfigError as error:
        if partitioned.parallel_layout.pipeline > 1 or partitioned.splits_layers:
            raise
        return None, str(error), ()
    foreign = ((name, getattr(layer, "memory_of", "")) for name, layer in model.blocks.items())
    told = next((f"block {name!r} keeps them in the memory of {whose}" for name, whose in foreign if whose), "")
    return trials, told, asked


def _counts(layer: nn.Layer) -> bool:
    """Tell whether a layer's number of operations may be believed.

    It may not if a layer of the user's has a matrix, and the default count of :class:`~mpizero.nn.Layer`, which is
    that of a layer without products.
    """
    own = not type(layer).__module__.startswith("mpizero.nn.")
    if own and type(layer).operations is not nn.Layer.operations:
        return True
    if children := layer.children():
        return all(_counts(child) for child in children.values())
    return not (own and any(len(spec.shape) > 1 for spec in layer.specs()))


def _local(
    sample: TrialSample, partitioned: PartitionedModel, grid: PlannedGrid
) -> tuple[TrialSample, tuple[GroupCall, ...]]:
    """Return the part of a sample that a rank's first block is given, and the group calls made before the blocks run.

    Not collective.
    """
    x, y, run = sample.x[:1], sample.y[:1], sample.run
    length = x.shape[1] if partitioned.parallel_layout.context_tiles > 1 else 0
    x, y = partitioned.cut_batch(x, y)
    grid.group_calls.clear()
    with suppress(DataError):  # a context group asks for lengths, and there are no other ranks
        partitioned.run_on(x, run)
    asked = tuple(grid.group_calls)
    return TrialSample(x, y, partitioned.run_on(x, replace(run, length=length))), asked
