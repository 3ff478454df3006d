"""Add per-parameter sums over ranks that hold different pipeline stages and tensor parts of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpizero.comm import ProcessGrid
from mpizero.layout import FlatLayout


class GlobalSums:
    """Add per-parameter values over the ranks of a model group; copies of an element are counted once.

    Collective over the model group: construction and :meth:`merge`.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks.
    layout : FlatLayout
        The parameters that this rank holds. A parameter that several stages use counts on its home stage only. One
        that all tensor ranks hold whole counts on tensor rank 0 only.
    order : sequence of str
        All trainable parameters of the model, in declared order.
    """

    def __init__(self, grid: ProcessGrid, layout: FlatLayout, order: Sequence[str]) -> None:
        self.comm = grid.model
        first = grid.here.tensor == 0
        specs = [e.spec for e in layout.parameters if e.spec.trainable and e.spec.guest is None]
        counted = [s.name for s in specs if (first or s.part is not None)] if grid.here.context == 0 else []
        everyone: list[list[str]] = self.comm.allgather_object(counted, "parameters that count")
        self.counted = tuple(counted)
        self.counts = [len(names) for names in everyone]
        places: dict[str, list[int]] = {name: [] for name in order}
        for place, name in enumerate(name for names in everyone for name in names):
            places[name].append(place)
        self.places = places

    def merge(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Add each parameter's values over the ranks: return the sums by name, in declared order.

        Collective over the model group. The tensor parts of a parameter are added in the order of the tensor ranks.
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
