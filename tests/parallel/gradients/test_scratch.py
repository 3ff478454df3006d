"""Gradients that are added at once are written block by block to a scratch array: fewer rows, and the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.layout.flat import flat_names
from mpizero.nn import Frozen
from mpizero.sharding import placed_model
from mpizero.sharding.params import paged
from mpizero.testing import run_in_threads
from mpizero.types import EVALUATE, Init, ParameterSpec
from tests.parallel.covering import covering
from tests.parallel.models import MEMORIES, STRATEGIES, gpt, hard_function, mlp, part, sharded, tokens, vectors
from tests.parallel.models import points as points_of
from tests.parallel.parallel_layouts import Blocks, Case, Chain, Way, placed, with_traps

#: Elements of the blocks of :func:`mlp`.
BLOCKS = (6 * 7 + 7, 7 * 5 + 5, 5 * 3 + 3)
#: A bucket of 64 float32 values, in MiB.
FINE = 256 / 2**20

MODELS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "MLP": (mlp, points_of),
    "tied": (gpt, tokens),
    "untied": (lambda: gpt(tied=False, dtype="float64", activation_checkpointing=True, layers=1), tokens),
    "frozen": (lambda: Blocks(gpt(tied=False), {"embedding": Frozen, "blocks.1": Frozen}), tokens),
}


@contextmanager
def rows_alone() -> Iterator[None]:
    """Keep every gradient in a row, as pipelines, GPUs and black boxes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placed_model, "scratch_use", lambda *_, **__: None)
        yield


def held(comm: Any, grains: int, **settings: Any) -> dict[str, int]:
    """Bytes by kind after a step of ``grains`` grains."""
    with sharded("ddp", comm, **{"micro_batch": 1, **settings}) as model:
        model.train(*part(comm, *points_of(grains * settings.get("accumulate", 1))))
        return dict(model._engine.memory.kinds())


@pytest.mark.parametrize(
    ("grains", "rows", "scratch", "without"), [(1, 1, 0, 1), (2, 1, 1, 2), (4, 2, 1, 3), (16, 4, 1, 5)]
)
def test_a_rank_holds_a_block_in_place_of_a_row(grains: int, rows: int, scratch: int, without: int) -> None:
    row, block = paged(4 * sum(BLOCKS)), 4 * max(BLOCKS)
    assert held(None, grains)["gradients"] == rows * row + scratch * block
    assert held(None, grains, accumulate=3)["gradients"] == without * row + block
    for found in run_in_threads(2, lambda comm: held(comm, 2 * grains)):
        assert found["gradients"] == rows * row + scratch * block
    with rows_alone():
        assert held(None, grains)["gradients"] == without * row


def test_a_row_that_another_rank_needs_takes_the_place_of_the_scratch_array() -> None:
    """The first of two ranks has grains 0 to 2, so both have two rows; the other one has 3 and 4."""
    for found in run_in_threads(2, lambda comm: held(comm, 5)):
        assert found["gradients"] == 2 * paged(4 * sum(BLOCKS))


def test_pipelines_and_black_boxes_hold_rows() -> None:
    with sharded("ddp", None, hard_function(), micro_batch=1) as model:
        model.train(*vectors(4))
        assert model._engine.memory.kinds()["gradients"] == 3 * paged(8 * model._engine.layout.gradient_size)

    def staged(comm: Any) -> None:
        config = mz.ShardingConfig(comm=comm, micro_batch=1)
        with config, mz.PipelineParallelModel(mlp(), config, 2) as model:
            model.train(*part(model.batch_group, *points_of(4)))
            assert model._engine.memory.kinds()["gradients"] == 3 * paged(4 * model._engine.layout.gradient_size)

    run_in_threads(2, staged)


def test_memory_that_is_reserved_is_all_that_a_step_takes() -> None:
    with sharded("ddp", None, micro_batch=1) as model:
        model.reserve(16)
        before = model._engine.memory.kinds()
        model.train(*points_of(16))
        assert model._engine.memory.kinds()["gradients"] == before["gradients"]


def trained(comm: Any, name: str, strategy: str, batches: tuple[int, ...], **settings: Any) -> str:
    """The hash of the parameters after a step of each batch, and of this rank's own gradients."""
    make, data = MODELS[name]
    with sharded(strategy, comm, make(), **{"micro_batch": 1, **settings}) as model:
        for samples in batches:
            model.train(*part(comm, *data(samples, samples)))
        return str(model.parameters_sha256())


@cache
def by_rows(name: str, batches: tuple[int, ...], **settings: Any) -> str:
    with rows_alone():
        return trained(None, name, "ddp", batches, **settings)


