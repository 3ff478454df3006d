"""Record in checkpoints the number of tiles of a training, so that it goes on with the same bits on other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpizero._util.text import notice
from mpizero.checkpoint.format import is_count
from mpizero.parallel.partition.parallel_layout import TILED_AXES, ParallelLayout, fits_tiles
from mpizero.parallel.partition.tiles import shown_tiles

if TYPE_CHECKING:
    from mpizero.parallel.engine import Engine

#: What errors say is expected of the record.
EXPECTED = "null, or tensor and context (whole numbers >= 1)"


def tile_record(parallel_layout: ParallelLayout) -> dict[str, dict[str, int]]:
    """Return what a checkpoint says beside the sizes of its layout: nothing if the tiles are these sizes."""
    tiles = parallel_layout.asked_tiles
    return {} if tiles == {axis: getattr(parallel_layout, axis) for axis in TILED_AXES} else {"tiles": tiles}


def is_tile_record(value: object) -> bool:
    """Tell whether ``value``, any JSON value from a checkpoint, is a number for each axis, or None."""
    return value is None or (
        isinstance(value, dict) and value.keys() == set(TILED_AXES) and all(is_count(n, 1) for n in value.values())
    )


def recorded_tiles(saved: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the number of tiles of each axis of the training that wrote a checkpoint; None if it does not say.

    ``saved`` is the checkpoint's attribute ``mpizero``. A checkpoint without a record had the sizes of its groups.
    """
    sizes: Mapping[str, Any] | None = saved.get("tiles") or saved.get("layout")
    return None if sizes is None else {axis: sizes.get(axis, 1) for axis in TILED_AXES}


def tell_tiles(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Print a notice on rank 0 if the training that wrote a checkpoint goes on with other tiles. Not collective."""
    theirs, layout = recorded_tiles(saved), engine.partitioned.parallel_layout
    if theirs is None or theirs == layout.all_tiles or not engine.prints_notices:
        return
    unfit = [axis for axis in TILED_AXES if not fits_tiles(getattr(layout, axis), theirs[axis])]
    advice = (
        f"no tiles keep those with {unfit[0]}={getattr(layout, unfit[0])}"
        if unfit
        else f"ShardingConfig({shown_tiles(theirs)}) keeps those"
    )
    notice(
        f"the checkpoint was trained with {shown_tiles(theirs)}, this training goes on with "
        f"{shown_tiles(layout.all_tiles)}: not with the bits of a run that was never interrupted; {advice}"
    )
