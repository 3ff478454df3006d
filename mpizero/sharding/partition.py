"""Split a model over ranks: by blocks into pipeline stages, by matrices and sequences over tensor and context groups.

:func:`check_model` checks that a user's model can be trained, and :func:`blocks_of` lists its blocks, from which
pipeline stages and units are made. :class:`ParallelLayout` holds the sizes of the axes, the schedule, and the cuts into
stages. From it :func:`partition_model` builds a rank's part of a model, a :class:`PartitionedModel`. Split layers
compute in tiles (docs/concepts.md), whose number decides the bits of the result: :func:`resolve_tiles` chooses the
number. :func:`describe_model` describes a model by named parts, so that ranks can check that they all have the same
model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from mpizero import nn
from mpizero._util.checks import Unexpected, is_whole, number, require, seed, whole
from mpizero._util.fingerprint import LARGEST_ARRAY, Fingerprint, qualified_name
from mpizero._util.pytree import leaves_of
from mpizero._util.settings import Settings, many, one_of, optional, setting
from mpizero.comm import Communicator, InMemoryCommunicator, ProcessGrid
from mpizero.errors import ArgumentError, ConfigError
from mpizero.layout import SCHEDULES, balanced_chunks, chunk_stages
from mpizero.layout.fields import Cut
from mpizero.layout.flat import FlatLayout, by_global_name, joined
from mpizero.layout.stages import explicit_cuts
from mpizero.nn.layer import call_located, integers_of
from mpizero.nn.models import run_on
from mpizero.sharding.mesh import SPLITTING, AxisSettings
from mpizero.types import Array, BlackBoxModel, BlockModel, Group, Init, Layer, Loss, ParameterSpec, Run

if TYPE_CHECKING:
    from mpizero.nn.space import DomainGroup

_LAYER = ("specs", "forward", "backward")


def check_model(model: Any) -> None:
    """Raise an error if ``model`` is no model of blocks and no functional model, or has an attribute of a wrong type.

    Not collective.

    Raises
    ------
    TypeError
        If ``model``, one of its blocks or its loss has a wrong type. The message says what it is and what it must be.
    ConfigError
        If the data type of the parameters is not supported, or the seed is invalid.
    """
    name = type(model).__name__
    if isinstance(model, type):
        raise ArgumentError(f"{model.__name__} is a class, not a model: call it to make one")
    if isinstance(model, BlockModel):
        if not isinstance(model.blocks, Mapping) or not model.blocks:
            raise ArgumentError(
                f"{name}.blocks must be layers by name, {{'encoder': layer}}, at least one; got {model.blocks!r:.60}"
            )
        for block, layer in model.blocks.items():
            _check_part(f"block {block!r} of {name}", "a layer", layer, _LAYER)
        _check_part(f"the loss of {name}", "a loss", model.loss, ("forward", "backward"))
        require(f"{name}.seed", model.seed, seed)
    elif not isinstance(model, BlackBoxModel):
        if any(kind.__module__.startswith("torch.nn") for kind in type(model).__mro__):
            raise ArgumentError(
                f"{name} is a module of PyTorch, which has no loss: give mz.adapters.torch.TorchModel(module, loss), "
                'where the loss returns a sum over samples, as torch.nn.CrossEntropyLoss(reduction="sum")'
            )
        raise ArgumentError(
            f"{name} is not a model: it needs 'blocks', 'loss', 'dtype' and 'seed' (a sequence of layers), or "
            "'parameters' and 'loss_and_grad' (a function; wrap it in mpizero.FunctionModel)"
        )
    dtype = getattr(model, "dtype", None)
    try:
        known = np.dtype(dtype) in (np.float32, np.float64)
    except TypeError:  # NumPy's answer to names that it does not know
        known = False
    if not known or dtype is None:
        raise ConfigError(f"parameters of type {dtype!r} are not supported ({name}.dtype): use float32 or float64")


def check_distinct_modules(comm: Communicator, model: Any) -> None:
    """Raise an error if several ranks that are threads of one process train the same PyTorch module.

    Collective over ``comm``. Such ranks would write to the module's gradients at the same time.

    Raises
    ------
    ConfigError
        On all ranks, if two ranks train the same module. The error names the module's class and the two ranks.
    """
    if comm.size == 1 or not isinstance(comm, InMemoryCommunicator) or isinstance(model, BlockModel):
        return
    gathered = comm.allgather_object(_trained_modules(model.loss_and_grad), "modules")
    for rank, modules in enumerate(gathered):
        for other in range(rank):
            if common := sorted(modules.items() & gathered[other].items()):
                raise ConfigError(
                    f"ranks {other} and {rank} are threads of one process and train the same PyTorch module, a "
                    f"{common[0][1]}: both would write to its gradients at once; let every rank make its own, for "
                    "example by copy.deepcopy in the function that run_in_threads calls"
                )


def _trained_modules(function: Any) -> dict[int, str]:
    """Return the class names, by ``id``, of the PyTorch modules with trainable parameters that a function refers to."""
    torch = sys.modules.get("torch")
    modules: dict[int, str] = {}
    left = [function] if torch is not None else []
    visited: set[int] = set()
    while left:
        value = left.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, torch.nn.Module):  # type: ignore[union-attr]
            if any(parameter.requires_grad for parameter in value.parameters()):
                modules[id(value)] = type(value).__name__
        elif isinstance(value, partial):
            left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            left += [value.__func__, value.__self__, *vars(value.__self__).values()]
        elif isinstance(value, FunctionType):
            used = inspect.getclosurevars(value)
            left += [*used.nonlocals.values(), *used.globals.values()]
    return modules


def _check_part(what: str, kind: str, part: Any, methods: tuple[str, ...]) -> None:
    if isinstance(part, type):
        raise ArgumentError(f"{what} is the class {part.__name__}, not {kind}: call it to make one")
    if lacking := [method for method in methods if not callable(getattr(part, method, None))]:
        raise ArgumentError(f"{what} is {part!r:.80}, not {kind}: it has no method {', '.join(lacking)}")


def blocks_of(model: Any) -> dict[str, tuple[ParameterSpec, ...]]:
    """Return a model's parameter specs by block name; each array of a functional model counts as a block.

    Raises
    ------
    TypeError
        If ``model`` is neither a model of blocks nor a functional model. The message names the attributes that each
        kind needs.
    """
    if isinstance(model, BlockModel):
        return {name: tuple(block.specs()) for name, block in model.blocks.items()}
    if not isinstance(model, BlackBoxModel):
        check_model(model)
    frozen, averaged = frozenset(getattr(model, "frozen", ())), frozenset(getattr(model, "averaged", ()))

    def spec(name: str, array: Array) -> ParameterSpec:
        shape, trained, parts = np.shape(array), name not in frozen, np.iscomplexobj(array)
        return ParameterSpec("", shape, Init(), len(shape) > 1, trained, averaged=name in averaged, complex=parts)

    parameters = {name: (spec(name, array),) for name, array in model.parameters.items()}
    return parameters | {name: () for name in integers_of(model)}


#: The axes that tiles divide: of a tensor group and of a context group.
TILED_AXES = ("tensor", "context")
#: The most tiles of an axis.
MOST_TILES = 1 << 16
#: Number of tiles of both axes, or of each axis by its name; None, and for an axis without a number: the axis's size.
Tiles = int | Mapping[str, int] | None


def check_tiles(value: Any) -> Tiles:
    """Check and return the setting ``tiles``: into how many parts layers or sequences are cut, by axis; or None."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        if value.keys() <= set(TILED_AXES) and all(is_whole(number, 1, MOST_TILES) for number in value.values()):
            return {axis: int(value[axis]) for axis in TILED_AXES if axis in value} or None
    elif is_whole(value, 1, MOST_TILES):
        return int(value)
    raise Unexpected(f'a whole number from 1 to {MOST_TILES}, or one for the axis "tensor", "context" or each, by name')


