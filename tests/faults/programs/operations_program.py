"""One rank of a job whose last rank is asked for another operation than the others, by test_contract.py.

``operations_program.py ODD FOLDER USUAL STRATEGY MEMORY``; what an operation is, :data:`CALLS` says.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from mpi4py import MPI

import mpizero as mz
from tests.faults.started import KIND, note_fault

USUAL, STRATEGY, MEMORY = sys.argv[3], sys.argv[4], json.loads(sys.argv[5])
WORLD = MPI.COMM_WORLD
HALVES = MEMORY.pop("halves", False)
COMM = WORLD.Split(WORLD.rank % 2, WORLD.rank) if HALVES else WORLD
CONFIG = mz.ShardingConfig(comm=COMM, learning_rate=0.1, minimum_parameter_group_size=1, **MEMORY)
X = np.random.default_rng(COMM.rank).normal(size=(4, 6)).astype(np.float32)
Y = np.zeros(4, np.int64)
CALLS = {
    "train": lambda model: model.train(X, Y),
    "compute_gradients": lambda model: model.compute_gradients(X, Y),
    "check_integrity": lambda model: model.check_integrity(),
}


def main() -> None:
    model = mz.distribute(
        mz.nn.MLP(features=6, hidden=(7, 5), outputs=3), mz.AdamW(lr=0.01), strategy=STRATEGY, config=CONFIG
    )
    for _ in range(2):
        model.train(X, Y)
    odd = WORLD.rank == WORLD.size - 1
    note_fault()
    CALLS[KIND if odd else USUAL](model)
    model.train(X, Y)


if __name__ == "__main__":
    main()
