"""How many samples a model needs to be fast: numbers that depend on the model's shapes alone."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.nn import GPT, MLP, MeanSquaredError
from mpizero.nn.models import efficient_samples
from mpizero.types import EVALUATE
from tests.nn.groups import Model, Mute


def gpt(dim, sequence, **more):
    return GPT(dim, 2, max(1, dim // 64), sequence, **{"vocabulary": 256, **more})


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (gpt(256, 128), 512),  # the largest weight, 256 x 1,024, is as wide as a square one of 512
        (gpt(512, 128), 1024),
        (gpt(1024, 128), 1024),
        (gpt(1024, 2048), 2048),  # one sample
        (MLP(784, (1024, 1024), 10), 1024),
        (MLP(700, (700, 700), 10), 700),
    ],
    ids=["gpt 256", "gpt 512", "gpt 1024", "long", "mlp 1024", "mlp 700"],
)
def test_products_have_as_many_rows_as_the_widest_weight_has_columns_from_512_to_1024(model, rows):
    per_sample = 1 if isinstance(model, MLP) else model.sequence
    assert efficient_samples(model)[0] == pytest.approx(rows / per_sample, rel=0.01)


def test_small_models_get_more_samples_so_that_each_block_has_work():
    for model in (MLP(8, (16, 16), 4), gpt(16, 16)):
        operations = mz.nn.model_operations(model, model.sample_shape).values()
        efficient, least = efficient_samples(model)
        work = efficient * sum(each.total for each in operations)
        assert 2**24 * (len(model.blocks) - 1) <= work < 2**25 * len(model.blocks)
        assert least == efficient // 8 > 1
    assert efficient_samples(MLP(784, (1024, 1024), 10))[1] == 1, "few rows make its products slow, not its calls"


def test_neither_tables_that_are_no_products_nor_forward_passes_that_are_repeated_count():
    for dim in (16, 256):
        for more in ({"tied": False}, {"activation_checkpointing": True}):
            assert efficient_samples(gpt(dim, 128, **more)) == efficient_samples(gpt(dim, 128))


def test_numbers_of_numpy_give_a_number_of_python():
    for model in (gpt(64, 16, vocabulary=np.int64(31)), MLP(np.int64(8), (16,), np.int32(4))):
        assert list(map(type, efficient_samples(model))) == [int, int]


class Normed(Mute):
    """A user's layer that divides by a norm, and does not count the products of its parts."""

    def __init__(self):
        self.inner = mz.nn.Linear(8, 8)

    def children(self):
        return {"inner": self.inner}

    def forward(self, params, x, run=EVALUATE):
        return self.inner.forward(params["inner"], x / np.linalg.norm(x), run)


def own(layer, sample_shape=None):
    """A user's own model of one layer."""
    model = Model({"only": layer}, MeanSquaredError())
    if sample_shape is not None:
        model.sample_shape = sample_shape
    return model


def test_nothing_is_known_of_models_that_do_not_say_what_they_compute():
    box = mz.FunctionModel({"w": np.zeros(3)}, lambda p, batch: (0.0, {"w": p["w"]}, 1.0))
    shapes = (None, (3,), 8, (None, 8), lambda: (8,))
    assert {efficient_samples(model) for model in (box, *(own(Mute(), shape) for shape in shapes))} == {(None, 1)}


def test_no_warning_and_no_setting_of_numpy_changes_the_number():
    found = efficient_samples(own(Normed(), (8,)))
    assert found[0] is not None
    with np.errstate(all="raise"):
        assert efficient_samples(own(Normed(), (8,))) == found


@pytest.mark.parametrize("what", [None, 7, "raises"])
def test_a_count_that_fails_is_no_count(what):
    class Broken(Mute):
        def operations(self, shape):
            return {}["none"] if what == "raises" else what

        def output_shape(self, shape):
            return shape

    assert efficient_samples(own(Broken(), (8,))) == (None, 1)