@dataclass(frozen=True, kw_only=True)
class SplitSettings(Settings):
    """Hold how a model is split into pipeline stages and tiles; :class:`~mpizero.Config` describes the settings."""

    schedule: str = setting("1f1b", one_of(*SCHEDULES), resume="free")
    virtual_stages: int = setting(1, whole(1), resume="free")
    cuts: Sequence[int] | None = setting(
        None, optional(many(whole(1), what="the number of the first block of every later stage")), resume="free"
    )
    costs: Sequence[float] | None = setting(
        None, optional(many(number(), what="a number for every block, in order")), resume="free"
    )
    tiles: Tiles = setting(None, check_tiles, resume="free")


@dataclass(frozen=True, kw_only=True)
class ParallelLayout(AxisSettings, SplitSettings):
    """Combine the axes of a :class:`~mpizero.Mesh` with the settings that say how a model is cut along the axes."""

    @property
    def tensor_virtual_ranks(self) -> int:
        """Number of tiles in which split layers compute; groups of all sizes with the same number give the same bits.

        The number is ``tiles``, if that is the size of the tensor axis times a power of two (1 included); otherwise,
        and with ``tiles=None``, it is the size of the axis.
        """
        return self.virtual_ranks["tensor"]

    @property
    def context_virtual_ranks(self) -> int:
        """Number of tiles in which layers compute sequences, determined like :attr:`tensor_virtual_ranks`."""
        return self.virtual_ranks["context"]

    @property
    def wanted_virtual_ranks(self) -> dict[str, int]:
        """The number of tiles that the settings request on each axis, even if the axis's ranks cannot compute them."""
        wanted = self.tiles if isinstance(self.tiles, Mapping) else dict.fromkeys(TILED_AXES, self.tiles)
        return {axis: wanted.get(axis) or getattr(self, axis) for axis in TILED_AXES}

    @property
    def virtual_ranks(self) -> dict[str, int]:
        """The numbers of tiles (parts of layers, or of sequences) by axis name, "tensor" and "context"."""
        sizes = {"tensor": self.tensor, "context": self.context}
        return {axis: n if can_host(sizes[axis], n) else sizes[axis] for axis, n in self.wanted_virtual_ranks.items()}

    @property
    def chunks(self) -> tuple[int, ...]:
        """For every chunk of the model, in order, the number of its stage; without a pipeline there is one chunk."""
        stages = chunk_stages(self.schedule, self.pipeline, self.virtual_stages)
        return stages if self.pipeline > 1 else (0,)

    def cut(self, blocks: Mapping[str, Sequence[ParameterSpec]], model: Any) -> tuple[tuple[str, ...], ...]:
        """Return, for every chunk, the names of its blocks. Not collective.

        ``blocks`` holds the parameters of every block of ``model``.

        Raises
        ------
        ConfigError
            If there are more chunks than blocks, if ``cuts`` leaves a chunk without blocks, if ``costs`` does not have
            one number for every block, or if counting the model's operations fails.
        """
        names = list(blocks)
        parts = len(self.chunks)
        if parts == 1 and self.cuts is None and self.costs is None:
            return (tuple(names),)  # no operations need to be counted
        if self.cuts is not None:
            bounds = explicit_cuts(self.cuts, len(names), parts)
        else:
            bounds = balanced_chunks(self._costs(blocks, model), self.chunks)
        return tuple(tuple(names[bounds[i] : bounds[i + 1]]) for i in range(parts))

    def _costs(self, blocks: Mapping[str, Sequence[ParameterSpec]], model: Any) -> list[float]:
        if self.costs is not None:
            if len(self.costs) != len(blocks):
                raise ConfigError(
                    f"costs has {len(self.costs)} numbers, the model has {len(blocks)} blocks: {', '.join(blocks)}; "
                    "give one each, or leave costs out"
                )
            return list(self.costs)
        try:
            counted = block_operations(model)
        except Exception as error:  # of a user's layer, or of a shape that its layers do not take
            raise ConfigError(
                f"the pipeline cannot be balanced: {type(error).__name__}: {error}; give costs=, a number a block, "
                "such as measured_costs(model, x, y, config) finds, or cuts=, the first block of every later stage"
            ) from error
        if counted is not None and any(counted.values()):
            return [float(counted[name]) for name in blocks]
        return [float(sum(spec.size for spec in specs)) for specs in blocks.values()]

    def comparable(self) -> dict[str, Any]:
        """Return all settings by name, for a check that they are equal on every rank."""
        return dict(self.__dict__)


