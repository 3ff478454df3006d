"""Compare mpizero's gradient sum and AdamW update with MPI's collectives, plain loops and PyTorch.

In each of two comparisons several implementations run alternately. Ratios are computed from times of the same round.
The tables show medians over rounds, and in parentheses the smallest and largest value.

1. Two ranks have computed one gradient each. Timed is what follows until every rank can read the new parameters.
   ``mpizero`` is the library's fused pass over its shared window. The others use ``Reduce_scatter`` and ``Allgather``,
   or ``Allreduce``, and update with the library's AdamW kernel or with NumPy. ``stream`` is a plain Numba loop with the
   same reads and writes (5 and 3 for each element) over the same memory. ``stream, private`` is the same loop over
   private arrays of each rank.
2. One process runs the AdamW kernel, a plain Numba loop with the same reads and writes (4 and 3 for each element), and
   PyTorch's fused AdamW.
``--peers-python`` names an interpreter that has PyTorch (see ``scripts/benchmarks/compare.py``); without PyTorch the
second comparison leaves it out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

import numpy as np
from harness.jobs import Mpi
from harness.options import chosen, parser
from harness.tables import aligned
from harness.turns import Team, alternate, has_module, serve, tell, timed

from mpizero._util.numbers import Measurement

RANKS = 2
OURS = "mpizero"
COLLECTIVES = ("reduce-scatter", "allreduce", "reduce-scatter, NumPy", "allreduce, NumPy")
STREAMS = ("stream", "stream, private")
KERNEL, KERNEL_STREAM, TORCH = "AdamW kernel", "stream", "PyTorch fused"
#: Floats that are read and written for one element, for the cases that are limited by memory.
TOUCHED = {OURS: 8, "stream": 8, "stream, private": 8}
TOUCHED_ALONE = {KERNEL: 7, KERNEL_STREAM: 7, TORCH: 7}


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=9, mpiexec=True, json=True)
    options.add_argument("--parameters", type=float, default=20e6, help="(default: %(default).0f)")
    options.add_argument("--strategy", choices=("ddp", "zero1"), default="ddp")
    options.add_argument("--repeat", type=int, default=10, help="updates of one turn (default: %(default)s)")
    options.add_argument("--parts", default="sum,kernel", help="(default: %(default)s)")
    options.add_argument("--peers-python", default=sys.executable, help="interpreter that has PyTorch")
    args = options.parse_args()
    args.parameters = int(args.parameters)
    args.parts = chosen("--parts", args.parts, ("sum", "kernel"))
    return args


class Exchanges:
    """Run one rank of the first comparison: sum one gradient of each rank, and update the parameters on all ranks.

    ``cases`` has the compared implementations by name.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from mpi4py import MPI

        import mpizero as mz
        from mpizero.kernels import memory

        self.mpi, self.world, size = MPI, MPI.COMM_WORLD, args.parameters
        self.rank = self.world.rank
        ones = np.ones(size, np.float32)
        plain = mz.FunctionModel({"w": np.ones(size, np.float32)}, lambda parameters, batch: (0.0, {"w": ones}, 1.0))
        config = mz.ShardingConfig(comm=self.world, micro_batch=1)
        self.optimizer = mz.AdamW(lr=1e-4)
        self.model = mz.distribute(plain, self.optimizer, strategy=args.strategy, config=config)
        self.model.train(np.zeros((1, 1)), np.zeros(1))  # makes windows and state, and leaves gradients in them
        half = size // RANKS
        self.counts = [half, size - half]
        self.mine = slice(0, half) if self.rank == 0 else slice(half, size)
        self.gradient, self.weights = ones, np.ones(size, np.float32)
        self.part = np.empty(self.counts[self.rank], np.float32)
        self.moments = {slot: np.zeros(size, np.float32) for slot in self.optimizer.slots}
        self.work = np.empty(size, np.float32), np.empty(size, np.float32)
        self.hyper = self.optimizer.hyper(1, 1, np.dtype(np.float32))
        self.stream = memory.add_and_update
        self.cases: dict[str, Callable[[], None]] = {
            OURS: self.fused(),
            "reduce-scatter": lambda: self.reduce_scatter(self.kernel),
            "allreduce": lambda: self.allreduce(self.kernel),
            "reduce-scatter, NumPy": lambda: self.reduce_scatter(self.numpy),
            "allreduce, NumPy": lambda: self.allreduce(self.numpy),
            "stream": self.same_memory(),
            "stream, private": self.own_memory(),
        }

    def fused(self) -> Callable[[], None]:
        """Return a function that does what the engine does after a backward pass: sum in the window and update."""
        from mpizero.sharding.batch import Divisors

        engine = self.model._engine
        divisors = Divisors(*[np.array([RANKS], np.float32)] * 2)

        def run() -> None:
            rows, program, out = engine.all_reduce.operands()
            engine.updater.update_fused(rows, program, divisors, out, 1)
            engine.store.all_gather(exchange=engine.placement.shard_optimizer)

        return run

    def reduce_scatter(self, update: Callable[[slice, np.ndarray], None]) -> None:
        """Sum this rank's half of the gradients by ``Reduce_scatter``, update that half of the parameters, gather both.

        ``update(part, gradient)`` updates the slice ``part`` of the parameters.
        """
        self.world.Reduce_scatter(self.gradient, self.part, self.counts)
        update(self.mine, self.part)
        self.world.Allgatherv(self.mpi.IN_PLACE, [self.weights, self.counts])

    def allreduce(self, update: Callable[[slice, np.ndarray], None]) -> None:
        """Sum the whole gradients on every rank by ``Allreduce``, and update all parameters on every rank."""
        self.world.Allreduce(self.gradient, self.work[0])
        update(slice(0, self.weights.size), self.work[0])

    def kernel(self, part: slice, gradient: np.ndarray) -> None:
        """Update the slice ``part`` of the parameters with the library's AdamW kernel."""
        state = {slot: values[part] for slot, values in self.moments.items()}
        self.optimizer.apply(self.weights[part], gradient, state, self.hyper)

    def numpy(self, part: slice, gradient: np.ndarray) -> None:
        """Update the slice ``part`` of the parameters with AdamW in NumPy, using preallocated arrays."""
        shrink, beta1, rest1, beta2, rest2, rate, correction, eps = self.hyper
        w, (m, v) = self.weights[part], (values[part] for values in self.moments.values())
        step = self.work[1][: gradient.size]
        np.multiply(m, beta1, out=m)
        np.multiply(gradient, rest1, out=step)
        np.add(m, step, out=m)
        np.multiply(gradient, gradient, out=gradient)
        np.multiply(gradient, rest2, out=gradient)
        np.multiply(v, beta2, out=v)
        np.add(v, gradient, out=v)
        np.sqrt(v, out=step)
        np.multiply(step, correction, out=step)
        np.add(step, eps, out=step)
        np.divide(m, step, out=step)
        np.multiply(step, rate, out=step)
        np.multiply(w, shrink, out=w)
        np.subtract(w, step, out=w)

    def same_memory(self) -> Callable[[], None]:
        """Return a function that runs the plain Numba loop over the same memory as the library's fused pass."""
        engine = self.model._engine
        (run,) = engine.updater.plain_runs
        w, state = engine.updater._run_arrays(run.store, run.state, run.size)
        m, v = state.values()
        a, b = (row[run.gradient : run.gradient + run.size] for row in engine.all_reduce.window)
        return lambda: self.stream(a, b, w, m, v)

    def own_memory(self) -> Callable[[], None]:
        """Return a function that runs the plain Numba loop over private arrays of this rank."""
        w, m, v, a, b = (np.zeros(self.part.size, np.float32) for _ in range(5))
        return lambda: self.stream(a, b, w, m, v)

    def turn(self, case: str, warmup: int, steps: int) -> float:
        """Run ``case`` ``warmup`` times, then time ``steps`` runs between two barriers; return the seconds of one."""
        return timed(self.cases[case], self.world.Barrier, warmup, steps) / steps


