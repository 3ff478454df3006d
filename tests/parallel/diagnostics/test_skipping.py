"""A script of one's own is told of skipped steps and ended after too many, as a run of ``mpizero train`` is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, NonFiniteError, RemoteError
from mpizero.testing import run_in_threads
from tests.parallel.models import STRATEGIES, mlp, part, points, sharded, ten

GOOD = np.ones((4, 10))
BAD = np.where(np.arange(4)[:, None] == 3, np.nan, GOOD)
ENDS = "step 5: skipped 5 steps in a row: the loss is not finite on rank 1, samples 3 to 3"


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("mpizero: ")]


@pytest.mark.parametrize("by_hand", [False, True])
def test_nan_for_ever_is_told_once_a_step_and_ends_every_rank_after_five(
    by_hand: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(comm: Any) -> None:
        model, optimizer = sharded("zero2", comm, ten(), micro_batch=1)

        def step() -> None:
            if by_hand:
                model.compute_gradients(*part(comm, BAD, BAD))
                optimizer.step()
            else:
                model.train(*part(comm, BAD, BAD))

        with model:
            for _ in range(4):
                step()
            with pytest.raises(NonFiniteError, match=ENDS):
                step()

    run_in_threads(2, run)
    told = lines(capsys)
    assert len(told) == 5  # by one rank
    assert told[0].startswith("mpizero: step 1 skipped, parameters unchanged: the loss is not finite on rank 1")
    assert told[0].endswith("(1 in a row, 5 end the run)")


def test_a_good_step_begins_the_count_anew() -> None:
    model, _ = sharded("zero1", None, ten(), bad_steps=mz.BadSteps(limit=2))
    with model:
        for batch in (BAD, GOOD, BAD, GOOD, BAD):
            model.train(batch, batch)
        with pytest.raises(NonFiniteError, match="step 6: skipped 2 steps in a row"):
            model.train(BAD, BAD)


def test_a_policy_may_be_silent_never_raise_and_ask_for_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[mz.StepReport] = []
    policy = mz.BadSteps(limit=None, warn=False, callback=seen.append)
    model, _ = sharded("zero1", None, ten(), bad_steps=policy)
    with model:
        for _ in range(7):
            model.train(BAD, BAD)
            assert seen[-1] is model.last_step
        model.train(GOOD, GOOD)
    assert len(seen) == 7
    assert lines(capsys) == []


def test_a_callback_may_keep_the_samples_of_the_step(tmp_path: Any) -> None:
    def run(comm: Any) -> None:
        batch = part(comm, BAD, BAD)
        policy = mz.BadSteps(limit=1, callback=lambda report: mz.dump_bad_step(model, batch, tmp_path))
        model, _ = sharded("zero1", comm, ten(), micro_batch=1, bad_steps=policy)
        with model, pytest.raises(NonFiniteError):
            model.train(*batch)

    run_in_threads(2, run)
    assert (tmp_path / "step_00000001" / "step.json").exists()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_steps_that_only_lower_the_loss_scale_are_told_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = points(4)
    model, optimizer = sharded("zero1", None, mlp(), bad_steps=mz.BadSteps(limit=1))
    with model:
        model.engine.bind(optimizer.wrapped_optimizer, mz.DynamicLossScale(initial=2.0**100, largest=2.0**100))
        for _ in range(3):
            model.train(2.0**30 * x, y)
            assert model.last_step.backing_off
    told = lines(capsys)
    assert len(told) == 3
    assert f"the loss scale falls from {2.0**100:g} to {2.0**99:g}, which is not counted" in told[0]


def test_the_loss_of_an_infinite_weight_is_not_a_number() -> None:
    """A sum divided by infinity would be 0.0, the best of all losses."""

    def run(comm: Any) -> None:
        def heavy(p: Any, batch: Any) -> Any:
            return 1.0, {"w": np.ones(10)}, math.inf if comm.rank == 1 else 1.0

        model, _ = sharded("zero1", comm, mz.FunctionModel({"w": np.ones(10)}, heavy), micro_batch=1)
        with model:
            assert math.isnan(model.train(*part(comm, GOOD, GOOD)))
            assert math.isnan(model.compute_gradients(*part(comm, GOOD, GOOD)).loss)
            assert "the weight is not finite on rank 1" in model.last_step.skipped

    run_in_threads(2, run)


def test_a_gradient_that_is_not_finite_is_not_applied_by_hand() -> None:
    def run(comm: Any) -> None:
        for strategy in STRATEGIES:
            model, _ = sharded(strategy, comm, ten(), micro_batch=1)
            with model:
                before = model.parameters_sha256()
                gradients = model.compute_gradients(*part(comm, BAD, BAD))
                assert math.isnan(gradients.loss)  # a line search may look at it
                with pytest.raises((NonFiniteError, RemoteError), match="apply_gradients: the gradient is infinite or"):
                    model.apply_gradients(gradients, 0.1)
                assert model.parameters_sha256() == before

    run_in_threads(2, run)


def test_ranks_that_train_alone_count_alone_and_end_together(capsys: pytest.CaptureFixture[str]) -> None:
    def run(comm: Any) -> str:
        with mz.ShardingConfig(comm=comm) as config, mz.DDPModel(ten(), config) as model:
            optimizer = mz.LocalSGDOptimizer(mz.SGD(lr=0.1), config, every=2)
            optimizer.set_model(model)
            batch = BAD if comm.rank == 1 else GOOD
            for _ in range(4):
                model.train(batch, batch)
            with pytest.raises((NonFiniteError, RemoteError), match="skipped 5 steps in a row.* on rank 1") as caught:
                model.train(batch, batch)
            return type(caught.value).__name__

    assert run_in_threads(2, run) == ["RemoteError", "NonFiniteError"]
    assert all(" on rank 1, samples" in line for line in lines(capsys))


def optimized(x: Any, comm: Any, *, fails_validation: bool = False, **settings: Any) -> Any:
    """Two epochs over samples, half of which validate."""
    options = mz.OptimizationOptions(epochs=2, batch_size=len(x) // 4, validation=0.5)
    config = mz.ShardingConfig(comm=comm, **settings)
    with mz.ZeRO1Model(ten(), config) as model:
        if fails_validation:
            model.evaluate = lambda x, y: mz.Evaluation(math.nan, 1.0, None)  # type: ignore[method-assign]
        optimizer = mz.ZeRO1Optimizer(mz.SGD(lr=1e-3), config, options=options)
        optimizer.set_model(model)
        return optimizer.optimize((x, x))


@pytest.mark.parametrize("policy", [mz.BadSteps(), mz.BadSteps(limit=None, warn=False)])
def test_samples_that_are_not_finite_from_the_start_end_optimize_with_its_first_epoch(policy: mz.BadSteps) -> None:
    def run(comm: Any) -> None:
        with pytest.raises(NonFiniteError, match=r"no validation loss of 1 epoch\(s\) was finite.* training loss nan"):
            optimized(np.full((20, 10), np.nan), comm, bad_steps=policy)

    run_in_threads(2, run)


def test_validation_samples_that_are_not_finite_are_told_and_end_optimize(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        NonFiniteError, match=r"no validation loss of 2 epoch\(s\) was finite; .* it was nan, and the tr"
    ):
        optimized(np.ones((20, 10)), None, fails_validation=True)
    assert lines(capsys) == [
        f"mpizero: optimize: the validation loss of epoch {epoch} is nan, which is no improvement" for epoch in (0, 1)
    ]


def test_one_sample_that_is_not_finite_skips_its_step_and_optimize_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    source = mz.data.ArraySource(np.arange(200.0).reshape(20, 10), np.ones((20, 10)))
    source.x[source.split(0.5)[0].origin(np.arange(1))] = np.inf
    result = optimized(source.x, None)
    assert math.isfinite(result.best_loss)
    assert len(lines(capsys)) == 2  # once an epoch


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"limit": 0}, "limit=0: expected a whole number >= 1, or None"),
        ({"limit": 2.0}, "limit=2.0: expected a whole number"),
        ({"warn": "no"}, "warn='no': expected True or False"),
        ({"callback": 3}, "callback=3: expected a function"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        mz.BadSteps(**settings)
    with pytest.raises(ConfigError, match=r"bad_steps=5: expected mpizero.BadSteps\("):
        mz.ShardingConfig(bad_steps=5)  # type: ignore[arg-type]


def test_ranks_with_other_limits_are_refused_and_with_functions_of_their_own_not() -> None:
    def run(comm: Any) -> None:
        sharded("zero1", comm, ten(), bad_steps=mz.BadSteps(callback=lambda report: None))[0].close()
        with pytest.raises(ConfigError, match="bad_steps.limit of .* 2 on rank 0, 3 on rank 1"):
            sharded("zero1", comm, ten(), bad_steps=mz.BadSteps(limit=comm.rank + 2))

    run_in_threads(2, run)
