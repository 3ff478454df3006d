"""Measure what a training costs as its ranks grow in number: seconds, memory, communicators and windows.

A small GPT with 4 tiles of the tensor axis trains on pipeline x tensor x data grids of 8, 16, 32 and 64 ranks. All
trainings must end with the same parameters, to the bit. Three kinds of jobs run in turns:

* *bare*: processes under mpiexec that import the modules of the training, load its kernels and meet in one barrier;
* *processes*: processes under mpiexec that build the model and train it;
* *threads*: one process that builds the model and trains it on as many threads.

The seconds of a job are those from its start to its end. A first run of each job, which is not timed, compiles the
kernels and measures memory at the end of the training, while all ranks wait: the proportional set size of a rank, mean
over the ranks. Of threads it is what the process has grown by, over their number.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from harness.jobs import Mpi, answer, in_threads, well
from harness.kernels import cpu_kernels
from harness.options import parser, positive
from harness.tables import markdown
from harness.turns import alternate

os.environ.setdefault("OMP_NUM_THREADS", "1")

from mpizero._util.numbers import Measurement

Row = dict[str, Any]
KINDS = ("bare", "processes", "threads")
TILES, SAMPLES, SEQUENCE, VOCABULARY = 4, 16, 16, 256
#: Axes, in the order in which they are doubled to make room for more ranks.
AXES = ("pipeline", "tensor", "data")
MOST = 64


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=3, mpiexec=True)
    options.add_argument("--ranks", default="8,16,32,64", help="powers of two (default: %(default)s)")
    options.add_argument("--steps", type=positive, default=5, help="(default: %(default)s)")
    options.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--loads", default="{}", help=argparse.SUPPRESS)
    args = options.parse_args()
    args.sizes = sizes = [int(word) if word.isdecimal() else 0 for word in args.ranks.split(",")]
    if any(size.bit_count() != 1 or size > MOST for size in sizes):
        options.error(f"--ranks {args.ranks}: expected powers of two up to {MOST}, separated by commas")
    return args


def grid(ranks: int) -> dict[str, int]:
    """Return the size of each axis: powers of two as equal as possible, the first axes larger."""
    sizes = dict.fromkeys(AXES, 1)
    for number in range(ranks.bit_length() - 1):
        sizes[AXES[number % len(AXES)]] *= 2
    return sizes


# -------------------------------------------------------------------------------------------- what a job does


def train(comm: Any, sizes: dict[str, int], args: argparse.Namespace) -> Row:
    """Train as one rank of ``comm``; return hash, memory, and how many communicators and windows it has."""
    import numpy as np

    import mpizero as mz
    from mpizero.guard import guard

    windows = count_windows()
    gpt = mz.nn.GPT(dim=64, layers=8, heads=8, sequence=SEQUENCE, vocabulary=VOCABULARY)
    text = np.random.default_rng(0).integers(0, VOCABULARY, (args.steps * SAMPLES, SEQUENCE + 1))
    source = mz.data.ArraySource(text[:, :-1], text[:, 1:])
    parallel = {f"{axis}_parallel_size": size for axis, size in sizes.items()}
    with (
        mz.ShardingConfig(comm=comm, micro_batch=1, tiles={"tensor": TILES}) as config,
        mz.HybridShardedModel(gpt, config, **parallel, zero_stage=1, optimizer=mz.AdamW(1e-3)) as model,
    ):
        for x, y in mz.data.batches(source, model, global_batch=SAMPLES, steps=args.steps):
            model.train(x, y)
        return {
            "sha256": model.parameters_sha256(),
            "communicators": len(guard.current().register.live),
            "windows": sum(window.buffer.size > 0 for window in windows),
            "memory": waiting_memory(config.communicator) if args.measure else 0,
        }


def count_windows() -> list[Any]:
    """Return a list to which every shared window is appended that this process makes from now on."""
    from mpizero.comm.mpi import MpiCommunicator

    made: list[Any] = []
    allocate = MpiCommunicator._allocate_shared

    def allocate_and_note(comm: MpiCommunicator, nbytes: int) -> Any:
        made.append(allocate(comm, nbytes))
        return made[-1]

    MpiCommunicator._allocate_shared = allocate_and_note  # type: ignore[method-assign]
    return made


def waiting_memory(comm: Any) -> int:
    """Return the proportional set size of this process in bytes, while all ranks wait. Collective over ``comm``."""
    from mpizero.train.machine import proportional

    comm.barrier()
    size = proportional()
    comm.barrier()
    return size


def together(rows: list[Row]) -> Row:
    """Return one row for those of all ranks: the hashes, the mean of memory, and the largest of each other value."""
    return {name: max(row[name] for row in rows) for name in rows[0]} | {
        "memory": statistics.mean(row["memory"] for row in rows),
        "hashes": sorted({row["sha256"] for row in rows}),
    }


def bare(args: argparse.Namespace) -> Row | None:
    """Run as one rank that loads what a training needs and meets the others; return what rank 0 has measured."""
    from mpi4py import MPI

    from mpizero.comm import as_communicator

    loads = json.loads(args.loads)
    for module in loads["modules"]:
        importlib.import_module(module)
    for name, dtypes in loads["kernels"].items():
        module, _, kernel = name.partition(":")
        for dtype in dtypes:
            getattr(sys.modules[module], kernel).load(dtype)
    comm = as_communicator(MPI.COMM_WORLD)
    comm.barrier()
    sizes = comm.allgather_object(waiting_memory(comm)) if args.measure else [0]
    rank = comm.rank
    comm.close()
    return None if rank else {"memory": statistics.mean(sizes)}


def processes(args: argparse.Namespace) -> Row | None:
    """Run as one rank that trains; return what was measured on all ranks, and what a bare process must load."""
    from mpi4py import MPI

    rows = MPI.COMM_WORLD.gather(train(MPI.COMM_WORLD, grid(MPI.COMM_WORLD.size), args))
    modules = [name for name in sys.modules if name.startswith("mpizero.")]
    kernels = {name: kernel.loaded for name, kernel in cpu_kernels().items()}
    return rows and together(rows) | {"loads": {"modules": modules, "kernels": kernels}}


def threads(args: argparse.Namespace) -> Row:
    """Train as threads of this process; return what was measured on all of them."""
    from mpizero.train.machine import proportional

    (size,) = args.sizes
    train("self", grid(1), args)  # loads libraries and kernels
    before = proportional()
    row = together(in_threads(size, lambda comm: train(comm, grid(size), args)))
    return row | {"memory": (row["memory"] - before) / size}


# -------------------------------------------------------------------------------------------- jobs in turns


class Jobs:
    """Start the jobs that are compared; ``rows`` has what the first run of each has measured, ``hashes`` all hashes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rows: dict[tuple[str, int], Row] = {}
        self.hashes: set[str] = set()
        self._args = args
        self._loads = "{}"

    def run(self, job: tuple[str, int]) -> float:
        """Run a job to its end, and return the seconds that it took."""
        kind, size = job
        words = [__file__, "--be", kind, "--ranks", str(size), "--steps", str(self._args.steps)]
        words += ["--loads", self._loads, *["--measure"] * (job not in self.rows)]
        alone = kind == "threads"
        ended = well([sys.executable, *words] if alone else Mpi(self._args.mpiexec).command(size, words))
        row = ended.answer
        if loads := row.pop("loads", None):
            self._loads = json.dumps(loads)
        self.hashes |= set(row.get("hashes", ()))
        self.rows.setdefault(job, row)
        return ended.seconds


