"""Describe a survey: the grid, sources and receivers in water above a ground whose velocities are sought."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpizero.errors import ConfigError

from .wave import STABLE

#: Velocities in km/s: of water, and the least and largest that the ground may have.
WATER, SLOWEST, FASTEST = 1.5, 1.5, 3.6
#: The true layers: depth of the upper edge, height and number of its waves, as parts of the grid; the velocity below.
LAYERS = ((0.3, 0.05, 1.0, 2.1), (0.5, 0.07, 0.7, 2.4), (0.7, 0.06, 1.3, 2.8), (0.87, 0.03, 0.5, 3.2))


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Hold the numbers that describe a survey.

    Attributes
    ----------
    rows, columns : int
        Size of the grid of velocities; rows count downwards.
    spacing, time_step : float
        In km and s.
    steps : int
        Time steps of a shot.
    water : int
        Rows of water at the top, whose velocity is known.
    shots, receivers : int
        Their numbers; both are spread over the whole width.
    border : int
        Rows and columns around the grid in which waves are damped.
    """

    rows: int = 100
    columns: int = 300
    spacing: float = 0.02
    time_step: float = 0.003
    steps: int = 1100
    water: int = 10
    shots: int = 16
    receivers: int = 150
    border: int = 40

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if waves would grow at the largest velocity."""
        longest = STABLE**0.5 * self.spacing / FASTEST
        if self.time_step > longest:
            raise ConfigError(
                f"Survey: waves grow with time_step={self.time_step} s at velocities up to {FASTEST} km/s: take at "
                f"most {longest:.5f} s, or a larger spacing than {self.spacing} km"
            )

    @cached_property
    def sources(self) -> np.ndarray:
        """Rows and columns of the sources, one line a shot."""
        return _in_row(2, self.shots, self.columns)

    @cached_property
    def places(self) -> np.ndarray:
        """Rows and columns of the receivers, one line each."""
        return _in_row(self.water - 2, self.receivers, self.columns)

    def wavelet(self, peak: float) -> np.ndarray:
        """Return what a source adds in each time step: a Ricker wavelet with most energy at ``peak`` Hz."""
        phase = (np.pi * peak * (self.time_step * np.arange(self.steps) - 1.5 / peak)) ** 2
        return (1.0 - 2.0 * phase) * np.exp(-phase)


def _in_row(row: int, count: int, columns: int) -> np.ndarray:
    middles = (np.arange(count) + 0.5) * columns / count
    return np.stack([np.full(count, row), middles.astype(int)], axis=1)


def true_velocity(survey: Survey) -> np.ndarray:
    """Return the velocities that are to be found: water, wavy layers, and a slow lens in the middle of them."""
    z, x = np.meshgrid(np.linspace(0, 1, survey.rows), np.linspace(0, 1, survey.columns), indexing="ij")
    velocity = np.full(z.shape, 1.8)
    for depth, height, waves, inside in LAYERS:
        velocity[z > depth + height * np.sin(2 * np.pi * (waves * x + depth))] = inside
    velocity[((x - 0.5) / 0.12) ** 2 + ((z - 0.45) / 0.12) ** 2 < 1] = 1.8
    velocity[: survey.water] = WATER
    return velocity


def start_velocity(survey: Survey) -> np.ndarray:
    """Return the velocities to start from: they know the mean of each depth, smoothed, and nothing of the lens."""
    mean = true_velocity(survey)[survey.water :].mean(axis=1)
    reach = survey.rows // 8
    smooth = np.convolve(np.pad(mean, reach, mode="edge"), np.full(2 * reach + 1, 1 / (2 * reach + 1)), mode="valid")
    velocity = np.full((survey.rows, survey.columns), WATER)
    velocity[survey.water :] = smooth[:, None]
    return velocity
