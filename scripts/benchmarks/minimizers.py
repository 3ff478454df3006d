"""Compare mpizero's minimizers with those of SciPy and PETSc/TAO: evaluations, minima, seconds between evaluations.

All are given the same functions, starts and history, and are judged by the same test: how many evaluations of value and
gradient, and products with the Hessian, until no element of the gradient (of the projected gradient, with bounds) is
larger than 1e-5, and than 1e-9. The functions are compiled once, by ``cc``, and called by ctypes from both
interpreters. How far value and point are from the minimum is told by whole Newton steps, which are part of no method.

With ``--squares`` Gauss-Newton is compared with SciPy's ``least_squares``: residuals, and products with the Jacobian
(tangents) and its transpose (adjoints). A Jacobian that is formed is a tangent for each of its columns.

With ``--seconds`` two ranks minimize a function of 16.8 million unknowns by L-BFGS and by TAO's ``blmvm``, 30
evaluations each, in turns; what is compared are seconds outside of the function.

SciPy is imported if it is there. ``--tao`` names an interpreter that has petsc4py, ``--tao-mpiexec`` its launcher.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from harness.jobs import Mpi, answer, ranks_of, well
from harness.options import parser
from harness.tables import markdown
from harness.turns import alternate

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from comparing import minima, squares
from comparing.minima import TOLERANCES, CountedObjective, Row, minimum
from comparing.objectives import FOR_NEWTON, Objective, build, load
from comparing.timing import RANKS, timed_by_mpizero, timed_by_tao

#: Title, bounds, products with the Hessian, and the method of mpizero, SciPy and TAO ("" if it has none).
CASES = (
    ("L-BFGS", False, False, "l-bfgs", "L-BFGS-B", "lmvm"),
    ("L-BFGS, bounds", True, False, "l-bfgs", "L-BFGS-B", "blmvm"),
    ("L-BFGS, diagonal", False, False, "l-bfgs, diagonal", "L-BFGS-B", "lmvm"),
    ("L-BFGS, diagonal, bounds", True, False, "l-bfgs, diagonal", "L-BFGS-B", "blmvm"),
    ("CG", False, False, "cg", "CG", "cg"),
    ("Newton-CG", False, True, "newton-cg", "trust-ncg", "bnls"),
    ("Newton-CG, differences", False, False, "newton-cg", "Newton-CG", ""),
)
#: Of these the sums are the work; values alone are told, too.
WORK = ("evaluations", "products", "residuals", "tangents", "adjoints")
#: Values that differ by less are of the same minimum.
SAME = 1e-8


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=5, mpiexec=True, json=True)
    options.add_argument("--squares", action="store_true", help="compare with least_squares instead")
    options.add_argument("--seconds", action="store_true", help="compare seconds instead of evaluations")
    options.add_argument("--parameters", type=float, default=16.8e6, help="of --seconds (default: %(default).0f)")
    options.add_argument("--tao", help="interpreter that has petsc4py")
    options.add_argument("--tao-mpiexec", default="mpiexec.openmpi", help="(default: %(default)s)")
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return options.parse_args()


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
    for title, bounded, exact, ours, scipys, taos in CASES:
        for name, objective in load(args.folder).items():
            if name in FOR_NEWTON and not exact:
                continue
            counted = {who: CountedObjective(objective, bounded) for who in ("mpizero", "SciPy")}
            minima.by_mpizero(counted["mpizero"], ours, bounded, exact)
            minima.by_scipy(counted["SciPy"], scipys, bounded, exact)
            tao = by_other_interpreter(args, title, name, objective) if args.tao and taos else {}
            best = minimum(objective.evaluate, counted["mpizero"].last["x"], counted["mpizero"].bounds)
            for tolerance in TOLERANCES:
                found = {who: each.row(tolerance) for who, each in counted.items()}
                found |= {"TAO": tao[tolerance]} if tao else {}
                case = {"method": title, "tolerance": tolerance, "objective": name}
                rows.append({**case, "who": found, "minimum": best})
    return rows


# ------------------------------------------------------------------------------------------------ tables


def counts(row: Row, least: Row) -> str:
    """Return a cell: the counts that are not 0, and how far value and point are from the minimum."""
    told = ", ".join(f"{row[kind]} {kind}" for kind in (*WORK, "values") if row.get(kind))
    away = float(np.abs(row["x"] - least["x"]).max())
    return f"{told}{'' if row['met'] else ' (not met)'}; {above(row, least):.0e}, {away:.0e}"


def above(row: Row, least: Row) -> float:
    """Return how far a value is above the minimum's, in parts of the latter if that is above 1."""
    return float((row["value"] - least["value"]) / max(1.0, abs(least["value"])))


