"""Show that models of other libraries and languages have one hash on every layout, and resume on any other.

A model is a row of ``MODELS``: a function of a file in examples/models, which returns the model, beside a function
``data`` there. What must be compiled is compiled first, by the command in the file's docstring. Each is trained on
every combination of

* 1, 2, 3, 4 and 8 ranks under mpiexec, a second MPI, and threads of one process,
* DDP, ZeRO-1, ZeRO-2, ZeRO-3, and models of blocks in 2 pipeline stages with every schedule, where ranks are even,
* node-shared windows, private memory, simulated nodes of two ranks, and of one,

and once more in three jobs, each with another number of ranks and strategy, which go on from the checkpoint of the one
before. All trainings of a model must end with the same SHA-256 of all parameters. With ``--covering`` a few trainings
run in which every pair of model, MPI, number of ranks, strategy and kind of memory occurs, and the resumed ones.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from harness.jobs import Mpi
from harness.matrix import MEMORIES as USUAL_MEMORIES
from harness.matrix import STRATEGIES, Matrix, Place, Row, arguments, one_hash, run

import mpizero as mz
from mpizero.layout import SCHEDULES

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "models"
MEMORIES = {**USUAL_MEMORIES, "nodes of 1": {"ranks_per_node": 1}}
BATCH, GRAIN = 24, 2
#: Ranks and strategy of the jobs that go on from each other's checkpoint.
RESUMED = ((4, "zero3"), (3, "zero1"), (1, "ddp"))


@dataclass(frozen=True)
class OwnModel:
    """Describe a model: a function in a file of examples/models, and whether it is a model of blocks."""

    name: str
    file: str
    function: str
    blocks: bool = False

    @property
    def module(self) -> Any:
        """The file as a module."""
        if str(FOLDER) not in sys.path:
            sys.path.insert(0, str(FOLDER))
        return importlib.import_module(Path(self.file).stem)

    def strategies(self, ranks: int) -> Iterator[str]:
        """Yield the strategies, and the schedules with 2 stages, that it can be trained with."""
        yield from STRATEGIES
        if self.blocks and ranks % 2 == 0:
            yield from SCHEDULES


MODELS = (
    OwnModel("JAX MLP", "jax_mlp.py", "as_function"),
    OwnModel("JAX MLP, blocks", "jax_mlp.py", "by_blocks", blocks=True),
    OwnModel("PyTorch CNN", "torch_cnn.py", "whole"),
    OwnModel("PyTorch CNN, blocks", "torch_cnn.py", "by_blocks", blocks=True),
    OwnModel("PyTorch transformer, blocks", "torch_transformer.py", "by_blocks", blocks=True),
    OwnModel("PyTorch transformer, kernels", "torch_transformer.py", "with_own_kernels", blocks=True),
    OwnModel("NumPy: residual", "residual_in_numpy.py", "make", blocks=True),
    OwnModel("C: waves", "wave_in_c.py", "make"),
    OwnModel("Fortran: heat", "heat_in_fortran.py", "make"),
    OwnModel("Numba: particles", "particles_in_numba.py", "make"),
)


def build(file: str) -> None:
    """Compile what a program needs, by the command before ``mpiexec`` in its docstring. Not collective."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    for command in re.findall(r"^(.+) && mpiexec .*$", text, re.MULTILINE):
        words = [sys.executable if word == "python" else word for word in command.split()]
        subprocess.run(words, cwd=FOLDER, check=True, capture_output=True, timeout=300)


@cache
def wrapped(model: OwnModel) -> Any:
    """Return the model; one object for all trainings of a process, so that it is compiled once."""
    return getattr(model.module, model.function)()


def sharded(model: OwnModel, config: mz.ShardingConfig, strategy: str) -> Any:
    """Return the sharded model with AdamW. ``strategy`` is a strategy, or a schedule of 2 stages. Collective."""
    optimizer = mz.AdamW(lr=3e-3)
    if strategy in STRATEGIES:
        return mz.distribute(wrapped(model), optimizer, strategy=strategy, config=config)
    return mz.HybridShardedModel(
        wrapped(model),
        config,
        pipeline_parallel_size=2,
        zero_stage=1 + SCHEDULES.index(strategy) % 3,
        schedule=strategy,
        optimizer=optimizer,
        **({"virtual_stages": 2} if strategy == "interleaved" else {}),
    )


