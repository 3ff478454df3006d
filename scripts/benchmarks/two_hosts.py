"""Time summing a gradient over two hosts by mpizero's hierarchical exchange, its flat exchange, and MPI_Allreduce.

Start it with ``scripts/two_hosts.sh -- python scripts/benchmarks/two_hosts.py``, or by the mpiexec of a cluster. Each
of these contenders sums one float32 gradient of each rank over all ranks:

* ``hierarchical``: mpizero; the ranks of a node sum in shared memory, and peers exchange slices;
* ``flat``: mpizero with private memory; all ranks exchange slices with all others;
* ``hierarchical-half``, ``flat-half``: only the first half of these exchanges (a reduce-scatter), after which the owner
  of each slice has its sum;
* ``bf16``, ``int8``, ``topk``: the hierarchical exchange with messages of 16 bits, of 8 bits, or of only the largest
  hundredth of the values (``gradient_compression``);
* ``allreduce``: ``MPI_Allreduce`` of the MPI library, in place;
* ``link``: no sum; every rank exchanges with its peer as many bytes as in the hierarchical exchange.

Each round runs each contender once, and begins with another one. Times are those of the slowest rank. Ratios are
computed from times of the same round; printed are medians over the rounds. Bytes are those that one host sends, counted
by its network interfaces, with headers.
"""

from __future__ import annotations

import argparse
import json
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
from harness.turns import alternate
from mpi4py import MPI

import mpizero as mz
from mpizero._util.numbers import Measurement
from mpizero.train.machine import described

WORLD = MPI.COMM_WORLD
INTERFACES = Path("/sys/class/net")
COMPRESSIONS = {"bf16": "bf16", "int8": "int8", "topk": "topk:0.01"}
CONTENDERS = ("link", "hierarchical", "flat", "allreduce", "hierarchical-half", "flat-half", *COMPRESSIONS)


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=7, json=True)
    options.add_argument("--parameters", default="4e6,20e6", help="sizes of the gradient (default: %(default)s)")
    options.add_argument("--contenders", default=",".join(CONTENDERS), help="(default: %(default)s)")
    return options.parse_args()


class Exchange:
    """Run the contender ``name`` of mpizero: sum ``gradient`` over the ranks as the gradient of a black-box model."""

    def __init__(self, gradient: Any, name: str) -> None:
        kind, _, half = name.partition("-")
        compression = COMPRESSIONS.get(kind)
        self.config = mz.ShardingConfig(
            comm=WORLD, micro_batch=1, share_node_memory=kind != "flat", gradient_compression=compression
        )
        model = mz.FunctionModel({"w": np.zeros_like(gradient)}, lambda parameters, batch: (0.0, {"w": gradient}, 1.0))
        self.model = (mz.ZeRO1Model if half else mz.DDPModel)(model, self.config)
        self.totals = self.model._engine.local_gradients(np.zeros((1, 1)), np.zeros(1))

    def __call__(self) -> None:
        """Average the gradients of all ranks in place.

        Afterwards all ranks have the same gradient, so further calls send as many bytes and change no value.
        """
        self.model._engine.reduce_local(self.totals)

    @property
    def sent(self) -> int:
        """The number of bytes that this rank has sent so far, as mpizero counts them."""
        return self.model._engine.grid.bytes_sent

    @property
    def peers(self) -> Any:
        """The communicator of this rank's peers."""
        return self.model._engine.grid.inter_node

    def close(self) -> None:
        """Free the model's windows and communicators."""
        self.model.close()
        self.config.close()


def allreduce(size: int) -> Callable[[], None]:
    """Return a function that sums one gradient of ``size`` elements of each rank by ``MPI_Allreduce``, in place."""
    gradient = np.ones(size, np.float32)

    def run() -> None:
        gradient[:1] = 1.0
        WORLD.Allreduce(MPI.IN_PLACE, [gradient, MPI.FLOAT], MPI.SUM)

    return run


