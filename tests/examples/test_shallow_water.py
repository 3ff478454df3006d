"""The example of shallow water: the equations are solved, rollouts help the operator, one set of bits on any cut."""

import numpy as np
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(example):
    return example("shallow_water")


def test_small_waves_turn_at_their_frequency(program):
    """A wave of wavenumber k has the frequency (f**2 + g H k**2)**0.5; without its balanced part it only turns."""
    x, k = 2 * np.pi * np.arange(16) / 16, 2
    frequency = np.sqrt(program.ROTATION**2 + program.GRAVITY * program.DEPTH * k**2)
    size, steps = 1e-6, 5

    def wave(t):
        phase = k * x[:, None] - frequency * t + 0 * x
        along = [np.cos(phase), frequency / k * np.cos(phase), program.ROTATION / k * np.sin(phase)]
        return size * np.stack(along, axis=-1)[None]

    found = program.solve(wave(0), steps)
    t = steps * program.STEP
    assert found.shape == (steps + 1, 1, 16, 16, 3)
    np.testing.assert_allclose(found[-1] / np.exp(-program.VISCOSITY * k**2 * t), wave(t), rtol=0, atol=2e-3 * size)


def test_water_keeps_its_mass(program, rng):
    start = program.starts(2, 16, rng)
    assert (start[..., 0] ** 2).mean() == pytest.approx(0.01)
    states = program.solve(start, 6)
    np.testing.assert_allclose(states[-1, ..., 0].mean(axis=(1, 2)), 0, atol=1e-12)
    assert 0.001 < abs(states[-1, ..., 1:]).max() < 1


def test_windows_have_each_state_with_those_that_follow(program):
    series = np.arange(5.0).reshape(5, 1, 1, 1, 1) + np.array([0.0, 0.25]).reshape(1, 2, 1, 1, 1)
    before, after = program.windows(series, 3)
    np.testing.assert_array_equal(before.ravel(), [0, 0.25, 1, 1.25])
    np.testing.assert_array_equal(after[2].ravel(), [2, 3, 4])


def test_rollouts_make_the_emulator_better_and_it_says_so(program, capsys):
    found = program.main(["--small"], "self")
    assert found.last[1] < found.last[0]
    assert found.first[1] < 0.4
    told = capsys.readouterr().out
    assert "20 updates through 4 steps" in told
    assert told.endswith(f"sha256 {found.sha256[1]} on 1 ranks\n")