#: A model, a strategy or schedule, and a kind of memory.
Training = tuple[OwnModel, str, str]


def trainings(models: Sequence[OwnModel], size: int) -> list[Training]:
    """Return all trainings of models on ``size`` ranks; nodes of one and two ranks are simulated on 2 and 4 ranks."""
    return [
        (model, strategy, memory)
        for model in models
        for strategy, memory in itertools.product(model.strategies(size), MEMORIES)
        if not memory.startswith("nodes") or size in (2, 4)
    ]


def values(training: Training) -> tuple[str, str, str]:
    """Return the values that a training combines."""
    model, strategy, memory = training
    return model.name, strategy, memory


def train(training: Training, comm: Any, args: argparse.Namespace) -> Row:
    """Train, collective over ``comm``; return a row with the keys "model", "strategy", "memory" and "sha256"."""
    model, strategy, memory = training
    third = args.steps
    steps, folder = range(third * len(RESUMED)), None
    if args.resumed is not None:
        strategy, folder = RESUMED[args.resumed][1], str(Path(args.folder) / str(MODELS.index(model)))
        steps = range(args.resumed * third, (args.resumed + 1) * third)
    digest = _train(model, comm, strategy, memory, steps, folder)
    return {"model": model.name, "strategy": strategy, "memory": memory, "sha256": digest}


def _train(model: OwnModel, comm: Any, strategy: str, memory: str, steps: range, folder: str | None) -> str:
    """Train ``steps``, which go on from a checkpoint in ``folder`` and leave one there; return the SHA-256."""
    x, y = model.module.data()
    stages = 1 if strategy in STRATEGIES else 2
    with (
        mz.ShardingConfig(comm=comm, micro_batch=GRAIN, **MEMORIES[memory]) as config,
        sharded(model, config, strategy) as made,
    ):
        if folder is not None and steps.start:
            made.load_model(folder)
        replicas = made.world_size // stages
        replica = made.rank % replicas
        for step in steps:
            first = step * BATCH % (len(x) - BATCH)
            part = slice(first + BATCH * replica // replicas, first + BATCH * (replica + 1) // replicas)
            made.train(x[part], y[part])
        if folder is not None:
            made.save_model(folder)
        return str(made.parameters_sha256())


def chosen(args: argparse.Namespace) -> list[OwnModel]:
    """Return the models that the option ``--models`` names, all of them without it."""
    found = [model for model in MODELS if args.models is None or model.name in args.models.split(";")]
    return found or sys.exit(f"--models: there are {'; '.join(model.name for model in MODELS)}")


def resumed(matrix: Matrix, args: argparse.Namespace) -> list[Row]:
    """Train all models in jobs that go on from each other, and return the rows of the last one.

    With ``--covering`` ranks are threads, which need not import and compile everything again.
    """
    with tempfile.TemporaryDirectory() as folder:
        for number, (ranks, _) in enumerate(RESUMED):
            part = argparse.Namespace(**{**vars(args), "resumed": number, "folder": folder})
            place = Place("", ranks, None if args.covering else Mpi(args.mpiexec, args.python))
            rows = matrix.at(place, part, None, "--resumed", str(number), "--folder", folder)
    where = " -> ".join(str(ranks) for ranks, _ in RESUMED)
    return [row | {"where": where, "memory": "resumed"} for row in rows]


def _resumed_matrix(models: Sequence[OwnModel], args: argparse.Namespace) -> Matrix:
    """Return one training for each model; its strategy comes from ``RESUMED``."""
    more = ("--models", args.models) if args.models else ()
    return Matrix(__file__, lambda size: [(model, "", "shared") for model in models], values, train, more)


def main() -> None:
    """Run all jobs, and compare the hashes; exit with status 1 if those of one model differ."""
    parser = arguments(__doc__, "1,2,3,4,8", "1,3", steps=2)
    parser.add_argument("--models", help="names of models, separated by semicolons (default: all)")
    parser.add_argument("--resumed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    models = chosen(args)
    parts = _resumed_matrix(models, args)
    matrix = replace(parts, trainings=lambda size: trainings(models, size))
    if (matrix if args.resumed is None else parts).is_worker(args):
        return
    for file in dict.fromkeys(model.file for model in models):
        build(file)
    rows = [row for found in run(matrix, args) for row in found]
    one_hash(rows + resumed(parts, args), "model", ("where", "strategy", "memory"))


if __name__ == "__main__":
    main()
