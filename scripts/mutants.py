"""Plant mistakes in the library one at a time, and show that the tests notice each of them.

    python scripts/mutants.py                       # forty of scripts/mutants.toml, drawn by a seed
    python scripts/mutants.py --only NAME...        # these mutants
    python scripts/mutants.py --only NAME --find tests/comm tests/layout    # which test of the folders notices it first
    python scripts/mutants.py --list

A mutant changes one piece of text inside one function: a wrong divisor, a missed barrier, a shard that begins one
element late. Function and tests are found by their names, wherever they stand, so a list of mutants outlives moves of
functions and tests between files. Package and tests are copied into a temporary folder. First the tests that are named
for the mutants must pass there. Then each mutant is planted, and its tests are run: they must fail. The exit status is
1 if a mutant survives its tests or cannot be planted, or if a test fails without any mutant.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from harness.jobs import ROOT, launchers, run
from harness.options import plain

#: What the tests of mutants need of a checkout.
COPIED = ("mpizero", "tests", "pyproject.toml")
#: How many mutants are drawn, by which seed; seconds after which the tests of a mutant count as hanging.
COUNT, SEED, LIMIT = 40, 0, 120.0
#: Exit statuses with which pytest says that it has run no test to its end.
NO_TESTS_RUN = (2, 3, 4, 5)
KILLED, SURVIVED, NOT_PLANTED = "killed", "SURVIVED", "CANNOT BE PLANTED"


class Mutant(NamedTuple):
    """Describe a mistake: a function by its name and those of its classes, and its text before and after.

    ``test`` is the name of a function, maybe with a parameter, that fails with the mistake; with ``ranks`` it is run
    under mpiexec.
    """

    name: str
    function: str
    before: str
    after: str
    test: str
    ranks: int = 0


def mutants_of(path: Path) -> list[Mutant]:
    """Return the mutants of a file, whose tables have the names of tests."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Mutant(name, *texts, test, table.get("ranks", 0))
        for test, table in tables.items()
        for name, texts in table.items()
        if name != "ranks"
    ]


SITES = mutants_of(Path(__file__).with_suffix(".toml"))


class CannotPlant(Exception):
    """Say why a mutant does not fit the sources, or why its tests cannot be run."""


class Outcome(NamedTuple):
    """Hold what became of a mutant: one of the verdicts, what there is to say about it, and the seconds it took."""

    verdict: str
    told: str
    seconds: float


