"""Steps that are not finite, loss scales, clipping: one decision on all ranks, nothing half done, and who is told."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import DataError, LayoutError, NonFiniteError, RemoteError
from mpizero.testing import run_in_threads
from tests.parallel.covering import on_layouts
from tests.parallel.models import STRATEGIES, mlp, part, points, sharded, state_of, ten


def infinite_above_100(x: Any, g: Any) -> Any:
    return np.where(np.arange(10) == 7, np.inf, g) if (x > 100).any() else g


def skips(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
    x = np.ones((2 * comm.size, 10))
    x[-1] = 1000.0
    with sharded(strategy, comm, ten(infinite_above_100), micro_batch=1, **memory) as model:
        model.train(*part(comm, np.ones_like(x), x))
        before, owner = state_of(model), model._engine.reducer.owners(len(x))[-1]
        model.train(*part(comm, x, x))
        where = f"rank {owner}, samples {len(x) - 1} to {len(x) - 1}"
        assert model.last_step.skipped == f"the gradient of 'w' is not finite on {where}"
        model.compute_gradients(*part(comm, x, x))
        model.optimizer.step()
        assert model.last_step.skipped is not None
        assert state_of(model) == before
        model.train(*part(comm, np.ones_like(x), x))
        assert model.last_step.skipped is None
        assert model.optimizer.step_count == 2


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    on_layouts(skips)


def test_a_weight_that_divides_nothing_is_refused_and_one_that_is_not_finite_skipped() -> None:
    weights = iter([0.0, 0.0, np.nan, np.inf])
    wrapped = mz.FunctionModel({"w": np.ones(3)}, lambda p, b: (1.0, {"w": np.ones(3)}, next(weights)))
    with sharded("zero1", None, wrapped) as model:
        for _ in range(2):
            with pytest.raises(DataError, match="weight .*expected more than 0"):
                model.train(np.ones((1, 1)), np.ones((1, 1)))
        for _ in range(2):  # a sum divided by infinity would be 0.0, the best of all losses
            assert math.isnan(model.train(np.ones((1, 1)), np.ones((1, 1))))
            assert model.last_step.skipped.startswith("the weight is not finite")
        np.testing.assert_array_equal(model.get_parameters(), np.ones(3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_an_overflow_halves_the_loss_scale_and_changes_nothing_else() -> None:
    policy = mz.DynamicLossScale(initial=2.0**100, largest=2.0**100, interval=2)

    def run(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
        x, y = points(2 * comm.size)
        x = 2.0**30 * x  # gradients near 2**30: they overflow float32 at a scale of 2**100, not at 2**90
        with sharded(strategy, comm, mlp(), mz.AdamW(lr=1e-3), micro_batch=1, **memory) as model:
            model._engine.bind(model.optimizer.wrapped_optimizer, policy)
            before, scale = state_of(model), 100
            model.train(*part(comm, x, y))
            while model.last_step.skipped is not None:
                scale -= 1
                assert state_of(model) == before
                assert comm.allgather_object(model._engine.loss_scale.scale) == [2.0**scale] * comm.size
                model.train(*part(comm, x, y))
            assert 80 < scale < 100
            assert model._engine.loss_scale.scale == 2.0**scale
            model.train(*part(comm, x, y))
            assert model._engine.loss_scale.scale in (2.0 ** (scale + 1), 2.0 ** (scale - 1))  # two good steps

    on_layouts(run)


def test_clipping_follows_the_textbook() -> None:
    x, y = points(4)
    plain = sharded("zero1", None, optimizer=mz.SGD(lr=1.0))
    clipped = sharded("zero3", None, optimizer=mz.SGD(lr=1.0), clip=0.1)
    with plain, clipped:
        before, gradient = plain.get_parameters(), plain.compute_gradients(x, y).values
        norm = np.sqrt((gradient.astype(np.float64) ** 2).sum())
        clipped.train(x, y)
        assert clipped.last_step.gradient_norm == pytest.approx(norm, rel=1e-6)
        np.testing.assert_allclose(clipped.get_parameters(), before - gradient * (0.1 / norm), rtol=1e-5, atol=1e-7)


def test_a_weight_that_the_loss_scale_lifts_out_of_float32_is_refused_and_nothing_changes() -> None:
    class Heavy(mz.nn.CrossEntropy):
        def forward(self, prediction: Any, target: Any) -> Any:
            loss, weight, cache = super().forward(prediction, target)
            return loss, weight * 1e30, cache

    with sharded("zero1", None, mlp(loss=Heavy())) as model:
        model._engine.bind(model.optimizer.wrapped_optimizer, mz.DynamicLossScale(initial=2.0**40, largest=2.0**40))
        before = model.parameters_sha256()
        with pytest.raises(
            DataError, match=r"has weight 4e\+30, which, times the loss scale 1.09951e\+12, is beyond float32"
        ):
            model.train(*points(4))
        assert model.parameters_sha256() == before


@pytest.mark.parametrize(
    ("loss", "told"), [("1", "returned '1' .str. as the loss of samples 0 to 3"), (None, "None as")]
)
def test_a_loss_layer_that_gives_no_number_is_named(loss: Any, told: str) -> None:
    class Wrong(mz.nn.CrossEntropy):
        def forward(self, prediction: Any, target: Any) -> Any:
            return loss, 1.0, super().forward(prediction, target)[2]

    def run(comm: Any) -> None:
        for make in (mz.ZeRO1Model, mz.PipelineParallelModel):
            with mz.ShardingConfig(comm=comm, micro_batch=4) as config, make(mlp(loss=Wrong()), config) as model:
                with pytest.raises((LayoutError, RemoteError), match=rf"Wrong.forward.* at test_skipping.*{told}"):
                    model.train(*part(model.batch_group, *points(4)))
                with pytest.raises((LayoutError, RemoteError), match="as the loss: expected one real number"):
                    model.evaluate(*part(model.batch_group, *points(4)))

    run_in_threads(2, run)


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
        model = sharded("zero2", comm, ten(), micro_batch=1)

        def step() -> None:
            if by_hand:
                model.compute_gradients(*part(comm, BAD, BAD))
                model.optimizer.step()
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
    with sharded("zero1", None, ten(), bad_steps=mz.BadSteps(limit=2)) as model:
        for batch in (BAD, GOOD, BAD, GOOD, BAD):
            model.train(batch, batch)
        with pytest.raises(NonFiniteError, match="step 6: skipped 2 steps in a row"):
            model.train(BAD, BAD)


def test_a_policy_may_be_silent_never_raise_and_ask_for_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[mz.sharding.StepReport] = []
    policy = mz.BadSteps(limit=None, warn=False, callback=seen.append)
    with sharded("zero1", None, ten(), bad_steps=policy) as model:
        for _ in range(7):
            model.train(BAD, BAD)
            assert seen[-1] is model.last_step
        model.train(GOOD, GOOD)
    assert len(seen) == 7
    assert lines(capsys) == []


def test_a_callback_may_keep_the_samples_of_the_step(tmp_path: Any) -> None:
    def run(comm: Any) -> None:
        batch = part(comm, BAD, BAD)
        policy = mz.BadSteps(limit=1, callback=lambda report: mz.sharding.dump_bad_step(model, batch, tmp_path))
        with sharded("zero1", comm, ten(), micro_batch=1, bad_steps=policy) as model, pytest.raises(NonFiniteError):
            model.train(*batch)

    run_in_threads(2, run)
    assert (tmp_path / "step_00000001" / "step.json").exists()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_steps_that_only_lower_the_loss_scale_are_told_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = points(4)
    with sharded("zero1", None, mlp(), bad_steps=mz.BadSteps(limit=1)) as model:
        model._engine.bind(model.optimizer.wrapped_optimizer, mz.DynamicLossScale(initial=2.0**100, largest=2.0**100))
        for _ in range(3):
            model.train(2.0**30 * x, y)
            assert model.last_step.backing_off
    told = lines(capsys)
    assert len(told) == 3
    assert f"the loss scale falls from {2.0**100:g} to {2.0**99:g}, which is not counted" in told[0]


def test_a_gradient_that_is_not_finite_is_not_applied_by_hand() -> None:
    def run(comm: Any) -> None:
        for strategy in STRATEGIES:
            with sharded(strategy, comm, ten(), micro_batch=1) as model:
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
