"""Train where shared memory is short, or give models up; run by test_memory.py under mpiexec."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpizero as mz

SAMPLES = 32


def trained(comm, strategy, hidden, micro, reserve=False):
    """Two steps; the hash of the parameters and how many ranks share memory."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(SAMPLES, width)).astype(np.float32) for width in (32, 2))
    wrapped = mz.nn.MLP(32, [hidden], 2, task="regression")
    rank, size = (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
    mine = slice(SAMPLES * rank // size, SAMPLES * (rank + 1) // size)
    with mz.ShardingConfig(comm=comm, micro_batch=micro) as config:
        model, _ = mz.distribute(wrapped, mz.AdamW(lr=1e-3), strategy=strategy, config=config)
        with model:
            if reserve:
                model.reserve(SAMPLES)
            for _ in range(2):
                model.train(x[mine], y[mine])
            return model.parameters_sha256(), model.metadata().ranks_per_node


def strategies(world, hidden):
    """Print the hash and the sharing ranks of every strategy, with grains of the library's size and of one sample."""
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        for micro in (None, 1):
            digest, sharing = trained(world, strategy, hidden, micro, reserve=strategy == "zero1")
            if world.rank == 0:
                print(strategy, micro, digest, sharing, flush=True)


def two_groups(world, hidden):
    """Let two halves of a node take memory at the same moment, for which there is room once."""
    half = world.Split(world.rank % 2)
    for _ in range(3):
        world.Barrier()
        digest, sharing = trained(half, "ddp", hidden, 1)
        if half.rank == 0:
            sys.stdout.write(f"half {world.rank % 2} {digest} {sharing}\n")
            sys.stdout.flush()


def files():
    """The shared memory in use, beside this rank's threads of communicators."""
    status = os.statvfs("/dev/shm")
    return (status.f_blocks - status.f_bfree) * status.f_frsize


if __name__ == "__main__":
    {"strategies": strategies, "two_groups": two_groups}[sys.argv[1]](MPI.COMM_WORLD, int(sys.argv[2]))
    Path(f"done-{MPI.COMM_WORLD.rank}").touch()