@cache
def functions(root: Path, folder: str) -> dict[str, list[tuple[Path, int, int]]]:
    """Return, by qualified name, the functions in a folder of the checkout ``root``: file, and first and last line."""
    found: dict[str, list[tuple[Path, int, int]]] = {}

    def visit(node: ast.AST, path: Path, prefix: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if not isinstance(inner, ast.ClassDef):
                    place = path, inner.lineno, inner.end_lineno or inner.lineno
                    found.setdefault(prefix + inner.name, []).append(place)
                visit(inner, path, f"{prefix}{inner.name}.")

    for path in sorted((root / folder).rglob("*.py")):
        visit(ast.parse(path.read_text(encoding="utf-8")), path, "")
    return found


def planted(root: Path, mutant: Mutant) -> tuple[Path, str]:
    """Return the file that a mutant changes, and its changed text.

    Exactly one function of the mutant's name must have the text to be changed exactly once, or it cannot be planted.
    """
    places = functions(root, "mpizero").get(mutant.function, [])
    found = []
    for path, first, last in places:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        parts = "".join(lines[: first - 1]), "".join(lines[first - 1 : last]), "".join(lines[last:])
        found += [(path, parts)] * parts[1].count(mutant.before)
    if len(found) != 1:
        raise CannotPlant(
            f"{len(places)} functions are called {mutant.function}, and {mutant.before!r} is {len(found)} times in "
            "them; expected one of them to have it once"
        )
    path, (above, body, below) = found[0]
    return path, above + body.replace(mutant.before, mutant.after) + below


def test_of(root: Path, mutant: Mutant) -> str:
    """Return the test of a mutant as pytest names it: ``tests/comm/test_grid.py::test_...[...]``."""
    places = functions(root, "tests").get(mutant.test.partition("[")[0], [])
    if len(places) != 1:
        raise CannotPlant(f"{len(places)} tests are called {mutant.test.partition('[')[0]}; expected one")
    return f"{places[0][0].relative_to(root)}::{mutant.test}"


class Workshop:
    """Hold a copy of package and tests, in which mutants are planted one after the other."""

    def __init__(self, folder: Path) -> None:
        self.root, self._written = folder / "copy", 0
        self.root.mkdir()
        for name in COPIED:
            source, target = ROOT / name, self.root / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "build"))
            else:
                shutil.copy2(source, target)

    def write(self, path: Path, text: str) -> None:
        """Write a source file with a date of its own: Python recognizes its compiled files by date and size."""
        path.write_text(text, encoding="utf-8")
        self._written += 1
        os.utime(path, (self._written, self._written))

    def pytest(
        self, tests: Sequence[str], ranks: int = 0, cache: Path | None = None, limit: float = LIMIT
    ) -> tuple[int | None, str]:
        """Run tests up to the first failure; return the exit status (None if they hang) and the output.

        ``cache`` is the folder for compiled kernels, where it is not the user's.
        """
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        command = [sys.executable, "-m", "pytest", *options]
        if ranks:
            command = launchers()[0].command(
                ranks, ["-m", "mpi4py", "-m", "pytest", "--with-mpi", "-m", "mpi", *options]
            )
        environment = {"PYTHONPATH": str(self.root), "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
        environment |= {} if cache is None else {"MPIZERO_CACHE_DIR": str(cache)}
        ended = run(command, limit, environment=environment, cwd=self.root)
        return None if ended.late else ended.status, ended.out + ended.err

    def try_out(self, mutant: Mutant, folders: Sequence[str] = ()) -> Outcome:
        """Plant a mutant, run its tests or those of ``folders``, and take it out again."""
        begun = time.perf_counter()
        try:
            tests = folders or [test_of(self.root, mutant)]
            path, text = planted(self.root, mutant)
        except CannotPlant as reason:
            return Outcome(NOT_PLANTED, str(reason), 0.0)
        original = path.read_text(encoding="utf-8")
        self.write(path, text)
        try:
            cache = self.root.parent / "kernels" if "kernels" in path.parts else None
            status, output = self.pytest(tests, mutant.ranks, cache)
        finally:
            self.write(path, original)
        seconds = time.perf_counter() - begun
        if status == 0:
            return Outcome(SURVIVED, f"{mutant.function} has {mutant.after!r} in place of {mutant.before!r}", seconds)
        if status in NO_TESTS_RUN:
            return Outcome(NOT_PLANTED, f"pytest ended with status {status}: {output[-1000:]}", seconds)
        return Outcome(KILLED, "it hangs" if status is None else failure_in(output), seconds)


def failure_in(output: str) -> str:
    """Return the name of the first test that pytest says has failed."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split(" - ")[0].partition("::")[2] if lines else "the job ended"


def failing_tests(workshop: Workshop, mutants: Iterable[Mutant]) -> str:
    """Run all tests that mutants name, without a mutant; return the output if one fails, else an empty text."""
    by_ranks: dict[int, dict[str, None]] = {}
    for mutant in mutants:
        try:
            by_ranks.setdefault(mutant.ranks, {})[test_of(workshop.root, mutant)] = None
        except CannotPlant:
            continue  # it is told with the mutant
    for ranks, tests in by_ranks.items():
        status, output = workshop.pytest(list(tests), ranks, limit=5 * LIMIT) if tests else (0, "")
        if status != 0:
            return output or "the tests hang"
    return ""


def outcomes(
    workshops: Sequence[Workshop], mutants: Sequence[Mutant], folders: Sequence[str]
) -> Iterator[tuple[Mutant, Outcome]]:
    """Yield each mutant with its outcome, in their order; as many are tried at once as there are workshops."""
    free: SimpleQueue[Workshop] = SimpleQueue()
    for workshop in workshops:
        free.put(workshop)

    def work(mutant: Mutant) -> Outcome:
        workshop = free.get()
        try:
            return workshop.try_out(mutant, folders)
        finally:
            free.put(workshop)

    with ThreadPoolExecutor(len(workshops)) as threads:
        yield from zip(mutants, threads.map(work, mutants), strict=True)


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """Return the mutants that the command line asks for, in the order of the list."""
    if not options.only:
        drawn = random.Random(options.seed).sample(range(len(SITES)), min(options.count, len(SITES)))
        return [SITES[number] for number in sorted(drawn)]
    if unknown := set(options.only) - {mutant.name for mutant in SITES}:
        raise SystemExit(f"there is no mutant {', '.join(sorted(unknown))}: see --list")
    return [mutant for mutant in SITES if mutant.name in options.only]


def try_all(mutants: Sequence[Mutant], jobs: int, folders: Sequence[str]) -> int:
    """Try out mutants, print a line for each, and return the exit status."""
    begun, bad = time.perf_counter(), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as where:
        homes = [Path(where, str(number)) for number in range(jobs)]
        for home in homes:
            home.mkdir()
        workshops = [Workshop(home) for home in homes]
        if not folders and (failed := failing_tests(workshops[0], mutants)):
            print(f"tests fail without any mutant:\n{failed[-4000:]}")
            return 1
        print(f"the tests pass without a mutant ({time.perf_counter() - begun:.0f} s)", flush=True)
        for mutant, (verdict, told, seconds) in outcomes(workshops, mutants, folders):
            bad += verdict != KILLED
            print(f"{verdict:9} {mutant.name:42} {seconds:5.1f} s  {told}", flush=True)
    print(f"{len(mutants) - bad} of {len(mutants)} mutants killed in {time.perf_counter() - begun:.0f} s")
    return int(bad > 0)


def main() -> int:
    """Try out the mutants that the command line asks for."""
    parser = plain(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these mutants")
    parser.add_argument("--count", type=int, default=COUNT, help="mutants to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the draw (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at a time (default: %(default)s)")
    parser.add_argument("--find", nargs="+", metavar="FOLDER", default=[], help="run the tests of folders instead")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    options = parser.parse_args()
    mutants = chosen(options)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:42} {mutant.function}: {mutant.before} -> {mutant.after}")
        return 0
    return try_all(mutants, max(1, min(options.jobs, len(mutants))), options.find)


if __name__ == "__main__":
    sys.exit(main())
