"""Elementary functions: within 1 ulp of long doubles, C's special values, and one sha256 of their bits on every CPU."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest

from mpizero._util.numbers import ordered_sum
from mpizero.kernels import elementary
from mpizero.kernels.elementary import power
from tests.golden.elementary_cases import FUNCTIONS, HASHES, evaluated, hash_of, largest_error

needs_long_double = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no wider type")


@needs_long_double
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_within_one_unit_in_the_last_place(name):
    assert largest_error(name, 100_000, seed=3)[0] < 0.9


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_bits_are_those_of_every_cpu(name):
    assert hash_of(name, 20_000) == json.loads(HASHES.read_text())[name]


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 5e-324, 2.0**-1022, 1e308, -1e308, 709.78, 709.79]


def by_c(function, x):
    """Return what C's function returns, where Python raises an exception instead."""
    try:
        return function(x)
    except OverflowError:
        return math.inf
    except ValueError:  # log(0) is -infinity, log(-1) NaN
        return -math.inf if x == 0 else math.nan


@pytest.mark.parametrize(("name", "function"), [("exp", math.exp), ("log", math.log), ("tanh", math.tanh)])
def test_special_values_are_those_of_c_in_float64(name, function):
    found = evaluated(f"{name}_double", np.array(SPECIAL))
    for x, value in zip(SPECIAL, found, strict=True):
        expected = by_c(function, x)
        assert value == pytest.approx(expected, rel=3e-16, abs=0, nan_ok=True), x
        assert math.copysign(1, value) == math.copysign(1, expected) or math.isnan(expected), x


def test_special_values_of_log1p_are_those_of_c():
    places = [x for x in SPECIAL if not x < 0]
    np.testing.assert_array_equal(evaluated("log1p_double", np.array(places)), np.log1p(places))


def test_special_values_are_those_of_c_in_float32():
    special = np.array([np.nan, np.inf, -np.inf, 0.0, 3.4e38, -3.4e38, 88.72, 88.73], np.float32)
    with np.errstate(over="ignore"):
        expected = np.exp(special.astype(float)).astype("f")
    np.testing.assert_allclose(evaluated("exp_single", special), expected, rtol=1e-7)
    np.testing.assert_allclose(evaluated("tanh_single", special), np.tanh(special.astype(float)), rtol=1e-7)
    assert np.signbit(evaluated("tanh_single", np.array([-0.0], np.float32)))[0]


@pytest.mark.parametrize("name", ["cos", "sin"])
@pytest.mark.parametrize("kind", ["single", "double"])
def test_quarters_of_a_turn_are_exact(name, kind):
    turns = np.array([0, 0.25, 0.5, 0.75, 1], np.float32 if kind == "single" else np.float64)
    expected = {"cos": [1, 0, -1, 0, 1], "sin": [0, 1, 0, -1, 0]}[name]
    np.testing.assert_array_equal(evaluated(f"{name}_turn_{kind}", turns), expected)


@pytest.mark.parametrize("base", [0.9, 0.999, 0.95, 1e-3, 1 - 2**-53])
@pytest.mark.parametrize("exponent", [1, 2, 7, 1000])
def test_a_power_is_rounded_once(base, exponent):
    assert power(base, exponent) == float(Fraction(base) ** exponent)


def test_a_power_of_a_very_large_exponent_is_zero_and_takes_no_time():
    assert power(0.999, 10**12) == 0.0
    assert power(0.0, 3) == 0.0


def test_plain_python_has_the_bits_of_compiled_kernels():
    x = np.array([0.1, 0.7, 1.3, 5.5])
    functions = {"exp": elementary.exponential, "log": elementary.logarithm, "tanh": elementary.hyperbolic_tangent}
    for name, function in functions.items():
        with np.errstate(all="ignore"):
            plain = [float(function(value, np.float64)) for value in x]
        assert plain == evaluated(f"{name}_double", x).tolist()


def test_sums_of_numbers_are_rounded_alike_by_every_python():
    assert ordered_sum([1e16, 1.0, -1e16]) == 0.0  # from Python 3.12 on, sum() has 1.0
