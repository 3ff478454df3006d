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
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

import numpy as np
from harness.jobs import answer, ranks_of
from harness.options import parser, positive
from harness.tables import aligned

from mpizero.train.machine import described

#: The schedules, with the number of virtual stages of each.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zero_bubble_v": 1}
#: By how much the measured idle share may exceed the simulated one.
MARGIN = 0.03
#: Stages, micro-batches of a step and sequences of each; heads, tokens of a sequence and their kinds.
RANKS, MICRO_BATCHES, MICRO_BATCH, HEADS, SEQUENCE, VOCABULARY = 2, 8, 4, 4, 128, 256
WARM_UP = 2
Row = dict[str, Any]


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
    """Train some steps with one schedule; return idle shares, measured and simulated. Collective over all ranks."""
    from mpi4py import MPI

    import mpizero as mz

    world = MPI.COMM_WORLD
    gpt = mz.nn.GPT(args.dim, args.layers, HEADS, SEQUENCE, VOCABULARY)
    text = np.random.default_rng(0).integers(0, VOCABULARY, (MICRO_BATCHES * MICRO_BATCH, SEQUENCE + 1))
    ways = {"schedule": schedule, "virtual_stages": SCHEDULES[schedule]}
    with (
        mz.ShardingConfig(comm=world, micro_batch=MICRO_BATCH, threads=1) as config,
        mz.PipelineParallelModel(gpt, config, **ways, optimizer=mz.AdamW(lr=1e-4)) as model,
    ):
        probe = Probe(model._engine.runner, world)
        for step in range(WARM_UP + args.steps):
            if step == WARM_UP:
                probe.clear()
            model.train(text[:, :-1], text[:, 1:])
        mine = {key: statistics.median(values) for key, values in probe.seconds.items()}
        everyone = world.allgather((statistics.median(probe.idle), mine))
        costs = {f"{kind} {chunk}": value for _, part in everyone for (kind, chunk), value in part.items()}
        idle = statistics.fmean(share for share, _ in everyone)
        return {"schedule": schedule, "measured": idle, "simulated": simulated(schedule, costs)}


def simulated(schedule: str, costs: dict[str, float]) -> float:
    """Simulate the schedule with the measured seconds of instructions, and return the idle share, mean over stages."""
    from mpizero.layout import Costs, build_schedule, simulate

    built = build_schedule(schedule, RANKS, MICRO_BATCHES, SCHEDULES[schedule])
    halves = []
    for chunk in range(built.chunks):
        whole = costs.get(f"backward {chunk}", 0.0)
        inputs = costs.get(f"backward_input {chunk}", whole / 2)
        halves.append((inputs, costs.get(f"backward_weights {chunk}", whole - inputs)))
    forward = [costs[f"forward {chunk}"] for chunk in range(built.chunks)]
    told = Costs(tuple(forward), tuple(i for i, _ in halves), tuple(w for _, w in halves))
    return statistics.fmean(simulate(built, told).idle)


def complaints(found: dict[str, Row]) -> list[str]:
    """Return a line of text for each schedule whose measured idle share is too large."""
    wrong = [
        f"{schedule} waits {row['measured']:.1%}, more than {MARGIN:.0%} over the simulated {row['simulated']:.1%}"
        for schedule, row in found.items()
        if row["measured"] > row["simulated"] + MARGIN
    ]
    plain = found["1f1b"]
    for schedule in ("zero_bubble", "zero_bubble_v"):
        if found[schedule]["measured"] >= plain["measured"]:
            wrong.append(f"{schedule} waits {found[schedule]['measured']:.1%}, 1f1b {plain['measured']:.1%}")
    return wrong


def main() -> None:
    """Run as a rank, or measure and simulate all schedules, and print the comparison."""
    options = parser(__doc__, mpiexec=True)
    options.add_argument("--dim", type=positive, default=256)
    options.add_argument("--layers", type=positive, default=6)
    options.add_argument("--steps", type=positive, default=5, help="measured steps of one run")
    options.add_argument("--runs", type=positive, default=5)
    args = options.parse_args()
    if args.be:
        from mpi4py import MPI

        rows = [measured(args, schedule) for _ in range(args.runs) for schedule in SCHEDULES]
        if MPI.COMM_WORLD.rank == 0:
            answer(rows)
        return
    rows = ranks_of(__file__, args.mpiexec, RANKS, *sys.argv[1:], "--be", "rank")
    found = {
        name: {
            share: statistics.median(row[share] for row in rows if row["schedule"] == name)
            for share in ("simulated", "measured")
        }
        for name in SCHEDULES
    }
    print(
        f"{RANKS} ranks on {described()}, {MICRO_BATCHES} micro-batches of {MICRO_BATCH} x {SEQUENCE} tokens, "
        f"dim {args.dim}, {args.layers} layers; medians of {args.runs} runs of {args.steps} steps\n"
    )
    shares = [(name, *(f"{share:.1%}" for share in row.values())) for name, row in found.items()]
    print(aligned(("schedule", "simulated", "measured"), shares))
    wrong = complaints(found)
    sys.exit("\n" + "\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
