"""Define the base class of methods that choose a direction and search along it."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from mpizero._util.checks import require, whole
from mpizero.optim.vectors.line_search import LineSearch, Point
from mpizero.optim.vectors.method import DIRECTION, GRADIENT, POINT, MethodProgress, VectorMethod
from mpizero.optim.vectors.space import TRIAL, VectorSpace

#: The longest step of a line search; the natural one is 1.
_LONGEST = 1e10
#: Losses closer than so many units of rounding are taken as equal, because sums of many terms have errors of many
#: units; but not losses that differ by more than this part, and always those that differ by so few units.
_ROUNDING, _PART, _FEW = 1e4, 1e-6, 4.0


@dataclass(frozen=True, kw_only=True)
class SearchingMethod(VectorMethod):
    """Choose a direction, and search along it for a step that satisfies the strong Wolfe conditions.

    Attributes
    ----------
    most_trials : int
        The most evaluations of one line search.
    """

    most_trials: int = 20

    #: Constants of the Wolfe conditions.
    decrease: ClassVar[float] = 1e-3
    curvature: ClassVar[float] = 0.9

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a setting is out of range."""
        super().__post_init__()
        require(f"{type(self).__name__}: most_trials", self.most_trials, whole(1))

    def _go_on(self, space: VectorSpace, progress: MethodProgress) -> None:
        if progress.numbers:
            self._search_along(space, progress, self._choose(space, progress))
        else:
            self._descend(space, progress)

    def _take(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        search = progress.search
        assert search is not None
        outcome = search.tell(loss, space.dot(TRIAL, DIRECTION) if math.isfinite(loss) else math.inf)
        if outcome == "searching":
            self._want(space, progress, "search", search.step, DIRECTION)
        elif outcome == "stuck":
            self._restart(space, progress)
        else:
            self._learn(space, progress)
            self._accept(space, progress, loss)

    def _restart(self, space: VectorSpace, progress: MethodProgress) -> None:
        """Go on along the negative gradient from the last iterate; end if that was the direction already."""
        if progress.numbers.get("steepest") == [1.0]:
            self._give_up(space, progress)
        else:
            self._descend(space, progress)

    def _descend(self, space: VectorSpace, progress: MethodProgress) -> None:
        """Begin a search along the negative gradient, preconditioned if it can be, without what was learned."""
        progress.numbers = {"steepest": [1.0]}
        space.copy(GRADIENT, DIRECTION)
        space.scale(-1.0, DIRECTION)
        space.precondition(DIRECTION)
        self._search_along(space, progress, 1.0 / math.sqrt(space.dot(DIRECTION, DIRECTION)))

    def _search_along(self, space: VectorSpace, progress: MethodProgress, step: float) -> None:
        """Begin a search along ``DIRECTION`` with its first step; with bounds, of the way to where that step ends."""
        if space.bounded:
            space.clip(POINT, step, DIRECTION)
            step = 1.0
        slope = space.dot(GRADIENT, DIRECTION)
        if slope >= 0.0:
            self._restart(space, progress)
            return
        longest = min(_LONGEST, space.longest_step(POINT, DIRECTION))
        search = LineSearch(Point(0.0, progress.loss, slope), step, self.decrease, self.curvature, longest)
        search.most, search.rounding = self.most_trials, _rounding(space.precision) * abs(progress.loss)
        progress.search = search
        self._want(space, progress, "search", step, DIRECTION)

    # ------------------------------------------------------------------ what methods define

    @abstractmethod
    def _learn(self, space: VectorSpace, progress: MethodProgress) -> None:
        """Learn from the way from ``POINT`` to the parameters, and from ``GRADIENT`` to ``TRIAL``. Collective."""

    @abstractmethod
    def _choose(self, space: VectorSpace, progress: MethodProgress) -> float:
        """Set ``DIRECTION`` from ``GRADIENT``, and return the first step along it. Collective."""


def _rounding(precision: float) -> float:
    """Return the part of a loss by which equal losses may differ in a type with this distance from 1 to the next."""
    return max(_FEW * precision, min(_ROUNDING * precision, _PART))
