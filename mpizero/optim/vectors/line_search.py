"""Search a step along a direction that satisfies the strong Wolfe conditions, one evaluation at a time.

The method is that of Moré & Thuente (1994), "Line search algorithms with guaranteed sufficient decrease". An interval
that contains such steps is made smaller with every evaluation; the next step is the minimizer of a cubic or quadratic
interpolant (section 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

#: An interval that has not shrunk to this part of its length in two evaluations is halved (section 4).
_SHRINK = 0.66
#: While there is no interval, the next step is so many times further from the best step, at least and at most.
_GROWTH = 1.1, 4.0
#: An interval below this part of its upper end cannot be made smaller.
_SMALLEST = 1e-8
#: A step at which the function is infinite or NaN is shortened to this part of its distance from the best one.
_CUT = 0.1

Outcome = Literal["searching", "found", "longest", "stuck"]


class Point(NamedTuple):
    """Hold a step, and the function's value and slope there."""

    step: float
    value: float
    slope: float

    def tilted(self, slope: float) -> Point:
        """Return the point of the function less a line of this slope through the origin."""
        return Point(self.step, self.value - self.step * slope, self.slope - slope)


@dataclass
class LineSearch:
    """Search a step in (0, ``longest``] with enough decrease and a small slope.

    These are the conditions ``value <= start.value + decrease * step * start.slope`` and ``abs(slope) <= curvature *
    abs(start.slope)``. A value that may differ from that of the start by rounding only says nothing; the one that
    follows from the slopes, ``start.value + step * (start.slope + slope) / 2``, takes its place. The first condition
    is then ``slope <= (2 * decrease - 1) * start.slope``, as in Hager & Zhang 2005, "A new conjugate gradient method
    with guaranteed descent and an efficient line search", section 4.

    Attributes
    ----------
    start : Point
        The function at step 0, where it falls.
    step : float
        The step to evaluate next.
    decrease, curvature : float
        The constants of the conditions, 0 < ``decrease`` < ``curvature`` < 1.
    longest : float
        The longest step.
    most : int
        The number of evaluations after which the search gives up.
    rounding : float
        Values that differ by no more than this may differ by rounding only.
    best : Point
        The end of the interval at which the function is smallest.
    other : Point
        The other end; the same point while there is no interval.
    """

    start: Point = Point(0.0, 0.0, 0.0)
    step: float = 1.0
    decrease: float = 1e-3
    curvature: float = 0.9
    longest: float = 1e10
    most: int = 20
    rounding: float = 0.0
    best: Point = Point(0.0, 0.0, 0.0)
    other: Point = Point(0.0, 0.0, 0.0)
    bracketed: bool = False
    tilts: bool = True
    ends: bool = False
    evaluations: int = 0
    length: float = 0.0
    length_before: float = 0.0

    def __post_init__(self) -> None:
        """Begin at the start, unless the search has begun before, and a checkpoint tells how far it is."""
        self.start, self.best, self.other = Point(*self.start), Point(*self.best), Point(*self.other)
        if not self.evaluations:
            self.best = self.other = self.start
            self.length, self.length_before = self.longest, 2.0 * self.longest

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Self:
        """Return the search whose fields are ``saved``; a point may be a list of three numbers.

        Raises
        ------
        ValueError
            If a point is anything else.
        """
        made = cls(**saved)
        for point in (made.start, made.best, made.other):
            if len(point) != 3 or not all(isinstance(value, float) for value in point):
                raise ValueError(f"{point!r:.80} is not a step, a value and a slope")
        return made

    def tell(self, value: float, slope: float) -> Outcome:
        """Take the function's value and slope at :attr:`step`, and set :attr:`step` to the next one if there is any.

        Returns
        -------
        str
            "found" if :attr:`step` satisfies the conditions, or no better one can be found; "longest" if it is the
            longest step and the function still falls there; "stuck" if the function has not fallen enough at any step;
            and "searching" if :attr:`step` is a new one.
        """
        self.evaluations += 1
        if self.ends:
            return "found"
        if not (math.isfinite(value) and math.isfinite(slope)):
            return self._shorten()
        if abs(value - self.start.value) <= self.rounding:  # so the interval shrinks to where the slope is small
            value = self.start.value + 0.5 * self.step * (self.start.slope + slope)
        here, line = Point(self.step, value, slope), self.decrease * self.start.slope
        enough = value <= self.start.value + self.step * line
        flat = abs(slope) <= self.curvature * abs(self.start.slope)
        if flat and enough:
            return "found"
        if enough and slope <= line and self.step >= self.longest:
            return "longest"
        self.tilts &= not (enough and slope >= 0.0)
        if self.tilts and value <= self.best.value and not enough:
            self._narrow(here, line)
        else:
            self._narrow(here, 0.0)
        return self._check()

    def _shorten(self) -> Outcome:
        """Take a shorter step than one at which the function has no value."""
        self.longest = self.step
        self.step = self.best.step + _CUT * (self.step - self.best.step)
        return "stuck" if self.evaluations >= self.most or self.step <= self.best.step else "searching"

    def _narrow(self, here: Point, line: float) -> None:
        """Replace an end of the interval by ``here``, and choose the next step (section 4).

        The comparisons are those of the function less a line of slope ``line``: until a step with enough decrease is
        found, its interval is the one that must contain such steps (section 2).
        """
        ends = (self.best.tilted(line), self.other.tilted(line), here.tilted(line))
        best, _, trial = ends
        turned = trial.slope * math.copysign(1.0, best.slope) < 0.0
        least, most = self._limits()
        step = _trial_step(*ends, bracketed=self.bracketed, least=least, most=most)
        self.bracketed |= turned or trial.value > best.value
        if trial.value > best.value:
            self.other = here
        else:
            self.other, self.best = (self.best if turned else self.other), here
        if self.bracketed:
            length = abs(self.other.step - self.best.step)
            if length >= _SHRINK * self.length_before:
                step = self.best.step + 0.5 * (self.other.step - self.best.step)
            self.length_before, self.length = self.length, length
        self.step = min(max(step, 0.0), self.longest)

    def _limits(self) -> tuple[float, float]:
        """Return the smallest and the largest step that may come next."""
        if self.bracketed:
            return min(self.best.step, self.other.step), max(self.best.step, self.other.step)
        beyond = self.step - self.best.step
        return self.step + _GROWTH[0] * beyond, min(self.step + _GROWTH[1] * beyond, self.longest)

    def _check(self) -> Outcome:
        """Tell whether the step that was chosen can be tried; otherwise choose the best one, if that is good enough."""
        least, most = self._limits()
        small = self.bracketed and (not least < self.step < most or most - least <= _SMALLEST * most)
        if not small and self.evaluations < self.most:
            return "searching"
        self.step, line = self.best.step, self.decrease * self.start.slope
        self.ends = self.best.value <= self.start.value + self.step * line and self.step > 0.0
        return "searching" if self.ends else "stuck"


