from __future__ import annotations

import numpy as np

from mpizero.kernels.cpu import layers
from tests.support.reference import layers as reference

DTYPES = (np.float32, np.float64)


def arrays(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(size=(2, *shape)).astype(dtype)
    gamma, beta = rng.normal(size=(2, shape[1])).astype(dtype)
    for parameter in (gamma, beta):
        parameter.flags.writeable = False
    return x, dy, gamma, beta, np.array([1e-5], dtype)


def test_two_passes_keep_the_variance_of_rows_far_from_zero():
    x = np.random.default_rng(5).normal(size=(4, 256)).astype(np.float32) + np.float32(1000)
    y, mean, rstd = np.empty_like(x), np.empty(4, np.float32), np.empty(4, np.float32)
    one = np.ones(256, np.float32)
    layers.layernorm(x, one, 0 * one, np.array([1e-5], np.float32), y, mean, rstd)
    np.testing.assert_allclose(rstd, 1 / x.astype(np.float64).std(axis=1), rtol=1e-4)


def test_a_row_has_the_same_bits_alone_and_among_others():
    x, dy, gamma, beta, eps = arrays((6, 131), np.float32)
    y, dx, mean, rstd = np.empty_like(x), np.empty_like(x), np.empty(6, np.float32), np.empty(6, np.float32)
    layers.layernorm(x, gamma, beta, eps, y, mean, rstd)
    sums = np.empty((2, 131), np.float32)
    layers.layernorm_backward(dy, x, gamma, mean, rstd, x[:0], dx, *sums)
    for row in range(6):
        part = slice(row, row + 1)
        alone, dalone = np.empty((2, 1, 131), np.float32)
        m, r = np.empty((2, 1), np.float32)
        layers.layernorm(x[part], gamma, beta, eps, alone, m, r)
        layers.layernorm_backward(dy[part], x[part], gamma, m, r, x[:0], dalone, *sums)
        assert alone.tobytes() == y[part].tobytes()
        assert dalone.tobytes() == dx[part].tobytes()


def test_weight_gradients_add_rows_in_ascending_order():
    x, dy, _, _, _ = arrays((37, 50), np.float32)
    mean, rstd = x.mean(axis=1), 1 / x.std(axis=1)
    got, want = np.empty((2, 50), np.float32), np.empty((2, 50), np.float32)
    gamma, dx = np.ones(50, np.float32), np.empty_like(x)
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
