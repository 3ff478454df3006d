"""Averaged parameters, such as running statistics of batch normalization: means over samples, one and the same bits."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, LayoutError
from mpizero.nn import Frozen, initial_parameters
from mpizero.testing import check_model, run_in_threads
from mpizero.types import Array
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, layouts, part, sharded
from tests.parallel.normalized import MOMENTUM, RATE, BatchNorm, by_hand, network, samples
from tests.parallel.parallel_layouts import Case, Way, known, pipelines, trained, trained_alone

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "models"
STATISTICS = ("norm0.mean", "norm0.variance", "norm1.mean", "norm1.variance")
#: With an update that sums on its way, with one that needs norms first, and with grains of several micro-batches.
CASES: dict[str, Case] = {
    "fused": Case(network, lambda: mz.SGD(lr=RATE), samples(4, 23), config={"micro_batch": 5}),
    "clipped": Case(network, lambda: mz.AdamW(lr=1e-2), samples(2, 23), config={"micro_batch": 5, "clip": 0.1}),
    "LAMB": Case(network, lambda: mz.LAMB(lr=1e-2), samples(2, 23), config={"micro_batch": 2, "accumulate": 3}),
    "loss scale": Case(
        lambda: network("float32"), lambda: mz.AdamW(lr=1e-2), samples(2, 23, "float32"),
        mz.DynamicLossScale(initial=2.0**10), {"micro_batch": 5},
    ),
}  # fmt: skip


@cache
def alone(name: str) -> Any:
    return trained_alone(CASES[name])


def values(model: Any) -> dict[str, Array]:
    return dict(model.engine.whole.named(model.get_parameters()))


@pytest.mark.parametrize("name", ["fused", "clipped"])
def test_statistics_are_those_of_plain_numpy(name: str) -> None:
    case = replace(CASES[name], optimizer=lambda: mz.SGD(lr=RATE), config={"micro_batch": 5, "clip": None})
    if name == "clipped":  # by a bound that nothing reaches: the other kind of update
        case = replace(case, config={**case.config, "clip": 1e9})
    start = initial_parameters(network())
    expected = by_hand(start, list(case.batches), 5)
    model, _ = sharded("zero1", None, network(), case.optimizer(), **case.config)
    with model:
        for batch in case.batches:
            model.train(*batch)
        found = values(model)
    for parameter, value in expected.items():
        np.testing.assert_allclose(found[parameter], value, rtol=1e-12, atol=1e-12, err_msg=parameter)
        assert parameter.startswith("linear") or (found[parameter] != start[parameter]).all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_replicas_have_the_bits_of_one_process(ranks: int) -> None:
    sizes = [23] + [0] * (ranks - 1)  # all samples come from one rank
    for number, (strategy, memory) in enumerate(layouts(ranks)):
        name = list(CASES)[(number + ranks) % len(CASES)]
        way = Way(zero=STRATEGIES.index(strategy))
        found = run_in_threads(ranks, lambda comm, n=name, w=way, m=memory: trained(CASES[n], comm, w, sizes, **m))
        assert found == [alone(name)] * ranks, (name, strategy, memory)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_has_the_bits_of_one_process(ranks: int) -> None:
    for number, way in enumerate(w for w in pipelines(ranks, 7) if w.pipeline == 2):
        name = list(CASES)[(number + ranks) % len(CASES)]
        memory = MEMORIES[(number + ranks) % len(MEMORIES)]
        found = run_in_threads(ranks, lambda comm, n=name, w=way, m=memory: trained(CASES[n], comm, w, **m))
        assert found == [alone(name)] * ranks, (name, way, memory)


@pytest.mark.mpi
def test_ranks_of_a_real_job_have_the_bits_of_one_process(world: Any) -> None:
    for number, (strategy, memory) in enumerate(layouts(world.size)):
        name = list(CASES)[(number + world.size) % len(CASES)]
        way = Way(zero=STRATEGIES.index(strategy))
        assert trained(CASES[name], world, way, **memory) == known(world, alone, name), (name, strategy, memory)
    for way in pipelines(world.size, 7)[:2]:
        assert trained(CASES["fused"], world, way) == known(world, alone, "fused"), way


def test_any_layout_goes_on_from_any_other() -> None:
    case = CASES["clipped"]

    def gone_on(comm: Any, strategy: str, state: bytes | None, steps: slice) -> tuple[bytes, str]:
        model, _ = sharded(strategy, comm, network(), case.optimizer(), **case.config, **PRIVATE)
        with model:
            if state is not None:
                model.deserialize(state)
            for x, y in case.batches[steps]:
                model.train(*part(comm, x, y))
            return model.serialize(), model.parameters_sha256()

    (first, _), *_ = run_in_threads(4, lambda comm: gone_on(comm, "zero3", None, slice(0, 1)))
    found = run_in_threads(3, lambda comm: gone_on(comm, "ddp", first, slice(1, 2)))
    assert {sha for _, sha in found} == {alone("clipped").sha256}
    assert gone_on(None, "zero2", first, slice(1, 2))[1] == alone("clipped").sha256


def test_no_optimizer_has_state_of_them() -> None:
    model, optimizer = sharded("ddp", None, network(), mz.AdamW(lr=1e-2))
    with model:
        told, count = model.metadata(), sum(2 * n for n in (11, 13))
        assert told.trainable_count == told.parameter_count - count
        held, formula = told.bytes_on_rank["optimizer state"], told.formula_bytes["optimizer state"]
        assert held == formula == 2 * 8 * told.trainable_count
        assert not set(STATISTICS) & set(optimizer.state_dict()["state"]["exp_avg"])
    groups = (mz.ParameterGroup("norm?.mean", lr_scale=0.0),)
    with pytest.raises(ConfigError, match=r"'norm\?\.mean'.* matches no parameter"):
        sharded("ddp", None, network(), mz.AdamW(lr=1e-2, groups=groups))


def test_gradients_by_hand_update_them_in_a_step_and_not_in_apply_gradients() -> None:
    case = CASES["clipped"]

    def by_steps(comm: Any) -> str:
        model, optimizer = sharded("zero2", comm, network(), case.optimizer(), **case.config, auto_sync_gradients=False)
        with model:
            for x, y in case.batches:
                found = model.compute_gradients(*part(comm, x, y))
                before = values(model)
                whole = model.synchronize_gradients(gather=True)
                assert not any(whole.named()[name].any() for name in STATISTICS)
                assert not found.synchronized
                optimizer.step()
                assert all((values(model)[name] != before[name]).all() for name in STATISTICS)
            after = values(model)
            model.apply_gradients(whole, 0.5)
            assert all((values(model)[name] == after[name]).all() for name in STATISTICS)
            model.set_parameters(np.concatenate([after[n].reshape(-1) for n in after]))
            return str(model.parameters_sha256())

    assert set(run_in_threads(2, by_steps)) == {alone("clipped").sha256}


def test_the_example_has_one_hash() -> None:
    example = runpy.run_path(str(EXAMPLES / "residual_in_numpy.py"))
    x, y = example["data"](15)
    case = Case(lambda: example["make"](channels=2), batches=[(x, y)], config={"micro_batch": 3})
    ways = [Way(2, schedule="zero_bubble"), Way(zero=3)]
    found = [run_in_threads(2, lambda comm, w=way: trained(case, comm, w, **PRIVATE)) for way in ways]
    assert found == [[trained_alone(case)] * 2] * 2


# ---------------------------------------------------------------------- functions


def counting(poison: Any = None, *, in_place: bool = False) -> mz.FunctionModel:
    """A mean whose statistic ``seen`` is the running mean of the samples; a weight of 1/1000 for each of them."""

    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, _ = batch
        seen = (1 - MOMENTUM) * p["seen"] + MOMENTUM * x.mean(0)
        if poison is not None:
            poison(x, seen)
        error = x - p["w"]
        return float((error**2).sum()), {"w": -2 * error.sum(0), "seen": seen}, 1e-3 * len(x)

    def written(p: Any, batch: Any, gradients: Any) -> Any:
        loss, found, weight = loss_and_grad(p, batch)
        for name, value in found.items():
            gradients[name][...] = value
        return loss, weight

    function = written if in_place else loss_and_grad
    start = {"w": np.zeros(7), "seen": np.ones(7)}
    return mz.FunctionModel(start, function, averaged=["seen"], in_place=in_place)


def test_a_function_returns_new_values_in_place_of_gradients() -> None:
    x = samples(1, 11)[0][0][:, :7].repeat(2, axis=1)[:, :7]
    expected = (1 - MOMENTUM) * np.ones(7) + MOMENTUM * x.mean(0)

    def go(strategy: str, comm: Any) -> Any:
        function = counting(in_place=strategy in STRATEGIES[::2])
        model, _ = sharded(strategy, comm, function, mz.SGD(lr=1e-5), micro_batch=2)
        with model:
            model.train(*part(comm, x, x[:, 0]))
            return values(model)["seen"]

    one = go("ddp", None).tobytes()
    np.testing.assert_allclose(np.frombuffer(one), expected, rtol=1e-14)
    for strategy in STRATEGIES:
        assert {seen.tobytes() for seen in run_in_threads(3, lambda comm, s=strategy: go(s, comm))} == {one}
    assert "averaged" in str(check_model(counting(), x[:6], x[:6, 0]))


def test_a_new_value_that_is_not_finite_skips_the_step_and_is_named() -> None:
    def poison(x: Array, seen: Array) -> None:
        if x[0, 0] == 3.0:
            seen[2] = np.nan

    def go(comm: Any) -> Any:
        settings = {"micro_batch": 1, "bad_steps": mz.BadSteps(warn=False)}
        model, _ = sharded("zero3", comm, counting(poison), mz.SGD(lr=1e-5), **settings, **PRIVATE)
        with model:
            before = model.parameters_sha256()
            model.train(*part(comm, np.arange(4.0)[:, None].repeat(7, axis=1), np.zeros(4)))
            return model.last_step.skipped, model.parameters_sha256() == before

    for told, unchanged in run_in_threads(2, go):
        assert unchanged
        assert "the new value of 'seen' is not finite" in told


# ---------------------------------------------------------------------- what cannot be


class Tied(BatchNorm):
    """Takes the statistics of another block."""

    def own_specs(self) -> Any:
        return tuple(replace(s, tied=f"norm0.{s.name}") if s.averaged else s for s in super().own_specs())


def test_frozen_statistics_are_constants() -> None:
    model, _ = sharded("zero3", None, network(norm=lambda n: Frozen(BatchNorm(n))), mz.SGD(lr=RATE), micro_batch=5)
    with model:
        before = values(model)
        model.train(*samples(1, 23)[0])
        assert all((values(model)[name] == before[name]).all() for name in STATISTICS)
        assert (values(model)["linear0.weight"] != before["linear0.weight"]).any()


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "tied": (
        lambda: sharded("ddp", None, replace(network(), blocks={"norm0": BatchNorm(3), "norm1": Tied(3)})),
        LayoutError, r"'norm1\.mean' is tied to 'norm0\.mean', and averaged parameters cannot be tied",
    ),
    "frozen too": (
        lambda: mz.FunctionModel({"a": np.zeros(2)}, lambda p, b: (0.0, {}, 1.0), averaged=["a"], frozen=["a"]),
        ConfigError, r"frozen and averaged both name \['a'\]",
    ),
    "unknown": (
        lambda: mz.FunctionModel({"mean": np.zeros(2)}, lambda p, b: (0.0, {}, 1.0), averaged=["maen"]),
        ConfigError, r"averaged names \['maen'\].*'mean'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_said(what: str) -> None:
    make, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        make()


def test_sequences_cannot_be_cut() -> None:
    def go(comm: Any) -> None:
        with mz.ShardingConfig(comm=comm) as config, pytest.raises(ConfigError, match=r"context=2 .*'norm0\.mean'"):
            mz.HybridShardedModel(network(), config, context_parallel_size=2)

    run_in_threads(2, go)
