from __future__ import annotations

import re

import numpy as np
import pytest

from mpizero.errors import DataError
from mpizero.nn import CrossEntropy, MeanSquaredError


def slope_of(loss, prediction, target):
    slope = np.empty(prediction.shape)
    for index in np.ndindex(prediction.shape):
        values = []
        for step in (1e-6, -1e-6):
            moved = prediction.copy()
            moved[index] += step
            values.append(loss.forward(moved, target)[0])
        slope[index] = (values[0] - values[1]) / 2e-6
    return slope


def test_cross_entropy_is_a_sum_over_counted_targets(rng):
    prediction = rng.normal(size=(2, 3, 5))
    target = np.array([[0, 4, -1], [2, 2, -1]])
    loss, weight, cache = CrossEntropy().forward(prediction, target)
    p = np.exp(prediction) / np.exp(prediction).sum(-1, keepdims=True)
    assert loss == pytest.approx(-np.log(p[0, 0, 0] * p[0, 1, 4] * p[1, 0, 2] * p[1, 1, 2]), rel=1e-12)
    assert weight == 4.0
    gradient = CrossEntropy().backward(cache, 0.5)
    np.testing.assert_allclose(gradient, 0.5 * slope_of(CrossEntropy(), prediction, target), rtol=1e-6, atol=1e-9)
    assert (gradient[:, 2] == 0).all()


def test_mean_squared_error_averages_outputs_and_sums_samples(rng):
    prediction, target = rng.normal(size=(2, 4, 3))
    loss, weight, cache = MeanSquaredError().forward(prediction, target)
    assert loss == pytest.approx(((prediction - target) ** 2).mean(axis=1).sum(), rel=1e-14)
    assert weight == 4.0
    expected = 2.0 * slope_of(MeanSquaredError(), prediction, target)
    np.testing.assert_allclose(MeanSquaredError().backward(cache, 2.0), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_keep_the_predictions_dtype(dtype, rng):
    prediction = rng.normal(size=(4, 3)).astype(dtype)
    for loss, target in ((CrossEntropy(), np.zeros(4, np.uint8)), (MeanSquaredError(), rng.normal(size=(4, 3)))):
        assert loss.backward(loss.forward(prediction, target)[2], 0.5).dtype == dtype


def test_an_empty_batch_weighs_nothing():
    for loss, target in ((CrossEntropy(), np.zeros(0, int)), (MeanSquaredError(), np.zeros((0, 3)))):
        value, weight, cache = loss.forward(np.zeros((0, 3)), target)
        assert (value, weight) == (0.0, 0.0)
        assert loss.backward(cache).shape == (0, 3)


def test_targets_that_do_not_fit_are_named():
    logits = np.zeros((2, 3))
    with pytest.raises(DataError, match="target 3 is not below the number of classes, 3"):
        CrossEntropy().forward(logits, np.array([0, 3]))
    with pytest.raises(DataError, match=r"integers of shape \(2,\), for logits of shape \(2, 3\); .* is float64 of"):
        CrossEntropy().forward(logits, np.zeros(2))
    with pytest.raises(DataError, match=r"shape \(2, 3\), .* the target has shape \(3, 2\)"):
        MeanSquaredError().forward(logits, np.zeros((3, 2)))


@pytest.mark.parametrize(
    ("prediction", "target"),
    [
        ((2, 2, 3), (2, 3, 2)),
        ((4, 6), (4, 2, 3)),
        ((4, 6), (4, 3, 2)),
        ((4, 1, 2), (4, 2)),
        ((4, 1), (1, 4)),
        ((4,), ()),
    ],
)
def test_squared_error_never_pairs_elements_that_only_happen_to_be_as_many(prediction, target):
    message = rf"shape {re.escape(str(prediction))}.* the target has shape {re.escape(str(target))}"
    with pytest.raises(DataError, match=message):
        MeanSquaredError().forward(np.zeros(prediction), np.zeros(target))


def test_one_of_prediction_and_target_may_lack_a_last_axis_of_size_one(rng):
    values = rng.normal(size=(2, 5))
    expected = MeanSquaredError().forward(*values)[0]
    for shapes in (((5, 1), (5,)), ((5,), (5, 1)), ((5, 1), (5, 1))):
        prediction, target = (row.reshape(shape) for row, shape in zip(values, shapes, strict=True))
        loss, weight, cache = MeanSquaredError().forward(prediction, target)
        assert (loss, weight) == (expected, 5.0)
        assert MeanSquaredError().backward(cache).shape == prediction.shape


@pytest.mark.parametrize("target", [np.array([1j]), np.array(["1.0"]), np.array([None]), np.array(["2026"], "M8[Y]")])
def test_squared_error_takes_real_numbers_only(target):
    with pytest.raises(DataError, match=f"real numbers.*target has dtype {re.escape(str(target.dtype))}"):
        MeanSquaredError().forward(np.ones(1), target)
