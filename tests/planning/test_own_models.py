"""Plans of models that nobody can look into: what the library holds and sends, and a word about the rest."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError
from mpizero.tools.plan.plan import TrainingPlan
from mpizero.types import EVALUATE, Array, Init, ParameterSpec
from tests.parallel.models import MEMORIES
from tests.parallel.parallel_layouts import points
from tests.planning.test_costs import OPTIMIZERS, Job, batches, check_on_threads, job, planned


def function() -> mz.FunctionModel:
    """A linear model of two arrays, one of which is too small for a unit of its own."""

    def squares(parameters: Any, batch: Any) -> Any:
        x, y = batch
        error = x @ parameters["weight"] + parameters["bias"] - y[:, np.newaxis]
        gradients = {"weight": 2 * x.T @ error, "bias": 2 * error.sum(axis=0)}
        return float((error**2).sum()), gradients, float(len(x))

    return mz.FunctionModel({"weight": np.full((6, 50), 0.1), "bias": np.zeros(50)}, squares)


def in_place() -> mz.FunctionModel:
    """A linear model of two units, which writes its gradients into the engine's memory."""

    def squares(parameters: Any, batch: Any, gradients: Any) -> Any:
        x, y = batch
        error = x @ parameters["left"] + x @ parameters["right"] - y[:, np.newaxis]
        for name in gradients:
            np.matmul(2 * x.T, error, out=gradients[name])
        return float((error**2).sum()), float(len(x))

    return mz.FunctionModel({name: np.full((6, 700), 0.1) for name in ("left", "right")}, squares, in_place=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_black_box_holds_and_sends_what_was_planned(ranks: int) -> None:
    for zero in range(4):
        for number, memory in enumerate(MEMORIES):
            turn = zero + number + ranks
            if turn % 2:  # so that all numbers of ranks together have each stage with each model and memory
                continue
            parts = {"config": memory}, batches(ranks)[turn % 5], OPTIMIZERS[turn % 3]
            model = (function, in_place)[number % 2]
            check_on_threads(job(*parts, zero=zero, model=model, data=points), ranks)


def test_of_a_black_box_what_its_function_does_is_not_told() -> None:
    whole = 8 * 350
    for ranks, zero, copied in ((2, 3, whole), (2, 2, 0), (1, 3, 0)):
        plan = planned(job({"config": MEMORIES[1]}, zero=zero, model=function, data=points), ranks)
        (rank, *_) = plan.by_rank
        assert "a FunctionModel" not in plan.not_counted
        assert "FunctionModel is a black box" in plan.not_counted
        assert rank.operations is None
        assert "activations" not in rank.memory
        assert (rank.memory["working arrays"].per_rank if copied else 0) == copied  # a shard has no memory for all
        assert "working arrays" in rank.memory or not copied
    with pytest.raises(ConfigError, match="black box"):
        _ = planned(Job(model=function, data=points, parallel_layout={"pipeline": 2}), 2).by_rank


class Stubborn(mz.nn.Layer):
    """A user's layer with a matrix, that cannot work with zeros if it is ``odd``."""

    def __init__(self, odd: bool) -> None:
        self.odd = odd

    def specs(self) -> tuple[ParameterSpec, ...]:
        return (ParameterSpec("weight", (6, 6), Init("ones")),)

    def forward(self, params: Any, x: Array, run: Any = EVALUATE) -> tuple[Array, Any]:
        if self.odd and not np.any(params["weight"]):
            raise ArithmeticError("a matrix of zeros")
        return x @ params["weight"], x

    def backward_input(self, params: Any, cache: Any, dy: Array) -> tuple[Array, Any]:
        return dy @ params["weight"].T, dy

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        np.matmul(cache.T, pending, out=grads["weight"])


def blocks(odd: bool) -> Any:
    layers = {"own": mz.nn.Sequential([Stubborn(odd)]), "out": mz.nn.Linear(6, 3)}
    return SimpleNamespace(blocks=layers, loss=mz.nn.CrossEntropy(), dtype=np.dtype("float64"), seed=0)


def test_blocks_that_cannot_run_alone_are_planned_without_their_arrays() -> None:
    plan = planned(Job(model=lambda: blocks(True), data=points), 2)
    assert "block 'own' cannot be tried alone" in plan.not_counted
    assert "a matrix of zeros" in plan.not_counted
    assert plan.by_rank[0].memory["parameters"].per_rank
    check_on_threads(Job(model=lambda: blocks(True), data=points, zero=3), 2)
    with pytest.raises(ConfigError, match="block 'own' cannot be tried alone"):
        _ = planned(Job(model=lambda: blocks(True), data=points, parallel_layout={"pipeline": 2}), 2).by_rank


class Elsewhere(Stubborn):
    """A layer whose arrays no tracer of Python's memory sees, as those of PyTorch."""

    memory_of = "PyTorch"


@pytest.mark.parametrize("way", [{}, {"pipeline": 2}])
def test_arrays_in_the_memory_of_another_library_are_not_told_as_none(way: dict[str, int]) -> None:
    def model() -> Any:
        layers = {"own": Elsewhere(False), "out": mz.nn.Linear(6, 3)}
        return SimpleNamespace(blocks=layers, loss=mz.nn.CrossEntropy(), dtype=np.dtype("float64"), seed=0)

    job = Job(model=model, data=points, parallel_layout=way)
    plan = planned(job, 2)
    assert plan.not_counted == "block 'own' keeps them in the memory of PyTorch"
    assert not {"activations", "working arrays"} & plan.by_rank[0].memory.keys()
    check_on_threads(job, 2)


def test_products_of_a_users_layer_that_does_not_count_them_are_not_told_as_none() -> None:
    plan = planned(Job(model=lambda: blocks(False), data=points), 2)
    assert not plan.not_counted
    assert plan.by_rank[0].operations is None
    assert plan.by_rank[0].memory["activations"].per_rank


def test_a_plan_can_be_sent_to_other_processes():
    config = mz.ShardingConfig(comm="self", micro_batch=1)
    x, y = np.zeros((4, 4), np.float32), np.zeros(4, int)
    plan = TrainingPlan(
        model=mz.nn.MLP(4, [8], 3), optimizer=mz.SGD(0.1), config=config, row=None, ranks=2, global_batch=4, x=x, y=y
    )
    assert pickle.loads(pickle.dumps(plan)).message(1) == plan.message(1) == 0.0
