"""Measure the seconds of ``import mpizero``, and from ``mpiexec`` to the end of the first step.

A first run, which is not counted, compiles the kernels. Then these run in turns: an interpreter that imports mpizero,
and for each number of ranks two jobs: one that trains, and one that is *bare*, whose ranks import NumPy and mpi4py and
meet in a barrier. The time of a job is from before ``mpiexec`` to the end of the first step, or of the barrier, on the
slowest rank. "over bare" is the ratio of the two in the same round.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from harness.jobs import answer, ranks_of, well
from harness.options import parser
from harness.tables import aligned
from harness.turns import alternate

#: Prints the seconds of an import.
IMPORT = "import time; t = time.monotonic(); import mpizero; print(time.monotonic() - t)"


def rank(args: argparse.Namespace) -> None:
    """Run as one rank of the job ``args.be``; rank 0 gives back the seconds of the slowest rank since its start."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if args.be == "bare":
        world.Barrier()
    else:
        import mpizero as mz

        gpt = mz.nn.GPT(dim=64, layers=2, heads=4, sequence=64, vocabulary=256)
        model = mz.distribute(gpt, mz.AdamW(lr=1e-3), args.strategy, config=mz.Config(micro_batch=1))
        ids = np.random.default_rng(world.rank).integers(0, 256, (1, 65))
        model.train(ids[:, :-1], ids[:, 1:])
    slowest = world.reduce(time.monotonic() - args.started, MPI.MAX)
    if world.rank == 0:
        answer(slowest)
    if args.be != "bare":
        model.close()


def main() -> None:
    """Run as a rank, or measure start-up times and print the results."""
    options = parser(__doc__, rounds=7, mpiexec=True)
    options.add_argument("--ranks", default="2,8", help="of the jobs (default: %(default)s)")
    options.add_argument("--strategy", default="ddp", choices=("ddp", "zero1", "zero2", "zero3"))
    options.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.be:
        rank(args)
        return
    from mpizero._util.numbers import Measurement

    def measure(job: tuple[int, str]) -> float:
        size, kind = job
        if not size:
            return float(well([sys.executable, "-c", IMPORT]).out)
        words = ("--strategy", args.strategy, "--be", kind, "--started", str(time.monotonic()))
        return float(ranks_of(__file__, args.mpiexec, size, *words))

    jobs = [(int(size), kind) for size in args.ranks.split(",") for kind in ("trains", "bare")]
    found = alternate(args.rounds, [(0, "import mpizero"), *jobs], measure, warm_up=1)
    rows = []
    for (size, kind), seconds in found.items():
        over = Measurement.of_ratios(seconds, found[size, "bare"]) if kind == "trains" else ""
        rows.append((f"{size} ranks, {kind}" if size else kind, Measurement.of(seconds).text(3), over))
    print(aligned(("", "seconds", "over bare"), rows))


if __name__ == "__main__":
    main()
