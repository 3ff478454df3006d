"""Run a matrix of trainings as MPI jobs and as threads of this process: all of them, or a few that cover every pair.

A training is one combination of values, such as case, strategy and kind of memory; where it runs, the MPI library and
the number of ranks, are two more. For each place one job is started, which runs its trainings one after the other.
With ``--covering`` only some trainings run: so many that every two values which occur together in the matrix occur
together in one of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.covering import covering
from harness.jobs import Mpi, add_mpis, answer, in_threads, mpis_of, well
from harness.options import plain
from harness.tables import aligned
from harness.turns import tell

#: Kinds of memory, and the options of ``ShardingConfig`` that choose them.
MEMORIES: Mapping[str, Mapping[str, Any]] = {
    "shared": {},
    "private": {"share_node_memory": False},
    "nodes of 2": {"ranks_per_node": 2},
}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Name where trainings run: an MPI library, or "threads" with None, and the number of ranks."""

    library: str
    ranks: int
    mpi: Mpi | None = None


@dataclass(frozen=True)
class Matrix:
    """Describe the trainings of a script: mpiexec starts its file ``script`` with the options ``more``.

    ``trainings(size)`` returns all trainings on ``size`` ranks, in the same order in every process, and
    ``values(training)`` the values that one combines. ``run(training, comm, args)`` trains, collective over ``comm``,
    and returns a row for JSON.
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
                tell(f"{done} of {len(numbers)}: {time.monotonic() - started:.1f} s, {json.dumps(rows[-1])}")
        return rows

    def at(self, place: Place, args: argparse.Namespace, chosen: Sequence[int] | None = None, *more: str) -> list[Row]:
        """Run trainings in a place, and return their rows; ``more`` are further options of the script for a job."""
        if place.mpi is None:
            where = f"{place.ranks} threads"
            return list(in_threads(place.ranks, lambda comm: self.rows(comm, args, where, chosen))[0])
        options = ["--steps", args.steps, "--worker", json.dumps(chosen), *self.more, *more]
        command = place.mpi.command(place.ranks, [self.script, *options, *["--progress"] * args.progress])
        return list(well(command, limit=args.timeout, show=args.progress).answer)

    def is_worker(self, args: argparse.Namespace) -> bool:
        """Tell whether this process is a rank of a job of :meth:`at`; if so, it has run its trainings."""
        if args.worker is None:
            return False
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        rows = self.rows(world, args, f"{MPI.get_vendor()[0]}, {world.size} ranks", json.loads(args.worker))
        if world.rank == 0:
            answer(rows)
        return True


def arguments(description: str | None, ranks: str, threads: str, steps: int = 50) -> argparse.ArgumentParser:
    """Return a parser with the options of all such scripts.

    ``ranks`` and ``threads`` are the default numbers of ranks, separated by commas, as processes and as threads.
    """
    parser = plain(description)
    parser.add_argument("--steps", type=int, default=steps, help="(default: %(default)s)")
    parser.add_argument("--ranks", default=ranks, help="numbers of ranks under mpiexec (default: %(default)s)")
    parser.add_argument("--threads", default=threads, help="numbers of ranks as threads (default: %(default)s)")
    add_mpis(parser)
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
    numbers = {"first": args.ranks, "second": args.second_ranks}
    found = [Place(f"{name} MPI", int(n), mpi) for name, mpi in mpis_of(args).items() for n in _numbers(numbers[name])]
    return found + [Place("threads", int(n)) for n in _numbers(args.threads)]


def _numbers(text: str) -> list[str]:
    return [n for n in text.split(",") if n]


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


def run(matrix: Matrix, args: argparse.Namespace) -> Iterator[list[Row]]:
    """Run the trainings that ``args`` asks for; yield the rows of each place that has any, and tell its seconds."""
    where = places(args)
    chosen: Sequence[list[int] | None] = chosen_trainings(matrix, where) if args.covering else [None] * len(where)
    for place, numbers in zip(where, chosen, strict=True):
        if numbers != []:
            started = time.monotonic()
            rows = matrix.at(place, args, numbers)
            print(f"{rows[0]['where']}: {len(rows)} trainings, {time.monotonic() - started:.1f} s", flush=True)
            yield rows


def one_hash(rows: Sequence[Row], key: str, shown: Sequence[str]) -> None:
    """Print the hash of each value of ``key``, and end the script if one has several: with ``shown`` of those rows."""
    lines, others = [], []
    for name in dict.fromkeys(row[key] for row in rows):
        mine = [row for row in rows if row[key] == name]
        usual, count = Counter(row["sha256"] for row in mine).most_common(1)[0]
        lines.append((name, len(mine), usual if count == len(mine) else "DIFFERENT HASHES"))
        others += [
            f"{name}: {[row[part] for part in shown]}: {row['sha256']}" for row in mine if row["sha256"] != usual
        ]
    print("\n" + aligned((key, "runs", ""), lines))
    if others:
        sys.exit("\n".join(["the hashes differ:", *others]))
    print(f"\n{len(rows)} trainings: one hash for each {key}")
