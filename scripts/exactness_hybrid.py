"""Show that stages, schedules and replicas change no bit, and by how much tensor and context groups change losses.

Trains a GPT of 16 blocks and an MLP of 16 blocks

* on every factorization pipeline x data of 2, 4, 6 and 8 ranks, with every schedule and every ZeRO stage. Shared
  memory, private memory and simulated nodes alternate from training to training. All trainings of a case must end with
  the SHA-256 (of all parameters) that one process gets. The numbers of micro-batches are not multiples of the number of
  stages;
* with tensor or context groups, alone and together with stages and replicas. Each training is done twice. Every loss
  must agree with that of one process within 1e-5 (float32) or 1e-12 (float64), relative to it, and the second training
  must repeat the bits of the first.

For each number of ranks one job is started, which runs its trainings one after the other. With ``--covering`` a few
trainings run in which every pair of case, number of ranks, factorization, schedule, ZeRO stage and kind of memory that
occurs at all occurs once.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matrix.jobs import MEMORIES, Matrix, Row, arguments, run, worker

import mpizero as mz
from mpizero.layout import SCHEDULES, chunk_stages

VIRTUAL = {name: 2 if name == "interleaved" else 1 for name in SCHEDULES}
#: The largest relative difference of a loss that is allowed, by dtype.
BOUNDS = {"float32": 1e-5, "float64": 1e-12}
BLOCKS = 16


@dataclass(frozen=True)
class Case:
    """Describe one training: a global batch of ``batch`` samples, in grains of ``grain`` samples."""

    name: str
    batch: int
    grain: int
    model: str = "gpt"
    optimizer: str = "adamw"
    clip: float | None = None
    dtype: str = "float32"

    def wrapped(self) -> Any:
        """Return the model of this case: a GPT or an MLP of 16 blocks."""
        if self.model == "mlp":
            widths = [7, 9, 8] * (BLOCKS // 3)
            return mz.nn.MLP(features=7, hidden=widths, outputs=4, activation="tanh", dtype=self.dtype, seed=3)
        return mz.nn.GPT(
            dim=16, layers=BLOCKS - 2, heads=4, sequence=8, vocabulary=29, dropout=0.1, tied=True, dtype=self.dtype
        )

    def update(self) -> Any:
        """Return the optimizer of this case."""
        return {"adamw": mz.AdamW(lr=1e-3), "lamb": mz.LAMB(lr=3e-3), "sgd": mz.SGD(lr=0.02, momentum=0.9)}[
            self.optimizer
        ]

    def batches(self, steps: int, rank: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the part of replica ``rank`` in each of ``steps`` global batches; parts may have different sizes.

        ``size`` is the number of replicas.
        """
        rng = np.random.default_rng(7)
        mine = slice(rank * self.batch // size, (rank + 1) * self.batch // size)
        for _ in range(steps):
            if self.model == "mlp":
                x = rng.normal(size=(self.batch, 7))
                yield x[mine], (np.abs(x[mine, 0]) + x[mine, 1] > 0.5).astype(np.int64)
            else:
                text = np.cumsum(rng.integers(1, 4, (self.batch, 9)), axis=1) % 29  # something to learn
                yield text[mine, :-1], text[mine, 1:]


EXACT = (
    Case("GPT, 7 grains, the last short", 13, 2),
    Case("GPT, 11 grains, clipping, LAMB", 11, 1, optimizer="lamb", clip=0.5),
    Case("MLP, 9 grains, momentum", 35, 4, model="mlp", optimizer="sgd"),
)
ROUNDED = (
    Case("GPT float32", 8, 2),
    Case("GPT float64, clipping, LAMB", 8, 2, dtype="float64", clip=0.5, optimizer="lamb"),
    Case("MLP float32", 16, 4, model="mlp"),
    Case("MLP float64", 16, 4, model="mlp", dtype="float64"),
)


@dataclass(frozen=True)
class Way:
    """Describe how a training is distributed: sizes of the axes, ZeRO stage, schedule and kind of memory.

    All ranks that ``pipeline``, ``tensor`` and ``context`` do not use are for replicas.
    """

    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    memory: str = "shared"

    def __str__(self) -> str:
        axes = ((n, getattr(self, n)) for n in ("pipeline", "tensor", "context"))
        split = ", ".join(f"{name} {size}" for name, size in axes if size > 1)
        return f"{split or 'replicas'}, {self.schedule}, ZeRO-{self.zero}, {self.memory}"


#: A case, how it is distributed, and whether it agrees with one process only within rounding.
Training = tuple[Case, Way, bool]


def exact_trainings(size: int) -> Iterator[Training]:
    """Yield the trainings on ``size`` ranks that must have the bits of one process: those without split layers."""
    number = 0
    for stages in (s for s in range(2, size + 1) if size % s == 0):
        for schedule in SCHEDULES:
            if len(chunk_stages(schedule, stages, VIRTUAL[schedule])) > BLOCKS:
                continue
            for zero in range(4):
                for case in EXACT:
                    number += 1
                    memory = tuple(MEMORIES)[(number + zero) % len(MEMORIES)]
                    yield case, Way(stages, zero=zero, schedule=schedule, memory=memory), False


def rounded_trainings(size: int) -> Iterator[Training]:
    """Yield the trainings on ``size`` ranks that agree with one process within rounding: tensor or context groups."""
    shapes = [
        (stages, tensor, context)
        for stages in (1, 2, 4)
        for tensor in (1, 2, 4)
        for context in (1, 2, 4)
        if size % (stages * tensor * context) == 0 and 1 in (tensor, context) and tensor * context > 1
    ]
    for number, (stages, tensor, context) in enumerate(shapes):
        for place, case in enumerate(ROUNDED):
            schedule = SCHEDULES[(number + place) % len(SCHEDULES)] if stages > 1 else "1f1b"
            memory = tuple(MEMORIES)[(number + place) % len(MEMORIES)]
            if case.model == "gpt" or context == 1:
                yield case, Way(stages, tensor, context, (number + place) % 4, schedule, memory), True


def values(training: Training) -> tuple[Any, ...]:
    """Return the values that a training combines."""
    case, way, rounds = training
    return rounds, case.name, (way.pipeline, way.tensor, way.context), way.zero, way.schedule, way.memory


def train(training: Training, comm: Any, args: argparse.Namespace) -> Row:
    """Train, twice if the result agrees only within rounding. Collective over ``comm``.

    The keys of the row are "case", "way" (text), "sha256", "losses", "repeats" (whether the second training had the
    same bits) and "rounds" (whether the training agrees only within rounding).
    """
    case, way, rounds = training
    found = [_train(case, comm, way, args.steps) for _ in range(1 + rounds)]
    row = {"case": case.name, "way": str(way), "sha256": found[0][0], "losses": found[0][1]}
    return row | {"repeats": found[0] == found[-1], "rounds": rounds}


def _train(case: Case, comm: Any, way: Way, steps: int) -> tuple[str, list[float]]:
    """Train one case, distributed as ``way`` says; return the SHA-256 of the parameters, and the loss of each step."""
    with mz.ShardingConfig(comm=comm, micro_batch=case.grain, clip=case.clip, **MEMORIES[way.memory]) as config:
        model = mz.HybridShardedModel(
            case.wrapped(),
            config,
            way.pipeline,
            way.tensor,
            zero_stage=way.zero,
            schedule=way.schedule,
            virtual_stages=VIRTUAL[way.schedule],
            context_parallel_size=way.context,
            optimizer=case.update(),
        )
        with model:
            batches = case.batches(steps, model.batch_group.rank, model.batch_group.size)
            losses = [model.train(x, y) for x, y in batches]
            return model.parameters_sha256(), losses


MATRIX = Matrix(__file__, lambda size: [*exact_trainings(size), *rounded_trainings(size)], values, train)


def alone(cases: Sequence[Case], steps: int) -> dict[str, Row]:
    """Train all cases in one process; return by the case's name a row with its "sha256" and "losses"."""
    found = {}
    for case in cases:
        with mz.ShardingConfig(comm="self", micro_batch=case.grain, clip=case.clip) as config:
            model = mz.distribute(case.wrapped(), case.update(), strategy="ddp", config=config)
            with model:
                losses = [model.train(x, y) for x, y in case.batches(steps, 0, 1)]
                found[case.name] = {"sha256": model.parameters_sha256(), "losses": losses}
    return found


def differs(row: Row, expected: dict[str, Row]) -> bool:
    """Tell whether parameters or losses of a training differ in a bit from those of one process (``expected``)."""
    wanted = expected[row["case"]]
    return (row["sha256"], row["losses"]) != (wanted["sha256"], wanted["losses"])


def announce(rows: Sequence[Row], expected: dict[str, Row], seconds: float) -> None:
    """Print one line about a job that has ended: how many of its trainings are right, and its ``seconds``."""
    exact = [row for row in rows if not row["rounds"]]
    equal = sum(not differs(row, expected) for row in exact)
    repeated = sum(row["repeats"] for row in rows if row["rounds"])
    print(
        f"{rows[0]['where']}: {equal} of {len(exact)} have the bits of one process; {repeated} of "
        f"{len(rows) - len(exact)} that round repeat their bits; {seconds:.1f} s",
        flush=True,
    )


def report_exact(rows: Sequence[Row], expected: dict[str, Row]) -> bool:
    """Print a line for each case, and for each training that differs from one process; tell if none differs."""
    print(f"\n{'pipeline x data':32s} {'runs':>5s} {'equal':>5s}  sha256 of one process")
    equal = True
    for case in EXACT:
        mine, wanted = [row for row in rows if row["case"] == case.name], expected[case.name]
        wrong = [row for row in mine if differs(row, expected)]
        print(f"{case.name:32s} {len(mine):5d} {len(mine) - len(wrong):5d}  {wanted['sha256']}")
        for row in wrong:
            print(f"    {row['where']}, {row['way']}: {row['sha256']}")
        equal = equal and not wrong
    return equal


def report_rounded(rows: Sequence[Row], expected: dict[str, Row]) -> bool:
    """Print the largest relative difference of a loss for each case, and every training that is wrong.

    A training is wrong if a difference exceeds the bound, or if the second training has other bits. Tell whether none
    is wrong.
    """
    print(f"\n{'tensor or context > 1':32s} {'runs':>5s} {'largest':>8s} {'bound':>6s}  where")
    good = True
    for case in ROUNDED:
        mine, bound = [row for row in rows if row["case"] == case.name], BOUNDS[case.dtype]
        wanted = np.array(expected[case.name]["losses"])
        differences = [float(np.max(np.abs(row["losses"] - wanted) / np.abs(wanted))) for row in mine]
        largest, worst = max(zip(differences, mine, strict=True), key=lambda pair: pair[0], default=(0.0, None))
        place = "" if worst is None else f"{worst['where']}, {worst['way']}"
        print(f"{case.name:32s} {len(mine):5d} {largest:8.1e} {bound:6.0e}  {place}")
        for row, difference in zip(mine, differences, strict=True):
            if not difference <= bound or not row["repeats"]:
                good = False
                told = "" if row["repeats"] else ", other bits when repeated"
                print(f"    {row['where']}, {row['way']}: {difference:.1e}{told}")
    return good


def main() -> None:
    """Run all jobs, and compare their results with one process; exit with status 1 if some are wrong."""
    args = arguments(__doc__, "2,4,6,8", "").parse_args()
    if args.worker:
        worker(MATRIX, args)
        return

    expected = alone(EXACT + ROUNDED, args.steps)
    rows: list[Row] = []
    for found, seconds in run(MATRIX, args):
        announce(found, expected, seconds)
        rows += found
    exact = report_exact([row for row in rows if not row["rounds"]], expected)
    rounded = report_rounded([row for row in rows if row["rounds"]], expected)
    counts = collections.Counter(row["rounds"] for row in rows)
    told = f"{counts[False]} exact trainings, {counts[True]} pairs that round, of {args.steps} steps"
    if not (exact and rounded):
        sys.exit(f"\n{told}: there are differences")
    print(f"\n{told}: all as they must be")


if __name__ == "__main__":
    main()
