"""Compare the gradient with differences of the loss along directions.

[Note: slopes] A difference (f(p + h d) - f(p - h d)) / 2h is apart from the derivative by truncation, which falls with
h, and by rounding, which grows as h falls. Neither is known beforehand, so both are measured: truncation by what the
last change of h has changed, rounding by second differences of the loss over steps so small that nothing else is left
in them. The h where both together are least decides, unless a smaller one, at which rounding hides no such difference,
says otherwise: a loss that is steep in a place and flat around it. The gradient is called wrong only where the
difference exceeds them several times, at three points: a kink (of ReLU, of a maximum) lies within reach of one of
them at most.

All parameters are moved together first. What that shows is right for every parameter whose own part in the slope is
well above its uncertainty; the others are moved alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpizero.train.modelcheck.checked_model import CheckedModel, LossAndGradients, Named
from mpizero.train.modelcheck.repeats import CheckBatch
from mpizero.types import Array

#: A gradient that is off by less is not called wrong; in float32 by less than the second.
PRECISION = (1e-4, 2e-3)
#: Uncertainty, relative to the slope, at which a parameter counts as measured.
MEASURED = 0.05
#: How many times the uncertainty a difference must be, to be one.
SURE = 4.0

Direction = Mapping[str, Array]


class Slope(NamedTuple):
    """Hold the derivative along a direction.

    Attributes
    ----------
    seen, said : float
        As the loss changes, and as the gradient has it.
    parts : dict of str to float
        What each parameter adds to ``said``.
    bound : float
        How far the two may be apart by truncation and rounding.
    rounding : float
        By rounding alone.
    """

    seen: float
    said: float
    parts: dict[str, float]
    bound: float
    rounding: float

    @property
    def off(self) -> float:
        """The distance of the two."""
        return abs(self.seen - self.said)


class ParameterPoint:
    """Evaluate loss and gradient at one choice of the parameters, and differences around it."""

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
        """Return the loss where ``move`` times ``h`` leads, and the parameters there; NaN where it has none."""
        there = dict(self.at)
        for name, direction in move.items():
            there[name] = (self.at[name] + h * direction).astype(self.checked.dtype)
        try:
            return self.checked.loss(there, self.batch.x, self.batch.y), there
        except Exception:  # noqa: BLE001 - where the model is defined at its start, not here, NaN says so
            return math.nan, there

    def noise(self, rng: np.random.Generator) -> float:
        """Return how far rounding moves the loss."""
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
        """Return how far rounding moves the gradient: by what the last bits of the parameters change."""
        if self._shaken is None:
            moved = shaken(self.at, rng)
            gradients = self.checked.evaluate(moved, self.batch.x, self.batch.y).gradients
            own = self.evaluation.gradients
            self._shaken = {name: gradients[name].astype(np.float64) - value for name, value in own.items()}
        return self._shaken

    def slope(self, move: Direction, rng: np.random.Generator, enough: float = 0.0) -> Slope | None:
        """Measure the derivative along a direction; None where the loss cannot be evaluated around here.

        ``enough`` is the relative uncertainty at which to stop.
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
        """Tell whether nothing speaks against the gradient along its own direction."""
        names = [name for name in self.checked.names if self.at[name].size]
        return self.verdict(self.slope(steep(self, rng, names), rng)) is not False

    def verdict(self, slope: Slope | None) -> bool | None:
        """Tell whether the gradient is right along a direction; None where it cannot be told."""
        if slope is None:
            return None
        size = max(abs(slope.seen), abs(slope.said))
        if slope.off > max(SURE * slope.bound, self.precision * size):
            return False if slope.bound <= MEASURED * size or slope.off > 0.3 * size else None
        return True if slope.bound <= MEASURED * size or size == 0 else None


def dense(
    point: ParameterPoint, rng: np.random.Generator, names: Sequence[str] | Mapping[str, float]
) -> dict[str, Array]:
    """Return a direction in which every element takes part."""
    return {n: rng.standard_normal(point.at[n].shape) * point.scales[n] for n in names}


def steep(point: ParameterPoint, rng: np.random.Generator, names: Sequence[str]) -> dict[str, Array]:
    """Return a direction along the gradient itself, each parameter with a sign of its own."""
    moves = {}
    for name in names:
        g = point.evaluation.gradients[name].astype(np.float64)
        size = math.sqrt(float(np.mean(g**2))) if g.size else 0.0
        toward = g / size if size > 0 and math.isfinite(size) else rng.standard_normal(g.shape)
        moves[name] = toward * (point.scales[name] * rng.choice([-1.0, 1.0]))
    return moves


def scales_of(checked: CheckedModel, at: Named, evaluation: LossAndGradients) -> dict[str, float]:
    """Return for every trainable parameter how far its elements are moved: their own size, if they have one.

    Parameters that are zeros are moved so far that the loss changes by a tenth.
    """
    own = {name: math.sqrt(float(np.mean(np.square(at[name], dtype=np.float64)))) for name in checked.names}
    largest = max([size for size in own.values() if size > 0], default=0.1)
    for name, size in own.items():
        if size == 0:
            g = evaluation.gradients[name].astype(np.float64)
            push = float(np.linalg.norm(g)) * math.sqrt(g.size)
            own[name] = min(max(0.1 * abs(evaluation.loss) / push, 1e-3 * largest), largest) if push > 0 else largest
    return own


def shaken(at: Named, rng: np.random.Generator) -> dict[str, Array]:
    """Return parameters that differ in their last bits."""
    return {n: (v * (1 + np.finfo(v.dtype).eps * rng.integers(-1, 2, v.shape))).astype(v.dtype) for n, v in at.items()}


def generic(
    checked: CheckedModel, at: Named, scales: Mapping[str, float], rng: np.random.Generator
) -> dict[str, Array]:
    """Return a point near by at which nothing is zero or equal by accident."""
    there = {name: np.array(value) for name, value in at.items()}
    for name, scale in scales.items():
        there[name] = (at[name] + 0.05 * scale * rng.standard_normal(at[name].shape)).astype(checked.dtype)
    return there
