#!/usr/bin/env python
"""Compare measured steps with their expected time, bytes with the plan, and time with the number of parameters.

``model``: a GPT trains with every strategy on one and on two ranks, alternately. The time of a step is compared with
the time that ``mpizero plan --machine`` expects. On one rank, the ratio measured / expected (the factor) is above 1,
because the plan leaves out Python and what layers do besides matrix products. On two ranks, the column "over factor" is
measured / (factor x expected); its distance from 1 is the error of the plan. Without ``--machine`` the speed of the
machine is measured first.

``bytes``: every strategy trains on 4 and 8 ranks, with shared and with private memory, also with pipelines and tensor
groups. Bytes sent, messages and memory that ``mpizero bench memory`` counts must be equal to those of the plan;
otherwise the exit status is 1. Nothing is timed, so the number of cores does not matter.

``growth``: GPTs of the same width, with 4 to 64 million parameters, train on the same tokens, one process each,
alternately. A line (seconds of a step over number of parameters) is fitted to the medians, with least relative error.
Printed is each model's distance from the line. ``--dim`` is the width.

The tables show medians over rounds, and in parentheses the smallest and largest value. No other program should run
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the library of this checkout, from wherever it starts
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where `harness` is

from harness.jobs import Mpi, well
from harness.options import parser, positive
from harness.tables import aligned
from harness.turns import Team, serve, team_of, teams_in_turns, tell

from mpizero._util.numbers import Measurement

CONFIG = Path(__file__).resolve().parent / "growing" / "small.toml"
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
#: Numbers of ranks of "model"; on the first, one, factors are fitted.
RANKS = (1, 2)
#: In "model", sequences of a rank in a step, and of a grain; in "growth", sequences and tokens of each in a step.
BATCH, GRAIN, TOKENS = 8, 4, (4, 128)
#: In "bytes", settings of the model, and the layouts: number of ranks, and sizes of the axes; the others are replicas.
SMALL = ("model.dim=64", "model.sequence=32", "train.micro_batch=1")
LAYOUTS: tuple[tuple[int, dict[str, int]], ...] = (
    (4, {}), (4, {"pipeline": 2}), (4, {"tensor": 2}), (8, {}), (8, {"pipeline": 2, "tensor": 2}),
)  # fmt: skip


def be_one(args: argparse.Namespace) -> None:
    """Run as one rank of a training with strategy ``args.be``, until the benchmark closes the connection."""
    from comparing.ours import Ours

    one = Ours(args.be, args.shape, args.shape["grain"])
    serve(args.socket, one.world.rank, {"prepare": one.prepare, "turn": one.turn})
    one.model.close()


def team(args: argparse.Namespace, name: str, strategy: str, shape: dict[str, int]) -> Team:
    """Start the ranks of a training with a strategy; ``shape`` has the sizes of the model, and "ranks" and "grain"."""
    words = (args.part, "--be", strategy, "--shape", json.dumps({"threads": 1} | shape))
    return team_of(__file__, args.mpiexec, shape["ranks"], *words, name=name)


def measure(
    args: argparse.Namespace, trainings: dict[str, tuple[str, dict[str, int]]]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Run all trainings alternately; ``trainings`` has by name the strategy and the shape of each.

    Return by name the seconds of a step in each round, and by name the number of parameters.
    """
    starts = {name: partial(team, args, name, *training) for name, training in trainings.items()}
    seconds, said = teams_in_turns(args.rounds, starts, warmup=2, steps=args.steps)
    per_step = {name: [one / args.steps for one in values] for name, values in seconds.items()}
    return per_step, {name: one["parameters"] for name, one in said.items()}


# ---------------------------------------------------------------------- the model of time


def expected(machine: Path, ranks: int, strategy: str) -> float:
    """Return the seconds that ``mpizero plan`` expects for a step of the small GPT on ``ranks`` ranks."""
    settings = (f"parallel.strategy={strategy}", f"train.global_batch={ranks * BATCH}", f"train.micro_batch={GRAIN}")
    words = [sys.executable, "-m", "mpizero", "plan", str(CONFIG), "--ranks", str(ranks), "--json"]
    words += ["--machine", str(machine), *(word for setting in settings for word in ("--set", setting))]
    seconds: float = json.loads(well(words).out)["expected"]["seconds"]
    return seconds


