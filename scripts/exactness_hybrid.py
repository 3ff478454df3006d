"""Show that stages, tensor and context groups, schedules and replicas change no bit.

Trains GPTs, MLPs and a user's own model

* *in stages*: on every factorization pipeline x data of 2, 4, 6 and 8 ranks, with every schedule and every ZeRO stage.
  The numbers of micro-batches are not multiples of the number of stages;
* *in tiles*: on every factorization pipeline x tensor x context x data of these numbers in which tensor and context
  are powers of two, each with half of the cases, with 8 tiles of the axis that is split, or several of both. Schedules
  and ZeRO stages alternate;
* *within rounding*: with tensor groups of 3 ranks, and with a layer that says it cannot keep its bits. Each training
  is done twice, must repeat its bits, and must agree with one process within 1e-5 (float32) or 1e-12 (float64).

Shared memory, private memory and simulated nodes alternate from training to training. All trainings of a case must
end with the SHA-256 (of all parameters, and of the losses of all steps) that one process with the same tiles gets, and
their ``metadata()`` must say so. For each number of ranks one job is started, which runs its trainings one after the
other. With ``--covering`` a few trainings run in which every pair of values that occurs at all occurs once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import product
from typing import Any

import numpy as np
from harness.matrix import MEMORIES, Matrix, Row, arguments, run
from harness.models import MODELS, Case
from harness.tables import aligned

import mpizero as mz
from mpizero.layout import SCHEDULES, chunk_stages

VIRTUAL = {name: 2 if name == "interleaved" else 1 for name in SCHEDULES}
#: The largest relative difference of a loss that is allowed where results agree within rounding, by dtype.
BOUNDS = {"float32": 1e-5, "float64": 1e-12}
POWERS = (1, 2, 4, 8)
#: How trainings are cut, as the options name it.
KINDS = ("stages", "tiles", "rounding")


@cache
def blocks_of(model: str) -> int:
    """Return the number of a model's blocks."""
    return len(MODELS[model]("float32").blocks)


F64 = {"dtype": "float64"}
IN_STAGES = (
    Case("GPT, 7 grains, the last short", "deep GPT", 13, 2),
    Case("GPT, 11 grains, clipping, LAMB", "deep GPT", 11, 1, "lamb", 0.5),
    Case("MLP, 9 grains, momentum", "deep MLP", 35, 4, "sgd"),
)
#: A factorization takes those with an even number, or the others: two models of each dtype.
IN_TILES = (
    Case("tied GPT, clipping", "GPT", 5, 2, clip=0.5),
    Case("untied GPT, clipping, LAMB", "untied GPT", 5, 2, "lamb", 0.5),
    Case("own model, LAMB", "own", 5, 2, "lamb"),
    Case("MLP, clipping", "MLP", 17, 4, clip=0.5),
    Case("untied GPT, clipping, float64", "untied GPT", 5, 2, clip=0.5, **F64),
    Case("tied GPT, LAMB, float64", "GPT", 4, 1, "lamb", **F64),
    Case("MLP, LAMB, float64", "MLP", 17, 4, "lamb", **F64),
    Case("own model, clipping, float64", "own", 5, 2, clip=0.5, **F64),
)
ROUNDED = (
    Case("GPT of 24 heads", "GPT, 24 heads", 5, 2),
    Case("MLP", "MLP", 17, 4, "lamb", 0.5),
    Case("MLP, float64", "MLP", 17, 4, "lamb", 0.5, **F64),
    Case("a layer that says so", "own, talking", 5, 2, clip=0.5),
    Case("a layer that says so, float64", "own, talking", 5, 2, "lamb", **F64),
)


@dataclass(frozen=True)
class Way:
    """Describe how a training is distributed: sizes of the axes, ZeRO stage, schedule, kind of memory, and tiles.

    All ranks that ``pipeline``, ``tensor`` and ``context`` do not use are for replicas. ``tiles`` are those of the
    tensor and of the context axis.
    """

    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    memory: str = "shared"
    tiles: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        axes = ((n, getattr(self, n)) for n in ("pipeline", "tensor", "context"))
        split = ", ".join(f"{name} {size}" for name, size in axes if size > 1)
        return f"{split or 'replicas'}, {self.schedule}, ZeRO-{self.zero}, {self.memory}, {shown(self.tiles)}"


def shown(tiles: tuple[int, int]) -> str:
    """Return numbers of tiles as a text."""
    return "whole layers" if tiles == (1, 1) else f"{tiles[0]} x {tiles[1]} tiles"


#: How it is cut, a case, and how it is distributed.
Training = tuple[str, Case, Way]


