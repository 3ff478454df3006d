"""Compare the gradient with finite differences of the loss along directions.

[Note: slopes] The difference (f(p + h d) - f(p - h d)) / 2h of the loss f, with parameters p, direction d and step h,
differs from the derivative by truncation, which falls with h, and by rounding, which grows as h falls. Neither is known
beforehand, so both are estimated: truncation by how much the difference changes from one h to the next, rounding by
second differences of the loss over steps so small that they contain nothing else. The h with the smallest sum of both
errors decides, with one exception: a loss may be steep at one point and flat around it. So a smaller h decides if the
gradient agrees there, and rounding is small enough to show a disagreement. The gradient is called wrong only if it is
wrong by several times the error at three points, because a kink (of ReLU, of a maximum) is near one of them at most.

All parameters are first changed together. That proves the gradient of every parameter whose own part of the slope is
well above the uncertainty. The other parameters are then changed one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpizero.train.modelcheck.checked_model import CheckedModel, LossAndGradients, Named
from mpizero.train.modelcheck.repeats import CheckBatch
from mpizero.types import Array

#: Relative errors below which a gradient is not called wrong: in float64, and in float32.
PRECISION = (1e-4, 2e-3)
#: Largest uncertainty, relative to the slope, at which a slope counts as measured.
MEASURED = 0.05
#: A difference counts only if it is this many times the uncertainty.
SURE = 4.0

Direction = Mapping[str, Array]


class Slope(NamedTuple):
    """Hold the derivative of the loss along one direction, computed in two ways.

    Attributes
    ----------
    seen, said : float
        The derivative from finite differences of the loss, and from the gradient that the model returned.
    parts : dict of str to float
        By parameter, its term in the sum ``said``.
    bound : float
        How much ``seen`` and ``said`` may differ by truncation and rounding.
    rounding : float
        How much ``seen`` and ``said`` may differ by rounding alone.
    """

    seen: float
    said: float
    parts: dict[str, float]
    bound: float
    rounding: float

    @property
    def off(self) -> float:
        """Return the distance between ``seen`` and ``said``."""
        return abs(self.seen - self.said)


class ParameterPoint:
    """Evaluate loss and gradient at the parameters ``at``, and finite differences of the loss around them.

    ``scales`` has the size by which each parameter is changed.
    """

    def __init__(self, checked: CheckedModel, batch: CheckBatch, at: Named, scales: Mapping[str, float]) -> None:
        self.checked, self.batch, self.at, self.scales = checked, batch, at, scales
        self.evaluation: LossAndGradients = checked.evaluate(at, batch.x, batch.y)
        gradients = self.evaluation.gradients.values()
        self._coarse = (
            float(np.float32(self.evaluation.loss)) == self.evaluation.loss
        )  # no float, or NumPy compares in float32
        coarse = self._coarse or checked.dtype == np.float32 or all((np.float32(g) == g).all() for g in gradients)
        self.precision = PRECISION[int(coarse)]
        self._noise: float | None = None
        self._shaken: dict[str, Array] | None = None

    def loss(self, move: Direction, h: float) -> tuple[float, dict[str, Array]]:
        """Return the loss at the parameters plus ``h`` times ``move``, NaN if it fails, and the changed parameters."""
        there = dict(self.at)
        for name, direction in move.items():
            there[name] = (self.at[name] + h * direction).astype(self.checked.dtype)
        try:
            return self.checked.loss(there, self.batch.x, self.batch.y), there
        except Exception:  # noqa: BLE001 - the model may be defined at its start values, but not here
            return math.nan, there

    def noise(self, rng: np.random.Generator) -> float:
        """Return by how much rounding changes the loss; measured at the first call."""
        if self._noise is None:
            h = 64 * float(np.finfo(self.checked.dtype).eps) if self.checked.dtype == np.float32 else 1e-7
            found = [float(np.finfo(np.float32 if self._coarse else np.float64).eps) * abs(self.evaluation.loss)]
            for _ in range(3):
                move = dense(self, rng, self.scales)
                second = self.loss(move, h)[0] + self.loss(move, -h)[0] - 2 * self.evaluation.loss
                found += [abs(second)] if math.isfinite(second) else []
            self._noise = max(found)
        return self._noise

    def shaken(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return the gradient's change, by parameter, when the parameters' last bits change; measured at first call."""
        if self._shaken is None:
            moved = shaken(self.at, rng)
            gradients = self.checked.evaluate(moved, self.batch.x, self.batch.y).gradients
            own = self.evaluation.gradients
            self._shaken = {name: gradients[name].astype(np.float64) - value for name, value in own.items()}
        return self._shaken

    def slope(self, move: Direction, rng: np.random.Generator, enough: float = 0.0) -> Slope | None:
        """Measure the derivative along the direction ``move``; None if the loss cannot be evaluated around this point.

        The search for the best step stops at a relative uncertainty of ``enough``.
        """
        noise, h, tried = self.noise(rng), 1.0, list[Slope]()
        for _ in range(15):
            (up, above), (down, below) = self.loss(move, h), self.loss(move, -h)
            moved = {name: (above[name].astype(np.float64) - below[name]) / (2 * h) for name in move}
            parts = {name: float(np.sum(self.evaluation.gradients[name] * moved[name])) for name in move}
            shaken = math.fsum(float(np.sum(self.shaken(rng)[name] * moved[name])) for name in move)
            seen, said = (up - down) / (2 * h), math.fsum(parts.values())
            rounding = 3 * noise / h + 3 * abs(shaken)
            change = abs(seen - said - (tried[-1].seen - tried[-1].said)) if tried else math.inf
            tried.append(Slope(seen, said, parts, change / 2 + rounding, rounding))
            best = min(tried, key=lambda slope: slope.bound if math.isfinite(slope.bound) else math.inf)
            if best.bound <= enough * abs(best.seen) and best.off <= self.precision * abs(best.seen):
                return best
            if rounding > best.bound and SURE * rounding > best.off / 4:
                break
            h /= 4
        if not math.isfinite(best.bound):
            return None
        nearer = [s for s in tried[tried.index(best) :] if s.off + s.rounding <= best.off / 2]
        return best._replace(bound=max(best.bound, best.off / SURE)) if nearer else best

    def shows_right(self, rng: np.random.Generator) -> bool:
        """Return False if the gradient is found wrong along its own direction, else True."""
        names = [name for name in self.checked.names if self.at[name].size]
        return self.verdict(self.slope(steep(self, rng, names), rng)) is not False

    def verdict(self, slope: Slope | None) -> bool | None:
        """Tell whether the gradient is right along the direction of ``slope``; None if the slope is too uncertain."""
        if slope is None:
            return None
        size = max(abs(slope.seen), abs(slope.said))
        if slope.off > max(SURE * slope.bound, self.precision * size):
            return False if slope.bound <= MEASURED * size or slope.off > 0.3 * size else None
        return True if slope.bound <= MEASURED * size or size == 0 else None


