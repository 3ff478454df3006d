"""What scripts/benchmarks/minimizers.py minimizes: compiled functions, judged by differences and by NumPy."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]  # where Python finds `comparing` when it runs the script

from comparing import minima, objectives, squares  # noqa: E402

del sys.path[:2]

NAMES = (objectives.ROSENBROCK, "logistic regression", objectives.CONDUCTIVITY, objectives.WELLS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no cc")
    made = tmp_path_factory.mktemp("objectives")
    objectives.build(made)
    return made


def near(start, rng):
    return start + 0.1 * rng.normal(size=start.size)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_products_are_the_derivatives_of_values_and_gradients(folder, name):
    objective, rng = objectives.load(folder)[name], np.random.default_rng(4)
    x, v = near(objective.start, rng), rng.normal(size=objective.start.size)
    h = 1e-5
    (ahead, slope_ahead), (behind, slope_behind) = objective.evaluate(x + h * v), objective.evaluate(x - h * v)
    assert objective.evaluate(x)[1] @ v == pytest.approx((ahead - behind) / (2 * h), rel=1e-6)
    expected = (slope_ahead - slope_behind) / (2 * h)
    np.testing.assert_allclose(objective.product(x, v), expected, rtol=0, atol=1e-6 * abs(expected).max())


@pytest.mark.parametrize(("name", "factor"), [(objectives.ROSENBROCK, 2.0), (objectives.CONDUCTIVITY, 1.0)])
def test_compiled_functions_are_the_sums_of_the_squares_in_numpy(folder, name, factor):
    objective, problem = objectives.load(folder)[name], squares.PROBLEMS[name]()
    np.testing.assert_array_equal(problem.start, objective.start)
    x = near(problem.start, np.random.default_rng(5))
    (value, slope), r = objective.evaluate(x), problem.residual(x)
    assert value == pytest.approx(factor * 0.5 * (r @ r), rel=1e-12)
    np.testing.assert_allclose(slope, factor * problem.linearize(x)[1](r), rtol=1e-9, atol=1e-9 * abs(slope).max())


@pytest.mark.parametrize("name", squares.PROBLEMS)
def test_tangents_are_derivatives_of_residuals_and_adjoints_their_transposes(name):
    problem, rng = squares.PROBLEMS[name](), np.random.default_rng(6)
    x, v = problem.start, rng.normal(size=problem.start.size)
    tangent, adjoint = problem.linearize(x)
    expected = (problem.residual(x + 1e-6 * v) - problem.residual(x - 1e-6 * v)) / 2e-6
    np.testing.assert_allclose(tangent(v), expected, rtol=0, atol=1e-7 * abs(expected).max())
    w = rng.normal(size=expected.size)
    assert tangent(v) @ w == pytest.approx(v @ adjoint(w), rel=1e-11)


def test_pairs_have_the_value_and_gradient_of_rosenbrock_functions_of_two_unknowns(folder):
    x, slope = near(np.tile([-1.2, 1.0], 2000), np.random.default_rng(7)), np.empty(4000)
    value = objectives.load_pairs(folder)(x, slope)
    a, b = x[1::2] - x[::2] ** 2, 1.0 - x[::2]
    assert value == pytest.approx((100.0 * a**2 + b**2).sum(), rel=1e-13)
    np.testing.assert_allclose(slope, np.stack([-400.0 * x[::2] * a - 2.0 * b, 200.0 * a], 1).ravel(), rtol=1e-13)


def test_newton_cg_leaves_directions_of_negative_curvature_for_the_minimum(folder):
    objective = objectives.load(folder)[objectives.WELLS]
    assert np.linalg.eigvalsh(minima.hessian(objective.evaluate, objective.start))[0] < -0.9
    for exact in (True, False):
        counted = minima.CountedObjective(objective, bounded=False)
        minima.by_mpizero(counted, "newton-cg", False, exact)
        found = counted.row(minima.TOLERANCE)
        least = minima.minimum(objective.evaluate, found["x"])
        assert found["met"], found
        assert least["least eigenvalue"] > 1.0
        assert found["value"] == pytest.approx(least["value"], abs=1e-12)
        np.testing.assert_allclose(found["x"], least["x"], rtol=0, atol=1e-8)
        root = max(np.roots([1.0, 0.0, -1.0, -0.1]).real)  # all in the deeper well, where x^3 - x = 0.1
        np.testing.assert_allclose(least["x"], root, rtol=0, atol=1e-9)
