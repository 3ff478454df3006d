"""Gradients rounded to bfloat16: half the bytes, the same bits on all layouts, and those of an oracle in NumPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm.reduce import narrow_to, widen_in_place
from mpizero.errors import ConfigError
from mpizero.testing import run_in_threads
from tests.parallel.covering import on_layouts
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, echo, echoed, mlp, part, points, sharded
from tests.parallel.normalized import network, samples
from tests.parallel.parallel_layouts import Case, Way, gpt, texts, trained, trained_in_tiles
from tests.support.reference.update import round_bfloat16

WIRE = {"wire": "bfloat16"}
#: Layouts in which every strategy occurs with shared and with private memory.
FEW = [(1, "zero1", {}), *((3, *each) for each in product(STRATEGIES, MEMORIES[:2]))]


def rounded(values: Any) -> Any:
    values = values.copy()
    round_bfloat16(values)
    return values


def rounded_sum(grains: Sequence[Any]) -> Any:
    """Add neighbours, and then neighbours among these sums, until one is left; round the grains and each sum."""
    level = [rounded(grain) for grain in grains]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [rounded(pair[0] + pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


@pytest.mark.parametrize("count", [1, 11])
def test_the_sum_is_that_of_an_oracle_on_every_layout(count: int) -> None:
    def run(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
        with sharded(strategy, comm, echo(), mz.SGD(lr=1.0), micro_batch=1, **WIRE, **memory) as model:
            model.train(*part(comm, *batch))
            assert model.get_parameters().tobytes() == expected.tobytes(), (strategy, memory)

    batch = echoed(count, count)
    expected = -(rounded_sum(batch[0]) / np.float32(count))
    on_layouts(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        Way(2, 1, zero=0),
        Way(2, 1, zero=1),
        Way(2, 1, zero=2),
        Way(1, 2, zero=0),
        Way(1, 2, zero=3),
        Way(2, 2, zero=1, schedule="zero_bubble"),
    ],
)
def test_pipelines_and_tensor_groups_have_the_bits_of_one_process(way: Way) -> None:
    """The model's table is tied: with a pipeline two stages add its gradients."""
    case = Case(lambda: gpt(layers=2), batches=texts(2, 8), config={"micro_batch": 1, "clip": 0.1, **WIRE})
    expected = trained_in_tiles(case, tensor=way.tensor)
    for memory in ({}, PRIVATE):
        found = run_in_threads(2 * way.pipeline * way.tensor, lambda c, m=memory: trained(case, c, way, **m))
        assert {each.sha256 for each in found} == {expected.sha256}, memory


