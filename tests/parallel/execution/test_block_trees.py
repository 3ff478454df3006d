"""Blocks may take and return trees of arrays: one process, every strategy and every schedule have the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import LayoutError, RemoteError
from mpizero.nn import Layer
from mpizero.sharding.pipeline import measure_blocks
from mpizero.testing import check_model, run_in_threads
from mpizero.types import EVALUATE
from tests.parallel.block_trees import Both, Halve, OfSides, Same, Sides, ends_in_a_tree, trees
from tests.parallel.models import MEMORIES, PRIVATE, part
from tests.parallel.parallel_layouts import Case, Way, pipelines, placed, trained, trained_alone, vectors

CASES = {
    "trees": Case(trees, batches=vectors(3, 11)),
    "checkpointed": Case(lambda: trees(checkpointed=True), batches=vectors(2, 11), config={"accumulate": 2}),
    "tree at the end": Case(ends_in_a_tree, batches=vectors(2, 11), config={"clip": 0.1}),
}


@cache
def alone(name: str) -> Any:
    return trained_alone(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_differences_of_the_loss(name: str) -> None:
    x, y = vectors(1, 8)[0]
    assert "agree" in str(check_model(CASES[name].model(), x, y))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_strategy_and_schedule_has_the_bits_of_one_process(ranks: int) -> None:
    ways = [*(Way(zero=zero) for zero in range(4)), *pipelines(ranks, 5)]
    for number, way in enumerate(ways):
        name, memory = list(CASES)[(number + ranks) % 3], MEMORIES[number % (2 + (ranks == 4))]
        found = run_in_threads(ranks, lambda comm, n=name, w=way, m=memory: trained(CASES[n], comm, w, **m))
        assert found == [alone(name)] * ranks, (name, way, memory)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_predictions_and_losses_of_trees_reach_every_stage(ranks: int) -> None:
    x, y = vectors(1, 6)[0]
    direct = mz.nn.evaluate(
        ends_in_a_tree(), mz.nn.bind(ends_in_a_tree(), mz.nn.initial_parameters(ends_in_a_tree())), x
    )

    def go(comm: Any) -> Any:
        with placed(CASES["tree at the end"], comm, Way(min(ranks, 2))) as model:
            found = model.evaluate(*part(model.batch_group, x, y))
            return found.loss_sum, found.accuracy, model.predict(x)

    for loss, accuracy, prediction in run_in_threads(ranks, go):
        assert type(prediction) is Sides
        np.testing.assert_allclose(prediction.even, direct.even, rtol=1e-13)
        np.testing.assert_allclose(prediction.odd, direct.odd, rtol=1e-13)
        np.testing.assert_allclose(loss, OfSides().forward(direct, y)[0], rtol=1e-13)
        assert accuracy is None


def test_blocks_are_timed_one_by_one() -> None:
    assert set(measure_blocks(trees(), *vectors(1, 4)[0])) == set(trees().blocks)


class Local(Layer):
    """Return what cannot be sent: ``what`` makes it of the input."""

    what: Any = staticmethod(lambda x: x)

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        return type(self).what(x), None

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return (None, None), None


class Stops(Halve):
    """Give no gradient at all."""

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return (None, [None, None], Both(None)), None


class Fickle(Same):
    """Return another structure for all micro-batches but the first."""

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        y, cache = super().forward(params, x, run)
        return (list(y) if run.first_sample else y), cache


def returns(what: Any) -> Layer:
    return type("Wrong", (Local,), {"what": staticmethod(what)})()


@pytest.mark.parametrize(
    ("block", "layer", "message"),
    [
        (
            "again",
            returns(lambda x: (x[0], 3)),
            r"what forward of block 'again' returns\[1\] is of type int; expected an",
        ),
        ("again", returns(lambda x: {2.5: x[0]}), r"block 'again' returns has the key 2.5"),
        (
            "again",
            returns(lambda x: (x[0].astype("longdouble"),)),
            r"block 'again' returns is \(.*128.*\): between pipeline stages go",
        ),
        ("again", returns(lambda x: (x[0], [Local])), r"returns\[1\]\[0\] is of type ABCMeta"),
        ("halve", Stops(), "no gradient reaches block 'again'"),
        ("again", Fickle(), "block 'again' returns is .* for which it was"),
    ],
)
def test_what_cannot_be_sent_or_differs_is_named_on_all_ranks(block: str, layer: Layer, message: str) -> None:
    chain = replace(trees(), blocks={**trees().blocks, block: layer})

    def go(comm: Any) -> None:
        model = placed(Case(lambda: chain), comm, Way(2, more={"cuts": [4]}), **PRIVATE)
        with model, pytest.raises((LayoutError, RemoteError, mz.errors.DataError), match=message):
            model.train(*vectors(1, 4)[0])

    run_in_threads(2, go)
