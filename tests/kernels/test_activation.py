from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import layers
from mpizero.nn.layers import named_activation
from tests.support.reference import layers as reference

NAMES = ("gelu", "silu", "relu", "tanh")
OF_OUTPUT = {name: named_activation(name).of_output for name in NAMES}
DTYPES = (np.float32, np.float64)
# Units of 2**-24, the largest relative rounding error of float32.
UNIT = 2.0**-24


def relative_error(name, low, high):
    x = np.linspace(low, high, 400_003).astype(np.float32)
    x = x[np.abs(x) > 1e-30]
    got, want = np.empty_like(x), np.empty(x.size)
    getattr(layers, name)(x, got)
    getattr(reference, name)(x.astype(np.float64), want)
    return np.max(np.abs(got - want) / np.abs(want)) / UNIT


@pytest.mark.parametrize(
    ("name", "low", "high", "units"),
    [
        ("tanh", -12, 12, 4),
        ("silu", -20, 20, 5),
        ("gelu", -1, 12, 6),
        # The exponent 2 u is rounded to float32, so the tail loses what the exponent has in whole digits.
        ("gelu", -5, -1, 48),
    ],
)
def test_float32_is_accurate_to_a_few_units_in_the_last_place(name, low, high, units):
    assert relative_error(name, low, high) < units


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_large_values_propagate_forward_and_backward(name, dtype):
    large = 1e38 if dtype is np.float32 else 1e300
    x = np.array([np.nan, np.inf, large, 90.0, -90.0, -large, 0.0, -0.0], dtype)
    y, dx = np.empty_like(x), np.empty_like(x)
    getattr(layers, name)(x, y)
    getattr(layers, f"{name}_backward")(y if OF_OUTPUT[name] else x, np.ones_like(x), dx)
    assert np.isnan(y[0])
    flat = name == "tanh"
    np.testing.assert_allclose(y[1:4], [1, 1, 1] if flat else x[1:4])
    np.testing.assert_allclose(y[4:], [-1, -1, 0, 0] if flat else 0, atol=1e-30)
    np.testing.assert_allclose(dx[1:4], 0 if flat else 1, atol=1e-30)
    np.testing.assert_allclose(dx[4:6], 0, atol=1e-30)
    dy = np.array([1, np.nan, 1], dtype)
    getattr(layers, f"{name}_backward")(np.ones(3, dtype), dy, dy)
    assert np.isnan(dy).tolist() == [False, True, False]


@pytest.mark.parametrize("name", NAMES)
def test_bits_depend_neither_on_the_cut_nor_on_working_in_place(name):
    rng = np.random.default_rng(1)
    x, dy = (3 * rng.normal(size=(2, 2500))).astype(np.float32)
    y, dx = np.empty_like(x), np.empty_like(x)
    getattr(layers, name)(x, y)
    getattr(layers, f"{name}_backward")(x, dy, dx)
    pieces, inside = np.empty_like(x), dy.copy()
    for start, stop in ((0, 3), (3, 1111), (1111, 1112), (1112, 2500)):
        getattr(layers, name)(x[start:stop], pieces[start:stop])
    getattr(layers, f"{name}_backward")(x, inside, inside)
    assert pieces.tobytes() == y.tobytes()
    assert inside.tobytes() == dx.tobytes()
    getattr(layers, name)(x, x)
    assert x.tobytes() == y.tobytes()


def test_a_bias_may_be_added_in_place_before_an_activation():
    x, bias = np.random.default_rng(2).normal(size=(5, 1030)).astype(np.float32), np.ones(1030, np.float32)
    z, apart, inside = np.empty((3, 5, 1030), np.float32)
    layers.bias_gelu(x, bias, z, apart)
    layers.bias_gelu(x, bias, x, inside)
    assert (x.tobytes(), inside.tobytes()) == (z.tobytes(), apart.tobytes())
