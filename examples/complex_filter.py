"""Fit complex parameters: mpiexec -n 4 python complex_filter.py."""

import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.testing import check_model


def loss_and_grad(parameters, batch):
    """Fit a filter and the gain of a receiver: |(signals @ response) * gain - received|^2."""
    signals, received = batch
    filtered = signals @ parameters["response"]
    error = filtered * parameters["gain"] - received
    gradients = {
        "response": 2 * parameters["gain"] * (signals.conj().T @ error),  # dL/dRe + i dL/dIm
        "gain": np.asarray(2 * (error * filtered.conj()).real.sum()),  # of a real parameter
    }
    return float((np.abs(error) ** 2).sum()), gradients, float(len(signals))


rng = np.random.default_rng(0)
x = rng.normal(size=(320, 5)) + 1j * rng.normal(size=(320, 5))
response = rng.normal(size=5) + 1j * rng.normal(size=5)
y = x @ response
function = mz.FunctionModel({"response": np.zeros(5, complex), "gain": np.ones(())}, loss_and_grad)
check_model(function, x[:8], y[:8], comm=MPI.COMM_WORLD)

config = mz.Config(micro_batch=8)
with mz.distribute(function, mz.SGD(lr=0.05), "zero1", config=config) as model:
    for part in mz.data.batches(mz.data.ArraySource(x, y), model, global_batch=32, seed=0, steps=100):
        loss = model.train(*part)
    found = model.named_parameters()
    error = np.abs(found["response"] * found["gain"] - response).max()
    digest, ranks = model.parameters_sha256(), model.world_size
    if model.rank == 0:
        print(f"off by {error:.1e}, {digest[:16]} on {ranks} ranks")
