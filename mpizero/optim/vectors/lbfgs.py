"""Implement L-BFGS with bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpizero._util.checks import require, whole
from mpizero.errors import ConfigError
from mpizero.optim.vectors.bounds import Bounds
from mpizero.optim.vectors.diagonal import Diagonal
from mpizero.optim.vectors.method import DIRECTION, GRADIENT, POINT, MethodProgress
from mpizero.optim.vectors.searching import SearchingMethod
from mpizero.optim.vectors.space import TRIAL, VectorSpace

#: State array of the diagonal from which the approximation of the Hessian begins.
DIAGONAL = "diagonal"

#: A pair whose curvature is below this part of the largest that it could have is not used.
_LEAST_CURVATURE = 2.2e-16
INITIAL = ("scalar", "diagonal")


@dataclass(frozen=True, kw_only=True)
class LBFGS(SearchingMethod):
    """Implement L-BFGS (Liu & Nocedal 1989; Nocedal & Wright 2006, algorithm 7.5) with a strong Wolfe line search.

    Each step is one evaluation: give ``train`` all samples, the same ones in every step. The parameters after a step
    are those of the next trial; :func:`mpizero.minimize` makes steps until the method has converged, and leaves the
    model at the last iterate.

    With bounds, elements that a scaled gradient step takes to a bound go there, and are left out of the quasi-Newton
    step of the others (as in Bertsekas 1982, "Projected Newton methods for optimization problems with simple
    constraints"). Where the whole step leaves the bounds it is projected, and the line search runs on the way to its
    end, so every trial is within the bounds.

    Attributes
    ----------
    history : int
        Number of pairs of differences that are kept, each two vectors as long as the parameters.
    bounds : pair, dict of str to pair, or None
        Lower and upper bound of all parameters, or pairs by the names of parameters or patterns of names. A bound is a
        number, an array of the parameter's shape, or None. Start values beyond a bound are moved to it.
    preconditioner : dict of str to float or Array, or None
        Positive factors by the names of parameters or patterns of names, each a number or an array of the parameter's
        shape; 1 for other parameters. They are the diagonal of the inverse Hessian, up to one factor, from which the
        approximation begins in every iteration: large where the loss depends little on an element.
    initial : {"scalar", "diagonal"}
        From which matrix the approximation begins in every iteration: a number times the preconditioner, or a diagonal
        that is learned, the diagonal of the BFGS update of itself, scaled by the newest pair (Gilbert & Lemaréchal
        1989, "Some numerical experiments with variable-storage quasi-Newton algorithms"). That takes one vector more,
        and often fewer evaluations where unknowns have different scales.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def bowl(parameters, batch):
    ...     apart = parameters["x"] - np.array([1.0, 2.0])
    ...     return float(apart @ apart), {"x": 2 * apart}, 1.0
    >>> with mz.DDPModel(mz.FunctionModel({"x": np.zeros(2)}, bowl), mz.ShardingConfig(comm="self")) as model:
    ...     result = mz.minimize(model, method=mz.LBFGS(history=5, bounds=(None, 1.5)))
    ...     print(result.x.round(6), result.success)
    [1.  1.5] True
    """

    history: int = 10
    bounds: Any = None
    preconditioner: Any = None
    initial: str = "scalar"

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a setting is out of range."""
        super().__post_init__()
        owner = type(self).__name__
        require(f"{owner}: history", self.history, whole(1))
        if self.initial not in INITIAL:
            raise ConfigError(f"{owner}: initial={self.initial!r:.80}: expected 'scalar' or 'diagonal'")
        object.__setattr__(self, "bounds", Bounds.parse(self.bounds, owner))
        object.__setattr__(self, "preconditioner", Diagonal.parse(self.preconditioner, owner))

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays: those of every method, and the differences of parameters and of gradients."""
        pairs = (f"{kind}_difference_{i}" for i in range(self.history) for kind in ("parameter", "gradient"))
        return (*super().slots, *pairs, *[DIAGONAL] * (self.initial == "diagonal"))

    def _learn(self, space: VectorSpace, progress: MethodProgress) -> None:
        numbers = progress.numbers
        made = int(numbers.get("made", [0.0])[0])
        s, y = _pair(made % self.history)
        space.parameters(s)
        space.add(-1.0, POINT, s)
        space.copy(TRIAL, y)
        space.add(-1.0, GRADIENT, y)
        space.copy(y, DIRECTION)  # which the search has ended
        space.precondition(DIRECTION)
        curvature, square = space.dot(s, y), space.dot(y, DIRECTION)
        steepness = -space.dot(GRADIENT, s)
        if curvature <= _LEAST_CURVATURE * steepness or square == 0.0:
            return
        rho = numbers.setdefault("rho", [0.0] * self.history)
        rho[made % self.history] = 1.0 / curvature
        if self.initial == "diagonal":
            self._learn_diagonal(space, s, y, curvature, first=made == 0)
        numbers["made"], numbers["gamma"] = [made + 1.0], [curvature / square]

    @staticmethod
    def _learn_diagonal(space: VectorSpace, s: str, y: str, curvature: float, *, first: bool) -> None:
        """Update ``DIAGONAL`` by the newest pair, so that the pair's curvature is right along ``y``; uses DIRECTION."""
        if first:  # the inverse of the preconditioner
            space.fill(1.0, DIRECTION)
            space.precondition(DIRECTION)
            space.fill(1.0, DIAGONAL)
            space.divide(DIRECTION, DIAGONAL)
        else:
            space.copy(s, DIRECTION)
            space.multiply(DIAGONAL, DIRECTION)
            space.update_diagonal(DIAGONAL, y, curvature, DIRECTION, space.dot(s, DIRECTION))
        space.copy(y, DIRECTION)
        space.divide(DIAGONAL, DIRECTION)
        space.scale(space.dot(y, DIRECTION) / curvature, DIAGONAL)

    def _choose(self, space: VectorSpace, progress: MethodProgress) -> float:
        """Set ``DIRECTION`` to minus the inverse Hessian's approximation times the gradient, by the two loops."""
        numbers = progress.numbers
        numbers.pop("steepest", None)
        gamma = numbers.get("gamma", [1.0])[0]
        made = int(numbers.get("made", [0.0])[0])
        newest_first = [place % self.history for place in range(made - 1, max(-1, made - 1 - self.history), -1)]
        space.copy(GRADIENT, DIRECTION)
        space.drop_fixed(GRADIENT, gamma, DIRECTION)
        rho, alphas = numbers.get("rho", []), {}
        for place in newest_first:
            s, y = _pair(place)
            alphas[place] = rho[place] * space.dot(s, DIRECTION)
            space.add(-alphas[place], y, DIRECTION)
            space.drop_fixed(GRADIENT, gamma, DIRECTION)
        if self.initial == "diagonal":
            space.scale(-1.0, DIRECTION)
            space.divide(DIAGONAL, DIRECTION)
        else:
            space.scale(-gamma, DIRECTION)
            space.precondition(DIRECTION)
        for place in reversed(newest_first):
            s, y = _pair(place)
            space.add(-alphas[place] - rho[place] * space.dot(y, DIRECTION), s, DIRECTION)
            space.drop_fixed(GRADIENT, gamma, DIRECTION)
        space.go_to_bounds(GRADIENT, gamma, DIRECTION)
        return 1.0


def _pair(place: int) -> tuple[str, str]:
    return f"parameter_difference_{place}", f"gradient_difference_{place}"
