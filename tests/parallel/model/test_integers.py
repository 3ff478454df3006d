"""Integer arrays: layers change them, grains agree on them, every rank learns them, checkpoints keep them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.checkpoint.convert import export
from mpizero.errors import CheckpointError, ConfigError, LayoutError
from mpizero.nn import Checkpointed, Frozen
from mpizero.testing import check_model, run_in_threads
from mpizero.types import IntegerSpec
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, part, sharded
from tests.parallel.normalized import RATE, BatchNorm, CountingNorm, network, samples
from tests.parallel.parallel_layouts import Case, Way, alone, known, pipelines, placed, steps, trained, trained_alone

CASE = Case(
    lambda: network(norm=CountingNorm), lambda: mz.AdamW(lr=1e-2), samples(3, 23),
    config={"micro_batch": 3, "accumulate": 2},
)  # fmt: skip
#: With two grains, which do not suffice for three ranks.
FEW = replace(CASE, batches=samples(3, 10))
EXPECTED = {
    f"norm{i}.{name}": value
    for i in range(2)
    for name, value in (("steps", 3), ("flags", [False, True, True]), ("unused", [7, 7]))
}


@cache
def alone_of(few: bool) -> Any:
    return trained_alone(FEW if few else CASE)


def integers(model: Any) -> dict[str, Any]:
    return {name: a.tolist() for name, a in model.named_parameters().items() if a.dtype.kind in "iub"}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_layout_has_them_and_their_hash(ranks: int) -> None:
    def go(comm: Any, way: Way, memory: dict[str, Any], few: bool) -> Any:
        model, _ = placed(FEW if few else CASE, comm, way, **memory)
        with model:
            return steps(model, FEW if few else CASE), integers(model)

    ways = [Way(zero=zero) for zero in range(4)] + [w for w in pipelines(ranks, 7) if w.pipeline == 2]
    for number, way in enumerate(ways):
        few, memory = bool(number % 2), MEMORIES[number % (2 + (ranks == 4))]
        found = run_in_threads(ranks, lambda comm, w=way, m=memory, f=few: go(comm, w, m, f))
        assert found == [(alone_of(few), EXPECTED)] * ranks, (way, memory, few)


@pytest.mark.mpi
def test_ranks_of_a_real_job_have_the_bits_of_one_process(world: Any) -> None:
    for way in [Way(zero=world.size % 4), *pipelines(world.size, 7)[:1]]:
        assert trained(FEW, world, way, **MEMORIES[world.size % 2]) == known(world, alone_of, True), way


def test_a_skipped_step_leaves_them_and_evaluation_does_too() -> None:
    model, _ = sharded("zero1", None, network(norm=CountingNorm), micro_batch=5, bad_steps=mz.BadSteps(warn=False))
    with model:
        x, y = samples(1, 11)[0]
        model.train(np.full_like(x, np.nan), y)
        assert model.last_step.skipped
        model.evaluate(x, y)
        model.compute_gradients(x, y)
        assert integers(model)["norm0.steps"] == 0
        model.optimizer.step()
        assert integers(model)["norm0.steps"] == 1


def test_checkpoints_hold_them_on_any_layout(tmp_path: Any) -> None:
    model, _ = alone(CASE)
    with model:
        steps(model, CASE)
        model.save_model(tmp_path / "saved")
        sha, copy = model.parameters_sha256(), model.deep_copy()
        with copy:
            assert integers(copy) == EXPECTED
    with checkpoint.open_checkpoint(tmp_path / "saved") as reader:
        assert reader.arrays["parameters/norm0.steps"] == ((), np.dtype("int64"))
        export(reader, tmp_path / "saved.npz", "npz")
    assert np.load(tmp_path / "saved.npz")["norm1.unused"].tolist() == [7, 7]

    def load(comm: Any) -> Any:
        model, _ = placed(CASE, comm, Way(2, zero=3), **PRIVATE)
        with model:
            model.load_model(tmp_path / "saved")
            model.save_model(tmp_path / "again")
            return model.parameters_sha256(), integers(model)

    assert run_in_threads(2, load) == [(sha, EXPECTED)] * 2
    other, _ = sharded("ddp", None, network())
    with other, pytest.raises(CheckpointError, match=r"unknown norm0\.flags"):
        other.load_model(tmp_path / "again")
    fresh, _ = sharded("ddp", None, network(norm=CountingNorm))
    with fresh:
        fresh.load_named(np.load(tmp_path / "saved.npz"))
        assert integers(fresh) == EXPECTED
        with pytest.raises(LayoutError, match=r"'norm0\.steps' is int64 of shape .*given int64 of shape \(2,\)"):
            fresh.load_named({**fresh.named_parameters(), "norm0.steps": np.zeros(2, np.int64)})


def test_local_steps_keep_them() -> None:
    def go(comm: Any) -> Any:
        model, optimizer = sharded("ddp", comm, network(norm=CountingNorm), mz.SGD(lr=RATE), micro_batch=5)
        with model:
            model.train(*part(comm, *CASE.batches[0]))
            local = mz.LocalSGDOptimizer(mz.SGD(lr=RATE), every=2)
            local.set_model(model)
            for x, y in CASE.batches[:2]:
                model.train(*part(comm, x, y))
            return model.named_parameters()["norm0.steps"].tolist()

    assert run_in_threads(2, go) == [3, 3]


def test_frozen_and_checkpointed_layers() -> None:
    def chain() -> Any:
        blocks = network(norm=CountingNorm).blocks
        return replace(
            network(), blocks={**blocks, "norm0": Frozen(CountingNorm(11)), "norm1": Checkpointed(blocks["norm1"])}
        )  # noqa: E501

    model, _ = sharded("ddp", None, chain(), mz.SGD(lr=RATE), micro_batch=5)
    with model:
        model.train(*CASE.batches[0])
        found = integers(model)
        assert (found["norm0.steps"], found["norm1.steps"]) == (0, 1)
    assert "layers: they overwrite" in str(check_model(chain(), *samples(1, 6)[0]))


# ---------------------------------------------------------------------- functions


def counting(*, in_place: bool, poison: Callable[[Any, Any], Any] = lambda n, x: n) -> mz.FunctionModel:
    def answer(p: Any, batch: Any) -> Any:
        x, _ = batch
        return float((x @ p["w"]).sum()), {"w": x.sum(0), "n": poison(p["n"] + 2, x)}, float(len(x))

    def written(p: Any, batch: Any, gradients: Any) -> Any:
        loss, found, weight = answer(p, batch)
        for name, value in found.items():
            gradients[name][...] = value
        return loss, weight

    function = written if in_place else answer
    return mz.FunctionModel({"w": np.ones(6)}, function, integers={"n": np.array(3, np.int32)}, in_place=in_place)


def test_functions_are_given_them_and_return_new_ones() -> None:
    def go(comm: Any, strategy: str, in_place: bool) -> Any:
        model, _ = sharded(strategy, comm, counting(in_place=in_place), mz.SGD(lr=0.1), micro_batch=5)
        with model:
            for x, y in CASE.batches:
                model.train(*part(comm, x, y))
            model.evaluate(*part(comm, x, y))
            assert model.named_parameters()["n"].dtype == np.int32
            return model.parameters_sha256(), int(model.named_parameters()["n"])

    expected = go(None, "ddp", False)
    assert expected[1] == 9
    for number, strategy in enumerate(STRATEGIES):
        assert run_in_threads(3, lambda comm, s=strategy, i=bool(number % 2): go(comm, s, i)) == [expected] * 3
    for in_place in (True, False):
        assert "agree" in str(check_model(counting(in_place=in_place), *samples(1, 6)[0]))


def test_copies_with_other_parameters_and_the_best_parameters_have_theirs() -> None:
    def go(comm: Any, strategy: str) -> Any:
        model, optimizer = sharded(strategy, comm, counting(in_place=False), mz.SGD(lr=0.1), micro_batch=5)
        x = np.where(np.arange(20) < 15, 1.0, -1.0)[:, None] * np.ones(6)  # the last ones get worse by every step
        source = mz.data.ArraySource(x, np.zeros(20))
        source.in_order = True
        options = mz.OptimizationOptions(epochs=3, batch_size=5, validation=0.25)
        with model, model.with_parameters(model.get_parameters()) as before:
            result = optimizer.optimize(source, options)
            with model.with_parameters(model.get_parameters()) as after:
                counts = [int(one.named_parameters()["n"]) for one in (before, model, after)]
                return result.best_epoch, counts, after.parameters_sha256() == model.parameters_sha256()

    for strategy in ("ddp", "zero3"):
        assert run_in_threads(2, lambda comm, s=strategy: go(comm, s)) == [(0, [3, 9, 9], True)] * 2


# ---------------------------------------------------------------------- mistakes


@dataclass(frozen=True)
class Unlike(BatchNorm):
    """Counts samples, of which grains have different numbers."""

    def own_integers(self) -> Any:
        return (IntegerSpec("seen"),)

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        super().backward_weights(params, cache, pending, grads)
        grads["seen"][...] = params["seen"] + len(cache[0])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_grains_that_do_not_agree_are_named_on_every_rank(ranks: int) -> None:
    def go(comm: Any) -> str:
        stages = 2 if ranks == 2 else 1
        model, _ = placed(
            replace(CASE, model=lambda: network(norm=Unlike), config={"micro_batch": 9}), comm, Way(stages)
        )
        with model:
            before = model.parameters_sha256()
            try:
                model.train(*part(model.batch_group, *CASE.batches[0]))
            except mz.errors.MpizeroError as error:
                assert model.parameters_sha256() == before
                return str(error)
            return ""

    for told in run_in_threads(ranks, go):
        assert "the new value of integer array 'norm" in told
        assert "9 after samples 0 to 8" in told
        assert "5 after samples 18 to 22" in told


def test_what_cannot_be_is_said() -> None:
    wrong = mz.FunctionModel({"w": np.ones(6)}, lambda p, b: (0.0, {"w": p["w"]}, 1.0), integers={"n": np.zeros(1)})
    with pytest.raises(ConfigError, match="integer array 'n' has dtype float64: use int64, int32"):
        sharded("ddp", None, wrong)
    both = mz.FunctionModel({"w": np.ones(6)}, lambda p, b: (0.0, {}, 1.0), integers={"w": np.zeros(1, int)})
    with pytest.raises(ConfigError, match="'w' is a parameter and an integer array"):
        sharded("ddp", None, both)
    model, _ = sharded("ddp", None, counting(in_place=False, poison=lambda n, x: n + 0.5))
    with (
        model,
        pytest.raises(LayoutError, match=r"answer at .* as the new value of integer array 'n' by samples 0 to 1"),
    ):
        model.train(*CASE.batches[0])
