"""What tensor groups split and what they refuse; the bits of their trainings are in test_hybrid.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, RemoteError
from mpizero.nn import Layer, Linear
from mpizero.sharding.partition import ParallelLayout, resolve_tiles
from mpizero.testing import run_in_threads
from tests.parallel.models import ten
from tests.parallel.parallel_layouts import (
    Blocks,
    Case,
    Way,
    Wrapped,
    gpt,
    mlp,
    placed,
    points,
    same_within_rounding,
    trained,
    trained_alone,
)

F64 = {"dtype": "float64"}


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
        with placed(Case(lambda: model), comm, Way(tensor=comm.size, zero=0)) as sharded:
            told = sharded.metadata()
            counts = mz.nn.model_operations(sharded._engine.partitioned.local, (7,))
            return told.held_count, told.bytes_on_rank["optimizer state"], sum(sum(count) for count in counts.values())

    for size in (2, 4):
        for count, state, operations in run_in_threads(size, held):
            assert count == small + (whole - small) // size
            assert state == 2 * 4 * count
            assert operations == pytest.approx(work / size, rel=0.05)


class Splittable(Wrapped):
    """A user's layer that splits itself by the documented method."""

    def split(self, group: Any) -> Layer:
        return self.layer.split(group)


def of_users(kind: Callable[[Linear], Layer]) -> Blocks:
    changes = {
        name: lambda block: kind(Linear(block.children()["linear"].inputs, block.children()["linear"].outputs))
        for name in ("hidden.0", "hidden.1", "output")
    }
    return Blocks(mlp(hidden=(8, 6), **F64), changes)


@pytest.mark.slow
def test_a_users_layer_says_how_it_is_split_and_others_stay_whole() -> None:
    for first, others in ((Splittable, Splittable), (Wrapped, Splittable)):
        changes = {**of_users(others).changes, "hidden.0": of_users(first).changes["hidden.0"]}
        case = Case(lambda c=changes: Blocks(mlp(hidden=(8, 6), **F64), c), batches=points(3, 8))
        expected = trained_alone(case)
        for tensor, size in ((2, 2), (2, 4), (3, 3)):
            found = run_in_threads(size, lambda comm, c=case, t=tensor: trained(c, comm, Way(tensor=t, zero=2)))
            assert same_within_rounding(found[0], expected)


def test_a_model_with_nothing_to_split_is_refused_on_all_ranks() -> None:
    def run(comm: Any, model: Any) -> str:
        with mz.ShardingConfig(comm=comm) as config, pytest.raises((ConfigError, RemoteError)) as caught:
            mz.TensorParallelModel(model, config)
        return str(caught.value)

    for ranks, model, words in (
        (2, of_users(Wrapped), ("nothing to split over 2 ranks", "hidden.0", "split(group)")),
        (3, gpt(), ("3", "heads")),
        (2, ten(), ("black box",)),
    ):
        for told in run_in_threads(ranks, lambda comm, m=model: run(comm, m)):
            assert all(word in told for word in words)


def test_an_infinite_gradient_of_one_tensor_rank_skips_the_step_on_all() -> None:
    """Only one of the ranks holds the element that is not finite."""
    case = Case(lambda: mlp(hidden=(8, 6), task="regression", outputs=2))
    x, y = points(1, 4)[0][0], np.zeros((4, 2))

    def body(comm: Any) -> Any:
        with placed(case, comm, Way(tensor=2)) as model, np.errstate(over="ignore", invalid="ignore"):
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


GPT = mz.nn.GPT(dim=16, layers=1, heads=4, sequence=8, vocabulary=11)
MLP = mz.nn.MLP(6, [8, 8], 3)
BLACK_BOX = mz.FunctionModel({"w": np.zeros(3, np.float32)}, lambda *_: None)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_tiles_that_fit_are_the_size_times_a_power_of_two(size: int) -> None:
    fitting = {size * 2**k for k in range(5)}
    for tiles in range(1, 17):
        layout = ParallelLayout(tensor=size, tiles=tiles)
        assert layout.tensor_virtual_ranks == (tiles if tiles in fitting else size)
        assert ParallelLayout(context=size, tiles=tiles).context_virtual_ranks == layout.tensor_virtual_ranks
    assert ParallelLayout(tensor=size).tensor_virtual_ranks == size


@pytest.mark.parametrize(
    ("model", "sizes", "tiles", "found"),
    [
        (GPT, {}, None, (1, 1)),
        (GPT, {}, 4, (4, 4)),
        (GPT, {}, {"tensor": 4}, (4, 1)),
        (GPT, {"tensor": 2}, {"context": 2}, (2, 2)),
        (GPT, {"tensor": 2, "context": 2}, 4, (4, 4)),
        (MLP, {}, 4, (4, 1)),
        (MLP, {"tensor": 3}, 3, (3, 1)),
        (MLP, {"tensor": 3}, 8, (3, 1)),
        (MLP, {}, 3, (1, 1)),
        (BLACK_BOX, {}, 1, (1, 1)),
    ],
)
def test_a_number_for_both_axes_holds_for_those_that_the_model_has(
    model: Any, sizes: Any, tiles: Any, found: tuple[int, int]
) -> None:
    layout = resolve_tiles(ParallelLayout(**sizes), tiles, model)
    assert (layout.tensor_virtual_ranks, layout.context_virtual_ranks) == found


@pytest.mark.parametrize(
    ("model", "tiles", "message"),
    [
        (GPT, 8, r"tiles=8 computes .* of 8 ranks .*heads=4 .*\(1, 2, 4\)"),
        (MLP, {"context": 2}, "no attention along a sequence.*leave tiles of the context axis out"),
        (BLACK_BOX, 4, r"tiles=4: FunctionModel is a black box, .*leave tiles out \(tiles=None\)"),
    ],
)
def test_tiles_that_no_layer_can_compute_are_refused(model: Any, tiles: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_tiles(ParallelLayout(), tiles, model)
