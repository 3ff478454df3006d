"""Measure the seconds of ``import mpizero``, and from ``mpiexec`` to the end of the first step; or memory.

A first run, which is not counted, compiles the kernels. Then these run alternately: an interpreter that does nothing,
one that imports mpizero, and jobs of 2 and of 8 ranks. The time of a job is from before ``mpiexec`` to the end of the
first step on the slowest rank. The slowest rank's time is divided into four parts: until Python runs the script
("python"); imports with ``MPI_Init`` ("imports"); building the model ("model"); the first step ("step").

With ``--memory`` a model of 64 million parameters is built on 8 ranks of one node instead. The growth of the processes'
memory (proportional set size, summed over the ranks) is compared with the size of one copy of the parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from harness import alternate, output_of, parser, result_of

from mpizero.measurement import Measurement

PARTS = ("python", "imports", "model", "step")


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=7, mpiexec=True, json=True)
    options.add_argument("--ranks", default="2,8", help="of the jobs (default: %(default)s)")
    options.add_argument("--strategy", default="ddp", choices=("ddp", "zero1", "zero2", "zero3"))
    options.add_argument("--memory", action="store_true", help="measure memory instead")
    options.add_argument("--parameters", type=float, default=64e6, help="of the model of --memory")
    options.add_argument("--started", type=float, help=argparse.SUPPRESS)
    return options.parse_args()


def job(started: float, strategy: str) -> None:
    """Run as one rank: build a small GPT and train one step; rank 0 prints the seconds of each part as JSON.

    ``started`` is the value of ``time.monotonic()`` before ``mpiexec`` was started.
    """
    marks = [started, time.monotonic()]
    import numpy as np
    from mpi4py import MPI

    import mpizero as mz

    world = MPI.COMM_WORLD
    marks.append(time.monotonic())
    config = mz.ShardingConfig(comm=world, micro_batch=1)
    gpt = mz.nn.GPT(dim=64, layers=2, heads=4, sequence=64, vocabulary=256)
    model = mz.distribute(gpt, mz.AdamW(lr=1e-3), strategy=strategy, config=config)
    marks.append(time.monotonic())
    ids = np.random.default_rng(world.rank).integers(0, 256, (1, 65))
    model.train(ids[:, :-1], ids[:, 1:])
    marks.append(time.monotonic())
    everyone = world.gather(marks, 0)
    model.close()
    if everyone is not None:
        slowest = max(everyone, key=lambda rank: rank[-1])
        parts = [after - before for before, after in zip(slowest, slowest[1:], strict=False)]
        print(json.dumps({"seconds": slowest[-1] - started, "parts": parts}))


def memory(parameters: int, strategy: str) -> None:
    """Run as one rank: build a model and read all its parameters; rank 0 prints JSON.

    It has the bytes of one copy of the parameters, the growth of each rank's memory, and the bytes of windows.
    """
    from mpi4py import MPI

    import mpizero as mz
    from mpizero.comm import as_communicator
    from mpizero.train.bench.strategy_memory import idle_size, wide_mlp

    comm = as_communicator(MPI.COMM_WORLD)
    config = mz.ShardingConfig(comm=comm, micro_batch=1)
    mz.distribute(wide_mlp(1), mz.SGD(lr=1e-3), strategy=strategy, config=config).close()  # libraries and kernels
    plain = wide_mlp(parameters)
    before = idle_size(comm)
    model = mz.distribute(plain, mz.SGD(lr=1e-3), strategy=strategy, config=config)
    seen = 0.0
    for unit in model.engine.layout.units:
        with model.engine.store.unshard(unit) as named:
            seen += sum(float(leaf.sum()) for leaf in leaves(named))  # so that every rank maps every page
    grown = comm.allgather_object(idle_size(comm) - before)
    facts = model.metadata()
    if comm.rank == 0:
        copy = 4 * facts.parameter_count
        rows = model.engine.memory.shared_bytes
        print(json.dumps({"copy": copy, "grown": grown, "windows": dict(rows), "seen": seen}))
    model.close()


def leaves(tree: Any) -> Any:
    """Yield all arrays in nested dictionaries."""
    for value in tree.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


def launched(args: argparse.Namespace, ranks: int, *words: str) -> dict[str, Any]:
    """Run this script with the options ``words`` on ``ranks`` ranks; return the JSON document that rank 0 printed."""
    return dict(result_of(args.mpiexec, ranks, __file__, "--strategy", args.strategy, *words))


def python(code: str) -> float:
    """Run ``code`` in a new interpreter; return the number that it prints, or if it prints none the seconds it took."""
    started = time.monotonic()
    printed = output_of([sys.executable, "-c", code])
    return float(printed) if printed else time.monotonic() - started


def seconds(args: argparse.Namespace) -> dict[str, Any]:
    """Time interpreters, imports and jobs alternately, and return a JSON document.

    "seconds" has the values of all rounds by what was timed, and "parts" the median seconds of the parts of each job.
    """
    sizes = [int(size) for size in args.ranks.split(",")]
    runs: dict[str, list[dict[str, Any]]] = {f"{n} ranks": [] for n in sizes}
    for n in sizes:
        launched(args, n, "--be", "job", "--started", str(time.monotonic()))

    def measure(name: str) -> float:
        if name == "python -c pass":
            return python("pass")
        if name == "import mpizero":
            return python("import time; t = time.monotonic(); import mpizero; print(time.monotonic() - t)")
        told = launched(args, int(name.split()[0]), "--be", "job", "--started", str(time.monotonic()))
        runs[name].append(told)
        return float(told["seconds"])

    found: dict[str, Any] = {"seconds": alternate(args.rounds, ["python -c pass", "import mpizero", *runs], measure)}
    found["parts"] = {
        name: {part: Measurement.of([run["parts"][k] for run in told]).median for k, part in enumerate(PARTS)}
        for name, told in runs.items()
    }
    return found


def report(found: dict[str, Any]) -> str:
    """Format the result of :func:`seconds` as a table."""
    lines = [f"{'seconds':18s}{'median':>8s}{'least':>8s}{'most':>8s}" + "".join(f"{part:>9s}" for part in PARTS)]
    for name, values in found["seconds"].items():
        measured, parts = Measurement.of(values), found["parts"].get(name, {})
        lines.append(
            f"{name:18s}{measured.median:8.3f}{measured.least:8.3f}{measured.most:8.3f}"
            + "".join(f"{parts[part]:9.3f}" for part in PARTS if parts)
        )
    return "\n".join(lines)


def main() -> None:
    """Measure start-up times, or with ``--memory`` memory, and print the results."""
    args = arguments()
    if args.be == "job":
        job(args.started, args.strategy)
    elif args.be == "memory":
        memory(int(args.parameters), args.strategy)
    elif args.memory:
        ranks = int(args.ranks.split(",")[-1])
        told = launched(args, ranks, "--be", "memory", "--parameters", str(args.parameters))
        ratio = sum(told["grown"]) / told["copy"]
        if args.json:
            print(json.dumps(told | {"ratio": ratio, "ranks": ranks}))
        else:
            grown, copy = sum(told["grown"]) / 1e6, told["copy"] / 1e6
            print(
                f"{told['copy'] / 4:,.0f} float32 parameters on {ranks} ranks of one node, {args.strategy}: the "
                f"processes grew by {grown:.1f} MB together, one copy is {copy:.1f} MB: {ratio:.3f} copies"
            )
    else:
        found = seconds(args)
        print(json.dumps(found) if args.json else report(found))


if __name__ == "__main__":
    main()
