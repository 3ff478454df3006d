"""Arrays in another byte order than this machine's are the same numbers, on one rank and on many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero._util.pytree import map_leaves
from mpizero.nn import Layer
from mpizero.testing import run_in_threads
from mpizero.types import EVALUATE, Array
from tests.parallel.models import gpt, hard_function, layouts, part, sharded, tokens, vectors
from tests.parallel.parallel_layouts import Case, Chain, Way, known, trained, trained_alone


def foreign(tree: Any) -> Any:
    """The same numbers in the other byte order."""
    return map_leaves(lambda array: array.astype(array.dtype.newbyteorder()), tree)


def particular() -> mz.FunctionModel:
    """The function of arrays, which refuses those in another byte order and returns its gradients in that."""
    plain = hard_function()

    def loss_and_grad(p: Any, batch: Any) -> Any:
        assert all(array.dtype.isnative for array in (*p.values(), *batch))
        loss, gradients, weight = plain.loss_and_grad(p, batch)
        return loss, foreign(dict(gradients)), weight

    def predict(p: Any, x: Array) -> Array:
        assert x.dtype.isnative
        return plain.predict(p, x)

    return mz.FunctionModel(foreign(dict(plain.parameters)), loss_and_grad, predict=predict, frozen=["scale"])


def told(model: Any, order: Any, cuts: list[list[int]] | None, comm: Any) -> Any:
    """What a model makes of samples and parameters, by every call that takes some."""
    first, second = (
        order(part(comm, *vectors(count), None if cuts is None else cuts[number]))
        for number, count in ((0, 18), (1, 11))
    )
    named, vector = model.named_parameters(), model.get_parameters()
    model.set_parameters(order(vector / 2))
    model.load_named(order({name: array + 1 for name, array in named.items()}))
    losses = [model.train(*first), model.train(*second)]
    gradient = model.compute_gradients(*first)
    predicted = model.predict(order(vectors(5)[0]))
    return losses, gradient.loss, model.evaluate(*second)[:2], predicted.tobytes(), model.parameters_sha256()


def expected() -> Any:
    model, _ = sharded("ddp", None, hard_function(), micro_batch=4)
    with model:
        return told(model, lambda tree: tree, None, None)


def check_ranks(comm: Any, size: int) -> None:
    """All samples of the second batch are on the last rank, so they have to be sent."""
    wanted = known(comm, expected)
    cuts = [[18 // size] * (size - 1) + [18 - 18 // size * (size - 1)], [0] * (size - 1) + [11]]
    for strategy, memory in layouts(size):
        model, _ = sharded(strategy, comm, particular(), micro_batch=4, **memory)
        with model:
            assert told(model, foreign, cuts, comm) == wanted, (strategy, memory)


@pytest.mark.mpi
def test_any_byte_order_gives_the_numbers_of_one_process_on_any_ranks_strategy_and_memory(world: Any) -> None:
    check_ranks(world, world.size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_same_in_threads(size: int) -> None:
    run_in_threads(size, lambda comm: check_ranks(comm, size))


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

    assert run(foreign) == run(lambda tree: tree)


def turning() -> Any:
    layers = {"one": mz.nn.Linear(6, 5), "turned": Turned(), "two": mz.nn.Linear(5, 3)}
    return Chain(layers, mz.nn.CrossEntropy())


def test_blocks_may_pass_on_arrays_of_any_byte_order() -> None:
    rng = np.random.default_rng(0)
    case = Case(turning, batches=[(rng.normal(size=(6, 6)).astype(np.float32), rng.integers(0, 3, 6))])
    wanted = trained_alone(case)
    for way in (Way(pipeline=2), Way(pipeline=3)):
        assert all(
            found == wanted for found in run_in_threads(way.pipeline, lambda comm, way=way: trained(case, comm, way))
        )
