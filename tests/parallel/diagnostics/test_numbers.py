"""Numbers that are not finite, loss scales, clipping: the same decision on every rank, and nothing half done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import DataError, LayoutError, RemoteError
from mpizero.testing import run_in_threads
from tests.parallel.models import gpt, layouts, mlp, part, points, sharded, step_whose_sum_overflows, ten, tokens


def state_of(model: Any) -> tuple[Any, ...]:
    updater = model.engine.updater
    slots = {slot: values.tobytes() for slot, values in updater.state.items()}
    return model.parameters_sha256(), updater.step_count, slots


def infinite_above_100(x: Any, g: Any) -> Any:
    return np.where(np.arange(10) == 7, np.inf, g) if (x > 100).any() else g


@pytest.mark.mpi
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(world: Any) -> None:
    x = np.ones((2 * world.size, 10))
    x[-1] = 1000.0
    told = f"the gradient of 'w' is not finite on rank {world.size - 1}, samples {len(x) - 1} to {len(x) - 1}"
    for strategy, memory in layouts(world.size):
        model, optimizer = sharded(strategy, world, ten(infinite_above_100), micro_batch=1, **memory)
        with model:
            model.train(*part(world, np.ones_like(x), x))
            before = state_of(model)
            model.train(*part(world, x, x))
            assert model.last_step.skipped == told.replace(f"rank {world.size - 1}", f"rank {owner(model, len(x))}")
            model.compute_gradients(*part(world, x, x))
            optimizer.step()
            assert model.last_step.skipped is not None
            assert state_of(model) == before
            model.train(*part(world, np.ones_like(x), x))
            assert model.last_step.skipped is None
            assert optimizer.step_count == 2


def owner(model: Any, count: int) -> int:
    """The rank that computes the last of ``count`` grains."""
    return int(model.engine.reducer.owners(count)[-1])


def test_a_loss_that_is_not_finite_skips_the_step_too() -> None:
    def bad(p: Any, b: Any) -> Any:
        return (np.nan if (b[0] > 100).any() else 1.0), {"w": b[0].sum(0)}, float(len(b[0]))

    def run(comm: Any) -> str:
        model, _ = sharded("zero1", comm, mz.FunctionModel({"w": np.ones(10)}, bad), micro_batch=2)
        with model:
            x = np.ones((4, 10))
            x[3] = 1000.0
            model.train(*part(comm, x, x))
            np.testing.assert_array_equal(model.get_parameters(), np.ones(10))
            return model.last_step.skipped

    assert run_in_threads(2, run) == ["the loss is not finite on rank 1, samples 2 to 3"] * 2


def test_a_frozen_parameters_gradient_is_nobodys_business() -> None:
    def loss_and_grad(p: Any, b: Any) -> Any:
        return 1.0, {"w": np.ones(3), "frozen": np.full(3, np.nan)}, 1.0

    start = {"w": np.ones(3), "frozen": np.ones(3)}
    model, _ = sharded("zero2", None, mz.FunctionModel(start, loss_and_grad, frozen=["frozen"]))
    with model:
        model.train(np.ones((1, 1)), np.ones((1, 1)))
        assert model.last_step.skipped is None


def test_a_weight_that_divides_nothing_is_refused_and_one_that_is_not_finite_skipped() -> None:
    weights = iter([0.0, 0.0, np.nan, np.inf])
    wrapped = mz.FunctionModel({"w": np.ones(3)}, lambda p, b: (1.0, {"w": np.ones(3)}, next(weights)))
    model, _ = sharded("zero1", None, wrapped)
    with model:
        for _ in range(2):
            with pytest.raises(DataError, match="weight .*expected more than 0"):
                model.train(np.ones((1, 1)), np.ones((1, 1)))
        for _ in range(2):
            model.train(np.ones((1, 1)), np.ones((1, 1)))
            assert model.last_step.skipped.startswith("the weight is not finite")
        np.testing.assert_array_equal(model.get_parameters(), np.ones(3))


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_an_overflow_halves_the_loss_scale_and_changes_nothing_else(world: Any) -> None:
    x, y = points(2 * world.size)
    policy = mz.DynamicLossScale(initial=2.0**100, largest=2.0**100, interval=2)
    x = 2.0**30 * x  # gradients near 2**30: they overflow float32 at a scale of 2**100, not at 2**90
    for strategy, memory in layouts(world.size):
        config = mz.ShardingConfig(comm=world, micro_batch=1, **memory)
        with config, mz.distribute(mlp(), mz.SGD(lr=1e-12), strategy=strategy, config=config) as model:
            optimizer = mz.ShardedOptimizer(mz.AdamW(lr=1e-3), config, loss_scale=policy)
            optimizer.set_model(model)
            scales, skipped = [], []
            before = state_of(model)
            for _ in range(40):
                model.train(*part(world, x, y))
                scales.append(model.engine.loss_scale.scale)
                skipped.append(model.last_step.skipped is not None)
                if not skipped[-1]:
                    break
                assert state_of(model) == before
            assert skipped == [True] * (len(skipped) - 1) + [False]
            assert len(skipped) > 1
            assert scales[: len(skipped) - 1] == [2.0 ** (99 - i) for i in range(len(skipped) - 1)]
            assert world.allgather_object(scales) == [scales] * world.size
            model.train(*part(world, x, y))
            assert model.engine.loss_scale.scale in (2 * scales[-1], scales[-1] / 2)  # grows after two good steps


def test_parts_that_are_finite_but_overflow_in_their_sum_are_skipped_with_a_loss_scale() -> None:
    with np.errstate(over="ignore"):
        for step, parameters in run_in_threads(2, step_whose_sum_overflows):
            assert step.skipped is not None
            assert not parameters.any()


@pytest.mark.mpi
def test_the_clipping_factor_is_that_of_one_process_on_every_layout(world: Any) -> None:
    x, y = tokens(8)

    def norms(comm: Any, strategy: str, memory: dict[str, Any]) -> list[float]:
        model, _ = sharded(strategy, comm, gpt(layers=1), mz.SGD(lr=0.5), micro_batch=1, clip=0.05, **memory)
        with model:
            found = []
            for _ in range(3):
                model.train(*part(comm, x, y))
                found.append(model.last_step.gradient_norm)
            return [*found, model.parameters_sha256()]

    expected = norms(None, "ddp", {})
    assert expected[0] > 0.05
    for strategy, memory in layouts(world.size):
        found = norms(world, strategy, memory)
        assert world.allgather_object(found) == [expected] * world.size


def test_clipping_follows_the_textbook() -> None:
    x, y = points(4)
    plain, _ = sharded("zero1", None, optimizer=mz.SGD(lr=1.0))
    clipped, _ = sharded("zero3", None, optimizer=mz.SGD(lr=1.0), clip=0.1)
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

    wrapped = mlp()
    wrapped = type("Model", (), {"blocks": wrapped.blocks, "loss": Heavy(), "dtype": wrapped.dtype, "seed": 0})()
    model, optimizer = sharded("zero1", None, wrapped)
    with model:
        model.engine.bind(optimizer.wrapped_optimizer, mz.DynamicLossScale(initial=2.0**40, largest=2.0**40))
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

    plain = mlp()
    wrapped = type("Model", (), {"blocks": plain.blocks, "loss": Wrong(), "dtype": plain.dtype, "seed": 0})()

    def run(comm: Any) -> None:
        for make in (mz.ZeRO1Model, mz.PipelineParallelModel):
            with mz.ShardingConfig(comm=comm, micro_batch=4) as config, make(wrapped, config) as model:
                with pytest.raises((LayoutError, RemoteError), match=rf"Wrong.forward.* at test_numbers.*{told}"):
                    model.train(*part(model.batch_group, *points(4)))
                with pytest.raises((LayoutError, RemoteError), match="as the loss: expected one real number"):
                    model.evaluate(*part(model.batch_group, *points(4)))

    run_in_threads(2, run)