class Alone:
    """Run the second comparison without PyTorch's part: the AdamW kernel and a plain Numba loop, in one process.

    ``cases`` has both by name.
    """

    rank = 0

    def __init__(self, args: argparse.Namespace) -> None:
        import mpizero as mz
        from mpizero.kernels import memory

        optimizer = mz.AdamW(lr=1e-4)
        w, m, v = (np.ones(args.parameters, np.float32) for _ in range(3))
        g = np.full(args.parameters, 1e-3, np.float32)
        state, hyper = dict(zip(optimizer.slots, (m, v), strict=True)), optimizer.hyper(1, 1, w.dtype)
        x, y, z, h = (np.zeros(args.parameters, np.float32) for _ in range(4))
        self.cases: dict[str, Callable[[], None]] = {
            KERNEL: lambda: optimizer.apply(w, g, state, hyper),
            KERNEL_STREAM: lambda: memory.update(h, x, y, z),
        }

    def turn(self, case: str, warmup: int, steps: int) -> float:
        """Run ``case`` ``warmup`` times, then time ``steps`` runs; return the seconds of one."""
        return timed(self.cases[case], lambda: None, warmup, steps) / steps


def worker(args: argparse.Namespace) -> None:
    """Run as one process of the comparison ``args.be``, until the benchmark closes the connection."""
    one: Any
    if args.be == "torch":
        from comparing.peers import FusedAdamW

        one = FusedAdamW(args.parameters)
        serve(args.socket, 0, {"turn": lambda case, warmup, steps: one.turn(warmup, steps)})
        return
    one = {"sum": Exchanges, "kernel": Alone}[args.be](args)
    serve(args.socket, one.rank, {"turn": one.turn})


