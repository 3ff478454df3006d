"""One and the same bits on any number of ranks, any strategy, any memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.testing import run_in_threads
from mpizero.types import Run
from tests.parallel.models import MEMORIES, STRATEGIES, gpt, hard_function, layouts, part, tokens, vectors
from tests.parallel.parallel_layouts import known, of_first

CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": lambda: mz.AdamW(lr=1e-2)},
    "clip": {"optimizer": lambda: mz.AdamW(lr=1e-2), "clip": 0.3},
    "lamb": {"optimizer": lambda: mz.LAMB(lr=1e-2)},
    "nesterov": {"optimizer": lambda: mz.SGD(lr=0.1, momentum=0.9, nesterov=True)},
    "untied": {"optimizer": lambda: mz.Adam(lr=1e-2), "model": {"tied": False}},
    "checkpointed": {"optimizer": lambda: mz.Lion(lr=1e-3), "model": {"activation_checkpointing": True}},
    "six grains": {"optimizer": lambda: mz.RMSprop(lr=1e-3), "samples": 12, "micro_batch": 2},
    "accumulate": {"optimizer": lambda: mz.AdamW(lr=1e-2), "accumulate": 2, "micro_batch": 2},
    "forty default grains": {
        "optimizer": lambda: mz.AdamW(lr=1e-2),
        "samples": 40,
        "micro_batch": None,
        "model": {"sequence": 1024},
    },
    "float64": {"optimizer": lambda: mz.AdamW(lr=1e-2), "model": {"dtype": "float64"}},
    "muon": {"optimizer": lambda: mz.Muon(lr=1e-2), "clip": 0.3},
    "soap": {"optimizer": lambda: mz.SOAP(lr=1e-2, frequency=1), "model": {"tied": False}},
    "loss scale": {"optimizer": lambda: mz.AdamW(lr=1e-2), "loss_scale": mz.DynamicLossScale(initial=2.0**10)},
}


def trained(case: str, strategy: str, comm: Any, sizes: list[int] | None = None, **memory: Any) -> tuple[str, float]:
    """Train three steps on 11 samples (or the case's) and return the hash of the parameters and the last loss."""
    settings = {"samples": 11, "micro_batch": 1, "model": {}, "loss_scale": None, **CASES[case]}
    x, y = tokens(settings.pop("samples"))
    model, optimizer = gpt(**settings.pop("model")), settings.pop("optimizer")()
    loss_scale = settings.pop("loss_scale")
    with mz.ShardingConfig(
        comm="self" if comm is None else comm, minimum_parameter_group_size=1, **settings, **memory
    ) as config:
        sharded, bound = mz.distribute(model, optimizer, strategy=strategy, config=config)
        with sharded:
            if loss_scale is not None:
                sharded.engine.bind(optimizer, loss_scale)
            for _ in range(3):
                loss = sharded.train(*part(comm, x, y, sizes))
            return sharded.parameters_sha256(), loss


@cache
def serial(case: str) -> tuple[str, float]:
    return trained(case, "ddp", None)


#: The strategy and memory of each case under MPI: every pair occurs, each in a job of its own size.
PLACES = [(strategy, memory) for strategy in STRATEGIES for memory in MEMORIES]


@pytest.mark.mpi
def test_every_strategy_and_memory_has_the_bits_of_one_process(world: Any) -> None:
    """With AdamW, clipping and LAMB in turn."""
    for number, (strategy, memory) in enumerate(layouts(world.size)):
        case = ("adamw", "clip", "lamb")[(number + world.size) % 3]
        assert trained(case, strategy, world, **memory) == known(world, serial, case), (case, strategy, memory)


@pytest.mark.mpi
def test_every_optimizer_and_option_has_the_bits_of_one_process(world: Any) -> None:
    first, every = (world.size % 2, 2) if world.size <= 3 else (world.size // 4, 3)
    for number, case in list(enumerate(CASES))[first::every]:
        strategy, memory = PLACES[(5 * number + 3 * world.size) % len(PLACES)]
        assert trained(case, strategy, world, **memory) == known(world, serial, case), (case, strategy, memory)


@pytest.mark.mpi
def test_batches_of_any_sizes_have_the_bits_of_one_batch(world: Any) -> None:
    sizes = [0] * world.size
    for sample in range(11):  # most of them on the last rank, none on rank 1 where there is one
        sizes[-1 if sample % 3 else 0] += 1
    for strategy in STRATEGIES[world.size % 5 % 2 :: 2]:
        assert trained("adamw", strategy, world, sizes) == known(world, serial, "adamw"), strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_of_5_3_0_and_7_have_the_bits_of_one_batch_of_15(strategy: str) -> None:
    x, y = tokens(15)

    def run(comm: Any) -> str:
        with mz.ShardingConfig(comm=comm, micro_batch=2) as config:
            model = mz.distribute(gpt(), mz.AdamW(lr=1e-2), strategy=strategy, config=config)
            with model:
                for _ in range(3):
                    model.train(*part(comm, x, y, [5, 3, 0, 7]))
                return model.parameters_sha256()

    assert set(run_in_threads(4, run)) == {run(None)}


@pytest.mark.parametrize(("ranks", "memory"), [(2, MEMORIES[0]), (3, MEMORIES[1]), (4, MEMORIES[2]), (8, MEMORIES[1])])
def test_threads_have_the_bits_of_one_process(ranks: int, memory: dict[str, Any]) -> None:
    for strategy in STRATEGIES if ranks < 8 else ("ddp", "zero3"):
        assert set(run_in_threads(ranks, lambda comm, s=strategy: trained("clip", s, comm, **memory))) == {
            serial("clip")
        }


@pytest.mark.mpi
def test_a_black_box_with_frozen_empty_and_prime_sized_tensors_has_the_bits_of_one_process(
    world: Any, place: Callable[..., Any]
) -> None:
    x, y = vectors(9)
    hashes = []
    for comm, (strategy, memory) in ((None, ("ddp", {})), *((world, layout) for layout in layouts(world.size))):
        model, _ = place(hard_function(), mz.AdamW(lr=0.05), strategy, comm, micro_batch=2, **memory)
        before = model.named_parameters()["scale"]
        for _ in range(3):
            model.train(*part(comm, x, y))
        np.testing.assert_array_equal(model.named_parameters()["scale"], before)
        hashes.append(model.parameters_sha256())
    assert len(set(hashes)) == 1


@pytest.mark.mpi
def test_batches_that_shrink_and_grow_have_the_bits_of_one_process(world: Any, place: Callable[..., Any]) -> None:
    """A smaller batch has fewer rows of gradients in the same window."""

    def shrunk_and_grown(comm: Any, strategy: str, **memory: Any) -> str:
        model, _ = place(gpt(layers=1), mz.AdamW(lr=1e-2), strategy, comm, micro_batch=1, **memory)
        for samples in (16, 3, 2, 11):
            model.train(*part(comm, *tokens(samples, samples)))
        return str(model.parameters_sha256())

    expected = of_first(world, lambda: shrunk_and_grown(None, "ddp"))
    for strategy, memory in (("ddp", {}), ("zero1", {"ranks_per_node": 2}), ("zero2", {})):
        assert shrunk_and_grown(world, strategy, **memory) == expected, (strategy, memory)


@pytest.mark.mpi
def test_more_ranks_than_elements_train(world: Any, place: Callable[..., Any]) -> None:
    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = batch
        error = x * p["w"] - y
        return float((error**2).sum() / 2), {"w": (error * x).sum(0)}, float(len(x))

    x = np.arange(1.0, 7.0).reshape(6, 1)
    results = []
    for comm, strategy in ((None, "ddp"), *((world, strategy) for strategy in STRATEGIES)):
        model, _ = place(mz.FunctionModel({"w": np.ones(1)}, loss_and_grad), mz.SGD(lr=0.01), strategy, comm)
        for _ in range(3):
            model.train(*part(comm, x, 3 * x))
        results.append(model.get_parameters())
        np.testing.assert_array_equal(results[0], results[-1], strategy)


def test_against_an_independent_oracle(place: Callable[..., Any]) -> None:
    """AdamW on a linear model against the textbook formulas, written out here."""
    x, y = vectors(6)

    def loss_and_grad(p: Any, batch: Any) -> Any:
        error = batch[0] @ p["w"] - batch[1]
        return float((error**2).sum() / 2), {"w": batch[0].T @ error}, float(len(batch[0]))

    w = np.zeros((7, 11))
    model, _ = place(mz.FunctionModel({"w": w}, loss_and_grad), mz.AdamW(lr=0.1, weight_decay=0.1), "zero2")
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step in range(1, 6):
        model.train(x, y)
        g = x.T @ (x @ w - y) / 6
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 0.1 * (m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8) + 0.1 * w)
    np.testing.assert_allclose(model.named_parameters()["w"], w, rtol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clip", [None, 1e9])
def test_a_step_with_tied_parameters_and_dropout_follows_the_gradient_of_the_whole_model(
    strategy: str, clip: float | None
) -> None:
    """The gradient of all samples in one pass, with the model's seed; clipping, which changes nothing, sums first."""
    model, (x, y) = gpt(dtype="float64", seed=5), tokens(7)

    def step(comm: Any) -> tuple[dict[str, Any], float, dict[str, Any]]:
        with (
            mz.ShardingConfig(
                comm=comm, micro_batch=2, clip=clip, minimum_parameter_group_size=1, **MEMORIES[1]
            ) as config,
            mz.distribute(model, mz.SGD(lr=0.5), strategy=strategy, config=config) as sharded,
        ):
            before = sharded.named_parameters()
            return before, sharded.train(*part(comm, x, y)), sharded.named_parameters()

    before, loss, after = run_in_threads(3, step)[0]
    run = Run(True, model.seed, 0, 0, count=len(x))
    total, weight, gradients = mz.nn.loss_and_gradients(model, before, (x, y), run)
    assert loss == pytest.approx(total / weight, rel=1e-13)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(after[name], before[name] - 0.5 * gradient / weight, rtol=1e-12, atol=1e-14)
