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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness.matrix import MEMORIES, Matrix, Row, arguments, one_hash, run

import mpizero as mz

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
SEQUENCE, VOCABULARY = 12, 48


@dataclass(frozen=True)
class Case:
    """Describe a training whose result must not depend on ranks, strategy and memory.

    ``batch`` and ``grain`` are the numbers of samples in the global batch and in a grain. A ``grain`` of None is the
    default, which depends on ``longest``, the most tokens that the model takes.
    """

    name: str
    batch: int = 12
    grain: int | None = 2
    longest: int = SEQUENCE
    clip: float | None = None
    dropout: float = 0.0
    tied: bool = False
    optimizer: str = "adamw"

    def wrapped(self) -> Any:
        """Return the model of this case: a small GPT of 2 blocks."""
        return mz.nn.GPT(
            dim=28,
            layers=2,
            heads=2,
            sequence=self.longest,
            vocabulary=VOCABULARY,
            dropout=self.dropout,
            tied=self.tied,
        )

    def update(self) -> Any:
        """Return the optimizer of this case."""
        return {"adamw": mz.AdamW(lr=3e-3), "lamb": mz.LAMB(lr=1e-2), "sgd": mz.SGD(lr=0.1, momentum=0.9)}[
            self.optimizer
        ]

    def batches(self, steps: int, rank: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield rank ``rank``'s part of each of ``steps`` global batches; ranks may have different numbers of samples.

        ``size`` is the number of ranks.
        """
        rng = np.random.default_rng(7)
        for _ in range(steps):
            text = rng.integers(0, VOCABULARY, (self.batch, SEQUENCE + 1))
            text[:, 1::2] = (text[:, 0::2][:, : text[:, 1::2].shape[1]] * 3 + 1) % VOCABULARY  # something to learn
            mine = text[rank * self.batch // size : (rank + 1) * self.batch // size]
            yield mine[:, :-1], mine[:, 1:]


CASES = (
    Case("6 grains"),
    Case("11 grains, last short", batch=32, grain=3),
    Case("clipping", clip=0.5),
    Case("dropout", dropout=0.2),
    Case("tied embeddings", tied=True),
    Case("LAMB", optimizer="lamb"),
    Case("SGD, momentum", optimizer="sgd"),
    Case("24 default grains", batch=24, grain=None, longest=1024),
    Case("all of it", batch=32, grain=3, clip=0.5, dropout=0.2, tied=True, optimizer="lamb"),
)


#: A case, a strategy and a kind of memory.
Training = tuple[Case, str, str]


def trainings(size: int) -> list[Training]:
    """Return all trainings, the same on every number of ranks."""
    return list(itertools.product(CASES, STRATEGIES, MEMORIES))


def values(training: Training) -> tuple[str, str, str]:
    """Return the values that a training combines."""
    case, strategy, memory = training
    return case.name, strategy, memory


def train(training: Training, comm: Any, args: argparse.Namespace) -> Row:
    """Train, collective over ``comm``; return a row with the keys "case", "strategy", "memory" and "sha256"."""
    case, strategy, memory = training
    with mz.ShardingConfig(comm=comm, micro_batch=case.grain, clip=case.clip, **MEMORIES[memory]) as config:
        model = mz.distribute(case.wrapped(), case.update(), strategy=strategy, config=config)
        with model:
            for x, y in case.batches(args.steps, model.rank, model.world_size):
                model.train(x, y)
            digest = model.parameters_sha256()
    return {"case": case.name, "strategy": strategy, "memory": memory, "sha256": digest}


MATRIX = Matrix(__file__, trainings, values, train)


def main() -> None:
    """Run all jobs, and compare the hashes; exit with status 1 if hashes of one case differ."""
    args = arguments(__doc__, "1,2,3,4,8", "1,3,4").parse_args()
    if not MATRIX.is_worker(args):
        one_hash([row for rows in run(MATRIX, args) for row in rows], "case", ("where", "strategy", "memory"))


if __name__ == "__main__":
    main()
