"""Make a rank's part of a model: the blocks of its pipeline stage, with layers split over tensor and context group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mpizero import nn
from mpizero._util.pytree import leaves_of
from mpizero.comm import ProcessGrid
from mpizero.errors import ConfigError
from mpizero.layout.flat import FlatLayout, joined
from mpizero.nn.models import run_on
from mpizero.parallel.partition.blocks import blocks_of
from mpizero.parallel.partition.parallel_layout import ParallelLayout
from mpizero.types import Array, BlockModel, Group, Layer, Loss, ParameterSpec, Run

Specs = Mapping[str, tuple[ParameterSpec, ...]]


class Use(NamedTuple):
    """Describe one use of a parameter: the pipeline stage that uses it, and which of the uses on that stage it is.

    ``number`` counts the uses on the stage from 0, in declared order.
    """

    stage: int
    number: int


@dataclass(frozen=True)
class LocalModel:
    """Hold the blocks of one rank as a model of blocks; the attributes are those of :class:`BlockModel`."""

    blocks: Mapping[str, Layer]
    loss: Loss
    dtype: np.dtype[Any]
    seed: int


@dataclass(frozen=True)
class PartitionedModel:
    """Hold one rank's part of a model, and how the whole model is cut into parts.

    Attributes
    ----------
    local : BlockModel or BlackBoxModel
        The blocks of this rank's stage, split over the tensor and context group.
    split : BlockModel or BlackBoxModel
        All blocks of the model, split over the tensor and context group.
    model : BlockModel or BlackBoxModel
        The whole model.
    context_group : Group or None
        The ranks that cut the sequences; None if nothing is split.
    parallel_layout : ParallelLayout
        Sizes of the axes of parallelism, pipeline schedule and cuts.
    cuts : tuple of tuple of str
        For every chunk of the whole model, the names of its blocks.
    stage : int
        Number of this rank's pipeline stage.
    """

    local: Any
    split: Any
    model: Any
    context_group: Group | None
    parallel_layout: ParallelLayout
    cuts: tuple[tuple[str, ...], ...]
    stage: int

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """The numbers of this stage's chunks, ascending."""
        return self.chunks_of(self.stage)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the numbers of a stage's chunks, ascending. Not collective."""
        return tuple(c for c, s in enumerate(self.parallel_layout.chunks) if s == stage)

    @property
    def splits_layers(self) -> bool:
        """Tell whether layers are split over ranks, by tensor or context parallelism."""
        return self.parallel_layout.tensor * self.parallel_layout.context > 1

    @property
    def has_tiles(self) -> bool:
        """Tell whether layers or sequences are cut into tiles, over ranks or on this one."""
        return self.split is not self.model

    @property
    def is_last(self) -> bool:
        """Tell whether this rank's stage has the model's last block, and so the loss."""
        return self.parallel_layout.chunks[-1] == self.stage

    @cached_property
    def uses(self) -> dict[str, tuple[Use, ...]]:
        """For every parameter that several stages use, by its name: all of its uses, in declared order."""
        return {name: uses for name, uses in self._all_uses.items() if len({use.stage for use in uses}) > 1}

    @property
    def has_shared_parameters(self) -> bool:
        """Tell whether this stage uses a parameter that another stage uses too."""
        return any(use.stage == self.stage for uses in self.uses.values() for use in uses)

    @cached_property
    def _all_uses(self) -> dict[str, tuple[Use, ...]]:
        found: dict[str, tuple[Use, ...]] = {}
        for chunk, names in enumerate(self.cuts):
            stage = self.parallel_layout.chunks[chunk]
            for block in names:
                for spec in blocks_of(self.split)[block]:
                    if spec.tied is not None and not spec.trainable:
                        continue  # it stays on the stage of its home: see partition_model
                    home = spec.tied or joined(block, spec.name)
                    earlier = found.get(home, ())
                    number = sum(use.stage == stage for use in earlier)
                    found[home] = (*earlier, Use(stage, number))
        return found

    def specs(self, stage: int) -> Specs:
        """Return the parameters of the blocks of ``stage``, by block. Not collective.

        If a block uses a parameter that a block of another stage declares, ``stage`` stores a copy of the parameter.
        The first use on ``stage`` is then listed as a parameter whose ``guest`` is the declared name; later uses on
        ``stage`` are tied to that copy.
        """
        every = blocks_of(self.split)
        here = [block for chunk in self.chunks_of(stage) for block in self.cuts[chunk]]
        homes = {joined(block, spec.name): spec for block in every for spec in every[block]}
        held = {joined(block, spec.name) for block in here for spec in every[block] if spec.tied is None}
        guests: dict[str, str] = {}
        result: dict[str, tuple[ParameterSpec, ...]] = {}
        for block in here:
            specs = []
            for spec in every[block]:
                home = spec.tied
                if home is None or home in held:
                    specs.append(spec)
                elif home in guests:
                    specs.append(replace(spec, tied=guests[home]))
                else:
                    guests[home] = joined(block, spec.name)
                    specs.append(replace(homes[home], name=spec.name, guest=home))
            result[block] = tuple(specs)
        return result

    def layout(self, stage: int, *, one_unit: bool, minimum_unit: int) -> FlatLayout:
        """Return the layout of the parameters of ``stage``; no unit has blocks of two chunks. Not collective.

        With ``one_unit`` each chunk is one unit. ``minimum_unit`` is the least number of elements of a unit.
        """
        groups = [self.cuts[chunk] for chunk in self.chunks_of(stage)]
        return FlatLayout.build(self.specs(stage), one_unit=one_unit, minimum_unit=minimum_unit, groups=groups)

    def run_on(self, x: Any, run: Run) -> Run:
        """Return ``run`` with the length of the whole sequences of micro-batch ``x``, which split layers need.

        Collective over the context group: one message per micro-batch, instead of one per layer. The length is computed
        from the first array of ``x`` on every rank. If no layer is split, ``run`` is returned unchanged.
        """
        return run_on(self.split, leaves_of(x)[0], run) if self.has_tiles else run

    def own_loss(self, loss: Any) -> Any:
        """Return ``loss`` adapted to the output of this rank's last block. Not collective.

        If the scores of classes are split over a tensor group and the loss needs all of them, the returned loss first
        joins them. In a context group it takes this rank's positions. None is returned for None.
        """
        return loss if loss is None or not self.has_tiles else self.split.loss_on_parts(loss)

    def own_places(self, x: Array) -> Array:
        """Return ``x`` cut to this rank's positions of the sequences; without a context group, ``x`` itself.

        Not collective.
        """
        own: Array = self.cut_batch(x, x)[0]
        return own

    def cut_batch(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return inputs and targets cut to this rank's positions of the sequences; see :func:`mpizero.nn.cut_batch`.

        Not collective.
        """
        if self.context_group is None or self.parallel_layout.context_tiles == 1:
            return x, y
        return nn.cut_batch(x, y, self.context_group, self.parallel_layout.context_tiles)

    def whole_scores(self, prediction: Array) -> Array:
        """Return a prediction with the scores of all classes, for this rank's positions of the sequences only.

        Collective over the tensor group.
        """
        from mpizero.nn.tensor_parallel import whole_scores

        return whole_scores(self.split, prediction)

    def whole_prediction(self, prediction: Array) -> Array:
        """Join the parts of a prediction: return the scores of all classes, for all positions of the sequences.

        Collective over the tensor and context group.
        """
        if not self.has_tiles:
            return prediction
        whole: Array = self.split.whole_prediction(prediction)
        return whole


def partition_model(
    model: Any,
    grid: ProcessGrid,
    parallel_layout: ParallelLayout,
    group_for: Callable[[Group], Group] = lambda group: group,
) -> PartitionedModel:
    """Split the layers of a model over this rank's tensor and context group, and take the blocks of its stage.

    Collective over the tensor and context group. ``group_for`` returns a group whose methods take and return arrays on
    the device where layers compute.

    Raises
    ------
    ConfigError
        If a black box is to be split, if a layer cannot be split, or if the model cannot be cut into these stages.
    """
    sizes = {"pipeline": parallel_layout.pipeline, "tensor": parallel_layout.tensor, "context": parallel_layout.context}
    tiles = parallel_layout.tensor_tiles, parallel_layout.context_tiles
    if max(*sizes.values(), *tiles) == 1:
        return PartitionedModel(model, model, model, None, parallel_layout, (tuple(blocks_of(model)),), 0)
    if parallel_layout.context > 1 and (averaged := averaged_names(model)):
        raise ConfigError(
            f"context={parallel_layout.context} cuts sequences, and {averaged[0]!r} is averaged over whole samples: "
            "use replicas, stages or tensor groups for this model (context=1)"
        )
    if not isinstance(model, BlockModel):
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"{type(model).__name__} is a black box, which cannot be split ({given}): give a model of blocks, or use "
            "data parallelism alone (pipeline=1, tensor=1, context=1)"
        )
    from mpizero.nn.virtual_ranks import tiled_model  # with all that tiles need, which few trainings have

    cuts = parallel_layout.cut(blocks_of(model), model)
    _refuse_frozen_copies(blocks_of(model), parallel_layout.chunks, cuts)
    tensor, context = group_for(grid.tensor_group), group_for(grid.context_group)
    split = tiled_model(model, tensor, context, tiles, {names[-1] for names in cuts})
    stage = grid.here.pipeline
    here = [block for c, s in enumerate(parallel_layout.chunks) if s == stage for block in cuts[c]]
    local = LocalModel({name: split.blocks[name] for name in here}, split.loss, model.dtype, model.seed)
    return PartitionedModel(local, split, model, context, parallel_layout, cuts, stage)


def _refuse_frozen_copies(specs: Specs, chunks: Sequence[int], cuts: Sequence[Sequence[str]]) -> None:
    """Raise ``ConfigError`` if a frozen layer uses a trained parameter of another stage.

    The frozen layer's stage would store a copy of the parameter that is never updated. ``chunks`` holds the stage of
    every chunk, ``cuts`` the names of its blocks.
    """
    stage_of = {block: chunks[chunk] for chunk, names in enumerate(cuts) for block in names}
    homes = {joined(block, spec.name): (block, spec) for block in specs for spec in specs[block] if spec.tied is None}
    for block in specs:
        for spec in specs[block]:
            if spec.tied is None or spec.trainable:
                continue
            home, shared = homes[spec.tied]
            if shared.trainable and stage_of[home] != stage_of[block]:
                raise ConfigError(
                    f"block {block!r} is frozen but shares {spec.tied!r}, which is trained on another stage (blocks "
                    f"{home!r} and {block!r} are on stages {stage_of[home]} and {stage_of[block]}): freeze both, or "
                    "give cuts that put them on one stage"
                )


def averaged_names(model: Any) -> list[str]:
    """Return the names of the averaged parameters of a whole model that steps change, in declared order.

    Not collective.
    """
    every = ((joined(block, spec.name), spec) for block, specs in blocks_of(model).items() for spec in specs)
    return [name for name, spec in every if spec.averaged and spec.trainable]


def optimized_names(model: Any) -> list[str]:
    """Return the names of the optimized parameters of a whole model, in declared order. Not collective.

    Tied uses of a parameter are not listed.
    """
    return [
        joined(block, spec.name)
        for block, specs in blocks_of(model).items()
        for spec in specs
        if spec.tied is None and spec.optimized
    ]
