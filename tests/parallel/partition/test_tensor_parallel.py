"""Layers split over tensor ranks learn what whole layers learn, within rounding, and have the bits of their tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError, RemoteError
from mpizero.nn import Frozen, Layer, Linear
from mpizero.testing import parallel_assert, run_in_threads
from mpizero.types import EVALUATE, Array
from tests.parallel.models import part, ten
from tests.parallel.parallel_layouts import (
    Blocks,
    Case,
    Trained,
    Way,
    gpt,
    mlp,
    of_first,
    placed,
    points,
    steps,
    texts,
    trained,
    trained_alone,
    trained_in_tiles,
)

F64 = {"dtype": "float64"}
CASES = {
    "GPT": Case(lambda: gpt(layers=2, **F64), batches=texts(2, 11)),
    "untied": Case(lambda: gpt(layers=2, tied=False, **F64), lambda: mz.Lion(lr=1e-3), texts(2, 8)),
    "no dropout": Case(lambda: gpt(layers=2, dropout=0.0, **F64), batches=texts(2, 8)),
    "heads of one number": Case(lambda: gpt(dim=12, heads=12, layers=1, **F64), batches=texts(2, 6)),
    "clipping": Case(lambda: gpt(layers=2, **F64), batches=texts(2, 8), config={"clip": 0.2}),
    "LAMB, clipping": Case(lambda: gpt(layers=2, **F64), lambda: mz.LAMB(lr=1e-2), texts(2, 8), config={"clip": 0.2}),
    "checkpointing": Case(lambda: gpt(layers=2, activation_checkpointing=True, **F64), batches=texts(2, 8)),
    "accumulate": Case(lambda: gpt(layers=2, **F64), batches=texts(2, 9), config={"micro_batch": 2, "accumulate": 2}),
    "loss scale": Case(lambda: gpt(layers=2, **F64), batches=texts(2, 8), loss_scale=mz.DynamicLossScale(initial=8.0)),
    "half frozen": Case(lambda: Blocks(gpt(layers=2, **F64), {"blocks.0": Frozen}), batches=texts(2, 8)),
    "MLP": Case(lambda: mlp(**F64), batches=points(3, 13)),
    "an odd number of layers": Case(lambda: mlp(hidden=(7, 5), **F64), batches=points(3, 8)),
    "regression": Case(
        lambda: mlp(hidden=(7, 5), task="regression", outputs=4, **F64),
        lambda: mz.SGD(lr=0.01, momentum=0.9),
        [(x, np.stack([x[:, 0], x[:, 1] ** 2, y, -x[:, 2]], axis=1)) for x, y in points(3, 8)],
    ),
}
MEMORIES: tuple[dict[str, Any], ...] = ({}, {"share_node_memory": False}, {"ranks_per_node": 2})


def same_within_rounding(found: Trained, expected: Trained, bound: float = 1e-12) -> bool:
    pairs = [*zip(found.losses, expected.losses, strict=True)]
    pairs += [pair for pair in zip(found.norms, expected.norms, strict=True) if None not in pair]
    assert [n is None for n in found.norms] == [n is None for n in expected.norms]
    return all(abs(a - b) <= bound * abs(b) for a, b in pairs)


# ---------------------------------------------------------------------- the same training within rounding


@pytest.mark.parametrize("name", CASES)
def test_split_layers_learn_what_whole_layers_learn(name: str) -> None:
    case = CASES[name]
    expected = trained_alone(case)
    heads = 12 if name == "heads of one number" else 2
    for number, (size, tensor) in enumerate(((2, 2), (4, 2), (4, 4), (3, 3))):
        if case.batches[0][0].dtype.kind == "i" and heads % tensor:
            continue
        way, memory = Way(tensor=tensor, zero=(number + len(name)) % 4), MEMORIES[(number + len(name)) % 3]
        found = run_in_threads(size, lambda comm, w=way, m=memory: trained(case, comm, w, **m))
        twice = name in ("GPT", "MLP") and size < 4
        again = run_in_threads(size, lambda comm, w=way, m=memory: trained(case, comm, w, **m)) if twice else []
        assert len(set(map(str, found + again))) == 1, "the same bits on every rank and every time"
        assert same_within_rounding(found[0], expected), (way, found[0], expected)


@pytest.mark.mpi(min_size=2)
def test_over_mpi_too_split_layers_learn_what_whole_layers_learn(world: Any) -> None:
    """Groups of two and four ranks have the bits of one process with as many tiles; three agree within rounding."""
    first, every = {2: (0, 2), 3: (0, 1), 4: (1, 4)}.get(world.size, (3, 4))
    names = list(CASES)[first::every]
    for number, name in enumerate(names):
        tensor = next(
            (n for n in (4, 3, 2) if world.size % n == 0 and (name.startswith(("MLP", "heads")) or n == 2)), 0
        )
        if tensor:
            case, way, memory = CASES[name], Way(tensor=tensor, zero=number % 4), MEMORIES[(number + world.size) % 3]
            found = [trained(case, world, way, **memory) for _ in range(1 + (tensor == 3))]
            if tensor == 3:
                expected = of_first(world, lambda case=case: trained_alone(case))
                same = found[0] == found[1] and same_within_rounding(found[0], expected)
            else:
                expected = of_first(world, lambda case=case, tensor=tensor: trained_in_tiles(case, tensor))
                same = found[0] == expected
            parallel_assert(world, same, f"{name}, {way}: {found} {expected}")


def test_float32_stays_within_its_rounding() -> None:
    for model, batches in ((gpt, texts(6, 8)), (mlp, points(6, 8))):
        case = Case(model, lambda: mz.AdamW(lr=1e-3), batches)
        found = run_in_threads(2, lambda comm, c=case: trained(c, comm, Way(tensor=2)))
        assert same_within_rounding(found[0], trained_alone(case), 1e-5)


def test_every_tensor_rank_starts_with_its_part_of_the_values_of_one_process() -> None:
    expected = np.concatenate([values.reshape(-1) for values in mz.nn.initial_parameters(gpt()).values()])

    def body(comm: Any) -> None:
        model, _ = placed(Case(gpt), comm, Way(tensor=2, zero=3))
        with model:
            np.testing.assert_array_equal(model.get_parameters(), expected)

    run_in_threads(4, body)


def test_a_tensor_parallel_model_takes_all_ranks_unless_told_otherwise() -> None:
    case = CASES["MLP"]

    def run(comm: Any, *size: int) -> Any:
        with mz.ShardingConfig(comm=comm, micro_batch=2) as config:
            model = mz.TensorParallelModel(case.model(), config, *size, zero_stage=1)
            mz.HybridShardedOptimizer(case.optimizer(), config).set_model(model)
            with model, model.clone() as clone:
                assert clone.parameters_sha256() == model.parameters_sha256()
                found, told = steps(model, case), model.metadata()
                return found, told.strategy, told.group_sizes["tensor"], told.group_sizes["data"]

    expected = trained_alone(case)
    for size, sizes in (((), (3, 1)), ((3,), (3, 1)), ((1,), (1, 3))):
        for found, *told in run_in_threads(3, lambda comm, s=size: run(comm, *s)):
            assert told == ["TensorParallel", *sizes]
            assert same_within_rounding(found, expected)


# ---------------------------------------------------------------------- what is split


def test_parameters_state_and_work_of_a_rank_fall_with_the_tensor_size() -> None:
    """Norms, positions and the biases of row-parallel layers stay whole; everything else is a half, and a quarter."""
    model = gpt(dim=32, heads=4, layers=2, vocabulary=64)
    whole = sum(spec.size for spec in mz.nn.model_specs(model) if spec.tied is None)
    small = sum(
        spec.size
        for spec in mz.nn.model_specs(model)
        if ".norm" in spec.name
        or "_norm" in spec.name
        or "position" in spec.name
        or spec.name.endswith("projection.bias")
    )
    work = sum(sum(count) for count in mz.nn.model_operations(model, (7,)).values())

    def held(comm: Any) -> tuple[int, int, float]:
        sharded, _ = placed(Case(lambda: model), comm, Way(tensor=comm.size, zero=0))
        with sharded:
            told = sharded.metadata()
            counts = mz.nn.model_operations(sharded.engine.partitioned.local, (7,))
            return told.held_count, told.bytes_on_rank["optimizer state"], sum(sum(count) for count in counts.values())

    for size in (2, 4):
        for count, state, operations in run_in_threads(size, held):
            assert count == small + (whole - small) // size
            assert state == 2 * 4 * count
            assert operations == pytest.approx(work / size, rel=0.05)


def test_the_clipping_norm_counts_every_element_once() -> None:
    """Whole parameters are on every tensor rank, and must not count as often."""
    case = Case(lambda: gpt(dropout=0.0, **F64), lambda: mz.SGD(lr=0.1), texts(1, 4), config={"clip": 1e-3})

    def body(comm: Any) -> Any:
        model, _ = placed(case, comm, Way(tensor=2))
        with model:
            before = model.get_parameters()
            model.train(*case.batches[0])
            return model.last_step.gradient_norm, model.get_parameters() - before

    (norm, step), (other, _) = run_in_threads(2, body)
    assert norm == other
    assert norm == pytest.approx(trained_alone(case).norms[0], rel=1e-12)
    assert np.linalg.norm(step) == pytest.approx(0.1 * 1e-3, rel=1e-12)


# ---------------------------------------------------------------------- a user's own layers


@dataclass(frozen=True)
class Plain(Layer):
    """A user's layer that says nothing of splitting."""

    inner: Linear

    def own_specs(self) -> Any:
        return self.inner.specs()

    def forward(self, params: Any, x: Array, run: Any = EVALUATE) -> tuple[Array, Any]:
        return self.inner.forward(params, x, run)

    def backward_input(self, params: Any, cache: Any, dy: Array) -> tuple[Any, Any]:
        return self.inner.backward_input(params, cache, dy)

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        self.inner.backward_weights(params, cache, pending, grads)


