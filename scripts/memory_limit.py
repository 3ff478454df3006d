"""Train a model that is too large for one process with limited memory on several processes with the same limit each.

    python scripts/memory_limit.py [--layers 40] [--ranks 4] [--limit-mb 300] [--launcher "MPIEXEC PYTHON"]

Three trainings of one model run, all with FSDPModel (ZeRO-3) and ``share_node_memory=False``: on one process without a
limit, on one process with the limit, and on --ranks processes with the same limit each. The limit is on the memory that
a process allocates in addition to what it had before the model was made (RLIMIT_DATA: heap and private mappings); the
operating system refuses more. The exit status is 0 if the one process with the limit ends with an error that says that
memory is short, the --ranks processes train, and their losses and parameters have the bits of the process without a
limit. Otherwise it is 1.

The default launcher is the first in the environment variable MPIZERO_MPIEXEC, or the mpiexec in the folder of this
Python interpreter.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MB = 1_000_000
RESULT = "memory-limit: "
CLASSES = 8


def parse() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=1024, help="of every layer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--samples", type=int, default=64, help="of the global batch (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--limit-mb", type=float, default=300.0, help="for each process (default: %(default)s)")
    parser.add_argument("--launcher", metavar="'MPIEXEC PYTHON'")
    parser.add_argument("--worker", choices=("free", "limited"), help=argparse.SUPPRESS)
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------- one rank


def train(options: argparse.Namespace, width: int, layers: int, steps: int) -> dict[str, Any]:
    """Train an MLP on all ranks, and return a JSON document. Collective over all ranks.

    Its keys are "losses" (of each step, in hexadecimal), "sha256" (of the parameters), "parameters" (their number) and
    "ranks": for each rank its memory in bytes ("counted" by the library, and the growth of "pss" and "rss").
    """
    import numpy as np
    from mpi4py import MPI

    import mpizero as mz
    from mpizero.train.machine import peak_growth, proportional_growth

    config = mz.ShardingConfig(comm=MPI.COMM_WORLD, micro_batch=options.samples // 4, share_node_memory=False)
    net = mz.nn.MLP(width, (width,) * layers, CLASSES, activation="relu")
    rng, comm = np.random.default_rng(0), config.communicator
    x = rng.standard_normal((options.samples, width)).astype(np.float32)
    y = rng.integers(0, CLASSES, options.samples)
    mine = slice(comm.rank * len(x) // comm.size, (comm.rank + 1) * len(x) // comm.size)
    adamw = mz.AdamW(lr=1e-4)
    with peak_growth() as rss, proportional_growth(0.05) as pss, mz.FSDPModel(net, config, optimizer=adamw) as model:
        losses = [model.train(x[mine], y[mine]).hex() for _ in range(steps)]
        digest, count, counted = model.parameters_sha256(), model.parameter_count, model.engine.memory.peak_bytes
    everyone = comm.allgather_object({"counted": counted, "pss": pss[0], "rss": rss[0]})
    config.close()
    return {"losses": losses, "sha256": digest, "parameters": count, "ranks": everyone}


def worker(options: argparse.Namespace) -> None:
    """Run as one rank of a training, with the limit if ``options.worker`` is "limited"; rank 0 prints the result."""
    from mpi4py import MPI

    from mpizero.train.machine import allocated

    train(options, 8, 1, 1)  # loads libraries and kernels before the limit is set
    if options.worker == "limited":
        resource.setrlimit(resource.RLIMIT_DATA, (allocated() + int(options.limit_mb * MB),) * 2)
    found = train(options, options.width, options.layers, options.steps)
    if MPI.COMM_WORLD.Get_rank() == 0:
        print(RESULT + json.dumps(found), flush=True)


# ---------------------------------------------------------------------------------------------- the three trainings


class Ended(NamedTuple):
    """Hold the end of a training: exit status, the result of :func:`train` (None if it failed), and standard error."""

    status: int
    found: dict[str, Any] | None
    err: str


def run(launcher: tuple[str, str], options: argparse.Namespace, kind: str, ranks: int) -> Ended:
    """Run one training on ``ranks`` ranks, and return how it ended; ``kind`` is "free" (no limit) or "limited"."""
    from tests.faults.jobs import run_job

    command = [Path(__file__).resolve(), "--worker", kind]
    for name in ("width", "layers", "samples", "steps", "limit_mb"):
        command += [f"--{name.replace('_', '-')}", getattr(options, name)]
    with tempfile.TemporaryDirectory() as folder:
        ended = run_job(launcher, Path(folder), command, ranks, limit=600.0)
    lines = [line for line in ended.out.splitlines() if RESULT in line]
    found = json.loads(lines[0].partition(RESULT)[2]) if lines else None
    return Ended(ended.status, found, ended.err)


def told(name: str, ended: Ended) -> str:
    """Return the line of the table for the training ``name``."""
    if ended.found is None:
        return f"{name:22s}  {'ended with status ' + str(ended.status):>46s}"
    ranks = ended.found["ranks"]
    figures = "  ".join(f"{max(rank[kind] for rank in ranks) / MB:8.1f}" for kind in ("counted", "pss", "rss"))
    return f"{name:22s}  {figures}  {float.fromhex(ended.found['losses'][-1]):.9f}  {ended.found['sha256'][:16]}"


def main() -> int:
    """Run the three trainings, print their results, and return the exit status."""
    options = parse()
    if options.worker:
        worker(options)
        return 0
    from tests.faults.jobs import launchers

    launcher: Any = tuple(options.launcher.split()) if options.launcher else launchers()[0]
    free, alone = (run(launcher, options, kind, 1) for kind in ("free", "limited"))
    several = run(launcher, options, "limited", options.ranks)
    if free.found is not None:
        print(f"{free.found['parameters']:,} parameters, AdamW, float32; MB of the largest rank, beyond the libraries")
    print(f"{'':22s}  {'counted':>8s}  {'PSS':>8s}  {'RSS':>8s}  last loss    sha256")
    limit = f"limit {options.limit_mb:g} MB"
    print(
        told("1 process", free),
        told(f"1 process, {limit}", alone),
        told(f"{options.ranks} ranks, {limit}", several),
        sep="\n",
    )
    refused = [line for line in alone.err.splitlines() if "OutOfMemoryError: " in line]
    print(f"\nthe one process said: {refused[-1].strip() if refused else alone.err[-2000:]}")
    keys = ("losses", "sha256")
    same = free.found is not None and several.found is not None and all(free.found[k] == several.found[k] for k in keys)
    shown = same and alone.found is None and alone.status > 0 and bool(refused)
    if several.found is None:
        print(several.err[-2000:])
    print("shown: one process does not fit, the ranks train with the same bits" if shown else "NOT shown")
    return 0 if shown else 1


if __name__ == "__main__":
    sys.exit(main())
