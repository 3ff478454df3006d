"""Train a surrogate of a heat solver while the solver runs: in one MPI job, or in two jobs with a folder between.

mpiexec -n 4 python heat.py                      # ranks 0 and 1 train, ranks 2 and 3 solve
python heat.py --spool run/spool --solve a &     # a solver of its own, which may be killed and started again
mpiexec -n 2 python heat.py --spool run/spool    # trains on what it writes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

import mpizero as mz

N, STEPS = 12, 20  #: points of the grid in a direction, time steps of a simulation
LIKE = (np.zeros(4, np.float32), np.zeros(N * N, np.float32))


def solved(seed: int, simulations: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield samples: boundary temperatures of a square, and its temperatures after some time."""
    random = np.random.default_rng(seed)
    for _ in range(simulations):
        edges = random.random(4, np.float32)
        u = np.zeros((N, N), np.float32)
        u[0], u[-1], u[:, 0], u[:, -1] = edges
        for _ in range(STEPS):
            inside = u[1:-1, 1:-1]
            u[1:-1, 1:-1] = inside + 0.2 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * inside)
        yield edges, u.ravel()


def train(source: mz.data.OnlineSource, mesh: mz.Mesh, run: str) -> None:
    """Train until the solvers have ended, and print the result on rank 0."""
    config = mz.Config(micro_batch=4)
    model, optimizer = mz.nn.MLP(4, (32,), N * N, task="regression"), mz.AdamW(1e-2)
    settings = {"optimizer": optimizer, "steps": 10_000, "global_batch": 16, "progress": False}
    with source, mz.Trainer(model, source, config, mesh=mesh, run=run, **settings) as trainer:
        result = trainer.fit()
    if mesh.rank == 0:
        print(
            f"{result.steps} steps, loss {result.losses[0]:.4f} -> {result.loss:.4f}, {result.parameters_sha256[:16]}"
        )


def main() -> None:
    """Run the part that the arguments and the rank ask for."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--spool", help="a folder between two jobs")
    options.add_argument("--solve", metavar="NAME", help="with --spool: solve, as the producer of this name")
    options.add_argument("--simulations", type=int, default=200, help="of each solver")
    options.add_argument("--run", default="run", help="the run's folder")
    given = options.parse_args()
    if given.solve:
        with mz.data.SpoolProducer(given.spool, given.solve, like=LIKE) as producer:
            for x, y in solved(0, given.simulations):
                if not producer.put(x, y):
                    return
    elif given.spool:
        with mz.Mesh() as mesh:
            train(mz.data.spool_source(mesh.communicator, given.spool, like=LIKE, producers=1), mesh, given.run)
    else:
        with mz.data.OnlineJob(trainers=2, like=LIKE) as job:
            if job.trains:
                with mz.Mesh(job.group) as mesh:
                    train(job.source(), mesh, given.run)
            else:
                with job.producer() as producer:
                    for x, y in solved(job.group.rank, given.simulations):
                        if not producer.put(x, y):
                            break


if __name__ == "__main__":
    main()