@dataclass(frozen=True)
class Splittable(Plain):
    """A user's layer that splits itself by the documented method."""

    def split(self, group: Any) -> Layer:
        return self.inner.split(group)


def of_users(kind: Callable[[Linear], Layer]) -> Blocks:
    changes = {
        name: lambda block: kind(Linear(block.children()["linear"].inputs, block.children()["linear"].outputs))
        for name in ("hidden.0", "hidden.1", "output")
    }
    return Blocks(mlp(hidden=(8, 6), **F64), changes)


def test_a_users_layer_says_how_it_is_split_and_others_stay_whole() -> None:
    for kinds in ((Splittable, Splittable), (Plain, Splittable)):

        def model(kinds: Any = kinds) -> Blocks:
            first, second = of_users(kinds[0]), of_users(kinds[1])
            changes = {"hidden.0": first.changes["hidden.0"], "output": second.changes["output"]}
            return Blocks(mlp(hidden=(8, 6), **F64), {**changes, "hidden.1": second.changes["hidden.1"]})

        case = Case(model, batches=points(3, 8))
        expected = trained_alone(case)
        for tensor, size in ((2, 2), (2, 4), (3, 3)):
            found = run_in_threads(size, lambda comm, c=case, t=tensor: trained(c, comm, Way(tensor=t, zero=2)))
            assert same_within_rounding(found[0], expected)