def dense(
    point: ParameterPoint, rng: np.random.Generator, names: Sequence[str] | Mapping[str, float]
) -> dict[str, Array]:
    """Return a random direction in which every element of the named parameters changes."""
    return {n: rng.standard_normal(point.at[n].shape) * point.scales[n] for n in names}


def steep(point: ParameterPoint, rng: np.random.Generator, names: Sequence[str]) -> dict[str, Array]:
    """Return a direction along the gradient of each named parameter, with a random sign for each parameter."""
    moves = {}
    for name in names:
        g = point.evaluation.gradients[name].astype(np.float64)
        size = math.sqrt(float(np.mean(g**2))) if g.size else 0.0
        toward = g / size if size > 0 and math.isfinite(size) else rng.standard_normal(g.shape)
        moves[name] = toward * (point.scales[name] * rng.choice([-1.0, 1.0]))
    return moves


def scales_of(checked: CheckedModel, at: Named, evaluation: LossAndGradients) -> dict[str, float]:
    """Return, for every trainable parameter, by how much its elements are changed: by their root mean square.

    For a parameter that is all zeros, the size is chosen so that the loss changes by about a tenth, within limits.
    """
    sizes = {name: max(1, at[name].size) for name in checked.names}
    own = {name: math.sqrt(float(np.sum(np.square(at[name], dtype=np.float64))) / n) for name, n in sizes.items()}
    largest = max([size for size in own.values() if size > 0], default=0.1)
    for name, size in own.items():
        if size == 0:
            g = evaluation.gradients[name].astype(np.float64)
            push = float(np.linalg.norm(g)) * math.sqrt(g.size)
            own[name] = min(max(0.1 * abs(evaluation.loss) / push, 1e-3 * largest), largest) if push > 0 else largest
    return own


def shaken(at: Named, rng: np.random.Generator) -> dict[str, Array]:
    """Return parameters that differ from those in ``at`` by random changes of the last bit."""
    return {n: (v * (1 + np.finfo(v.dtype).eps * rng.integers(-1, 2, v.shape))).astype(v.dtype) for n, v in at.items()}


def generic(
    checked: CheckedModel, at: Named, scales: Mapping[str, float], rng: np.random.Generator
) -> dict[str, Array]:
    """Return random parameters near those in ``at``, of which no elements are zero or equal to each other by chance."""
    there = {name: np.array(value) for name, value in at.items()}
    for name, scale in scales.items():
        there[name] = (at[name] + 0.05 * scale * rng.standard_normal(at[name].shape)).astype(checked.dtype)
    return there
