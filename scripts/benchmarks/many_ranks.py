"""Measure what a training costs as its ranks grow in number: seconds, memory, communicators and windows.

A small GPT with 4 tiles of the tensor axis trains on pipeline x tensor x data grids of 8, 16, 32 and 64 ranks. All
trainings must end with the same parameters, to the bit. Three kinds of jobs run in turns:

* *bare*: processes under mpiexec that import the modules of the training, load its kernels and meet in one barrier;
* *processes*: processes under mpiexec that build the model and train it;
* *threads*: one process that builds the model and trains it on as many threads.

The seconds of a job are those from its start to its end. *Build* and *step* are parts of them, on the slowest rank.
A first run of each job, which is not timed, compiles the kernels and measures memory at the end of the training, while
all ranks wait: the proportional set size of a rank, mean over the ranks. Of threads it is what the process has grown
by, over their number.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from harness.jobs import Mpi, answer, in_threads, well
from harness.kernels import cpu_kernels
from harness.options import parser
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
    options = parser(__doc__, rounds=3, mpiexec=True, json=True)
    options.add_argument("--ranks", default="8,16,32,64", help="powers of two (default: %(default)s)")
    options.add_argument("--steps", type=int, default=5, help="(default: %(default)s)")
    options.add_argument("--zero", type=int, default=1, choices=range(4), help="ZeRO stage (default: %(default)s)")
    options.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--loads", default="{}", help=argparse.SUPPRESS)
    args = options.parse_args()
    args.sizes = sizes = [int(word) if word.isdecimal() else 0 for word in args.ranks.split(",")]
    if any(size.bit_count() != 1 or size > MOST for size in sizes):
        options.error(f"--ranks {args.ranks}: expected powers of two up to {MOST}, separated by commas")
    if args.steps < 2:
        options.error(f"--steps {args.steps}: expected 2 or more, because the first step is not timed")
    return args


def grid(ranks: int) -> dict[str, int]:
    """Return the size of each axis: powers of two as equal as possible, the first axes larger."""
    sizes = dict.fromkeys(AXES, 1)
    for number in range(ranks.bit_length() - 1):
        sizes[AXES[number % len(AXES)]] *= 2
    return sizes


# -------------------------------------------------------------------------------------------- what a job does


def train(comm: Any, sizes: dict[str, int], args: argparse.Namespace) -> Row:
    """Train as one rank of ``comm``; return seconds, hash, memory, and how many communicators and windows it has."""
    import numpy as np

    import mpizero as mz
    from mpizero.guard import guard

    windows = count_windows()
    marks = [time.monotonic()]
    gpt = mz.nn.GPT(dim=64, layers=8, heads=8, sequence=SEQUENCE, vocabulary=VOCABULARY)
    text = np.random.default_rng(0).integers(0, VOCABULARY, (args.steps * SAMPLES, SEQUENCE + 1))
    source = mz.data.ArraySource(text[:, :-1], text[:, 1:])
    parallel = {f"{axis}_parallel_size": size for axis, size in sizes.items()}
    with (
        mz.ShardingConfig(comm=comm, micro_batch=1, tiles={"tensor": TILES}) as config,
        mz.HybridShardedModel(gpt, config, **parallel, zero_stage=args.zero, optimizer=mz.AdamW(1e-3)) as model,
    ):
        marks.append(time.monotonic())
        for x, y in mz.data.batches(source, model, global_batch=SAMPLES, steps=args.steps):
            model.train(x, y)
            marks.append(time.monotonic())
        return {
            "build": marks[1] - marks[0],
            "step": (marks[-1] - marks[2]) / (args.steps - 1),
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


def loaded() -> dict[str, Any]:
    """Return the modules of mpizero that this process has imported, and the dtypes of each loaded kernel."""
    modules = [name for name in sys.modules if name.startswith("mpizero.")]
    return {"modules": modules, "kernels": {name: kernel.loaded for name, kernel in cpu_kernels().items()}}


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
    """Run as one rank that trains; return what was measured on all ranks."""
    from mpi4py import MPI

    rows = MPI.COMM_WORLD.gather(train(MPI.COMM_WORLD, grid(MPI.COMM_WORLD.size), args))
    return rows and together(rows) | {"loads": loaded()}


def threads(args: argparse.Namespace) -> Row:
    """Train as threads of this process; return what was measured on all of them."""
    from mpizero.train.machine import proportional

    (size,) = args.sizes
    train("self", grid(1), args)  # loads libraries and kernels
    before = proportional()
    row = together(in_threads(size, lambda comm: train(comm, grid(size), args)))
    return row | {"memory": (row["memory"] - before) / size}


JOBS: dict[str, Callable[[argparse.Namespace], Row | None]] = {
    "bare": bare, "processes": processes, "threads": threads,
}  # fmt: skip


# -------------------------------------------------------------------------------------------- jobs in turns


class Jobs:
    """Start the jobs that are compared.

    Attributes
    ----------
    rows : dict
        For each kind and number of ranks what its jobs have printed; the first job has measured memory.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.rows: dict[tuple[str, int], list[Row]] = {}
        self._args = args
        self._loads = "{}"

    def run(self, job: tuple[str, int]) -> float:
        """Run a job to its end, and return the seconds that it took."""
        kind, size = job
        args, rows = self._args, self.rows.setdefault(job, [])
        words = [__file__, "--be", kind, "--ranks", str(size), "--loads", self._loads]
        words += ["--steps", str(args.steps), "--zero", str(args.zero), *["--measure"] * (not rows)]
        alone = kind == "threads"
        ended = well([sys.executable, *words] if alone else Mpi(args.mpiexec).command(size, words))
        rows.append(ended.answer)
        if loads := rows[-1].pop("loads", None):
            self._loads = json.dumps(loads)
        return ended.seconds

    def hashes(self) -> set[str]:
        """Return the hashes of all trainings so far."""
        return {digest for rows in self.rows.values() for row in rows for digest in row.get("hashes", ())}