def test_statistics_of_samples_are_not_rounded() -> None:
    """Of a step without a change of the weights; on each layout they are those of a training in float32."""

    def run(comm: Any, strategy: str, memory: dict[str, Any], **settings: Any) -> dict[str, bytes]:
        batch = part(comm, *samples(1, 23, "float32")[0])
        optimizer = mz.SGD(lr=1e-30)
        with sharded(strategy, comm, network("float32"), optimizer, micro_batch=5, **settings, **memory) as model:
            model.train(*batch)
            named = model.named_parameters()
            return {name: named[name].tobytes() for name in named if name.endswith(("mean", "variance"))}

    def check(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
        assert run(comm, strategy, memory, **WIRE) == expected

    expected = run(None, "ddp", {})
    assert expected
    on_layouts(check, FEW)


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_take_half_the_bytes_and_parameters_if_they_are_rounded_too(strategy: str, parameters: bool) -> None:
    def sent(comm: Any, **settings: Any) -> Counter[str]:
        with sharded(strategy, comm, mlp(), micro_batch=1, **settings, **PRIVATE) as model:
            counted = [
                group.counters.bytes_by_tag for group in (model._engine.grid.gradients, model._engine.grid.inter_node)
            ]
            before = sum(map(Counter, counted), Counter())  # start values are gathered, too
            model.train(*part(comm, *points(4)))
            return sum(map(Counter, counted), Counter()) - before

    settings = {**WIRE, "wire_parameters": parameters}
    for whole, half in zip(run_in_threads(2, sent), run_in_threads(2, lambda c: sent(c, **settings)), strict=True):
        summed = {"gradients", "unit gradients"} | ({"gather"} if strategy == "ddp" or parameters else set())
        halves = {tag: count // (2 if tag in summed else 1) for tag, count in whole.items()}
        assert half == halves
        assert any(halves.get(tag) for tag in summed)
        assert halves["gather"]


def test_small_updates_of_rounded_parameters_add_up_in_their_master_weights() -> None:
    """Each update is less than half of the distance to the next bfloat16 number, so by itself it changes nothing."""
    start = {"w": np.ones(3, np.float32)}
    function = mz.FunctionModel(start, lambda p, batch: (0.0, {"w": np.ones(3)}, float(len(batch[0]))))
    with sharded("zero1", None, function, mz.SGD(lr=2.0**-12), **WIRE, wire_parameters=True) as model:
        seen = []
        for _ in range(32):
            model.train(np.zeros((1, 1)), np.zeros(1))
            seen.append(float(model.get_parameters()[0]))
    assert seen[-1] == 1 - 32 * 2.0**-12
    assert seen[0] == 1.0
    assert len(set(seen)) < 8


def test_a_resumed_run_has_master_weights_and_the_bits_of_one_without_a_break(tmp_path: Path) -> None:
    def steps(model: Any, comm: Any, numbers: range) -> None:
        for number in numbers:
            model.train(*part(comm, *points(8, seed=number)))

    def run(comm: Any, strategy: str, memory: dict[str, Any], *, saves: bool) -> str:
        settings = {"micro_batch": 2, "wire_parameters": True, **WIRE, **memory}
        with sharded(strategy, comm, mlp(), mz.AdamW(lr=1e-2), **settings) as model:
            if saves:
                steps(model, comm, range(2))
                model.save_model(tmp_path / "saved")
            else:
                model.load_model(tmp_path / "saved")
            steps(model, comm, range(2, 4))
            return str(model.parameters_sha256())

    (expected,) = set(run_in_threads(2, lambda comm: run(comm, "zero2", PRIVATE, saves=True)))

    def check(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
        assert run(comm, strategy, memory, saves=False) == expected, (strategy, memory)

    on_layouts(check, FEW)


def test_parameters_that_are_set_are_rounded_and_master_weights_begin_with_them_again() -> None:
    def run(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
        settings = {"micro_batch": 1, "wire_parameters": True, **WIRE, **memory}
        with sharded(strategy, comm, mlp(), mz.SGD(lr=0.1), **settings) as model:
            model.train(*part(comm, *points(6)))
            model.set_parameters(values)
            assert model.get_parameters().tobytes() == rounded(values).tobytes()
            model.train(*part(comm, *points(6, seed=1)))
            found.add(model.parameters_sha256())

    found: set[str] = set()
    with sharded("ddp", None, mlp(), mz.SGD(lr=0.1), micro_batch=1, wire_parameters=True, **WIRE) as fresh:
        values = np.linspace(-1, 1, fresh.get_parameters().size, dtype=np.float32)
        fresh.set_parameters(values)
        fresh.train(*points(6, seed=1))
        expected = fresh.parameters_sha256()
    on_layouts(run, FEW)
    assert found == {expected}


def test_a_gradient_that_is_applied_by_hand_reaches_the_master_weights() -> None:
    def run(comm: Any, strategy: str, memory: dict[str, Any]) -> None:
        settings = {"micro_batch": 1, "wire_parameters": True, **WIRE, **memory}
        with sharded(strategy, comm, mlp(), mz.SGD(lr=lambda step: 0.1 * (step == 0)), **settings) as model:
            model.train(*part(comm, *points(6)))
            model.apply_gradients(model.compute_gradients(*part(comm, *points(6))), 0.5)
            applied = model.parameters_sha256()
            model.train(*part(comm, *points(6, seed=1)))
            assert model.parameters_sha256() == applied
            found.add(applied)

    found: set[str] = set()
    on_layouts(run, FEW)
    assert len(found) == 1


@pytest.mark.parametrize("size", [0, 1, 2, 7, (1 << 14) + 3, 5 * (1 << 14)])
def test_numbers_are_narrowed_and_widened_in_their_own_memory(size: int) -> None:
    rng = np.random.default_rng(size)
    memory = rng.standard_normal(size + 2).astype(np.float32)
    values, expected = memory[1 : size + 1], rounded(memory[1 : size + 1])
    around = memory[[0, -1]].copy()
    narrow_to(values, values)
    half = values.view(np.uint16)[size:]
    assert half.tobytes() == (expected.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes()
    widen_in_place(values)
    assert values.tobytes() == expected.tobytes()
    assert memory[[0, -1]].tobytes() == around.tobytes()


def test_what_does_not_go_with_rounded_gradients_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"wire='fp8': expected one of \"bfloat16\""):
        mz.Config(wire="fp8")
    with pytest.raises(ConfigError, match=r"wire='bfloat16'.*leave out gradient_compression"):
        mz.Config(wire="bfloat16", gradient_compression="int8")
    with pytest.raises(ConfigError, match=r"wire='bfloat16': needs a model in float32, this one is in float64"):
        sharded("zero1", None, network("float64"), **WIRE)
    with sharded("zero1", None, mlp(), **WIRE) as model, pytest.raises(ConfigError, match="wire='bfloat16'"):
        mz.GradientCompressionOptimizer(mz.SGD(lr=1.0), model.config, compression="int8").set_model(model)
    case = Case(lambda: gpt(layers=2), batches=texts(1, 4), config=WIRE)
    with pytest.raises(ConfigError, match=r"wire='bfloat16': cannot be used where 2 ranks share each sample"):
        run_in_threads(2, lambda comm: trained(case, comm, Way(context=2)))
    with pytest.raises(ConfigError, match=r"leave out wire='bfloat16'"):
        sharded("ddp", None, mlp(), mz.LBFGS(), **WIRE)
    with pytest.raises(ConfigError, match=r'wire_parameters=True: needs wire = "bfloat16"'):
        mz.Config(wire_parameters=True)
    with pytest.raises(ConfigError, match="wire_parameters=True: cannot be used with ema"):
        mz.Config(wire_parameters=True, ema=0.9, **WIRE)
    with pytest.raises(ConfigError, match="wire_parameters=True: LAMB needs whole tensors"):
        sharded("zero1", None, mlp(), mz.LAMB(), wire_parameters=True, **WIRE)
    with pytest.raises(ConfigError, match=r"wire_parameters=True: would round the statistics 'norm0\.mean'"):
        sharded("zero1", None, network("float32"), wire_parameters=True, **WIRE)
