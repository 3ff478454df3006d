"""Fit with a compiled adjoint.

gfortran -O2 -shared -fPIC -o libadjoint.so adjoint.f90 && mpiexec -n 4 python fortran_by_hand.py
"""

import ctypes
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.testing import check_model

CELLS, STEPS = 12, 40
misfit = ctypes.CDLL(str(Path("libadjoint.so").resolve())).misfit
misfit.restype = None
misfit.argtypes = [ctypes.c_int] * 3 + [np.ctypeslib.ndpointer(np.float64, flags="C")] * 5


def called(conductivity, start, measured):
    """Call the library: samples are rows here, columns of a Fortran array there."""
    loss, gradient = np.empty(1), np.empty(CELLS + 1)
    misfit(CELLS, len(start), STEPS, conductivity, start, measured, loss, gradient)
    return float(loss[0]), gradient


def loss_and_grad(parameters, batch):
    """Return the sum of the losses, its gradient and the number of samples."""
    loss, gradient = called(parameters["conductivity"], *batch)
    return loss, {"conductivity": gradient}, float(len(batch[0]))


rng = np.random.default_rng(0)
x = rng.normal(size=(96, CELLS))  # start temperatures, and what a rod with another conductivity makes of them
true = 0.1 + 0.3 * rng.random(CELLS + 1)
end = x.copy()
for _ in range(STEPS):
    flux = true[1:-1] * np.diff(end)
    end[:, :-1] += flux
    end[:, 1:] -= flux

function = mz.FunctionModel({"conductivity": np.full(CELLS + 1, 0.2)}, loss_and_grad)
check_model(function, x[:4], end[:4], comm=MPI.COMM_WORLD)
config = mz.ShardingConfig(comm=MPI.COMM_WORLD, micro_batch=4)
with mz.ZeRO1Model(function, config, optimizer=mz.Adam(lr=1e-2)) as model:
    for part in mz.data.batches(mz.data.ArraySource(x, end), model, global_batch=32, seed=0, steps=60):
        loss = model.train(*part)
    error = np.abs(model.named_parameters()["conductivity"] - true)[1:-1].max()
    digest, ranks = model.parameters_sha256(), model.world_size
    if model.rank == 0:
        print(f"loss {loss:.2e}, farthest conductivity off by {error:.3f}, {digest[:16]} on {ranks} ranks")
