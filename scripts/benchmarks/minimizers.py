"""Compare mpizero's minimizers with those of SciPy and PETSc/TAO: evaluations, minima, seconds between evaluations.

All are given the same functions, starts and history, and end where no element of the gradient (of the projected
gradient, with bounds) is larger than 1e-9. *Evaluations* are those of value and gradient. TAO stops by the length of
the gradient, which is no larger than that many elements of 1e-9 allow.

With ``--seconds`` two ranks minimize a function of 16.8 million unknowns by L-BFGS and by TAO's ``blmvm``, 30
evaluations each, in turns; what is compared are seconds outside of the function.

SciPy is imported if it is there. ``--tao`` names an interpreter that has petsc4py, ``--tao-mpiexec`` its launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from comparing.objectives import OBJECTIVES, Objective, pairs
from harness import alternate, one_thread, parser, result_of

TOLERANCE, HISTORY, MOST, RANKS, TIMED = 1e-9, 10, 30_000, 2, 30
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=5, mpiexec=True, json=True)
    options.add_argument("--seconds", action="store_true", help="compare seconds instead of evaluations")
    options.add_argument("--parameters", type=float, default=16.8e6, help="of --seconds (default: %(default).0f)")
    options.add_argument("--tao", help="interpreter that has petsc4py")
    options.add_argument("--tao-mpiexec", default="mpiexec.openmpi", help="(default: %(default)s)")
    return options.parse_args()


# ------------------------------------------------------------------------------------------------ one minimization


def by_mpizero(objective: Objective, method: str, bounded: bool) -> Row:
    """Minimize by mpizero on one process."""
    import mpizero as mz

    def loss_and_grad(parameters: Any, batch: Any) -> tuple[float, Any, float]:
        value, slope = objective.evaluate(parameters["x"])
        return value, {"x": slope}, 1.0

    options: Row = {"gtol": TOLERANCE, "maxiter": MOST, "maxfun": MOST}
    if method == "l-bfgs":
        options["history"] = HISTORY
    limits = {"bounds": objective.bounds} if bounded else {}
    with (
        mz.ShardingConfig(comm="self") as config,
        mz.ZeRO1Model(mz.FunctionModel({"x": objective.start.copy()}, loss_and_grad), config) as model,
    ):
        found = mz.minimize(model, method=method, options=options, **limits)
        return {"evaluations": found.nfev, "value": found.fun, "x": found.x, "message": found.message}


def by_scipy(objective: Objective, method: str, bounded: bool) -> Row:
    """Minimize by SciPy; Newton-CG counts gradients, because its products with the Hessian take only these."""
    from scipy.optimize import minimize

    options: dict[str, Row] = {
        "L-BFGS-B": {"ftol": 0.0, "gtol": TOLERANCE, "maxcor": HISTORY, "maxiter": MOST, "maxfun": MOST},
        "CG": {"gtol": TOLERANCE, "maxiter": MOST},
        "Newton-CG": {"xtol": 1e-14, "maxiter": MOST},
    }
    start = objective.start
    limits = {"bounds": [objective.bounds] * start.size} if bounded else {}
    found = minimize(objective.evaluate, start, jac=True, method=method, options=options[method], **limits)
    return {"evaluations": max(found.nfev, found.njev), "value": found.fun, "x": found.x, "message": found.message}


def by_tao(objective: Objective, kind: str, bounded: bool) -> Row:
    """Minimize by PETSc/TAO on one process."""
    import petsc4py

    petsc4py.init(["tao", "-tao_max_funcs", str(MOST), "-tao_max_it", str(MOST)])
    from petsc4py import PETSc

    PETSc.Options()["mat_lmvm_hist_size"] = HISTORY
    size, evaluations = objective.start.size, [0]

    def evaluate(tao: Any, x: Any, slope: Any) -> float:
        evaluations[0] += 1
        value, found = objective.evaluate(np.asarray(x.getArray(readonly=True)))
        slope.setArray(found)
        return value

    tao, x = PETSc.TAO().create(PETSc.COMM_SELF), PETSc.Vec().createSeq(size, comm=PETSc.COMM_SELF)
    x.setArray(objective.start)
    tao.setType(kind)
    tao.setObjectiveGradient(evaluate, None)
    if bounded:
        lower, upper = x.duplicate(), x.duplicate()
        lower.set(objective.bounds[0])
        upper.set(objective.bounds[1])
        tao.setVariableBounds(lower, upper)
    tao.setTolerances(gatol=TOLERANCE, grtol=0.0, gttol=0.0)
    tao.setFromOptions()
    tao.solve(x)
    return {"evaluations": evaluations[0], "value": tao.getObjectiveValue(), "x": np.array(x.getArray()),
            "message": str(tao.getConvergedReason())}  # fmt: skip


#: Title, whether there are bounds, and the method of mpizero, SciPy and TAO ("" if it has none).
CASES = (
    ("L-BFGS", False, "l-bfgs", "L-BFGS-B", "lmvm"),
    ("L-BFGS, bounds", True, "l-bfgs", "L-BFGS-B", "blmvm"),
    ("CG", False, "cg", "CG", "cg"),
    ("Newton-CG", False, "newton-cg", "Newton-CG", ""),
)


def evaluations(args: argparse.Namespace) -> list[Row]:
    """Return a row for each case and objective."""
    rows = []
    for title, bounded, ours, scipys, taos in CASES:
        for name, make in OBJECTIVES.items():
            objective = make()
            found = {"mpizero": by_mpizero(objective, ours, bounded), "SciPy": by_scipy(objective, scipys, bounded)}
            if args.tao and taos:
                told = subprocess.run(
                    [args.tao, __file__, "--be", f"{title}/{name}"],
                    env=one_thread(), capture_output=True, text=True, check=True,
                )  # fmt: skip
                found["TAO"] = json.loads(told.stdout.splitlines()[-1])
            best = min(row["value"] for row in found.values())
            rows.append({"method": title, "objective": name, **{
                who: {
                    "evaluations": row["evaluations"],
                    "above the best": row["value"] - best,
                    "from mpizero's x": float(np.abs(np.array(row["x"]) - found["mpizero"]["x"]).max()),
                    "message": row["message"],
                } for who, row in found.items()
            }})  # fmt: skip
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown."""
    names = [who for who in ("mpizero", "SciPy", "TAO") if any(who in row for row in rows)]
    lines = ["| method | objective | " + " | ".join(f"{who}: evaluations, above the best" for who in names) + " |"]
    lines.append("|---" * (2 + len(names)) + "|")
    for row in rows:
        cells = [f"{row[who]['evaluations']}, {row[who]['above the best']:.1e}" if who in row else "" for who in names]
        lines.append("| " + " | ".join([row["method"], row["objective"], *cells]) + " |")
    for who in names[1:]:
        both = [row for row in rows if who in row]
        ours, theirs = (sum(row[name]["evaluations"] for row in both) for name in ("mpizero", who))
        lines.append(f"evaluations of mpizero over those of {who}, in total: {ours / theirs:.2f}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ seconds


def timed_by_mpizero(parameters: int) -> None:
    """Run as one of two ranks; rank 0 prints the seconds outside of the function, for each evaluation."""
    from mpi4py import MPI

    import mpizero as mz

    inside = [0.0]

    def loss_and_grad(given: Any, batch: Any, gradients: Any) -> tuple[float, float]:
        started = time.monotonic()
        value, gradients["x"][:] = pairs(given["x"])
        inside[0] += time.monotonic() - started
        return value, 1.0

    start = np.tile([-1.2, 1.0], parameters // 2)
    plain = mz.FunctionModel({"x": start}, loss_and_grad, in_place=True)
    with mz.ShardingConfig(comm=MPI.COMM_WORLD) as config, mz.ZeRO1Model(plain, config) as model:
        options = {"history": HISTORY, "gtol": 0.0, "maxfun": TIMED}
        MPI.COMM_WORLD.Barrier()
        started = time.monotonic()
        found = mz.minimize(model, method="l-bfgs", options=options)
        took = time.monotonic() - started
    inside_most = MPI.COMM_WORLD.allreduce(inside[0], MPI.MAX)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"seconds": (took - inside_most) / found.nfev, "value": found.fun, "nfev": found.nfev}))


