from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import layers
from tests.support.reference import layers as reference

NAMES = ("gelu", "silu", "relu", "tanh")
DTYPES = (np.float32, np.float64)
# Units of 2**-24, the largest relative rounding error of float32.
UNIT = 2.0**-24


def tolerance(dtype):
    return {"rtol": 2e-6, "atol": 2e-6} if dtype is np.float32 else {"rtol": 1e-12, "atol": 1e-13}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 7, 33, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_derivatives_agree_with_the_oracle(name, size, dtype):
    rng = np.random.default_rng(size)
    x, dy = (4 * rng.normal(size=(2, size))).astype(dtype)
    got, want = np.full(size, 7, dtype), np.empty(size, dtype)
    getattr(layers, name)(x, got)
    getattr(reference, name)(x, want)
    np.testing.assert_allclose(got, want, **tolerance(dtype))
    getattr(layers, f"{name}_backward")(x, dy, got)
    getattr(reference, f"{name}_backward")(x, dy, want)
    np.testing.assert_allclose(got, want, **tolerance(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_derivative_is_the_limit_of_differences(name):
    x = np.linspace(-6, 6, 1002)
    step, one, got = 1e-5, np.ones_like(x), np.empty_like(x)
    above, below = np.empty_like(x), np.empty_like(x)
    getattr(reference, name)(x + step, above)
    getattr(reference, name)(x - step, below)
    getattr(layers, f"{name}_backward")(x, one, got)
    np.testing.assert_allclose(got, (above - below) / (2 * step), atol=1e-8)


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
def test_nan_and_large_values_propagate(name, dtype):
    large = 1e38 if dtype is np.float32 else 1e300
    x = np.array([np.nan, np.inf, large, 90.0, -90.0, -large, 0.0, -0.0], dtype)
    y, dx = np.empty_like(x), np.empty_like(x)
    getattr(layers, name)(x, y)
    getattr(layers, f"{name}_backward")(x, np.ones_like(x), dx)
    assert np.isnan(y[0])
    flat = name == "tanh"
    np.testing.assert_allclose(y[1:4], [1, 1, 1] if flat else x[1:4])
    np.testing.assert_allclose(y[4:], [-1, -1, 0, 0] if flat else 0, atol=1e-30)
    np.testing.assert_allclose(dx[1:4], 0 if flat else 1, atol=1e-30)
    np.testing.assert_allclose(dx[4:6], 0, atol=1e-30)


@pytest.mark.parametrize("name", NAMES)
def test_nan_in_the_gradient_is_kept(name):
    x, dy = np.ones(3, np.float32), np.array([1, np.nan, 1], np.float32)
    getattr(layers, f"{name}_backward")(x, dy, dy)
    assert np.isnan(dy).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_bits_depend_neither_on_the_cut_nor_on_working_in_place(name, dtype):
    rng = np.random.default_rng(1)
    x, dy = (3 * rng.normal(size=(2, 2500))).astype(dtype)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 17), (5, 1030), (9, 64)])
def test_bias_kernels_agree_with_the_oracle(shape, dtype):
    rng = np.random.default_rng(2)
    x, residual = rng.normal(size=(2, *shape)).astype(dtype)
    bias = rng.normal(size=shape[1]).astype(dtype)
    bias.flags.writeable = False
    got, want, z, wanted_z = (np.empty(shape, dtype) for _ in range(4))
    layers.add_bias(x, bias, got)
    assert got.tobytes() == (x + bias).tobytes()
    layers.add_bias_residual(x, bias, residual, got)
    assert got.tobytes() == (x + bias + residual).tobytes()
    layers.bias_gelu(x, bias, z, got)
    reference.bias_gelu(x, bias, wanted_z, want)
    assert z.tobytes() == wanted_z.tobytes()
    np.testing.assert_allclose(got, want, **tolerance(dtype))
    layers.bias_gelu(x, bias, x, got)
    assert x.tobytes() == z.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (1, 3), (4, 8), (7, 33), (130, 257)])
def test_column_sums_add_rows_in_ascending_order(shape, dtype):
    x = np.random.default_rng(3).normal(size=shape).astype(dtype)
    got, want = np.full(shape[1], 9, dtype), np.empty(shape[1], dtype)
    layers.column_sums(x, got)
    reference.column_sums(x, want)
    assert got.tobytes() == want.tobytes()
