"""The example of an advected field: the equation is solved, the emulator learns it, one set of bits on any cut."""

import numpy as np
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(example):
    return example("advected_field")


def test_a_uniform_wind_carries_waves_which_diffusion_makes_smaller(program):
    x = 2 * np.pi * np.arange(16) / 16
    wind, steps = np.broadcast_to((0.5, -1.0), (16, 16, 2)), 6
    t = program.STEP * steps

    def wave(east, north):
        return np.sin(2 * (x[:, None] - east) + 3 * (x - north))

    found = program.solve(wave(0, 0)[None], wind, steps)
    assert found.shape == (steps + 1, 1, 16, 16)
    decay = np.exp(-program.DIFFUSION * (2**2 + 3**2) * t)
    np.testing.assert_allclose(found[-1, 0], decay * wave(0.5 * t, -t), rtol=0, atol=1e-4)


def test_the_wind_has_no_divergence_and_keeps_the_mean(program, rng):
    wind = program.wind_on(16)
    slopes = [(np.roll(wind[..., i], -1, i) - np.roll(wind[..., i], 1, i)) for i in (0, 1)]
    np.testing.assert_allclose(slopes[0] + slopes[1], 0, atol=1e-12)
    field = program.starts(1, 16, rng)
    assert (field**2).mean() == pytest.approx(1)
    np.testing.assert_allclose(program.solve(field, wind, 5)[-1].mean(), field.mean(), atol=1e-12)


def test_the_emulator_learns_a_step_and_says_so(program, capsys):
    found = program.main(["--small"], "self")
    assert found.first < 0.25
    assert found.last < found.of_start
    told = capsys.readouterr().out
    assert "cut 1 x 1: 16 x 16 points on rank 0" in told
    assert told.endswith(f"sha256 {found.sha256} on 1 ranks\n")