def schedules(stages: int, blocks: int) -> list[str]:
    """Return the schedules that have a block for every chunk."""
    if stages == 1:
        return ["1f1b"]
    return [name for name in SCHEDULES if len(chunk_stages(name, stages, VIRTUAL[name])) <= blocks]


def in_stages(size: int) -> Iterator[Training]:
    """Yield the trainings on ``size`` ranks of whole layers: pipelines and replicas."""
    number = 0
    for stages in (s for s in range(2, size + 1) if size % s == 0):
        for schedule in schedules(stages, 16):
            for zero in range(4):
                for case in IN_STAGES:
                    number += 1
                    memory = tuple(MEMORIES)[(number + zero) % len(MEMORIES)]
                    yield "stages", case, Way(stages, zero=zero, schedule=schedule, memory=memory)


def tiles_of(case: Case, tensor: int, context: int, number: int) -> tuple[int, int]:
    """Return the numbers of tiles of a training: 8 of the axis that is split; 8 of both for one case, else 4.

    Where nothing is split, ``number`` chooses.
    """
    if not case.has_sequences:
        return 8, 1
    if tensor == context == 1:
        return ((8, 1), (1, 8), (2, 2))[number % 3]
    if tensor > 1 < context:
        return (8, 8) if case is IN_TILES[0] else (4, 4)
    return (8, 1) if tensor > 1 else (1, 8)


