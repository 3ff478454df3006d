"""Add sums over each parameter's tiles, and between ranks that hold different stages and tensor slices of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpizero.comm import ProcessGrid
from mpizero.layout.flat import FlatLayout
from mpizero.layout.sum_tree import evaluate, leaves_program
from mpizero.types import Array, ParameterSpec


class GlobalSums:
    """Add values of each parameter over the ranks of a replica, so that each element of the model counts once.

    The values of a split parameter, one for each of its tiles, are added in the order of the binary tree over the
    tile's number. So the sum does not depend on how many ranks hold the tiles.

    Construction and :meth:`merge` are collective over the model group, the ranks of a replica.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks.
    layout : FlatLayout
        The parameters that this rank holds. Values of a parameter that several stages use count only on the stage whose
        block declares it. Values of a parameter that all tensor ranks hold whole count only on tensor rank 0. Context
        ranks hold equal parameters; only context rank 0 counts.
    order : sequence of str
        The names of all optimized parameters of the model, in declared order.
    """

    def __init__(self, grid: ProcessGrid, layout: FlatLayout, order: Sequence[str]) -> None:
        self.comm = grid.model
        first = grid.here.tensor == 0
        specs = [e.spec for e in layout.parameters if e.spec.optimized and e.spec.guest is None]
        counted = [s for s in specs if (first or s.part is not None)] if grid.here.context == 0 else []
        self.counted = tuple(s.name for s in counted)
        own = [s.name for s in counted for _ in range(tiles_of(s))]
        everyone: list[list[str]] = self.comm.allgather_object(own, "parameters that count")
        self.counts = [len(names) for names in everyone]
        places: dict[str, list[int]] = {name: [] for name in order}
        for place, name in enumerate(name for names in everyone for name in names):
            places[name].append(place)  # ranks in the order of their tensor ranks: tiles in the order of their numbers
        self.places = places

    def merge(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return, for every optimized parameter of the model, the sum of the values that the ranks pass for it.

        Collective over the model group. ``sums`` holds, by parameter name, this rank's value for each tile that it
        holds. The result is in declared order.
        """
        local = np.array([value for name in self.counted for value in sums[name]], np.float64)
        every = np.empty(sum(self.counts), np.float64)
        self.comm.allgatherv(local, every, self.counts, "sums of parameters")
        return {name: over_tiles(every[places]) for name, places in self.places.items()}


def tiles_of(spec: ParameterSpec) -> int:
    """Return how many tiles of a parameter a rank holds: one of a parameter that is not cut into tiles."""
    return len(spec.part.tiles) or 1 if spec.part is not None else 1


def over_tiles(values: Sequence[float] | Array) -> float:
    """Return the sum of one value for each tile, in the order of the binary tree over the tile's number."""
    return evaluate(leaves_program(len(values)), values)
