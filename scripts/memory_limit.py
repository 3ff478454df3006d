"""Train a model that is too large for one process with limited memory on several processes with the same limit each.

    python scripts/memory_limit.py [--layers 40] [--ranks 4] [--limit-mb 300] [--launcher "MPIEXEC PYTHON"]
    python scripts/memory_limit.py --volume 96 --steps 2

With ``--volume`` the model is a U-Net, which is small, and each sample a cube of so many positions along each axis:
ranks share its space, ``mz.Mesh(domain=...)``.

Three trainings of one model run, all with ZeRO-3 and ``share_node_memory=False``: on one process without a
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
import itertools
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness.jobs import Ended, Mpi, answer, launchers, run
from harness.options import plain
from harness.tables import aligned

MB = 1_000_000
CLASSES = 8


def parse() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = plain(__doc__)
    parser.add_argument("--width", type=int, default=1024, help="of every layer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--samples", type=int, default=64, help="of the global batch (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--limit-mb", type=float, default=300.0, help="for each process (default: %(default)s)")
    parser.add_argument("--volume", type=int, default=0, help="extents of a cube, in place of --width and --layers")
    parser.add_argument("--launcher", metavar="'MPIEXEC PYTHON'")
    parser.add_argument("--worker", choices=("free", "limited"), help=argparse.SUPPRESS)
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------- one rank


#: The cut of a cube by the number of ranks.
CUTS = {1: (), 2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)}


def train(options: argparse.Namespace, extent: int, width: int, layers: int, steps: int) -> dict[str, Any]:
    """Train an MLP, or with ``--volume`` a U-Net on cubes that all ranks share. Collective over all ranks.

    The keys of the result are "losses" (of each step, in hexadecimal), "sha256" (of the parameters), "parameters"
    (their number) and "ranks": for each its memory in bytes ("counted" by the library, and the growth of "pss" and
    "rss").
    """
    from mpi4py import MPI

    import mpizero as mz
    from mpizero.train.machine import peak_growth, proportional_growth

    space = (extent,) * 3 if options.volume else ()
    cut = CUTS[MPI.COMM_WORLD.Get_size()] if space else ()
    if space:
        net: Any = mz.nn.UNet(1, 1, axes=3, width=16, levels=3, groups=4, space=space)
    else:
        net = mz.nn.MLP(width, (width,) * layers, CLASSES, activation="relu")
    config = mz.Config(micro_batch=1 if space else options.samples // 4)
    with (
        mz.Mesh(domain=cut, share_node_memory=False) as mesh,
        peak_growth() as rss,
        proportional_growth(0.05) as pss,
        mz.distribute(net, mz.AdamW(lr=1e-3 if space else 1e-4), "zero3", mesh=mesh, config=config) as model,
    ):
        slab = mesh.slab(space) if cut else (slice(None),) * 3
        made = waves(extent, slab) if space else samples(options, width, mesh.communicator)
        losses = [model.train(*batch).hex() for batch in itertools.islice(made, steps)]
        digest, count, counted = model.parameters_sha256(), model.parameter_count, model._engine.memory.peak_bytes
        everyone = mesh.communicator.allgather_object({"counted": counted, "pss": pss[0], "rss": rss[0]})
    return {"losses": losses, "sha256": digest, "parameters": count, "ranks": everyone}


def samples(options: argparse.Namespace, width: int, comm: Any) -> Iterator[tuple[Any, Any]]:
    """Yield this rank's part of the same samples in every step."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((options.samples, width)).astype(np.float32)
    y = rng.integers(0, CLASSES, options.samples)
    mine = slice(comm.rank * len(x) // comm.size, (comm.rank + 1) * len(x) // comm.size)
    return itertools.repeat((x[mine], y[mine]))


def waves(extent: int, slab: tuple[slice, ...]) -> Iterator[tuple[Any, Any]]:
    """Yield this rank's part of the cube of each step: waves, and their squares."""
    axes = [np.arange(extent)[part] for part in slab]
    for step in itertools.count():
        x, y, z = (np.sin((0.1 + 0.03 * axis) * (at + step)) for axis, at in enumerate(axes))
        cube = (x[:, None, None] + y[:, None] + z)[None, ..., None].astype(np.float32)
        yield cube, cube * cube


def worker(options: argparse.Namespace) -> None:
    """Run as one rank of a training, with the limit if ``options.worker`` is "limited"; rank 0 prints the result."""
    from mpi4py import MPI

    from mpizero.train.machine import allocated

    train(options, 8, 8, 1, 1)  # loads libraries and kernels before the limit is set
    if options.worker == "limited":
        resource.setrlimit(resource.RLIMIT_DATA, (allocated() + int(options.limit_mb * MB),) * 2)
    found = train(options, options.volume, options.width, options.layers, options.steps)
    if MPI.COMM_WORLD.Get_rank() == 0:
        answer(found)


# ---------------------------------------------------------------------------------------------- the three trainings


def ended(mpi: Mpi, options: argparse.Namespace, kind: str, ranks: int) -> Ended:
    """Run one training on ``ranks`` ranks, and return how it ended; ``kind`` is "free" (no limit) or "limited"."""
    names = ("width", "layers", "samples", "steps", "limit_mb", "volume")
    words = [word for name in names for word in (f"--{name.replace('_', '-')}", getattr(options, name))]
    return run(mpi.command(ranks, [Path(__file__).resolve(), "--worker", kind, *words]), limit=600.0)


def cells(name: str, end: Ended) -> tuple[str, ...]:
    """Return the cells of the table for the training ``name``."""
    if (found := end.answer) is None:
        return name, "", "", "", "", f"ended with status {end.status}"
    most = (max(rank[kind] for rank in found["ranks"]) / MB for kind in ("counted", "pss", "rss"))
    figures = [f"{size:.1f}" for size in most]
    return name, *figures, f"{float.fromhex(found['losses'][-1]):.9f}", found["sha256"][:16]


def main() -> int:
    """Run the three trainings, print their results, and return the exit status."""
    options = parse()
    if options.worker:
        worker(options)
        return 0
    mpi = launchers(options.launcher and [options.launcher])[0]
    free, alone = (ended(mpi, options, kind, 1) for kind in ("free", "limited"))
    several = ended(mpi, options, "limited", options.ranks)
    if free.answer is not None:
        print(f"{free.answer['parameters']:,} parameters, AdamW, float32; MB of the largest rank, beyond the libraries")
    limit = f"limit {options.limit_mb:g} MB"
    trainings = {"1 process": free, f"1 process, {limit}": alone, f"{options.ranks} ranks, {limit}": several}
    print(aligned(("", "counted", "PSS", "RSS", "last loss", ""), [cells(*pair) for pair in trainings.items()]))
    refused = [line for line in alone.err.splitlines() if "OutOfMemoryError: " in line]
    print(f"\nthe one process said: {refused[-1].strip() if refused else alone.err[-2000:]}")
    same = (
        free.answer and several.answer and all(free.answer[key] == several.answer[key] for key in ("losses", "sha256"))
    )
    shown = same and alone.answer is None and alone.status > 0 and bool(refused)
    if several.answer is None:
        print(several.err[-2000:])
    print("shown: one process does not fit, the ranks train with the same bits" if shown else "NOT shown")
    return 0 if shown else 1


if __name__ == "__main__":
    sys.exit(main())
