"""Describe the axes of parallelism, the pipeline schedule, and how a model is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from mpizero._util.checks import Unexpected, is_whole
from mpizero.errors import ConfigError
from mpizero.layout import Axes, balanced_chunks, chunk_stages
from mpizero.layout.stages import explicit_cuts
from mpizero.nn.layer import call_located
from mpizero.types import ParameterSpec

#: The axes that tiles divide: of a tensor group and of a context group.
TILED_AXES = ("tensor", "context")
#: The most tiles of an axis.
MOST_TILES = 1 << 16
#: Number of tiles of both axes, or of each axis by its name; None, and for an axis without a number: the axis's size.
Tiles = int | Mapping[str, int] | None


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Describe the sizes and order of the axes of parallelism, and how a pipeline is cut and scheduled.

    Parameters
    ----------
    pipeline, tensor, context : int
        Number of pipeline stages, of tensor ranks that split layers, and of context ranks that split sequences.
    data : int
        Number of replicas; -1 makes as many replicas as there are ranks for.
    order : str
        Names of the axes, separated by commas. Ranks that differ only in the last axis have successive numbers. The
        context axis is added at the end if it is not named.
    schedule : str
        The pipeline schedule: "gpipe", "1f1b", "interleaved", "zero_bubble" or "zero_bubble_v".
    virtual_stages : int
        Number of chunks on every stage; only for "interleaved". "zero_bubble_v" always has two.
    cuts : sequence of int or None
        For every chunk after the first, the index of its first block among the model's blocks, counted from 0. None
        cuts so that the costs of the stages are balanced.
    costs : sequence of float or None
        Cost of every block in any unit, for example the seconds from :func:`measured_costs`; used if ``cuts`` is None.
        None takes the number of floating-point operations, or of parameters if the model cannot count its operations.
    tiles : int, mapping of str to int, or None
        Number of tiles of the tensor and the context axis, of both or by their names; see :attr:`tensor_tiles`.
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = -1
    context: int = 1
    order: str = "pipeline,tensor,data"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    cuts: Sequence[int] | None = None
    costs: Sequence[float] | None = None
    tiles: Tiles = None

    def __post_init__(self) -> None:
        _require_sequence("cuts", self.cuts, "the number of the first block of every later stage")
        _require_sequence("costs", self.costs, "a number for every block, in order")

    @property
    def tensor_tiles(self) -> int:
        """Number of parts in which layers that are split are computed: all group sizes with equal tiles compute alike.

        It is ``tiles``, if that is the size of the tensor axis times a power of two (1 included); otherwise, and with
        ``tiles=None``, it is the size.
        """
        return self._tiles_of("tensor")

    @property
    def context_tiles(self) -> int:
        """Number of parts of the sequence by which layers compute, found like :attr:`tensor_tiles`."""
        return self._tiles_of("context")

    @property
    def asked_tiles(self) -> dict[str, int]:
        """The number of tiles that the training has of each axis, whether the axis's size fits it or not."""
        asked = self.tiles if isinstance(self.tiles, Mapping) else dict.fromkeys(TILED_AXES, self.tiles)
        return {axis: asked.get(axis) or getattr(self, axis) for axis in TILED_AXES}

    @property
    def all_tiles(self) -> dict[str, int]:
        """The numbers :attr:`tensor_tiles` and :attr:`context_tiles` by axis."""
        return {axis: self._tiles_of(axis) for axis in TILED_AXES}

    def _tiles_of(self, axis: str) -> int:
        size, asked = int(getattr(self, axis)), self.asked_tiles[axis]
        return asked if fits_tiles(size, asked) else size

    @property
    def chunks(self) -> tuple[int, ...]:
        """For every chunk of the model, in order, the number of its stage; without a pipeline there is one chunk."""
        stages = chunk_stages(self.schedule, self.pipeline, self.virtual_stages)
        return stages if self.pipeline > 1 else (0,)

    def axes(self, world: int) -> Axes:
        """Return the sizes and order of the axes for ``world``, the number of ranks. Not collective.

        Raises
        ------
        GridError
            If the product of the sizes cannot be the number of ranks, or ``order`` is not valid.
        """
        return Axes.build(
            world, pipeline=self.pipeline, tensor=self.tensor, data=self.data, context=self.context, order=self.order
        )

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
            if odd := [cost for cost in self.costs if not isinstance(cost, Real)]:
                raise ConfigError(f"costs has {odd[0]!r}: expected a number for every block, in order")
            if len(self.costs) != len(blocks):
                raise ConfigError(
                    f"costs has {len(self.costs)} numbers, the model has {len(blocks)} blocks: {', '.join(blocks)}; "
                    "give one each, or leave costs out"
                )
            return [float(cost) for cost in self.costs]
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
        return {**self.__dict__, "cuts": self.cuts and tuple(self.cuts), "costs": self.costs and tuple(self.costs)}


def fits_tiles(size: int, tiles: int) -> bool:
    """Tell whether ranks of a group of ``size`` can compute ``tiles`` tiles: a power of two on each, 1 included."""
    each, rest = divmod(tiles, size)
    return rest == 0 and each > 0 and each & (each - 1) == 0


def check_tiles(value: Any) -> Tiles:
    """Check a number of tiles, or numbers by axis, and return them; None is allowed (a check of ``validation``)."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        if value.keys() <= set(TILED_AXES) and all(is_whole(number, 1, MOST_TILES) for number in value.values()):
            return {axis: int(value[axis]) for axis in TILED_AXES if axis in value} or None
    elif is_whole(value, 1, MOST_TILES):
        return int(value)
    raise Unexpected(f'a whole number from 1 to {MOST_TILES}, or one for the axis "tensor", "context" or each, by name')


def _require_sequence(name: str, value: Any, expected: str) -> None:
    if value is not None and (isinstance(value, str | Mapping) or not isinstance(value, Sequence | np.ndarray)):
        raise ConfigError(f"{name}={value!r:.60}: expected {expected}, as a list")


def block_operations(model: Any) -> dict[str, float] | None:
    """Return the number of floating-point operations of every block for one sample, forward plus backward.

    Return None if the model has no ``sample_shape``, or a block has no method ``operations``. Not collective.
    """
    shape = getattr(model, "sample_shape", None)
    if shape is None:
        return None
    found: dict[str, float] = {}
    for name, layer in model.blocks.items():
        if not hasattr(layer, "operations"):
            return None
        found[name] = float(sum(call_located("block", name, layer.operations, shape)))
        shape = layer.output_shape(shape)
    return found