def can_host(size: int, count: int) -> bool:
    """Tell whether a group of ``size`` ranks can compute ``count`` tiles: 1, 2, 4, ... on each rank."""
    each, rest = divmod(count, size)
    return rest == 0 and each > 0 and each & (each - 1) == 0


def block_operations(model: Any) -> dict[str, float] | None:
    """Return the number of floating-point operations of every block for one sample, forward plus backward.

    Return None if the model has no ``sample_shape``, or a block has no method ``operations``. Not collective.
    """
    shape = getattr(model, "sample_shape", None)
    if shape is None:
        return None
    operations: dict[str, float] = {}
    for name, layer in model.blocks.items():
        if not hasattr(layer, "operations"):
            return None
        operations[name] = float(sum(call_located("block", name, layer.operations, shape)))
        shape = layer.output_shape(shape)
    return operations


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
        The ranks over which sequences, or the fields of a domain, are cut; None if the model is not split.
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
        """The indices of this stage's chunks, ascending."""
        return self.chunks_of(self.stage)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the indices of a stage's chunks, ascending. Not collective."""
        return tuple(c for c, s in enumerate(self.parallel_layout.chunks) if s == stage)

    @property
    def splits_layers(self) -> bool:
        """Tell whether layers are split over ranks, by tensor or context parallelism."""
        return self.parallel_layout.tensor * self.parallel_layout.sample_parts > 1

    @property
    def is_split(self) -> bool:
        """Tell whether layers or sequences are cut into tiles, over several ranks or on this rank."""
        return self.split is not self.model

    @cached_property
    def cuts_sequences(self) -> bool:
        """Tell whether sequences are cut into parts, over a context group or into tiles on this rank."""
        return self.parallel_layout.context_virtual_ranks > 1

    @cached_property
    def cut(self) -> Cut | None:
        """The cut by which the ranks of a domain share the space of fields; None without a domain."""
        return Cut(self.parallel_layout.domain) if self.parallel_layout.domain else None

    @property
    def is_last(self) -> bool:
        """Tell whether this rank's stage has the model's last block, and so the loss."""
        return self.parallel_layout.chunks[-1] == self.stage

    @cached_property
    def uses(self) -> dict[str, tuple[Use, ...]]:
        """For every parameter that several stages use, by name: all places in the model that use it, in order."""
        return {name: uses for name, uses in self._all_uses.items() if len({use.stage for use in uses}) > 1}

    @property
    def has_shared_parameters(self) -> bool:
        """Tell whether this stage uses a parameter that another stage uses too."""
        return any(use.stage == self.stage for uses in self.uses.values() for use in uses)

    @cached_property
    def _all_uses(self) -> dict[str, tuple[Use, ...]]:
        uses: dict[str, tuple[Use, ...]] = {}
        for chunk, names in enumerate(self.cuts):
            stage = self.parallel_layout.chunks[chunk]
            for block in names:
                for spec in blocks_of(self.split)[block]:
                    if spec.tied is not None and not spec.trainable:
                        continue  # it has no gradient to exchange: see _refuse_frozen_copies
                    home = spec.tied or joined(block, spec.name)
                    earlier = uses.get(home, ())
                    number = sum(use.stage == stage for use in earlier)
                    uses[home] = (*earlier, Use(stage, number))
        return uses

    def specs(self, stage: int) -> Specs:
        """Return the parameters of the blocks of ``stage``, by block. Not collective.

        If a block uses a parameter that a block of another stage declares, ``stage`` stores a copy of the parameter.
        The first use on ``stage`` is then listed as a parameter whose ``guest`` is the declared name; later uses on
        ``stage`` are tied to that copy.
        """
        every = blocks_of(self.split)
        local_blocks = [block for chunk in self.chunks_of(stage) for block in self.cuts[chunk]]
        homes = by_global_name(every)
        stored = {joined(block, spec.name) for block in local_blocks for spec in every[block] if spec.tied is None}
        guests: dict[str, str] = {}
        result: dict[str, tuple[ParameterSpec, ...]] = {}
        for block in local_blocks:
            specs = []
            for spec in every[block]:
                home = spec.tied
                if home is None or home in stored:
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
        """Return ``run`` with the full sequence length of micro-batch ``x``, which split layers need.

        Collective over the context group: one message per micro-batch, instead of one per layer. The length is computed
        from the first array of ``x`` on every rank. If no layer is split, ``run`` is returned unchanged.
        """
        return run_on(self.split, leaves_of(x)[0], run) if self.is_split else run

    def local_loss(self, loss: Any) -> Any:
        """Return ``loss`` adapted to the output of this rank's last block. Not collective.

        If the scores of classes are split over a tensor group and the loss needs all of them, the returned loss first
        gathers them. In a context group the returned loss takes predictions at this rank's positions of the sequences.
        If ``loss`` is None, None is returned.
        """
        if loss is not None:
            _check_part("the loss", "a loss", loss, ("forward",))
        return loss if loss is None or not self.is_split else self.split.loss_on_parts(loss)

    def local_positions(self, x: Array) -> Array:
        """Return ``x`` cut to this rank's positions of the sequences; without a context group, ``x`` itself.

        Not collective.
        """
        local: Array = self.cut_batch(x, x)[0]
        return local

    def cut_batch(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return inputs and targets cut to this rank's positions of the sequences; see :func:`mpizero.nn.cut_batch`.

        Not collective.
        """
        if self.context_group is None or not self.cuts_sequences:
            return x, y
        return nn.cut_batch(x, y, self.context_group, self.parallel_layout.context_virtual_ranks)

    def gather_class_scores(self, prediction: Array) -> Array:
        """Return a prediction with the scores of all classes, for this rank's positions of the sequences only.

        Collective over the tensor group.
        """
        from mpizero.nn.tensor_parallel import gather_scores

        return gather_scores(self.split, prediction)

    def join_prediction(self, prediction: Array) -> Array:
        """Join the parts of a prediction: return the scores of all classes, for all positions of the sequences.

        Collective over the tensor group and the context group.
        """
        if not self.is_split:
            return prediction
        joined: Array = self.split.whole_prediction(prediction)
        return joined


def partition_model(
    model: Any,
    grid: ProcessGrid,
    parallel_layout: ParallelLayout,
    group_for: Callable[[Group], Group] = lambda group: group,
) -> PartitionedModel:
    """Split a model's layers over this rank's tensor and context group, and select the blocks of its stage.

    Collective over the tensor and context group. ``group_for`` returns a group whose methods take and return arrays on
    the device where layers compute.

    Raises
    ------
    ConfigError
        If a functional model is to be split, if a layer cannot be split, or if the model cannot be cut into these
        stages.
    """
    domain = parallel_layout.domain
    sizes = {axis: getattr(parallel_layout, axis) for axis in SPLITTING} | ({"domain": domain} if domain else {})
    virtual_ranks = parallel_layout.tensor_virtual_ranks, parallel_layout.context_virtual_ranks
    if not parallel_layout.splits_model and max(virtual_ranks) == 1:
        return PartitionedModel(model, model, model, None, parallel_layout, (tuple(blocks_of(model)),), 0)
    if parallel_layout.sample_parts > 1 and (averaged := averaged_names(model)):
        what = f"domain={domain} cuts fields" if domain else f"context={parallel_layout.context} cuts sequences"
        raise ConfigError(
            f"{what}, and {averaged[0]!r} is averaged over whole samples: use replicas, stages or tensor groups for "
            "this model (context=1)"
        )
    if not isinstance(model, BlockModel):
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"{type(model).__name__} is a black box, which cannot be split ({listed}): give a model of blocks, or use "
            "data parallelism alone (pipeline=1, tensor=1, context=1)"
        )
    from mpizero.nn.domain_parallel import domain_model  # imported late: few trainings have domains or tiles
    from mpizero.nn.virtual_ranks import tiled_model

    cuts = parallel_layout.cut(blocks_of(model), model)
    _refuse_frozen_copies(blocks_of(model), parallel_layout.chunks, cuts)
    tensor, context = group_for(grid.tensor_group), group_for(grid.context_group)
    if domain:
        split: Any = domain_model(model, Cut(domain), cast("DomainGroup", context))
    else:
        split = tiled_model(model, tensor, context, virtual_ranks, {names[-1] for names in cuts})
    stage = grid.coordinates.pipeline
    local_blocks = [block for c, s in enumerate(parallel_layout.chunks) if s == stage for block in cuts[c]]
    local = LocalModel({name: split.blocks[name] for name in local_blocks}, split.loss, model.dtype, model.seed)
    return PartitionedModel(local, split, model, context, parallel_layout, cuts, stage)


def _refuse_frozen_copies(specs: Specs, chunks: Sequence[int], cuts: Sequence[Sequence[str]]) -> None:
    """Raise ``ConfigError`` if a frozen layer uses a trained parameter of another stage.

    The frozen layer's stage would store a copy of the parameter that is never updated. ``chunks`` holds the stage of
    every chunk, ``cuts`` the names of every chunk's blocks.
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
    """Return the names of a whole model's averaged parameters (running means) that are not frozen, in declared order.

    Not collective.
    """
    every = by_global_name(blocks_of(model))
    return [name for name, spec in every.items() if spec.averaged and spec.trainable]


def optimized_names(model: Any) -> list[str]:
    """Return the names of the optimized parameters of a whole model, in declared order. Not collective.

    Tied uses of a parameter are not listed.
    """
    every = by_global_name(blocks_of(model))
    return [name for name, spec in every.items() if spec.tied is None and spec.optimized]


@dataclass(frozen=True)
class _StandInGroup:
    """Represent a group of ranks in checks whether a layer can be split, which send no messages."""

    size: int
    rank: int = 0


def resolve_tiles(parallel_layout: ParallelLayout, tiles: Tiles, model: Any) -> ParallelLayout:
    """Return the layout with the number of tiles in which ``model`` computes on each axis. Not collective.

    ``tiles`` is the setting of that name. A single number applies to the axes along which the model can be split: to
    the tensor axis alone for an MLP, which has no sequences.

    Raises
    ------
    ConfigError
        If ``tiles`` names an axis along which the model cannot be split, if the model can be split along neither axis,
        or if a layer cannot be split into so many parts, such as attention with fewer heads.
    """
    if tiles is None:
        return parallel_layout
    tiled, problems = replace(parallel_layout, tiles=tiles), dict[str, str]()
    for axis, count in tiled.virtual_ranks.items():
        size = getattr(tiled, axis)
        if problem := _problem(model, axis) if size == 1 and tiled.wanted_virtual_ranks[axis] > 1 else "":
            problems[axis] = problem
        elif axis == "tensor" and count != size:
            _check_parts(model, tiles, count)
    if isinstance(tiles, Mapping) and problems:
        axis, problem = next(iter(problems.items()))
        raise ConfigError(f"tiles={tiles}: {problem}; leave tiles of the {axis} axis out")
    if len(problems) == len(TILED_AXES):
        reasons = " and ".join(dict.fromkeys(problems.values()))
        raise ConfigError(f"tiles={tiles}: {reasons}; leave tiles out (tiles=None)")
    return replace(tiled, tiles={axis: 1 if axis in problems else n for axis, n in tiled.wanted_virtual_ranks.items()})


def incompatible_axes(parallel_layout: ParallelLayout) -> list[str]:
    """Return a message for each axis whose ranks cannot compute the requested number of tiles. Not collective."""
    problems = []
    for axis, count in parallel_layout.wanted_virtual_ranks.items():
        if parallel_layout.virtual_ranks[axis] != count:
            fitting = ", ".join(f"{axis}={size}" for size in range(1, count + 1) if can_host(size, count))
            wanted = "1 tile" if count == 1 else f"{count} tiles"
            problems.append(f"{axis}={getattr(parallel_layout, axis)} cannot compute {wanted}, only {fitting} can")
    return problems


def _problem(model: Any, axis: str) -> str:
    """Return why a model cannot be split along an axis; "" if it can."""
    name = type(model).__name__
    if not isinstance(model, BlockModel):
        return f"{name} is a black box, whose function computes whole samples"
    if axis == "tensor":
        return "" if _has_split(model) else f"no block of {name} has a form for a tensor group"
    if averaged := averaged_names(model):
        return f"{averaged[0]!r} of {name} is averaged over whole samples"
    try:
        nn.context_model(model, cast("Group", _StandInGroup(2)))
    except ConfigError as error:
        return f"{name} has no form for a context group ({error})"
    return ""


def _has_split(model: BlockModel) -> bool:
    return callable(getattr(model, "split", None)) or any(map(_splits, model.blocks.values()))


def _splits(layer: Any) -> bool:
    split = getattr(layer, "split", None)
    try:
        return split is not None and split(cast("Group", _StandInGroup(2))) is not layer
    except ConfigError:  # of a layer that can be split, but not into two parts
        return True


def _check_parts(model: Any, tiles: Tiles, count: int) -> None:
    """Raise :class:`ConfigError` if layers cannot be split into ``count`` parts, such as attention by its heads."""
    try:
        nn.split_model(model, cast("Group", _StandInGroup(count)))
    except ConfigError as error:
        raise ConfigError(
            f"tiles={tiles} computes layers as a tensor group of {count} ranks does: {error}; or give other tiles"
        ) from error


#: Attributes of a model that ``describe_model`` lists under names of their own.
_APART = frozenset({".blocks", ".loss", ".parameters", ".start_values"})


def describe_model(model: Any, blocks: Mapping[str, tuple[ParameterSpec, ...]]) -> dict[str, Any]:
    """Return the contents of a model by descriptive names, to be compared between ranks. Not collective.

    Values that the user set come first, such as the class, the layers, the loss and the seed; derived values follow,
    such as the types and shapes of the parameters. ``blocks`` holds the parameters of every block.
    """
    described: dict[str, Any] = {"the class of the model": qualified_name(type(model))}
    fields = Fingerprint().parts(model).items
    described["the model"] = {step.removeprefix("."): item for step, item in fields.items() if step not in _APART}
    if hasattr(model, "blocks"):
        described["the names of the blocks"] = list(model.blocks)
        described |= {f"block {name!r}" if name else "the only block": one for name, one in model.blocks.items()}
        described["the order of layers"] = {name: _below(layer) for name, layer in model.blocks.items()}
        described |= {"the loss": model.loss, "the seed": model.seed}
    names = by_global_name(blocks)
    described["the parameter table"] = {"dtype": np.dtype(model.dtype), **names}
    described["the order of parameters"] = list(names)  # of a mapping made from a set it differs by process
    start = getattr(model, "start_values", None)
    if start is None:
        start = {} if hasattr(model, "blocks") else model.parameters
    described["the start values"] = {name: _in_pieces(values) for name, values in start.items()}
    return described


def _below(layer: Any) -> list[str]:
    """List the dotted names of all layers inside ``layer``, in their order; empty if there are none."""
    children = layer.children() if hasattr(layer, "children") else {}
    return [joined(name, inner) for name, child in children.items() for inner in ("", *_below(child))]


def _in_pieces(values: Any) -> Any:
    """Return ``values`` as an array, or as a list of flat pieces if it is too large to be compared in one piece."""
    array = np.asarray(values)
    pieces = array.nbytes // LARGEST_ARRAY + 1
    return array if pieces == 1 else np.array_split(array.reshape(-1), pieces)
