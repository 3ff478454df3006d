"""Implement Newton's method with conjugate gradients in a trust region."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpizero._util.checks import flag, positive, require
from mpizero.optim.vectors.method import DIRECTION, GRADIENT, POINT, MethodProgress, VectorMethod
from mpizero.optim.vectors.space import TRIAL, VectorSpace

#: The state arrays of the inner conjugate gradients: the model's gradient at ``DIRECTION``, and their own direction.
RESIDUAL, CONJUGATE = "residual", "conjugate"
#: A step is accepted if the loss falls by more than this part of what the model predicts. If it falls by less than the
#: second part, the region shrinks to the third part of the step; above the fourth it doubles, up to the last (Nocedal &
#: Wright 2006, algorithm 4.1).
_ACCEPT, _POOR, _SHRINK, _GOOD, _WIDEST = 1e-4, 0.25, 0.25, 0.75, 1e10
#: A region smaller than this part of the point's length ends the method.
_SMALLEST = 1e-14


@dataclass(frozen=True, kw_only=True)
class NewtonCG(VectorMethod):
    """Implement Newton's method with conjugate gradients in a trust region (Steihaug 1983).

    Each step is one evaluation of loss and gradient, as with :class:`LBFGS`, and needs all samples. A product with the
    Hessian is the difference of two gradients, so it costs an evaluation, too; :func:`mpizero.minimize` takes the
    model's own products where it has some, Gauss and Newton's for example. Directions of negative curvature are
    followed to the edge of the region. There are no bounds.

    Attributes
    ----------
    radius : float
        The first radius of the trust region, > 0.
    exact : bool
        Whether evaluations for products are the model's own ones; only for :func:`mpizero.minimize`.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def bowl(parameters, batch):
    ...     apart = parameters["x"] - np.array([1.0, 2.0])
    ...     return float(apart @ apart), {"x": 2 * apart}, 1.0
    >>> with mz.DDPModel(mz.FunctionModel({"x": np.zeros(2)}, bowl), mz.ShardingConfig(comm="self")) as model:
    ...     result = mz.minimize(model, method=mz.NewtonCG(radius=10.0))
    ...     print(result.x.round(6), result.success)
    [1. 2.] True
    """

    radius: float = 1.0
    exact: bool = False

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a setting is out of range."""
        super().__post_init__()
        require(f"{type(self).__name__}: radius", self.radius, positive)
        require(f"{type(self).__name__}: exact", self.exact, flag)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays: those of every method, and two of the conjugate gradients."""
        return (*super().slots, RESIDUAL, CONJUGATE)

    def _go_on(self, space: VectorSpace, progress: MethodProgress) -> None:
        """Begin the conjugate gradients at the middle of the region, and want their first product."""
        square = space.dot(GRADIENT, GRADIENT)
        norm = math.sqrt(square)
        radius = progress.numbers.get("radius", [self.radius])[0]
        length = math.sqrt(space.dot(POINT, POINT))
        if radius <= _SMALLEST * max(length, _SMALLEST):
            self._give_up(space, progress)
            return
        space.copy(GRADIENT, RESIDUAL)
        space.copy(GRADIENT, CONJUGATE)
        space.scale(-1.0, CONJUGATE)
        space.scale(0.0, DIRECTION)
        progress.numbers = {
            "radius": [radius],
            "square": [square],
            "enough": [min(0.5, math.sqrt(norm)) * norm],
            "scale": [math.sqrt(space.precision) * (1.0 + length)],
        }
        self._want_product(space, progress)

    def _want_product(self, space: VectorSpace, progress: MethodProgress) -> None:
        if self.exact:
            self._want(space, progress, "product", 0.0, CONJUGATE)
            return
        length = math.sqrt(space.dot(CONJUGATE, CONJUGATE))
        self._want(space, progress, "product", progress.numbers["scale"][0] / length, CONJUGATE)

    def _take(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        if progress.stage == "product":
            self._take_product(space, progress, loss)
        else:
            self._take_trial(space, progress, loss)

    # ------------------------------------------------------------------ the model inside the region

    def _take_product(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        """Take a product with the Hessian; then want another one, or a trial of the model's minimizer.

        Without a product (the loss is not finite there) the step ends where it is; the first one goes to the edge.
        """
        numbers = progress.numbers
        if not math.isfinite(loss):
            if not numbers.get("inside"):
                space.add(self._edge(space, progress), CONJUGATE, DIRECTION)
            self._want(space, progress, "search", 1.0, DIRECTION)
            return
        if not self.exact:
            space.add(-1.0, GRADIENT, TRIAL)
            space.scale(1.0 / progress.step, TRIAL)
        curvature, (square,) = space.dot(CONJUGATE, TRIAL), numbers["square"]
        edge = self._edge(space, progress)
        inside = curvature > 0.0 and square / curvature < edge
        step = square / curvature if inside else edge
        space.add(step, CONJUGATE, DIRECTION)
        space.add(step, TRIAL, RESIDUAL)
        left = space.dot(RESIDUAL, RESIDUAL)
        if not inside or math.sqrt(left) <= numbers["enough"][0]:
            self._want(space, progress, "search", 1.0, DIRECTION)
            return
        numbers["square"], numbers["inside"] = [left], [1.0]
        space.scale(left / square, CONJUGATE)
        space.add(-1.0, RESIDUAL, CONJUGATE)
        self._want_product(space, progress)

    def _edge(self, space: VectorSpace, progress: MethodProgress) -> float:
        """Return the step along ``CONJUGATE`` from ``DIRECTION`` to the edge of the region."""
        a, b = space.dot(CONJUGATE, CONJUGATE), space.dot(DIRECTION, CONJUGATE)
        c = space.dot(DIRECTION, DIRECTION) - progress.numbers["radius"][0] ** 2
        root = math.sqrt(max(0.0, b * b - a * c))
        return (root - b) / a if b <= 0.0 else -c / (b + root)

    # ------------------------------------------------------------------ a trial of the step

    def _take_trial(self, space: VectorSpace, progress: MethodProgress, loss: float) -> None:
        """Accept the step or stay, and choose the next radius."""
        numbers = progress.numbers
        length = math.sqrt(space.dot(DIRECTION, DIRECTION))
        # The model's gradient at the step is RESIDUAL, at its start GRADIENT: the model falls by the mean slope.
        predicted = -0.5 * (space.dot(DIRECTION, RESIDUAL) + space.dot(DIRECTION, GRADIENT))
        rounding = 10.0 * space.precision * max(1.0, abs(progress.loss))
        ratio = -math.inf
        if math.isfinite(loss):
            fallen = progress.loss - loss
            small = max(abs(fallen), abs(predicted)) <= rounding
            ratio = 1.0 if small else fallen / predicted if predicted > 0.0 else -math.inf
        (radius,) = numbers["radius"]
        if ratio < _POOR:
            radius = _SHRINK * length
        elif ratio > _GOOD and length >= 0.99 * radius:
            radius = min(2.0 * radius, _WIDEST)
        progress.numbers = {"radius": [radius]}
        if ratio > _ACCEPT:
            self._accept(space, progress, loss)
        else:
            self._go_on(space, progress)
