"""What functions and sources are told, so that noise of their own is the same on any ranks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError, LayoutError
from mpizero.testing import run_in_threads
from mpizero.types import Array
from tests.parallel.models import STRATEGIES, hard_function, layouts, part, points, sharded, vectors


def noisy(seen: set[Any] | None = None, **more: Any) -> mz.FunctionModel:
    """A function that adds noise to its samples, keyed by all that it is told."""
    whole = hard_function()

    def loss_and_grad(p: Any, batch: Any, *, run: Any) -> Any:
        x, y = batch
        assert len(run.samples) == len(x)
        assert run.samples[0] == run.first_sample
        if seen is not None:
            seen.add((run.seed, run.step, run.epoch, run.training, tuple(run.samples)))
        keys = [(run.seed, run.step, run.epoch, sample) for sample in run.samples]
        noise = np.array([np.random.default_rng(key).normal(size=x.shape[1]) for key in keys])
        return whole.loss_and_grad(p, (x + noise if run.training else x, y))

    return mz.FunctionModel(whole.parameters, loss_and_grad, frozen=["scale"], **more)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_noise_of_a_function_is_the_same_on_any_ranks(ranks: int) -> None:
    """Three epochs of a step each, the seed, and an evaluation: the same everywhere, and of every micro-batch."""

    def trained(comm: Any, strategy: str = "ddp", seed: int = 7, **memory: Any) -> tuple[Any, ...]:
        seen = set[Any]()
        with sharded(strategy, comm, noisy(seen, seed=seed), micro_batch=4, accumulate=2, **memory) as model:
            batch = part(comm, *vectors(11))
            losses = [model.train(*batch, epoch=epoch) for epoch in (0, 0, 3)]
            gradient = model.compute_gradients(*batch, epoch=5, gather=True)
            return losses, gradient.values.tobytes(), model.evaluate(*batch), model.parameters_sha256(), seen

    *expected, every = trained(None)
    assert {told[:4] for told in every} == {(7, 0, 0, True), (7, 1, 0, True), (7, 2, 3, True), (7, 3, 5, True)} | {
        (7, 3, 5, False)
    }
    assert sorted(told[4] for told in every if told[1] == 0) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10)]
    for strategy, memory in layouts(ranks)[ranks % 2 :: 2]:
        for *found, seen in run_in_threads(ranks, functools.partial(trained, strategy=strategy, **memory)):
            assert found == expected, (strategy, memory)
            assert seen <= every
    assert trained(None, seed=8)[3] != expected[3], "another seed is other noise"


def test_an_epoch_is_the_same_on_all_ranks_and_a_whole_number() -> None:
    def run(comm: Any) -> None:
        with sharded("zero1", comm, noisy()) as model:
            x, y = vectors(4)
            with pytest.raises(DataError, match="rank 0 is asked for epoch=1, rank 2 for epoch=0"):
                model.train(x, y, epoch=int(comm.rank < 2))
            with pytest.raises(DataError, match="rank 1: epoch=1.5: expected a whole number >= 0"):
                model.train(x, y, epoch=1.5 if comm.rank == 1 else 1)
            with pytest.raises(DataError, match="rank 0 is asked for gather=False, rank 1 for gather=True"):
                model.compute_gradients(x, y, gather=comm.rank > 0)

    run_in_threads(3, run)


def nothing(p: Any, batch: Any) -> Any:
    return 1.0, {"w": np.ones(3)}, 1.0


def loss_of(function: Any) -> Any:
    with sharded("ddp", None, mz.FunctionModel({"w": np.zeros(3)}, function)) as model:
        return model.train(np.ones((2, 1)), np.ones(2))


def test_what_old_functions_take_besides_is_left_alone() -> None:
    def old(p: Any, batch: Any, seed: int = 3, step: float = 0.1, **more: Any) -> Any:
        assert (seed, step, more) == (3, 0.1, {})
        return nothing(p, batch)

    assert loss_of(old) == loss_of(lambda run, batch: nothing(run, batch)) == 1.0


def test_a_decorated_function_is_called_as_its_decorator_takes_it() -> None:
    def with_scale(p: Any, batch: Any, scale: float) -> Any:
        return scale, {"w": np.ones(3)}, 1.0

    def with_run(p: Any, batch: Any, run: Any = None) -> Any:
        return float(run is not None), {"w": np.ones(3)}, 1.0

    for function, decorated, loss in (
        (with_scale, lambda p, batch: with_scale(p, batch, 2.0), 2.0),
        (with_run, lambda p, batch: with_run(p, batch), 0.0),
        (with_run, lambda *args, **kwargs: with_run(*args, **kwargs), 1.0),
        (nothing, lambda *args, **kwargs: nothing(*args, **kwargs), 1.0),
    ):
        assert loss_of(functools.wraps(function)(decorated)) == loss


@pytest.mark.slow
def test_evaluate_calls_a_loss_without_gradient_where_there_is_one() -> None:
    def never(p: Any, batch: Any) -> Any:
        raise AssertionError("evaluate needs no gradient")

    def loss(p: Any, batch: Any, *, run: Any) -> Any:
        assert not run.training
        return float((run.first_sample + 1) * batch[0]["x"].sum()), float(len(batch[1]))

    def run(comm: Any) -> Any:
        x = np.arange(12.0).reshape(6, 2)
        found = []
        for strategy in STRATEGIES:
            wrapped = mz.FunctionModel({"w": np.zeros(3)}, never, loss=loss)
            with sharded(strategy, comm, wrapped, micro_batch=2) as model:
                mine, y = part(comm, x, np.ones(6))
                found.append(model.evaluate({"x": mine}, y))
                assert model.default_loss_function is None
        return found

    expected = (1 * 6.0 + 3 * 22.0 + 5 * 38.0, 6.0, None)
    for size in (1, 3):
        assert run_in_threads(size, run) == [[expected] * 4] * size

    wrong = mz.FunctionModel({"w": np.zeros(3)}, nothing, loss=lambda p, b: 3.0)
    model = sharded("ddp", None, wrong)
    with model, pytest.raises(LayoutError, match=r"loss must return \(loss_sum, weight\), it returned float"):
        model.evaluate(np.ones((2, 1)), np.ones(2))


@pytest.mark.parametrize("given", [3.0, (3.0, 0.5), (3.0, {"accuracy": 0.5})])
def test_a_method_loss_of_an_own_class_is_its_own_affair(given: Any) -> None:
    """Such as a mean, maybe with a figure beside it, that its "loss_and_grad" differentiates."""

    class Own:
        dtype = np.dtype(np.float64)

        def __init__(self) -> None:
            self.parameters = {"w": np.zeros(3)}

        def loss(self, p: Any, batch: Any) -> Any:
            return given

        def loss_and_grad(self, p: Any, batch: Any) -> Any:
            return 2.0 * len(batch[1]), {"w": np.ones(3)}, float(len(batch[1]))

    with sharded("zero1", None, Own()) as model:
        assert model.evaluate(np.ones((4, 1)), np.ones(4)) == (8.0, 4.0, None)


LENGTH = 10


class Augmented(mz.data.Source):
    """A source that changes samples at random, once an epoch."""

    def __init__(self) -> None:
        self.runs: list[Any] = []

    def __len__(self) -> int:
        return LENGTH

    def read(self, indices: Any, *, run: Any) -> Any:
        self.runs.append(run)
        assert len(run.samples) == len(indices)
        keys = [
            (run.seed, run.epoch, run.step, place, index) for place, index in zip(run.samples, indices, strict=True)
        ]
        noise = np.array([np.random.default_rng(key).normal() for key in keys])
        return {"x": indices + (noise if run.training else 0.0)}, indices

    def describe(self) -> dict[str, Any]:
        return {"kind": "augmented"}


@pytest.mark.parametrize("split", [False, True])
def test_a_source_that_is_told_of_the_run_gives_the_same_batches_on_any_ranks(split: bool) -> None:
    def run(comm: Any) -> tuple[list[Array], list[int], Any]:
        source = Augmented()
        chosen = source.split(0.2)[0] if split else source
        stream = mz.data.batches(chosen, mz.ShardingConfig(comm=comm, micro_batch=1), 7, seed=5, steps=4)
        read, epochs = [], []
        for x, _ in stream:
            read.append(x["x"])
            epochs.append(stream.epoch)
        assert source.samples([1, 2])[0]["x"].tolist() == [1.0, 2.0], "outside of batches nothing is trained"
        return read, epochs, source.runs

    ((one, epochs, runs),) = run_in_threads(1, run)
    length = 8 if split else LENGTH
    assert epochs == [7 * step // length for step in range(4)]
    assert {(r.seed, r.step, r.epoch) for r in runs[:-1]} >= {(5, 1, 0), (5, 1, 1), (5, 2, 1)}
    for size in (2, 3, 4):
        parts = [read for read, *_ in run_in_threads(size, run)]
        for step, whole in enumerate(one):
            np.testing.assert_array_equal(np.concatenate([part[step] for part in parts]), whole)


def test_a_part_of_a_gradient_says_how_to_get_all_of_it() -> None:
    x, y = points(4)
    with sharded("zero2", None) as model:
        with pytest.raises(LayoutError, match="compute_gradients.x, y, gather=True"):
            model.compute_gradients(x, y).named()
        gradient = model.compute_gradients(x, y, gather=True)
        with pytest.raises(LayoutError, match="needs 107 values, one for each parameter, got an array of shape .3,"):
            model.apply_gradients(mz.Gradients(np.ones(3, np.float32), 1.0, 1.0, True, gradient.layout), 0.1)
    with sharded("zero2", None, auto_sync_gradients=False) as model:
        with pytest.raises(ConfigError, match=r"call synchronize_gradients\(gather=True\) after it"):
            model.compute_gradients(x, y, gather=True)
        model.compute_gradients(x, y)
        assert model.synchronize_gradients(gather=True).values.tobytes() == gradient.values.tobytes()
