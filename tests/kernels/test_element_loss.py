from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import losses as element_loss
from tests.support.reference import losses as reference

DTYPES = (np.float32, np.float64)


def agree(name, *arrays):
    """Run a kernel and its oracle on equal arrays, of which the last is the output."""
    *inputs, output = arrays
    got, want = np.full_like(output, 9), np.empty_like(output)
    for array in inputs:
        array.flags.writeable = False
    getattr(element_loss, name)(*inputs, got)
    getattr(reference, name)(*inputs, want)
    close = (2e-6, 1e-6) if inputs[0].dtype == np.float32 else (1e-13, 1e-14)
    np.testing.assert_allclose(got, want, rtol=close[0], atol=close[1] * np.abs(want).max(initial=1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1.0, 300.0])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 7), (3, 4099)])
def test_losses_and_gradients_agree_with_the_oracle(shape, size, dtype):
    rng = np.random.default_rng(shape[1])
    prediction = (size * rng.normal(size=shape)).astype(dtype)
    both = (size * rng.normal(size=(shape[0], 2 * shape[1]))).clip(-40, 40).astype(dtype)
    target, ones = rng.normal(size=shape).astype(dtype), rng.integers(0, 2, shape).astype(dtype)
    target[:, ::3] = prediction[:, ::3]
    scale, delta, lowest = (np.array([number], dtype) for number in (0.25, 0.5, -3.0))
    factors, losses = rng.uniform(0.5, 2, shape[1]).astype(dtype), np.empty(shape)
    flat = prediction.reshape(-1), target.reshape(-1)
    agree("absolute_error", *flat, losses.reshape(-1))
    agree("absolute_error_backward", *flat, scale, np.empty_like(flat[0]))
    agree("huber", *flat, delta, losses.reshape(-1))
    agree("huber_backward", *flat, delta, scale, np.empty_like(flat[0]))
    agree("binary_cross_entropy", prediction, ones, factors, losses)
    agree("binary_cross_entropy_backward", prediction, ones, factors, scale, np.empty_like(prediction))
    agree("gaussian_likelihood", both, target, lowest, losses)
    agree("gaussian_likelihood_backward", both, target, lowest, scale, np.empty_like(both))
    agree("row_square_sums", prediction, np.empty(shape[0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_logits_lose_no_digit_and_nan_stays_nan(dtype):
    logits = np.array([[-1e4, -30.0, 30.0, 1e4, np.nan]], dtype)
    for target, want in (
        (0, [0.0, np.log1p(np.exp(-30.0)), 30.0, 1e4]),
        (1, [1e4, 30.0, np.log1p(np.exp(-30.0)), 0.0]),
    ):
        losses, gradient = np.empty((1, 5)), np.empty((1, 5), dtype)
        targets, ones = np.full((1, 5), target, dtype), np.ones(5, dtype)
        element_loss.binary_cross_entropy(logits, targets, ones, losses)
        element_loss.binary_cross_entropy_backward(logits, targets, ones, ones[:1], gradient)
        np.testing.assert_allclose(losses[0, :4], want, rtol=1e-13)
        np.testing.assert_allclose(
            gradient[0, :4], [(0, np.exp(-30.0), 1, 1), (-1, -1, -np.exp(-30.0), 0)][target], rtol=1e-6
        )
        assert np.isnan(losses[0, 4])
        assert np.isnan(gradient[0, 4])
    gradient = np.empty(1, dtype)
    for name, *options in (("absolute_error",), ("huber", np.ones(1, dtype))):
        getattr(element_loss, f"{name}_backward")(
            np.full(1, np.nan, dtype), np.ones(1, dtype), *options, np.ones(1, dtype), gradient
        )
        assert np.isnan(gradient[0])
