"""Show that the ranks which share the space of fields change no bit.

Trains U-Nets on fields of 37 x 53 and of 37 x 53 x 29 positions, in float32 and float64: plain, with clipping and an
average of the parameters, with dropout, and with activation checkpointing; and Fourier neural operators, by the
relative H1 norm with weights of latitudes. Space is cut in all ways that the numbers of ranks allow, up to 3 x 2 and
2 x 2 x 2, with every strategy, in one and two pipeline stages; further ranks are replicas. Shared memory, private
memory and simulated nodes take turns. All trainings of a case must end with the SHA-256 (of all parameters, of the
losses and of an evaluation) that one process gets.

For each number of ranks one job is started, which runs its trainings one after the other. With ``--covering`` a few
trainings run in which every pair of values that occurs at all occurs once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from harness.matrix import MEMORIES, STRATEGIES, Matrix, Row, arguments, one_hash, run

import mpizero as mz

SPACES = {2: (37, 53), 3: (37, 53, 29)}
SAMPLES = 3
#: The cut of space by the number of axes and of ranks.
CUTS: Mapping[int, Mapping[int, tuple[int, ...]]] = {
    2: {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 6: (3, 2), 8: (4, 2)},
    3: {1: (1, 1, 1), 2: (2, 1, 1), 3: (1, 1, 3), 4: (1, 2, 2), 6: (3, 2, 1), 8: (2, 2, 2)},
}


@dataclass(frozen=True)
class Case:
    """Hold what a training computes: fields, model, settings."""

    axes: int
    dtype: str
    kind: str
    model: Mapping[str, Any] = field(default_factory=dict, compare=False)
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{' x '.join(map(str, SPACES[self.axes]))}, {self.dtype}, {self.kind}"

    def net(self) -> mz.nn.UNet | mz.nn.FNO:
        """Make the model."""
        if self.kind == "fourier":
            rows = tuple(np.sin(np.pi * (np.arange(SPACES[self.axes][0]) + 0.5) / SPACES[self.axes][0]))
            loss = mz.nn.FieldLoss(mz.nn.H1Loss(lengths=10.0), weights=rows)
            return mz.nn.FNO(1, 2, self.axes, dtype=self.dtype, width=4, loss=loss, **self.model)
        chosen = {"width": 4, "groups": 2, "levels": 3, **self.model}
        return mz.nn.UNet(1, 2, axes=self.axes, dtype=self.dtype, **chosen)


KINDS = {
    "plain": Case(2, "", "plain", {"padding": "reflect"}),
    "clip, average": Case(2, "", "", {"refine": "transposed"}, {"clip": 0.5, "ema": 0.9}),
    "dropout": Case(2, "", "", {"dropout": 0.2, "refine": "linear"}),
    "checkpointed": Case(2, "", "", {"activation_checkpointing": True, "dropout": 0.1}),
    "fourier": Case(2, "", "", {"modes": 7, "layers": 2, "padding": 0.1}),
}
CASES = [
    Case(axes, dtype, kind, made.model, made.config)
    for axes in SPACES
    for dtype in ("float32", "float64")
    for kind, made in KINDS.items()
]


@dataclass(frozen=True)
class Way:
    """Describe how a training is distributed; ranks that cut and stages do not use are replicas."""

    cut: tuple[int, ...]
    pipeline: int = 1
    strategy: str = "zero2"
    memory: str = "shared"

    def __str__(self) -> str:
        stages = f", {self.pipeline} stages" if self.pipeline > 1 else ""
        return f"{' x '.join(map(str, self.cut))}{stages}, {self.strategy}, {self.memory}"


Training = tuple[Case, Way]


def trainings(size: int) -> list[Training]:
    """Return the trainings on ``size`` ranks."""
    return list(_trainings(size))


def _trainings(size: int) -> Iterator[Training]:
    number = 0
    for case in CASES:
        for ranks, cut in CUTS[case.axes].items():
            for stages in (1, 2):
                if size % (ranks * stages) or size // (ranks * stages) > 2:
                    continue
                for strategy in STRATEGIES:
                    number += 1
                    yield case, Way(cut, stages, strategy, tuple(MEMORIES)[number % len(MEMORIES)])


def values(training: Training) -> tuple[Any, ...]:
    """Return the values that a training combines."""
    case, way = training
    return case.axes, case.dtype, case.kind, way.cut, way.pipeline, way.strategy, way.memory


def train(training: Training, comm: Any, args: argparse.Namespace) -> Row:
    """Train, and return a row with the case, how it was distributed, and the sha256. Collective over ``comm``."""
    case, way = training
    return {"case": str(case), "way": str(way), "sha256": _train(case, comm, way, args.steps)}


def _train(case: Case, comm: Any, way: Way, steps: int) -> str:
    space, rng = SPACES[case.axes], np.random.default_rng(5)
    config = mz.Config(micro_batch=1, **case.config)
    cut = way.cut if comm != "self" else ()
    mesh = mz.Mesh(comm, domain=cut, pipeline=way.pipeline, **MEMORIES[way.memory])
    with mesh as ranks, mz.distribute(case.net(), mz.AdamW(lr=0.003), way.strategy, mesh=ranks, config=config) as model:
        at, replicas = ranks.axes.coordinates(ranks.rank).data, ranks.axes.data
        mine = (slice(SAMPLES * at // replicas, SAMPLES * (at + 1) // replicas), *(ranks.slab(space) if cut else ()))
        losses = []
        for _ in range(steps):
            x = rng.normal(size=(SAMPLES, *space, 1)).astype(case.dtype)
            moved = np.take(x, range(-1, space[0] - 1), 1), np.take(x, range(-2, space[1] - 2), 2)
            y = np.concatenate(moved, axis=-1)
            losses.append(model.train(x[mine], y[mine]))
        evaluated = model.evaluate(x[mine], y[mine], ema="ema" in case.config)
        told = [*losses, evaluated.loss_sum, evaluated.weight]
        return sha256(model.parameters_sha256().encode() + np.array(told).tobytes()).hexdigest()


MATRIX = Matrix(__file__, trainings, values, train)


def main() -> None:
    """Run all jobs, and compare their hashes with that of one process; exit with status 1 if some differ."""
    args = arguments(__doc__, "2,3,4,6,8", "1", steps=20).parse_args()
    if MATRIX.is_worker(args):
        return
    rows = [row for found in run(MATRIX, args) for row in found]
    ran = {row["case"] for row in rows}
    for case in (case for case in CASES if str(case) in ran):
        digest = _train(case, "self", Way((1,) * case.axes), args.steps)
        rows.append({"case": str(case), "where": "one process", "way": "alone", "sha256": digest})
    one_hash(rows, "case", ("where", "way"))


if __name__ == "__main__":
    main()
