"""Norms over tiles: one process that holds all tiles has the bits of ranks that hold one or two of them each.

The slices are made by hand, and the norms are computed here once more, tile by tile, with NumPy's indexing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm import ProcessGrid
from mpizero.layout import Axes, Partition
from mpizero.layout.flat import FlatLayout
from mpizero.layout.tensor_parts import part_shape
from mpizero.sharding import update
from mpizero.sharding.config import placement
from mpizero.sharding.full_params import GlobalView
from mpizero.sharding.params import Memory, ParameterStore
from mpizero.sharding.update import GlobalSums, Updater, UpdateScope
from mpizero.testing import parallel_assert, run_in_threads
from mpizero.tools.plan.memory import ShardSizes
from mpizero.types import Array, ParameterSpec, Part
from tests.parallel.parallel_layouts import selected

#: Shape, axis that is split (None: held whole by all), and blocks of that axis that are split one by one. Few of the
#: lengths divide by the number of tiles; of ``narrow`` some tiles are empty.
TABLE: dict[str, dict[str, tuple[tuple[int, ...], int | None, int]]] = {
    "first": {"token": ((37, 6), 0, 1), "scale": ((11,), None, 1), "narrow": ((5, 3), 1, 1)},
    "second": {
        "qkv": ((10, 51), 1, 3),
        "bias": ((51,), 0, 3),
        "kernel": ((3, 10, 4), 1, 1),
        "expand": ((70, 230), 1, 1),
        "shrink": ((230, 7), 0, 1),
    },
}


class Way(NamedTuple):
    """How a model of so many tiles is spread over ranks."""

    tiles: int
    tensor: int
    data: int
    strategy: str
    pipeline: int = 1


WAYS = [
    Way(4, 1, 1, "ddp"),
    Way(4, 1, 3, "zero1"),
    Way(4, 2, 1, "zero2"),
    Way(4, 2, 2, "zero3"),
    Way(4, 4, 1, "ddp"),
    Way(4, 4, 2, "zero3"),
    Way(4, 2, 1, "zero1", 2),
    Way(3, 3, 1, "zero1"),
    Way(3, 1, 2, "zero3"),
    Way(8, 2, 2, "zero2"),
    Way(8, 1, 4, "zero3"),
    Way(8, 8, 1, "zero1"),
]


def tile_of(shape: tuple[int, ...], axis: int, blocks: int, tile: int, tiles: int) -> tuple[tuple[int, int], ...]:
    width = shape[axis] // blocks
    mine = Partition(width, tiles).shard(tile)
    return tuple((b * width + mine.start, b * width + mine.stop) for b in range(blocks))


def spec_of(block: str, name: str, way: Way, rank: int) -> ParameterSpec:
    shape, axis, blocks = TABLE[block][name]
    spec = ParameterSpec(name, shape)
    if axis is None or way.tiles == 1:
        return spec
    held = range(rank * way.tiles // way.tensor, (rank + 1) * way.tiles // way.tensor)
    tiles = tuple(tile_of(shape, axis, blocks, tile, way.tiles) for tile in held)
    ranges = tuple(sorted(span for tile in tiles for span in tile))
    part = Part(shape, axis, ranges, tiles if len(tiles) > 1 else ())
    return replace(spec, shape=part_shape(part), part=part)


def by_levels(values: list[float]) -> float:
    """The sum in the order of the tree, level by level."""
    while len(values) > 1:
        values = [sum(values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0] if values else 0.0


def expected_sums(named: dict[str, Array], tiles: int) -> dict[str, float]:
    """The sum of squares of each parameter, tile by tile."""
    sums = {}
    for block, names in TABLE.items():
        for name, (_, axis, blocks) in names.items():
            values, parts = named[f"{block}.{name}"].astype(np.float64), []
            for tile in range(1 if axis is None else tiles):
                part = values
                if axis is not None:
                    ranges = tile_of(values.shape, axis, blocks, tile, tiles)
                    part = values.take([i for span in ranges for i in range(*span)], axis=axis)
                parts.append(by_levels([float(v) for v in np.square(part.reshape(-1))]))
            sums[f"{block}.{name}"] = by_levels(parts)
    return sums


def wholes(dtype: str, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shapes = {f"{block}.{name}": shape for block, names in TABLE.items() for name, (shape, _, _) in names.items()}
    return {name: np.exp(rng.normal(size=shape)).astype(dtype) for name, shape in shapes.items()}


def run(comm: Any, way: Way, dtype: str) -> tuple[Any, Any, bytes]:
    """Return sums of squares and norm of the gradients, and the parameters of the whole model after a step of LAMB."""
    given, grads = wholes(dtype, 1), wholes(dtype, 2)
    row = placement(way.strategy)
    grid = ProcessGrid.create(comm, axes=Axes(way.pipeline, way.tensor, way.data, 1))
    blocks = dict(list(TABLE.items())[grid.coordinates.pipeline :][: 3 - way.pipeline])
    local = {
        block: [spec_of(block, name, way, grid.coordinates.tensor) for name in names] for block, names in blocks.items()
    }
    layout, memory = FlatLayout.build(local, one_unit=row.one_unit), Memory(grid.node)
    store = ParameterStore(layout, grid, memory, row.shard_parameters, np.dtype(dtype))
    view = GlobalView(
        {b: [ParameterSpec(n, s[0]) for n, s in names.items()] for b, names in TABLE.items()}, store, grid
    )
    view.fill(np.concatenate([values.reshape(-1) for values in given.values()]))
    names = list(given)
    sums = GlobalSums(grid, layout, names) if grid.model.size > 1 else None
    updater = Updater(mz.LAMB(lr=0.3), store, UpdateScope(not row.shard_optimizer, True, sums))
    squares = ShardSizes(layout, grid.data.size).squares
    parallel_assert(comm, [squares(rank) for rank in range(grid.data.size)] == updater.trees._all_sums[0], "planned")
    reduced = np.concatenate([selected(e.spec, grads[e.spec.name]) for e in layout.parameters])
    found = updater._square_sums(reduced, [piece.gradient for piece in updater.trees.pieces])
    norm, _ = updater.norm(reduced)
    updater.update(reduced, 1, 0.0)
    store.all_gather()
    changed = view.vector().tobytes()
    memory.close()
    grid.close()
    return found, norm, changed


@pytest.mark.slow
def test_ranks_with_one_tile_or_several_have_the_norms_and_the_step_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtypes = {3: "float64", 4: "float32", 8: "float32"}
    expected = {tiles: expected_sums(wholes(dtype, 2), tiles) for tiles, dtype in dtypes.items()}
    assert expected[4] != expected[8]  # the number of tiles does change bits
    steps: dict[int, bytes] = {}
    for way, block in zip(WAYS, [1 << 16, 64, 512, 128] * 3, strict=True):
        monkeypatch.setattr(update, "HOST_BLOCK", block)
        size, dtype = way.pipeline * way.tensor * way.data, dtypes[way.tiles]
        for sums, norm, changed in run_in_threads(size, partial(run, way=way, dtype=dtype)):
            assert sums == expected[way.tiles], way
            assert norm == sum(sums.values()) ** 0.5, way
            assert changed == steps.setdefault(way.tiles, changed), way
