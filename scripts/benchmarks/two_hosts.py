"""Time summing a gradient over two hosts by mpizero's hierarchical exchange, its flat exchange, and MPI_Allreduce.

Start it with ``scripts/two_hosts.sh -- python scripts/benchmarks/two_hosts.py``, or by the mpiexec of a cluster. Each
of these contenders sums one float32 gradient of each rank over all ranks:

* ``hierarchical``: mpizero; the ranks of a node sum in shared memory, and peers exchange slices;
* ``flat``: mpizero with private memory; all ranks exchange slices with all others;
* ``allreduce``: ``MPI_Allreduce`` of the MPI library, in place;
* ``bf16``, ``int8``, ``topk``: the hierarchical exchange with messages of 16 bits, of 8 bits, or of only the largest
  hundredth of the values (``gradient_compression``).

Each round runs each contender once, and begins with another one. Times are those of the slowest rank. Ratios are
computed from times of the same round; printed are medians over the rounds. Bytes are those that one host sends, counted
by its network interfaces, with headers.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

import numpy as np
from harness.options import chosen, parser
from harness.tables import aligned
from harness.turns import alternate, bytes_sent
from mpi4py import MPI

import mpizero as mz
from mpizero._util.numbers import Measurement
from mpizero.train.machine import described

WORLD = MPI.COMM_WORLD
#: Settings of mpizero by the contender's name.
SETTINGS: dict[str, dict[str, Any]] = {
    "hierarchical": {},
    "flat": {"share_node_memory": False},
    "bf16": {"gradient_compression": "bf16"},
    "int8": {"gradient_compression": "int8"},
    "topk": {"gradient_compression": "topk:0.01"},
}
CONTENDERS = (*SETTINGS, "allreduce")


class Exchange:
    """Sum ``gradient`` over the ranks with mpizero, as the gradient of a black-box model."""

    def __init__(self, gradient: Any, name: str) -> None:
        self.config = mz.ShardingConfig(comm=WORLD, micro_batch=1, **SETTINGS[name])
        _gradient = gradient  # the underscore says that it may differ between ranks
        model = mz.FunctionModel({"w": np.zeros_like(gradient)}, lambda parameters, batch: (0.0, {"w": _gradient}, 1.0))
        self.model = mz.DDPModel(model, self.config)
        self.totals = self.model._engine.local_gradients(np.full((1, 1), float(WORLD.rank)), np.zeros(1))

    def __call__(self) -> None:
        """Average the gradients of all ranks in place.

        Afterwards all ranks have the same gradient, so further calls send as many bytes and change no value.
        """
        self.model._engine.reduce_local(self.totals)

    def close(self) -> None:
        """Free the model's windows and communicators."""
        self.model.close()
        self.config.close()


class Allreduce:
    """Sum a gradient of each rank by ``MPI_Allreduce``, in place."""

    def __init__(self, gradient: Any) -> None:
        self.gradient = np.ones_like(gradient)

    def __call__(self) -> None:
        """Sum."""
        WORLD.Allreduce(MPI.IN_PLACE, [self.gradient, MPI.FLOAT], MPI.SUM)

    def close(self) -> None:
        """Do nothing."""


def timed(run: Callable[[], None], node: MPI.Comm) -> tuple[float, int]:
    """Call ``run`` once on all ranks; return the slowest rank's seconds, and the bytes that all hosts sent.

    ``node`` is the communicator of this rank's node, on which one rank counts.
    """
    before = bytes_sent()
    WORLD.Barrier()
    started = time.perf_counter()
    run()
    seconds = WORLD.allreduce(time.perf_counter() - started, MPI.MAX)
    WORLD.Barrier()
    return seconds, int(WORLD.allreduce((bytes_sent() - before) * (node.rank == 0)))


def compare(size: int, names: list[str], rounds: int, node: MPI.Comm) -> str:
    """Run the contenders ``names`` with gradients of ``size`` elements; return a table. One round does not count."""
    nodes = int(WORLD.allreduce(int(node.rank == 0)))
    gradient = np.random.default_rng(WORLD.rank).standard_normal(size, np.float32)
    runs: dict[str, Any] = {
        name: Exchange(gradient, name) if name in SETTINGS else Allreduce(gradient) for name in names
    }
    found = alternate(rounds, names, lambda name: timed(runs[name], node), warm_up=1, quiet=True)
    for run in runs.values():
        run.close()
    seconds = {name: [s for s, _ in pairs] for name, pairs in found.items()}
    rows = []
    for name, pairs in found.items():
        sent = statistics.median(b for _, b in pairs) / nodes / 1e6
        ratio = Measurement.of_ratios(seconds[name], seconds[names[0]])
        rows.append((name, Measurement.of(seconds[name]).text(3), f"{sent:.2f}", ratio))
    title = f"{size:,} float32 parameters ({4 * size / 1e6:.0f} MB), {WORLD.size} ranks on {nodes} nodes\n"
    return title + aligned(("", "seconds", "MB a host", f"time over {names[0]}"), rows)


def main() -> None:
    """Measure, and print a table."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--parameters", type=float, default=20e6, help="of the gradient (default: %(default).0f)")
    options.add_argument("--contenders", default=",".join(CONTENDERS), help="(default: %(default)s)")
    args = options.parse_args()
    names = chosen("--contenders", args.contenders, CONTENDERS)
    node = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    if node.size == WORLD.size:
        sys.exit("all ranks are on one node: start this with scripts/two_hosts.sh -- python " + sys.argv[0])
    table = compare(int(args.parameters), names, args.rounds, node)
    if WORLD.rank == 0:
        print(described(), table, sep="\n\n", flush=True)
    node.Free()


if __name__ == "__main__":
    main()
