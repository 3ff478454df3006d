"""Find the conductivity of a rod, with an adjoint in Fortran that writes gradients in place.

sh heat.sh python && mpiexec -n 4 python heat_in_fortran.py
"""

import argparse

import heat  # made by f2py from heat.f90
import numpy as np

import mpizero as mz
from mpizero.testing import check_model

CELLS, STEPS = 40, 60


def loss_and_grad(parameters, batch, gradients):
    """Call Fortran: samples are rows here, columns of a Fortran array there, in the same memory."""
    start, measured = (values.T for values in batch)
    loss = heat.misfit(STEPS, parameters["conductivity"], start, measured, gradients["conductivity"])
    return loss, float(len(batch[0]))


def predict(parameters, start):
    """Return the temperatures at the end; by another program, in NumPy."""
    end = start.copy()
    for _ in range(STEPS):
        flux = parameters["conductivity"][1:-1] * np.diff(end)
        end[:, :-1] += flux
        end[:, 1:] -= flux
    return end


def loss(parameters, batch):
    """Return the loss without a gradient, for evaluate."""
    return float(((predict(parameters, batch[0]) - batch[1]) ** 2).sum()), float(len(batch[0]))


def measured(samples=96, seed=0):
    """Return temperatures at the start and at the end, and the conductivity of the rod."""
    rng = np.random.default_rng(seed)
    conductivity = 0.1 + 0.3 * rng.random(CELLS + 1)
    start = rng.normal(size=(samples, CELLS))
    return start, predict({"conductivity": conductivity}, start), conductivity


def data():
    """Return the samples alone."""
    return measured()[:2]


def make():
    """Return the model: a rod of one conductivity."""
    start = {"conductivity": np.full(CELLS + 1, 0.2)}
    return mz.FunctionModel(start, loss_and_grad, loss=loss, predict=predict, in_place=True)


def main():
    """Read the options, train, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="number of steps (default 200)")
    parser.add_argument("--strategy", default="zero1", help="ddp, zero1, zero2 or zero3 (default zero1)")
    parser.add_argument("--private", action="store_true", help="share no memory between the ranks of a node")
    parser.add_argument("--run", default="run-heat", help="folder of metrics and checkpoints (default run-heat)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    options = parser.parse_args()
    start, end, conductivity = measured()
    check_model(make(), start[:4], end[:4])
    with (
        mz.Mesh(share_node_memory=not options.private) as mesh,
        mz.Trainer(
            make(),
            mz.data.ArraySource(start, end),
            mz.Config(micro_batch=4),
            mesh=mesh,
            optimizer=mz.Adam(lr=1e-2),
            strategy=options.strategy,
            steps=options.steps,
            global_batch=32,
            run=options.run,
            progress=False,
        ) as trainer,
    ):
        result = trainer.resume() if options.resume else trainer.fit()
        found = trainer.model.named_parameters()["conductivity"]
        if trainer.rank == 0:
            off = np.abs(found - conductivity)[1:-1].max()
            told = f"loss {result.loss:.1e}, farthest conductivity off by {off:.4f}"
            print(f"{told}, {result.parameters_sha256} on {result.ranks} ranks")


if __name__ == "__main__":
    main()