def team(args: argparse.Namespace, name: str) -> Team:
    """Start the processes of the comparison ``name``: "sum", "kernel", or "torch" for PyTorch's part."""
    words = ["--parameters", str(args.parameters), "--strategy", args.strategy]
    ranks = 1 if name in ("kernel", "torch") else RANKS
    words = [__file__, *words, "--be", name, "--socket"]
    alone = [args.peers_python if name == "torch" else sys.executable, *words]
    launch = alone if ranks == 1 else Mpi(args.mpiexec).command(ranks, words)
    return Team(name, ranks, lambda path: [[*launch, path]])


def measure(args: argparse.Namespace, part: str) -> dict[str, list[float]]:
    """Run the comparison ``part``; return for each implementation the seconds of one update or step in each round."""
    names = {"sum": (OURS, *COLLECTIVES, *STREAMS), "kernel": (KERNEL, KERNEL_STREAM, TORCH)}[part]
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(team(args, part))
        teams = dict.fromkeys(names, own)
        if part == "kernel":
            if not has_module(args.peers_python, "torch"):
                tell(f"{args.peers_python} has no PyTorch: name another with --peers-python")
                del teams[TORCH]
            else:
                teams[TORCH] = stack.enter_context(team(args, "torch"))
        return alternate(
            args.rounds, list(teams), lambda name: max(teams[name].ask("turn", case=name, warmup=2, steps=args.repeat))
        )


def report(part: str, seconds: dict[str, list[float]], parameters: int) -> str:
    """Format the result of :func:`measure` for the comparison ``part`` as a table."""
    base = {"sum": OURS, "kernel": KERNEL}[part]
    per_rank = parameters / (RANKS if part == "sum" else 1)
    touched = {"sum": TOUCHED, "kernel": TOUCHED_ALONE}[part]
    title = {
        "sum": f"gradient sum, AdamW, parameters ready: {parameters:,} float32 parameters, {RANKS} ranks",
        "kernel": f"AdamW alone: {parameters:,} float32 parameters, one process",
    }[part]
    rows = []
    for name, values in seconds.items():
        middle = Measurement.of(values).median
        rate = f"{4e-9 * touched[name] * per_rank / middle:.1f}" if name in touched else ""
        rows.append((name, f"{1e3 * middle:.2f}", rate, Measurement.of_ratios(values, seconds[base])))
    return f"\n{title}\n" + aligned(("", "ms", "GB/s a rank", f"time over {base}"), rows)


def main() -> None:
    """Run the chosen comparisons, and print their tables or one JSON document."""
    args = arguments()
    if args.be:
        worker(args)
        return
    found = {part: measure(args, part) for part in args.parts}
    if args.json:
        print(json.dumps({"parameters": args.parameters, "seconds": found}))
    else:
        print("\n".join(report(part, seconds, args.parameters) for part, seconds in found.items()))


if __name__ == "__main__":
    main()
