"""SOAP against algorithms 3 and 4 of Vyas et al. (2024), written once more in float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import optim
from tests.optim.whole import data, updated

SHAPES = [(9, 9), (7, 12), (12, 7), (1, 5)]


def basis(p, q, *, first):
    return np.linalg.eigh(p)[1][:, ::-1] if first else np.linalg.qr(p @ q)[0]


def soap(o, history, w):
    rows, columns = w.shape
    left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
    ql, qr = np.eye(rows), np.eye(columns)
    m, v = np.zeros_like(w), np.zeros_like(w)
    b1, b2 = o.betas
    for t, g in enumerate(history):  # t Adam steps are done: the first gradient gives the bases only
        if t:
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * (ql.T @ g @ qr) ** 2
            n = (ql.T @ m @ qr) / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + o.eps)
            w = w - o.lr * (ql @ n @ qr.T + o.weight_decay * w)
        left, right = b2 * left + (1 - b2) * (g @ g.T), b2 * right + (1 - b2) * (g.T @ g)
        if not t or t % o.frequency == 0:
            ql = basis(left, ql, first=not t) if rows <= o.max_dimension else ql
            qr = basis(right, qr, first=not t) if columns <= o.max_dimension else qr
    return w


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("settings", [{}, {"frequency": 1, "betas": (0.9, 0.99)}, {"max_dimension": 8}], ids=str)
def test_fifty_steps_agree_with_the_algorithms(shape, settings):
    optimizer = optim.SOAP(lr=0.02, weight_decay=0.1, **settings)
    start, history = data(shape)
    np.testing.assert_allclose(updated(optimizer, start, history), soap(optimizer, history, start), rtol=0, atol=1e-10)


def test_float32_agrees_with_float64_to_rounding():
    optimizer = optim.SOAP(lr=0.02, frequency=5)
    found = updated(optimizer, *data((9, 9), "f4", 10))
    assert found.dtype == np.float32
    start, history = data((9, 9), "f4", 10)
    np.testing.assert_allclose(found, updated(optimizer, start.astype("f8"), history.astype("f8")), rtol=0, atol=1e-4)


def test_a_rotation_of_all_gradients_rotates_the_steps():
    """Which distinguishes SOAP from Adam; up to the signs that eigenvectors may have, which have no effect."""
    start, history = data((6, 6), steps=8)
    turn, _ = np.linalg.qr(np.random.default_rng(5).standard_normal((6, 6)))
    optimizer = optim.SOAP(lr=0.02, weight_decay=0.0, frequency=2)
    found = updated(optimizer, turn @ start, turn @ history)
    np.testing.assert_allclose(found, turn @ updated(optimizer, start, history), rtol=0, atol=1e-9)
    plain = optim.SOAP(lr=0.02, weight_decay=0.0, max_dimension=1)
    assert np.abs(updated(plain, turn @ start, turn @ history) - turn @ updated(plain, start, history)).max() > 1e-3


def test_a_side_that_is_too_long_has_no_arrays():
    optimizer = optim.SOAP(max_dimension=8)
    assert optimizer.state_shapes((9, 8)) == {
        "momentum": (9, 8),
        "second_moment": (9, 8),
        "right": (8, 8),
        "right_basis": (8, 8),
    }
    assert optimizer.cost((9, 8)) < optim.SOAP().cost((9, 8))