def test_a_model_with_nothing_to_split_is_refused_on_all_ranks() -> None:
    def run(comm: Any, model: Any) -> str:
        with mz.ShardingConfig(comm=comm) as config, pytest.raises((ConfigError, RemoteError)) as caught:
            mz.TensorParallelModel(model, config)
        return str(caught.value)

    for told in run_in_threads(2, lambda comm: run(comm, of_users(Plain))):
        assert "nothing to split over 2 ranks" in told
        assert "hidden.0" in told
        assert "split(group)" in told
    for told in run_in_threads(3, lambda comm: run(comm, gpt())):
        assert "3" in told
        assert "heads" in told
    for told in run_in_threads(2, lambda comm: run(comm, ten())):
        assert "black box" in told


# ---------------------------------------------------------------------- bad batches


@pytest.mark.mpi(min_size=2)
def test_a_batch_that_all_tensor_ranks_refuse_leaves_the_model_usable(world: Any) -> None:
    tensor = 2 if world.size % 2 == 0 else world.size
    case = Case(lambda: mlp(hidden=(6, 6)), batches=points(2, 6))
    (x, y), (x2, y2) = case.batches
    model, _ = placed(case, world, Way(tensor=tensor))
    with model:
        model.train(*part(model.batch_group, x, y))
        before = model.parameters_sha256()
        other = x[::-1].copy() if model.engine.grid.here.tensor else x
        with pytest.raises(DataError, match="has another x than rank"):
            model.train(*part(model.batch_group, other, y))
        assert model.parameters_sha256() == before
        model.train(*part(model.batch_group, x2, y2))


def test_an_infinite_gradient_of_one_tensor_rank_skips_the_step_on_all() -> None:
    """Only one of the ranks holds the element that is not finite."""
    case = Case(lambda: mlp(hidden=(8, 6), task="regression", outputs=2))
    x, y = points(1, 4)[0][0], np.zeros((4, 2))

    def body(comm: Any) -> Any:
        model, _ = placed(case, comm, Way(tensor=2))
        with model, np.errstate(over="ignore", invalid="ignore"):
            values = model.named_parameters()
            weight = values["output.linear.weight"]
            weight[:] = 0
            weight[-1, 0] = 1e30  # its gradient and those that come through it
            model.load_named(values)
            before = model.parameters_sha256()
            model.train(1e10 * x, y)
            return model.last_step.skipped, model.parameters_sha256() == before

    found = run_in_threads(4, body)
    assert len(set(found)) == 1
    assert found[0][0] is not None
    assert found[0][1]
