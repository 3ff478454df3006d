"""Measure the seconds of ``import mpizero``, and from ``mpiexec`` to the end of the first step.

A first run, which is not counted, compiles the kernels. Then these run alternately: an interpreter that does nothing,
one that imports mpizero, and for each number of ranks two jobs: one that trains, and one that is *bare*, whose ranks
import NumPy and mpi4py and meet in a barrier. The time of a job is from before ``mpiexec`` to the end of the first
step, or of the barrier, on the slowest rank. "over bare" is the ratio of the two in the same round. The slowest rank's
time has these parts: until Python runs the script ("python"); NumPy, mpi4py and ``MPI_Init`` ("mpi"); the import of
mpizero ("import"); making communicators ("comms") and shared windows ("windows"); loading kernels ("kernels"); what
is left of building the model ("model") and of the first step ("step"). "MB read" are the bytes that this rank asked
the system to read until its first step was done.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from harness.clock import Clock
from harness.jobs import answer, ranks_of, well
from harness.options import parser
from harness.tables import aligned
from harness.turns import alternate

from mpizero._util.numbers import Measurement

PARTS = ("python", "mpi", "import", "comms", "windows", "kernels", "model", "step")


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=7, mpiexec=True, json=True)
    options.add_argument("--ranks", default="2,8", help="of the jobs (default: %(default)s)")
    options.add_argument("--strategy", default="ddp", choices=("ddp", "zero1", "zero2", "zero3"))
    options.add_argument("--started", type=float, help=argparse.SUPPRESS)
    return options.parse_args()


def job(started: float, strategy: str) -> None:
    """Run as one rank: build a small GPT and train one step; rank 0 prints what the slowest rank has measured.

    ``started`` is the value of ``time.monotonic()`` before ``mpiexec`` was started.
    """
    clock = Clock("model", started)
    clock.spend("python")
    import numpy as np
    from mpi4py import MPI

    clock.spend("mpi")
    import mpizero as mz
    from mpizero.comm.mpi import MpiCommunicator
    from mpizero.kernels.jit import Kernel

    clock.spend("import")
    for name in ("__init__", "_split", "_split_node"):
        clock.watch(MpiCommunicator, name, lambda _: "comms")
    clock.watch(MpiCommunicator, "_allocate_shared", lambda _: "windows")
    clock.watch(Kernel, "load", lambda _: "kernels")
    world = MPI.COMM_WORLD
    config = mz.ShardingConfig(comm=world, micro_batch=1)
    gpt = mz.nn.GPT(dim=64, layers=2, heads=4, sequence=64, vocabulary=256)
    model = mz.distribute(gpt, mz.AdamW(lr=1e-3), strategy=strategy, config=config)
    clock.spend("model")
    clock.outside = "step"
    ids = np.random.default_rng(world.rank).integers(0, 256, (1, 65))
    model.train(ids[:, :-1], ids[:, 1:])
    tell_slowest(world, clock)
    model.close()


def bare(started: float) -> None:
    """Run as one rank that imports NumPy and mpi4py, and meets the others in a barrier; rank 0 prints the seconds."""
    clock = Clock("mpi", started)
    clock.spend("python")
    import numpy as np  # noqa: F401
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    tell_slowest(MPI.COMM_WORLD, clock)


def tell_slowest(world: Any, clock: Clock) -> None:
    """Print on rank 0 the slowest rank's seconds until now, its parts and the bytes that it has read, as JSON."""
    parts = dict.fromkeys(PARTS, 0.0) | clock.take()
    everyone = world.gather({"seconds": sum(parts.values()), "parts": parts, "read": read_bytes()}, 0)
    if everyone is not None:
        answer(max(everyone, key=lambda rank: rank["seconds"]))


def read_bytes() -> int:
    """Return how many bytes this process has asked the system to read so far."""
    fields = Path("/proc/self/io").read_text(encoding="ascii").split()
    return int(fields[fields.index("rchar:") + 1])


def python(code: str) -> float:
    """Run ``code`` in a new interpreter; return the number that it prints, or if it prints none the seconds it took."""
    started = time.monotonic()
    printed = well([sys.executable, "-c", code]).out
    return float(printed) if printed else time.monotonic() - started


def seconds(args: argparse.Namespace) -> dict[str, Any]:
    """Time interpreters, imports and jobs alternately, and return a JSON document.

    "seconds" has the values of all rounds by what was timed; "jobs" has for each job the median seconds of its parts,
    the bytes that it has read, and its ratio to the bare job.
    """
    sizes = [int(size) for size in args.ranks.split(",")]
    kinds = {"ranks": "job", "ranks, bare": "bare"}
    runs: dict[str, list[dict[str, Any]]] = {f"{n} {kind}": [] for n in sizes for kind in kinds}
    for name in runs:
        start(args, name, kinds)

    def measure(name: str) -> float:
        if name == "python -c pass":
            return python("pass")
        if name == "import mpizero":
            return python("import time; t = time.monotonic(); import mpizero; print(time.monotonic() - t)")
        runs[name].append(start(args, name, kinds))
        return float(runs[name][-1]["seconds"])

    found: dict[str, Any] = {"seconds": alternate(args.rounds, ["python -c pass", "import mpizero", *runs], measure)}
    found["jobs"] = {
        name: {
            "parts": {part: Measurement.of([run["parts"][part] for run in told]).median for part in PARTS},
            "read": Measurement.of([run["read"] for run in told]).median,
            "over": str(
                Measurement.of_ratios(found["seconds"][name], found["seconds"][f"{name.split()[0]} ranks, bare"])
            ),
        }
        for name, told in runs.items()
    }
    return found


def start(args: argparse.Namespace, name: str, kinds: dict[str, str]) -> dict[str, Any]:
    """Run the job ``name``, such as "8 ranks, bare"; return what rank 0 printed."""
    ranks, kind = name.split(" ", 1)
    words = ("--strategy", args.strategy, "--be", kinds[kind], "--started", str(time.monotonic()))
    return dict(ranks_of(__file__, args.mpiexec, int(ranks), *words))


def report(found: dict[str, Any]) -> str:
    """Format the result of :func:`seconds` as a table."""
    rows = []
    for name, values in found["seconds"].items():
        measured, job = Measurement.of(values), found["jobs"].get(name)
        cells = [f"{seconds:.3f}" for seconds in (measured.median, measured.least, measured.most)]
        parts = [*(f"{job['parts'][part]:.3f}" for part in PARTS), f"{job['read'] / 1e6:.1f}"] if job else [""] * 9
        rows.append((name, *cells, *parts, job["over"] if job else ""))
    return aligned(("seconds", "median", "least", "most", *PARTS, "MB read", "over bare"), rows)


def main() -> None:
    """Run as a rank, or measure start-up times and print the results."""
    args = arguments()
    if args.be == "job":
        job(args.started, args.strategy)
    elif args.be == "bare":
        bare(args.started)
    else:
        found = seconds(args)
        print(json.dumps(found) if args.json else report(found))


if __name__ == "__main__":
    main()
