"""Black boxes: what they may leave out, what they are told when they are wrong."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm import ProcessGrid
from mpizero.errors import DataError, LayoutError, RemoteError
from mpizero.sharding.batch import redistribute
from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, layouts, sharded

#: For tests that give batches which cannot be cut, of which a warning tells.
UNCUT = pytest.mark.filterwarnings("ignore:.* cannot be cut into samples:UserWarning")
GOOD = {"a": np.ones((2, 3)), "b": np.ones(3)}


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ((1.0, {"a": GOOD["a"]}, 1.0), "no gradient for 'b'; it returned .'a'"),
        ((1.0, {**GOOD, "b": np.ones(4)}, 1.0), r"gradient of 'b' has shape \(4,\), its parameter has \(3,\)"),
        ((1.0, GOOD), r"must return \(loss_sum, gradients by name, weight\), it returned .'float', 'dict'"),
        ((1.0, [1, 2], 1.0), "must return .* it returned .'float', 'list', 'float'"),
        ((1.0, {**GOOD, "bb": np.ones(3)}, 1.0), r"for 'bb', which is no parameter .*the parameters are .'a', 'b'"),
        ((1.0, {"a": GOOD["a"], "B": np.ones(3)}, 1.0), r"for 'B', which is no parameter \(did you mean 'b'\?\)"),
        *(
            (
                (1.0, {**GOOD, "b": GOOD["b"].astype(kind)}, 1.0),
                f"returned an array of {kind} of shape .3,. as the gradient of 'b'",
            )
            for kind in ("bool", "<U32", "object", "float16", "complex128")
        ),
        *(
            ((loss, GOOD, 1.0), "loss_and_grad .answer at test_function_model.py:.* returned .* as the loss of sample")
            for loss in ("1.5", None, 1j, np.ones(2), True, np.array("1"))
        ),
        *(((1.0, GOOD, weight), "as the weight of sample .*: expected one real") for weight in ("1", np.ones(2))),
        ((1.0, GOOD, -1.0), "returned -1 as the weight of sample .*: expected a number >= 0"),
    ],
)
def test_a_wrong_answer_on_one_rank_is_told_to_all(result: Any, told: str) -> None:
    def run(comm: Any) -> None:
        def answer(parameters: Any, batch: Any) -> Any:
            return result if comm.rank == 1 else (1.0, GOOD, 1.0)

        memory = MEMORIES[len(told) % 3]  # some answers with each: what is returned is checked before it is placed
        with sharded("zero3", comm, mz.FunctionModel(GOOD, answer), micro_batch=1, **memory) as model:
            with pytest.raises((LayoutError, DataError, RemoteError), match=told):
                model.train(np.ones((1, 1)), np.ones((1, 1)))
            np.testing.assert_array_equal(model.get_parameters(), np.ones(9))

    run_in_threads(3, run)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parameters_need_no_gradient_and_parameters_are_read_only(strategy: str) -> None:
    """Whether they were gathered for the function or not."""

    def loss_and_grad(p: Any, b: Any) -> Any:
        with pytest.raises(ValueError, match="read-only"):
            p["a"] += 1
        return 1.0, {"b": np.ones(3)}, 1.0

    def run(comm: Any) -> None:
        function = mz.FunctionModel(GOOD, loss_and_grad, frozen=["a"])
        with sharded(strategy, comm, function, mz.SGD(lr=0.5), **PRIVATE) as model:
            model.train(np.ones((1, 1)), np.ones((1, 1)))
            named = model.named_parameters()
            np.testing.assert_array_equal(named["a"], GOOD["a"])
            np.testing.assert_array_equal(named["b"], GOOD["b"] - 0.5)
            gradients = model.compute_gradients(np.ones((1, 1)), np.ones((1, 1)), gather=True)
            assert set(gradients.values) == {0.0, 1.0}

    run_in_threads(2, run)


def writes_through_a_buffer(x: Any) -> None:
    """Like ctypes and compiled code that is given a buffer to work in."""
    (ctypes.c_double * x.size).from_buffer(x)[0] = 7.0


def multiplies(x: Any) -> None:
    x *= 2.0


@pytest.mark.parametrize(
    ("work", "told"), [(multiplies, "read-only"), (np.ndarray.sort, "read-only"), (writes_through_a_buffer, "writable")]
)
@pytest.mark.parametrize("which", [0, 1])
def test_a_function_cannot_change_the_users_samples(work: Any, told: str, which: int) -> None:
    """One that works in place, on one rank, gets an error that says so, and all ranks are told."""

    def run(comm: Any) -> None:
        def loss_and_grad(p: Any, batch: Any) -> Any:
            if comm.rank == 1:
                work(batch[which])
            return 1.0, GOOD, 1.0

        def predict(p: Any, x: Any) -> Any:
            work(x)

        model = sharded("zero3", comm, mz.FunctionModel(GOOD, loss_and_grad, predict=predict), **PRIVATE)
        batch = np.array([[3.0, 1.0], [2.0, 0.0]]), np.array([[3.0, 1.0], [2.0, 0.0]])
        kept = [values.copy() for values in batch]
        with model:
            for call in (model.train, model.compute_gradients, model.evaluate):
                with pytest.raises((ValueError, TypeError, RemoteError), match=told) as caught:
                    call(*batch)
                if comm.rank == 1:
                    assert "loss_and_grad gets are read-only: let it copy" in caught.value.__notes__[0]
            with pytest.raises((ValueError, TypeError), match=told) as caught:
                model.predict(batch[0])
            assert "predict gets are read-only" in caught.value.__notes__[0]
        for values, before in zip(batch, kept, strict=True):
            np.testing.assert_array_equal(values, before)
            assert values.flags.writeable, "only what the function sees is read-only"

    run_in_threads(2, run)


@UNCUT
def test_batches_that_are_no_arrays_are_one_grain_a_rank() -> None:
    def loss_and_grad(p: Any, batch: Any) -> Any:
        (numbers,), _ = batch
        return float(sum(numbers)), {"w": np.full(5, float(sum(numbers)))}, 1.0

    def run(comm: Any) -> None:
        for strategy, memory in layouts(3):
            wrapped = mz.FunctionModel({"w": np.zeros(5)}, loss_and_grad)
            with sharded(strategy, comm, wrapped, mz.SGD(lr=1.0), **memory) as model:
                assert model.train([{comm.rank}], None) == 1.0
                np.testing.assert_array_equal(model.get_parameters(), np.full(5, -1.0))

    run_in_threads(3, run)


@UNCUT
def test_such_a_grain_is_numbered_by_its_ranks_place_also_where_nodes_are_not_consecutive() -> None:
    def run(comm: Any) -> int:
        order = (0, 2, 1, 3)  # two nodes, dealt to like GPUs
        with ProcessGrid.create(comm) as grid:
            batch = redistribute(grid, "text", None, lambda n: n, lambda count: list(order[:count]), 1)
        return next(iter(batch.grains))

    assert run_in_threads(4, run) == [0, 2, 1, 3]


def test_a_prediction_that_is_missing_is_said_and_one_that_is_a_view_is_a_copy() -> None:
    def nothing(p: Any, b: Any) -> Any:
        return 1.0, {"w": np.ones(3)}, 1.0

    model = sharded("ddp", None, mz.FunctionModel({"w": np.ones(3)}, nothing))
    with model, pytest.raises(NotImplementedError, match=r"give one, FunctionModel\(..., predict=...\)"):
        model.predict(np.ones(1))
    with sharded("ddp", None, mz.FunctionModel({"w": np.ones(3)}, nothing, predict=lambda p, x: p["w"])) as model:
        seen = model.predict(np.ones(1))
        model.set_parameters(np.zeros(3))
        np.testing.assert_array_equal(seen, np.ones(3))
        assert model.predict(None) is None


def test_numbers_in_arrays_of_one_element_and_gradients_of_another_precision_are_taken() -> None:
    hashes = set()
    for loss, weight, kind in (
        (1.0, 2.0, np.float64),
        (np.ones((1, 1)), np.float32(2), np.float32),
        (1, np.int64(2), list),
    ):
        grads = {name: value.tolist() if kind is list else value.astype(kind) for name, value in GOOD.items()}
        with sharded("zero1", None, mz.FunctionModel(GOOD, lambda p, b, a=(loss, grads, weight): a)) as model:
            assert model.train(np.ones((2, 1)), np.ones((2, 1))) == 0.5
            hashes.add(model.parameters_sha256())
    assert len(hashes) == 1


def test_a_grain_of_weight_zero_pads_a_batch() -> None:
    def padded(p: Any, batch: Any) -> Any:
        used = batch[0][:, :1] > 0
        return float(used.sum()), {"a": np.full((2, 3), float(used.sum())), "b": np.ones(3)}, float(used.sum())

    with sharded("zero1", None, mz.FunctionModel(GOOD, padded), micro_batch=1) as model:
        assert model.train(np.array([[1.0], [0.0], [1.0]]), np.zeros((3, 1))) == 1.0
        assert model.last_step.weight == 2.0


@pytest.mark.parametrize("weight", [1e39, 1e-46])
def test_a_weight_that_the_gradients_type_cannot_hold_is_refused_and_nothing_changes(weight: float) -> None:
    start = {"w": np.ones(3, np.float32)}

    def run(comm: Any) -> None:
        for strategy in STRATEGIES:
            with sharded(strategy, comm, mz.FunctionModel(start, lambda p, b: (1.0, {"w": p["w"]}, weight))) as model:
                for call in (model.train, model.compute_gradients):
                    with pytest.raises(DataError, match=r"has weight .e.*, which is beyond float32 .*only the ratios"):
                        call(np.ones((1, 1)), np.ones((1, 1)))
                np.testing.assert_array_equal(model.get_parameters(), np.ones(3))

    run_in_threads(2, run)
