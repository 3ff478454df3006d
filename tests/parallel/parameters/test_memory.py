"""What the library's own allocator hands out is what the formulas say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm.reduce import EXCHANGE_ELEMENTS
from mpizero.sharding.params import PAGE, Memory
from mpizero.testing import run_in_threads
from tests.parallel.models import PRIVATE, STRATEGIES, hard_function, mlp, part, sharded, vectors
from tests.traced import traced_peak


def wide(**changes: Any) -> mz.nn.MLP:
    """Eight equal units of 65 * 64 parameters."""
    return mlp(features=64, hidden=(64,) * 7, outputs=64, task="regression", **changes)


PARAMETERS = 8 * 65 * 64
UNIT = 65 * 64


def measured(comm: Any, strategy: str, **settings: Any) -> tuple[dict[str, int], int, int]:
    """One step with one grain a rank; bytes by kind, peak, and bytes of the exchange's own buffers."""
    size = 1 if comm is None else comm.size
    model, _ = sharded(strategy, comm, wide(), micro_batch=1, **settings)
    with model:
        x = np.ones((size, 64), np.float32)
        model.train(*part(comm, x, x))
        memory = model.engine.memory
        told = model.metadata()
        assert told.bytes_on_rank == memory.kinds()
        assert told.peak_bytes == memory.peak_bytes >= memory.rank_bytes
        return memory.kinds(), memory.peak_bytes, memory.kinds().get("exchange buffers", 0)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_private_memory_follows_the_papers_formulas(strategy: str, ranks: int) -> None:
    # One unit of gradients is in flight; with ZeRO-3 also one of parameters in use, and the next one coming.
    n, units = ranks, {"zero2": 1, "zero3": 3}.get(strategy, 0)
    parameters = 4 * PARAMETERS / (n if strategy == "zero3" else 1)
    gradients = 4 * PARAMETERS / (n if strategy in ("zero2", "zero3") else 1)
    state = 8 * PARAMETERS / (1 if strategy == "ddp" else n)
    for kinds, peak, exchange in run_in_threads(ranks, lambda comm: measured(comm, strategy, **PRIVATE)):
        slack = 8 * 8 * 4  # the shard rule's remainders: an element a unit and array
        assert kinds["parameters"] == pytest.approx(parameters, abs=slack)
        assert kinds["optimizer state"] == pytest.approx(state, abs=slack)
        ring = 4 * UNIT + PAGE if units else PAGE
        assert gradients - slack <= kinds["gradients"] <= gradients + slack + ring
        assert peak - exchange <= 1.02 * (parameters + gradients + state) + units * 4 * UNIT + PAGE
        assert 0 < exchange <= 2 * 4 * EXCHANGE_ELEMENTS
    if strategy == "ddp":
        assert parameters + gradients + state == 16 * PARAMETERS


def test_shared_memory_holds_one_copy_of_parameters_and_state_a_node() -> None:
    for strategy in STRATEGIES:
        for kinds, _, exchange in run_in_threads(4, lambda comm, s=strategy: measured(comm, s)):
            assert kinds["parameters"] <= 4 * PARAMETERS / 4 + PAGE
            assert kinds["optimizer state"] <= 8 * PARAMETERS / 4 + 256
            assert exchange == 0


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_no_rank_ever_holds_a_full_gradient(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    private = Memory.private

    def noted(self: Memory, kind: str, shape: Any, dtype: Any) -> Any:
        if kind == "gradients":
            asked.append(int(np.prod(shape)))
        return private(self, kind, shape, dtype)

    monkeypatch.setattr(Memory, "private", noted)
    run_in_threads(4, lambda comm: measured(comm, strategy, **PRIVATE))
    assert max(asked) == max(PARAMETERS // 4, -(-UNIT * 4 // PAGE) * PAGE // 4)
    assert max(asked) < PARAMETERS / 2


def test_evaluation_needs_no_gradient_memory() -> None:
    model, _ = sharded("zero2", None, wide(), accumulate=2)
    with model:
        before = model.engine.memory.private_bytes["gradients"]
        model.evaluate(np.ones((4, 64), np.float32), np.ones((4, 64), np.float32))
        assert model.engine.memory.private_bytes["gradients"] == before


def test_frozen_parameters_cost_no_gradient_and_no_state() -> None:
    sizes = {"w": 77, "nothing": 0, "b": 13, "one": 1}  # and 13 frozen ones
    for strategy in STRATEGIES:
        model, _ = sharded(strategy, None, hard_function(), mz.AdamW(lr=0.1))
        with model:
            model.train(*vectors(1))
            assert model.layout.gradient_size == sum(sizes.values())
            assert sum(a.size for a in model.engine.updater.state.values()) == 2 * sum(sizes.values())
            assert model.metadata().trainable_count == sum(sizes.values()) == model.parameter_count - 13
            assert set(model.engine.updater.state) == {"exp_avg", "exp_avg_sq"}


def test_a_new_model_holds_its_shard_and_no_more_than_a_unit_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"minimum_parameter_group_size": 1, **PRIVATE}
    models: list[Any] = []

    def make() -> None:
        models[:] = run_in_threads(2, lambda comm: mz.ZeRO3Model(wide(), mz.ShardingConfig(comm=comm, **settings)))

    most = traced_peak(make)
    shards = sum(model.engine.memory.rank_bytes for model in models)
    assert shards <= 4 * (2 * PARAMETERS + 2 * 3 * UNIT) + 4 * PAGE
    # Both ranks' Python objects are in the figure too: half a megabyte of layouts, plans and views.
    assert most <= shards + 2 * 4 * UNIT + (1 << 19)


def test_a_window_that_is_not_the_newest_can_be_freed() -> None:
    def allocate(comm: Any) -> None:
        memory = Memory(comm.split_node())
        (first,) = memory.shared("parameters", [(8,)], np.float64)
        (middle,) = memory.shared("gradients", [(8,)], np.float64)
        (last,) = memory.shared("buffers", [(8,)], np.float64)
        first[comm.rank], last[comm.rank] = 1, 2
        memory.barrier()
        memory.free_shared("gradients", (middle,))
        assert (first[:2].tolist(), last[:2].tolist()) == ([1, 1], [2, 2])
        assert memory.kinds()["gradients"] == 0
        assert memory.kinds()["parameters"] == PAGE // 2
        memory.close()

    run_in_threads(2, allocate)


def test_setting_the_parameters_of_a_split_model_takes_no_copy_of_its_shard() -> None:
    """What could fail on one rank alone would leave the other ranks' parameters set."""

    def run(comm: Any) -> None:
        with mz.ShardingConfig(comm=comm) as config, mz.TensorParallelModel(wide(), config) as model:
            values = model.get_parameters()
            comm.barrier()
            if comm.rank:
                for _ in range(2):
                    model.engine.whole.fill(values)
            else:
                assert (
                    traced_peak(lambda: model.engine.whole.fill(values), tries=2) < model.local_parameter_shard.nbytes
                )

    run_in_threads(2, run)
