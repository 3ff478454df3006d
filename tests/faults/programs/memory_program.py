"""Train where shared memory is short, or give models up; run by test_memory.py under mpiexec."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack

import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.guard.guard import current

SAMPLES = 32


def trained(comm, strategy, hidden, micro, reserve=False):
    """Two steps; the hash of the parameters and how many ranks share memory."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(SAMPLES, width)).astype(np.float32) for width in (32, 2))
    wrapped = mz.nn.MLP(32, [hidden], 2, task="regression")
    rank, size = (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
    mine = slice(SAMPLES * rank // size, SAMPLES * (rank + 1) // size)
    with mz.ShardingConfig(comm=comm, micro_batch=micro) as config:
        model = mz.distribute(wrapped, mz.AdamW(lr=1e-3), strategy=strategy, config=config)
        with model:
            if reserve:
                model.reserve(SAMPLES)
            for _ in range(2):
                model.train(x[mine], y[mine])
            return model.parameters_sha256(), model.metadata().ranks_per_node


def strategies(world, hidden):
    """Print the hash and the sharing ranks of every strategy, with grains of one sample and of the library's size."""
    for strategy, micro in (("ddp", 1), ("zero1", 1), ("zero2", 1), ("zero3", 1), ("ddp", None), ("zero3", None)):
        digest, sharing = trained(world, strategy, hidden, micro, reserve=strategy == "zero1")
        if world.rank == 0:
            print(strategy, micro, digest, sharing, flush=True)


def two_groups(world, hidden):
    """Let two halves of a node take memory at the same moment, for which there is room once."""
    half = world.Split(world.rank % 2)
    for _ in range(2):
        world.Barrier()
        digest, sharing = trained(half, "ddp", hidden, 1)
        if half.rank == 0:
            sys.stdout.write(f"half {world.rank % 2} {digest} {sharing}\n")
            sys.stdout.flush()


def in_use():
    """Return the bytes of /dev/shm in use, and the communicators of this process."""
    status = os.statvfs("/dev/shm")
    return (status.f_blocks - status.f_bfree) * status.f_frsize, len(current().register.live)


def trials(world, hidden):
    """Give 12 models up, each by an error that all ranks raise, on one configuration and on one for each."""
    kept = mz.ShardingConfig(comm=world, micro_batch=1)
    rng = np.random.default_rng(world.rank)
    x, y = (rng.normal(size=(2, width)).astype(np.float32) for width in (32, 2))
    used = []
    for trial in range(12):
        try:
            with ExitStack() as stack:
                own = kept if trial % 2 else stack.enter_context(mz.ShardingConfig(comm=world, micro_batch=1))
                strategy = ("ddp", "zero3")[trial % 2]
                wrapped = mz.nn.MLP(32, [hidden], 2, task="regression")
                model = mz.distribute(wrapped, mz.AdamW(lr=1e-3), strategy=strategy, config=own)
                stack.enter_context(model)
                model.train(x, y)
                raise FloatingPointError("diverged")
        except FloatingPointError:
            world.Barrier()
            used.append(in_use())
            world.Barrier()
    kept.close()
    if world.rank == 0:
        print(*(f"{size} {communicators}" for size, communicators in used), in_use()[0], sep="\n", flush=True)


def alone(world, hidden):
    """Leave a model by an error on rank 1 only."""
    config = mz.ShardingConfig(comm=world)
    with mz.DDPModel(mz.nn.MLP(32, [hidden], 2, task="regression"), config) as model:
        model.train(np.ones((2, 32), np.float32), np.ones((2, 2), np.float32))
        if world.rank == 1:
            raise FloatingPointError("diverged here")
        model.train(np.ones((2, 32), np.float32), np.ones((2, 2), np.float32))


MODES = {"strategies": strategies, "two_groups": two_groups, "trials": trials, "alone": alone}

if __name__ == "__main__":
    MODES[sys.argv[1]](MPI.COMM_WORLD, int(sys.argv[3]))
