from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import layers
from tests.nn.checks import central_difference
from tests.support.reference import layers as reference

DTYPES = (np.float32, np.float64)


def arrays(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(size=(2, *shape)).astype(dtype)
    gamma, beta = rng.normal(size=(2, shape[1])).astype(dtype)
    for parameter in (gamma, beta):
        parameter.flags.writeable = False
    return x, dy, gamma, beta, np.array([1e-5], dtype)


def loss_of(name, x, gamma, beta, eps, dy):
    y, mean, rstd = np.empty_like(x), np.empty(len(x)), np.empty(len(x))
    if name == "layernorm":
        reference.layernorm(x, gamma, beta, eps, y, mean, rstd)
    else:
        reference.rmsnorm(x, gamma, eps, y, rstd)
    return float((y * dy).sum())


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_gradients_are_the_limits_of_differences(name):
    x, dy, gamma, beta, eps = arrays((3, 6), np.float64, seed=4)
    y, dx, mean, rstd = np.empty_like(x), np.empty_like(x), np.empty(3), np.empty(3)
    gamma, beta, (dgamma, dbeta) = gamma.copy(), beta.copy(), np.zeros((2, 6))
    if name == "layernorm":
        layers.layernorm(x, gamma, beta, eps, y, mean, rstd)
        layers.layernorm_backward(dy, x, gamma, mean, rstd, x[:0], dx, dgamma, dbeta)
    else:
        layers.rmsnorm(x, gamma, eps, y, rstd)
        layers.rmsnorm_backward_input(dy, x, gamma, rstd, dx)
        layers.rmsnorm_backward_weights(dy, x, rstd, dgamma)
    for array, gradient in ((x, dx), (gamma, dgamma), (beta, dbeta)):
        slope = central_difference(lambda: loss_of(name, x, gamma, beta, eps, dy), array)
        np.testing.assert_allclose(gradient, slope, atol=1e-7)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_to_the_gradient_of_the_input(dtype):
    x, dy, gamma, _, _ = arrays((5, 64), dtype)
    mean, rstd, dx, sums = x.mean(axis=1), 1 / x.std(axis=1), np.empty((2, 5, 64), dtype), np.empty((2, 64), dtype)
    for residual, each in zip((x[:0], x), dx, strict=True):
        layers.layernorm_backward(dy, x, gamma, mean, rstd, residual, each, *sums)
    assert dx[1].tobytes() == (dx[0] + x).tobytes()


def test_a_nan_spoils_its_own_row_only():
    x, _, gamma, beta, eps = arrays((3, 40), np.float32)
    x[1, 20] = np.nan
    y, mean, rstd = np.empty_like(x), np.empty(3, np.float32), np.empty(3, np.float32)
    layers.layernorm(x, gamma, beta, eps, y, mean, rstd)
    assert np.isnan(y).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(y[[0, 2]]).all()
