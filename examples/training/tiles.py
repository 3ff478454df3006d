"""Train a GPT in tiles on one process and on a tensor or context group, and compare the hashes of the parameters.

python tiles.py                          # one process, then 4 ranks as threads
mpiexec -n 2 python tiles.py --tiles 8   # one process, then 2 MPI ranks that compute 4 tiles each
"""

import argparse
import sys

import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.testing import run_in_threads


def train(comm, size, args):
    """Train on ``size`` ranks, which are one group; return the last loss, the hash, and what results are equal to."""
    gpt = mz.nn.GPT(dim=32, layers=2, heads=8, sequence=32, vocabulary=64, dropout=0.1)
    x, y = np.random.default_rng(0).integers(0, 64, (2, args.steps, 8, 32))  # the same samples on all ranks of a group
    config = mz.Config(micro_batch=2, clip=1.0, tiles={args.axis: args.tiles})
    with (
        mz.Mesh(comm, **{args.axis: size}) as mesh,
        mz.distribute(gpt, mz.AdamW(lr=1e-2), "zero1", mesh=mesh, config=config) as model,
    ):
        losses = [model.train(*batch) for batch in zip(x, y, strict=True)]
        return losses[-1], model.parameters_sha256(), model.metadata().exactness


def main():
    """Train on one process and on several ranks; exit with status 1 if the hashes differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=4, help="number of tiles, a power of two up to 8 (default 4)")
    parser.add_argument("--axis", choices=["tensor", "context"], default="tensor", help="what the group splits")
    parser.add_argument("--steps", type=int, default=20, help="number of steps (default 20)")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    size = args.tiles if world.size == 1 else world.size
    alone = train("self", 1, args)
    group = train(world, size, args) if world.size > 1 else run_in_threads(size, lambda c: train(c, size, args))[0]
    if world.rank == 0:
        for ranks, (loss, sha256, exactness) in ((1, alone), (size, group)):
            print(f"{args.axis} {ranks}: loss {loss:.6f}, {sha256[:16]}, {exactness}")
    if alone != group:
        sys.exit("the results differ")


if __name__ == "__main__":
    main()
