"""Time training steps whose messages overlap with computation, beside the same steps that wait for every message.

Start it with ``scripts/two_hosts.sh -- python scripts/benchmarks/overlap.py``, by the mpiexec of a cluster, or on one
node with ``--memory private``. Every strategy trains a GPT (dim 256, 4 layers) in three ways alternately:

* ``hidden``: as the library does it, with all overlap;
* ``sums``: no gradients are sent while blocks compute. Under ZeRO-2 and 3 a rank waits for each unit's exchange as soon
  as it has begun. Under DDP whole gradients are exchanged after the backward pass (ZeRO-1 always does so);
* ``waiting``: a rank waits for every message of gradients and parameters as soon as it has begun.

All three compute the same bits. Times are those of the slowest rank. A round is one step in each way, and ratios are
computed from times of the same round. *In messages* is the time that a rank spends in messages, as a mean over ranks.

With ``--buckets`` every strategy trains with some sizes of buckets (``bucket_mb``) alternately instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

import numpy as np
from harness.options import parser
from harness.tables import aligned
from harness.turns import alternate
from mpi4py import MPI

import mpizero as mz
from mpizero._util.numbers import Measurement
from mpizero.comm import reduce
from mpizero.sharding import grad_reduce, params
from mpizero.sharding.diagnostics import traced

WORLD = MPI.COMM_WORLD
#: Sizes of buckets in MiB; None is the default.
SIZES = (None, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
#: Phases of a step that messages of parameters and gradients belong to.
MESSAGES = ("publication", "reduction")


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=11, json=True)
    options.add_argument("--strategies", default="ddp,zero1,zero2,zero3", help="(default: %(default)s)")
    options.add_argument("--memory", default="shared", choices=("shared", "private"), help="(default: %(default)s)")
    options.add_argument("--samples", type=int, default=8, help="of 128 tokens, a rank and step (default: %(default)s)")
    options.add_argument("--dim", type=int, default=256)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--buckets", action="store_true", help="time sizes of buckets beside the default")
    return options.parse_args()


@contextmanager
def waiting_for_sums() -> Iterator[None]:
    """Inside the ``with`` block, exchange gradients without overlap with computation."""
    begin, behind = reduce.ExactExchange.begin_segment, grad_reduce.overlaps_reduction

    def begun(self: reduce.ExactExchange, segment: Any, **_: Any) -> Any:
        return begin(self, segment, wait=True)

    reduce.ExactExchange.begin_segment = begun  # type: ignore[method-assign]
    grad_reduce.overlaps_reduction = lambda *_: False
    try:
        yield
    finally:
        grad_reduce.overlaps_reduction = behind
        reduce.ExactExchange.begin_segment = begin  # type: ignore[method-assign]


@contextmanager
def waiting() -> Iterator[None]:
    """Inside the ``with`` block, wait for every message of gradients and parameters as soon as it has begun."""
    begin = reduce.begin_gather

    def begun(*values: Any, **named: Any) -> reduce.Gathering:
        gathering = begin(*values, **named)
        gathering.wait()
        return gathering

    params.begin_gather = params.begin_gather = begun
    try:
        with waiting_for_sums():
            yield
    finally:
        params.begin_gather = params.begin_gather = begin


#: The ways to train, in the order of the table.
WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "waiting": waiting,
    "sums": waiting_for_sums,
    "hidden": nullcontext,
}


class Training:
    """Train a GPT with one strategy, always on the same batch; ``bucket_mb`` is as in ``ShardingConfig``."""

    def __init__(self, strategy: str, args: argparse.Namespace, bucket_mb: float | None = None) -> None:
        shared = args.memory == "shared"
        self.config = mz.ShardingConfig(
            comm=WORLD, micro_batch=args.samples, share_node_memory=shared, bucket_mb=bucket_mb
        )
        model = mz.nn.GPT(dim=args.dim, layers=args.layers, heads=args.dim // 64, sequence=128, vocabulary=256)
        self.model = mz.distribute(model, mz.AdamW(lr=3e-4), strategy=strategy, config=self.config)
        tokens = np.random.default_rng(WORLD.rank).integers(0, 256, (args.samples, 129))
        self.x, self.y = tokens[:, :-1], tokens[:, 1:]

    def step(self) -> tuple[float, float]:
        """Train one step; return the seconds of the slowest rank, and the seconds in messages as a mean over ranks.

        Collective over all ranks.
        """
        WORLD.Barrier()
        with traced(self.model._engine) as timeline:
            timeline.take()
            started = time.perf_counter()
            self.model.train(self.x, self.y)
            seconds = time.perf_counter() - started
            spans = timeline.take()
        inside = sum(s.stop - s.start for s in spans if s.phase in MESSAGES)
        return WORLD.allreduce(seconds, MPI.MAX), WORLD.allreduce(inside) / WORLD.size

    def close(self) -> None:
        """Free the model and its shared windows."""
        self.model.close()
        self.config.close()


def measure(strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train in all three ways alternately, and return a JSON document.

    Its keys are "strategy", "seconds" (for each way, of the slowest rank in each round) and "messages" (for each way,
    seconds in messages). Two rounds before them do not count.
    """
    training = Training(strategy, args)

    def one(way: str) -> tuple[float, float]:
        with WAYS[way]():
            return training.step()

    found = alternate(args.rounds, list(WAYS), one, warm_up=2, quiet=True)
    training.close()
    return {
        "strategy": strategy,
        "seconds": {way: [s for s, _ in pairs] for way, pairs in found.items()},
        "messages": {way: [m for _, m in pairs] for way, pairs in found.items()},
    }


