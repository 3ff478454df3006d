"""Define the section ``[parallel]``, the layout of a run over ranks; check it against model and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpizero._util.checks import whole
from mpizero.errors import ConfigError, GridError
from mpizero.layout import SCHEDULES, Axes, chunk_stages
from mpizero.layout.stages import explicit_cuts
from mpizero.sharding.config import ASSIGNMENTS
from mpizero.sharding.partition import ParallelLayout, Tiles, check_tiles, fits_tiles
from mpizero.train.config.message_settings import bucket
from mpizero.train.config.setting_checks import (
    ConfigSection,
    SettingError,
    choice,
    flag,
    many,
    optional,
    setting,
    shown,
    text,
)

#: Names of the strategies, by ZeRO stage.
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
#: The axes that split a model; the axis ``data`` replicates it.
_SPLITTING = ("pipeline", "tensor", "context")


@dataclass(frozen=True, kw_only=True)
class ParallelSection(ConfigSection):
    """Hold the layout of a run over ranks.

    ``pipeline``, ``tensor``, ``data`` and ``context`` are the sizes of the axes of the process grid; ``data = -1``
    takes all remaining ranks. All layouts that compute in the same tiles train to the same bits. ``tiles`` is described
    with :class:`~mpizero.sharding.config.ShardingConfig`, to which it is handed on.
    """

    strategy: str = setting("zero2", choice(*STRATEGIES))
    pipeline: int = setting(1, whole(1))
    tensor: int = setting(1, whole(1))
    data: int = setting(-1, whole(-1))
    context: int = setting(1, whole(1))
    tiles: Tiles = setting(None, check_tiles)
    schedule: str = setting("1f1b", choice(*SCHEDULES))
    virtual_stages: int = setting(1, whole(1))
    order: str = setting("pipeline,tensor,data", text)
    cuts: tuple[int, ...] | None = setting(None, optional(many(whole(1))))
    grain_assignment: str = setting("static", choice(*ASSIGNMENTS))
    share_node_memory: bool = setting(True, flag)
    ranks_per_node: int | None = setting(None, optional(whole(1)))
    bucket_mb: float | str | None = setting(None, optional(bucket))

    def check_combination(self) -> None:
        """Raise :class:`SettingError` for sizes, axis orders and schedules that fit no job and no model."""
        if self.data == 0:
            raise self.reject("data", "must be -1 (all remaining ranks) or a whole number >= 1")
        try:
            chunk_stages(self.schedule, self.pipeline, self.virtual_stages)
        except ConfigError as error:
            raise self.reject("virtual_stages", f"does not fit parallel.schedule: {error}") from None
        try:
            Axes.build(1, order=self.order)
        except GridError:
            raise self.reject(
                "order",
                "must name pipeline, tensor and data once each (and context, which else comes last), slowest first, "
                "separated by commas",
            ) from None

    @property
    def splits_model(self) -> bool:
        """True if a rank holds only a part of the model or of each sequence."""
        return any(getattr(self, axis) > 1 for axis in _SPLITTING)

    @property
    def zero_stage(self) -> int:
        """The strategy as a number: 0 for "ddp" to 3 for "zero3"."""
        return STRATEGIES.index(self.strategy)

    @property
    def chunks(self) -> int:
        """Number of chunks into which the model's blocks are cut; 1 without a pipeline."""
        return 1 if self.pipeline == 1 else len(chunk_stages(self.schedule, self.pipeline, self.virtual_stages))

    def axes(self, ranks: int) -> Axes:
        """Return the sizes and order of the axes for a job of ``ranks`` ranks.

        Raises
        ------
        SettingError
            If the product of the axes' sizes is not ``ranks``.
        """
        sizes = {axis: getattr(self, axis) for axis in (*_SPLITTING, "data")}
        try:
            return Axes.build(ranks, order=self.order, **sizes)
        except GridError as error:
            split = (axis for axis in _SPLITTING if sizes[axis] > 1)
            key = "data" if self.data != -1 else next(split, "pipeline")
            raise self.reject(key, f"does not fit this job: {error}") from None

    def check_ranks(self, ranks: int) -> None:
        """Raise an error if the product of the axes' sizes is not ``ranks``, the number of ranks of the job."""
        self.axes(ranks)

    def check_blocks(self, blocks: int) -> None:
        """Raise an error if the model has ``blocks`` blocks, and ``cuts`` or the pipeline's chunks do not fit them."""
        chunks = self.chunks
        if chunks > blocks:
            each = f" of {chunks // self.pipeline} parts each" if chunks > self.pipeline else ""
            raise self.reject(
                "pipeline",
                f"more stages than layers: {self.pipeline} stages{each} need at least {chunks} blocks, the model has "
                f"{blocks}; use fewer stages or a model with more layers",
            )
        if self.cuts is None:
            return
        try:
            explicit_cuts(self.cuts, blocks, chunks)
        except ConfigError:
            few = f"{chunks - 1} ascending numbers from 1 to {blocks - 1}"
            wanted = f"must be {few}, the first block of every part but the first" if chunks > 1 else "must be left out"
            raise self.reject("cuts", f"{wanted}: {chunks} parts of {blocks} blocks") from None

    def check_heads(self, heads: int) -> None:
        """Raise an error if the size of a tensor group does not divide the number of attention heads ``heads``."""
        if heads % self.tensor:
            fit = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise self.reject("tensor", f"must divide model.heads = {heads}; these do: {fit}")
        if heads % self.parallel_layout().tensor_tiles:
            numbers = (n for n in range(1, heads + 1) if heads % n == 0)
            fit = ", ".join(str(n) for n in numbers if fits_tiles(self.tensor, n))
            raise self.reject("tiles", f"its number for the tensor axis must divide model.heads = {heads}; {fit} do")

    def check_sequence(self, model: str) -> None:
        """Raise an error if the layout has a context group; called if the model, named ``model``, has no sequences."""
        if self.context > 1:
            raise self.reject("context", f"must be 1: model.name = {shown(model)} has no sequence to cut")

    def reject_split(self, allowed: str) -> SettingError:
        """Return the error about the first axis that splits the model; ``allowed`` says what is allowed."""
        return self.reject(next(axis for axis in _SPLITTING if getattr(self, axis) > 1), allowed)

    def parallel_layout(self) -> ParallelLayout:
        """Return the layout as a :class:`ParallelLayout`; without a pipeline, schedule and cuts keep their defaults."""
        sizes = {axis: getattr(self, axis) for axis in (*_SPLITTING, "data", "tiles")}
        if self.pipeline == 1:
            return ParallelLayout(**sizes, order=self.order)
        return ParallelLayout(
            **sizes, order=self.order, schedule=self.schedule, virtual_stages=self.virtual_stages, cuts=self.cuts
        )

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that :class:`mpizero.HybridShardedModel` takes for this layout."""
        parallel_layout = self.parallel_layout()
        sizes = {f"{axis}_parallel_size": getattr(parallel_layout, axis) for axis in (*_SPLITTING, "data")}
        rest = {name: getattr(parallel_layout, name) for name in ("order", "schedule", "virtual_stages", "cuts")}
        return {**sizes, **rest, "zero_stage": self.zero_stage}

    def figures(self, ranks: int) -> dict[str, Any]:
        """Return the size of each axis by its name, and the schedule's name (None without a pipeline).

        ``ranks`` is the number of ranks of the job. The result is printed by ``mpizero train``.
        """
        return {**self.axes(ranks).sizes, "schedule": self.schedule if self.pipeline > 1 else None}

    def describe(self, ranks: int) -> str:
        """Describe the layout of a job of ``ranks`` ranks, such as "pipeline 2 x tensor 1 x data 2, 1f1b, zero1"."""
        if not self.splits_model:
            return f"{self.strategy} on {ranks} rank{'s' if ranks > 1 else ''}"
        sizes = self.axes(ranks).sizes
        named = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != "context" or size > 1)
        virtual = f" with {self.virtual_stages} parts a stage" if self.schedule == "interleaved" else ""
        schedule = f", {self.schedule}{virtual}" if self.pipeline > 1 else ""
        return f"{named}{schedule}, {self.strategy}"
