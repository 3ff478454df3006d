"""Compare mpizero's minimizers with those of SciPy and PETSc/TAO: evaluations, minima, seconds between evaluations.

All are given the same functions, starts and history, and are judged by the same test: how many evaluations of value and
gradient, and products with the Hessian, until no element of the gradient (of the projected gradient, with bounds) is
larger than 1e-9. The functions are compiled once, by ``cc``, and called by ctypes from both interpreters. How far value
and point are from the minimum is told by whole Newton steps, which are no part of any of them.

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
import subprocess
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from comparing import minima, squares
from comparing.minima import CountedObjective, Row, minimum
from comparing.objectives import WELLS, Objective, build, load
from comparing.timing import RANKS, timed_by_mpizero, timed_by_tao
from harness import alternate, one_thread, parser, result_of

#: Title, bounds, products with the Hessian, and the method of mpizero, SciPy and TAO ("" if it has none).
CASES = (
    ("L-BFGS", False, False, "l-bfgs", "L-BFGS-B", "lmvm"),
    ("L-BFGS, bounds", True, False, "l-bfgs", "L-BFGS-B", "blmvm"),
    ("CG", False, False, "cg", "CG", "cg"),
    ("Newton-CG", False, True, "newton-cg", "trust-ncg", "bnls"),
    ("Newton-CG, differences", False, False, "newton-cg", "Newton-CG", ""),
)


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


def run_tao(args: argparse.Namespace, title: str, name: str, objective: Objective) -> Row:
    """Minimize by TAO's interpreter; end the script if it has other bits at the start."""
    command = [args.tao, __file__, "--folder", str(args.folder), "--be", f"{title}/{name}"]
    told = subprocess.run(command, env=one_thread(), capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(f"TAO, {title}, {name}:\n{told.stderr}")
    row: Row = json.loads(told.stdout.splitlines()[-1])
    if row.pop("start") != start_hash(objective):
        raise SystemExit(f"{name}: value and gradient at the start differ between the interpreters")
    return row | {"x": np.array(row["x"])}


def be_tao(args: argparse.Namespace) -> None:
    """Run as TAO's interpreter, and print the row."""
    title, name = args.be.split("/")
    _, bounded, exact, _, _, kind = next(case for case in CASES if case[0] == title)
    objective = load(args.folder)[name]
    row = minima.by_tao(CountedObjective(objective, bounded), kind, bounded, exact)
    print(json.dumps(row | {"x": row["x"].tolist(), "start": start_hash(objective)}))


def evaluations(args: argparse.Namespace) -> list[Row]:
    """Return a row for each case and objective."""
    rows = []
    for title, bounded, exact, ours, scipys, taos in CASES:
        for name, objective in load(args.folder).items():
            if name == WELLS and "Newton" not in title:
                continue
            found = {
                "mpizero": minima.by_mpizero(CountedObjective(objective, bounded), ours, bounded, exact),
                "SciPy": minima.by_scipy(CountedObjective(objective, bounded), scipys, bounded, exact),
            }
            if args.tao and taos:
                found["TAO"] = run_tao(args, title, name, objective)
            limits = objective.bounds if bounded else (-np.inf, np.inf)
            best = minimum(objective.evaluate, found["mpizero"]["x"], limits)
            rows.append({"method": title, "objective": name, "who": found, "minimum": best})
    return rows


# ------------------------------------------------------------------------------------------------ tables


def counts(row: Row) -> str:
    """Return the counts of a row that are not 0, as words."""
    kinds = ("evaluations", "products", "values", "residuals", "tangents", "adjoints")
    told = ", ".join(f"{row[kind]} {kind}" for kind in kinds if row.get(kind))
    return told if row["met"] else f"{told} (not met)"


def distances(row: Row, least: Row) -> tuple[float, float]:
    """Return how far value and point are from the minimum; the value's in parts of the value if this is above 1."""
    return (row["value"] - least["value"]) / max(1.0, abs(least["value"])), float(np.abs(row["x"] - least["x"]).max())


def table(rows: list[Row], names: list[str]) -> str:
    """Return the rows as a table of Markdown, and the sums of evaluations and products."""
    names = [who for who in names if any(who in row["who"] for row in rows)]
    lines = [f"| method | objective | least eigenvalue | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for row in rows:
        cells = [row["method"], row["objective"], f"{row['minimum']['least eigenvalue']:.1e}"]
        for who in names:
            if found := row["who"].get(who):
                value, point = distances(found, row["minimum"])
                cells.append(f"{counts(found)}; {value:.0e}, {point:.0e}")
            else:
                cells.append("")
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(f"largest projected gradient of a minimum: {max(row['minimum']['norm'] for row in rows):.1e}")
    for method in dict.fromkeys(row["method"] for row in rows):
        for who in names[1:]:
            both = [row["who"] for row in rows if row["method"] == method and who in row["who"]]
            if both:
                ours, theirs = (sum(map(work, (row[name] for row in both))) for name in (names[0], who))
                lines.append(f"{method}: {ours}, {who} {theirs}: {ours / theirs:.2f}")
    return "\n".join(lines)


def work(row: Row) -> int:
    """Return the number of evaluations and products; values alone are left out."""
    return int(sum(row.get(kind, 0) for kind in ("evaluations", "products", "residuals", "tangents", "adjoints")))


# ------------------------------------------------------------------------------------------------ seconds


def seconds(args: argparse.Namespace) -> dict[str, Any]:
    """Time both in turns, and return a JSON document."""
    from mpizero.measurement import Measurement

    size = str(int(args.parameters) // 4 * 4)
    told: dict[str, Row] = {}

    def measure(who: str) -> float:
        words = (__file__, "--folder", str(args.folder), "--be", who, "--parameters", size)
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
        print(json.dumps(rows, default=np.ndarray.tolist) if args.json else table(rows, names))


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
