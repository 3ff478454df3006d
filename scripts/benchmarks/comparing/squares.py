"""Write two objectives as sums of squares in NumPy, with which the tests compare the compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from comparing.objectives import CONDUCTIVITY, ROSENBROCK, conductivity_fields, conductivity_matrix, edge_differences

Array = Any
Products = Callable[[Array], Array]


class LeastSquares(NamedTuple):
    """Hold residuals with products with their Jacobian and its transpose, and the start."""

    residual: Callable[[Array], Array]
    #: Of the point; returns the two functions of products.
    linearize: Callable[[Array], tuple[Products, Products]]
    start: Array


def rosenbrock(size: int = 1001) -> LeastSquares:
    """Return the 2 (size - 1) residuals whose squares add up to the chained Rosenbrock function."""

    def residual(x: Array) -> Array:
        return np.concatenate([10.0 * (x[1:] - x[:-1] ** 2), 1.0 - x[:-1]])

    def linearize(x: Array) -> tuple[Products, Products]:
        def tangent(v: Array) -> Array:
            return np.concatenate([10.0 * (v[1:] - 2.0 * x[:-1] * v[:-1]), -v[:-1]])

        def adjoint(w: Array) -> Array:
            result, (bent, straight) = np.zeros(size), w.reshape(2, -1)
            result[1:] += 10.0 * bent
            result[:-1] -= 20.0 * x[:-1] * bent + straight
            return result

        return tangent, adjoint

    return LeastSquares(residual, linearize, np.where(np.arange(size) % 2 == 0, -1.2, 1.0))


def conductivity() -> LeastSquares:
    """Return misfits of fields, and 0.01 times the unknowns: those of the objective of the same name."""
    sources, measured = (fields.T for fields in conductivity_fields())
    edges = edge_differences(len(sources) + 1)

    def residual(m: Array) -> Array:
        return np.concatenate([(np.linalg.solve(conductivity_matrix(m), sources) - measured).ravel(), 0.01 * m])

    def linearize(m: Array) -> tuple[Products, Products]:
        inverse = np.linalg.inv(conductivity_matrix(m))
        flow = np.exp(m)[:, None] * (edges @ inverse @ sources)

        def tangent(v: Array) -> Array:
            return np.concatenate([(-inverse @ (edges.T @ (v[:, None] * flow))).ravel(), 0.01 * v])

        def adjoint(w: Array) -> Array:
            fields, unknowns = w[: sources.size].reshape(sources.shape), w[sources.size :]
            return -((edges @ (inverse @ fields)) * flow).sum(axis=1) + 0.01 * unknowns

        return tangent, adjoint

    return LeastSquares(residual, linearize, np.zeros(len(edges)))


#: By the name of the objective.
PROBLEMS: dict[str, Callable[[], LeastSquares]] = {ROSENBROCK: rosenbrock, CONDUCTIVITY: conductivity}
