"""Define the objectives that minimizers are compared on; NumPy alone, because several interpreters import this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = Any
Evaluate = Callable[[Array], tuple[float, Array]]


class Objective(NamedTuple):
    """Hold a function that returns value and gradient, the start, bounds for the bounded case, and if it is convex."""

    evaluate: Evaluate
    start: Array
    bounds: tuple[float, float]
    convex: bool


def rosenbrock(size: int = 1001) -> Objective:
    """Return the chained Rosenbrock function, from the start of More, Garbow and Hillstrom."""

    def evaluate(x: Array) -> tuple[float, Array]:
        a, b = x[1:] - x[:-1] ** 2, 1.0 - x[:-1]
        slope = np.zeros_like(x)
        slope[1:] += 200.0 * a
        slope[:-1] -= 400.0 * x[:-1] * a + 2.0 * b
        return float((100.0 * a**2 + b**2).sum()), slope

    return Objective(evaluate, np.where(np.arange(size) % 2 == 0, -1.2, 1.0), (-2.0, 0.9), False)


def logistic() -> Objective:
    """Return the regularized logistic loss of 400 random samples with 60 features, from zero."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, 60)) * np.logspace(0, -1.5, 60)
    sign = np.where(features @ rng.normal(size=60) + rng.normal(size=400) > 0.0, 1.0, -1.0)

    def evaluate(w: Array) -> tuple[float, Array]:
        margin = sign * (features @ w)
        slope = features.T @ (-sign / (1.0 + np.exp(np.minimum(margin, 700.0))))
        return float(np.logaddexp(0.0, -margin).sum() + 0.05 * (w @ w)), slope + 0.1 * w

    return Objective(evaluate, np.zeros(60), (-0.5, 0.5), True)


def inversion(cells: int = 60) -> Objective:
    """Return the misfit of a conductivity on a line, measured by the fields of three sources; from a constant.

    The unknowns are logarithms of the conductivity. The gradient is that of the adjoint: one more solve a source.
    """
    edges = np.zeros((cells + 1, cells))
    edges[np.arange(cells), np.arange(cells)], edges[np.arange(1, cells + 1), np.arange(cells)] = 1.0, -1.0
    place = np.linspace(0.0, 1.0, cells + 1)
    truth = 0.5 * np.sin(2.0 * np.pi * place) + 0.8 * (abs(place - 0.6) < 0.15)
    sources = np.stack([np.exp(-(((np.linspace(0, 1, cells) - at) / 0.05) ** 2)) for at in (0.2, 0.5, 0.8)], 1)

    def fields(m: Array) -> tuple[Array, Array]:
        matrix = edges.T @ (np.exp(m)[:, None] * edges)
        return matrix, np.linalg.solve(matrix, sources)

    measured = fields(truth)[1]

    def evaluate(m: Array) -> tuple[float, Array]:
        matrix, found = fields(m)
        residual = found - measured
        adjoint = np.linalg.solve(matrix, residual)
        slope = -np.exp(m) * ((edges @ adjoint) * (edges @ found)).sum(axis=1) + 1e-4 * m
        return 0.5 * float((residual**2).sum()) + 0.5e-4 * float(m @ m), slope

    return Objective(evaluate, np.zeros(cells + 1), (-0.3, 0.6), False)


OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "Rosenbrock, 1,001": rosenbrock, "logistic regression": logistic, "conductivity": inversion,
}  # fmt: skip


def pairs(x: Array) -> tuple[float, Array]:
    """Return value and gradient of Rosenbrock functions of neighbouring pairs of elements."""
    a, b = x[1::2] - x[::2] ** 2, 1.0 - x[::2]
    slope = np.empty_like(x)
    slope[1::2] = 200.0 * a
    slope[::2] = -400.0 * x[::2] * a - 2.0 * b
    return float((100.0 * a**2 + b**2).sum()), slope
