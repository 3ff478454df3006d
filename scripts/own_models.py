"""Show that models of other libraries and languages have one hash on every layout, and resume on any other.

A model is a row of ``MODELS``: a function of a file in examples/models, which returns the model, beside a function
``data`` there. What must be compiled is compiled first, by the command in the file's docstring. Each is trained on
every combination of

* 1, 2, 3, 4 and 8 ranks under mpiexec, a second MPI, and threads of one process,
* DDP, ZeRO-1, ZeRO-2, ZeRO-3, and models of blocks in 2 pipeline stages with every schedule, where ranks are even,
* node-shared windows, private memory, simulated nodes of two ranks, and of one,

and once more in three jobs, each with another number of ranks and strategy, which go on from the checkpoint of the one
before. All trainings of a model must end with the same SHA-256 of all parameters.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import exactness

import mpizero as mz
from mpizero.layout import SCHEDULES

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "models"
MEMORIES = {**exactness.MEMORIES, "nodes of 1": {"ranks_per_node": 1}}
BATCH, GRAIN = 24, 2
#: Ranks and strategy of the jobs that go on from each other's checkpoint.
RESUMED = ((4, "zero3"), (3, "zero1"), (1, "ddp"))
Row = dict[str, Any]


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
        return _module(self.file)

    def strategies(self, ranks: int) -> Iterator[str]:
        """Yield the strategies, and the schedules with 2 stages, that it can be trained with."""
        yield from exactness.STRATEGIES
        if self.blocks and ranks % 2 == 0:
            yield from SCHEDULES


MODELS = (
    OwnModel("JAX MLP", "jax_mlp.py", "as_function"),
    OwnModel("JAX MLP, blocks", "jax_mlp.py", "by_blocks", blocks=True),
    OwnModel("PyTorch CNN", "torch_cnn.py", "whole"),
    OwnModel("PyTorch CNN, blocks", "torch_cnn.py", "by_blocks", blocks=True),
    OwnModel("PyTorch transformer, blocks", "torch_transformer.py", "by_blocks", blocks=True),
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
def _module(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"own_models_{Path(file).stem}", FOLDER / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def wrapped(model: OwnModel) -> Any:
    """Return the model; one object for all trainings of a process, so that it is compiled once."""
    return getattr(model.module, model.function)()


def sharded(model: OwnModel, config: mz.ShardingConfig, strategy: str) -> Any:
    """Return the sharded model with AdamW. ``strategy`` is a strategy, or a schedule of 2 stages. Collective."""
    optimizer = mz.AdamW(lr=3e-3)
    if strategy in exactness.STRATEGIES:
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


def train(model: OwnModel, comm: Any, strategy: str, memory: str, steps: range, folder: str | None = None) -> str:
    """Train ``steps``, which go on from the checkpoint in ``folder`` and leave one there, if that is given. Collective.

    Returns
    -------
    str
        SHA-256 of the parameters after the last step.
    """
    x, y = model.module.data()
    stages = 1 if strategy in exactness.STRATEGIES else 2
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


def everything(comm: Any, args: argparse.Namespace, where: str) -> list[Row]:
    """Run all trainings on the ranks of ``comm``, or one part of a resumed one; return a row for each."""
    if args.resumed is not None:
        number, third = args.resumed, args.steps
        model, strategy = chosen(args)[0], RESUMED[number][1]
        steps = range(number * third, (number + 1) * third)
        digest = train(model, comm, strategy, "shared", steps, args.folder)
        return [{"model": model.name, "where": where, "strategy": strategy, "memory": "resumed", "sha256": digest}]
    return [
        {"model": model.name, "where": where, "strategy": strategy, "memory": memory}
        | {"sha256": train(model, comm, strategy, memory, range(args.steps * len(RESUMED)))}
        for model in chosen(args)
        for strategy, memory in itertools.product(model.strategies(comm.size), MEMORIES)
        if memory == "shared" or not memory.startswith("nodes") or comm.size in (2, 4)
    ]


def chosen(args: argparse.Namespace) -> list[OwnModel]:
    """Return the models that the option ``--models`` names, all of them without it."""
    found = [model for model in MODELS if args.models is None or model.name in args.models.split(";")]
    return found or sys.exit(f"--models: there are {'; '.join(model.name for model in MODELS)}")


def resumed(args: argparse.Namespace) -> Iterator[Row]:
    """Train each model in jobs that go on from each other, and yield the last row."""
    for model in chosen(args):
        with tempfile.TemporaryDirectory() as folder:
            for number, (ranks, _) in enumerate(RESUMED):
                more = ["--resumed", str(number), "--folder", f"{folder}/checkpoint", "--models", model.name]
                (row,) = exactness.launch(args.mpiexec, args.python, ranks, args, __file__, *more)
            yield row | {"where": " -> ".join(str(ranks) for ranks, _ in RESUMED)}


def report(rows: list[Row]) -> bool:
    """Print a line for each model, and for each training whose hash differs; tell whether there is one hash each."""
    equal = True
    print(f"\n{'model':28s} {'runs':>5s}  sha256 of the parameters")
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        usual, count = collections.Counter(row["sha256"] for row in mine).most_common(1)[0]
        print(f"{name:28s} {len(mine):5d}  {usual if count == len(mine) else 'DIFFERENT HASHES'}")
        for row in mine:
            if row["sha256"] != usual:
                equal = False
                print(f"    {row['where']}, {row['strategy']}, {row['memory']}: {row['sha256']}")
    return equal


def main() -> None:
    """Run all jobs, and compare the hashes; exit with status 1 if those of one model differ."""
    parser = exactness.arguments(__doc__, "1,2,3,4,8", "1,3")
    parser.set_defaults(steps=2)
    parser.add_argument("--models", help="names of models, separated by semicolons (default: all)")
    parser.add_argument("--resumed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        exactness.worker(args, everything)
        return

    for file in dict.fromkeys(model.file for model in chosen(args)):
        build(file)
    more = ["--models", args.models] if args.models else []
    rows = []
    for found, seconds in exactness.runs(args, everything, __file__, *more):
        rows += found
        print(f"{found[0]['where']}: {len(found)} trainings, {seconds:.1f} s", flush=True)
    rows += resumed(args)
    if not report(rows):
        sys.exit("the hashes differ")
    print(f"\n{len(rows)} trainings of {args.steps * len(RESUMED)} steps: one hash for each model")


if __name__ == "__main__":
    main()
