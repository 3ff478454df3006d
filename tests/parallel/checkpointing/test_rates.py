"""The learning rate of a step: asked for once, the same on all ranks, or an error before a weight is touched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.errors import CheckpointError, ConfigError, RemoteError
from mpizero.testing import run_in_threads
from tests.parallel.models import PRIVATE, STRATEGIES, layouts, part, points, sharded
from tests.parallel.parallel_layouts import Case, Way, placed
from tests.parallel.parallel_layouts import mlp as stages
from tests.parallel.parallel_layouts import points as samples


class OfRank:
    """A rate that depends on the rank from step 2 on, as one made of time or random numbers does."""

    def __init__(self, comm: Any) -> None:
        self._extra, self.calls = 0.01 * (comm is not None and comm.rank == 1), 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.1 if step == 0 else 0.1 + self._extra


def refuses_to_mix(comm: Any, model: Any, rate: OfRank, step: Callable[[], object]) -> None:
    """Take a good step, one whose rates differ, and, with equal rates, good ones again."""
    with model:
        step()
        before = model.parameters_sha256(), model.serialize()
        others = {2: "0.1 on rank 0", 3: "0.1 on ranks 0, 2"}.get(comm.size, "0.1")
        with pytest.raises(ConfigError, match=rf"the learning rate of step 2 .*{others}.*, 0\.11 on rank 1"):
            step()
        assert (model.parameters_sha256(), model.serialize()) == before
        rate._extra = 0.0
        step()
        assert model.parameters_sha256() != before[0]


@pytest.mark.mpi
def test_rates_that_differ_between_ranks_are_an_error_before_a_weight_is_touched(world: Any) -> None:
    if world.size == 1:
        return
    batch = part(world, *points(2 * world.size))
    for number, (strategy, memory) in enumerate(layouts(world.size)):
        rate = OfRank(world)
        # The update of one is one pass, the other waits for norms: in turn, the other one on other numbers of ranks.
        optimizer = (mz.SGD, mz.LAMB)[(number + number // 2 + world.size // 3) % 2](lr=rate)
        model, _ = sharded(strategy, world, optimizer=optimizer, micro_batch=2, **memory)
        refuses_to_mix(world, model, rate, lambda m=model: m.train(*batch))


@pytest.mark.mpi
def test_stages_and_tensor_parts_agree_on_the_rate_too(world: Any) -> None:
    ways = {2: [Way(2), Way(tensor=2)], 3: [Way(3)], 4: [Way(2, zero=2), Way(2, 2), Way(tensor=2, zero=3)]}
    for way in ways.get(world.size, []):
        rate = OfRank(world)
        model, _ = placed(Case(stages, lambda r=rate: mz.AdamW(lr=r)), world, way)
        batch = part(model.batch_group, *samples(1, 8)[0])
        refuses_to_mix(world, model, rate, lambda m=model, b=batch: m.train(*b))


@pytest.mark.mpi
def test_members_of_an_ensemble_may_have_their_own_rates(world: Any) -> None:
    with world.split(world.rank % 2, name="half") as half:
        model, _ = sharded("zero1", half, optimizer=mz.SGD(lr=lambda step: 0.1 + 0.1 * step * (world.rank % 2)))
        with model:
            for _ in range(3):
                model.train(*part(half, *points(4)))
            assert model.last_step.learning_rate == pytest.approx(0.1 + 0.2 * (world.rank % 2))


@pytest.mark.parametrize("by_hand", ["synchronized", "local"])
def test_steps_by_hand_agree_on_the_rate(by_hand: str) -> None:
    def run(comm: Any) -> None:
        rate = OfRank(comm)
        settings = {"auto_sync_gradients": by_hand == "synchronized", **PRIVATE}
        model, optimizer = sharded("zero2", comm, optimizer=mz.SGD(lr=rate), **settings)

        def step() -> None:
            model.compute_gradients(*part(comm, *points(6)))
            optimizer.step()

        refuses_to_mix(comm, model, rate, step)

    run_in_threads(3, run)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", [mz.SGD, mz.LAMB])
def test_the_rate_that_was_agreed_on_is_the_one_that_is_used(strategy: str, optimizer: Any) -> None:
    """A function of the time gives another value at each call: it is called once a step."""
    groups = [mz.ParameterGroup("*.bias", lr_scale=0.5)]

    def train(lr: Any) -> str:
        model, _ = sharded(strategy, None, optimizer=optimizer(lr=lr, groups=groups), clip=1.0)
        with model:
            bound = getattr(lr, "calls", 0)
            for _ in range(3):
                model.train(*points(4))
            assert not callable(lr) or lr.calls - bound == 3
            return model.parameters_sha256()

    assert train(OfRank(None)) == train(0.1)


def test_a_rate_function_that_fails_on_one_rank_fails_on_all_and_changes_nothing() -> None:
    def of(comm: Any) -> Any:
        def rate(step: int) -> float:
            if step and comm.rank == 1:
                raise ZeroDivisionError("no rate")
            return 0.1

        return rate

    def run(comm: Any) -> None:
        model, optimizer = sharded("zero2", comm, optimizer=mz.SGD(lr=of(comm)))
        with model:
            batch = part(comm, *points(6))
            model.train(*batch)
            before = model.parameters_sha256()
            for step in (lambda: model.train(*batch), lambda: (model.compute_gradients(*batch), optimizer.step())):
                with pytest.raises((ZeroDivisionError, RemoteError), match="no rate"):
                    step()
            assert model.parameters_sha256() == before

    run_in_threads(2, run)


# ---------------------------------------------------------------------- a load that moves the rate


def loaded(saved_by: Any, read_by: Any) -> None:
    """Save after three steps with one rate, and load into a model that has another."""
    model, _ = sharded("zero1", None, optimizer=mz.SGD(lr=saved_by))
    with model:
        for _ in range(3):
            model.train(*points(4))
        data = model.serialize()
    other, _ = sharded("zero3", None, optimizer=mz.SGD(lr=read_by))
    with other:
        other.deserialize(data)


@pytest.mark.parametrize(
    ("saved_by", "read_by", "told"),
    [
        (mz.optim.cosine(0.1, 10), mz.optim.cosine(0.1, 20), "'steps': 10.*'steps': 20"),
        (mz.optim.linear(0.1, 10, warmup=5), mz.optim.linear(0.1, 20, warmup=5), "'steps': 10.*'steps': 20"),
        (lambda s: 0.1 / (1 + s), lambda s: 0.1 / (1 + s / 2), "rate of step 3 was 0.03.*, .* is 0.05 there"),
        (0.1, 0.2, "rate of step 3 was 0.1, the bound optimizer's is 0.2 there"),
        (mz.optim.constant(0.1), 0.2, "rate of step 3 was 0.1, the bound optimizer's is 0.2 there"),
    ],
)
def test_a_load_that_moves_the_rate_says_so(saved_by: Any, read_by: Any, told: str, capsys: Any) -> None:
    loaded(saved_by, read_by)
    assert re.search(f"^mpizero: .*{told}", capsys.readouterr().err, re.MULTILINE)


RATES = [0.1, mz.optim.cosine(0.1, 10), lambda s: 0.1 / (1 + s), mz.optim.cosine(np.float32(0.1), 10)]


@pytest.mark.parametrize("rate", RATES)
def test_a_load_that_moves_no_rate_is_silent(rate: Any, capsys: Any) -> None:
    loaded(rate, rate)
    assert "rate" not in capsys.readouterr().err


@pytest.mark.parametrize("told", [7, {"last": "fast"}, {"last": True}, []])
def test_what_mpizero_cannot_have_told_of_the_rate_is_refused(told: Any) -> None:
    model, _ = sharded("ddp", None)
    with model:
        data = checkpoint.to_bytes(model.checkpoint_arrays(), {**model.checkpoint_attributes(), "learning_rate": told})
        with pytest.raises(CheckpointError, match="attribute 'learning_rate' cannot be"):
            model.deserialize(data)
