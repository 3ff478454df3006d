"""Compare what receivers record with what a model of the ground predicts, and differentiate that."""

from __future__ import annotations

from typing import Any

import numpy as np

from .survey import Survey
from .wave import HALO, propagate, propagate_adjoint

#: Waves are damped by exp(-DAMPING^2) in each time step at the outer edges, and less inside.
DAMPING = 0.25


class Misfit:
    """Compute the misfit of shots and its gradient by the velocities, one shot after the other.

    It keeps memory for the fields of one shot, so each rank needs one of its own.

    Parameters
    ----------
    survey : Survey
        Where sources and receivers are.
    dtype : data type
        Of all arrays.
    """

    def __init__(self, survey: Survey, dtype: Any = np.float32) -> None:
        self.survey, self._around = survey, survey.border + HALO
        rows, columns = survey.rows + 2 * self._around, survey.columns + 2 * self._around
        damping = [_damping(cells, survey.border) for cells in (rows, columns)]
        self._taper = np.multiply.outer(*damping).astype(dtype)
        self._fields = np.zeros((survey.steps + 1, rows, columns), dtype)
        self._receivers = survey.places + self._around
        self._scale = self._fields.dtype.type(survey.time_step / survey.spacing)

    def records(self, velocity: np.ndarray, source: np.ndarray, wavelet: np.ndarray) -> np.ndarray:
        """Return what the receivers record of a shot: an array of (steps, receivers)."""
        propagate(self._factors(velocity), self._taper, source + self._around, wavelet, self._fields)
        return self._fields[1:, self._receivers[:, 0], self._receivers[:, 1]]

    def loss_and_grad(self, parameters: dict[str, Any], batch: Any, gradients: dict[str, Any]) -> tuple[float, float]:
        """Return the misfit of some shots and their number; write the gradient.

        The misfit of a shot is the energy of the residual relative to that of the recording.
        """
        shots, recorded = batch
        velocity, total = parameters["velocity"], 0.0
        gradients["velocity"][...] = 0
        for source, wavelet, measured in zip(shots["source"], shots["wavelet"], recorded, strict=True):
            residual = self.records(velocity, source, wavelet) - measured
            energy = float(np.sum(measured**2, dtype=np.float64))
            total += float(np.sum(residual**2, dtype=np.float64)) / energy
            residual *= residual.dtype.type(2.0 / energy)
            gradients["velocity"] += self.adjoint(velocity, source, residual)[0]
        return total, float(len(recorded))

    def adjoint(
        self, velocity: np.ndarray, source: np.ndarray, by_records: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return derivatives by velocities and by wavelet, given those by what :meth:`records` has just returned."""
        factors = self._factors(velocity)
        by_factors, by_wavelet = np.empty_like(factors), np.empty(self.survey.steps, factors.dtype)
        propagate_adjoint(
            factors,
            self._taper,
            source + self._around,
            self._receivers,
            by_records,
            self._fields,
            by_factors,
            by_wavelet,
        )
        by_velocity = by_factors * (2 * self._scale**2) * self._extended(velocity)
        return _folded(_folded(by_velocity, self._around).T, self._around).T, by_wavelet

    def _factors(self, velocity: np.ndarray) -> np.ndarray:
        return (self._scale * self._extended(velocity)) ** 2

    def _extended(self, velocity: np.ndarray) -> np.ndarray:
        """Return the velocities with the border: it has those of the edges."""
        return np.pad(velocity, self._around, mode="edge")


def _folded(by_extended: np.ndarray, width: int) -> np.ndarray:
    """Add what belongs to the rows around the grid to its first and last row: the adjoint of repeating them."""
    inside = by_extended[width:-width].copy()
    inside[0] += by_extended[:width].sum(axis=0)
    inside[-1] += by_extended[-width:].sum(axis=0)
    return inside


def _damping(cells: int, border: int) -> np.ndarray:
    """Return the taper along one axis."""
    place = np.arange(cells) - HALO
    inside = np.minimum(place, cells - 2 * HALO - 1 - place).clip(0, border)
    return np.exp(-((DAMPING * (border - inside) / border) ** 2))
