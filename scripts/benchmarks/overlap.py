"""Time training steps with messages hidden behind computing, beside the same steps that wait for every message.

Start it with ``scripts/two_hosts.sh -- python scripts/benchmarks/overlap.py``, by the mpiexec of a cluster, or on one
node with ``--memory private``. Every strategy trains a GPT (dim 256, 4 layers) in two ways, in turns:

* ``hidden``: what the library does,
* ``waiting``: the same messages, each waited for as soon as it has begun.

Both run the same program with the same bits. Times are those of the slowest rank; ratios are taken between neighbouring
steps. *Messages* is the time that a rank spends in them, the mean over ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.comm import exact
from mpizero.parallel import publication, storage
from mpizero.parallel.watching import watching

WORLD = MPI.COMM_WORLD
#: Phases of a step that messages of parameters and gradients belong to.
MESSAGES = ("publication", "reduction")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="zero1,zero2,zero3", help="(default: %(default)s)")
    parser.add_argument("--memory", default="shared", choices=("shared", "private"), help="(default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="of 128 tokens, a rank and step (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    return parser.parse_args()


@contextmanager
def waiting() -> Iterator[None]:
    """Wait for every gather as soon as it has begun."""
    begin = exact.begin_gather

    def begun(*values: Any, **named: Any) -> exact.Gathering:
        gathering = begin(*values, **named)
        gathering.wait()
        return gathering

    storage.begin_gather = publication.begin_gather = begun
    try:
        yield
    finally:
        storage.begin_gather = publication.begin_gather = begin


class Training:
    """One strategy and its batch."""

    def __init__(self, strategy: str, args: argparse.Namespace) -> None:
        self.config = mz.ShardingConfig(comm=WORLD, micro_batch=args.samples, share_node_memory=args.memory == "shared")
        model = mz.nn.GPT(dim=args.dim, layers=args.layers, heads=args.dim // 64, sequence=128, vocabulary=256)
        self.model, _ = mz.distribute(model, mz.AdamW(lr=3e-4), strategy=strategy, config=self.config)
        tokens = np.random.default_rng(WORLD.rank).integers(0, 256, (args.samples, 129))
        self.x, self.y = tokens[:, :-1], tokens[:, 1:]

    def step(self) -> tuple[float, float]:
        """Train once; return the slowest rank's seconds, and the mean of those in messages."""
        WORLD.Barrier()
        with watching(self.model.engine) as timeline:
            timeline.take()
            started = time.perf_counter()
            self.model.train(self.x, self.y)
            seconds = time.perf_counter() - started
            spans = timeline.take()
        inside = sum(s.stop - s.start for s in spans if s.phase in MESSAGES)
        return WORLD.allreduce(seconds, MPI.MAX), WORLD.allreduce(inside) / WORLD.size

    def close(self) -> None:
        """Free the windows."""
        self.model.close()
        self.config.close()


def measure(strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train in both ways in turns, after two steps that nobody looks at."""
    training = Training(strategy, args)
    found: dict[str, list[tuple[float, float]]] = {"hidden": [], "waiting": []}
    for number in range(-1, args.rounds):
        for way in ("hidden", "waiting") if number % 2 else ("waiting", "hidden"):
            if way == "hidden":
                measured = training.step()
            else:
                with waiting():
                    measured = training.step()
            if number >= 0:
                found[way].append(measured)
    training.close()
    return {
        "strategy": strategy,
        "seconds": {way: [s for s, _ in pairs] for way, pairs in found.items()},
        "messages": {way: [m for _, m in pairs] for way, pairs in found.items()},
    }


def row(result: dict[str, Any]) -> str:
    """Return one strategy's figures for people."""
    seconds, messages = result["seconds"], result["messages"]
    ratios = sorted(w / h for w, h in zip(seconds["waiting"], seconds["hidden"], strict=True))
    figures = [1e3 * statistics.median(part[way]) for part in (seconds, messages) for way in ("waiting", "hidden")]
    return (
        f"{result['strategy']:9s}" + "".join(f"{figure:11.1f}" for figure in figures)
        + f"   {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )  # fmt: skip


def main() -> None:
    """Measure every strategy."""
    args = arguments()
    if WORLD.size == 1:
        sys.exit("one rank sends no messages: start this with mpiexec or scripts/two_hosts.sh")
    results = [measure(strategy, args) for strategy in args.strategies.split(",")]
    if WORLD.rank:
        return
    if args.json:
        print(json.dumps(results))
        return
    print(
        f"{WORLD.size} ranks, {args.memory} memory, GPT {args.dim} x {args.layers}, {args.samples} x 128 tokens a rank"
    )
    print(f"{'':9s}{'step, ms':>22s}{'in messages, ms':>22s}   step waiting / hidden")
    print(f"{'':9s}" + f"{'waiting':>11s}{'hidden':>11s}" * 2)
    print(*map(row, results), sep="\n", flush=True)


if __name__ == "__main__":
    main()