def compare(args: argparse.Namespace) -> str:
    """Run all jobs, and return a table with a row for each; end the script if results differ."""
    jobs, lines = Jobs(args), []
    for size in args.sizes:
        for kind in ("processes", "threads", "bare"):  # trainings tell which modules and kernels there are
            jobs.run((kind, size))
        seconds = alternate(args.rounds, [(kind, size) for kind in KINDS], jobs.run)
        for job, values in seconds.items():
            row, trains = jobs.rows[job], job[0] != "bare"
            over = Measurement.of_ratios(values, seconds["bare", size]) if trains else ""
            counts = [row[name] if job[0] == "processes" else "" for name in ("communicators", "windows")]
            lines.append((size, job[0], Measurement.of(values), over, f"{row['memory'] / 1e6:.1f}", *counts))
    if len(jobs.hashes) != 1:
        sys.exit(f"trainings end with {len(jobs.hashes)} different parameters: {', '.join(sorted(jobs.hashes))}")
    head = ("ranks", "", "seconds", "over bare", "MB a rank", "communicators", "windows")
    return f"{markdown(head, lines)}\nAll trainings: sha256 {min(jobs.hashes)[:16]}"


def main() -> None:
    """Run as a part of a job, or start the jobs and print what they took."""
    args = arguments()
    if not args.be:
        print(compare(args))
    elif row := {"bare": bare, "processes": processes, "threads": threads}[args.be](args):
        answer(row)


if __name__ == "__main__":
    main()