@pytest.mark.parametrize(
    ("name", "grains", "clip", "accumulate", "ranks", "strategy", "memory"),
    covering(list(MODELS), ((16, 2), (5, 7)), (None, 0.5), (1, 3), (1, 2, 3, 4), ("ddp", "zero1"), MEMORIES),
)
def test_every_number_of_grains_has_the_bits_of_rows_alone(
    name: str, grains: Any, clip: Any, accumulate: int, ranks: int, strategy: str, memory: dict[str, Any]
) -> None:
    batches = tuple(accumulate * count - accumulate // 2 for count in grains)
    settings = {"clip": clip, "accumulate": accumulate, "minimum_parameter_group_size": 500 if clip else 1}
    expected = by_rows(name, batches, **settings)
    bucket = FINE if ranks > 1 else None
    job = partial(trained, name=name, strategy=strategy, batches=batches, bucket_mb=bucket, **settings, **memory)
    assert set(run_in_threads(ranks, job)) == {expected}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_own_gradients_are_those_of_rows_alone(strategy: str) -> None:
    def own(comm: Any) -> Any:
        settings = {"auto_sync_gradients": False, "micro_batch": 1, "accumulate": 2}
        with sharded(strategy, comm, gpt(), mz.SGD(lr=0.1), **settings) as model:
            local = model.compute_gradients(*part(comm, *tokens(15))).values
            return local, model.synchronize_gradients(gather=True).values

    for ranks in (1, 2):
        with rows_alone():
            expected = run_in_threads(ranks, own)
        for found, wanted in zip(run_in_threads(ranks, own), expected, strict=True):
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(a, b)


def test_what_is_looked_at_is_the_gradient_of_one_micro_batch() -> None:
    def seen() -> list[Any]:
        found: list[Any] = []
        with sharded("ddp", None, micro_batch=1) as model:
            model._engine.scalars.watch = lambda grain, number, block, views: found.append(
                (grain, block, {name: view.copy() for name, view in flat_names(views)})
            )
            model.train(*points_of(8))
        return found

    with rows_alone():
        expected = seen()
    assert len(expected) == 8 * len(BLOCKS)
    for (*place, views), (*wanted, values) in zip(seen(), expected, strict=True):
        assert place == wanted
        for name in values:
            np.testing.assert_array_equal(views[name], values[name])


@dataclass(frozen=True)
class Shift:
    """A user's own block, which adds ``p``, from an array to a tuple or back.

    With one sample it returns its gradient itself, or a copy of it.
    """

    to_array: bool
    copies: bool

    def specs(self) -> tuple[ParameterSpec, ...]:
        return (ParameterSpec("p", (1, 7), Init("zeros")),)

    def children(self) -> dict[str, Any]:
        return {}

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        return (x[0] + params["p"] if self.to_array else (x + params["p"],)), None

    def backward(self, params: Any, cache: Any, dy: Any, grads: Any) -> Any:
        (dy,) = (dy,) if self.to_array else dy
        grads["p"][...] = dy.sum(0, keepdims=True)
        dx = dy if len(dy) > 1 else grads["p"].copy() if self.copies else grads["p"]
        return (dx,) if self.to_array else dx


class Twice:
    """A user's own block, which doubles its input; and the gradient of its output, in place."""

    def specs(self) -> tuple[ParameterSpec, ...]:
        return ()

    def children(self) -> dict[str, Any]:
        return {}

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        return 2 * x, None

    def backward(self, params: Any, cache: Any, dy: Any, grads: Any) -> Any:
        dy *= 2
        return dy


@pytest.mark.parametrize("first", [1, 16])
def test_a_block_may_return_views_of_its_gradients_also_in_trees(first: int) -> None:
    """And the block that gets them may overwrite them."""

    def chain(copies: bool) -> Chain:
        shifts = {"a": Shift(False, copies), "b": Shift(True, copies)}
        return Chain({"in": mz.nn.Linear(6, 7), "twice": Twice(), **shifts, "out": mz.nn.Linear(7, 1)})

    def trained(comm: Any, strategy: str, copies: bool = False) -> str:
        with sharded(strategy, comm, chain(copies), mz.SGD(lr=0.1), micro_batch=1) as model:
            for samples in (first, 16):
                x, _ = points_of(samples)
                model.train(*part(comm, x, x[:, :1] ** 2))
            return str(model.parameters_sha256())

    def piped(comm: Any, zero: int) -> str:
        case = Case(lambda: chain(copies=False), lambda: mz.SGD(lr=0.1), config={"micro_batch": 1})
        with placed(case, comm, Way(2, zero=zero)) as model:
            for samples in (first, 16):
                x, _ = points_of(samples)
                model.train(*part(model.batch_group, x, x[:, :1] ** 2))
            return str(model.parameters_sha256())

    expected = trained(None, "ddp", copies=True)
    assert trained(None, "ddp") == trained(None, "zero3") == expected
    assert set(run_in_threads(3, lambda comm: trained(comm, "zero1"))) == {expected}
    for zero in range(4):
        assert set(run_in_threads(2, lambda comm: piped(comm, zero))) == {expected}  # noqa: B023


def test_a_gradient_that_is_not_finite_is_named_with_its_samples() -> None:
    switch = {"what": "infinite", "first": 1}
    with sharded("ddp", None, with_traps(mlp(), {"hidden.1": switch}), micro_batch=1) as model:
        model.train(*points_of(4))
        assert "the gradient of 'hidden.1" in model.last_step.skipped
        assert "rank 0, samples 1 to 1" in model.last_step.skipped


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_block_may_have_an_empty_name(strategy: str) -> None:
    with sharded(strategy, None, Chain({"": mz.nn.Linear(4, 2)}), mz.SGD(lr=0.1)) as model:
        losses = [model.train(np.eye(4, dtype="f4"), np.ones((4, 2), "f4")) for _ in range(5)]
    assert losses[-1] < losses[0]
