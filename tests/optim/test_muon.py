"""Muon against the formulas of Jordan et al. (2024), written once more in float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import optim
from mpizero.errors import ConfigError
from mpizero.optim.whole_tensor import newton_schulz
from mpizero.types import ParameterSpec
from tests.optim.whole import data, updated

SHAPES = [(12, 7), (7, 12), (1, 5)]


def orthogonal(g, steps=5):
    """Newton-Schulz on singular values: each is mapped by the polynomial, singular vectors stay."""
    u, s, vt = np.linalg.svd(g, full_matrices=False)
    s = s / max(np.sqrt((g * g).sum()), 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ vt


def muon(o, history, w, factor):
    m = np.zeros_like(w)
    for g in history:
        m = o.momentum * m + (1 - o.momentum) * g
        u = (1 - o.momentum) * g + o.momentum * m if o.nesterov else m
        w = w - o.lr * o.weight_decay * w - o.lr * factor * orthogonal(u, o.iterations)
    return w


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_fifty_steps_agree_with_the_formulas(shape, nesterov):
    optimizer = optim.Muon(lr=0.02, weight_decay=0.1, nesterov=nesterov)
    start, history = data(shape)
    expected = muon(optimizer, history, start, np.sqrt(max(1, shape[1] / shape[0])))
    np.testing.assert_allclose(updated(optimizer, start, history), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_scales_are_those_of_the_papers(shape):
    start, history = data(shape, steps=3)
    for settings, factor in (
        ({"output_axis": 0}, np.sqrt(max(1, shape[0] / shape[1]))),
        ({"scale": "match_rms_adamw"}, 0.2 * np.sqrt(12)),
    ):
        optimizer = optim.Muon(lr=0.02, weight_decay=0.0, iterations=4, momentum=0.8, **settings)
        found = updated(optimizer, start, history)
        np.testing.assert_allclose(found, muon(optimizer, history, start, factor), rtol=0, atol=1e-12)


def test_float32_agrees_with_float64_to_rounding():
    optimizer = optim.Muon(lr=0.02)
    start, history = data((12, 7), steps=10)
    found = updated(optimizer, start.astype("f4"), history.astype("f4"))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, updated(optimizer, start, history), rtol=0, atol=2e-5)


def test_singular_values_come_near_one_and_a_gradient_of_zeros_stays():
    g = np.linalg.qr(np.random.default_rng(0).standard_normal((30, 20)))[0] * np.geomspace(1, 0.05, 20)
    s = np.linalg.svd(newton_schulz(g.copy()), compute_uv=False)
    assert 0.6 < s.min() < s.max() < 1.3
    assert not newton_schulz(np.zeros((4, 3))).any()


def test_it_takes_matrices_that_decay_and_adamw_the_others_with_a_rate_of_their_own():
    optimizer = optim.Muon(lr=0.1, adamw_lr_scale=0.5, weight_decay=0.2, exclude=["head.*"])
    specs = [
        ParameterSpec("a.weight", (3, 4)),
        ParameterSpec("head.weight", (3, 4)),
        ParameterSpec("a.bias", (3,), decay=False),
        ParameterSpec("table.weight", (3, 4), decay=False),
        ParameterSpec("z", (3, 4), complex=True),
        ParameterSpec("empty", (0, 4)),
    ]
    assert [optimizer.takes(spec) for spec in specs] == [True, False, False, False, False, False]
    taken, head, bias = (optimizer.group_of(spec) for spec in specs[:3])
    assert optimizer.tensor_step(optimizer.hyper(7, taken, np.float32)) == (7, 0.1, 0.2)
    for group, decays in ((head, 1), (bias, 0)):
        expected = optim.AdamW(lr=0.05, weight_decay=0.2).hyper(7, decays, np.float32)
        np.testing.assert_array_equal(optimizer.hyper(7, group, np.float32), expected)
    with pytest.raises(ConfigError, match=r"exclude: 'haed.\*' fits the name of no parameter"):
        optim.Muon(exclude=["haed.*"]).check_names([spec.name for spec in specs])


def test_groups_set_rate_and_decay_of_tensors():
    optimizer = optim.Muon(lr=0.1, groups=[optim.ParameterGroup("a.*", lr_scale=2.0, weight_decay=0.3)])
    group = optimizer.group_of(ParameterSpec("a.weight", (3, 4)))
    assert optimizer.tensor_step(optimizer.hyper(1, group, np.float32, 0.25)) == (1, 0.5, 0.3)
