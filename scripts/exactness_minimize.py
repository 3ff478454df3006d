"""Show that minimizers of whole vectors have the same bits on every number of ranks, strategy and kind of memory.

Each case is minimized with every strategy, on shared windows, on private memory, on simulated nodes of two ranks, and
with grains that ranks claim, as processes and as threads, for ``--steps`` evaluations. All minimizations of a case must
end with one SHA-256, that of the parameters and of what is known of the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from hashlib import sha256
from itertools import product
from typing import Any

import numpy as np
from harness.matrix import MEMORIES, STRATEGIES, Matrix, Row, arguments, one_hash, run

import mpizero as mz

RNG = np.random.default_rng(0)
TIMES = np.linspace(0.0, 4.0, 45)
CURVE = 2.5 * np.exp(-1.3 * TIMES) + 0.5 + 0.05 * RNG.standard_normal(45)
IMAGES = RNG.standard_normal((24, 6)).astype(np.float32), np.arange(24) % 3
SHAPES = {"even": 51, "odd": 50}


def rosenbrock(parameters: Any, batch: Any) -> tuple[float, dict[str, Any], float]:
    """Return the chained Rosenbrock function of the elements at even and odd places, and its gradient."""
    x = np.empty(sum(SHAPES.values()))
    x[::2], x[1::2] = parameters["even"], parameters["odd"]
    a, b = x[1:] - x[:-1] ** 2, 1.0 - x[:-1]
    slope = np.zeros_like(x)
    slope[1:] += 200.0 * a
    slope[:-1] -= 400.0 * x[:-1] * a + 2.0 * b
    return float((100.0 * a**2 + b**2).sum()), {"even": slope[::2].copy(), "odd": slope[1::2].copy()}, 1.0


def jacobian(p: Any, t: Any) -> Any:
    """Return the derivatives of ``a exp(-b t) + c`` by its coefficients, a column each."""
    return np.stack([np.exp(-p[1] * t), -p[0] * t * np.exp(-p[1] * t), np.ones_like(t)], 1)


def curve(parameters: Any, batch: Any) -> tuple[float, dict[str, Any], float]:
    """Return half the squared residual of a decay, and its gradient."""
    (t, y), p = batch, parameters["p"]
    residual = p[0] * np.exp(-p[1] * t) + p[2] - y
    return 0.5 * float((residual**2).sum()), {"p": jacobian(p, t).T @ residual}, float(len(t))


def gauss_newton(parameters: Any, batch: Any, direction: Any) -> tuple[dict[str, Any], float]:
    """Return Gauss and Newton's product for :func:`curve`."""
    j = jacobian(parameters["p"], batch[0])
    return {"p": j.T @ (j @ direction["p"])}, float(len(j))


def chained() -> mz.FunctionModel:
    """Return the Rosenbrock function as a model."""
    return mz.FunctionModel({"even": np.full(51, -1.2), "odd": np.full(50, 1.0)}, rosenbrock)


def decay() -> mz.FunctionModel:
    """Return the fit of a decay as a model."""
    return mz.FunctionModel({"p": np.array([1.0, 0.5, 0.0])}, curve, product=gauss_newton)


def network() -> mz.nn.MLP:
    """Return a model of blocks in float32."""
    return mz.nn.MLP(features=6, hidden=(7, 5), outputs=3, dtype="float32", seed=4)


#: By the name of a case its model, its data, and the arguments of ``minimize``.
CASES: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "L-BFGS": (chained, None, {}),
    "L-BFGS, bounds": (chained, None, {"bounds": {"even": (-1.0, 0.5)}}),
    "L-BFGS, float32 network": (network, IMAGES, {"options": {"history": 3}}),
    "L-BFGS, diagonal": (network, IMAGES, {"bounds": (-1.0, 1.0), "options": {"initial": "diagonal", "history": 3}}),
    "CG": (chained, None, {"method": "cg"}),
    "CG, float32 network": (network, IMAGES, {"method": "cg"}),
    "Newton-CG": (chained, None, {"method": "newton-cg"}),
    "Gauss-Newton": (decay, (TIMES, CURVE), {"method": "gauss-newton"}),
    "L-BFGS, terms, preconditioner": (
        network,
        IMAGES,
        {
            "regularization": {"*.weight": mz.TotalVariation(0.01), "*": mz.Tikhonov(0.01)},
            "options": {"preconditioner": {"*.bias": 2.0}},
        },
    ),
    "Gauss-Newton, terms": (
        decay,
        (TIMES, CURVE),
        {"method": "gauss-newton", "regularization": {"p": mz.Tikhonov(0.01, np.array([2.0, 1.0, 0.0]))}},
    ),
}
#: Kinds of memory, and claims of grains in shared memory.
WAYS = {**MEMORIES, "claimed": {"grain_assignment": "dynamic"}}
#: Name of a case, strategy, way.
Minimization = tuple[str, str, str]


def minimizations(size: int) -> list[Minimization]:
    """Return all minimizations on ``size`` ranks."""
    return list(product(CASES, STRATEGIES, WAYS))


def minimize(minimization: Minimization, comm: Any, args: argparse.Namespace) -> Row:
    """Minimize, and return a row with the hash of the result. Collective over ``comm``."""
    name, strategy, way = minimization
    make, data, choice = CASES[name]
    settings = {"micro_batch": 3, "minimum_parameter_group_size": 1, **WAYS[way]}
    options = {**choice.get("options", {}), "maxfun": args.steps, "gtol": 1e-12}
    with (
        mz.ShardingConfig(comm=comm, **settings) as config,
        mz.distribute(make(), None, strategy=strategy, config=config) as model,
    ):
        found = mz.minimize(model, data, **{**choice, "options": options})
        known = np.array([found.fun, found.norm, found.nit, found.nfev])
        digest = sha256(model.parameters_sha256().encode() + known.tobytes()).hexdigest()
    return {"case": name, "way": f"{strategy}, {way}", "sha256": digest, "evaluations": found.nfev}


MATRIX = Matrix(__file__, minimizations, lambda minimization: minimization, minimize)


def main() -> None:
    """Run all jobs, and compare hashes; exit with status 1 if a case has several."""
    args = arguments(__doc__, "1,2,3,4,8", "1,3,4", steps=60).parse_args()
    if not MATRIX.is_worker(args):
        rows = [row for found in run(MATRIX, args) for row in found]
        for name in CASES:
            print(f"{name}: {sorted({row['evaluations'] for row in rows if row['case'] == name})} evaluations")
        one_hash(rows, "case", ("where", "way", "evaluations"))


if __name__ == "__main__":
    main()
