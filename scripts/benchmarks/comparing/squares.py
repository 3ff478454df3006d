"""Compare Gauss and Newton's method with SciPy's ``least_squares``, on residuals and their Jacobian's products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from comparing.minima import MOST, TOLERANCE, TOLERANCES, Counted, Row, minimum
from comparing.objectives import conductivity_fields, conductivity_matrix, edge_differences

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


def peaks() -> LeastSquares:
    """Return misfits of 200 noisy samples of three Gaussian peaks on a line: 11 unknowns, residuals that stay."""
    place = np.linspace(0.0, 10.0, 200)

    def parts(p: Array) -> tuple[Array, Array, Array]:
        height, middle, width = p[:9].reshape(3, 3)
        away = (place[:, None] - middle) / width
        return height, away, np.exp(-(away**2))

    def curve(p: Array) -> Array:
        height, _, bell = parts(p)
        return bell @ height + p[9] + p[10] * place

    def jacobian(p: Array) -> Array:
        height, away, bell = parts(p)
        by_middle = height * bell * 2.0 * away / p[6:9]
        return np.concatenate([bell, by_middle, by_middle * away, np.ones((200, 1)), place[:, None]], axis=1)

    truth = np.array([2.0, 1.2, 3.0, 2.2, 4.1, 7.5, 0.7, 0.9, 1.3, 0.4, 0.05])
    measured = curve(truth) + 0.1 * np.random.default_rng(1).normal(size=200)

    def linearize(p: Array) -> tuple[Products, Products]:
        j = jacobian(p)
        return lambda v: j @ v, lambda w: j.T @ w

    start = np.array([1.0, 1.0, 1.0, 2.0, 4.5, 7.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    return LeastSquares(lambda p: curve(p) - measured, linearize, start)


PROBLEMS: dict[str, Callable[[], LeastSquares]] = {
    "Rosenbrock, 1,001": rosenbrock, "conductivity": conductivity, "three peaks": peaks,
}  # fmt: skip
#: Who minimizes, and whether whole Jacobians are formed; those are for up to 100 unknowns.
WHO = {"mpizero": False, "trf, lsmr": False, "trf, lsmr 1e-12": False, "trf, exact": True, "lm": True}
DENSE = 100


class CountedSquares(Counted):
    """Count residuals and products of a problem.

    The gradient is a product with the transposed Jacobian, and counted among them unless whole Jacobians are formed.
    """

    def __init__(self, problem: LeastSquares) -> None:
        super().__init__("residuals", "tangents", "adjoints")
        self.problem = problem

    def residual(self, x: Array) -> Array:
        """Return the residuals."""
        self.counts["residuals"] += 1
        return self.problem.residual(x)

    def linearize(self, x: Array) -> tuple[Products, Products]:
        """Return the functions of products at a point."""
        tangent, adjoint = self.problem.linearize(x.copy())

        def forwards(v: Array) -> Array:
            self.counts["tangents"] += 1
            return tangent(np.ravel(v))

        def backwards(w: Array) -> Array:
            self.counts["adjoints"] += 1
            result = adjoint(np.ravel(w))
            self._look_at(x, adjoint)
            return result

        return forwards, backwards

    def _look_at(self, x: Array, adjoint: Products) -> None:
        if TOLERANCE not in self.met:
            r = self.problem.residual(x)
            self.look(0.5 * float(r @ r), adjoint(r), x)

    def jacobian(self, x: Array) -> Array:
        """Return the whole Jacobian: a product for each of its columns."""
        tangent, adjoint = self.linearize(x)
        columns = np.stack([tangent(unit) for unit in np.eye(x.size)], 1)
        self._look_at(x, self.problem.linearize(x)[1])
        return columns


def by_mpizero(counted: CountedSquares) -> None:
    """Minimize by mpizero's Gauss-Newton."""
    import mpizero as mz

    def loss_and_grad(parameters: Any, batch: Any) -> tuple[float, Any, float]:
        x = parameters["x"]
        r = counted.residual(x)
        return 0.5 * float(r @ r), {"x": counted.linearize(x)[1](r)}, 1.0

    def product(parameters: Any, batch: Any, direction: Any) -> tuple[Any, float]:
        tangent, adjoint = counted.linearize(parameters["x"])
        return {"x": adjoint(tangent(direction["x"]))}, 1.0

    options = {"gtol": TOLERANCE, "maxiter": MOST, "maxfun": MOST}
    plain = mz.FunctionModel({"x": counted.problem.start.copy()}, loss_and_grad, product=product)
    with mz.ShardingConfig(comm="self") as config, mz.ZeRO1Model(plain, config) as model:
        found = mz.minimize(model, method="gauss-newton", options=options)
        counted.end(found.fun, found.x, found.message)


def by_scipy(counted: CountedSquares, who: str) -> None:
    """Minimize by ``least_squares``: "trf" or "lm" with whole Jacobians, or with products alone by LSMR."""
    from scipy.optimize import least_squares
    from scipy.sparse.linalg import LinearOperator

    method, solver, exactly = (*who.replace(",", "").split(), "", "")[:3]
    size = counted.problem.start.size

    def products(x: Array) -> Any:
        tangent, adjoint = counted.linearize(x)
        rows = counted.problem.residual(x).size  # its shape alone, so not counted
        return LinearOperator((rows, size), matvec=tangent, rmatvec=adjoint, dtype=np.float64)

    options: Row = {"gtol": TOLERANCE, "ftol": None, "xtol": 1e-15, "tr_solver": solver}
    if exactly:
        options["tr_options"] = {"atol": 1e-12, "btol": 1e-12}
    if method == "lm":  # its gtol is an angle, and it has no other tolerance than these three
        options = dict.fromkeys(["gtol", "ftol", "xtol"], 2.3e-16)
    jac = counted.jacobian if WHO[who] else products
    start = counted.problem.start
    found = least_squares(counted.residual, start, jac=jac, method=method, max_nfev=MOST, **options)
    counted.end(found.cost, found.x, found.message)


def compare() -> list[Row]:
    """Return a row for each problem and who has solved it."""
    rows = []
    for name, make in PROBLEMS.items():
        problem, everyone = make(), {}
        for who, dense in WHO.items():
            if dense and problem.start.size > DENSE:
                continue
            everyone[who] = CountedSquares(problem)
            by_mpizero(everyone[who]) if who == "mpizero" else by_scipy(everyone[who], who)

        def evaluate(x: Array, problem: LeastSquares = problem) -> tuple[float, Array]:
            r = problem.residual(x)
            return 0.5 * float(r @ r), problem.linearize(x)[1](r)

        best = minimum(evaluate, everyone["mpizero"].last["x"])
        for tolerance in TOLERANCES:
            found = {who: counted.row(tolerance) for who, counted in everyone.items()}
            case = {"method": "Gauss-Newton", "tolerance": tolerance, "objective": name}
            rows.append({**case, "who": found, "minimum": best})
    return rows
