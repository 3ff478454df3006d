"""Compare mpizero's minimizers with those of SciPy and PETSc/TAO: evaluations, minima, seconds between evaluations.

All are given the same functions, starts and history, and are judged by the same test: how many evaluations of value and
gradient, and products with the Hessian, until no element of the gradient (of the projected gradient, with bounds) is
larger than 1e-5, and than 1e-9. The functions are compiled once, by ``cc``, and called by ctypes from both
interpreters. Printed are sums over those that two have ended alike: they have met the tolerance, and their values are
that of one minimum, which is found by whole Newton steps, part of no method.

With ``--seconds`` two ranks minimize a function of 16.8 million unknowns by L-BFGS and by TAO's ``blmvm``, 30
evaluations each, in turns; what is compared are seconds outside of the function.

SciPy is imported if it is there. ``--tao`` names an interpreter that has petsc4py, ``--tao-mpiexec`` its launcher.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from harness.jobs import Mpi, answer, well
from harness.options import parser
from harness.tables import markdown
from harness.turns import alternate

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from comparing import minima
from comparing.minima import TOLERANCES, CountedObjective, Row, minimum
from comparing.objectives import FOR_NEWTON, Objective, build, load
from comparing.timing import RANKS, timed_by_mpizero, timed_by_tao

#: Title, bounds, products with the Hessian, and the method of mpizero, SciPy and TAO.
CASES = (
    ("L-BFGS", False, False, "l-bfgs", "L-BFGS-B", "lmvm"),
    ("L-BFGS, bounds", True, False, "l-bfgs", "L-BFGS-B", "blmvm"),
    ("L-BFGS, diagonal", False, False, "l-bfgs, diagonal", "L-BFGS-B", "lmvm"),
    ("L-BFGS, diagonal, bounds", True, False, "l-bfgs, diagonal", "L-BFGS-B", "blmvm"),
    ("CG", False, False, "cg", "CG", "cg"),
    ("Newton-CG", False, True, "newton-cg", "trust-ncg", "bnls"),
)
#: What is counted.
WORK = ("evaluations", "products")
#: Values that differ by less are of the same minimum.
SAME = 1e-8


# ------------------------------------------------------------------------------------------------ evaluations


def start_hash(objective: Objective) -> str:
    """Return a hash of value and gradient at the start, which two interpreters compare."""
    value, slope = objective.evaluate(objective.start)
    return hashlib.sha256(np.append(slope, value).tobytes()).hexdigest()


def by_other_interpreter(args: argparse.Namespace, title: str, name: str, objective: Objective) -> dict[float, Row]:
    """Minimize by TAO; return a row for each tolerance, and end the script if the start has other bits there."""
    command = [args.tao, __file__, "--folder", str(args.folder), "--be", f"{title}/{name}"]
    start, rows = well(command).answer
    if start != start_hash(objective):
        raise SystemExit(f"{name}: value and gradient at the start differ between the interpreters")
    return {tolerance: row | {"x": np.array(row["x"])} for tolerance, row in zip(TOLERANCES, rows, strict=True)}


def be_tao(args: argparse.Namespace) -> None:
    """Run as TAO's interpreter, and print the rows."""
    title, name = args.be.split("/")
    _, bounded, exact, _, _, kind = next(case for case in CASES if case[0] == title)
    objective = load(args.folder)[name]
    counted = CountedObjective(objective, bounded)
    minima.by_tao(counted, kind, bounded, exact)
    rows = [counted.row(tolerance) for tolerance in TOLERANCES]
    answer([start_hash(objective), [row | {"x": row["x"].tolist()} for row in rows]])


