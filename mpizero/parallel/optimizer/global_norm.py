"""Add sums over each parameter's elements between ranks that hold different stages and tensor slices of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpizero.comm import ProcessGrid
from mpizero.layout import FlatLayout


class GlobalSums:
    """Add one value for each parameter over the ranks of a replica, so that each element of the model counts once.

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
        counted = [s.name for s in specs if (first or s.part is not None)] if grid.here.context == 0 else []
        everyone: list[list[str]] = self.comm.allgather_object(counted, "parameters that count")
        self.counted = tuple(counted)
        self.counts = [len(names) for names in everyone]
        places: dict[str, list[int]] = {name: [] for name in order}
        for place, name in enumerate(name for names in everyone for name in names):
            places[name].append(place)
        self.places = places

    def merge(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return, for every optimized parameter of the model, the sum of the values that the ranks pass for it.

        Collective over the model group. ``sums`` holds this rank's values by parameter name. The values of the tensor
        ranks that hold slices of a parameter are added in the order of these ranks. The result is in declared order.
        """
        local = np.array([sums[name] for name in self.counted], np.float64)
        every = np.empty(sum(self.counts), np.float64)
        self.comm.allgatherv(local, every, self.counts, "sums of parameters")
        merged = {}
        for name, places in self.places.items():
            total = float(every[places[0]])
            for place in places[1:]:
                total += float(every[place])
            merged[name] = total
        return merged