def sweep(strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train with every size of buckets alternately; return seconds of the slowest rank in each round, by size."""
    trainings = {size: Training(strategy, args, size) for size in SIZES}
    found = alternate(args.rounds, list(SIZES), lambda size: trainings[size].step()[0], warm_up=1, quiet=True)
    for training in trainings.values():
        training.close()
    return {"strategy": strategy, "seconds": found}


def swept(result: dict[str, Any]) -> str:
    """Format the result of :func:`sweep` as one line."""
    figures = []
    for size, times in result["seconds"].items():
        ratio = Measurement.of_ratios(times, result["seconds"][None]).median
        figures.append(f"{'default' if size is None else size}: {1e3 * statistics.median(times):.1f} ms, {ratio:.2f}")
    return f"{result['strategy']:6s} " + ";  ".join(figures)


def row(result: dict[str, Any]) -> tuple[str, ...]:
    """Return the result of :func:`measure` as cells of the table."""
    seconds, messages = result["seconds"], result["messages"]
    figures = [f"{1e3 * statistics.median(part[way]):.1f}" for part in (seconds, messages) for way in WAYS]
    ratios = [str(Measurement.of_ratios(seconds[way], seconds["hidden"])) for way in ("waiting", "sums")]
    return (result["strategy"], *figures, *ratios)


def main() -> None:
    """Measure every chosen strategy, and print the results on rank 0."""
    args = arguments()
    if WORLD.size == 1:
        sys.exit("one rank sends no messages: start this with mpiexec or scripts/two_hosts.sh")
    results = [(sweep if args.buckets else measure)(strategy, args) for strategy in args.strategies.split(",")]
    if WORLD.rank:
        return
    if args.json:
        print(json.dumps(results))
        return
    print(
        f"{WORLD.size} ranks, {args.memory} memory, GPT {args.dim} x {args.layers}, {args.samples} x 128 tokens a rank"
    )
    if args.buckets:
        print("MiB of a bucket: the median step, and its time over that with the default size inside a round")
        print(*map(swept, results), sep="\n", flush=True)
        return
    print("ms of a step in the three ways, ms of it in messages, ratios of steps")
    print(aligned(("", *WAYS, *WAYS, "waiting/hidden", "sums/hidden"), map(row, results)), flush=True)


if __name__ == "__main__":
    main()
