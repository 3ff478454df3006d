"""Batches that are trees of arrays in any byte order are cut and dealt like one array; what cannot be is said."""

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
from mpizero._util.pytree import map_leaves
from mpizero.errors import DataError
from mpizero.nn import Layer
from mpizero.testing import run_in_threads
from mpizero.types import EVALUATE, Array
from tests.parallel.models import gpt, hard_function, layouts, part, points, sharded, tokens, vectors
from tests.parallel.parallel_layouts import Case, Chain, Way, known, trained, trained_alone


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


def same(tree: Any) -> Any:
    return tree


def foreign(tree: Any) -> Any:
    """The same numbers in the byte order that is not this machine's."""
    return map_leaves(lambda array: np.asarray(array).astype(np.asarray(array).dtype.newbyteorder()), tree)


def of_trees(order: Any, sizes: set[int]) -> mz.FunctionModel:
    """The function of arrays, for trees that hold the same; ``sizes`` collects how many samples it is given.

    It refuses arrays in another byte order than this machine's, and returns its gradients in ``order``.
    """
    whole = hard_function()

    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = as_arrays(batch)
        assert all(array.dtype.isnative for array in (*p.values(), x, y))
        sizes.add(len(x))
        loss, gradients, weight = whole.loss_and_grad(p, (x, y))
        return loss, order(dict(gradients)), weight

    def predict(p: Any, x: Any) -> Any:
        return {"score": whole.predict(p, as_arrays((x, Target(x["b"][:, 0])))[0])}

    return mz.FunctionModel(order(dict(whole.parameters)), loss_and_grad, predict=predict, frozen=["scale"])


def told(model: Any, batches: list[Any], order: Any, inputs: Any) -> tuple[Any, ...]:
    """What a model makes of parameters and of some batches, by every call that takes some."""
    model.set_parameters(order(model.get_parameters() / 2))
    model.load_named(order({name: array + 1 for name, array in model.named_parameters().items()}))
    losses = [model.train(*batch) for batch in batches]
    predicted = model.predict(inputs)
    predicted = predicted["score"] if isinstance(predicted, dict) else predicted
    gradient, seen = model.compute_gradients(*batches[0]).loss, model.evaluate(*batches[1])[:2]
    return losses, gradient, seen, predicted.tobytes(), model.parameters_sha256()


def of_arrays() -> tuple[Any, ...]:
    """The same of one array, on one process."""
    with sharded("ddp", None, hard_function(), micro_batch=4) as model:
        return told(model, [vectors(18), vectors(11), vectors(18)], same, vectors(5)[0])


def check_ranks(comm: Any, size: int, order: Any, every: int = 1) -> None:
    """Trees give the numbers of arrays on one process; the last rank has all samples of the second batch."""
    wanted, sizes = known(comm, of_arrays), set[int]()
    inputs = order(as_tree(*vectors(5)))[0]
    for strategy, memory in layouts(size)[::every]:
        model = sharded(strategy, comm, of_trees(order, sizes), micro_batch=4, **memory)
        cuts = (None, [0] * (size - 1) + [11], None)
        batches = [order(as_tree(*part(comm, *vectors(n), cut))) for n, cut in zip((18, 11, 18), cuts, strict=True)]
        with model:
            assert told(model, batches, order, inputs) == wanted, (strategy, memory)
    assert sizes <= {4, 2, 3}


@pytest.mark.parametrize(("size", "order"), [(1, foreign), (2, same), (3, foreign), (4, same)])
def test_trees_give_the_numbers_of_one_array_with_any_ranks_strategy_and_memory(size: int, order: Any) -> None:
    run_in_threads(size, lambda comm: check_ranks(comm, size, order))


@pytest.mark.mpi
def test_processes_send_each_other_trees_in_any_byte_order(world: Any) -> None:
    check_ranks(world, world.size, foreign, every=3)


class Turned(Layer):
    """Pass on its input in the other byte order."""

    def forward(self, params: Any, x: Array, run: Any = EVALUATE) -> Any:
        assert x.dtype.isnative
        return foreign(x), None

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return dy, None


@pytest.mark.parametrize("way", [Way(pipeline=2), Way(tensor=2), Way(context=2)], ids=str)
def test_split_models_take_samples_in_any_byte_order(way: Way) -> None:
    def run(order: Any) -> Any:
        case = Case(gpt, batches=[order(tokens(6))])
        return run_in_threads(2, lambda comm: trained(case, comm, way))

    assert run(foreign) == run(same)


