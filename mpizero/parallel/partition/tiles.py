"""Decide in how many tiles a model computes along the tensor and the context axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from mpizero import nn
from mpizero.errors import ConfigError
from mpizero.parallel.partition.local_model import averaged_names
from mpizero.parallel.partition.parallel_layout import TILED_AXES, ParallelLayout, Tiles, fits_tiles
from mpizero.types import BlockModel, Group


@dataclass(frozen=True)
class _Place:
    """Stand for a group where only a layer's form is asked for: nothing is sent."""

    size: int
    rank: int = 0


def in_tiles(parallel_layout: ParallelLayout, tiles: Tiles, model: Any) -> ParallelLayout:
    """Return the layout with the tiles in which ``model`` computes on it, a number for each axis. Not collective.

    ``tiles`` is the setting. A number for both axes holds for those along which the model can be split: the layers of
    an MLP, which has no sequences, are computed in tiles of the tensor axis alone.

    Raises
    ------
    ConfigError
        If there is a number of tiles for an axis along which the model cannot be split, or one for both axes and it
        can be split along neither; or if layers cannot be split into so many parts, such as heads.
    """
    if tiles is None:
        return parallel_layout
    asked = replace(parallel_layout, tiles=tiles)
    named, found, problems = isinstance(tiles, Mapping), dict[str, int](), list[str]()
    for axis in TILED_AXES:
        size, count = getattr(asked, axis), asked.asked_tiles(axis)
        if count is None or count == 1 or not fits_tiles(size, count):
            continue
        problem = _problem(model, axis) if size == 1 else ""
        if problem and named:
            raise ConfigError(f"tiles={tiles}: {problem}; leave tiles of the {axis} axis out")
        if problem:
            problems.append(problem)
            continue
        if axis == "tensor" and count > size:
            _check_parts(model, tiles, count)
        found[axis] = count
    if len(problems) == len(TILED_AXES):
        raise ConfigError(f"tiles={tiles}: {' and '.join(dict.fromkeys(problems))}; leave tiles out (tiles=None)")
    return replace(asked, tiles={axis: found.get(axis, getattr(asked, axis)) for axis in TILED_AXES})


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
        nn.context_model(model, cast("Group", _Place(2)))
    except ConfigError as error:
        return f"{name} has no form for a context group ({error})"
    return ""


def _has_split(model: BlockModel) -> bool:
    if callable(getattr(model, "split", None)):
        return True
    return any(_splits(layer) for layer in model.blocks.values())


def _splits(layer: Any) -> bool:
    split = getattr(layer, "split", None)
    try:
        return split is not None and split(cast("Group", _Place(2))) is not layer
    except ConfigError:  # of a layer that can be split, but not into two parts
        return True


def _check_parts(model: Any, tiles: Tiles, count: int) -> None:
    """Raise :class:`ConfigError` if layers cannot be split into ``count`` parts, such as attention by its heads."""
    try:
        nn.split_model(model, cast("Group", _Place(count)))
    except ConfigError as error:
        raise ConfigError(
            f"tiles={tiles} computes layers as a tensor group of {count} ranks does: {error}; or give other tiles"
        ) from error