def measure(args: argparse.Namespace) -> list[Row]:
    """Run all jobs, and return a row for each kind and number of ranks; end the script if results differ."""
    jobs = Jobs(args)
    found = []
    for size in args.sizes:
        kinds = [(kind, size) for kind in KINDS]
        for job in sorted(kinds, key=lambda job: job[0] == "bare"):  # trainings tell which kernels there are
            jobs.run(job)
        seconds = alternate(args.rounds, kinds, jobs.run)
        for job in kinds:
            first, *rest = jobs.rows[job]
            parts = {name: statistics.median(row[name] for row in rest) for name in ("build", "step") if name in first}
            counts = {name: first[name] for name in ("communicators", "windows") if job[0] == "processes"}
            found.append(
                {"kind": job[0], "ranks": size, "seconds": str(Measurement.of(seconds[job]))}
                | ({"over bare": str(Measurement.of_ratios(seconds[job], seconds["bare", size]))} if parts else {})
                | parts
                | {"memory": first["memory"]}
                | counts
            )
    if len(digests := jobs.hashes()) != 1:
        sys.exit(f"trainings end with {len(digests)} different parameters: {', '.join(sorted(digests))}")
    return [*found, {"sha256": digests.pop()}]


def table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown."""
    lines = []
    for row in rows[:-1]:
        parts = [f"{row[name]:.3g}" if name in row else "" for name in ("build", "step")]
        more = [row.get(name, "") for name in ("communicators", "windows")]
        cells = (row["ranks"], row["kind"], row["seconds"], row.get("over bare", ""), *parts)
        lines.append((*cells, f"{row['memory'] / 1e6:.1f}", *more))
    head = ("ranks", "", "seconds", "over bare", "build, s", "step, s", "MB a rank", "communicators", "windows")
    return f"{markdown(head, lines)}\nAll trainings: sha256 {rows[-1]['sha256'][:16]}"


def main() -> None:
    """Run as a part of a job, or start the jobs and print what they took."""
    args = arguments()
    if args.be:
        if row := JOBS[args.be](args):
            answer(row)
        return
    rows = measure(args)
    print(json.dumps(rows) if args.json else table(rows))


if __name__ == "__main__":
    main()
