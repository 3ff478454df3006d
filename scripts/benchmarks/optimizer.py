"""Compare mpizero's gradient sum and AdamW update with MPI's collectives and PyTorch.

In each of two comparisons several implementations run alternately. Ratios are computed from times of the same round.
The tables show medians over rounds, and in parentheses the smallest and largest value.

1. Two ranks have computed one gradient each. Timed is what follows until every rank can read the new parameters.
   ``mpizero`` is the library's fused pass over its shared window. The others use ``Reduce_scatter`` and ``Allgather``,
   or ``Allreduce``, and update with the library's AdamW kernel or with NumPy.
2. One process runs the AdamW kernel, another PyTorch's fused AdamW.

How near both are to the speed of memory, ``mpizero bench machine`` tells. ``--peers-python`` names an interpreter that
has PyTorch (see ``scripts/benchmarks/compare.py``); without PyTorch the second comparison leaves it out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

import numpy as np
from harness.options import parser, positive
from harness.tables import aligned
from harness.turns import Team, alternate, has_module, serve, team_of, team_of_processes, tell, timed

RANKS = 2
OURS, KERNEL, TORCH = "mpizero", "AdamW kernel", "PyTorch fused"
COLLECTIVES = ("reduce-scatter", "allreduce", "allreduce, NumPy")


class Exchanges:
    """Run one rank of the first comparison: sum one gradient of each rank, and update the parameters on all ranks.

    ``cases`` has the compared implementations by name; NumPy's is the library's formula in place.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from mpi4py import MPI

        import mpizero as mz

        self.mpi, self.world, size = MPI, MPI.COMM_WORLD, args.parameters
        self.rank = self.world.rank
        ones = np.ones(size, np.float32)
        plain = mz.FunctionModel({"w": np.ones(size, np.float32)}, lambda parameters, batch: (0.0, {"w": ones}, 1.0))
        config = mz.ShardingConfig(comm=self.world, micro_batch=1)
        self.optimizer = mz.AdamW(lr=1e-4)
        self.model = mz.distribute(plain, self.optimizer, strategy="ddp", config=config)
        self.model.train(np.zeros((1, 1)), np.zeros(1))  # makes windows and state, and leaves gradients in them
        half = size // RANKS
        self.counts = [half, size - half]
        self.mine = slice(0, half) if self.rank == 0 else slice(half, size)
        self.gradient, self.weights = ones, np.ones(size, np.float32)
        self.part = np.empty(self.counts[self.rank], np.float32)
        self.moments = {slot: np.zeros(size, np.float32) for slot in self.optimizer.slots}
        self.work = np.empty(size, np.float32), np.empty(size, np.float32)
        self.hyper = self.optimizer.hyper(1, 1, np.dtype(np.float32))
        self.cases: dict[str, Callable[[], None]] = {
            OURS: self.fused(),
            "reduce-scatter": lambda: self.reduce_scatter(self.kernel),
            "allreduce": lambda: self.allreduce(self.kernel),
            "allreduce, NumPy": lambda: self.allreduce(self.numpy),
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

    def turn(self, case: str, warmup: int, steps: int) -> float:
        """Run ``case`` ``warmup`` times, then time ``steps`` runs between two barriers; return the seconds of one."""
        return timed(self.cases[case], self.world.Barrier, warmup, steps) / steps


def kernel_alone(size: int) -> Callable[[], None]:
    """Return a function that updates parameters with the library's AdamW kernel."""
    import mpizero as mz

    optimizer = mz.AdamW(lr=1e-4)
    w, m, v = (np.ones(size, np.float32) for _ in range(3))
    g = np.full(size, 1e-3, np.float32)
    state, hyper = dict(zip(optimizer.slots, (m, v), strict=True)), optimizer.hyper(1, 1, w.dtype)
    return lambda: optimizer.apply(w, g, state, hyper)


def torch_alone(size: int) -> Callable[[], None]:
    """Return a function that updates parameters with PyTorch's fused AdamW."""
    import torch

    torch.set_num_threads(1)
    weights = torch.nn.Parameter(torch.ones(size))
    weights.grad = torch.full((size,), 1e-3)
    return torch.optim.AdamW([weights], lr=1e-4, fused=True).step


def worker(args: argparse.Namespace) -> None:
    """Run as one process of the contenders ``args.be``, until the benchmark closes the connection."""
    if args.be == "sum":
        one = Exchanges(args)
        serve(args.socket, one.rank, {"turn": one.turn})
        return
    step = (kernel_alone if args.be == KERNEL else torch_alone)(args.parameters)
    turn: dict[str, Callable[..., Any]] = {
        "turn": lambda case, warmup, steps: timed(step, lambda: None, warmup, steps) / steps
    }
    serve(args.socket, 0, turn)


def compare(args: argparse.Namespace, title: str, names: list[str]) -> None:
    """Let implementations take turns, and print their table, with ratios to the first."""
    from mpizero._util.numbers import Measurement

    words = ["--parameters", str(args.parameters), "--be"]
    teams: dict[str, Team] = {}
    with ExitStack() as stack:
        if names[0] == OURS:
            teams = dict.fromkeys(names, stack.enter_context(team_of(__file__, args.mpiexec, RANKS, *words, "sum")))
        else:
            pythons = {KERNEL: sys.executable, TORCH: args.peers_python}
            for name in names:
                team = team_of_processes(name, 1, pythons[name], [__file__, *words, name], {})
                teams[name] = stack.enter_context(team)
        seconds = alternate(
            args.rounds, names, lambda name: max(teams[name].ask("turn", case=name, warmup=2, steps=args.repeat))
        )
    rows = [
        (name, f"{1e3 * Measurement.of(values).median:.2f}", Measurement.of_ratios(values, seconds[names[0]]))
        for name, values in seconds.items()
    ]
    print(f"\n{title}\n" + aligned(("", "ms", f"time over {names[0]}"), rows))


def main() -> None:
    """Run both comparisons, and print their tables."""
    options = parser(__doc__, rounds=9, mpiexec=True)
    options.add_argument("--parameters", type=float, default=20e6, help="(default: %(default).0f)")
    options.add_argument("--repeat", type=positive, default=10, help="updates of one turn (default: %(default)s)")
    options.add_argument("--peers-python", default=sys.executable, help="interpreter that has PyTorch")
    args = options.parse_args()
    args.parameters = int(args.parameters)
    if args.be:
        worker(args)
        return
    size = f"{args.parameters:,} float32 parameters"
    compare(args, f"gradient sum, AdamW, parameters ready: {size}, {RANKS} ranks", [OURS, *COLLECTIVES])
    names = [KERNEL, *[TORCH] * has_module(args.peers_python, "torch")]
    if TORCH not in names:
        tell(f"{args.peers_python} has no PyTorch: name another with --peers-python")
    compare(args, f"AdamW alone: {size}, one process", names)


if __name__ == "__main__":
    main()
