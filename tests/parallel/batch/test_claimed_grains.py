"""grain_assignment="dynamic": ranks claim grains while they compute, and the result has the bits of one process."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, gpt, hard_function, mlp, part, points, sharded, tokens, vectors

SAMPLES = 21
#: Model, samples, and settings: a black box, blocks, and blocks of which two micro-batches make a grain.
TRAININGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "function": (hard_function, vectors(SAMPLES), {"micro_batch": 1}),
    "blocks": (mlp, points(SAMPLES), {"micro_batch": 2, "clip": 0.5}),
    "micro-batches": (gpt, tokens(SAMPLES), {"micro_batch": 1, "accumulate": 2}),
}

OPTIMIZERS = (mz.AdamW(lr=1e-2), mz.LAMB(lr=1e-2))


def trained(comm: Any, name: str, strategy: str, optimizer: Any, **settings: Any) -> tuple[str, float]:
    make, (x, y), own = TRAININGS[name]
    model, _ = sharded(strategy, comm, make(), optimizer, **own, **settings)
    with model:
        losses = [model.train(*part(comm, x, y)) for _ in range(3)]
        return model.parameters_sha256(), losses[-1]


@functools.cache
def alone(name: str, strategy: str, optimizer: Any) -> tuple[str, float]:
    """Train in one process, once for all numbers of ranks."""
    return trained(None, name, strategy, optimizer)


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_bits_are_those_of_one_process(name: str, ranks: int) -> None:
    """Every strategy with every kind of memory; each of these meets both optimizers, which see sums only."""
    memories = MEMORIES if ranks < 8 else MEMORIES[2:]
    for number, (strategy, memory) in enumerate(itertools.product(("ddp", "zero1"), memories)):
        way = (name, strategy, OPTIMIZERS[number % 2])
        settings = {"grain_assignment": "dynamic", **memory}
        found = run_in_threads(ranks, lambda comm, w=way, s=settings: trained(comm, *w, **s))
        assert set(found) == {alone(*way)}, (strategy, memory)


@pytest.mark.mpi
def test_the_bits_of_a_real_job_are_those_of_one_process(world: Any) -> None:
    for name, strategy in itertools.product(TRAININGS, ("ddp", "zero1")):
        expected = trained(None, name, strategy, mz.AdamW(lr=1e-2))
        for memory in MEMORIES[::2]:
            found = trained(world, name, strategy, mz.AdamW(lr=1e-2), grain_assignment="dynamic", **memory)
            assert found == expected, (name, strategy, memory)


def slow(_seconds: float, _seen: list[int]) -> mz.FunctionModel:
    """A function whose evaluation of each sample takes so long; ``_seen`` notes the samples."""

    def loss_and_grad(parameters: Any, batch: Any) -> tuple[float, Any, float]:
        time.sleep(_seconds)
        _seen.extend(batch[1].tolist())
        return float((batch[0] @ parameters["w"]).sum()), {"w": batch[0].sum(axis=0)}, float(len(batch[0]))

    return mz.FunctionModel({"w": np.ones(3)}, loss_and_grad)


def computed(comm: Any, slow_rank: int, count: int = 32, **settings: Any) -> tuple[list[int], str]:
    """Train one step with a rank that is ten times slower, and return the samples that this rank has computed."""
    seen: list[int] = []
    x, y = np.random.default_rng(0).normal(size=(count, 3)), np.arange(count)
    function = slow(0.02 if comm.rank == slow_rank else 0.002, seen)
    model, _ = sharded(
        "zero1", comm, function, mz.AdamW(), **{"micro_batch": 1, "grain_assignment": "dynamic"} | settings
    )
    with model:
        model.train(*part(comm, x, y))
        return seen, model.parameters_sha256()


def test_a_slow_rank_computes_fewer_grains_and_each_is_computed_once() -> None:
    for slow_rank in (0, 2):
        found = run_in_threads(4, lambda comm, s=slow_rank: computed(comm, s))
        assert sorted(itertools.chain(*(seen for seen, _ in found))) == list(range(32))
        assert len(found[slow_rank][0]) < min(len(seen) for rank, (seen, _) in enumerate(found) if rank != slow_rank)


def test_ranks_claim_grains_of_their_node_only() -> None:
    found = run_in_threads(4, lambda comm: computed(comm, 0, ranks_per_node=2))
    for node in (0, 1):
        seen = found[2 * node][0] + found[2 * node + 1][0]
        assert sorted(seen) == list(range(16 * node, 16 * node + 16))


def test_fewer_grains_than_ranks_are_claimed_too() -> None:
    for count in (1, 2, 3):
        found = run_in_threads(4, lambda comm, c=count: computed(comm, 0, c))
        assert sorted(itertools.chain(*(seen for seen, _ in found))) == list(range(count))


def test_batches_of_other_sizes_and_types_follow_one_another() -> None:
    def run(comm: Any, assignment: str) -> str:
        model, _ = sharded("ddp", comm, hard_function(), mz.AdamW(), micro_batch=2, grain_assignment=assignment)
        with model:
            for count in (7, 24, 3, 24):
                x, y = vectors(count)
                model.train(*part(comm, x.astype("f4") if count == 3 else x, y))
                model.evaluate(*part(comm, x, y))
                model.compute_gradients(*part(comm, x, y))
            return model.parameters_sha256()

    (expected,) = run_in_threads(1, lambda comm: run(comm, "static"))
    assert set(run_in_threads(3, lambda comm: run(comm, "dynamic"))) == {expected}


def test_an_error_in_one_grain_is_raised_on_all_ranks_and_the_next_step_is_right() -> None:
    def run(comm: Any, *, fails: bool, assignment: str = "dynamic") -> str:
        broken = [fails]

        def poisoned(x: Any, gradient: Any) -> Any:
            if broken[0] and (x == 5.0).all():
                raise ValueError("sample five")
            return gradient

        from tests.parallel.models import ten

        x = np.repeat(np.arange(12.0)[:, None], 10, axis=1)
        model, _ = sharded("zero1", comm, ten(poisoned), mz.AdamW(), micro_batch=1, grain_assignment=assignment)
        with model:
            if fails:
                with pytest.raises(Exception, match="sample five"):
                    model.train(*part(comm, x, x[:, :1]))
                broken[0] = False
            model.train(*part(comm, x, x[:, :1]))
            return model.parameters_sha256()

    (expected,) = run_in_threads(1, lambda comm: run(comm, fails=False, assignment="static"))
    assert set(run_in_threads(3, lambda comm: run(comm, fails=True))) == {expected}


def test_a_gradient_that_is_not_finite_skips_the_step_and_names_the_sample() -> None:
    def run(comm: Any) -> Any:
        from tests.parallel.models import ten

        x = np.ones((12, 10))
        x[7] = np.nan
        model, _ = sharded("zero1", comm, ten(), mz.AdamW(), micro_batch=1, grain_assignment="dynamic")
        with model:
            before = model.parameters_sha256()
            model.train(*part(comm, x, x[:, :1]))
            assert model.parameters_sha256() == before
            return [(found.start, found.stop) for found in model.last_step.non_finite]

    assert all(told == [(7, 8)] for told in run_in_threads(4, run))


@pytest.mark.parametrize(
    ("strategy", "settings", "reason"),
    [
        ("zero2", {}, "only DDP and ZeRO-1"),
        ("zero3", {}, "only DDP and ZeRO-1"),
        ("zero1", {"share_node_memory": False}, "no two ranks share memory"),
    ],
)
def test_where_grains_cannot_be_claimed_rank_0_says_so(strategy: str, settings: Any, reason: str, capfd: Any) -> None:
    expected = trained(None, "blocks", strategy, mz.AdamW())
    capfd.readouterr()
    found = run_in_threads(
        2, lambda comm: trained(comm, "blocks", strategy, mz.AdamW(), grain_assignment="dynamic", **settings)
    )
    assert set(found) == {expected}
    told = capfd.readouterr().err
    assert told.count("grain_assignment='dynamic' has no effect here") == 1
    assert reason in told


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="grain_assignment='guided': expected 'static' or 'dynamic'"):
        mz.ShardingConfig(grain_assignment="guided")


def test_minimizers_claim_terms_with_the_bits_of_one_process() -> None:
    x, y = vectors(16)

    def run(comm: Any, assignment: str) -> tuple[float, str]:
        settings = {"micro_batch": 1, "grain_assignment": assignment}
        with mz.ShardingConfig(comm=comm, **settings) as config, mz.ZeRO1Model(hard_function(), config) as model:
            found = mz.minimize(model, (x, y), options={"maxiter": 12})
            return found.fun, model.parameters_sha256()

    (expected,) = run_in_threads(1, lambda comm: run(comm, "static"))
    assert set(run_in_threads(3, lambda comm: run(comm, "dynamic"))) == {expected}