def table(rows: list[Row], names: list[str], tolerance: float) -> str:
    """Return the rows of a tolerance as a table of Markdown, and sums over those that two have ended alike."""
    rows = [row for row in rows if row["tolerance"] == tolerance]
    names = [who for who in names if any(who in row["who"] for row in rows)]
    cells = []
    for row in rows:
        least = row["minimum"]
        told = [counts(row["who"][who], least) if who in row["who"] else "" for who in names]
        cells.append((row["method"], row["objective"], f"{least['least eigenvalue']:.1e}", *told))
    lines = [f"until {tolerance:.0e}:", "", markdown(("method", "objective", "least eigenvalue", *names), cells)]
    lines += ["", f"largest projected gradient of a minimum: {max(row['minimum']['norm'] for row in rows):.1e}"]
    for method in dict.fromkeys(row["method"] for row in rows):
        for who in names[1:]:
            lines += sums([row for row in rows if row["method"] == method and who in row["who"]], names[0], who)
    return "\n".join(lines)


def sums(rows: list[Row], ours: str, other: str) -> list[str]:
    """Return a line with sums over the rows in which both have met the tolerance, at the same minimum."""
    found = [[(row["who"][who], row["minimum"]) for who in (ours, other)] for row in rows]
    alike = [pair for pair in found if all(row["met"] and above(row, least) <= SAME for row, least in pair)]
    if not alike:
        return []
    a, b = (sum(work(pair[place][0]) for pair in alike) for place in (0, 1))
    which = f"{rows[0]['method']}, {len(alike)} of {len(rows)}"
    return [f"{which}: {ours} {a}, {other} {b}: {a / b:.2f}"]


def work(row: Row) -> int:
    """Return the number of evaluations and products; values alone are left out."""
    return int(sum(row.get(kind, 0) for kind in WORK))


# ------------------------------------------------------------------------------------------------ seconds


def seconds(args: argparse.Namespace) -> dict[str, Any]:
    """Time both in turns, and return a JSON document."""
    from mpizero._util.numbers import Measurement

    size = str(int(args.parameters) // 4 * 4)
    told: dict[str, Row] = {}

    def measure(who: str) -> float:
        words = (__file__, "--folder", str(args.folder), "--be", who, "--parameters", size)
        if who == "mpizero":
            told[who] = ranks_of(words[0], args.mpiexec, RANKS, *words[1:])
        else:
            told[who] = well(Mpi(args.tao_mpiexec, args.tao).command(RANKS, words)).answer
        return float(told[who]["seconds"])

    names = ["mpizero", *["TAO"] * bool(args.tao)]
    found = alternate(args.rounds, names, measure)
    row: Row = {who: str(Measurement.of(found[who])) for who in names} | {"last": told}
    if args.tao:
        row["mpizero over TAO"] = str(Measurement.of_ratios(found["mpizero"], found["TAO"]))
    return row


def compare(args: argparse.Namespace) -> None:
    """Compile the functions, compare and print."""
    with tempfile.TemporaryDirectory(prefix="objectives-") as folder:
        args.folder = Path(folder)
        build(args.folder)
        if args.seconds:
            print(json.dumps(seconds(args), indent=1))
            return
        rows = squares.compare() if args.squares else evaluations(args)
        names = list(squares.WHO) if args.squares else ["mpizero", "SciPy", "TAO"]
        if args.json:
            print(json.dumps(rows, default=np.ndarray.tolist))
        else:
            print("\n\n".join(table(rows, names, tolerance) for tolerance in TOLERANCES))


def main() -> None:
    """Run as a part of a comparison, or compare and print."""
    args = arguments()
    if args.be == "mpizero":
        timed_by_mpizero(args.folder, int(args.parameters))
    elif args.be == "TAO":
        timed_by_tao(args.folder, int(args.parameters))
    elif args.be:
        be_tao(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
