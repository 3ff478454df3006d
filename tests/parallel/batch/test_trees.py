"""Batches that are trees of arrays are cut and dealt like one array; what cannot be is said."""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import DataError
from mpizero.testing import run_in_threads
from mpizero.types import Array
from tests.parallel.models import PRIVATE, STRATEGIES, hard_function, layouts, part, sharded, vectors
from tests.parallel.parallel_layouts import known


class Target(NamedTuple):
    """A named tuple with a place that is not used."""

    values: Any
    weights: Any = None


@dataclass(frozen=True)
class Sides:
    """A frozen dataclass of arrays."""

    left: Any
    right: Any


class Tensor:
    """An array of another library, on the host."""

    def __init__(self, values: Array) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return self.values


def as_tree(x: Array, y: Array) -> tuple[Any, Any]:
    sides = Sides(Tensor(x[:, 2:5]), x[:, 5:])
    return OrderedDict(b=x[:, :2], a=(sides, [None, {"numbers": np.arange(len(x))}])), Target(y)


def as_arrays(batch: tuple[Any, Any]) -> tuple[Array, Array]:
    x, y = batch
    assert type(x) is OrderedDict
    assert list(x) == ["b", "a"]
    sides, (nothing, more) = x["a"]
    assert (nothing, y.weights) == (None, None)
    assert len(more["numbers"]) == len(y.values)
    held = (x["b"], sides.left, sides.right)
    assert all(type(leaf) is np.ndarray and not leaf.flags.writeable for leaf in (*held, y.values))
    return np.concatenate(held, axis=1), y.values


def of_trees(sizes: set[int] | None = None) -> mz.FunctionModel:
    """The function of arrays, for trees that hold the same; ``sizes`` collects how many samples it is given."""
    whole = hard_function()

    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = as_arrays(batch)
        if sizes is not None:
            sizes.add(len(x))
        return whole.loss_and_grad(p, (x, y))

    def predict(p: Any, x: Any) -> Any:
        return {"score": whole.predict(p, as_arrays((x, Target(x["b"][:, 0])))[0][: len(x["b"])])}

    return mz.FunctionModel(whole.parameters, loss_and_grad, predict=predict, frozen=["scale"])


def told(model: Any, batches: list[Any]) -> tuple[Any, ...]:
    """What a model makes of some batches, by every call that takes one."""
    losses = [model.train(*batch) for batch in batches]
    gradient = model.compute_gradients(*batches[0])
    return losses, gradient.loss, model.evaluate(*batches[1])[:2], model.parameters_sha256()


def expected() -> tuple[Any, ...]:
    """The same of one array, on one process."""
    model, _ = sharded("ddp", None, hard_function(), micro_batch=4)
    with model:
        return told(model, [vectors(18), vectors(11), vectors(18)])


