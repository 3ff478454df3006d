"""Minimize an objective by mpizero, SciPy or PETSc/TAO on one process, and count what that takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from comparing.objectives import Objective

HISTORY, MOST = 10, 30_000
#: The methods go on until the last one, and what it took is told for each: the first is the default of mpizero.
TOLERANCES = (1e-5, 1e-9)
TOLERANCE = TOLERANCES[-1]
Array = Any
Row = dict[str, Any]
Evaluate = Callable[[Array], tuple[float, Array]]


class CountedObjective:
    """Count calls of an objective; remember the counts where the gradient first met each tolerance.

    So everybody is judged by the same test, whatever its own is: the largest element of the (projected) gradient.
    """

    def __init__(self, objective: Objective, bounded: bool) -> None:
        self.objective, self.bounds = objective, objective.bounds if bounded else (-np.inf, np.inf)
        self.counts = {"evaluations": 0, "products": 0}
        self.met: dict[float, Row] = {}
        self.last: Row = {}

    def end(self, value: float, x: Array) -> None:
        """Remember how the minimization has ended."""
        self.last = {**self.counts, "value": value, "x": x}

    def row(self, tolerance: float) -> Row:
        """Return counts, value and point where a tolerance was met; those of the end if it never was."""
        return {**self.met.get(tolerance, self.last), "met": tolerance in self.met}

    def evaluate(self, x: Array) -> tuple[float, Array]:
        """Return value and gradient."""
        self.counts["evaluations"] += 1
        value, slope = self.objective.evaluate(x)
        norm = np.abs(projected(x, slope, self.bounds)).max()
        for tolerance in TOLERANCES:
            if norm <= tolerance and tolerance not in self.met:
                self.met[tolerance] = {**self.counts, "value": value, "x": x.copy()}
        return value, slope

    def product(self, x: Array, v: Array) -> Array:
        """Return a product with the Hessian."""
        self.counts["products"] += 1
        return self.objective.product(x, v)


def projected(x: Array, slope: Array, bounds: tuple[float, float]) -> Array:
    """Return the gradient without the elements that point out of the bounds."""
    return np.where(((x <= bounds[0]) & (slope > 0.0)) | ((x >= bounds[1]) & (slope < 0.0)), 0.0, slope)


def by_mpizero(counted: CountedObjective, method: str, bounded: bool, exact: bool) -> None:
    """Minimize by mpizero, with exact products with the Hessian or without any.

    "l-bfgs, diagonal" is L-BFGS with ``initial="diagonal"``.
    """
    import mpizero as mz

    def loss_and_grad(parameters: Any, batch: Any) -> tuple[float, Any, float]:
        value, slope = counted.evaluate(parameters["x"])
        return value, {"x": slope}, 1.0

    def product(parameters: Any, batch: Any, direction: Any) -> tuple[Any, float]:
        return {"x": counted.product(parameters["x"], direction["x"])}, 1.0

    options: Row = {"gtol": TOLERANCE, "maxiter": MOST, "maxfun": MOST}
    method, _, initial = method.partition(", ")
    if initial:
        options["initial"] = initial
    if method == "l-bfgs":
        options["history"] = HISTORY
    limits = {"bounds": counted.bounds} if bounded else {}
    start = {"x": counted.objective.start.copy()}
    plain = mz.FunctionModel(start, loss_and_grad, product=product if exact else None)
    with mz.ShardingConfig(comm="self") as config, mz.ZeRO1Model(plain, config) as model:
        found = mz.minimize(model, method=method, options=options, **limits)
        counted.end(found.fun, found.x)


def by_scipy(counted: CountedObjective, method: str, bounded: bool, exact: bool) -> None:
    """Minimize by SciPy."""
    from scipy.optimize import minimize

    options: dict[str, Row] = {
        "L-BFGS-B": {"ftol": 0.0, "gtol": TOLERANCE, "maxcor": HISTORY, "maxiter": MOST, "maxfun": MOST},
        "CG": {"gtol": TOLERANCE, "maxiter": MOST},
        "trust-ncg": {"gtol": TOLERANCE, "maxiter": MOST},
    }
    start = counted.objective.start
    more: Row = {"bounds": [counted.bounds] * start.size} if bounded else {}
    if exact:
        more["hessp"] = counted.product
    found = minimize(counted.evaluate, start, jac=True, method=method, options=options[method], **more)
    counted.end(found.fun, found.x)


def by_tao(counted: CountedObjective, kind: str, bounded: bool, exact: bool) -> None:
    """Minimize by PETSc/TAO, whose tolerance is for the gradient's length."""
    import petsc4py

    petsc4py.init(["tao", "-tao_max_funcs", str(MOST), "-tao_max_it", str(MOST), *history_for_tao(kind)])
    from petsc4py import PETSc

    size = counted.objective.start.size

    def evaluate(tao: Any, x: Any, slope: Any) -> float:
        value, found = counted.evaluate(_array(x))
        slope.setArray(found)
        return value

    tao, x = PETSc.TAO().create(PETSc.COMM_SELF), PETSc.Vec().createSeq(size, comm=PETSc.COMM_SELF)
    x.setArray(counted.objective.start)
    tao.setType(kind)
    tao.setObjective(lambda tao, x: counted.objective.evaluate(_array(x))[0])
    tao.setObjectiveGradient(evaluate, None)
    if exact:
        products = _Products(counted)
        matrix = PETSc.Mat().createPython([size, size], products, comm=PETSc.COMM_SELF)
        matrix.setUp()
        tao.setHessian(products.move, matrix)
    if bounded:
        lower, upper = x.duplicate(), x.duplicate()
        lower.set(counted.bounds[0])
        upper.set(counted.bounds[1])
        tao.setVariableBounds(lower, upper)
    tao.setTolerances(gatol=TOLERANCE, grtol=0.0, gttol=0.0)
    tao.setFromOptions()
    tao.solve(x)
    counted.end(tao.getObjectiveValue(), np.array(x.getArray()))


