"""One rank of a job whose last rank is asked for another operation than the others, by test_calls.py.

``operations_program.py ODD USUAL STRATEGY MEMORY FOLDER``; what an operation is, :data:`CALLS` says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpizero as mz

ODD, USUAL, STRATEGY = sys.argv[1:4]
MEMORY, FOLDER = json.loads(sys.argv[4]), Path(sys.argv[5])
(FOLDER / f"pid-{os.getpid()}").touch()
WORLD = MPI.COMM_WORLD
HALVES = MEMORY.pop("halves", False)
COMM = WORLD.Split(WORLD.rank % 2, WORLD.rank) if HALVES else WORLD
CONFIG = mz.ShardingConfig(comm=COMM, learning_rate=0.1, minimum_parameter_group_size=1, **MEMORY)
X = np.random.default_rng(COMM.rank).normal(size=(4, 6)).astype(np.float32)
Y = np.zeros(4, np.int64)
CALLS = {
    "train": lambda model: model.train(X, Y),
    "compute_gradients": lambda model: model.compute_gradients(X, Y),
    "evaluate": lambda model: model.evaluate(X, Y),
    "check_integrity": lambda model: model.check_integrity(),
    "parameters_sha256": lambda model: model.parameters_sha256(),
    "save_model": lambda model: model.save_model(FOLDER / "saved"),
    "close": lambda model: model.close(),
    "ShardingConfig.close": lambda model: CONFIG.close(),
    "set_parameters": lambda model: model.set_parameters(np.full(model.parameter_count, int(WORLD.rank == 2))),
}


def main() -> None:
    model = mz.distribute(
        mz.nn.MLP(features=6, hidden=(7, 5), outputs=3), mz.AdamW(lr=0.01), strategy=STRATEGY, config=CONFIG
    )
    for _ in range(2):
        model.train(X, Y)
    odd = WORLD.rank == WORLD.size - 1
    (FOLDER / f"fault-{time.time()}").touch()
    CALLS[ODD if odd else USUAL](model)
    model.train(X, Y)


if __name__ == "__main__":
    main()
