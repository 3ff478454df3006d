"""Six classic faults of parallel training, planted into layouts of several ranks; one process stays right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpizero as mz
from mpizero.comm.group import CommunicatorGroup
from mpizero.parallel import engine
from mpizero.parallel.engine import Engine
from mpizero.parallel.rows import GradientRows
from mpizero.parallel.storage import ParameterStore
from mpizero.parallel.update import Updater
from mpizero.testing import Finding, compare_layouts
from mpizero.types import Run


def gpt(comm: Any = None, **changes: Any) -> mz.nn.GPT:
    settings = {"dim": 12, "layers": 1, "heads": 2, "sequence": 8, "vocabulary": 23, "tied": True}
    return mz.nn.GPT(**{**settings, **changes})


def texts(count: int, samples: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 23, (samples, 8)), rng.integers(0, 23, (samples, 8))) for _ in range(count)]


def compared(layout: str, comm: Any = None, model: Callable[[Any], Any] = gpt, **settings: Any) -> Any:
    """Three steps of a small model on one layout."""
    settings = {"micro_batch": 1, "make_optimizer": lambda: mz.AdamW(lr=1e-2), **settings}
    return compare_layouts(model, settings.pop("batches", texts(3)), [layout], comm=comm, **settings)


def finding(*args: Any, **settings: Any) -> Finding:
    """What is found in it."""
    (found,) = compared(*args, **settings).findings
    return found


def wrong_divisor(monkeypatch: Any) -> None:
    """Means of means: the sum is divided by the number of ranks once more."""
    right = Engine._divisor
    monkeypatch.setattr(Engine, "_divisor", lambda self, totals: right(self, totals) * self.grid.world.size)


def missed_clip(monkeypatch: Any, first: int, ranks: Callable[[int], bool] = lambda rank: True) -> None:
    """From step ``first`` on, some ranks use their gradient unclipped."""
    right = Updater.scale

    def scale(self: Updater, reduced: Any, factor: float) -> None:
        world = self.grid.world
        if world.size == 1 or self.step_count + 1 < first or not ranks(world.rank):
            right(self, reduced, factor)

    monkeypatch.setattr(Updater, "scale", scale)


def tie_counted_twice(monkeypatch: Any) -> None:
    """The gradient of the output head is added to the token table's twice."""
    right = Updater.add_uses

    def add_uses(self: Updater, reduced: Any) -> None:
        for _ in range(1 if self.grid.world.size == 1 else 2):
            right(self, reduced)

    monkeypatch.setattr(Updater, "add_uses", add_uses)


def stale_halo(monkeypatch: Any) -> None:
    """What arrives from a neighbour is what it sent in the evaluation before: one hop of one layer and micro-batch."""
    right = CommunicatorGroup.shift

    def shift(self: Any, arrays: Any, by: int, tag: str = "") -> Any:
        request = right(self, arrays, by, tag)
        if tag == "ring gradients":
            return request
        history = self.__dict__.setdefault("history", [])
        fresh = tuple(a.copy() for a in request.wait())
        history.append(fresh)
        request._received = history[-2] if len(history) > 1 else fresh
        return request

    monkeypatch.setattr(CommunicatorGroup, "shift", shift)


def stale_parameters(monkeypatch: Any, first: int, rank: int) -> None:
    """From step ``first`` on, one rank keeps its old copies of what others own."""
    right = ParameterStore.publish

    def publish(self: ParameterStore, *, exchange: bool = True, later: bool = False) -> None:
        old = self.values.copy()
        right(self, exchange=exchange)
        if self.grid.world.size > 1 and self.grid.world.rank == rank and self.version > first:
            kept = np.ones(self.layout.size, bool)
            for span in self.share.spans:
                kept[span.start : span.stop] = False
            self.values[kept] = old[kept]

    monkeypatch.setattr(ParameterStore, "publish", publish)


def skipped_reduction(monkeypatch: Any) -> None:
    """Every rank divides the gradient of its own samples."""
    right = GradientRows.reduce

    def reduce(self: GradientRows, exchange: Any, shares: Any, divisor: Any, out: Any) -> Any:
        if self.grid.world.size == 1:
            return right(self, exchange, shares, divisor, out)
        row = self.row(0)
        row[: self.layout.gradient_size] = self.local_sum() / divisor
        return row

    monkeypatch.setattr(GradientRows, "reduce", reduce)
    monkeypatch.setattr(engine, "sums_behind", lambda *_: False)  # then nothing of the sum is made before


def rank_keyed_dropout(monkeypatch: Any) -> None:
    """Dropout masks differ with the rank that draws them."""
    right = Engine._run

    def run(self: Engine, first_sample: int) -> Run:
        found = right(self, first_sample)
        return Run(found.training, found.seed + self.grid.world.rank, found.step, found.first_sample)

    monkeypatch.setattr(Engine, "_run", run)


def halved_slots(monkeypatch: Any) -> None:
    """Optimizer arrays are half of what they must be after a step."""
    right = Updater.update

    def update(self: Updater, reduced: Any, threads: int) -> None:
        right(self, reduced, threads)
        for values in self.state.values() if self.grid.world.size > 1 else ():
            values *= 0.5

    monkeypatch.setattr(Updater, "update", update)
