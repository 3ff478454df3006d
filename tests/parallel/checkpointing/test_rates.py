"""The learning rate of a step: asked for once, the same on all ranks, or an error before a weight is touched."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_rates_that_differ_between_ranks_are_an_error_before_a_weight_is_touched(ranks: int) -> None:
    def run(comm: Any, number: int, strategy: str, memory: dict[str, Any]) -> None:
        """The update of one optimizer is one pass, the other waits for norms."""
        rate, batch = OfRank(comm), part(comm, *points(2 * comm.size))
        optimizer = (mz.SGD, mz.LAMB)[(number + number // 2 + ranks // 3) % 2](lr=rate)
        model = sharded(strategy, comm, optimizer=optimizer, micro_batch=2, **memory)
        refuses_to_mix(comm, model, rate, lambda: model.train(*batch))

    for number, (strategy, memory) in enumerate(layouts(ranks)):
        run_in_threads(ranks, partial(run, number=number, strategy=strategy, memory=memory))


@pytest.mark.parametrize(
    ("ranks", "way"), [(2, Way(tensor=2)), (3, Way(3)), (4, Way(2, zero=2)), (4, Way(2, 2))], ids=str
)
def test_stages_and_tensor_parts_agree_on_the_rate_too(ranks: int, way: Way) -> None:
    def run(comm: Any) -> None:
        rate = OfRank(comm)
        model = placed(Case(stages, lambda: mz.AdamW(lr=rate)), comm, way)
        batch = part(model.batch_group, *samples(1, 8)[0])
        refuses_to_mix(comm, model, rate, lambda: model.train(*batch))

    run_in_threads(ranks, run)


def test_members_of_an_ensemble_may_have_their_own_rates() -> None:
    def run(comm: Any) -> None:
        own = mz.SGD(lr=lambda step: 0.1 + 0.1 * step * (comm.rank % 2))
        with comm.split(comm.rank % 2, name="half") as half, sharded("zero1", half, optimizer=own) as model:
            for _ in range(3):
                model.train(*part(half, *points(4)))
            assert model.last_step.learning_rate == pytest.approx(0.1 + 0.2 * (comm.rank % 2))

    run_in_threads(4, run)


@pytest.mark.parametrize("auto", [True, False])
def test_steps_by_hand_agree_on_the_rate(auto: bool) -> None:
    def run(comm: Any) -> None:
        rate = OfRank(comm)
        model = sharded("zero2", comm, optimizer=mz.SGD(lr=rate), auto_sync_gradients=auto, **PRIVATE)

        def step() -> None:
            model.compute_gradients(*part(comm, *points(6)))
            model.optimizer.step()

        refuses_to_mix(comm, model, rate, step)

    run_in_threads(3, run)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", [mz.SGD, mz.LAMB])
def test_the_rate_that_was_agreed_on_is_the_one_that_is_used(strategy: str, optimizer: Any) -> None:
    """A function of the time gives another value at each call: it is called once a step."""
    groups = [mz.ParameterGroup("*.bias", lr_scale=0.5)]

    def train(lr: Any) -> str:
        with sharded(strategy, None, optimizer=optimizer(lr=lr, groups=groups), clip=1.0) as model:
            bound = getattr(lr, "calls", 0)
            for _ in range(3):
                model.train(*points(4))
            assert not callable(lr) or lr.calls - bound == 3
            return model.parameters_sha256()

    assert train(OfRank(None)) == train(0.1)


def test_a_rate_function_that_fails_on_one_rank_fails_on_all_and_changes_nothing() -> None:
    def failing(comm: Any, step: int) -> float:
        if step and comm.rank == 1:
            raise ZeroDivisionError("no rate")
        return 0.1

    def run(comm: Any) -> None:
        with sharded("zero2", comm, optimizer=mz.SGD(lr=partial(failing, comm))) as model:
            optimizer = model.optimizer
            batch = part(comm, *points(6))
            model.train(*batch)
            before = model.parameters_sha256()
            for step in (lambda: model.train(*batch), lambda: (model.compute_gradients(*batch), optimizer.step())):
                with pytest.raises((ZeroDivisionError, RemoteError), match="no rate"):
                    step()
            assert model.parameters_sha256() == before

    run_in_threads(2, run)


RATES = [0.1, mz.optim.cosine(0.1, 10), lambda s: 0.1 / (1 + s), mz.optim.cosine(np.float32(0.1), 10)]


@pytest.mark.parametrize(
    ("saved_by", "read_by", "told"),
    [
        (mz.optim.cosine(0.1, 10), mz.optim.cosine(0.1, 20), "'steps': 10.*'steps': 20"),
        (mz.optim.linear(0.1, 10, warmup=5), mz.optim.linear(0.1, 20, warmup=5), "'steps': 10.*'steps': 20"),
        (lambda s: 0.1 / (1 + s), lambda s: 0.1 / (1 + s / 2), "rate of step 3 was 0.03.*, .* is 0.05 there"),
        (0.1, 0.2, "rate of step 3 was 0.1, the bound optimizer's is 0.2 there"),
        (mz.optim.constant(0.1), 0.2, "rate of step 3 was 0.1, the bound optimizer's is 0.2 there"),
        *((rate, rate, None) for rate in RATES),
    ],
)
def test_a_load_that_moves_the_rate_says_so(saved_by: Any, read_by: Any, told: str | None, capsys: Any) -> None:
    model, other = (sharded("zero1", None, optimizer=mz.SGD(lr=rate)) for rate in (saved_by, read_by))
    with model, other:
        for _ in range(3):
            model.train(*points(4))
        other.deserialize(model.serialize())
    err = capsys.readouterr().err
    assert re.search(f"^mpizero: .*{told}", err, re.MULTILINE) if told else "rate" not in err


@pytest.mark.parametrize("told", [7, {"last": "fast"}, {"last": True}, []])
def test_what_mpizero_cannot_have_told_of_the_rate_is_refused(told: Any) -> None:
    with sharded("ddp", None) as model:
        data = checkpoint.to_bytes(
            model._checkpoint_arrays(), {**model._checkpoint_attributes(), "learning_rate": told}
        )
        with pytest.raises(CheckpointError, match="attribute 'learning_rate' cannot be"):
            model.deserialize(data)
