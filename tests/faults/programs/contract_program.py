"""One rank of a job whose ranks call different collectives, started by test_contract.py under mpiexec.

``contract_program.py KIND FOLDER``; the last rank is the odd one.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.comm.mpi import MpiCommunicator
from mpizero.guard.watchdog import Watchdog
from tests.faults.started import FOLDER, KIND, note_fault

COMM = MpiCommunicator(MPI.COMM_WORLD)
#: Whether this rank is the one that differs; a name with an underscore is not compared between ranks.
_ODD = COMM.rank == COMM.size - 1


def reduce_all(names):
    for name in names:
        COMM.allreduce(np.ones(3), tag=name)


def order():
    reduce_all(["b", "a"] if _ODD else ["a", "b"])
    COMM.barrier("after")
    time.sleep(100)  # the numbers are wrong already, and nobody waits


def order_at_the_end():
    reduce_all(["b", "a"] if _ODD else ["a", "b"])


def order_of_a_set():
    """Iterate over a set of names: each process has its own hash seed."""
    names = [f"layer{i}.weight" for i in range(12)]
    reduce_all(sorted(names, key=lambda name: hash(name) ^ COMM.rank))
    order()


def operation():
    if _ODD:
        COMM.broadcast(np.ones(3), 0)
    else:
        COMM.allreduce(np.ones(3))


def count():
    COMM.allgather(np.ones(3 + _ODD), np.empty((3 + _ODD) * COMM.size), tag="x")
    time.sleep(100)


def dtype():
    COMM.allreduce(np.ones(3, np.float32 if _ODD else np.float64), tag="x")
    time.sleep(100)


def extra():
    if _ODD:
        COMM.barrier("one more")
    reduce_all(["a", "b"])


def missing():
    with Watchdog(COMM, timeout=1.0):
        if _ODD:
            time.sleep(100)
        reduce_all(["a"])


def blocks():
    """Expect more of rank 0 than it sends: no MPI says a word."""
    counts = np.ones(COMM.size, np.int64)
    expected = counts.copy()
    expected[0] += _ODD
    COMM.alltoallv(np.ones(COMM.size), counts, np.empty(expected.sum()), expected, tag="turned")
    time.sleep(100)


def model():
    return mz.FunctionModel({"w": np.ones(6)}, lambda p, batch: (1.0, {"w": np.ones(6)}, float(len(batch[0]))))


def engine():
    """Call in another order before a training step; no weight may change."""
    config = mz.ShardingConfig(comm=COMM)
    with mz.DDPModel(model(), config) as sharded:
        optimizer = mz.DDPOptimizer(mz.SGD(lr=0.1), config)
        optimizer.set_model(sharded)
        x = np.ones((2 * COMM.size, 1))
        sharded.train(x, x)
        before = sharded._engine.store.values.tobytes()
        reduce_all(["b", "a"] if _ODD else ["a", "b"])
        note_fault()
        try:
            sharded.train(x, x)
        finally:
            (FOLDER / f"same-{COMM.rank}-{sharded._engine.store.values.tobytes() == before}").touch()


def leave_while_the_others_train():
    """End well on one rank amid a step that the others compute for long."""

    def loss(parameters, batch):
        if sharded.last_step is not None:
            if _ODD:
                note_fault()
                sys.exit(0)
            time.sleep(100)
        return 1.0, {"w": np.ones(6)}, float(len(batch[0]))

    config = mz.ShardingConfig(comm=COMM)
    sharded = mz.DDPModel(mz.FunctionModel({"w": np.ones(6)}, loss), config)
    x = np.ones((2 * COMM.size, 1))
    sharded.train(x, x)
    sharded.train(x, x)


def another_operation():
    """Ask for another operation of a model on the odd rank; of four ranks each two have a model."""
    comm = MPI.COMM_WORLD.Split(COMM.rank % (COMM.size // 2), COMM.rank)
    x, y = np.ones((4, 6), np.float32), np.zeros(4, np.int64)
    sharded = mz.distribute(mz.nn.MLP(6, (7, 5), 3), mz.AdamW(lr=0.01), config=mz.ShardingConfig(comm=comm))
    for _ in range(2):
        sharded.train(x, y)
    note_fault()
    name = sys.argv[3] if _ODD else sys.argv[4]
    getattr(sharded, name)(*(() if name == "check_integrity" else (x, y)))
    sharded.train(x, y)


COMM.barrier("start")
if KIND not in ("engine", "leave_while_the_others_train", "another_operation"):
    note_fault()
globals()[KIND]()
