"""Measure how long pipeline stages wait in real steps, and compare with a simulation with the measured times.

It trains a GPT on two ranks of one thread each, with every schedule in turn. All this is one run; several runs follow
each other. In each step every instruction of the schedule (a forward or backward pass of one micro-batch on one chunk)
is timed, without the time in which it waits for messages. ``mpizero.layout.simulate`` computes from the medians of
these times an expected idle share, which is compared with the measured one. The idle share of a step is the time in
which a stage does not compute, divided by the time from the common start of the pipeline to the end of its last stage,
as a mean over the stages. Medians over the runs are compared.

The exit status is 1 if a schedule's measured idle share is more than three percentage points above the simulated one,
or if the share of a zero-bubble schedule is not below that of 1F1B. No other program may run on the cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

import numpy as np
from harness.jobs import answer, ranks_of
from harness.options import chosen, parser
from harness.tables import aligned

from mpizero.train.machine import described

#: The schedules, with the number of virtual stages of each.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zero_bubble_v": 1}
#: By how much the measured idle share may exceed the simulated one.
MARGIN = 0.03
VOCABULARY = 256
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, mpiexec=True, json=True)
    options.add_argument("--ranks", type=int, default=2, help="stages")
    options.add_argument("--dim", type=int, default=256)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--heads", type=int, default=4)
    options.add_argument("--sequence", type=int, default=128, help="tokens a sequence")
    options.add_argument("--micro-batches", type=int, default=8)
    options.add_argument("--micro-batch", type=int, default=4, help="sequences of one")
    options.add_argument("--steps", type=int, default=5, help="measured steps of one run")
    options.add_argument("--warmup", type=int, default=2, help="steps before them")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--schedules", default=",".join(SCHEDULES), help="default: %(default)s")
    args = options.parse_args()
    args.schedules = chosen("--schedules", args.schedules, SCHEDULES)
    return args


class Probe:
    """Time every instruction that a pipeline runner executes, and compute idle shares.

    The probe replaces two methods of the runner, because a hook in the runner would cost time in every user's step.
    ``seconds`` has the times of instructions by kind and chunk, ``idle`` the idle share of this stage in each step.
    """

    def __init__(self, runner: Any, world: Any) -> None:
        self.runner, self.world = runner, world
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.idle: list[float] = []
        self._run, self._execute = runner.run, runner._execute
        runner.run, runner._execute = self.run, self.execute

    def run(self, jobs: Any, run_of: Any) -> None:
        """Run the pipeline of one step, and record the idle share of this stage."""
        busy_before = sum(map(sum, self.seconds.values()))
        self.world.Barrier()
        started = max(self.world.allgather(time.perf_counter()))
        self._run(jobs, run_of)
        ended = max(self.world.allgather(time.perf_counter()))
        self.idle.append(1 - (sum(map(sum, self.seconds.values())) - busy_before) / (ended - started))

    def execute(self, instruction: Any, watched: Any, run_of: Any) -> None:
        """Run one instruction of the schedule, and record its seconds, less those in which it waited for messages."""
        pipeline_p2p = self.runner.pipeline_p2p
        started, waited = time.perf_counter(), pipeline_p2p.waited
        self._execute(instruction, watched, run_of)
        taken = time.perf_counter() - started - (pipeline_p2p.waited - waited)
        self.seconds[instruction.kind, instruction.chunk].append(taken)

    def clear(self) -> None:
        """Drop all times recorded so far, those of the warm-up steps."""
        self.seconds.clear()
        self.idle.clear()


def measured(args: argparse.Namespace, schedule: str) -> Row:
    """Train some steps with one schedule, and return medians over the steps. Collective over all ranks.

    The keys are "idle" (idle share of each stage), "costs" (seconds of an instruction, by "kind chunk") and "seconds"
    (of a step).
    """
    from mpi4py import MPI

    import mpizero as mz

    world = MPI.COMM_WORLD
    gpt = mz.nn.GPT(args.dim, args.layers, args.heads, args.sequence, VOCABULARY)
    samples = args.micro_batches * args.micro_batch
    text = np.random.default_rng(0).integers(0, VOCABULARY, (samples, args.sequence + 1))
    with mz.ShardingConfig(comm=world, micro_batch=args.micro_batch, threads=1) as config:
        ways = {"schedule": schedule, "virtual_stages": SCHEDULES[schedule]}
        model = mz.PipelineParallelModel(gpt, config, **ways, optimizer=mz.AdamW(lr=1e-4))
        with model:
            probe = Probe(model._engine.runner, world)
            seconds = []
            for step in range(args.warmup + args.steps):
                if step == args.warmup:
                    probe.clear()
                started = time.perf_counter()
                model.train(text[:, :-1], text[:, 1:])
                seconds.append(time.perf_counter() - started)
            mine = {key: statistics.median(values) for key, values in probe.seconds.items()}
            everyone = world.allgather((statistics.median(probe.idle), mine))
            costs = {f"{kind} {chunk}": value for _, part in everyone for (kind, chunk), value in part.items()}
            idle = [share for share, _ in everyone]
            return {"idle": idle, "costs": costs, "seconds": statistics.median(seconds[args.warmup :])}


def simulated(args: argparse.Namespace, schedule: str, costs: dict[str, float]) -> list[float]:
    """Simulate the schedule with the measured ``costs``, and return the idle share of every stage."""
    from mpizero.layout import Costs, build_schedule, simulate

    built = build_schedule(schedule, args.ranks, args.micro_batches, SCHEDULES[schedule])
    halves = []
    for chunk in range(built.chunks):
        whole = costs.get(f"backward {chunk}", 0.0)
        inputs = costs.get(f"backward_input {chunk}", whole / 2)
        halves.append((inputs, costs.get(f"backward_weights {chunk}", whole - inputs)))
    forward = [costs[f"forward {chunk}"] for chunk in range(built.chunks)]
    told = Costs(tuple(forward), tuple(i for i, _ in halves), tuple(w for _, w in halves))
    return list(simulate(built, told).idle)


def worker(args: argparse.Namespace) -> None:
    """Run as one rank: train with all schedules in all runs; rank 0 prints the results as JSON."""
    from mpi4py import MPI

    rows = []
    for _ in range(args.runs):
        for schedule in args.schedules:
            row = measured(args, schedule)
            rows.append({"schedule": schedule, "simulated": simulated(args, schedule, row["costs"]), **row})
    if MPI.COMM_WORLD.rank == 0:
        answer(rows)


def summary(rows: Sequence[Row]) -> dict[str, Row]:
    """Return medians over all runs by schedule.

    The keys of each are "measured" and "simulated" (idle shares, means over stages), "stages" (the measured idle share
    of each stage), "milliseconds" (of a step) and "costs" (milliseconds of an instruction, by "kind chunk").
    """
    found: dict[str, Row] = {}
    for schedule in dict.fromkeys(row["schedule"] for row in rows):
        mine = [row for row in rows if row["schedule"] == schedule]
        found[schedule] = {
            "measured": statistics.median(statistics.fmean(row["idle"]) for row in mine),
            "simulated": statistics.median(statistics.fmean(row["simulated"]) for row in mine),
            "stages": [statistics.median(row["idle"][stage] for row in mine) for stage in range(len(mine[0]["idle"]))],
            "milliseconds": 1e3 * statistics.median(row["seconds"] for row in mine),
            "costs": {key: 1e3 * statistics.median(row["costs"][key] for row in mine) for key in mine[0]["costs"]},
        }
    return found


def complaints(found: dict[str, Row]) -> list[str]:
    """Return a line of text for each schedule whose measured idle share is too large."""
    wrong = [
        f"{schedule} waits {row['measured']:.1%}, more than {MARGIN:.0%} over the simulated {row['simulated']:.1%}"
        for schedule, row in found.items()
        if row["measured"] > row["simulated"] + MARGIN
    ]
    plain = found.get("1f1b")
    for schedule in ("zero_bubble", "zero_bubble_v"):
        if plain and schedule in found and found[schedule]["measured"] >= plain["measured"]:
            wrong.append(f"{schedule} waits {found[schedule]['measured']:.1%}, 1f1b {plain['measured']:.1%}")
    return wrong


def print_table(args: argparse.Namespace, found: dict[str, Row]) -> None:
    """Print one line for each schedule: idle shares, and the times of its chunks."""
    print(
        f"{args.ranks} ranks on {described()}, "
        f"{args.micro_batches} micro-batches of {args.micro_batch} x {args.sequence} tokens, "
        f"dim {args.dim}, {args.layers} layers; medians of {args.runs} runs of {args.steps} steps\n"
    )
    kinds = {"forward": "F", "backward_input": "B", "backward_weights": "W", "backward": "B+W"}
    rows = []
    for schedule, row in found.items():
        chunks: dict[str, list[str]] = defaultdict(list)
        for key in sorted(row["costs"], key=lambda key: list(kinds).index(key.split()[0])):
            kind, chunk = key.split()
            chunks[chunk].append(f"{kinds[kind]} {row['costs'][key]:.1f}")
        told = "; ".join(f"{chunk}: {', '.join(chunks[chunk])}" for chunk in sorted(chunks, key=int))
        stages = ", ".join(f"{share:.1%}" for share in row["stages"])
        figures = (f"{row['simulated']:.1%}", f"{row['measured']:.1%}", stages, f"{row['milliseconds']:.1f}")
        rows.append((schedule, *figures, told))
    print(aligned(("schedule", "simulated", "measured", "by stage", "ms/step", "ms by chunk: F, B, W"), rows))


def main() -> None:
    """Measure and simulate all schedules, and print the comparison."""
    args = arguments()
    if args.be:
        worker(args)
        return
    found = summary(ranks_of(__file__, args.mpiexec, args.ranks, *sys.argv[1:], "--be", "rank"))
    wrong = complaints(found)
    if args.json:
        print(json.dumps({"schedules": found, "wrong": wrong}, indent=1))
    else:
        print_table(args, found)
    sys.exit("\n" + "\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
