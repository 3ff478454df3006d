"""Decide in how many tiles a model computes along the tensor and the context axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from mpizero import nn
from mpizero.errors import ConfigError
from mpizero.parallel.partition.local_model import averaged_names
from mpizero.parallel.partition.parallel_layout import TILED_AXES, ParallelLayout, Tiles, fits_tiles
from mpizero.types import BlockModel, Group

#: What results of most layouts are equal to.
SAME = "the bits of one process"


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
    asked, problems = replace(parallel_layout, tiles=tiles), dict[str, str]()
    for axis, count in asked.all_tiles.items():
        size = getattr(asked, axis)
        if problem := _problem(model, axis) if size == 1 and asked.asked_tiles[axis] > 1 else "":
            problems[axis] = problem
        elif axis == "tensor" and count != size:
            _check_parts(model, tiles, count)
    if isinstance(tiles, Mapping) and problems:
        axis, problem = next(iter(problems.items()))
        raise ConfigError(f"tiles={tiles}: {problem}; leave tiles of the {axis} axis out")
    if len(problems) == len(TILED_AXES):
        told = " and ".join(dict.fromkeys(problems.values()))
        raise ConfigError(f"tiles={tiles}: {told}; leave tiles out (tiles=None)")
    return replace(asked, tiles={axis: 1 if axis in problems else n for axis, n in asked.asked_tiles.items()})


def misfits(parallel_layout: ParallelLayout) -> list[str]:
    """Return a text for each axis whose size does not fit the number of tiles that the training has. Not collective."""
    found = []
    for axis, asked in parallel_layout.asked_tiles.items():
        if parallel_layout.all_tiles[axis] != asked:
            fitting = ", ".join(f"{axis}={size}" for size in range(1, asked + 1) if fits_tiles(size, asked))
            tiles = "1 tile" if asked == 1 else f"{asked} tiles"
            found.append(f"{axis}={getattr(parallel_layout, axis)} cannot compute {tiles}, only {fitting} can")
    return found


def within_rounding(
    parallel_layout: ParallelLayout,
    model: Any,
    compression: str | None = None,
    accumulate: int = 1,
    optimizer: Any = None,
) -> tuple[str, ...]:
    """Return why results have not the bits of one process with the same tiles, but agree within rounding; () if not.

    ``parallel_layout`` is the result of :func:`in_tiles`, ``compression`` and ``accumulate`` the settings
    ``gradient_compression`` and ``accumulate``. A layer that computes other bits in groups of other sizes says why by
    its attribute ``within_rounding``. An optimizer of which small differences become large ones says so by its
    attribute ``magnifies_rounding``. Not collective.
    """
    found = misfits(parallel_layout)
    for axis, count in parallel_layout.all_tiles.items():
        if count == parallel_layout.asked_tiles[axis] and not fits_tiles(1, count):
            found.append(f"{axis}={count} is no power of two, so one process cannot compute {count} tiles")
    if max(parallel_layout.all_tiles.values()) > 1:
        found += own_reasons(model)
    if accumulate > 1 and parallel_layout.context_tiles > 1:
        found.append(
            f"accumulate={accumulate}: a rank with several tiles of the sequences adds these first, a rank with one "
            "its micro-batches"
        )
    if compression is not None:
        found.append(f"gradient_compression={compression!r} rounds what ranks send")
    if found and (magnified := getattr(optimizer, "magnifies_rounding", "")):
        found.append(magnified)
    return tuple(found)


def exactness(tiles: Mapping[str, int], reasons: Sequence[str]) -> str:
    """Say what results are equal to: :data:`SAME`, or those of one process with ``tiles``, or within rounding."""
    if reasons:
        return f"within rounding ({'; '.join(reasons)})"
    return SAME if max(tiles.values()) == 1 else f"{SAME} with {shown_tiles(tiles)}"


def shown_tiles(tiles: Mapping[str, int]) -> str:
    """Return the setting for numbers of tiles by axis, such as "tiles=8" or "tiles={'tensor': 4}"."""
    several = {axis: count for axis, count in tiles.items() if count > 1}
    equal = len(set(tiles.values())) == 1
    return f"tiles={next(iter(tiles.values()))}" if equal else f"tiles={several}"


def own_reasons(model: Any) -> list[str]:
    """Return what layers of a model say of why their bits depend on the sizes of groups. Not collective."""
    blocks = model.blocks if isinstance(model, BlockModel) else {}
    return [f"block {name!r}: {reason}" for name, layer in blocks.items() for reason in _reasons(layer)]


def _reasons(layer: Any) -> list[str]:
    """Return the attributes ``within_rounding`` of a layer and of the layers in it."""
    inside = layer.children().values() if isinstance(layer, nn.Layer) else ()
    own = getattr(layer, "within_rounding", "")
    return [*([str(own)] if own else []), *(reason for child in inside for reason in _reasons(child))]


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
