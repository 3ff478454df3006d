"""Draw what an inversion has found (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .inversion import Found
from .misfit import Misfit
from .survey import Survey, true_velocity

#: Grids of velocities by what they are.
Named = dict[str, np.ndarray]


def draw(folder: Path, survey: Survey, found: Found) -> list[Path]:
    """Draw models, gradients, misfits and one shot into files of ``folder``; return their paths. Not collective.

    Raises
    ------
    ImportError
        If matplotlib is missing.
    """
    from matplotlib.figure import Figure

    models = {"true": true_velocity(survey), "start": found.start.velocity, "found": found.end.velocity}
    paths = []
    for name, (width, height), fill in (
        ("models", (6.4, 5.6), lambda figure: _models(figure, survey, models)),
        ("gradients", (8, 6), lambda figure: _gradients(figure, survey, found)),
        ("misfit", (7, 3.2), lambda figure: _misfit(figure, found)),
        ("shot", (9, 5), lambda figure: _shot(figure, survey, models, found.iterations[-1].peak)),
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        fill(figure)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _models(figure: Any, survey: Survey, models: Named) -> None:
    limits = {"vmin": models["true"].min(), "vmax": models["true"].max()}
    panels = figure.subplots(len(models), sharex=True, sharey=True)
    for axes, (name, velocity) in zip(panels, models.items(), strict=True):
        image = axes.imshow(velocity, extent=_extent(survey), **limits)
        axes.set(title=f"{name} velocity", ylabel="depth (km)")
    panels[-1].set(xlabel="distance (km)")
    figure.colorbar(image, ax=panels, label="velocity (km/s)", shrink=0.6)


def _gradients(figure: Any, survey: Survey, found: Found) -> None:
    """Draw the gradients below the water, each with colours for its own sizes."""
    left, right, bottom, _ = _extent(survey)
    panels = figure.subplots(2, sharex=True, sharey=True)
    for axes, name, reached in zip(panels, ("start", "end"), (found.start, found.end), strict=True):
        ground = reached.gradient[survey.water :]
        limit = np.quantile(abs(ground), 0.995)
        extent = (left, right, bottom, survey.water * survey.spacing)
        image = axes.imshow(ground, extent=extent, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axes.set(title=f"gradient at the {name}, {found.iterations[-1].peak:g} Hz", ylabel="depth (km)")
        figure.colorbar(image, ax=axes, label="1 / (km/s)", shrink=0.8)
    panels[-1].set(xlabel="distance (km)")


def _misfit(figure: Any, found: Found) -> None:
    left, right = figure.subplots(1, 2)
    for peak in dict.fromkeys(one.peak for one in found.iterations):
        points = [(number, one) for number, one in enumerate(found.iterations, 1) if one.peak == peak]
        left.semilogy([number for number, _ in points], [one.misfit for _, one in points], label=f"{peak:g} Hz")
    left.axhline(found.start.misfit, linestyle=":", color="gray", label=f"start, {found.iterations[-1].peak:g} Hz")
    left.set(xlabel="iteration", ylabel="misfit (part of the energy)")
    left.legend()
    right.plot([found.start.error, *(one.error for one in found.iterations)])
    right.set(xlabel="iteration", ylabel="rms error of the model (km/s)", ylim=(0, None))


def _shot(figure: Any, survey: Survey, models: Named, peak: float) -> None:
    """Draw what the receivers record of the middle shot above each model, and what the found one leaves."""
    misfit = Misfit(survey)
    source, wavelet = survey.sources[survey.shots // 2], survey.wavelet(peak).astype(np.float32)
    records = {name: misfit.records(model.astype(np.float32), source, wavelet) for name, model in models.items()}
    shown = {
        "recorded": records["true"],
        "recorded - start": records["true"] - records["start"],
        "recorded - found": records["true"] - records["found"],
    }
    limit = np.quantile(abs(shown["recorded - start"]), 0.99)
    extent = (0, survey.columns * survey.spacing, survey.steps * survey.time_step, 0)
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True)
    for axes, (name, record) in zip(panels, shown.items(), strict=True):
        axes.imshow(record, extent=extent, aspect="auto", cmap="gray", vmin=-limit, vmax=limit)
        axes.set(title=name, xlabel="receiver (km)")
    panels[0].set(ylabel="time (s)")


def _extent(survey: Survey) -> tuple[float, float, float, float]:
    return (0, survey.columns * survey.spacing, survey.rows * survey.spacing, 0)
