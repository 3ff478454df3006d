"""Losses of classes, elements and samples: values, gradients, weights, masks, and what they refuse."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mpizero import nn
from mpizero.errors import DataError
from tests.nn.checks import central_difference

#: Each loss, and the shape of a prediction for targets (5, 3).
LOSSES = {
    "cross-entropy": (nn.CrossEntropy(), (5, 3, 4)),
    "squared": (nn.MeanSquaredError(), (5, 3)),
    "absolute": (nn.L1Loss(), (5, 3)),
    "huber": (nn.HuberLoss(0.7), (5, 3)),
    "binary": (nn.BCEWithLogitsLoss([0.5, 1.0, 3.0]), (5, 3)),
    "relative": (nn.RelativeL2Loss(), (5, 3)),
    "gaussian": (nn.GaussianNLLLoss(1e-3), (5, 6)),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def sample(name, rng, dtype="float64"):
    loss, shape = LOSSES[name]
    target = rng.normal(size=(5, 3)).astype(dtype)
    if name == "cross-entropy":
        target = rng.integers(0, 4, (5, 3))
    elif name == "binary":
        target = rng.uniform(0, 1, (5, 3)).round(1).astype(dtype)
    return loss, rng.normal(size=shape).astype(dtype), target


@every_loss
@pytest.mark.parametrize("weighted", ["", "samples", "elements", "both"])
def test_a_gradient_is_the_limit_of_differences(name, weighted, rng):
    loss, prediction, target = sample(name, rng)
    if weighted == "samples":
        target = {"target": target, "weight": np.array([0.5, 0.0, 2.0, 1.0, 3.0])}
    elif weighted == "elements":
        target = {"target": target, "weight": rng.uniform(0, 2, (5, 3)), "mask": rng.random((5, 3)) > 0.3}
    elif weighted == "both":
        target = {"target": target, "weight": rng.uniform(0, 2, 5), "mask": rng.random((5, 3)) > 0.3}
    _, _, cache = loss.forward(prediction.copy(), target)
    slope = central_difference(lambda: loss.forward(prediction, target)[0], prediction, 1e-6)
    np.testing.assert_allclose(loss.backward(cache, 0.5), 0.5 * slope, rtol=1e-6, atol=1e-8)


@every_loss
def test_a_weight_of_two_is_a_sample_given_twice_and_a_mask_one_left_out(name, rng):
    loss, prediction, target = sample(name, rng)
    twice = [0, 1, 1, 3, 4]
    wanted = loss.forward(prediction[twice], target[twice])
    keep = np.array([1, 1, 0, 1, 1], bool)
    got = loss.forward(prediction, {"target": target, "weight": np.array([1, 2, 5, 1, 1]), "mask": keep})
    assert got[:2] == pytest.approx(wanted[:2], rel=1e-14)
    gradient, apart = loss.backward(got[2]), loss.backward(wanted[2])
    np.testing.assert_allclose(gradient[[0, 3, 4]], apart[[0, 3, 4]], rtol=1e-14)
    np.testing.assert_allclose(gradient[1], apart[1] + apart[2], rtol=1e-14)
    assert not gradient[2].any()


@every_loss
@pytest.mark.parametrize("whole", [True, False], ids=["samples", "elements"])
def test_nothing_leaks_from_under_a_mask(name, whole, rng):
    loss, prediction, target = sample(name, rng, "float32")
    mask = np.array([1, 0, 1, 1, 0], bool) if whole else rng.random((5, 3)) > 0.4
    spoiled, aim = prediction.copy(), target.copy()
    if name != "cross-entropy":
        aim[~mask] = np.nan
    else:
        aim[~mask] = 99
        spoiled[~mask] = np.nan
    if name not in ("cross-entropy", "gaussian"):
        spoiled[~mask] = np.inf
    clean = loss.forward(prediction, {"target": target, "mask": mask})
    for given in ({"mask": mask}, {"weight": mask.astype("float32")}, {"weight": mask.astype(int), "mask": mask}):
        dirty = loss.forward(spoiled, {"target": aim, **given})
        assert dirty[:2] == clean[:2]
        gradient = loss.backward(dirty[2])
        assert gradient.dtype == np.float32
        np.testing.assert_array_equal(gradient, loss.backward(clean[2]))


@every_loss
def test_sums_and_weights_of_parts_add_up(name, rng):
    loss, prediction, target = sample(name, rng)
    weight = rng.uniform(0, 2, 5)
    whole = loss.forward(prediction, {"target": target, "weight": weight})
    parts = [
        loss.forward(prediction[s], {"target": target[s], "weight": weight[s]}) for s in np.split(np.arange(5), [2])
    ]
    assert whole[:2] == pytest.approx(np.sum([part[:2] for part in parts], axis=0), rel=1e-14)
    empty = loss.forward(prediction[:0], {"target": target[:0], "mask": np.zeros(0, bool)})
    assert empty[:2] == (0.0, 0.0)
    assert loss.backward(empty[2]).shape == prediction[:0].shape


def test_cross_entropy_is_a_sum_over_counted_targets(rng):
    prediction = rng.normal(size=(2, 3, 5))
    loss, weight, cache = nn.CrossEntropy().forward(prediction, np.array([[0, 4, -1], [2, 2, -1]]))
    p = np.exp(prediction) / np.exp(prediction).sum(-1, keepdims=True)
    assert loss == pytest.approx(-np.log(p[0, 0, 0] * p[0, 1, 4] * p[1, 0, 2] * p[1, 1, 2]), rel=1e-12)
    assert weight == 4.0
    assert nn.CrossEntropy().forward(prediction[:, 0], np.ones(2, np.uint8))[1] == 2.0
    gradient = p.copy()
    gradient[[0, 0, 1, 1], [0, 1, 0, 1], [0, 4, 2, 2]] -= 1
    gradient[:, 2] = 0
    np.testing.assert_allclose(nn.CrossEntropy().backward(cache, 0.5), 0.5 * gradient, rtol=1e-12, atol=1e-14)


def test_mean_squared_error_averages_outputs_and_sums_samples(rng):
    for prediction, target in (rng.normal(size=(2, 4, 3)), rng.normal(size=(2, 4, 3, 2, 5))):
        loss, weight, _ = nn.MeanSquaredError().forward(prediction, target)
        mean = ((prediction - target) ** 2).reshape(4, -1).mean(axis=1)
        assert (loss, weight) == (pytest.approx(mean.sum(), rel=1e-14), 4.0)


def test_one_of_prediction_and_target_may_lack_a_last_axis_of_size_one(rng):
    values = rng.normal(size=(2, 5))
    expected = nn.MeanSquaredError().forward(*values)[0]
    for shapes in (((5, 1), (5,)), ((5,), (5, 1)), ((5, 1), (5, 1))):
        prediction, target = (row.reshape(shape) for row, shape in zip(values, shapes, strict=True))
        loss, weight, cache = nn.MeanSquaredError().forward(prediction, target)
        assert (loss, weight) == (expected, 5.0)
        assert nn.MeanSquaredError().backward(cache).shape == prediction.shape


def test_relative_errors_weigh_elements_inside_both_norms(rng):
    prediction, target = rng.normal(size=(2, 4, 6))
    weight = rng.uniform(0.1, 2, (4, 6))
    total, samples, _ = nn.RelativeL2Loss().forward(prediction, {"target": target, "weight": weight})
    norms = [np.sqrt((weight * x**2).sum(axis=1)) for x in (prediction - target, target)]
    assert (total, samples) == (pytest.approx((norms[0] / norms[1]).sum(), rel=1e-14), 4.0)
    exact = nn.RelativeL2Loss()
    value, _, cache = exact.forward(target, target)
    assert value == 0
    assert not exact.backward(cache).any()


def test_a_target_of_norm_0_is_an_error_a_mask_or_an_eps(rng):
    prediction, target = rng.normal(size=(2, 3, 4))
    target[1] = 0
    with pytest.raises(DataError, match=r"target of sample 1 of 3 .* mask.*RelativeL2Loss\(eps=1e-8\)"):
        nn.RelativeL2Loss().forward(prediction, target)
    masked = {"target": target, "mask": np.array([True, False, True])}
    assert nn.RelativeL2Loss().forward(prediction, masked)[1] == 2.0
    total = nn.RelativeL2Loss(eps=0.5).forward(prediction, target)[0]
    sizes = np.linalg.norm(target, axis=1) + 0.5
    assert total == pytest.approx((np.linalg.norm(prediction - target, axis=1) / sizes).sum(), rel=1e-14)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_relative_errors_do_not_overflow_or_vanish_in_float32(size):
    target = np.array([[3.0, 4.0]], "f4") * np.float32(size)
    total, _, cache = nn.RelativeL2Loss().forward(target * np.float32(2), target)
    assert total == pytest.approx(1.0, rel=1e-6)
    assert np.isfinite(nn.RelativeL2Loss().backward(cache)).all()


def test_correct_predictions_are_counted_where_they_count(rng):
    logits = np.array([[2.0, 1.0], [0.0, 1.0], [3.0, 4.0]])
    assert nn.CrossEntropy().correct(logits, np.array([0, 0, -1])) == (1, 2)
    weighted = {"target": np.array([0, 0, 1]), "weight": np.array([1.0, 0.0, 2.0])}
    assert nn.CrossEntropy().correct(logits, weighted) == (2, 2)
    yes = np.array([[1, 0], [0, 1], [1, 1]])
    assert nn.BCEWithLogitsLoss().correct(logits, yes) == (5, 6)
    masked = {"target": yes, "mask": np.array([False, True, True])}
    assert nn.BCEWithLogitsLoss().correct(logits, masked) == (4, 4)
    assert nn.L1Loss().correct(logits, yes) is None


def test_one_number_a_sample_may_have_an_axis_or_not(rng):
    values, target = rng.normal(size=5), rng.integers(0, 2, 5)
    wanted = nn.BCEWithLogitsLoss(2.0).forward(values, target)[:2]
    for weight in (None, np.ones(5), np.ones((5, 1))):
        for prediction in (values, values[:, None]):
            given = {"target": target[:, None], "weight": weight}
            assert nn.BCEWithLogitsLoss(2.0).forward(prediction, given)[:2] == wanted
    assert nn.GaussianNLLLoss().forward(rng.normal(size=(5, 2)), target)[1] == 5.0


X = np.zeros((4, 2), "f4")
L1, SQUARED, CLASSES, BINARY, GAUSSIAN = (
    nn.L1Loss(),
    nn.MeanSquaredError(),
    nn.CrossEntropy(),
    nn.BCEWithLogitsLoss(),
    nn.GaussianNLLLoss(),
)
#: Loss, prediction, target, and what is said; of integers, the gradient would be rounded to integers too.
WRONG = [
    (L1, X, {"targets": X}, r"L1Loss: .*has the key 'targets' \(did you mean 'target'\?\)"),
    (L1, X, {"weight": X}, r'L1Loss: the key "target" is missing'),
    (L1, X, {"target": [1.0]}, r'L1Loss: takes arrays, the target\["target"\] is of type list'),
    (nn.HuberLoss(), X, np.zeros((4, 3)), r"HuberLoss: .*shape \(4, 2\).* the target has shape \(4, 3\)"),
    (
        L1, X, {"target": X, "weight": np.ones(3)},
        r"L1Loss: takes a weight of the target's shape \(4, 2\) or .* such as \(4,\); the weight has shape \(3,\)",
    ),
    (L1, X, {"target": X, "weight": np.ones(2)}, r"the weight has shape \(2,\)"),
    (L1, X, {"target": X, "weight": -np.ones(4)}, "finite weights from 0, .* from -1.0 to"),
    (L1, X, {"target": X, "weight": np.full(4, np.nan)}, "finite weights from 0"),
    (L1, X, {"target": X, "mask": np.ones(4)}, "mask of booleans.*has dtype float64"),
    (
        CLASSES, X, {"target": np.zeros(4, int), "mask": np.ones((4, 2), bool)},
        r"CrossEntropy: takes a mask of the target's shape \(4,\)",
    ),
    (BINARY, X, X + 2, "BCEWithLogitsLoss: takes targets from 0 to 1.* 2 to 2; .*CrossEntropy"),
    (nn.BCEWithLogitsLoss([1, 2, 3]), X, X, "pos_weight has 3 numbers, the prediction has 2 outputs"),
    (GAUSSIAN, X, X, r"the prediction's shape \(4, 1\).* the target has shape \(4, 2\)"),
    (GAUSSIAN, np.zeros((4, 3)), np.zeros((4, 1)), r"the prediction has shape \(4, 3\)"),
    (nn.HuberLoss(), X, X * 1j, "HuberLoss: takes real numbers, the target has dtype complex64"),
    (CLASSES, X, np.array([0, 1, 2, 0]), "target 2 is not below the number of classes, 2"),
    (CLASSES, X, np.zeros(4), r"integers of shape \(4,\), for logits of shape \(4, 2\); .* is float64 of"),
    *((CLASSES, X, target, r"CrossEntropy: takes .* the target (is|has) ") for target in (
        [0, 1], np.zeros(4, complex), np.zeros((4, 2), int)
    )),
    (SQUARED, X, None, r"MeanSquaredError: takes .* the target is "),
    *((SQUARED, np.ones(1), target, f"real numbers.*target has dtype {re.escape(str(target.dtype))}") for target in (
        np.array([1j]), np.array(["1.0"]), np.array([None]), np.array(["2026"], "M8[Y]")
    )),
    *((loss, given, np.zeros(1, int), rf"{type(loss).__name__}: takes .* the prediction (is|has) ") for given in (
        [[0.0, 1.0]], np.zeros((1, 2), int), np.zeros((1, 2), complex)
    ) for loss in (CLASSES, SQUARED)),
    # Elements that only happen to be as many are never paired.
    *((
        SQUARED, np.zeros(one), np.zeros(other),
        rf"shape {re.escape(str(one))}.* the target has shape {re.escape(str(other))}",
    ) for one, other in (
        ((2, 3), (3, 2)), ((4, 6), (4, 2, 3)), ((4, 1, 2), (4, 2)), ((4, 1), (1, 4)), ((4,), ()),
    )),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_loss_names_itself_and_what_it_cannot_take(number):
    loss, prediction, target, message = WRONG[number]
    with pytest.raises(DataError, match=message):
        loss.forward(prediction, target)
