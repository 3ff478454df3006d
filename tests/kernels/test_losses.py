from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import losses
from tests.support.reference import losses as reference

DTYPES = (np.float32, np.float64)


def arrays(shape, dtype):
    rng = np.random.default_rng(shape[1])
    logits = (3 * rng.normal(size=shape)).astype(dtype)
    targets = rng.integers(0, shape[1], shape[0])
    return logits, targets


def test_rows_without_a_target_count_nothing_and_targets_beyond_the_classes_give_nan():
    logits, _ = arrays((3, 5), np.float32)
    targets, each, dlogits = np.array([-100, 5, 2]), np.empty(3), np.empty((3, 5), np.float32)
    losses.softmax_cross_entropy(logits, targets, each)
    losses.softmax_cross_entropy_backward(logits, targets, np.ones(1, np.float32), dlogits)
    assert each[0] == 0
    assert not dlogits[0].any()
    assert np.isnan(each[1])
    assert np.isnan(dlogits[1]).all()
    assert each[2] > 0
    assert dlogits[2].sum() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("place", [0, 30, 40])
def test_a_nan_spoils_its_own_row_only_also_in_one_part(place):
    logits, targets = arrays((3, 41), np.float32)
    logits[1, place] = np.nan
    each, dlogits = np.empty(3), np.empty_like(logits)
    losses.softmax_cross_entropy(logits, targets, each)
    losses.softmax_cross_entropy_backward(logits, targets, np.ones(1, np.float32), dlogits)
    for found, gradient in ((each, dlogits), in_parts(losses, logits, targets, (0, 20, 41))):
        assert np.isnan(found).tolist() == [False, True, False]
        assert np.isnan(gradient).all(axis=1).tolist() == [False, True, False]


def test_gradient_may_overwrite_the_logits_and_rows_keep_their_bits():
    logits, targets = arrays((5, 2100), np.float32)
    whole, one = np.empty_like(logits), np.ones(1, np.float32)
    losses.softmax_cross_entropy_backward(logits, targets, one, whole)
    for row in range(5):
        part = logits[row : row + 1]
        losses.softmax_cross_entropy_backward(part, targets[row : row + 1], one, part)
    assert logits.tobytes() == whole.tobytes()


def in_parts(kernels, logits, targets, bounds, scale=0.25):
    """Losses and gradient by parts of the classes, as ranks compute them."""
    dtype, count = logits.dtype, len(targets)
    parts = [logits[:, a:b].copy() for a, b in zip(bounds, bounds[1:], strict=False)]
    terms, merged, each = np.empty((len(parts), 3, count), dtype), np.empty((2, count), dtype), np.empty(count)
    for part, first, out in zip(parts, bounds, terms, strict=False):
        kernels.partial_cross_entropy(part, targets, first, out)
    kernels.merged_cross_entropy(terms, targets, merged, each)
    for part, first in zip(parts, bounds, strict=False):
        kernels.partial_cross_entropy_backward(part, targets, first, merged, np.array([scale], dtype), part)
    return each, np.concatenate(parts, axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [(0, 5003), (0, 2500, 5003), (0, 1, 1, 4000, 5003)])
def test_parts_of_the_classes_give_the_loss_and_gradient_of_all(bounds, dtype):
    logits, targets = arrays((6, 5003), dtype)
    targets[:4] = (0, 5002, -1, 4000)
    want, dwant = np.empty(6), np.empty_like(logits)
    reference.softmax_cross_entropy(logits, targets, want)
    reference.softmax_cross_entropy_backward(logits, targets, np.array([0.25], dtype), dwant)
    close = {"rtol": 2e-6, "atol": 1e-6} if dtype is np.float32 else {"rtol": 1e-13, "atol": 1e-12}
    for kernels in (losses, reference):
        got, dgot = in_parts(kernels, logits, targets, bounds)
        np.testing.assert_allclose(got, want, **close)
        np.testing.assert_allclose(dgot, dwant, **close)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_logits_of_two_classes_lose_no_digit_and_nan_stays_nan(dtype):
    logits = np.array([[-1e4, -30.0, 30.0, 1e4, np.nan]], dtype)
    for target, want in (
        (0, [0.0, np.log1p(np.exp(-30.0)), 30.0, 1e4]),
        (1, [1e4, 30.0, np.log1p(np.exp(-30.0)), 0.0]),
    ):
        each, gradient = np.empty((1, 5)), np.empty((1, 5), dtype)
        targets, ones = np.full((1, 5), target, dtype), np.ones(5, dtype)
        losses.binary_cross_entropy(logits, targets, ones, each)
        losses.binary_cross_entropy_backward(logits, targets, ones, ones[:1], gradient)
        np.testing.assert_allclose(each[0, :4], want, rtol=1e-13)
        np.testing.assert_allclose(
            gradient[0, :4], [(0, np.exp(-30.0), 1, 1), (-1, -1, -np.exp(-30.0), 0)][target], rtol=1e-6
        )
        assert np.isnan(each[0, 4])
        assert np.isnan(gradient[0, 4])
    gradient = np.empty(1, dtype)
    for name, *options in (("absolute_error",), ("huber", np.ones(1, dtype))):
        getattr(losses, f"{name}_backward")(
            np.full(1, np.nan, dtype), np.ones(1, dtype), *options, np.ones(1, dtype), gradient
        )
        assert np.isnan(gradient[0])
