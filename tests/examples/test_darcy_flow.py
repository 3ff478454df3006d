"""The example of Darcy flow: the equation is solved, the operator learns it, one set of bits on any cut."""

import numpy as np
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(example):
    return example("darcy_flow")


def test_the_pressure_of_uniform_ground_is_the_series_of_sines(program):
    points, x = 32, (np.arange(32) + 0.5) / 32
    found = program.solve(np.full((1, points, points), 3.0))[0]
    odd = np.arange(1, 200, 2)
    sines = np.sin(np.pi * np.outer(odd, x))
    size = 16 / (np.pi**4 * np.outer(odd, odd) * (odd[:, None] ** 2 + odd**2))
    np.testing.assert_allclose(3 * found, sines.T @ size @ sines, rtol=0.02, atol=1e-4)


def test_where_ground_changes_the_flow_does_not(program):
    ground = np.full((1, 64, 64), program.LOW)
    ground[:, 32:] = program.HIGH
    u = program.solve(ground)[0, :, 32] * 64
    slopes = [program.LOW * (u[31] - u[30]), program.HIGH * (u[33] - u[32])]
    assert slopes[0] == pytest.approx(slopes[1], abs=0.05)
    np.testing.assert_allclose(program.solve(ground[:, ::-1])[0], program.solve(ground)[0, ::-1], rtol=1e-6)


def test_ground_is_of_two_kinds_and_the_same_on_a_finer_grid(program, rng):
    size = rng.normal(size=(8, program.WAVES, program.WAVES))
    coarse, fine = (program.permeability(size, n) for n in (32, 96))
    assert set(np.unique(coarse)) == {program.LOW, program.HIGH}
    np.testing.assert_array_equal(coarse, fine[:, 1::3, 1::3])  # cells whose middles are those of the coarse grid


def test_the_operator_learns_and_says_so(program, capsys):
    found = program.main(["--small"], "self")
    assert found.error < found.of_mean / 3
    assert found.on_fine_grid < found.of_mean / 3
    told = capsys.readouterr().out
    assert "grid of 16 x 16 cut 1 x 1; 64 samples" in told
    assert told.endswith(f"sha256 {found.sha256} on 1 ranks\n")