def in_tiles(size: int) -> Iterator[Training]:
    """Yield the trainings on ``size`` ranks in tiles: on every factorization, those of half of the cases that fit."""
    every = product(range(1, size + 1), POWERS, POWERS)
    shapes = [(p, t, c) for p, t, c in every if size % (p * t * c) == 0]
    for number, (stages, tensor, context) in enumerate(shapes):
        for place, case in enumerate(IN_TILES[number % 2 :: 2]):
            if stages > blocks_of(case.model) or (context > 1 and not case.has_sequences):
                continue
            fitting = schedules(stages, blocks_of(case.model))
            memory = tuple(MEMORIES)[(number // 2 + place) % len(MEMORIES)]
            used = {"schedule": fitting[(number + place) % len(fitting)], "memory": memory}
            tiles = tiles_of(case, tensor, context, number // 2 + place)
            yield "tiles", case, Way(stages, tensor, context, (number + place) % 4, **used, tiles=tiles)


def within_rounding(size: int) -> Iterator[Training]:
    """Yield the trainings on ``size`` ranks that agree with one process within rounding."""
    for place, case in enumerate(ROUNDED):
        talks = "talking" in case.model
        shapes = ((1, 2, 1), (1, 1, 2), (1, 2, 2)) if talks else ((1, 3, 1), (2, 3, 1), (1, 3, 2))
        for number, (stages, tensor, context) in enumerate(shapes):
            if size % (stages * tensor * context) == 0 and size < 8 and (case.has_sequences or context == 1):
                memory = tuple(MEMORIES)[(number + place) % len(MEMORIES)]
                tiles = (8, 1) if context == 1 else (8, 2)
                way = Way(stages, tensor, context, (number + place) % 4, memory=memory, tiles=tiles)
                yield "rounding", case, way


def trainings(size: int, kinds: Sequence[str] = KINDS) -> list[Training]:
    """Return the trainings of some kinds on ``size`` ranks."""
    every = (*in_stages(size), *in_tiles(size), *within_rounding(size))
    return [training for training in every if training[0] in kinds]


def values(training: Training) -> tuple[Any, ...]:
    """Return the values that a training combines."""
    kind, case, way = training
    return kind, case.name, way.pipeline, way.tensor, way.context, way.zero, way.schedule, way.memory, way.tiles


def train(training: Training, comm: Any, args: argparse.Namespace) -> Row:
    """Train, twice if the result agrees only within rounding. Collective over ``comm``.

    The keys of the row are "kind", "case", "way" (text), "tiles", "sha256" (of the parameters and the losses),
    "losses", "repeats" (whether the second training had the same bits) and "says" (what ``metadata()`` says of them).
    """
    kind, case, way = training
    found = [_train(case, comm, way, args.steps) for _ in range(1 + (kind == "rounding"))]
    row = {"kind": kind, "case": case.name, "way": str(way), "tiles": way.tiles}
    return row | found[0] | {"repeats": found[0] == found[-1]}


@contextmanager
def placed(case: Case, comm: Any, way: Way) -> Iterator[mz.HybridShardedModel]:
    """Yield the model of a case, distributed as ``way`` says, until the end of a ``with`` block. Collective."""
    tiles = dict(zip(("tensor", "context"), way.tiles, strict=True)) if way.tiles != (1, 1) else None
    with (
        mz.ShardingConfig(comm=comm, tiles=tiles, **case.settings(way.memory)) as config,
        mz.HybridShardedModel(
            case.wrapped(),
            config,
            way.pipeline,
            way.tensor,
            zero_stage=way.zero,
            schedule=way.schedule,
            virtual_stages=VIRTUAL[way.schedule],
            context_parallel_size=way.context,
            optimizer=case.update(),
        ) as model,
    ):
        yield model


def _train(case: Case, comm: Any, way: Way, steps: int) -> Row:
    """Train one case, distributed as ``way`` says; return what must be that of one process. Collective."""
    with placed(case, comm, way) as model:
        losses = [model.train(x, y) for x, y in case.batches(steps, model.batch_group.rank, model.batch_group.size)]
        digest = sha256(model.parameters_sha256().encode() + np.array(losses).tobytes()).hexdigest()
        return {"sha256": digest, "losses": losses, "says": model.metadata().exactness}


def matrix(kinds: Sequence[str] = KINDS) -> Matrix:
    """Return the matrix of the trainings of some kinds."""
    only = ("--only", ",".join(kinds))
    return Matrix(__file__, lambda size: trainings(size, kinds), values, train, only)


MATRIX = matrix()


@cache
def alone(name: str, tiles: tuple[int, int], steps: int) -> Row:
    """Train a case in one process with so many tiles; return a row. Not collective."""
    (case,) = {case for case in IN_STAGES + IN_TILES + ROUNDED if case.name == name}
    return _train(case, "self", Way(tiles=tiles), steps)


def problem(row: Row, steps: int) -> str:
    """Return what is wrong with a training; "" if nothing is."""
    expected = alone(row["case"], tuple(row["tiles"]), steps)
    rounds = row["kind"] == "rounding"
    if row["says"].startswith("within rounding") != rounds:
        return f"metadata() says: {row['says']}"
    if not rounds:
        return "" if (row["sha256"], row["losses"]) == (expected["sha256"], expected["losses"]) else row["sha256"]
    if not row["repeats"]:
        return "other bits when repeated"
    (case,) = {case for case in ROUNDED if case.name == row["case"]}
    difference = largest_difference(row, steps)
    return "" if difference <= BOUNDS[case.dtype] else f"losses differ by {difference:.1e}"


def largest_difference(row: Row, steps: int) -> float:
    """Return the largest difference of a loss from that of one process, relative to it."""
    wanted = np.array(alone(row["case"], tuple(row["tiles"]), steps)["losses"])
    return float(np.max(np.abs(row["losses"] - wanted) / np.abs(wanted)))


def report(rows: Sequence[Row], steps: int) -> int:
    """Print a line for each case and number of tiles, and for each training that is wrong; return how many are."""
    lines, wrong = [], []
    for kind, name, tiles in dict.fromkeys((row["kind"], row["case"], tuple(row["tiles"])) for row in rows):
        mine = [row for row in rows if (row["kind"], row["case"], tuple(row["tiles"])) == (kind, name, tiles)]
        bad = [(row, told) for row in mine if (told := problem(row, steps))]
        told = alone(name, tiles, steps)["sha256"]
        if kind == "rounding":
            told = f"{max(largest_difference(row, steps) for row in mine):.1e}"
        lines.append((kind, name, shown(tiles), len(mine), len(mine) - len(bad), told))
        wrong += [f"{name}, {row['where']}, {row['way']}: {text}" for row, text in bad]
    print("\n" + aligned(("", "case", "tiles", "runs", "right", ""), lines, left=3))
    print("right have the sha256 of one process; what rounds, its largest difference of a loss", *wrong, sep="\n")
    return len(wrong)


def main() -> None:
    """Run all jobs, and compare their results with one process; exit with status 1 if some are wrong."""
    parser = arguments(__doc__, "2,4,6,8", "")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of trainings (default: %(default)s)")
    args = parser.parse_args()
    chosen = matrix([kind for kind in KINDS if kind in args.only.split(",")])
    if chosen.is_worker(args):
        return
    rows = [row for found in run(chosen, args) for row in found]
    wrong = report(rows, args.steps)
    counts = {kind: sum(row["kind"] == kind for row in rows) for kind in KINDS}
    told = f"{counts['stages']} trainings in stages, {counts['tiles']} in tiles, {counts['rounding']} pairs that round"
    if wrong:
        sys.exit(f"\n{told}, of {args.steps} steps: {wrong} are wrong")
    print(f"\n{told}, of {args.steps} steps: all as they must be")


if __name__ == "__main__":
    main()
