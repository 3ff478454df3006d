"""How many samples a model's matrix products need to be fast: a number that depends on the model's shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.nn import GPT, MLP, MeanSquaredError
from mpizero.nn.models import efficient_samples
from mpizero.types import EVALUATE, ParameterSpec, Run


def gpt(dim: int, sequence: int, **more: Any) -> GPT:
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
def test_products_have_as_many_rows_as_the_widest_weight_has_columns_from_512_to_1024(model: Any, rows: int) -> None:
    samples = efficient_samples(model)
    assert samples is not None
    per_sample = 1 if isinstance(model, MLP) else model.sequence
    assert samples == pytest.approx(rows / per_sample, rel=0.01)


def test_small_models_get_more_samples_so_that_each_block_has_work() -> None:
    for model in (MLP(8, (16, 16), 4), gpt(16, 16)):
        samples, blocks = efficient_samples(model), len(model.blocks)
        assert samples is not None
        work = samples * sum(o.total for o in mz.nn.model_operations(model, model.sample_shape).values())
        assert 2**24 * (blocks - 1) <= work < 2**25 * blocks


def test_a_table_that_is_no_product_does_not_count() -> None:
    assert efficient_samples(gpt(256, 128, tied=False)) == efficient_samples(gpt(256, 128))


@dataclass(frozen=True)
class Scale(mz.nn.Layer):
    """A layer of a user's own, without a product."""

    def specs(self) -> tuple[ParameterSpec, ...]:
        return (ParameterSpec("by", (1,)),)

    def forward(self, params: Any, x: Any, run: Run = EVALUATE) -> Any:
        return x * params["by"], x

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return dy * params["by"], dy

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        raise NotImplementedError


class Own:
    """A user's own model."""

    blocks = {"scale": Scale()}
    loss, dtype, seed = MeanSquaredError(), np.dtype("float32"), 0


def test_nothing_is_known_of_models_that_do_not_say_what_they_compute() -> None:
    own, sized = Own(), Own()
    sized.sample_shape = (3,)  # type: ignore[attr-defined]
    box = mz.FunctionModel({"w": np.zeros(3)}, lambda p, batch: (0.0, {"w": p["w"]}, 1.0))
    assert [efficient_samples(model) for model in (own, sized, box)] == [None, None, None]


def test_numbers_of_numpy_give_a_number_of_python() -> None:
    for model in (gpt(64, 16, vocabulary=np.int64(31)), MLP(np.int64(8), (16,), np.int32(4))):
        assert type(efficient_samples(model)) is int


def test_a_forward_pass_that_is_computed_again_changes_nothing() -> None:
    for dim in (16, 256):
        again = gpt(dim, 16, activation_checkpointing=True)
        assert efficient_samples(again) == efficient_samples(gpt(dim, 16))


class Normed(mz.nn.Layer):
    """A layer of a user's own that divides by a norm, and does not count the products of its parts."""

    def __init__(self) -> None:
        self.inner = mz.nn.Linear(8, 8)

    def children(self) -> Any:
        return {"inner": self.inner}

    def specs(self) -> Any:
        return self.inner.specs()

    def forward(self, params: Any, x: Any, run: Run = EVALUATE) -> Any:
        y, cache = self.inner.forward(params, x / np.linalg.norm(x), run)
        return y, cache

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return dy, None

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape


@pytest.mark.filterwarnings("error")
def test_no_warning_and_no_setting_of_numpy_changes_the_number() -> None:
    class Owned(Own):
        blocks = {"normed": Normed()}
        sample_shape = (8,)

    found = efficient_samples(Owned())
    assert found is not None
    with np.errstate(all="raise"):
        assert efficient_samples(Owned()) == found


@pytest.mark.parametrize("what", [None, 7, "raises"])
def test_a_count_that_fails_is_no_count(what: Any) -> None:
    class Broken(Scale):
        def operations(self, shape: tuple[int, ...]) -> Any:
            return {}["none"] if what == "raises" else what

        def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
            return shape

    class Owned(Own):
        blocks = {"broken": Broken()}
        sample_shape = (8,)

    assert efficient_samples(Owned()) is None
    for shape in (8, None, (None, 8), lambda: (8,)):
        model = Own()
        model.sample_shape = shape  # type: ignore[attr-defined]
        assert efficient_samples(model) is None
