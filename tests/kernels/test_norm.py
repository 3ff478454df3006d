from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import layers
from tests.support.reference import layers as reference

DTYPES = (np.float32, np.float64)
SHAPES = [(0, 8), (1, 1), (3, 7), (5, 64), (4, 100), (9, 257), (2, 5000)]


def tolerance(dtype):
    return {"rtol": 2e-5, "atol": 2e-5} if dtype is np.float32 else {"rtol": 1e-11, "atol": 1e-11}


def arrays(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(size=(2, *shape)).astype(dtype)
    gamma, beta = rng.normal(size=(2, shape[1])).astype(dtype)
    for parameter in (gamma, beta):
        parameter.flags.writeable = False
    return x, dy, gamma, beta, np.array([1e-5], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layernorm_agrees_with_the_oracle(shape, dtype):
    x, dy, gamma, beta, eps = arrays(shape, dtype)
    results = []
    for kernels in (layers, reference):
        y, dx = np.full(shape, 9, dtype), np.full(shape, 9, dtype)
        mean, rstd = np.empty(shape[0], dtype), np.empty(shape[0], dtype)
        dgamma, dbeta = np.full(shape[1], 9, dtype), np.full(shape[1], 9, dtype)
        kernels.layernorm(x, gamma, beta, eps, y, mean, rstd)
        if shape[1] == 1:  # without variance rstd is 1 / sqrt(eps), and dx a difference of huge terms
            results.append((y, mean, rstd))
            continue
        kernels.layernorm_backward(dy, x, gamma, mean, rstd, x[:0], dx, dgamma, dbeta)
        alone = dx.copy()
        kernels.layernorm_backward(dy, x, gamma, mean, rstd, y, dx, dgamma, dbeta)
        assert dx.tobytes() == (alone + y).tobytes()
        results.append((y, mean, rstd, dx, dgamma, dbeta))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rmsnorm_agrees_with_the_oracle(shape, dtype):
    x, dy, gamma, _, eps = arrays(shape, dtype)
    results = []
    for kernels in (layers, reference):
        y, dx, rstd = np.full(shape, 9, dtype), np.full(shape, 9, dtype), np.empty(shape[0], dtype)
        dgamma = np.full(shape[1], 9, dtype)
        kernels.rmsnorm(x, gamma, eps, y, rstd)
        kernels.rmsnorm_backward_input(dy, x, gamma, rstd, dx)
        kernels.rmsnorm_backward_weights(dy, x, rstd, dgamma)
        results.append((y, rstd, dgamma) if shape[1] == 1 else (y, rstd, dx, dgamma))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, **tolerance(dtype))


def loss_of(name, x, gamma, beta, eps, dy):
    y, mean, rstd = np.empty_like(x), np.empty(len(x)), np.empty(len(x))
    if name == "layernorm":
        reference.layernorm(x, gamma, beta, eps, y, mean, rstd)
    else:
        reference.rmsnorm(x, gamma, eps, y, rstd)
    return float((y * dy).sum())


def differences(function, array):
    result, step = np.empty_like(array), 1e-6
    for index in np.ndindex(array.shape):
        up, down = array.copy(), array.copy()
        up[index] += step
        down[index] -= step
        result[index] = (function(up) - function(down)) / (2 * step)
    return result


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_gradients_are_the_limits_of_differences(name):
    x, dy, gamma, beta, eps = arrays((3, 6), np.float64, seed=4)
    y, dx, mean, rstd = np.empty_like(x), np.empty_like(x), np.empty(3), np.empty(3)
    dgamma, dbeta = np.empty(6), np.empty(6)
    if name == "layernorm":
        layers.layernorm(x, gamma, beta, eps, y, mean, rstd)
        layers.layernorm_backward(dy, x, gamma, mean, rstd, x[:0], dx, dgamma, dbeta)
        expected = differences(lambda b: loss_of(name, x, gamma, b, eps, dy), beta)
        np.testing.assert_allclose(dbeta, expected, atol=1e-7)
    else:
        layers.rmsnorm(x, gamma, eps, y, rstd)
        layers.rmsnorm_backward_input(dy, x, gamma, rstd, dx)
        layers.rmsnorm_backward_weights(dy, x, rstd, dgamma)
    np.testing.assert_allclose(dx, differences(lambda v: loss_of(name, v, gamma, beta, eps, dy), x), atol=1e-7)
    np.testing.assert_allclose(dgamma, differences(lambda g: loss_of(name, x, g, beta, eps, dy), gamma), atol=1e-7)


def test_two_passes_keep_the_variance_of_rows_far_from_zero():
    x = np.random.default_rng(5).normal(size=(4, 256)).astype(np.float32) + np.float32(1000)
    y, mean, rstd = np.empty_like(x), np.empty(4, np.float32), np.empty(4, np.float32)
    one = np.ones(256, np.float32)
    layers.layernorm(x, one, 0 * one, np.array([1e-5], np.float32), y, mean, rstd)
    np.testing.assert_allclose(rstd, 1 / x.astype(np.float64).std(axis=1), rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype):
    x, dy, gamma, beta, eps = arrays((6, 131), dtype)
    y, dx, mean, rstd = np.empty_like(x), np.empty_like(x), np.empty(6, dtype), np.empty(6, dtype)
    layers.layernorm(x, gamma, beta, eps, y, mean, rstd)
    sums = np.empty((2, 131), dtype)
    layers.layernorm_backward(dy, x, gamma, mean, rstd, x[:0], dx, *sums)
    for row in range(6):
        part = slice(row, row + 1)
        alone, dalone = np.empty((2, 1, 131), dtype)
        m, r = np.empty((2, 1), dtype)
        layers.layernorm(x[part], gamma, beta, eps, alone, m, r)
        layers.layernorm_backward(dy[part], x[part], gamma, m, r, x[:0], dalone, *sums)
        assert alone.tobytes() == y[part].tobytes()
        assert dalone.tobytes() == dx[part].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradients_add_rows_in_ascending_order(dtype):
    x, dy, _, _, _ = arrays((37, 50), dtype)
    mean, rstd = x.mean(axis=1), 1 / x.std(axis=1)
    got, want = np.empty((2, 50), dtype), np.empty((2, 50), dtype)
    gamma, dx = np.ones(50, dtype), np.empty_like(x)
    layers.layernorm_backward(dy, x, gamma, mean, rstd, x[:0], dx, *got)
    reference.layernorm_backward(dy, x, gamma, mean, rstd, x[:0], dx, *want)
    assert got.tobytes() == want.tobytes()


def test_a_nan_spoils_its_own_row_only():
    x, _, gamma, beta, eps = arrays((3, 40), np.float32)
    x[1, 20] = np.nan
    y, mean, rstd = np.empty_like(x), np.empty(3, np.float32), np.empty(3, np.float32)
    layers.layernorm(x, gamma, beta, eps, y, mean, rstd)
    assert np.isnan(y).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(y[[0, 2]]).all()
