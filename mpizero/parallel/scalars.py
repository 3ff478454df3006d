"""Loss, weight and finiteness of every grain, agreed on by all ranks in one small message."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.comm import ProcessGrid
from mpizero.errors import DataError
from mpizero.layout import FlatLayout
from mpizero.layout.flat import joined
from mpizero.parallel.dealing import GlobalBatch
from mpizero.parallel.storage import flat_names
from mpizero.types import Array


class Totals(NamedTuple):
    """Sums over the global batch; ``problem`` names the first value that is not finite."""

    loss: float
    weight: float
    problem: str | None


def tree_total(values: Array) -> Array:
    """Add the rows of a (leaves, n) array by the canonical tree over the leaves."""
    while len(values) > 1:
        pairs = values[: len(values) // 2 * 2]
        summed = pairs[0::2] + pairs[1::2]
        values = np.concatenate([summed, values[len(pairs) :]])
    total: Array = values[0]
    return total


class GrainScalars:
    """Collect what a rank knows of its grains, then agree."""

    def __init__(self, grid: ProcessGrid, layout: FlatLayout) -> None:
        self.grid, self.layout = grid, layout
        self.count = 0
        self.samples = 0
        self._mine: dict[int, list[float]] = {}
        self._bad: tuple[int, str] | None = None
        self._per_rank = 0
        self._spans: dict[int, Any] = {}

    def begin(self, batch: GlobalBatch) -> None:
        """Start a new global batch. Not collective."""
        self.count, self.samples = batch.count, batch.samples
        self._per_rank = -(-batch.count // self.grid.data.size)
        self._mine = {}
        self._bad = None
        self._spans = {g: (grain.micro_batches[0][2], grain.micro_batches[-1]) for g, grain in batch.grains.items()}

    def add(self, grain: int, loss: float, weight: float) -> None:
        """Add the loss sum and weight of one micro-batch of a grain. Not collective."""
        record = self._mine.setdefault(grain, [0.0, 0.0])
        record[0] += loss
        record[1] += weight
        if not np.isfinite(loss) and self._bad is None:
            self._bad = (grain, "the loss")

    def check(self, grain: int, block: str, views: Any) -> None:
        """Remember the first gradient of a block that is not finite. Not collective."""
        if self._bad is not None:
            return
        for name, view in flat_names(views):
            flat = view.reshape(-1)
            if not kernels.backend(flat).reduction.all_finite(flat):
                self._bad = (grain, f"the gradient of {joined(block, name)!r}")
                return

    def agree(self) -> Totals:
        """Return the sums over all grains. Collective over the data group.

        Raises
        ------
        DataError
            If the total weight is zero: there is nothing to average.
        """
        size = self.grid.data.size
        local = np.full((self._per_rank, 4), -1.0)
        for place, (grain, (loss, weight)) in enumerate(self._mine.items()):
            local[place] = (grain, loss, weight, float(self._bad is not None and self._bad[0] == grain))
        table = np.empty((size * self._per_rank, 4))
        self.grid.data.allgather(local.reshape(-1), table.reshape(-1), "losses")
        rows = table[table[:, 0] >= 0]
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        loss, weight = tree_total(rows[:, 1:3])
        problem = self._named() if (rows[:, 3] > 0).any() else None
        if weight == 0:
            raise DataError("the global batch has weight 0: every target in it is ignored")
        return Totals(float(loss), float(weight), problem)

    def _named(self) -> str:
        """Return a description of the first problem. Collective over the data group."""
        mine = None
        if self._bad is not None:
            grain, what = self._bad
            first, (x, _, last) = self._spans[grain]
            stop = last + (len(x) if hasattr(x, "__len__") else 1)
            mine = (grain, f"{what} is not finite on rank {self.grid.data.rank}, samples {first} to {stop - 1}")
        found = [item for item in self.grid.data.allgather_object(mine, "not finite") if item is not None]
        return str(min(found)[1])
