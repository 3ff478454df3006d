"""Regularization terms: values by their formulas, gradients and products by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz

TERMS = {
    "Tikhonov": mz.Tikhonov(0.7),
    "Tikhonov, reference": mz.Tikhonov(0.7, np.linspace(0.0, 1.0, 30).reshape(5, 6)),
    "total variation": mz.TotalVariation(0.3, smoothing=0.2),
}


@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS)
def test_gradients_and_products_are_derivatives(term, rng) -> None:
    values, direction = rng.normal(size=(2, 5, 6))
    step = 1e-5
    ahead, behind = (term(values + sign * step * direction) for sign in (1, -1))
    slope = (ahead[0] - behind[0]) / (2 * step)
    assert slope == pytest.approx(float((term(values)[1] * direction).sum()), rel=1e-8)
    curved = (ahead[1] - behind[1]) / (2 * step)
    np.testing.assert_allclose(term.product(values, direction), curved, rtol=1e-6, atol=1e-8)


def test_values_are_those_of_the_formulas(rng) -> None:
    values = rng.normal(size=(4, 3))
    assert mz.Tikhonov(2.0, 0.5)(values)[0] == pytest.approx(((values - 0.5) ** 2).sum())
    total = 0.0
    for i in range(4):
        for j in range(3):
            down = values[i + 1, j] - values[i, j] if i < 3 else 0.0
            right = values[i, j + 1] - values[i, j] if j < 2 else 0.0
            total += np.sqrt(0.01**2 + down**2 + right**2) - 0.01
    assert mz.TotalVariation(3.0, smoothing=0.01)(values)[0] == pytest.approx(3.0 * total)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 4), (0, 3)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_parameters_of_any_shape_keep_shape_and_type(shape, dtype, rng) -> None:
    values = rng.normal(size=shape).astype(dtype)
    for term in (mz.Tikhonov(1.0), mz.TotalVariation(1.0)):
        value, gradient = term(values)
        assert isinstance(value, float)
        for found in (gradient, term.product(values, values)):
            assert (found.shape, found.dtype) == (shape, values.dtype)
