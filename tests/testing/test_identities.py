from __future__ import annotations

import math

import numpy as np
import pytest

from mpizero.errors import RemoteError
from mpizero.testing import adjoint_test, run_in_threads, taylor_test


def f(x):
    return float(np.sum(np.sin(x) * x**2))


def gradient(x):
    return np.cos(x) * x**2 + 2 * x * np.sin(x)


def test_a_right_gradient_has_slope_two(rng):
    x = rng.standard_normal((3, 4))
    assert taylor_test(f, gradient, x) == pytest.approx(2, abs=0.05)
    assert taylor_test(f, gradient(x), x) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("factor", [0.5, 1 / 8, -1.0, 1.001])
def test_a_gradient_wrong_by_a_factor_is_found(rng, factor):
    with pytest.raises(AssertionError, match=r"Taylor slope .*, expected 2.00 \+- 0.05: slopes \["):
        taylor_test(f, lambda x: factor * gradient(x), rng.standard_normal(20))


def test_named_parameters_are_one_vector(rng):
    x = {"weight": rng.standard_normal((2, 3)), "bias": rng.standard_normal(3)}

    def loss(p):
        return f(p["weight"]) + 3 * f(p["bias"])

    slope = taylor_test(loss, {"weight": gradient(x["weight"]), "bias": 3 * gradient(x["bias"])}, x)
    assert slope == pytest.approx(2, abs=0.05)


def test_a_linear_function_leaves_only_rounding(rng):
    a = rng.standard_normal(5)
    assert math.isinf(taylor_test(lambda x: float(a @ x), a, rng.standard_normal(5)))


def test_remainders_that_are_rounding_errors_count_for_no_slope():
    missing = {0.01 / 2**k for k in (5, 7)}
    assert taylor_test(lambda x: 0.0 if abs(x[0]) in missing else x[0] ** 2, np.zeros(1), np.zeros(1), step=0.01) == 2


def test_a_nan_in_the_gradient_is_found():
    with pytest.raises(AssertionError, match="slope nan"):
        taylor_test(f, np.array([np.nan, 1.0]), np.ones(2))


def test_what_cannot_be_tested_is_refused(rng):
    with pytest.raises(TypeError, match="needs float64, got float32"):
        taylor_test(f, gradient, np.ones(3, np.float32))
    with pytest.raises(ValueError, match="gradient has 2 elements, x has 3"):
        taylor_test(f, np.ones(2), np.ones(3))


def test_a_matrix_and_its_transpose_are_adjoint(rng):
    a = rng.standard_normal((3, 5))
    assert adjoint_test(lambda x: a @ x, lambda y: a.T @ y, rng.standard_normal(5), rng.standard_normal(3)) < 1e-12


def test_a_wrong_factor_in_an_adjoint_is_found_on_every_rank():
    def work(comm):
        def reduce(x):
            comm.allreduce(out := x.copy())
            return out

        with pytest.raises(AssertionError, match="relative difference"):
            adjoint_test(reduce, lambda y: reduce(y) / comm.size, np.ones(3), np.full(3, 1.0 + comm.rank), comm)

    run_in_threads(3, work)


def test_complex_vectors_have_the_scalar_product_of_pairs_of_numbers(rng):
    x, y = rng.standard_normal((2, 4, 2)).view(np.complex128)[..., 0]
    assert adjoint_test(np.fft.fft, lambda y: 4 * np.fft.ifft(y), x, y) < 1e-12
    with pytest.raises(AssertionError, match="relative difference"):
        adjoint_test(np.fft.fft, np.fft.fft, x, y)


def test_a_shape_that_does_not_fit_on_one_rank_is_told_on_all():
    def work(comm):
        with pytest.raises((ValueError, RemoteError), match=r"forward maps \(2,\) to \(2,\)"):
            adjoint_test(lambda x: x, lambda y: y[: 1 + comm.rank], np.ones(2), np.ones(2), comm)

    run_in_threads(2, work)