def link(size: int, node_size: int, peers: Any) -> Callable[[], None]:
    """Return a function that sends as many bytes as the hierarchical exchange of ``size`` elements, without sums.

    ``node_size`` is the number of ranks of a node, ``peers`` the communicator of this rank's peers.
    """
    part = size // node_size // peers.size
    send = np.ones(part * peers.size, np.float32)
    recv = np.empty_like(send)
    counts = [part] * peers.size

    def run() -> None:
        for _ in range(2):
            peers.alltoallv(send, counts, recv, counts, "link")

    return run


def counted(node: MPI.Comm) -> int:
    """Return the bytes that all hosts together have sent so far, as their network interfaces count them.

    ``node`` is the communicator of this rank's node. Collective over all ranks.
    """
    mine = 0
    if node.rank == 0:
        files = (path / "statistics" / "tx_bytes" for path in INTERFACES.iterdir() if path.name != "lo")
        mine = sum(int(file.read_text()) for file in files if file.exists())
    return int(WORLD.allreduce(mine))


def timed(run: Callable[[], None], node: MPI.Comm) -> tuple[float, int]:
    """Call ``run`` once on all ranks; return the slowest rank's seconds, and the bytes that all hosts sent."""
    before = counted(node)
    WORLD.Barrier()
    started = time.perf_counter()
    run()
    seconds = WORLD.allreduce(time.perf_counter() - started, MPI.MAX)
    WORLD.Barrier()
    return seconds, counted(node) - before


def measure(size: int, names: list[str], rounds: int, node: MPI.Comm) -> dict[str, Any]:
    """Run the contenders ``names`` with gradients of ``size`` elements, and return a JSON document.

    Its "rows" have for each contender "seconds" (in each round) and "bytes_a_host" (median). One round before them does
    not count.
    """
    nodes = int(WORLD.allreduce(int(node.rank == 0)))
    gradient = np.random.default_rng(WORLD.rank).standard_normal(size, np.float32)
    exchanges = {
        name: Exchange(gradient, name)
        for name in dict.fromkeys(["hierarchical", *names])
        if name not in ("link", "allreduce")
    }
    ours = exchanges["hierarchical"]
    runs = {"link": link(size, node.size, ours.peers), "allreduce": allreduce(size), **exchanges}
    sent = ours.sent
    ours()
    planned = int(WORLD.allreduce(ours.sent - sent)) / nodes
    found = alternate(rounds, names, lambda name: timed(runs[name], node), warm_up=1, quiet=True)
    for exchange in exchanges.values():
        exchange.close()
    rows = {
        name: {"seconds": [s for s, _ in pairs], "bytes_a_host": statistics.median(b for _, b in pairs) / nodes}
        for name, pairs in found.items()
    }
    return {"parameters": size, "nodes": nodes, "ranks": WORLD.size, "sent_by_library": planned, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Format the result of :func:`measure` as a table."""
    base = result["rows"].get("hierarchical")
    size = 4 * result["parameters"]
    title = (
        f"\n{result['parameters']:,} float32 parameters ({size / 1e6:.0f} MB), {result['ranks']} ranks on "
        f"{result['nodes']} nodes; the library counts {result['sent_by_library'] / 1e6:.2f} MB a host\n"
    )
    rows = []
    for name, row in result["rows"].items():
        told = "" if base is None else str(Measurement.of_ratios(row["seconds"], base["seconds"]))
        rows.append((name, Measurement.of(row["seconds"]).text(3), f"{row['bytes_a_host'] / 1e6:.2f}", told))
    return title + aligned(("", "seconds", "MB a host", "time over hierarchical"), rows)


def main() -> None:
    """Measure gradients of every size in ``--parameters``, and print a table for each, or one JSON document."""
    args = arguments()
    names = chosen("--contenders", args.contenders, CONTENDERS)
    node = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    if node.size == WORLD.size:
        sys.exit("all ranks are on one node: start this with scripts/two_hosts.sh -- python " + sys.argv[0])
    results = [measure(int(float(size)), names, args.rounds, node) for size in args.parameters.split(",")]
    if WORLD.rank == 0:
        if args.json:
            print(json.dumps({"machine": described(), "results": results}))
        else:
            print(described(), *map(table, results), sep="\n", flush=True)
    node.Free()


if __name__ == "__main__":
    main()
