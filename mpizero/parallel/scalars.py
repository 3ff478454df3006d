"""Loss, weight and finiteness of every grain, agreed on by all ranks in one small message."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.comm import Communicator, ProcessGrid
from mpizero.comm.agreement import all_ranks
from mpizero.comm.trace import MODULUS
from mpizero.errors import CollectiveError, DataError, PeerFailure
from mpizero.layout import FlatLayout
from mpizero.layout.flat import joined
from mpizero.parallel.dealing import GlobalBatch
from mpizero.parallel.storage import flat_names
from mpizero.types import Array

#: Marks of a rank, in the low bits of its first row's last word: a value was not finite; a grain raised.
#: The bits above have its contract number, see comm/register.py's [Note: one sum].
_BAD, _FAILED = 1, 2
_MARK_BITS = 2


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


def everyone_of(grid: ProcessGrid) -> Communicator:
    """Return a communicator of all ranks: the data group where that is all of them. Not collective."""
    return grid.data if grid.data.size == grid.world.size else grid.world


class GrainScalars:
    """Collect what a rank knows of its grains, then agree.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks; all of the world agree, since each may hold another part of the model.
    layout : FlatLayout
        What this rank holds of it.
    """

    def __init__(self, grid: ProcessGrid, layout: FlatLayout) -> None:
        self.grid, self.layout = grid, layout
        self.everyone = everyone_of(grid)
        self.count = 0
        self.samples = 0
        self.error: Exception | None = None
        self._frozen = frozenset(e.spec.name for e in layout.entries if e.gradient < 0)
        self._mine: dict[int, list[float]] = {}
        self._bad: tuple[int, str] | None = None
        self._per_rank = 0
        self._spans: dict[int, Any] = {}

    def begin(self, batch: GlobalBatch) -> None:
        """Start a new global batch. Not collective."""
        self.count, self.samples = batch.count, batch.samples
        self._per_rank = -(-batch.count // self.grid.data.size)
        self._mine = {}
        self._bad = self.error = None
        self._spans = {g: (grain.micro_batches[0][2], grain.micro_batches[-1]) for g, grain in batch.grains.items()}

    def add(self, grain: int, loss: float, weight: float) -> None:
        """Add the loss sum and weight of one micro-batch of a grain. Not collective."""
        record = self._mine.setdefault(grain, [0.0, 0.0])
        record[0] += loss
        record[1] += weight
        if self._bad is None and not np.isfinite(loss):
            self._bad = (grain, "the loss")
        if self._bad is None and not np.isfinite(weight):
            self._bad = (grain, "the weight")

    def fail(self, error: Exception) -> None:
        """Remember that this rank cannot compute its grains; :meth:`agree` raises on every rank. Not collective."""
        if isinstance(error, CollectiveError | PeerFailure):
            raise error  # nobody would come to an agreement
        self.error = error

    def check(self, grain: int, block: str, views: Any) -> None:
        """Remember the first gradient of a block that is not finite. Not collective."""
        if self._bad is not None:
            return
        for name, view in flat_names(views):
            flat = view.reshape(-1)
            if joined(block, name) not in self._frozen and not kernels.backend(flat).reduction.all_finite(flat):
                self._bad = (grain, f"the gradient of {joined(block, name)!r}")
                return

    def losses(self) -> dict[int, float]:
        """Return the loss sums of this rank's grains of the last batch that count. Not collective."""
        return {grain: record[0] for grain, record in self._mine.items()}

    def agree(self) -> Totals:
        """Return the sums over all grains. Collective over all ranks.

        Raises
        ------
        DataError
            If the total weight is not above zero: there is nothing to average.
        Exception
            What a rank's own grains raised; on the other ranks a RemoteError that tells it.
        """
        size = self.everyone.size
        number = self.everyone.contract_number()
        local = np.full((max(1, self._per_rank), 4), -1.0)
        for place, (grain, (loss, weight)) in enumerate(self._mine.items()):
            local[place, :3] = grain, loss, weight
        mark = _FAILED if self.error is not None else _BAD if self._bad is not None else 0
        local.view(np.int64)[0, 3] = number << _MARK_BITS | mark
        table = np.empty((size * len(local), 4))
        self.everyone.allgather(local.reshape(-1), table.reshape(-1), "losses")
        marks = table.view(np.int64)[:: len(local), 3]
        if int((marks >> _MARK_BITS).sum()) % MODULUS:
            raise self.everyone.mismatch()
        marks &= (1 << _MARK_BITS) - 1
        if (marks == _FAILED).any():
            with all_ranks(self.everyone, "failed grains"):
                if self.error is not None:
                    raise self.error
        problem = self._named() if (marks == _BAD).any() else None
        rows = table[table[:, 0] >= 0]
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        loss, weight = tree_total(rows[:, 1:3])
        if weight <= 0:
            raise DataError(
                f"the global batch has weight {weight:g}: every target in it is ignored; expected more than 0"
            )
        return Totals(float(loss), float(weight), problem)

    def _named(self) -> str:
        """Return a description of the first problem. Collective over all ranks."""
        mine = None
        if self._bad is not None:
            grain, what = self._bad
            first, (x, _, last) = self._spans[grain]
            stop = last + (len(x) if hasattr(x, "__len__") else 1)
            mine = (grain, f"{what} is not finite on rank {self.everyone.rank}, samples {first} to {stop - 1}")
        found = [item for item in self.everyone.allgather_object(mine, "not finite") if item is not None]
        return str(min(found)[1])