def check_ranks(comm: Any, size: int) -> None:
    """Trees give the numbers of arrays on one process; the first rank has no samples of the second batch."""
    wanted, sizes = known(comm, expected), set[int]()
    for strategy, memory in layouts(size):
        model, _ = sharded(strategy, comm, of_trees(sizes), micro_batch=4, **memory)
        cuts = [
            None,
            [0, *[11 // (size - 1)] * (size - 2), 11 - 11 // (size - 1) * (size - 2)] if size > 1 else None,
            None,
        ]
        batches = [as_tree(*part(comm, *vectors(n), cut)) for n, cut in zip((18, 11, 18), cuts, strict=True)]
        with model:
            assert told(model, batches) == wanted, (strategy, memory)
    assert sizes <= {4, 2, 3}


@pytest.mark.mpi
def test_a_tree_of_arrays_gives_the_numbers_of_one_array_on_any_ranks_strategy_and_memory(world: Any) -> None:
    check_ranks(world, world.size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_same_in_threads(size: int) -> None:
    run_in_threads(size, lambda comm: check_ranks(comm, size))


def test_predict_takes_and_gives_trees() -> None:
    x, y = vectors(5)
    for strategy in STRATEGIES:
        model, _ = sharded(strategy, None, of_trees(), **PRIVATE)
        whole, _ = sharded(strategy, None, hard_function(), **PRIVATE)
        with model, whole:
            assert model.predict(as_tree(x, y)[0])["score"].tobytes() == whole.predict(x).tobytes()


# ---------------------------------------------------------------------- what is refused, on all ranks

X, Y = np.ones((4, 2)), np.ones(4)


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ({"a": X, "b": X}, {"a": X, "b": X[:3]}, r"rank 1: .* equally many samples .*: x\['a'\] has 4, x\['b'\] has 3"),
        ({"a": X, "b": X}, {"a": X, "c": X}, r"x\['b'\] is float64 .* on rank 0 and missing on rank 1"),
        (
            {"a": X, "b": Y},
            {"b": Y, "a": X},
            r"the batch is x dict\(\['a'\] .* on rank 0 and x dict\(\['b'\] .* rank 1",
        ),
        ([X, X], (X, X), r"the batch is x list\(.* on rank 0 and x tuple\("),
        ({"a": X}, {"a": X.astype("f4")}, r"x\['a'\] is float64 .* on rank 0 and float32 .*\(2,\) on rank 1"),
        ([X, {"k": Y}], [X, {"k": X}], r"x\[1\]\['k'\] is float64 with samples of shape \(\) on rank 0 and .* \(2,\)"),
        (Target(X), Target(X, Y), r"x.weights is missing on rank 0 and float64"),
        ({"a": X}, {"a": {1, 2}}, r"rank 1: x\['a'\] is a set, not an array, so its batch cannot be cut"),
        (X, np.ma.masked_array(X), "rank 1: x is a masked array, whose mask would be lost: give the values and"),
        (X, [0.5] * 4, r"rank 1: x\[0\] is a number \(float\), not an array: numpy.asarray makes one of lists"),
    ],
)
def test_trees_that_do_not_fit_together_are_refused_with_rank_path_and_both(good: Any, bad: Any, message: str) -> None:
    def run(comm: Any) -> None:
        start = {"w": np.zeros(3)}
        model, _ = sharded("zero2", comm, mz.FunctionModel(start, lambda p, b: (1.0, {"w": np.ones(3)}, 1.0)))
        with model:
            for call in (model.train, model.compute_gradients, model.evaluate):
                with pytest.raises(DataError, match=message):
                    call(bad if comm.rank == 1 else good, Y)
            assert np.isfinite(model.train(good, Y))

    run_in_threads(3, run)


class Cuda:
    """A tensor that is not on the host."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_an_array_that_cannot_come_to_the_host_is_named_with_its_own_error_and_the_way_out() -> None:
    model, _ = sharded("ddp", None, mz.FunctionModel({"w": np.zeros(3)}, lambda p, b: (1.0, {"w": np.ones(3)}, 1.0)))
    with model, pytest.raises(DataError, match=r"x\['image'\] is a .*Cuda .* cuda:0 device .*; bring .*cpu\(\).numpy"):
        model.train({"image": Cuda()}, Y)
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    model, _ = sharded("ddp", None, mz.FunctionModel({"w": np.zeros(3)}, lambda p, b: (1.0, {"w": np.ones(3)}, 1.0)))
    with model, pytest.raises(DataError, match="does it hold itself"):
        model.train(holds_itself, Y)


@pytest.mark.parametrize(
    ("x", "named"),
    [
        ("text", "x is a str, not an array"),
        ({"a": X, "graph": object()}, r"x\['graph'\] is a object, not an array"),
        ([X, 3.0], r"x\[1\] is a number \(float\)"),
        (np.array([[1], [2, 3]], dtype=object), "x is an array of objects"),
        (np.float32(1), r"x is a single float32 \(numpy.float32\), without an axis"),
    ],
)
def test_what_cannot_be_cut_is_one_grain_and_a_warning_names_it_once_at_the_users_line(x: Any, named: str) -> None:
    seen: list[Any] = []

    def loss_and_grad(p: Any, batch: Any) -> Any:
        seen.append(batch[0])
        return 1.0, {"w": np.ones(3)}, 1.0

    model, _ = sharded("ddp", None, mz.FunctionModel({"w": np.zeros(3)}, loss_and_grad), micro_batch=1)
    with model, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            model.train(x, X)
    assert [type(value) for value in seen] == [type(x)] * 3, "all that the rank gives at once, as it is"
    (warning,) = caught
    assert warning.filename == __file__
    with pytest.raises(UserWarning, match=f"^{named}.*micro_batch has no effect.*depends on the number of ranks"):
        raise warning.message  # type: ignore[misc]


# ---------------------------------------------------------------------- bad steps, comparisons, sources


def test_the_samples_of_a_bad_step_are_kept_and_replayed_as_trees(tmp_path: Path) -> None:
    seen: list[Any] = []

    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = batch
        seen.append((x["b"].copy(), x["a"][0].left.copy(), x["a"][1][1]["numbers"].copy(), y.values.copy(), y[1]))
        return float(x["b"].sum()), {"w": np.log(x["b"].sum(0))}, float(len(x["b"]))

    def run(comm: Any) -> Any:
        model, _ = sharded("zero1", comm, mz.FunctionModel({"w": np.ones(2)}, loss_and_grad), micro_batch=2)
        with model:
            x, y = (np.abs(values) for values in vectors(8))
            x[5, :2] = 0.0
            x[4, :2] = 0.0
            batch = as_tree(*part(comm, x, y))
            model.train(*batch)
            return mz.dump_bad_step(model, batch, tmp_path)

    path, _ = run_in_threads(2, run)
    bad = next(held for held in seen if not held[0].any())
    seen.clear()
    model, _ = sharded("zero1", None, mz.FunctionModel({"w": np.ones(2)}, loss_and_grad), micro_batch=2)
    with model:
        (replay,) = mz.replay_bad_step(path, model)
    assert (replay.start, replay.stop, replay.first.what, replay.first.name) == (4, 6, "gradient", "w")
    assert [f.name for f in replay.figures if f.what == "input"][:2] == ["x['b']", "x['a'][0].left"]
    assert [np.asarray(a).tolist() for a in seen[0]] == [np.asarray(a).tolist() for a in bad]


@pytest.mark.parametrize(
    "structure",
    [
        {"x": {"named": [["__class__", "*"], ["class", "*"]]}, "y": "*"},
        {"x": {"exec": []}, "y": "*"},
        {"x": {"dict": [["a", "*"], ["a", "*"]]}, "y": "*"},
        {"x": {"dict": [["a", "*"], ["b", "*"], ["c", "*"]]}, "y": "*"},
        {"x": {"dict": [["b", "*"]]}, "y": "*"},
        {"x": ["*"]},
    ],
)
def test_a_made_up_structure_is_refused(structure: Any, tmp_path: Path) -> None:
    nan = np.full((2, 2), np.nan)
    model, _ = sharded("ddp", None, mz.FunctionModel({"w": np.ones(2)}, lambda p, b: (np.nan, {"w": np.ones(2)}, 1.0)))
    with model:
        batch = {"a": nan, "b": nan}, nan
        model.train(*batch)
        path = mz.dump_bad_step(model, batch, tmp_path)
        assert mz.replay_bad_step(path, model)
        told = json.loads((path / "step.json").read_text())
        assert told["structure"] == {"x": {"dict": [["a", "*"], ["b", "*"]]}, "y": "*"}
        (path / "step.json").write_text(json.dumps({**told, "structure": structure}))
        with pytest.raises(DataError, match=r"structure|not the samples of a grain"):
            mz.replay_bad_step(path, model)


def test_layouts_are_compared_on_trees() -> None:
    trees = [as_tree(*vectors(n)) for n in (8, 5)]
    report = mz.testing.compare_layouts(lambda comm: of_trees(), trees, ["zero1*2", "zero3*3"], micro_batch=2)
    report.check()


class Images(mz.data.Source):
    """Samples in a dictionary, which a function made."""

    def __len__(self) -> int:
        return 13

    def read(self, indices: Any) -> Any:
        x, y = vectors(13)
        return {"image": x[indices], "number": indices}, Target(y[indices])

    def describe(self) -> dict[str, Any]:
        return {"kind": "images"}


@pytest.mark.parametrize("arrays", [False, True])
def test_a_source_gives_trees_and_its_batches_the_same_training_on_any_ranks(arrays: bool) -> None:
    whole, (x, y) = hard_function(), vectors(13)

    def loss_and_grad(p: Any, batch: Any) -> Any:
        xs, ys = batch
        assert (xs["image"] == x[xs["number"]]).all()
        return whole.loss_and_grad(p, (xs["image"], ys.values if isinstance(ys, Target) else ys))

    def run(comm: Any) -> str:
        source = mz.data.ArraySource({"image": x, "number": np.arange(13)}, y) if arrays else Images()
        wrapped = mz.FunctionModel(whole.parameters, loss_and_grad, frozen=["scale"])
        model, _ = sharded("zero2", comm, wrapped, micro_batch=2)
        with model:
            for batch in mz.data.batches(source.split(0.2)[0], model.config, 7, seed=3, steps=4):
                model.train(*batch)
            return str(model.parameters_sha256())

    assert len({sha for size in (1, 2, 3, 4) for sha in run_in_threads(size, run)}) == 1
