"""Regularization of a sharded model: the bits of one process on every layout, minima of independent formulas."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, MpizeroError, NonFiniteError
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, STRATEGIES, layouts, mlp, points

RNG = np.random.default_rng(5)
MATRIX, TARGETS = RNG.normal(size=(40, 12)), RNG.normal(size=40)
WEIGHT = 0.3


def squares(parameters: Any, batch: Any) -> tuple[float, Any, float]:
    a, t = batch
    residual = a @ np.concatenate([parameters["w"].reshape(-1), parameters["b"]]) - t
    slope = a.T @ residual
    return 0.5 * float(residual @ residual), {"w": slope[:8].reshape(2, 4), "b": slope[8:]}, float(len(a))


def product(parameters: Any, batch: Any, direction: Any) -> tuple[Any, float]:
    a, _ = batch
    found = a.T @ (a @ np.concatenate([direction["w"].reshape(-1), direction["b"]]))
    return {"w": found[:8].reshape(2, 4), "b": found[8:]}, float(len(a))


def linear(**more: Any) -> mz.FunctionModel:
    return mz.FunctionModel({"w": np.zeros((2, 4)), "b": np.zeros(4)}, squares, **more)


def minimized(comm: Any, regularization: Any, strategy: str = "zero1", model: Any = None, **more: Any) -> Any:
    settings = more.pop("settings", {})
    with (
        mz.ShardingConfig(comm=comm, micro_batch=3, minimum_parameter_group_size=1, **settings) as config,
        mz.distribute(linear() if model is None else model, None, strategy=strategy, config=config) as placed,
    ):
        found = mz.minimize(placed, more.pop("data", (MATRIX, TARGETS)), regularization=regularization, **more)
        return found.fun, found.success, placed.parameters_sha256(), found.x


def test_tikhonov_gives_the_solution_of_the_normal_equations() -> None:
    found = minimized("self", {"w": mz.Tikhonov(WEIGHT), "b": mz.Tikhonov(WEIGHT, 2.0)}, options={"gtol": 1e-11})
    reference = np.repeat([0.0, 2.0], [8, 4])
    normal = MATRIX.T @ MATRIX / 40 + WEIGHT * np.eye(12)
    expected = np.linalg.solve(normal, MATRIX.T @ TARGETS / 40 + WEIGHT * reference)
    np.testing.assert_allclose(found[3], expected, atol=1e-9)
    residual = MATRIX @ expected - TARGETS
    loss = 0.5 * residual @ residual / 40 + 0.5 * WEIGHT * ((expected - reference) ** 2).sum()
    assert found[0] == pytest.approx(loss, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["l-bfgs", "cg", "newton-cg", "gauss-newton"])
def test_every_method_finds_the_same_minimum(method: str) -> None:
    model = linear(product=product) if method == "gauss-newton" else linear()
    terms = {"w": mz.TotalVariation(0.1, smoothing=0.1), "b": mz.Tikhonov(0.2)}
    found = minimized("self", terms, model=model, method=method, options={"gtol": 1e-9})
    other = minimized("self", terms, options={"gtol": 1e-9})
    assert found[1]
    np.testing.assert_allclose(found[3], other[3], atol=1e-7)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_iterates_have_the_bits_of_one_process_on_every_layout(ranks: int) -> None:
    """Each layout has one of two methods, the other on other numbers of ranks."""

    def run(comm: Any, strategy: str, memory: Any, method: str) -> Any:
        terms = {"w": mz.TotalVariation(0.1), "b": mz.Tikhonov(0.2)}
        model = linear(product=product) if method == "gauss-newton" else linear()
        options = {"maxiter": 2 if method == "gauss-newton" else 4}  # of many products each; of a history
        return minimized(comm, terms, strategy, model, settings=memory, method=method, options=options)[:3]

    for number, (strategy, memory) in enumerate(layouts(ranks)):
        method = ("l-bfgs", "gauss-newton")[(number + number // 2 + ranks // 3) % 2]
        found = run_in_threads(ranks, partial(run, strategy=strategy, memory=memory, method=method))
        assert found == [run("self", "zero1", {}, method)] * ranks, (strategy, memory, method)


@pytest.mark.mpi
def test_iterates_of_a_real_job_have_the_bits_of_one_process(world: Any) -> None:
    terms, options = {"*": mz.TotalVariation(0.1)}, {"maxiter": 6}
    strategy, memory = STRATEGIES[world.size % 4], MEMORIES[world.size % 3]
    found = minimized(world, terms, strategy, settings=memory, options=options)
    assert found[:3] == minimized("self", terms, options=options)[:3]


@pytest.mark.slow
def test_stages_of_a_pipeline_count_each_term_once() -> None:
    x, y = points(12)

    def run(comm: Any, **layout: Any) -> tuple[float, str]:
        with mz.ShardingConfig(comm=comm, micro_batch=3) as config:
            model = mlp(dtype="float64")
            placed: Any = (
                mz.HybridShardedModel(model, config, zero_stage=1, **layout) if layout else mz.ZeRO1Model(model, config)
            )
            with placed:
                terms = {"*.weight": mz.Tikhonov(0.01)}
                found = mz.minimize(placed, (x.astype("f8"), y), regularization=terms, options={"maxiter": 5})
                return found.fun, placed.parameters_sha256()

    (expected,) = run_in_threads(1, run)
    assert set(run_in_threads(2, lambda comm: run(comm, pipeline_parallel_size=2))) == {expected}
    assert set(run_in_threads(4, lambda comm: run(comm, pipeline_parallel_size=2))) == {expected}


def test_each_term_is_computed_by_one_rank() -> None:
    def run(comm: Any) -> int:
        calls = []

        def counted(values: Any) -> Any:
            calls.append(1)
            return 0.0, np.zeros_like(values)

        with mz.ShardingConfig(comm=comm, micro_batch=3) as config, mz.ZeRO3Model(linear(), config) as placed:
            found = mz.minimize(placed, (MATRIX, TARGETS), regularization={"w": counted}, options={"maxiter": 2})
            assert found.nfev >= 2
        return len(calls)

    assert sorted(run_in_threads(3, run))[:2] == [0, 0]


def failing(values: Any) -> Any:
    raise ZeroDivisionError("in my term")


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no such parameter": ({"v": mz.Tikhonov(1.0)}, {}, ConfigError, "regularization"),
    "an error": ({"w": failing}, {}, Exception, "in my term"),
    "another shape": ({"w": lambda v: (0.0, v[:1])}, {}, Exception, r"gradient of shape \(1, 4\)"),
    "not a number": ({"w": lambda v: (np.nan, v)}, {}, NonFiniteError, "start values"),
    "no product": (
        {"w": lambda v: (0.0, v)},
        {"method": "gauss-newton", "model": linear(product=product)},
        MpizeroError,
        r"no method product\(values, direction\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_terms_are_told_on_all_ranks(name: str) -> None:
    terms, more, kind, said = WRONG[name]

    def run(comm: Any) -> None:
        with pytest.raises(kind, match=said):
            minimized(comm, terms, **more)

    run_in_threads(2, run)


def test_an_infinite_term_at_a_trial_shortens_the_step() -> None:
    """A barrier: the logarithm of what must stay positive."""

    def barrier(values: Any) -> Any:
        if (values <= -0.1).any():
            return np.inf, np.zeros_like(values)
        return -1e-3 * float(np.log(values + 0.1).sum()), -1e-3 / (values + 0.1)

    found = minimized("self", {"w": barrier}, options={"gtol": 1e-7})
    assert found[1]
    assert found[3][:8].min() > -0.1


def test_a_split_parameter_is_refused() -> None:
    def run(comm: Any) -> None:
        with (
            mz.ShardingConfig(comm=comm) as config,
            mz.HybridShardedModel(mlp(hidden=(8,)), config, tensor_parallel_size=2) as placed,
            pytest.raises(ConfigError, match="a tensor group splits"),
        ):
            mz.minimize(placed, points(8), regularization={"*": mz.Tikhonov(1.0)})

    run_in_threads(2, run)


@pytest.mark.parametrize("kind", ["int64", "float32", ">f8", "<f8"])
def test_a_term_may_return_its_gradient_in_any_type_of_numbers(kind: str) -> None:
    """As numpy.sign of whole numbers does; elements travel to other ranks in the parameter's type."""

    def run(comm: Any, kind: str = "f8") -> Any:
        terms = {"*": lambda values: (float(2 * values.sum()), np.full(values.shape, 2, kind))}
        return minimized(comm, terms, settings={"share_node_memory": False}, options={"maxiter": 3})[:3]

    for ranks in (1, 3):
        assert run_in_threads(ranks, partial(run, kind=kind)) == [run("self")] * ranks