def timed_by_tao(parameters: int) -> None:
    """Run as one of two ranks of PETSc; rank 0 prints the seconds outside of the function, for each evaluation."""
    import petsc4py

    petsc4py.init(["tao", "-tao_max_funcs", str(TIMED), "-mat_lmvm_hist_size", str(HISTORY)])
    from petsc4py import PETSc

    world, inside, count = PETSc.COMM_WORLD, [0.0], [0]
    x = PETSc.Vec().createMPI((parameters // RANKS, None), comm=world)
    parts = PETSc.Vec().createMPI((1, None), comm=world)  # adds the ranks' values
    x.setArray(np.tile([-1.2, 1.0], parameters // RANKS // 2))

    def evaluate(tao: Any, at: Any, slope: Any) -> float:
        started = time.monotonic()
        count[0] += 1
        value, found = pairs(np.asarray(at.getArray(readonly=True)))
        slope.setArray(found)
        parts.setArray([value])
        total = float(parts.sum())
        inside[0] += time.monotonic() - started
        return total

    tao = PETSc.TAO().create(world)
    tao.setType("blmvm")
    tao.setObjectiveGradient(evaluate, None)
    tao.setTolerances(gatol=0.0, grtol=0.0, gttol=0.0)
    tao.setFromOptions()
    world.barrier()
    started = time.monotonic()
    tao.solve(x)
    took = time.monotonic() - started
    if world.rank == 0:
        value = tao.getObjectiveValue()
        print(json.dumps({"seconds": (took - inside[0]) / count[0], "value": value, "nfev": count[0]}))


def seconds(args: argparse.Namespace) -> dict[str, Any]:
    """Time both in turns, and return a JSON document."""
    from mpizero.measurement import Measurement

    size = str(int(args.parameters) // 4 * 4)
    told: dict[str, Row] = {}

    def measure(who: str) -> float:
        words = (__file__, "--be", who, "--parameters", size)
        if who == "mpizero":
            told[who] = result_of(args.mpiexec, RANKS, *words)
        else:
            command = [args.tao_mpiexec, "--allow-run-as-root", "-n", str(RANKS), args.tao, *words]
            done = subprocess.run(command, env=one_thread(), capture_output=True, text=True, check=True)
            told[who] = json.loads(done.stdout.splitlines()[-1])
        return float(told[who]["seconds"])

    names = ["mpizero", *["TAO"] * bool(args.tao)]
    found = alternate(args.rounds, names, measure)
    row: Row = {who: str(Measurement.of(found[who])) for who in names} | {"last": told}
    if args.tao:
        row["mpizero over TAO"] = str(Measurement.of_ratios(found["mpizero"], found["TAO"]))
    return row


def main() -> None:
    """Run as a part of a comparison, or compare and print."""
    args = arguments()
    if args.be == "mpizero":
        timed_by_mpizero(int(args.parameters))
    elif args.be == "TAO":
        timed_by_tao(int(args.parameters))
    elif args.be:
        title, name = args.be.split("/")
        _, bounded, _, _, kind = next(case for case in CASES if case[0] == title)
        row = by_tao(OBJECTIVES[name](), kind, bounded)
        print(json.dumps(row | {"x": row["x"].tolist()}))
    elif args.seconds:
        print(json.dumps(seconds(args), indent=1))
    else:
        rows = evaluations(args)
        print(json.dumps(rows) if args.json else table(rows))


if __name__ == "__main__":
    main()
