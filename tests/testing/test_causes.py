"""What `verify` says of planted faults: the right cause, the right rank, and no cause that the numbers do not bear."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero._util.numbers import Rounding
from mpizero.tools.verify.verdicts import GradientEvidence, diagnose_gradient, diagnose_norm
from tests.testing import planted
from tests.testing.planted import causes, compared, finding, gpt, texts

DTYPES = ("float32", "float64")
#: A layout of every way in which gradients travel, and their ranks are dealt grains.
EXACT = ("ddp*2", "zero1*3, private", "zero2*3", "zero3*4", "zero2*4, pipeline=2", "zero1*4, ranks_per_node=2")


def in_turn(variants, layouts=EXACT):
    """Layouts with one of the variants each, in turn."""
    return [(layout, *variants[number % len(variants)]) for number, layout in enumerate(layouts)]


def model(dtype, **changes):
    return lambda comm: gpt(dtype=dtype, **changes)


def first(*args, **settings):
    """What is found in one step of five samples: these faults are in every one."""
    return finding(*args, batches=texts(1, 5), **settings)


# ------------------------------------------------------------------ gradients of one rank


@pytest.mark.parametrize(
    ("layout", "dtype", "size"), in_turn([("float32", 1e-6), ("float64", 1e-6), ("float64", 1e-12)])
)
def test_noise_without_a_seed_is_no_rounding_however_small(monkeypatch, layout, dtype, size):
    planted.unseeded_noise(monkeypatch, size)
    found = first(layout, model=model(dtype), clip=0.1)
    assert (found.step, found.quantity) == (1, "gradient before clipping")
    assert causes(found) == {"no function of", "race"}
    assert (found.role, found.ranks) == ("computed by", (1,))


@pytest.mark.parametrize(
    ("layout", "dtype", "factor"), in_turn([("float32", 1 + 1e-6), ("float64", 1 + 1e-9)], EXACT[::2])
)
def test_a_gradient_that_depends_on_the_rank_names_that_rank_and_its_factor(monkeypatch, layout, dtype, factor):
    planted.rank_factor(monkeypatch, factor)
    found = first(layout, model=model(dtype))
    assert (found.step, found.quantity) == (1, "gradient")
    assert causes(found) == {"depends on the rank"}
    assert (found.role, found.ranks) == ("computed by", (1,))
    assert f"{np.dtype(dtype).type(factor) - 1:.2g}"[:1] in found.seen
    assert "times those of one process" in found.seen


@pytest.mark.parametrize(("layout", "dtype", "size"), in_turn([("float32", 1e-6), ("float64", 1e-12)], EXACT[1::3]))
def test_noise_keyed_by_the_rank_names_the_ranks_that_have_another(monkeypatch, layout, dtype, size):
    planted.rank_keyed_noise(monkeypatch, size=size)
    found = first(layout, model=model(dtype))
    everyone = "pipeline" in layout  # of the last stage computes other gradients: the rank need not be the reason
    assert causes(found) == (set() if everyone else {"depends on the rank"})
    assert found.role == "computed by"
    assert 0 not in found.ranks
    assert found.ranks


@pytest.mark.parametrize(("layout", "dtype"), [("ddp*2", "float64"), ("zero2*3", "float32")])
def test_an_offset_of_one_ranks_gradient_is_no_wrong_count(monkeypatch, layout, dtype):
    planted.rank_offset(monkeypatch, 1e-3)
    found = first(layout, model=model(dtype))
    assert causes(found) == {"depends on the rank"}
    assert (found.role, found.ranks) == ("computed by", (1,))


# ------------------------------------------------------------------ sums


@pytest.mark.parametrize(
    ("layout", "dtype", "offset"),
    [("ddp*2", "float32", 1e-4), ("zero1*3, private", "float64", 1e-9), ("zero2*3", "float64", 1e-4)],
)
def test_an_offset_of_the_sum_is_told_without_a_cause_and_not_blamed_on_the_owner(monkeypatch, layout, dtype, offset):
    planted.sum_offset(monkeypatch, offset)
    found = first(layout, model=model(dtype), clip=0.1)
    assert (found.step, found.quantity) == (1, "gradient before clipping")
    assert causes(found) == set()
    assert found.role == "owned by"
    assert "what ranks computed has the same bits" in found.seen


@pytest.mark.parametrize(("layout", "dtype"), [("ddp*3, private", "float32"), ("zero1*3, private", "float64")])
def test_another_order_of_operations_is_called_rounding(monkeypatch, layout, dtype):
    planted.another_order(monkeypatch)
    found = first(layout, model=model(dtype), clip=0.1)
    assert causes(found) == {"another order"}
    assert found.role == "owned by"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_divisor_that_is_no_count_is_told_as_a_factor_without_a_cause(monkeypatch, dtype):
    factor = np.dtype(dtype).type(1.00005)
    planted.divide_by(monkeypatch, factor=lambda ranks: factor if ranks > 1 else 1)
    found = first("zero2*3", model=model(dtype))
    assert causes(found) == set()
    assert "no ratio of the counts" in found.seen


# ------------------------------------------------------------------ layouts that round


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("tensor=2, tiles=1", "float32"),
        ("context=2, tiles=1", "float32"),
        ("tensor=2, pipeline=2, data=2, tiles=1", "float64"),
    ],
)
def test_layouts_that_round_are_within_rounding_of_their_type(layout, dtype):
    (_, verdict) = compared(layout, model=model(dtype, dropout=0.1), clip=0.1, batches=texts(1, 5)).verdicts
    assert verdict.finding is None
    assert 0 < verdict.largest < 0.2 * verdict.tolerance
    assert verdict.tolerance < 200 * np.finfo(dtype).eps


def test_where_layouts_round_rounded_sums_may_differ_by_units_of_bfloat16():
    settings = {"model": model("float32", dim=48), "wire": "bfloat16"}
    (_, verdict) = compared("tensor=2, tiles=1", batches=texts(1, 5), **settings).verdicts
    assert verdict.finding is None
    assert verdict.tolerance < verdict.largest < 2.0**-7
    assert first("tensor=2, tiles=1", tolerance=verdict.tolerance, **settings).quantity == "gradient"


@pytest.mark.parametrize("layout", ["zero2*3", "tensor=2, tiles=1"])
def test_a_wrong_divisor_of_rounded_sums_is_found(monkeypatch, layout):
    planted.divide_by(monkeypatch, factor=lambda ranks: 1.05 if ranks > 1 else 1)
    assert first(layout, model=model("float32"), wire="bfloat16").quantity == "gradient"


@pytest.mark.parametrize(
    ("plant", "size", "layout", "cause"),
    [
        (planted.unseeded_noise, 1e-10, "tensor=2, pipeline=2, data=2, tiles=1", {"no function of", "race"}),
        (planted.rank_factor, 1 + 1e-9, "tensor=2, data=2", {"depends on the rank"}),
    ],
)
def test_noise_and_factors_of_a_rank_are_found_in_layouts_that_round(monkeypatch, plant, size, layout, cause):
    plant(monkeypatch, size)
    found = first(layout, model=model("float64"))
    assert causes(found) == cause
    assert (found.role, found.ranks) == ("computed by", (1,))


# ------------------------------------------------------------------ patterns alone

COUNTS = {"ranks": 4, "samples": 10}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_is_one_number_that_every_element_bears(dtype):
    rounding = Rounding(dtype, 64.0)
    values = np.random.default_rng(0).standard_normal(50).astype(dtype)
    one = values.dtype.type
    assert rounding.factor([values / one(3)], [values]) == pytest.approx(1 / 3)
    assert rounding.factor([values + one(1e-4)], [values]) is None
    assert rounding.factor([values], [values]) is None
    assert rounding.factor([values[:1] * 2], [values[:1]]) is None  # one element has a factor with any other
    assert rounding.factor([values * one(1 + 20 * rounding.epsilon)], [values]) is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_grows_with_the_length_of_sums_and_the_type(dtype):
    short, long = Rounding(dtype, 64.0), Rounding(dtype, 1e6)
    assert short.of_sums < long.of_sums < 400 * np.finfo(dtype).eps
    assert not short.near(1 + 2 * short.of_sums, 1.0)
    assert short.near(1 + short.of_sums / 2, 1.0)


def test_a_norm_is_blamed_on_squares_counted_again_only_by_their_number():
    rounding = Rounding("float64", 64.0)
    assert "squares counted 4 times, the number of ranks" in diagnose_norm(2.0, 1.0, rounding, COUNTS).cause
    told = diagnose_norm(1.00005, 1.0, rounding, COUNTS)
    assert told.cause is None
    assert "1 + 0.0001 times" in told.pattern
    assert diagnose_norm(1 + 4e-16, 1.0, rounding, COUNTS).cause.startswith("numbers added in another order")


def test_ratios_of_counts_are_counts():
    values = {"w": np.arange(1.0, 9.0), "b": np.ones(3)}

    def told(factor):
        found = {name: value * factor for name, value in values.items()}
        none = {name: np.zeros_like(value) for name, value in values.items()}
        return diagnose_gradient(
            GradientEvidence(found, found, values, none, {}, [], tensors=2, rounding=Rounding("float64", 8.0)), COUNTS
        )

    assert "every gradient is 10/4 of what it must be" in told(2.5).cause
    assert "4 times too small" in told(0.25).cause
    assert told(2.5000001).cause is None
    assert "no ratio of the counts here (4 ranks, 10 samples)" in told(2.5000001).pattern
