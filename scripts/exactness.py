"""Show that the number of ranks, the strategy and the kind of memory do not change one bit of the result.

Trains small GPTs on every combination of

* 1, 2, 3, 4 and 8 ranks under mpiexec, a second MPI, and threads of one process,
* DDP, ZeRO-1, ZeRO-2, ZeRO-3,
* node-shared windows, private memory, and simulated nodes of two ranks,

in several cases: clipping, dropout, tied embeddings, LAMB, numbers of grains that are not multiples of the number of
ranks. All trainings of a case must end with the same SHA-256 of all parameters. For each number of ranks one job is
started, which runs its trainings one after the other. With ``--covering`` a few trainings run in which every pair of
case, MPI, number of ranks, strategy and kind of memory occurs.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from harness.matrix import MEMORIES, STRATEGIES, Matrix, Row, arguments, one_hash, run
from harness.models import Case

import mpizero as mz

PLAIN = "GPT without dropout"
CASES = (
    Case("6 grains", PLAIN, 12, 2),
    Case("11 grains, last short", PLAIN, 32, 3),
    Case("clipping", PLAIN, 12, 2, clip=0.5),
    Case("dropout", "untied GPT", 12, 2),
    Case("tied embeddings", "tied GPT without dropout", 12, 2),
    Case("LAMB", PLAIN, 12, 2, "lamb"),
    Case("SGD, momentum", PLAIN, 12, 2, "sgd"),
    Case("24 default grains", "GPT for 1024 tokens", 24, None),
    Case("all of it", "GPT", 32, 3, "lamb", 0.5),
)
#: A case, a strategy and a kind of memory.
Training = tuple[Case, str, str]


def trainings(size: int) -> list[Training]:
    """Return all trainings, the same on every number of ranks."""
    return list(itertools.product(CASES, STRATEGIES, MEMORIES))


def train(training: Training, comm: Any, args: argparse.Namespace) -> Row:
    """Train, collective over ``comm``; return a row with the keys "case", "strategy", "memory" and "sha256"."""
    case, strategy, memory = training
    with (
        mz.ShardingConfig(comm=comm, **case.settings(memory)) as config,
        mz.distribute(case.wrapped(), case.update(), strategy=strategy, config=config) as model,
    ):
        for x, y in case.batches(args.steps, model.rank, model.world_size):
            model.train(x, y)
        digest = model.parameters_sha256()
    return {"case": case.name, "strategy": strategy, "memory": memory, "sha256": digest}


MATRIX = Matrix(__file__, trainings, lambda training: (training[0].name, *training[1:]), train)


def main() -> None:
    """Run all jobs, and compare the hashes; exit with status 1 if hashes of one case differ."""
    args = arguments(__doc__, "1,2,3,4,8", "1,3,4").parse_args()
    if not MATRIX.is_worker(args):
        one_hash([row for rows in run(MATRIX, args) for row in rows], "case", ("where", "strategy", "memory"))


if __name__ == "__main__":
    main()