def evaluations(args: argparse.Namespace) -> list[Row]:
    """Return a row for each case, objective and tolerance."""
    rows = []
    for title, bounded, exact, ours, scipys, _ in CASES:
        for name, objective in load(args.folder).items():
            if name in FOR_NEWTON and not exact:
                continue
            counted = {who: CountedObjective(objective, bounded) for who in ("mpizero", "SciPy")}
            minima.by_mpizero(counted["mpizero"], ours, bounded, exact)
            minima.by_scipy(counted["SciPy"], scipys, bounded, exact)
            tao = by_other_interpreter(args, title, name, objective) if args.tao else {}
            best = minimum(objective.evaluate, counted["mpizero"].last["x"], counted["mpizero"].bounds)
            for tolerance in TOLERANCES:
                found = {who: each.row(tolerance) for who, each in counted.items()}
                found |= {"TAO": tao[tolerance]} if tao else {}
                rows.append({"method": title, "tolerance": tolerance, "who": found, "minimum": best})
    return rows


def table(rows: list[Row], tolerance: float) -> str:
    """Return a table with the sums of mpizero and each other for each method, until a tolerance."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method and row["tolerance"] == tolerance]
        for other in ("SciPy", "TAO"):
            both = [
                [(row["who"][who], row["minimum"]) for who in ("mpizero", other)] for row in mine if other in row["who"]
            ]
            alike = [pair for pair in both if all(row["met"] and above(row, least) <= SAME for row, least in pair)]
            if alike:
                a, b = (sum(pair[place][0][kind] for pair in alike for kind in WORK) for place in (0, 1))
                lines.append((method, other, f"{len(alike)} of {len(both)}", a, b, f"{a / b:.2f}"))
    return f"until {tolerance:.0e}:\n\n" + markdown(("method", "beside", "alike", "mpizero", "other", "ratio"), lines)


def above(row: Row, least: Row) -> float:
    """Return how far a value is above the minimum's, in parts of the latter if that is above 1."""
    return float((row["value"] - least["value"]) / max(1.0, abs(least["value"])))


# ------------------------------------------------------------------------------------------------ seconds


def seconds(args: argparse.Namespace) -> str:
    """Time both in turns, and return a table of seconds between evaluations."""
    from mpizero._util.numbers import Measurement  # the interpreter of TAO need not have mpizero's dependencies

    size = str(int(args.parameters) // 4 * 4)

    def measure(who: str) -> float:
        words = (__file__, "--folder", str(args.folder), "--be", who, "--parameters", size)
        mpi = Mpi(args.mpiexec) if who == "mpizero" else Mpi(args.tao_mpiexec, args.tao)
        return float(well(mpi.command(RANKS, words)).answer)

    found = alternate(args.rounds, ["mpizero", *["TAO"] * bool(args.tao)], measure)
    rows = [(who, Measurement.of(s).text(3), Measurement.of_ratios(s, found["mpizero"])) for who, s in found.items()]
    return markdown(("", "seconds an evaluation", "over mpizero"), rows)


def compare(args: argparse.Namespace) -> None:
    """Compile the functions, compare and print."""
    with tempfile.TemporaryDirectory(prefix="objectives-") as folder:
        args.folder = Path(folder)
        build(args.folder)
        if args.seconds:
            print(seconds(args))
            return
        rows = evaluations(args)
        print("\n\n".join(table(rows, tolerance) for tolerance in TOLERANCES))


def main() -> None:
    """Run as a part of a comparison, or compare and print."""
    options = parser(__doc__, rounds=5, mpiexec=True)
    options.add_argument("--seconds", action="store_true", help="compare seconds instead of evaluations")
    options.add_argument("--parameters", type=float, default=16.8e6, help="of --seconds (default: %(default).0f)")
    options.add_argument("--tao", help="interpreter that has petsc4py")
    options.add_argument("--tao-mpiexec", default="mpiexec.openmpi", help="(default: %(default)s)")
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.be in ("mpizero", "TAO"):
        (timed_by_mpizero if args.be == "mpizero" else timed_by_tao)(args.folder, int(args.parameters))
    elif args.be:
        be_tao(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
