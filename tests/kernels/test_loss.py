from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import losses as loss
from tests.support.reference import losses as reference

DTYPES = (np.float32, np.float64)
SHAPES = [(0, 4), (1, 1), (3, 2), (5, 10), (7, 256), (4, 301), (2, 5001)]


def arrays(shape, dtype, spread=3.0):
    rng = np.random.default_rng(shape[1])
    logits = (spread * rng.normal(size=shape)).astype(dtype)
    targets = rng.integers(0, shape[1], shape[0])
    return logits, targets


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.0, 3.0, 300.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradient_agree_with_the_oracle(shape, spread, dtype):
    logits, targets = arrays(shape, dtype, spread)
    logits.flags.writeable = False
    got, want = np.full(shape[0], 9.0), np.empty(shape[0])
    loss.softmax_cross_entropy(logits, targets, got)
    reference.softmax_cross_entropy(logits, targets, want)
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype is np.float32 else {"rtol": 1e-13, "atol": 1e-12}
    np.testing.assert_allclose(got, want, **close)
    scale, dgot, dwant = np.array([0.25], dtype), np.full(shape, 9, dtype), np.empty(shape, dtype)
    loss.softmax_cross_entropy_backward(logits, targets, scale, dgot)
    reference.softmax_cross_entropy_backward(logits, targets, scale, dwant)
    np.testing.assert_allclose(dgot, dwant, **close)


def test_gradient_is_the_limit_of_differences():
    logits, targets = arrays((3, 6), np.float64)
    targets[1] = -1
    got, step = np.empty_like(logits), 1e-6
    loss.softmax_cross_entropy_backward(logits, targets, np.array([2.0]), got)
    for index in np.ndindex(logits.shape):
        sums = []
        for sign in (1, -1):
            moved, losses = logits.copy(), np.empty(3)
            moved[index] += sign * step
            reference.softmax_cross_entropy(moved, targets, losses)
            sums.append(2 * losses.sum())
        assert got[index] == pytest.approx((sums[0] - sums[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_target_count_nothing_and_targets_beyond_the_classes_give_nan(dtype):
    logits, _ = arrays((3, 5), dtype)
    targets, losses, dlogits = np.array([-100, 5, 2]), np.empty(3), np.empty((3, 5), dtype)
    loss.softmax_cross_entropy(logits, targets, losses)
    loss.softmax_cross_entropy_backward(logits, targets, np.ones(1, dtype), dlogits)
    assert losses[0] == 0
    assert not dlogits[0].any()
    assert np.isnan(losses[1])
    assert np.isnan(dlogits[1]).all()
    assert losses[2] > 0
    assert dlogits[2].sum() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_logits_neither_overflow_nor_hide_the_loss(dtype):
    logits = np.array([[1e4, -1e4, 0.0]], dtype)
    losses = np.empty(1)
    loss.softmax_cross_entropy(logits, np.array([1]), losses)
    assert losses[0] == 2e4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 3, 40])
def test_a_nan_spoils_its_own_row_only(place, dtype):
    logits, targets = arrays((3, 41), dtype)
    logits[1, place] = np.nan
    losses, dlogits = np.empty(3), np.empty_like(logits)
    loss.softmax_cross_entropy(logits, targets, losses)
    loss.softmax_cross_entropy_backward(logits, targets, np.ones(1, dtype), dlogits)
    assert np.isnan(losses).tolist() == [False, True, False]
    assert np.isnan(dlogits).all(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_may_overwrite_the_logits_and_rows_keep_their_bits(dtype):
    logits, targets = arrays((5, 2100), dtype)
    whole, one = np.empty_like(logits), np.ones(1, dtype)
    loss.softmax_cross_entropy_backward(logits, targets, one, whole)
    for row in range(5):
        part = logits[row : row + 1]
        loss.softmax_cross_entropy_backward(part, targets[row : row + 1], one, part)
    assert logits.tobytes() == whole.tobytes()


def in_parts(kernels, logits, targets, bounds, scale=0.25):
    """Losses and gradient by parts of the classes, as ranks compute them."""
    dtype, count = logits.dtype, len(targets)
    parts = [logits[:, a:b].copy() for a, b in zip(bounds, bounds[1:], strict=False)]
    terms, merged, losses = np.empty((len(parts), 3, count), dtype), np.empty((2, count), dtype), np.empty(count)
    for part, first, out in zip(parts, bounds, terms, strict=False):
        kernels.partial_cross_entropy(part, targets, first, out)
    kernels.merged_cross_entropy(terms, targets, merged, losses)
    for part, first in zip(parts, bounds, strict=False):
        kernels.partial_cross_entropy_backward(part, targets, first, merged, np.array([scale], dtype), part)
    return losses, np.concatenate(parts, axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [(0, 5003), (0, 2500, 5003), (0, 1, 1, 4000, 5003)])
def test_parts_of_the_classes_give_the_loss_and_gradient_of_all(bounds, dtype):
    logits, targets = arrays((6, 5003), dtype)
    targets[:4] = (0, 5002, -1, 4000)
    want, dwant = np.empty(6), np.empty_like(logits)
    reference.softmax_cross_entropy(logits, targets, want)
    reference.softmax_cross_entropy_backward(logits, targets, np.array([0.25], dtype), dwant)
    close = {"rtol": 2e-6, "atol": 1e-6} if dtype is np.float32 else {"rtol": 1e-13, "atol": 1e-12}
    for kernels in (loss, reference):
        got, dgot = in_parts(kernels, logits, targets, bounds)
        np.testing.assert_allclose(got, want, **close)
        np.testing.assert_allclose(dgot, dwant, **close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_parts_agree_with_their_oracles(dtype):
    logits, targets = arrays((5, 301), dtype)
    targets[:3] = (-1, 20, 320)
    close = {"rtol": 2e-6, "atol": 1e-6} if dtype is np.float32 else {"rtol": 1e-13, "atol": 1e-12}
    results = []
    for kernels in (loss, reference):
        terms, merged, losses = np.full((2, 3, 5), 9, dtype), np.full((2, 5), 9, dtype), np.full(5, 9.0)
        kernels.partial_cross_entropy(logits, targets, 20, terms[0])
        kernels.partial_cross_entropy(logits[:, :0], targets, 321, terms[1])
        kernels.merged_cross_entropy(terms, targets, merged, losses)
        dlogits = np.full_like(logits, 9)
        kernels.partial_cross_entropy_backward(logits, targets, 20, merged, np.array([2.0], dtype), dlogits)
        results.append((terms, merged, losses, dlogits))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, **close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_in_one_part_spoils_its_own_row_only(dtype):
    logits, targets = arrays((3, 41), dtype)
    logits[1, 30] = np.nan
    losses, dlogits = in_parts(loss, logits, targets, (0, 20, 41))
    assert np.isnan(losses).tolist() == [False, True, False]
    assert np.isnan(dlogits).all(axis=1).tolist() == [False, True, False]
