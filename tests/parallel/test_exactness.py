"""One and the same bits on any number of ranks, any strategy, any memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.sharding.exactness import different_builds, numpy_builds
from mpizero.testing import run_in_threads
from mpizero.types import Run
from tests.parallel.covering import on_layouts
from tests.parallel.models import (
    MEMORIES,
    PRIVATE,
    STRATEGIES,
    gpt,
    hard_function,
    layouts,
    part,
    sharded,
    tokens,
    vectors,
)
from tests.parallel.models import trained as trained_box
from tests.parallel.parallel_layouts import known

CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": lambda: mz.AdamW(lr=1e-2)},
    "clip": {"optimizer": lambda: mz.AdamW(lr=1e-2), "clip": 0.3},
    "lamb": {"optimizer": lambda: mz.LAMB(lr=1e-2)},
    "nesterov": {"optimizer": lambda: mz.SGD(lr=0.1, momentum=0.9, nesterov=True)},
    "untied": {"optimizer": lambda: mz.Adam(lr=1e-2), "model": {"tied": False}},
    "checkpointed": {"optimizer": lambda: mz.Lion(lr=1e-3), "model": {"activation_checkpointing": True}},
    "six grains of 11": {"optimizer": lambda: mz.RMSprop(lr=1e-3), "micro_batch": 2},
    "accumulate": {"optimizer": lambda: mz.AdamW(lr=1e-2), "accumulate": 2, "micro_batch": 2},
    "forty default grains": {
        "optimizer": lambda: mz.AdamW(lr=1e-2),
        "samples": 40,
        "micro_batch": None,
        "model": {"sequence": 1024},
    },
    "float64": {"optimizer": lambda: mz.AdamW(lr=1e-2), "model": {"dtype": "float64"}},
    "muon": {"optimizer": lambda: mz.Muon(lr=1e-2), "clip": 0.3, "loss_scale": mz.DynamicLossScale(initial=2.0**10)},
    "soap": {"optimizer": lambda: mz.SOAP(lr=1e-2, frequency=1), "model": {"tied": False}},
    "wire": {"optimizer": lambda: mz.AdamW(lr=1e-2), "wire": "bfloat16"},
    "wire, parameters": {"optimizer": lambda: mz.AdamW(lr=1e-2), "wire": "bfloat16", "wire_parameters": True},
    "wire, clip": {"optimizer": lambda: mz.LAMB(lr=1e-2), "wire": "bfloat16", "clip": 0.3, "accumulate": 2},
    "loss scale": {"optimizer": lambda: mz.AdamW(lr=1e-2), "loss_scale": mz.DynamicLossScale(initial=2.0**10)},
}


def trained(case: str, strategy: str, comm: Any, sizes: list[int] | None = None, **memory: Any) -> tuple[Any, ...]:
    """Train three steps on 11 samples (or the case's); return the parameters' hash, the last loss and gradient norm."""
    settings = {"samples": 11, "micro_batch": 1, "model": {}, "loss_scale": None, **CASES[case]}
    batch, network = tokens(settings.pop("samples")), gpt(**settings.pop("model"))
    optimizer, loss_scale = settings.pop("optimizer")(), settings.pop("loss_scale")
    with sharded(strategy, comm, network, optimizer, **settings, **memory) as model:
        if loss_scale is not None:
            model._engine.bind(optimizer, loss_scale)
        for _ in range(3):
            loss = model.train(*part(comm, *batch, sizes))
        return model.parameters_sha256(), loss, model.last_step.gradient_norm


@cache
def serial(case: str) -> tuple[Any, ...]:
    return trained(case, "ddp", None)


@pytest.mark.mpi
def test_processes_have_the_bits_of_one(world: Any) -> None:
    """Half of the strategies and memories, each with another optimizer or option in a job of another size."""
    for number, (strategy, memory) in list(enumerate(layouts(world.size)))[world.size // 3 % 2 :: 2]:
        case = list(CASES)[(2 * number + 3 * world.size) % len(CASES)]
        assert trained(case, strategy, world, **memory) == known(world, serial, case), (case, strategy, memory)


@pytest.mark.parametrize("case", CASES)
def test_every_optimizer_and_option_has_the_bits_of_one_process(case: str) -> None:
    """Twice each; all together every pair of a number of ranks, a strategy and a kind of memory occurs."""
    number = list(CASES).index(case)
    for turn in range(2):
        ranks, strategy = (2, 3, 4, 8)[(number + 2 * turn) % 4], STRATEGIES[(number // 4 + number + turn) % 4]
        memory = MEMORIES[(number + number // 4 + turn) % 3]
        found = run_in_threads(ranks, lambda comm, s=strategy, m=memory: trained(case, s, comm, **m))
        assert set(found) == {serial(case)}, (ranks, strategy, memory)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_of_4_2_0_and_5_have_the_bits_of_one_batch_of_11(strategy: str) -> None:
    found = run_in_threads(4, lambda comm: trained("six grains of 11", strategy, comm, [4, 2, 0, 5]))
    assert set(found) == {serial("six grains of 11")}


@pytest.mark.slow
def test_a_black_box_with_frozen_empty_and_prime_sized_tensors_has_the_bits_of_one_process() -> None:
    def run(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
        found = trained_box(comm, strategy, hard_function(), vectors(9), mz.AdamW(lr=0.05), **memory)
        assert found == expected

    expected = trained_box(None, "ddp", hard_function(), vectors(9), mz.AdamW(lr=0.05))
    on_layouts(run)


@pytest.mark.slow
def test_batches_that_shrink_and_grow_have_the_bits_of_one_process() -> None:
    """A smaller batch has fewer rows of gradients in the same window."""

    def shrunk_and_grown(comm: Any, strategy: str, **memory: Any) -> str:
        with sharded(strategy, comm, gpt(layers=1), micro_batch=1, **memory) as model:
            for samples in (16, 3, 2, 11):
                model.train(*part(comm, *tokens(samples, samples)))
            return str(model.parameters_sha256())

    expected = shrunk_and_grown(None, "ddp")
    for ranks, strategy, memory in ((2, "ddp", {}), (3, "ddp", PRIVATE), (4, "zero1", MEMORIES[2]), (8, "zero2", {})):
        found = run_in_threads(ranks, lambda comm, s=strategy, m=memory: shrunk_and_grown(comm, s, **m))
        assert set(found) == {expected}, (ranks, strategy, memory)


@pytest.mark.slow
def test_more_ranks_than_elements_train() -> None:
    def loss_and_grad(p: Any, batch: Any) -> Any:
        error = batch[0] * p["w"] - batch[1]
        return float((error**2).sum() / 2), {"w": (error * batch[0]).sum(0)}, float(len(batch[0]))

    model, x = mz.FunctionModel({"w": np.ones(1)}, loss_and_grad), np.arange(1.0, 7.0).reshape(6, 1)
    expected = trained_box(None, "ddp", model, (x, 3 * x))
    for ranks, strategy in zip((2, 3, 4, 8), STRATEGIES, strict=True):
        found = run_in_threads(ranks, lambda comm, s=strategy: trained_box(comm, s, model, (x, 3 * x)))
        assert found == [expected] * ranks


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clip", [None, 1e9])
def test_a_step_with_tied_parameters_and_dropout_follows_the_gradient_of_the_whole_model(
    strategy: str, clip: float | None
) -> None:
    """The gradient of all samples in one pass, with the model's seed; clipping, which changes nothing, sums first."""
    model, (x, y) = gpt(dtype="float64", seed=5), tokens(7)

    def step(comm: Any) -> tuple[dict[str, Any], float, dict[str, Any]]:
        with sharded(strategy, comm, model, mz.SGD(lr=0.5), micro_batch=2, clip=clip, **PRIVATE) as placed:
            before = placed.named_parameters()
            return before, placed.train(*part(comm, x, y)), placed.named_parameters()

    before, loss, after = run_in_threads(3, step)[0]
    run = Run(True, model.seed, 0, 0, count=len(x))
    total, weight, gradients = mz.nn.loss_and_gradients(model, before, (x, y), run)
    assert loss == pytest.approx(total / weight, rel=1e-13)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(after[name], before[name] - 0.5 * gradient / weight, rtol=1e-12, atol=1e-14)


def test_the_first_rank_with_another_build_is_named_with_both_and_equal_ones_are_not() -> None:
    assert different_builds([["openblas 1"], ["openblas 1"]]) is None
    told = different_builds([["openblas 1 for Zen"], ["openblas 1 for Zen"], ["openblas 1 for SkylakeX"]]) or ""
    assert all(word in told for word in ("rank 2", "Zen", "SkylakeX"))


def test_of_several_builds_numpys_own_counts_and_where_it_has_none_the_systems() -> None:
    def library(path: Path, version: str) -> dict[str, str]:
        return {"user_api": "blas", "internal_api": "openblas", "version": version, "filepath": str(path)}

    packages = Path(np.__file__).parent.parent
    own = library(packages / "numpy.libs" / "libopenblas.so", "2")
    other = library(packages / "scipy.libs" / "libopenblas.so", "1")
    assert numpy_builds([other, own]) == numpy_builds([own]) == ["openblas 2 for unknown cores"]
    assert numpy_builds([library(Path("/usr/lib/libopenblas.so"), "3")]) == ["openblas 3 for unknown cores"]
