"""Classic faults of parallel training, planted into layouts of several ranks; one process stays right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import mpizero as mz
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.layout.flat import flat_names
from mpizero.sharding import grad_reduce
from mpizero.sharding.engine import Engine
from mpizero.sharding.forward_backward import WatchedJob
from mpizero.sharding.grad_reduce import AllReduceBuffer
from mpizero.sharding.params import ParameterStore
from mpizero.sharding.update import Updater
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


#: What a diagnosis may say, by a word that only it has.
CAUSES = (
    "another order",
    "clip",
    "depends on the rank",
    "keyed by the rank",
    "left out",
    "no function of",
    "race",
    "skipped reduction",
    "stale data",
    "stale parameters",
    "tied gradient",
    "wrong count",
)


def causes(found: Finding) -> set[str]:
    """The causes that a finding names."""
    return {word for word in CAUSES if word in (found.diagnosis or "")}


def wrong_divisor(monkeypatch: Any) -> None:
    """Means of means: the sum is divided by the number of ranks once more."""
    divide_by(monkeypatch, lambda ranks: ranks)


def divide_by(monkeypatch: Any, factor: Callable[[int], Any]) -> None:
    """Divide sums of gradients by a factor more, a function of the number of ranks."""
    right = Engine._divisors

    def wrong(self: Engine, totals: Any) -> Any:
        found = right(self, totals)
        return found._replace(gradients=found.gradients * factor(self.grid.world.size))

    monkeypatch.setattr(Engine, "_divisors", wrong)


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
    right = ParameterStore.all_gather

    def all_gather(self: ParameterStore, *, exchange: bool = True, later: bool = False) -> None:
        old = self.values.copy()
        right(self, exchange=exchange)
        if self.grid.world.size > 1 and self.grid.world.rank == rank and self.version > first:
            kept = np.ones(self.layout.size, bool)
            for span in self.shard.spans:
                kept[span.start : span.stop] = False
            self.values[kept] = old[kept]

    monkeypatch.setattr(ParameterStore, "all_gather", all_gather)


def skipped_reduction(monkeypatch: Any) -> None:
    """Every rank divides the gradient of its own samples."""
    right = AllReduceBuffer.sum

    def reduce(self: AllReduceBuffer, divisors: Any) -> Any:
        if self.grid.world.size == 1:
            return right(self, divisors)
        row = self.row(0)
        row[: self.layout.gradient_size] = self.local_sum() / divisors.gradients
        return row

    monkeypatch.setattr(AllReduceBuffer, "sum", reduce)
    monkeypatch.setattr(grad_reduce, "overlaps_reduction", lambda *_: False)  # then nothing of the sum is made before


def rank_keyed_dropout(monkeypatch: Any) -> None:
    """Dropout masks differ with the rank that draws them."""
    right = Engine._run

    def run(self: Engine, first_sample: int, count: int) -> Run:
        found = right(self, first_sample, count)
        return replace(found, seed=found.seed + self.grid.world.rank)

    monkeypatch.setattr(Engine, "_run", run)


def halved_slots(monkeypatch: Any) -> None:
    """Optimizer arrays are half of what they must be after a step."""
    right = Updater.update

    def update(self: Updater, reduced: Any, threads: int, loss: float) -> None:
        right(self, reduced, threads, loss)
        for values in self.state.values() if self.grid.world.size > 1 else ():
            values *= 0.5

    monkeypatch.setattr(Updater, "update", update)


def gradients_changed(
    monkeypatch: Any, change: Callable[[Any], Any], ranks: Callable[[int], bool] = lambda rank: rank == 1
) -> None:
    """The gradients of every micro-batch that some ranks compute are what ``change`` makes of them."""
    right = WatchedJob._check

    def check(self: WatchedJob, unit: Any, block: str, views: Any) -> None:
        world = self.scalars.grid.world
        if world.size > 1 and ranks(world.rank):
            for _, view in flat_names(views):
                view[...] = change(view)
        right(self, unit, block, views)

    monkeypatch.setattr(WatchedJob, "_check", check)


def unseeded_noise(monkeypatch: Any, size: float) -> None:
    """The gradients of rank 1 have noise that is another in every evaluation."""
    rng = np.random.default_rng()
    gradients_changed(monkeypatch, lambda view: view + size * rng.choice([-1.0, 1.0], view.shape))


def rank_factor(monkeypatch: Any, factor: float) -> None:
    """The gradients of rank 1 are a little too large."""
    gradients_changed(monkeypatch, lambda view: view * view.dtype.type(factor))


def rank_offset(monkeypatch: Any, offset: float) -> None:
    """All elements of the gradients of rank 1 are too large by the same."""
    gradients_changed(monkeypatch, lambda view: view + view.dtype.type(offset))


def rank_keyed_noise(monkeypatch: Any, size: float) -> None:
    """The gradients of every rank have noise with the rank for a seed, but for rank 0."""
    right = WatchedJob._check

    def check(self: WatchedJob, unit: Any, block: str, views: Any) -> None:
        world = self.scalars.grid.world
        for _, view in flat_names(views) if world.rank else ():
            noise = np.random.default_rng([world.rank, unit.index]).standard_normal(view.shape)
            view += (size * noise).astype(view.dtype)
        right(self, unit, block, views)

    monkeypatch.setattr(WatchedJob, "_check", check)


def sum_offset(monkeypatch: Any, offset: float) -> None:
    """The averaged gradient is too large by the same everywhere; what ranks give to it is right."""
    right = Engine._reduced

    def reduced(self: Engine, *args: Any) -> Any:
        found = right(self, *args)
        if self.grid.world.size > 1:
            for piece in self.pieces():
                found[piece.gradient : piece.gradient + piece.size] += found.dtype.type(offset)
        return found

    monkeypatch.setattr(Engine, "_reduced", reduced)
    monkeypatch.setattr(Engine, "_needs_norm", True)  # then the sum is seen before the update


def another_order(monkeypatch: Any) -> None:
    """Gradients are divided before they are summed: the same number but for rounding."""
    right = AllReduceBuffer.sum

    def reduce(self: AllReduceBuffer, divisors: Any) -> Any:
        if self.grid.world.size == 1:
            return right(self, divisors)
        divide = divisors.gradients * 3
        found = right(self, divisors._replace(gradients=divide))
        found *= found.dtype.type(3)
        return found

    monkeypatch.setattr(AllReduceBuffer, "sum", reduce)
    monkeypatch.setattr(grad_reduce, "overlaps_reduction", lambda *_: False)
