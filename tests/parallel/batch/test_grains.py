"""Who computes which grains: sizes that pay, ranks that claim them while they compute, samples that are given twice."""

from __future__ import annotations

import functools
import itertools
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.adapters import user_code
from mpizero.adapters.user_code import EfficientSamples, PassTimes, PassWork
from mpizero.layout.batch import GrainRule
from mpizero.sharding.step_report import described_grains, faster_grain, larger_grains
from mpizero.testing import run_in_threads
from tests.parallel.covering import covering
from tests.parallel.models import (
    MEMORIES,
    PRIVATE,
    gpt,
    hard_function,
    mlp,
    part,
    points,
    sharded,
    ten,
    tokens,
    vectors,
)
from tests.parallel.parallel_layouts import Case, Way, known, placed


def test_a_coarse_rule_makes_at_least_four_grains_of_a_batch_that_has_so_many_samples() -> None:
    for batch, accumulate, efficient in itertools.product((*range(1, 40), 128, 1000), (1, 3), (None, 1, 5, 10**9)):
        rule = GrainRule(None, accumulate, efficient, coarse=True)
        assert rule.grains(batch).count >= min(4, -(-batch // accumulate))
        assert 1 <= rule.micro_size(batch) <= max(1, batch // (4 * accumulate))
        assert efficient != 1 or rule.micro_size(batch) == 1


def test_a_default_grain_has_the_samples_that_make_calls_worthwhile_or_a_quarter_of_the_batch() -> None:
    rule = GrainRule(None, 1, 400, least=50)
    assert [rule.grain_size(batch) for batch in (3, 16, 100, 200, 800, 1600, 10000)] == [1, 4, 25, 50, 50, 100, 400]
    assert replace(rule, accumulate=3).grain_size(2400) == 150
    for batch, accumulate, least in itertools.product((*range(1, 40), 128, 1000), (1, 3), (2, 5, 100)):
        rule = GrainRule(None, accumulate, 1000, least=least)
        size, before = rule.micro_size(batch), replace(rule, least=1).micro_size(batch)
        assert before <= size <= max(before, batch // (4 * accumulate))
        assert size >= min(least, batch // (4 * accumulate))


def test_where_ranks_have_no_grain_the_first_step_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    def on(comm: Any, **settings: Any) -> None:
        with sharded("zero2", comm, mlp(), **settings) as model:
            model.train(*part(comm, *points(16)))

    for ranks, settings, lines in ((4, {}, 0), (5, {}, 1), (5, {"micro_batch": 4}, 0)):
        run_in_threads(ranks, functools.partial(on, **settings))
        found = capfd.readouterr().err
        assert found.count("16 samples a step in 4 grains of 4 (by default") == found.count("at most 4 ranks") == lines


def test_a_grain_has_more_samples_where_its_fixed_cost_is_more_of_its_work() -> None:
    def enough(each: int, parameters: int = 1000, least: int = 1) -> int | None:
        def work(x: np.ndarray, y: np.ndarray) -> PassWork:
            if len(x) < least:
                raise ValueError("batch norms need more samples")
            return PassWork(calls=100, operations=each * len(x))

        return EfficientSamples(work, parameters)(np.zeros((0, 3)), np.zeros(0))

    found = [enough(each) for each in (10**5, 10**7, 10**9)]
    assert found == [65536, 512, 4] == [enough(each, least=2) for each in (10**5, 10**7, 10**9)]
    assert enough(0) is None
    assert enough(1, least=4) is None
    assert (enough(10**7, 10**7) or 0) > 512


@pytest.mark.parametrize(
    ("ranks", "fixed", "best", "share"),
    [(1, 1.0, "micro_batch=32", "at most 1 rank "), (2, 1.0, "micro_batch=16", "at most 2 ranks"),
     (8, 0.1, "micro_batch=4", "at most 8 ranks"), (1, 0.01, None, ""), (4, 1.0, None, "")],
)  # fmt: skip
def test_another_grain_is_named_where_it_would_save_more_than_a_tenth(
    ranks: int, fixed: float, best: str | None, share: str
) -> None:
    """Passes take ``fixed`` + samples / 10 seconds; the grains are 4 of 8 samples."""
    line = faster_grain(GrainRule(None, 1, 8, coarse=True), 32, ranks, 8, fixed + 0.8, fixed + 0.1)
    assert (line is None) == (best is None)
    assert line is None or (f"{best} in place of 8" in line and share in line)


def test_a_start_names_its_grains_and_a_clock_that_makes_no_sense_says_nothing() -> None:
    line = described_grains(GrainRule(None, 1, 64, coarse=True), 32)
    assert "32 samples a step in 4 grains of 8" in line
    assert line.endswith("work for at most 4 ranks")
    for times in ((1.0, 1.1), (8.0, 0.5)):
        assert faster_grain(GrainRule(None, 1, 8, coarse=True), 32, 1, 8, *times) is None


@pytest.mark.parametrize(
    ("rule", "ranks", "expected"),
    [
        (
            GrainRule(None, 1, 1237),
            1,
            "256 samples a step in 16 grains of 16 (by default).*micro_batch=256 .* at most 1 rank ",
        ),
        (GrainRule(None, 2, 1237), 4, "16 grains of 16, each of 2 micro-batches .*micro_batch=32 .* at most 4 ranks "),
        (GrainRule(None, 1, 1237, least=154), 1, "256 samples a step in 4 grains of 64 (by default).*micro_batch=256"),
        (GrainRule(None, 1, 200), 1, "micro_batch=200 .* at most 2 ranks "),
        (GrainRule(None, 1, 1237), 9, None),  # a rank has two grains at most
        (GrainRule(None, 1, 128), 1, None),
        (GrainRule(16, 1, 1237), 1, None),
        (GrainRule(None, 1, None), 1, None),
        (GrainRule(None, 1, 1237, coarse=True), 1, None),
    ],
)
def test_larger_grains_are_advised_where_a_model_is_small(rule: GrainRule, ranks: int, expected: str | None) -> None:
    line = larger_grains(rule, 256, ranks)
    assert (line is None) == (expected is None)
    assert line is None or re.search(expected.replace("(", r"\(").replace(")", r"\)"), line)


def test_it_is_advised_once_in_a_training_that_begins(tmp_path: Path, capfd: Any) -> None:
    def advised(comm: Any = None, steps: int = 25, folder: Path | None = None, **settings: Any) -> int:
        net, x = mz.nn.MLP(3, [16], 1, task="regression"), np.ones((64, 3), "f4")
        with (
            mz.Mesh("self" if comm is None else comm, **settings) as mesh,
            mz.distribute(net, mz.SGD(lr=0.1), mesh=mesh) as model,
        ):
            if folder is not None and folder.exists():
                model.load_model(folder)
            for _ in range(steps):
                model.train(*part(model.batch_group, x, x[:, :1]))
            if folder is not None and not folder.exists():
                model.save_model(folder)
        return capfd.readouterr().err.count("samples a step in 4 grains of 16 (by default): this model")

    assert advised() == 1
    assert advised(steps=19, folder=tmp_path / "begun") == 0
    assert advised(folder=tmp_path / "begun") == 0
    run_in_threads(2, lambda comm: advised(comm, pipeline=2))
    assert "grains of" not in capfd.readouterr().err


def test_times_are_known_when_every_block_was_timed_with_and_without_the_other_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_code, "perf_counter", itertools.count(step=0.25).__next__)
    times, refusing = PassTimes(), PassTimes()
    for number in range(5):
        assert times.seconds is None
        for block in (0, 1):
            times.add(block, 8, 1.0 + number, lambda: None)
        refusing.add(0, 8, 1.0, lambda: [].pop())
    for samples in (8, 1):
        times.add(0, samples, 0.1, lambda: pytest.fail("timed once more"))
    assert times.seconds == (8, 6.0, 0.5)  # the first two passes are left out
    assert refusing.seconds is None


SAMPLES = 21
#: Model, samples, and settings: a black box, blocks, and blocks of which two micro-batches make a grain.
TRAININGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "function": (hard_function, vectors(SAMPLES), {"micro_batch": 1}),
    "blocks": (mlp, points(SAMPLES), {"micro_batch": 2, "clip": 0.5}),
    "micro-batches": (gpt, tokens(SAMPLES), {"micro_batch": 1, "accumulate": 2}),
}
OPTIMIZERS = {"AdamW": mz.AdamW(lr=1e-2), "LAMB": mz.LAMB(lr=1e-2)}
DYNAMIC = {"grain_assignment": "dynamic"}


def trained(comm: Any, name: str, strategy: str, optimizer: str = "AdamW", **settings: Any) -> tuple[str, float]:
    make, (x, y), own = TRAININGS[name]
    with sharded(strategy, comm, make(), OPTIMIZERS[optimizer], **own, **settings) as model:
        losses = [model.train(*part(comm, x, y)) for _ in range(3)]
        return model.parameters_sha256(), losses[-1]


@functools.cache
def alone(name: str, optimizer: str = "AdamW") -> tuple[str, float]:
    return trained(None, name, "ddp", optimizer)


@pytest.mark.parametrize(
    ("name", "ranks", "strategy", "memory", "optimizer"),
    covering(list(TRAININGS), (1, 2, 3, 4, 8), ("ddp", "zero1"), MEMORIES, list(OPTIMIZERS)),
)
def test_claimed_grains_have_the_bits_of_one_process(
    name: str, ranks: int, strategy: str, memory: dict[str, Any], optimizer: str
) -> None:
    found = run_in_threads(ranks, lambda comm: trained(comm, name, strategy, optimizer, **DYNAMIC, **memory))
    assert set(found) == {alone(name, optimizer)}


@pytest.mark.slow
@pytest.mark.mpi
def test_the_processes_of_a_node_claim_grains_and_have_the_bits_of_one(world: Any) -> None:
    """The table of claims is in memory that processes share, under a lock of the system."""
    for number, (name, memory) in enumerate(zip(TRAININGS, ({}, {"ranks_per_node": 2}, {}), strict=True)):
        found = trained(world, name, ("ddp", "zero1")[(number + world.size) % 2], **DYNAMIC, **memory)
        assert found == known(world, alone, name), (name, memory)


def computed(ranks: int, count: int, slow: int | None = None, **settings: Any) -> list[list[int]]:
    """Train one step and return which samples each rank computes; a slow one begins when the others have 25."""
    seen: list[list[int]] = [[] for _ in range(ranks)]
    others = threading.Semaphore(0)

    def run(comm: Any) -> None:
        def loss_and_grad(parameters: Any, batch: Any) -> tuple[float, Any, float]:
            if comm.rank != slow:
                others.release()
            elif not seen[slow]:
                assert all(others.acquire(timeout=60) for _ in range(25))
            seen[comm.rank] += batch[1].tolist()
            return float((batch[0] @ parameters["w"]).sum()), {"w": batch[0].sum(axis=0)}, float(len(batch[0]))

        x, y = np.random.default_rng(0).normal(size=(count, 3)), np.arange(count)
        function = mz.FunctionModel({"w": np.ones(3)}, loss_and_grad)
        with sharded("zero1", comm, function, micro_batch=1, **DYNAMIC, **settings) as model:
            model.train(*part(comm, x, y))

    run_in_threads(ranks, run)
    return seen


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_rank_computes_fewer_grains_and_each_is_computed_once(slow: int) -> None:
    found = computed(4, 32, slow)
    assert sorted(itertools.chain(*found)) == list(range(32))
    assert len(found[slow]) < 8  # which it would be assigned in advance


def test_ranks_claim_grains_of_their_node_only_and_of_few_grains_some_get_none() -> None:
    found = computed(4, 32, ranks_per_node=2)
    for node in (0, 1):
        assert sorted(found[2 * node] + found[2 * node + 1]) == list(range(16 * node, 16 * node + 16))
    for count in (1, 2, 3):
        assert sorted(itertools.chain(*computed(4, count))) == list(range(count))


def same_when_claimed(run: Any) -> None:
    """Three ranks that claim grains give what one process gives; ``run`` takes a communicator and settings."""
    (expected,) = run_in_threads(1, run)
    assert set(run_in_threads(3, lambda comm: run(comm, **DYNAMIC))) == {expected}


def test_batches_of_other_sizes_and_types_follow_one_another() -> None:
    def run(comm: Any, **settings: Any) -> str:
        with sharded("ddp", comm, hard_function(), micro_batch=2, **settings) as model:
            for count in (7, 24, 3, 24):
                x, y = vectors(count)
                model.train(*part(comm, x.astype("f4") if count == 3 else x, y))
                model.evaluate(*part(comm, x, y))
                model.compute_gradients(*part(comm, x, y))
            return model.parameters_sha256()

    same_when_claimed(run)


def test_an_error_in_one_grain_is_raised_on_all_ranks_and_the_next_step_is_right() -> None:
    def run(comm: Any, **settings: Any) -> str:
        broken = [bool(settings)]

        def poisoned(x: Any, gradient: Any) -> Any:
            if broken[0] and (x == 5.0).all():
                raise ValueError("sample five")
            return gradient

        x = np.repeat(np.arange(12.0)[:, None], 10, axis=1)
        with sharded("zero1", comm, ten(poisoned), micro_batch=1, **settings) as model:
            if broken[0]:
                with pytest.raises(Exception, match="sample five"):
                    model.train(*part(comm, x, x[:, :1]))
                broken[0] = False
            model.train(*part(comm, x, x[:, :1]))
            return model.parameters_sha256()

    same_when_claimed(run)


def test_a_gradient_that_is_not_finite_skips_the_step_and_names_the_sample() -> None:
    def run(comm: Any) -> Any:
        x = np.ones((12, 10))
        x[7] = np.nan
        with sharded("zero1", comm, ten(), micro_batch=1, **DYNAMIC) as model:
            before = model.parameters_sha256()
            model.train(*part(comm, x, x[:, :1]))
            assert model.parameters_sha256() == before
            return [(found.start, found.stop) for found in model.last_step.non_finite]

    assert run_in_threads(4, run) == [[(7, 8)]] * 4


@pytest.mark.slow
def test_minimizers_claim_terms_with_the_bits_of_one_process() -> None:
    def run(comm: Any, **settings: Any) -> tuple[float, str]:
        with sharded("zero1", comm, hard_function(), micro_batch=1, **settings) as model:
            return mz.minimize(model, vectors(16), options={"maxiter": 12}).fun, model.parameters_sha256()

    same_when_claimed(run)


@pytest.mark.parametrize(
    ("strategy", "memory", "reason"),
    [("zero2", {}, "only DDP and ZeRO-1"), ("zero1", PRIVATE, "no two ranks share memory")],
)
def test_where_grains_cannot_be_claimed_rank_0_says_so(strategy: str, memory: Any, reason: str, capfd: Any) -> None:
    found = run_in_threads(2, lambda comm: trained(comm, "blocks", strategy, **DYNAMIC, **memory))
    told = capfd.readouterr().err
    assert told.count("grain_assignment='dynamic' has no effect here") == 1
    assert reason in told
    assert set(found) == {alone("blocks")}


def equal_parts(comm: Any) -> slice:
    return slice(8 * comm.rank // comm.size, 8 * (comm.rank + 1) // comm.size)


COPIES = {
    "the whole batch": (3, 1, lambda comm: slice(None), "ranks 0 and 1 give the same 8 samples"),
    "the same part": (
        4, 1, lambda comm: slice(6, 8) if comm.rank % 2 else equal_parts(comm), "ranks 1 and 3 give the same 2",
    ),
    "of replicas": (4, 2, lambda comm: slice(None), "ranks 0 and 1 give the same 8"),
    "own parts": (4, 1, equal_parts, ""),
    "of one replica": (2, 2, lambda comm: slice(None), ""),
    "none on some": (3, 1, lambda comm: slice(0, 8 if comm.rank == 0 else 0), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", COPIES)
def test_equal_samples_of_two_replicas_are_told_in_the_first_step(case: str, capfd: Any) -> None:
    ranks, stages, cut, told = COPIES[case]
    x, y = points(8)

    def steps(comm: Any) -> None:
        with placed(Case(mlp), comm, Way(stages)) as model:
            for _ in range(2):
                model.train(x[cut(comm)], y[cut(comm)])

    run_in_threads(ranks, steps)
    lines = [line for line in capfd.readouterr().err.splitlines() if "give the same" in line]
    assert len(lines) == bool(told)
    assert not told or told in lines[0]
