"""Compare grains that are assigned in advance with grains that ranks claim, where one rank is slower than the others.

Four ranks minimize the misfit of the 16 shots of a small waveform inversion, that of
``examples/gallery/waveform_inversion``, by L-BFGS; each shot is a grain. On one rank every shot takes ``--slow`` times
as long: the rank sleeps after each for the rest of that time, so the other ranks have the processors. ``none slow`` is
without that. All contenders run in turns; seconds are those of the whole minimization. Printed are ratios of the same
round, the shots that the slow rank has computed, and whether all have found the same bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

import numpy as np
from harness.options import parser
from harness.tables import aligned
from harness.turns import alternate, serve, team_of

from mpizero._util.numbers import Measurement

RANKS, SHOTS, SLOW_RANK = 4, 16, 1
#: Contenders: how grains are assigned, and whether a rank is slow.
CASES = {
    "static": ("static", True),
    "dynamic": ("dynamic", True),
    "static, none slow": ("static", False),
    "dynamic, none slow": ("dynamic", False),
}


class Rank:
    """Run one rank, with a model for each way of assignment."""

    def __init__(self, args: argparse.Namespace) -> None:
        from mpi4py import MPI

        import mpizero as mz

        sys.path.insert(0, str(Path(__file__).parents[2] / "examples/gallery/waveform_inversion"))
        from waveforms.inversion import Shots
        from waveforms.misfit import Misfit
        from waveforms.survey import Survey, start_velocity, true_velocity

        self.world, self._args = MPI.COMM_WORLD, args
        survey = Survey(rows=40, columns=80, steps=350, water=5, shots=SHOTS, receivers=40, border=12)
        self._misfit, self.factor, self.computed = Misfit(survey), 1.0, 0
        self._start = start_velocity(survey).astype(np.float32)
        truth = true_velocity(survey).astype(np.float32)
        self._data = Shots(self._misfit, truth, 4.0).samples(np.arange(SHOTS))
        self.models = {}
        for assignment in ("static", "dynamic"):
            config = mz.ShardingConfig(comm=self.world, micro_batch=1, grain_assignment=assignment)
            function = mz.FunctionModel({"velocity": self._start}, self._loss_and_grad, in_place=True)
            self.models[assignment] = mz.ZeRO1Model(function, config)

    def _loss_and_grad(self, parameters: Any, batch: Any, gradients: Any) -> tuple[float, float]:
        began = time.process_time()
        found = self._misfit.loss_and_grad(parameters, batch, gradients)
        time.sleep((self.factor - 1.0) * (time.process_time() - began))
        self.computed += len(batch[1])
        return found

    def run(self, case: str) -> dict[str, Any]:
        """Minimize from the start; return seconds, the hash of the result, and the shots that this rank computed."""
        import mpizero as mz

        assignment, slow = CASES[case]
        self.factor = self._args.slow if slow and self.world.rank == SLOW_RANK else 1.0
        model, self.computed = self.models[assignment], 0
        model.set_parameters(self._start.reshape(-1))
        self.world.Barrier()
        began = time.monotonic()
        found = mz.minimize(model, self._data, options={"maxiter": self._args.iterations, "gtol": 0.0})
        seconds = time.monotonic() - began
        return {"seconds": seconds, "sha256": model.parameters_sha256(), "shots": self.computed / found.nfev}


def main() -> None:
    """Run as a rank, or start the ranks and print what they took."""
    options = parser(__doc__, rounds=5, mpiexec=True)
    options.add_argument("--slow", type=float, default=4.0, help="times as long on one rank (default: %(default)s)")
    options.add_argument("--iterations", type=int, default=2, help="of L-BFGS (default: %(default)s)")
    args = options.parse_args()
    if args.be:
        rank = Rank(args)
        serve(args.socket, rank.world.rank, {"run": rank.run})
        for model in rank.models.values():
            model.close()
        return
    hashes, shots = set(), {}

    def measure(case: str) -> float:
        rows = team.ask("run", case=case)
        hashes.update(row["sha256"] for row in rows)
        shots[case] = rows[SLOW_RANK]["shots"]
        return float(max(row["seconds"] for row in rows))

    words = ("--slow", str(args.slow), "--iterations", str(args.iterations), "--be", "rank")
    with team_of(__file__, args.mpiexec, RANKS, *words) as team:
        found = alternate(args.rounds, list(CASES), measure, warm_up=1)
    rows = [
        (case, Measurement.of(values), Measurement.of_ratios(found["static"], values), f"{shots[case]:.1f}")
        for case, values in found.items()
    ]
    print(aligned(("", "seconds", "static over this", f"shots of rank {SLOW_RANK} an evaluation"), rows))
    quiet = Measurement.of_ratios(found["dynamic, none slow"], found["static, none slow"])
    print(f"dynamic over static where no rank is slow: {quiet}; {len(hashes)} hash{'es' * (len(hashes) > 1)}")


if __name__ == "__main__":
    main()
