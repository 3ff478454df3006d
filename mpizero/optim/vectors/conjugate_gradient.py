"""Implement nonlinear conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpizero.optim.vectors.method import DIRECTION, GRADIENT, MethodProgress
from mpizero.optim.vectors.searching import SearchingMethod
from mpizero.optim.vectors.space import TRIAL, VectorSpace

#: A direction descends if its slope is below minus this part of the gradient's square.
_DESCENT = 0.01


@dataclass(frozen=True, kw_only=True)
class NonlinearCG(SearchingMethod):
    """Implement conjugate gradients of Polak and Ribière with nonnegative factors (Nocedal & Wright 2006, section 5.2).

    Each step is one evaluation, as with :class:`LBFGS`, and needs all samples; it keeps four vectors, whatever the
    number of iterations. There are no bounds.

    Attributes
    ----------
    gtol, ftol, regularization
        As in :class:`VectorMethod`.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def bowl(parameters, batch):
    ...     apart = parameters["x"] - np.array([1.0, 2.0])
    ...     return float(apart @ apart), {"x": 2 * apart}, 1.0
    >>> with mz.DDPModel(mz.FunctionModel({"x": np.zeros(2)}, bowl), mz.ShardingConfig(comm="self")) as model:
    ...     result = mz.minimize(model, method=mz.NonlinearCG(gtol=1e-8))
    ...     print(result.x.round(6), result.success)
    [1. 2.] True
    """

    decrease: ClassVar[float] = 1e-4
    curvature: ClassVar[float] = 0.4

    def _learn(self, space: VectorSpace, progress: MethodProgress) -> None:
        old, new, mixed = (space.dot(a, b) for a, b in ((GRADIENT, GRADIENT), (TRIAL, TRIAL), (TRIAL, GRADIENT)))
        search = progress.search
        assert search is not None
        progress.numbers = {
            "factor": [max(0.0, (new - mixed) / old)],
            "square": [new],
            "fallen": [search.step * search.start.slope],
        }

    def _choose(self, space: VectorSpace, progress: MethodProgress) -> float:
        numbers = progress.numbers
        (factor,), (square,), (fallen,) = (numbers[name] for name in ("factor", "square", "fallen"))
        space.scale(factor, DIRECTION)
        space.add(-1.0, GRADIENT, DIRECTION)
        slope = space.dot(GRADIENT, DIRECTION)
        if slope > -_DESCENT * square:
            space.copy(GRADIENT, DIRECTION)
            space.scale(-1.0, DIRECTION)
            slope = -square
        # The loss is taken to change as much, to first order, as in the iteration before (section 3.5).
        return fallen / slope
