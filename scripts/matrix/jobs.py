"""Run a matrix of trainings as MPI jobs and as threads of this process: all of them, or a few that cover every pair.

A training is one combination of values, such as case, strategy and kind of memory; where it runs, the MPI library and
the number of ranks, are two more. For each place one job is started, which runs its trainings one after the other.
With ``--covering`` only some trainings run: so many that every two values which occur together in the matrix occur
together in one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matrix.covering import covering

#: Kinds of memory, and the options of ``ShardingConfig`` that choose them.
MEMORIES: Mapping[str, Mapping[str, Any]] = {
    "shared": {},
    "private": {"share_node_memory": False},
    "nodes of 2": {"ranks_per_node": 2},
}
THREADS = "threads"
Row = dict[str, Any]


@dataclass(frozen=True)
class Matrix:
    """Describe the trainings of a script.

    Attributes
    ----------
    script : str
        The script's file, and its options in ``more``: what mpiexec starts.
    trainings : callable
        ``trainings(size)`` returns all trainings on ``size`` ranks, in the same order in every process.
    values : callable
        ``values(training)`` returns the values that a training combines.
    run : callable
        ``run(training, comm, args)`` trains, collective over ``comm``, and returns a row for JSON.
    """

    script: str
    trainings: Callable[[int], Sequence[Any]]
    values: Callable[[Any], tuple[Hashable, ...]]
    run: Callable[[Any, Any, argparse.Namespace], Row]
    more: tuple[str, ...] = ()

    def rows(self, comm: Any, args: argparse.Namespace, where: str, chosen: Sequence[int] | None) -> list[Row]:
        """Run the trainings with the numbers ``chosen``, all for None, on the ranks of ``comm``; return their rows."""
        trainings = self.trainings(comm.size)
        numbers = range(len(trainings)) if chosen is None else chosen
        rows = []
        for done, number in enumerate(numbers, 1):
            started = time.monotonic()
            rows.append(self.run(trainings[number], comm, args) | {"where": where})
            if args.progress and comm.rank == 0:
                told = f"{time.monotonic() - started:.1f} s, {json.dumps(rows[-1])}"
                print(f"{done} of {len(numbers)}: {told}", flush=True)
        return rows


@dataclass(frozen=True)
class Place:
    """Name where trainings run: an MPI library, or "threads", its launcher and interpreter, and the number of ranks."""

    library: str
    ranks: int
    mpiexec: str = ""
    python: str = ""


def arguments(description: str, ranks: str, threads: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all such scripts.

    ``ranks`` and ``threads`` are the default numbers of ranks, separated by commas, as processes and as threads.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", default=ranks, help="numbers of ranks under mpiexec (default: %(default)s)")
    parser.add_argument("--threads", default=threads, help="numbers of ranks as threads (default: %(default)s)")
    parser.add_argument(
        "--mpiexec", default=str(Path(sys.executable).with_name("mpiexec")), help="first MPI's launcher"
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="interpreter for the first MPI, also with words before it: 'env NAME=value python'",
    )
    parser.add_argument("--second-mpiexec", help="launcher of another MPI")
    parser.add_argument("--second-python", help="interpreter for the other MPI")
    parser.add_argument("--second-ranks", default=ranks, help="its numbers of ranks (default: %(default)s)")
    parser.add_argument(
        "--covering", action="store_true", help="only so many trainings that every pair of values occurs"
    )
    parser.add_argument("--progress", action="store_true", help="print the row of each training when it has ended")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds one launch may take")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def places(args: argparse.Namespace) -> list[Place]:
    """Return the places that the options name, in the order in which they are used."""
    first = [Place("first MPI", int(n), args.mpiexec, args.python) for n in args.ranks.split(",") if n]
    second = []
    if args.second_mpiexec:
        python = args.second_python or sys.executable
        second = [Place("second MPI", int(n), args.second_mpiexec, python) for n in args.second_ranks.split(",") if n]
    return first + second + [Place(THREADS, int(n)) for n in args.threads.split(",") if n]


def chosen_trainings(matrix: Matrix, places: Sequence[Place]) -> list[list[int]]:
    """Return for each place the numbers of trainings that together cover every pair of the matrix."""
    every = [
        (place, number, (places[place].library, places[place].ranks, *matrix.values(training)))
        for place in range(len(places))
        for number, training in enumerate(matrix.trainings(places[place].ranks))
    ]
    found: list[list[int]] = [[] for _ in places]
    for index in covering([values for _, _, values in every]):
        place, number, _ = every[index]
        found[place].append(number)
    return found


def run(matrix: Matrix, args: argparse.Namespace) -> Iterator[tuple[list[Row], float]]:
    """Run the trainings that ``args`` asks for; yield the rows and the seconds of each place that has any."""
    where = places(args)
    chosen: Sequence[list[int] | None] = chosen_trainings(matrix, where) if args.covering else [None] * len(where)
    for place, numbers in zip(where, chosen, strict=True):
        if numbers == []:
            continue
        started = time.monotonic()
        rows = (
            in_threads(matrix, args, place, numbers) if place.library == THREADS else job(matrix, args, place, numbers)
        )
        yield rows, time.monotonic() - started


def job(matrix: Matrix, args: argparse.Namespace, place: Place, chosen: Sequence[int] | None, *more: str) -> list[Row]:
    """Run trainings as an MPI job, and return the rows that its rank 0 writes. If it fails, end this script.

    ``more`` are further options of the script.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "chosen.json").write_text(json.dumps(chosen), encoding="utf-8")
        output = Path(folder) / "rows.json"
        options = ["--steps", str(args.steps), "--worker", folder, *matrix.more, *more]
        options += ["--progress"] * args.progress
        command = [place.mpiexec, "-n", str(place.ranks), *shlex.split(place.python), matrix.script, *options]
        try:
            done = subprocess.run(
                command, env=environment, timeout=args.timeout, stderr=subprocess.PIPE, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            advice = "give a longer one, or run --covering; --progress shows how far trainings come"
            sys.exit(f"{' '.join(command)}: ended by --timeout {args.timeout:g} (seconds): {advice}")
        if done.returncode or not output.exists():
            sys.exit(f"{done.stderr}\n{' '.join(command)}: exit status {done.returncode}")
        rows: list[Row] = json.loads(output.read_text(encoding="utf-8"))
    return rows


def worker(matrix: Matrix, args: argparse.Namespace) -> None:
    """Run as one rank of :func:`job`; rank 0 writes the rows to the folder ``args.worker``."""
    from mpi4py import MPI

    chosen = json.loads((Path(args.worker) / "chosen.json").read_text(encoding="utf-8"))
    world = MPI.COMM_WORLD
    rows = matrix.rows(world, args, f"{MPI.get_vendor()[0]}, {world.size} ranks", chosen)
    if world.rank == 0:
        (Path(args.worker) / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def in_threads(matrix: Matrix, args: argparse.Namespace, place: Place, chosen: Sequence[int] | None) -> list[Row]:
    """Run trainings on ranks that are threads of this process, without MPI, and return the rows."""
    from mpizero.testing import run_in_threads

    with contextlib.redirect_stderr(io.StringIO()):  # drops the warnings "nodes have 2, 1 ranks"
        results = run_in_threads(place.ranks, lambda comm: matrix.rows(comm, args, f"{place.ranks} threads", chosen))
    return list(results[0])