def check_model(args: argparse.Namespace) -> None:
    """Run the part "model": print a table of expected and measured times of steps."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        machine = args.machine or Path(folder) / "machine.json"
        if not args.machine:
            tell("the machine is measured")
            words = ["-m", "mpizero", "bench", "machine", CONFIG, "--file-bytes", "0", "--output", machine]
            well(Mpi(args.mpiexec).command(max(RANKS), words))
        shape = {"dim": 256, "layers": 4, "heads": 4, "sequence": 128, "vocabulary": 256, "batch": BATCH}
        trainings = {
            f"{strategy} on {ranks}": (strategy, {**shape, "ranks": ranks, "grain": GRAIN})
            for ranks in RANKS
            for strategy in STRATEGIES
        }
        plans = {name: expected(machine, shape["ranks"], strategy) for name, (strategy, shape) in trainings.items()}
    seconds, _ = measure(args, trainings)
    print(f"GPT of dim 256, 4 layers, {BATCH} x 128 tokens a rank in grains of {GRAIN}; {args.rounds} rounds")
    rows = []
    for name, (strategy, shape) in trainings.items():
        ratios = Measurement.of([s / plans[name] for s in seconds[name]])
        measured = Measurement.of([1e3 * s for s in seconds[name]])
        error = ""
        if shape["ranks"] > 1:  # the factor is taken from the same round, which ran at the same time
            alone = [s / plans[f"{strategy} on 1"] for s in seconds[f"{strategy} on 1"]]
            error = str(Measurement.of_ratios([s / plans[name] for s in seconds[name]], alone))
        rows.append((name, f"{1e3 * plans[name]:.1f}", measured, ratios, error))
    print(aligned(("", "expected, ms", "measured, ms", "measured / expected", "over factor"), rows))


# ---------------------------------------------------------------------- growth, bytes


def check_growth(args: argparse.Namespace) -> None:
    """Run the part "growth": print the time of a step for each number of parameters, and the fitted line."""
    batch, sequence = TOKENS
    shape = {"dim": args.dim, "heads": max(1, args.dim // 64), "sequence": sequence, "vocabulary": 256, "batch": batch}
    trainings: dict[str, tuple[str, dict[str, int]]] = {}
    for size in args.sizes:
        layers = max(1, round(size * 1e6 / (12 * args.dim**2)))
        trainings[f"{size} M"] = ("zero1", {**shape, "layers": layers, "ranks": 1, "grain": batch})
    seconds, parameters = measure(args, trainings)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    names = list(trainings)
    times = np.array([medians[n] for n in names])
    slope, start = np.polyfit([parameters[n] for n in names], times, 1, w=1 / times)  # noise grows with the time
    print(f"GPTs of dim {args.dim}, {batch} x {sequence} tokens a step, AdamW, one process; {args.rounds} rounds")
    rows = []
    off = {n: medians[n] / (start + slope * parameters[n]) - 1 for n in names}
    for n in names:
        measured = Measurement.of([1e3 * s for s in seconds[n]])
        layers = trainings[n][1]["layers"]
        rows.append((f"{parameters[n]:,}", layers, measured, f"{100 * off[n]:+.1f} %"))
    print(aligned(("parameters", "layers", "ms a step", "off the line"), rows))
    worst = max(map(abs, off.values()))
    print(f"line: {1e3 * start:.2f} ms + {1e9 * slope:.2f} ns a parameter; largest deviation {100 * worst:.1f} %")


def check_bytes(args: argparse.Namespace) -> None:
    """Run the part "bytes": compare counted bytes, messages and memory with the plan; exit with 1 if some differ."""
    lines, failed = [], False
    for ranks, layout in LAYOUTS:
        settings = (*SMALL, f"train.global_batch={4 * ranks}", *(f"parallel.{axis}={n}" for axis, n in layout.items()))
        words = ["-m", "mpizero", "bench", "memory", CONFIG, "--strategies", ",".join(STRATEGIES), "--steps", "1"]
        words += ["--json", *(word for setting in settings for word in ("--set", setting))]
        for table in json.loads(well(Mpi(args.mpiexec).command(ranks, words)).out)["layouts"]:
            rows = table["rows"]
            wrong = sum(row[name] != row[f"planned_{name}"] for row in rows for name in ("sent", "messages"))
            wrong += sum(held != row["planned"][part] for row in rows for part, held in row["held"].items())
            sent, messages = (sum(row[name] for row in rows) for name in ("sent", "messages"))
            verdict = f"NO, {wrong} figures differ" if wrong else "yes"
            lines.append((table["layout"], table["memory"], ranks, f"{sent:,}", f"{messages:,}", verdict))
            failed |= wrong > 0
    head = ("layout", "memory", "ranks", "bytes sent", "messages", "as planned, on all ranks")
    print(aligned(head, lines, left=2))
    sys.exit(failed)


def main() -> None:
    """Run the part that the command line names, and print its table."""
    options = parser(__doc__, rounds=7, mpiexec=True)
    options.add_argument("part", choices=("model", "bytes", "growth"))
    options.add_argument("--machine", type=Path, metavar="FILE", help="of `mpizero bench machine`, for model")
    options.add_argument("--steps", type=positive, default=5, help="timed steps of one turn")
    options.add_argument("--dim", type=positive, default=256, help="width of growth's models (default: %(default)s)")
    options.add_argument(
        "--sizes", type=positive, nargs="+", default=[4, 8, 16, 32, 64], help="million parameters, for growth"
    )
    options.add_argument("--shape", type=json.loads, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.be:
        be_one(args)
    else:
        {"model": check_model, "bytes": check_bytes, "growth": check_growth}[args.part](args)


if __name__ == "__main__":
    main()
