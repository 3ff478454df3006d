"""Compare the two loops of L-BFGS, sharded over ranks, with plain loops over memory that read and write as much.

Each of two ranks holds half of all vectors. Timed is the choice of a direction from a full history: for each pair two
dot products and two additions of vectors. ``stream`` reads and writes as many elements in plain Numba loops, each pass
over the same number of arrays, private to the rank. Both run in turns; times are those of the slower rank, and ratios
are of times in the same round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from comparing.ours import timed
from harness import Team, alternate, parser, serve, tell

from mpizero._util.numbers import Measurement

RANKS = 2
OURS, STREAM = "two loops", "stream"


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=9, mpiexec=True, json=True)
    options.add_argument("--parameters", type=float, default=16.8e6, help="(default: %(default).0f)")
    options.add_argument("--history", type=int, default=10, help="(default: %(default)s)")
    options.add_argument("--strategy", choices=("ddp", "zero1", "zero2", "zero3"), default="zero1")
    args = options.parse_args()
    args.parameters = int(args.parameters)
    return args


class Rank:
    """Run one rank; ``cases`` has what is compared by name."""

    def __init__(self, args: argparse.Namespace) -> None:
        from mpi4py import MPI

        import mpizero as mz
        from mpizero.optim.minimizers import DIRECTION, GRADIENT

        self.world = MPI.COMM_WORLD
        plain = mz.FunctionModel({"w": np.ones(args.parameters, np.float32)}, lambda parameters, batch: (0.0, {}, 1.0))
        self.config = mz.ShardingConfig(comm=self.world)
        method = mz.LBFGS(history=args.history)
        self.model = mz.distribute(plain, method, strategy=args.strategy, config=self.config)
        self.updater = self.model.engine.updater
        rng, self.size = np.random.default_rng(self.world.rank), self.updater.size
        for slot, array in self.updater.state.items():
            array[:] = rng.standard_normal(self.size, np.float32)
            if slot.startswith("gradient_difference"):  # of positive curvature
                array[:] = self.updater.state[slot.replace("gradient", "parameter")] * 0.5
        progress = self.updater.method.progress
        progress.numbers = {"rho": [1.0 / self.size] * args.history, "made": [float(args.history)], "gamma": [1.0]}
        space = self.updater.vectors
        self.cases: dict[str, Callable[[], object]] = {
            OURS: lambda: method._choose(space, progress),
            STREAM: self._stream(args.history, self.updater.state, GRADIENT, DIRECTION),
        }

    def _stream(self, history: int, state: dict[str, Any], source: str, target: str) -> Callable[[], object]:
        """Return a function that passes over memory as the two loops do: so many reads of one or two, so many sums."""
        from mpizero.kernels import memory

        names = [slot for slot in state if "difference" in slot]
        bits = {slot: array[: array.size // 2 * 2].view(np.int64) for slot, array in state.items()}

        def passes() -> None:
            memory.copy(state[source], state[target])
            for name in names:  # in either loop a pair's dot product reads one of its vectors, and the direction
                memory.read(bits[name])
                memory.read(bits[target])
                memory.add_two(state[name], state[target], state[target])
            memory.copy(state[target], state[target])

        return passes

    def run(self, case: str) -> float:
        """Return the seconds of one run of a case, from a barrier on."""
        return timed(self.cases[case], self.world.Barrier, 0, 1)


def main() -> None:
    """Run as a rank, or start the ranks and print what they took."""
    args = arguments()
    if args.be:
        rank = Rank(args)
        serve(args.socket, rank.world.rank, {"run": rank.run})
        rank.model.close()
        return
    words = ["--parameters", str(args.parameters), "--history", str(args.history), "--strategy", args.strategy]
    launch = [args.mpiexec, "-n", str(RANKS), sys.executable, __file__, *words]
    with Team("ranks", RANKS, lambda path: [[*launch, "--be", "rank", "--socket", path]]) as team:
        found = alternate(args.rounds, (OURS, STREAM), lambda case: max(team.ask("run", case=case)), warm_up=2)
    ratio, seconds = Measurement.of_ratios(found[OURS], found[STREAM]), Measurement.of(found[OURS])
    passes = args.parameters * 4 * (2 * args.history * 5 + 4)
    tell(f"{passes / 1e9:.1f} GB are read and written")
    if args.json:
        print(json.dumps({"seconds": str(seconds), "over stream": str(ratio), "bytes": passes}))
    else:
        print(f"two loops: {seconds} s, {ratio} of the time of plain loops with as many reads and writes")


if __name__ == "__main__":
    main()
