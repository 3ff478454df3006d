"""Losses against PyTorch's: values and gradients, with weights, and where they are limited."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import nn

torch = pytest.importorskip("torch")
functional = torch.nn.functional

FACTORS = (0.5, 1.0, 3.0)


def gaussian(prediction, target):
    mean, spread = prediction.chunk(2, dim=-1)
    return functional.gaussian_nll_loss(mean, target, spread.exp(), eps=0.2, reduction="none")


def relative(prediction, target, weight=None):
    weight = torch.ones_like(target) if weight is None else weight
    norms = [(weight * x**2).flatten(1).sum(1).sqrt() for x in (prediction - target, target)]
    return norms[0] / norms[1]


#: This loss, PyTorch's of each element (relative: of each sample), and how many numbers are predicted for an output.
LOSSES = {
    "absolute": (nn.L1Loss(), lambda p, t: functional.l1_loss(p, t, reduction="none"), 1),
    "squared": (nn.MeanSquaredError(), lambda p, t: functional.mse_loss(p, t, reduction="none"), 1),
    "huber": (nn.HuberLoss(0.7), lambda p, t: functional.huber_loss(p, t, delta=0.7, reduction="none"), 1),
    "binary": (
        nn.BCEWithLogitsLoss(FACTORS),
        lambda p, t: functional.binary_cross_entropy_with_logits(
            p, t, pos_weight=torch.tensor(FACTORS, dtype=torch.float64), reduction="none"
        ),
        1,
    ),
    "gaussian": (nn.GaussianNLLLoss(eps=0.2), gaussian, 2),
}


def compare(loss, theirs, prediction, target, weight=None):
    """Compare the sum of losses and its gradient with ``theirs``, which returns the sum."""
    inputs = torch.from_numpy(prediction).requires_grad_()
    wanted = theirs(inputs, torch.from_numpy(target.astype(float)))
    wanted.backward()
    given = target if weight is None else {"target": target, "weight": weight}
    total, _, cache = loss.forward(prediction, given)
    assert total == pytest.approx(wanted.item(), rel=1e-12)
    gradient = inputs.grad.numpy()
    np.testing.assert_allclose(loss.backward(cache), gradient, rtol=1e-12, atol=1e-12 * abs(gradient).max())


@pytest.mark.parametrize("size", [1.0, 50.0])
@pytest.mark.parametrize("name", LOSSES)
def test_element_losses_and_their_gradients_are_pytorch_s(name, size, rng):
    loss, each, numbers = LOSSES[name]
    prediction, target = rng.normal(0, size, (7, 2, 3 * numbers)), rng.normal(size=(7, 2, 3))
    if name == "gaussian":
        prediction[..., 3:] /= size / 2  # logarithms
    target = (target > 0).astype(float) if name == "binary" else target
    weight = rng.uniform(0, 2, (7, 2))
    weighted = torch.from_numpy(weight[..., None])
    compare(loss, lambda p, t: each(p, t).sum() / 6, prediction, target)
    compare(loss, lambda p, t: (each(p, t) * weighted).sum() / 6, prediction, target, weight)


def test_relative_errors_and_their_gradients_are_pytorch_s(rng):
    prediction, target = rng.normal(size=(2, 5, 4, 3))
    weight, inside = rng.uniform(0, 2, 5), rng.uniform(0.1, 2, (5, 4, 3))
    compare(nn.RelativeL2Loss(), lambda p, t: relative(p, t).sum(), prediction, target)
    samples = torch.from_numpy(weight)
    compare(nn.RelativeL2Loss(), lambda p, t: (samples * relative(p, t)).sum(), prediction, target, weight)
    inner = torch.from_numpy(inside)
    compare(nn.RelativeL2Loss(), lambda p, t: relative(p, t, inner).sum(), prediction, target, inside)


def test_weighted_cross_entropy_and_its_gradient_are_pytorch_s(rng):
    logits, target, weight = rng.normal(size=(6, 4)), rng.integers(0, 4, 6), rng.uniform(0, 2, 6)
    each = lambda p, t: functional.cross_entropy(p, t.long(), reduction="none")  # noqa: E731
    compare(nn.CrossEntropy(), lambda p, t: (torch.from_numpy(weight) * each(p, t)).sum(), logits, target, weight)