def _trial_step(best: Point, other: Point, here: Point, *, bracketed: bool, least: float, most: float) -> float:
    """Return the next step, from the ends of the interval and the last step (section 4, cases 1 to 4)."""
    cubic, fall = _cubic(best, here), best.slope - here.slope
    secant = here.step + here.slope / fall * (here.step - best.step) if fall else math.inf
    if here.value > best.value:
        length = here.step - best.step
        quadratic = best.step + 0.5 * length * best.slope / (best.slope - (here.value - best.value) / length)
        nearer = abs(cubic - best.step) < abs(quadratic - best.step)
        return cubic if nearer else cubic + 0.5 * (quadratic - cubic)
    if here.slope * math.copysign(1.0, best.slope) < 0.0:
        return cubic if abs(cubic - here.step) > abs(secant - here.step) else secant
    forward = here.step > best.step
    if abs(here.slope) >= abs(best.slope):
        return _cubic(other, here) if bracketed else (most if forward else least)
    if (cubic - here.step) * (here.step - best.step) <= 0.0:  # the cubic falls without end, or turns behind
        cubic = most if forward else least
    if not bracketed:
        return min(max(max(cubic, secant, key=lambda step: abs(step - here.step)), least), most)
    step = min(cubic, secant, key=lambda step: abs(step - here.step))
    limit = here.step + _SHRINK * (other.step - here.step)
    return min(step, limit) if forward else max(step, limit)


def _cubic(a: Point, b: Point) -> float:
    """Return the minimizer of the cubic with the values and slopes of two points; ``a.step`` if there is none."""
    theta = 3.0 * (a.value - b.value) / (b.step - a.step) + a.slope + b.slope
    scale = max(abs(theta), abs(a.slope), abs(b.slope)) or 1.0
    root = scale * math.sqrt(max(0.0, (theta / scale) ** 2 - (a.slope / scale) * (b.slope / scale)))
    root = math.copysign(root, a.step - b.step)
    below = 2.0 * root - b.slope + a.slope
    return b.step + (root - b.slope + theta) / below * (a.step - b.step) if below else a.step
