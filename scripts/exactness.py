"""Show that the number of ranks, the strategy and the kind of memory do not change one bit of the result.

Trains small GPTs on every combination of

* 1, 2, 3, 4 and 8 ranks under mpiexec, a second MPI, and threads of one process,
* DDP, ZeRO-1, ZeRO-2, ZeRO-3,
* node-shared windows, private memory, and simulated nodes of two ranks,

in several cases: clipping, dropout, tied embeddings, LAMB, numbers of grains that are not multiples of the number of
ranks. All trainings of a case must end with the same SHA-256 of all parameters. For each number of ranks one job is
started, which runs its trainings one after the other. With ``--in-turn`` a case and strategy run with only one of the
three kinds of memory, which changes with the number of ranks.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mpizero as mz

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
MEMORIES: Mapping[str, Mapping[str, Any]] = {
    "shared": {},
    "private": {"share_node_memory": False},
    "nodes of 2": {"ranks_per_node": 2},
}
SEQUENCE, VOCABULARY = 12, 48


@dataclass(frozen=True)
class Case:
    """Describe a training whose result must not depend on ranks, strategy and memory.

    ``batch`` and ``grain`` are the numbers of samples in the global batch and in a grain. A ``grain`` of None is the
    default, which depends on ``longest``, the most tokens that the model takes.
    """

    name: str
    batch: int = 12
    grain: int | None = 2
    longest: int = SEQUENCE
    clip: float | None = None
    dropout: float = 0.0
    tied: bool = False
    optimizer: str = "adamw"

    def wrapped(self) -> Any:
        """Return the model of this case: a small GPT of 2 blocks."""
        return mz.nn.GPT(
            dim=28,
            layers=2,
            heads=2,
            sequence=self.longest,
            vocabulary=VOCABULARY,
            dropout=self.dropout,
            tied=self.tied,
        )

    def update(self) -> Any:
        """Return the optimizer of this case."""
        return {"adamw": mz.AdamW(lr=3e-3), "lamb": mz.LAMB(lr=1e-2), "sgd": mz.SGD(lr=0.1, momentum=0.9)}[
            self.optimizer
        ]

    def batches(self, steps: int, rank: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield rank ``rank``'s part of each of ``steps`` global batches; ranks may have different numbers of samples.

        ``size`` is the number of ranks.
        """
        rng = np.random.default_rng(7)
        for _ in range(steps):
            text = rng.integers(0, VOCABULARY, (self.batch, SEQUENCE + 1))
            text[:, 1::2] = (text[:, 0::2][:, : text[:, 1::2].shape[1]] * 3 + 1) % VOCABULARY  # something to learn
            mine = text[rank * self.batch // size : (rank + 1) * self.batch // size]
            yield mine[:, :-1], mine[:, 1:]


CASES = (
    Case("6 grains"),
    Case("11 grains, last short", batch=32, grain=3),
    Case("clipping", clip=0.5),
    Case("dropout", dropout=0.2),
    Case("tied embeddings", tied=True),
    Case("LAMB", optimizer="lamb"),
    Case("SGD, momentum", optimizer="sgd"),
    Case("24 default grains", batch=24, grain=None, longest=1024),
    Case("all of it", batch=32, grain=3, clip=0.5, dropout=0.2, tied=True, optimizer="lamb"),
)


def train(case: Case, comm: Any, strategy: str, memory: str, steps: int) -> str:
    """Train one case with one strategy and one kind of memory (a key of ``MEMORIES``). Collective over ``comm``.

    Returns
    -------
    str
        SHA-256 of the parameters after the last step.
    """
    with mz.ShardingConfig(comm=comm, micro_batch=case.grain, clip=case.clip, **MEMORIES[memory]) as config:
        model = mz.distribute(case.wrapped(), case.update(), strategy=strategy, config=config)
        with model:
            for x, y in case.batches(steps, model.rank, model.world_size):
                model.train(x, y)
            return str(model.parameters_sha256())


def ways(size: int, in_turn: bool) -> Iterator[tuple[Case, str, str]]:
    """Yield the case, strategy and kind of memory of each training on ``size`` ranks.

    ``in_turn`` is the option ``--in-turn``.
    """
    for number, (case, strategy) in enumerate(itertools.product(CASES, STRATEGIES)):
        for turn, memory in enumerate(MEMORIES):
            if not in_turn or (number + size) % len(MEMORIES) == turn:
                yield case, strategy, memory


def everything(comm: Any, args: argparse.Namespace, where: str) -> list[dict[str, str]]:
    """Run all trainings on the ranks of ``comm``, and return a row for each.

    The keys of a row are "case", "where", "strategy", "memory" and "sha256". ``where`` is a text that names the MPI
    library and the number of ranks.
    """
    return [
        {"case": case.name, "where": where, "strategy": strategy, "memory": memory}
        | {"sha256": train(case, comm, strategy, memory, args.steps)}
        for case, strategy, memory in ways(comm.size, args.in_turn)
    ]


#: A function of communicator, options and a text that says where it runs: it runs all trainings and returns rows.
Everything = Callable[[Any, argparse.Namespace, str], list[dict[str, Any]]]


def worker(args: argparse.Namespace, everything: Everything) -> None:
    """Run ``everything`` as one rank of an MPI job; rank 0 writes the rows to the file ``args.worker``."""
    from mpi4py import MPI

    vendor = MPI.get_vendor()[0]
    rows = everything(MPI.COMM_WORLD, args, f"{vendor}, {MPI.COMM_WORLD.size} ranks")
    if MPI.COMM_WORLD.rank == 0:
        Path(args.worker).write_text(json.dumps(rows), encoding="utf-8")


def launch(mpiexec: str, python: str, ranks: int, args: argparse.Namespace, script: str, *more: str) -> list[Any]:
    """Run ``script`` as an MPI job on ``ranks`` ranks, and return the rows that its rank 0 writes.

    ``more`` are further options of the script. If the job fails, end this script.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        options = ["--steps", str(args.steps), "--worker", str(output), *more]
        command = [mpiexec, "-n", str(ranks), *shlex.split(python), script, *options]
        done = subprocess.run(
            command, env=environment, timeout=args.timeout, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode or not output.exists():
            sys.exit(f"{done.stderr}\n{' '.join(command)}: exit status {done.returncode}")
        rows: list[Any] = json.loads(output.read_text(encoding="utf-8"))
    return rows


def in_threads(ranks: int, args: argparse.Namespace, everything: Everything) -> list[dict[str, Any]]:
    """Run ``everything`` on ranks that are threads of this process, without MPI, and return its rows."""
    from mpizero.testing import run_in_threads

    with contextlib.redirect_stderr(io.StringIO()):  # drops the warnings "nodes have 2, 1 ranks"
        results = run_in_threads(ranks, lambda comm: everything(comm, args, f"{ranks} threads"))
    return list(results[0])


def report(rows: list[dict[str, str]]) -> bool:
    """Print a line for each case, and for each training whose hash differs from the case's most frequent one.

    Tell whether all hashes of each case are equal.
    """
    print(f"\n{'case':24s} {'runs':>5s}  sha256 of the parameters")
    equal = True
    for case in CASES:
        mine = [row for row in rows if row["case"] == case.name]
        counts = collections.Counter(row["sha256"] for row in mine)
        usual = counts.most_common(1)[0][0]
        print(f"{case.name:24s} {len(mine):5d}  {usual if len(counts) == 1 else f'{len(counts)} DIFFERENT HASHES'}")
        for row in mine:
            if row["sha256"] != usual:
                equal = False
                print(f"    {row['where']}, {row['strategy']}, {row['memory']}: {row['sha256']}")
    return equal


def arguments(description: str, ranks: str, threads: str) -> argparse.ArgumentParser:
    """Return the parser of the options that this script and exactness_hybrid.py share.

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
    parser.add_argument("--timeout", type=float, default=1800, help="seconds one launch may take")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def runs(
    args: argparse.Namespace, everything: Everything, script: str, *more: str
) -> Iterator[tuple[list[dict[str, Any]], float]]:
    """Run all jobs that ``args`` requests, under mpiexec or as threads; yield the rows and the seconds of each.

    ``script`` and its options ``more`` are what mpiexec starts.
    """
    jobs = [(args.mpiexec, args.python, int(n)) for n in args.ranks.split(",") if n]
    if args.second_mpiexec:
        python = args.second_python or sys.executable
        jobs += [(args.second_mpiexec, python, int(n)) for n in args.second_ranks.split(",") if n]
    works = [partial(launch, *job, args, script, *more) for job in jobs]
    works += [partial(in_threads, int(n), args, everything) for n in args.threads.split(",") if n]
    for work in works:
        started = time.monotonic()
        yield work(), time.monotonic() - started


def main() -> None:
    """Run all jobs, and compare the hashes; exit with status 1 if hashes of one case differ."""
    parser = arguments(__doc__, "1,2,3,4,8", "1,3,4")
    parser.add_argument("--in-turn", action="store_true", help="one kind of memory for each case and strategy, in turn")
    args = parser.parse_args()
    if args.worker:
        worker(args, everything)
        return

    rows = []
    for found, seconds in runs(args, everything, __file__, *["--in-turn"] * args.in_turn):
        rows += found
        print(f"{found[0]['where']}: {seconds:.1f} s", flush=True)
    if not report(rows):
        sys.exit("the hashes differ")
    print(f"\n{len(rows)} trainings of {args.steps} steps: one hash for each case")


if __name__ == "__main__":
    main()
