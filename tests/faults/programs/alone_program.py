"""One rank makes a model alone, started by test_liveness.py under mpiexec: ``alone_program.py KIND FOLDER TIMEOUT``."""

from __future__ import annotations

import os
import sys
import time

from tests.faults.started import KIND

TIMEOUT = float(sys.argv[3])

if KIND == "before_mpi":
    import mpizero as mz

    if next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ) != "0":
        sys.exit(0)
    mz.ShardingConfig(timeout=TIMEOUT).communicator.barrier()

from mpi4py import MPI  # noqa: E402

RANK = MPI.COMM_WORLD.Get_rank()
MEMBERS = (0, 2) if KIND == "part" else range(MPI.COMM_WORLD.Get_size())

if KIND == "stranger" and RANK:
    raise ValueError("planted")  # before it has anything of mpizero
if KIND == "late" and not RANK:
    time.sleep(1.0)  # the others are at their end before it has anything of mpizero

import mpizero as mz  # noqa: E402

settings = {"hidden": (4,), "outputs": 2}
layers = mz.nn.MLP(3, **settings)


def work():
    while True:
        time.sleep(0.1)


def main():
    if KIND in ("part", "barrier"):
        MPI.COMM_WORLD.Barrier()  # so far they may be slow
    if KIND == "part":
        pair = MPI.COMM_WORLD.Split(RANK % 2, RANK)
    if RANK == 0:
        config = mz.ShardingConfig(comm=pair if KIND == "part" else None, timeout=TIMEOUT)
        mz.ZeRO2Model(layers, config)
    elif KIND == "part" and RANK == 2:
        work()
    elif KIND == "barrier":
        MPI.COMM_WORLD.Barrier()
    elif KIND == "exit":
        sys.exit(0)


main()