def test_blocks_may_pass_on_arrays_of_any_byte_order() -> None:
    layers = {"one": mz.nn.Linear(6, 5), "turned": Turned(), "two": mz.nn.Linear(5, 3)}
    case = Case(lambda: Chain(layers, mz.nn.CrossEntropy()), batches=[points(6)])
    for stages in (2, 3):
        found = run_in_threads(stages, lambda comm, s=stages: trained(case, comm, Way(s)))
        assert found == [trained_alone(case)] * stages


X, Y = np.ones((4, 2)), np.ones(4)


def box(comm: Any = None, seen: Any = None, **settings: Any) -> Any:
    """A black box that takes anything, and notes its inputs."""

    def loss_and_grad(p: Any, batch: Any) -> Any:
        if seen is not None:
            seen.append(batch[0])
        return 1.0, {"w": np.ones(3)}, 1.0

    return sharded("zero2", comm, mz.FunctionModel({"w": np.zeros(3)}, loss_and_grad), **settings)


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
        with box(comm) as model:
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
    with (
        box() as model,
        pytest.raises(DataError, match=r"x\['image'\] is a .*Cuda .* cuda:0 device .*; bring .*cpu\(\).numpy"),
    ):
        model.train({"image": Cuda()}, Y)
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    with box() as model, pytest.raises(DataError, match="does it hold itself"):
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
    with box(None, seen, micro_batch=1) as model, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            model.train(x, X)
    assert [type(value) for value in seen] == [type(x)] * 3, "all that the rank gives at once, as it is"
    (warning,) = caught
    assert warning.filename == __file__
    with pytest.raises(UserWarning, match=f"^{named}.*micro_batch has no effect.*depends on the number of ranks"):
        raise warning.message  # type: ignore[misc]


def test_the_samples_of_a_bad_step_are_kept_and_replayed_as_trees(tmp_path: Path) -> None:
    seen: list[Any] = []

    def loss_and_grad(p: Any, batch: Any) -> Any:
        x, y = batch
        seen.append((x["b"].copy(), x["a"][0].left.copy(), x["a"][1][1]["numbers"].copy(), y.values.copy(), y[1]))
        return float(x["b"].sum()), {"w": np.log(x["b"].sum(0))}, float(len(x["b"]))

    def run(comm: Any) -> Any:
        with sharded("zero1", comm, mz.FunctionModel({"w": np.ones(2)}, loss_and_grad), micro_batch=2) as model:
            x, y = (np.abs(values) for values in vectors(8))
            x[5, :2] = 0.0
            x[4, :2] = 0.0
            batch = as_tree(*part(comm, x, y))
            model.train(*batch)
            return mz.sharding.dump_bad_step(model, batch, tmp_path)

    path, _ = run_in_threads(2, run)
    bad = next(held for held in seen if not held[0].any())
    seen.clear()
    with sharded("zero1", None, mz.FunctionModel({"w": np.ones(2)}, loss_and_grad), micro_batch=2) as model:
        (replay,) = mz.sharding.replay_bad_step(path, model)
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
    model = sharded("ddp", None, mz.FunctionModel({"w": np.ones(2)}, lambda p, b: (np.nan, {"w": np.ones(2)}, 1.0)))
    with model:
        batch = {"a": nan, "b": nan}, nan
        model.train(*batch)
        path = mz.sharding.dump_bad_step(model, batch, tmp_path)
        assert mz.sharding.replay_bad_step(path, model)
        told = json.loads((path / "step.json").read_text())
        assert told["structure"] == {"x": {"dict": [["a", "*"], ["b", "*"]]}, "y": "*"}
        (path / "step.json").write_text(json.dumps({**told, "structure": structure}))
        with pytest.raises(DataError, match=r"structure|not the samples of a grain"):
            mz.sharding.replay_bad_step(path, model)


def test_layouts_are_compared_on_trees() -> None:
    trees = [as_tree(*vectors(n)) for n in (8, 5)]
    report = mz.testing.compare_layouts(
        lambda comm: of_trees(same, set()), trees, ["zero1*2", "zero3*3"], micro_batch=2
    )
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
        with sharded("zero2", comm, wrapped, micro_batch=2) as model:
            for batch in mz.data.batches(source.split(0.2)[0], model.config, 7, seed=3, steps=4):
                model.train(*batch)
            return str(model.parameters_sha256())

    assert len({sha for size in (1, 2, 3, 4) for sha in run_in_threads(size, run)}) == 1
