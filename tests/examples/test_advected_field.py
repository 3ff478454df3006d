"""The example of an advected field: the equation is solved, the emulator learns it, one set of bits on any cut."""

import numpy as np
import pytest

from tests.support.cut_examples import assert_draws, assert_same_on_cuts

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


def test_parameters_and_fields_have_the_same_bits_on_any_cut(program):
    options = ["--small", "--steps", "3", "--rollout", "3"]
    assert_same_on_cuts(program, options, ((3, "1 3"), (4, "2 1")))


def test_no_steps_are_refused(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--rollout", "0"], "self")
    assert "--rollout 0: expected at least 1" in capsys.readouterr().err


def test_a_picture_is_drawn_of_a_cut_field(program, tmp_path):
    pytest.importorskip("matplotlib")
    options = ["--small", "--steps", "1", "--rollout", "3", "--domain", "2", "1"]
    assert_draws(program, options, 2, tmp_path / "fields.svg")