def history_for_tao(kind: str) -> list[str]:
    """Return the option that gives ``lmvm`` or ``blmvm`` the history; the others ignore it."""
    return [f"-tao_{kind}_mat_lmvm_hist_size", str(HISTORY)]


class _Products:
    """Be the Hessian to PETSc, by its products alone; TAO adds a multiple of the identity where it needs to."""

    def __init__(self, counted: CountedObjective) -> None:
        self.counted, self.at, self.added = counted, counted.objective.start, 0.0

    def move(self, tao: Any, x: Any, hessian: Any, preconditioner: Any) -> None:
        """Become the Hessian at another point."""
        self.at, self.added = _array(x).copy(), 0.0
        hessian.assemble()

    def mult(self, matrix: Any, given: Any, result: Any) -> None:
        """Multiply."""
        v = _array(given)
        result.setArray(self.counted.product(self.at, v) + self.added * v)

    def shift(self, matrix: Any, amount: float) -> None:
        """Add a multiple of the identity."""
        self.added += amount


def _array(vector: Any) -> Array:
    return np.asarray(vector.getArray(readonly=True))


# ------------------------------------------------------------------------------------------------ the minimum itself


def hessian(evaluate: Evaluate, x: Array) -> Array:
    """Return the Hessian by central differences of the gradient."""
    steps = 6e-6 * np.maximum(1.0, np.abs(x))
    columns = [evaluate(x + step)[1] - evaluate(x - step)[1] for step in np.diag(steps)]
    found = np.stack(columns) / (2.0 * steps[:, None])
    return 0.5 * (found + found.T)


def minimum(evaluate: Evaluate, x: Array, bounds: tuple[float, float] = (-np.inf, np.inf)) -> Row:
    """Return the minimum near a point, found by Newton's method with whole Hessians, and the least eigenvalue there.

    The elements at a bound stay there; the eigenvalue is that of the others' Hessian.
    """
    x = np.clip(x, *bounds)
    for _ in range(4):
        value, slope = evaluate(x)
        free = projected(x, slope, bounds) != 0.0
        free |= (x > bounds[0]) & (x < bounds[1])
        curvature = hessian(evaluate, x)[np.ix_(free, free)]
        least = float(np.linalg.eigvalsh(curvature)[0]) if free.any() else np.inf
        step = np.zeros_like(x)
        step[free] = -np.linalg.solve(curvature, slope[free])
        trial = np.clip(x + step, *bounds)
        if (
            np.abs(step).max() < 1e-15
            or np.abs(projected(trial, evaluate(trial)[1], bounds)).max() >= np.abs(projected(x, slope, bounds)).max()
        ):
            break
        x = trial
    return {"value": evaluate(x)[0], "x": x, "least eigenvalue": least}
