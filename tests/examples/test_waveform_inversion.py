"""The example of a full-waveform inversion: waves, their exact adjoint, the same bits on any ranks and after a kill."""

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError
from mpizero.testing import adjoint_test, check_model, run_in_threads, taylor_test

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "gallery" / "waveform_inversion"
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def parts():
    """The program and its parts; imported when a test runs, because collecting tests must not load Numba."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAM))  # where Python finds `waveforms` when it runs the program
        import invert
        from waveforms import inversion, misfit, survey, wave
    tiny = survey.Survey(rows=16, columns=24, steps=100, water=5, shots=3, receivers=7, border=6)
    return SimpleNamespace(invert=invert, inversion=inversion, misfit=misfit, survey=survey, wave=wave, tiny=tiny)


def test_fields_are_those_of_the_formula_in_numpy(parts):
    factors, taper = RNG.uniform(0.05, 0.3, (14, 17)), RNG.uniform(0.9, 1.0, (14, 17))
    wavelet, source = RNG.normal(size=30), np.array([5, 7])
    fields = np.zeros((31, 14, 17))
    parts.wave.propagate(factors, taper, source, wavelet, fields)
    inside = (slice(parts.wave.HALO, -parts.wave.HALO),) * 2
    before, now = np.zeros((2, 14, 17))
    for n, value in enumerate(wavelet):
        laplacian = sum(
            weight * np.roll(now, by, axis)
            for axis in (0, 1)
            for by, weight in ((-2, -1 / 12), (-1, 4 / 3), (0, -5 / 2), (1, 4 / 3), (2, -1 / 12))
        )
        after = np.zeros_like(now)
        after[inside] = (taper * (2 * now - taper * before + factors * laplacian))[inside]
        after[tuple(source)] += value
        np.testing.assert_allclose(fields[n + 1], after, rtol=0, atol=1e-12 * abs(after).max())
        before, now = now, after


def test_waves_in_a_uniform_ground_are_those_of_the_exact_solution_for_one_without_edges(parts):
    """2-D waves from a point: the integral of s(t - r / c cosh(u)) over u > 0, divided by 2 pi."""
    survey, c, peak = parts.survey.Survey(rows=60, columns=60, steps=450, water=20, shots=1, receivers=6), 2.0, 5.0
    step = survey.time_step
    wavelet = (c * step / survey.spacing) ** 2 * survey.wavelet(peak)
    records = parts.misfit.Misfit(survey, np.float64).records(np.full((60, 60), c), survey.sources[0], wavelet)
    u = np.linspace(0, 8, 2001)
    for place, record in zip(survey.places, records.T, strict=True):
        away = survey.spacing * float(np.hypot(*(place - survey.sources[0])))
        times = step * np.arange(1, survey.steps + 1)[:, None] - away / c * np.cosh(u) - 1.5 / peak
        phase = (np.pi * peak * times) ** 2
        exact = np.trapezoid((1 - 2 * phase) * np.exp(-phase), u, axis=1) / (2 * np.pi)
        assert abs(record - exact).max() < 0.03 * abs(exact).max()


def a_shot(parts):
    misfit = parts.misfit.Misfit(parts.tiny, np.float64)
    return misfit, parts.survey.start_velocity(parts.tiny), parts.tiny.sources[1], parts.tiny.wavelet(9.0)


def test_what_is_recorded_has_an_adjoint(parts):
    misfit, velocity, source, wavelet = a_shot(parts)

    def back(by_records):
        misfit.records(velocity, source, wavelet)
        return misfit.adjoint(velocity, source, by_records)[1]

    records = RNG.normal(size=(parts.tiny.steps, parts.tiny.receivers))
    adjoint_test(
        partial(misfit.records, velocity, source), back, RNG.normal(size=parts.tiny.steps), records, comm="self"
    )


def test_the_gradient_is_that_of_the_misfit(parts):
    misfit, velocity, _, _ = a_shot(parts)
    x, y = parts.inversion.Shots(misfit, parts.survey.true_velocity(parts.tiny), 9.0).samples(range(3))

    def evaluated(velocity):
        gradient = {"velocity": np.empty_like(velocity)}
        return misfit.loss_and_grad({"velocity": velocity}, (x, y), gradient)[0], gradient["velocity"]

    slope = taylor_test(lambda v: evaluated(v)[0], lambda v: evaluated(v)[1], velocity)
    assert np.isfinite(slope)
    check_model(mz.FunctionModel({"velocity": velocity}, misfit.loss_and_grad, in_place=True), x, y, comm="self")


def test_time_steps_with_which_waves_grow_are_refused(parts):
    with pytest.raises(ConfigError, match=r"time_step=0\.004 s .* at most 0\.0034"):
        parts.survey.Survey(time_step=0.004)


def run(parts, comm, folder, *options):
    return parts.invert.main(["--small", "--folder", str(folder), *options], comm)


def test_velocities_have_the_same_bits_on_any_ranks_and_after_an_interruption(parts, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    alone = run(parts, "self", tmp_path / "alone")
    told = capsys.readouterr().out.splitlines()
    assert alone.end.misfit == alone.iterations[-1].misfit < 0.25 * alone.start.misfit
    assert alone.end.error == alone.iterations[-1].error < 0.9 * alone.start.error
    assert "no pictures" in told[-2]
    assert told[-1].endswith(f"sha256 {alone.sha256} on 1 ranks")
    assert len(told) == len(alone.iterations) + 4

    def killed(comm):
        def report(text):
            if text.startswith("7 Hz, iteration 4"):
                raise KeyError("the end")

        peaks, iterations, survey = parts.invert.SMALL
        with mz.Mesh(comm) as mesh:
            settings = parts.inversion.Settings(survey=survey, peaks=peaks, iterations=iterations)
            parts.inversion.Inversion(mesh, mz.Config(micro_batch=1), settings, tmp_path / "killed", 3, report).run(
                resume=False
            )

    with pytest.raises(KeyError, match="the end"):
        run_in_threads(2, killed)
    assert sorted(os.listdir(tmp_path / "killed")) == ["step_00000005", "step_00000008"]
    resumed = run_in_threads(3, lambda comm: run(parts, comm, tmp_path / "killed", "--resume"))
    assert {found.sha256 for found in resumed} == {alone.sha256}
    assert all(found.iterations == alone.iterations for found in resumed)
    assert capsys.readouterr().out.count(" Hz, iteration ") == 2  # those after the checkpoint
    again = run(parts, "self", tmp_path / "killed", "--resume")
    assert again.sha256 == alone.sha256

    with pytest.raises(ConfigError, match="step_00000010 is of an earlier run: .*--resume"):
        run(parts, "self", tmp_path / "alone")
    with pytest.raises(ConfigError, match="made with iterations=5, this run has 6"):
        run(parts, "self", tmp_path / "alone", "--resume", "--iterations", "6")


def test_pictures_are_drawn_of_what_was_found(parts, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run(parts, "self", tmp_path, "--iterations", "1")
    names = [f"{name}.png" for name in ("models", "gradients", "misfit", "shot")]
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("pictures: "))
    assert told.count(".png") == len(names)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
