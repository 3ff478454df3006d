"""Fit complex parameters, held as pairs of real numbers: mpiexec -n 4 python complex_pairs.py."""

import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.testing import check_model


def as_complex(pairs):
    """View pairs (..., 2) as complex numbers (...)."""
    return np.ascontiguousarray(pairs).view(np.complex128)[..., 0]


def as_pairs(numbers):
    """View complex numbers (...) as pairs (..., 2)."""
    return np.ascontiguousarray(numbers)[..., None].view(np.float64)


def loss_and_grad(parameters, batch):
    """Fit a filter: |signals @ response - received|^2."""
    signals, received = (as_complex(part) for part in batch)
    error = signals @ as_complex(parameters["response"]) - received
    gradient = 2 * signals.conj().T @ error  # dL/dRe + i dL/dIm
    return float((np.abs(error) ** 2).sum()), {"response": as_pairs(gradient)}, float(len(signals))


rng = np.random.default_rng(0)
signals = rng.normal(size=(320, 5)) + 1j * rng.normal(size=(320, 5))
response = rng.normal(size=5) + 1j * rng.normal(size=5)
x, y = as_pairs(signals), as_pairs(signals @ response)
function = mz.FunctionModel({"response": np.zeros((5, 2))}, loss_and_grad)
check_model(function, x[:8], y[:8], comm=MPI.COMM_WORLD)

config = mz.ShardingConfig(comm=MPI.COMM_WORLD, micro_batch=8)
with mz.ZeRO1Model(function, config, optimizer=mz.SGD(lr=0.1)) as model:
    for part in mz.data.batches(mz.data.ArraySource(x, y), model, global_batch=32, seed=0, steps=100):
        loss = model.train(*part)
    error = np.abs(as_complex(model.named_parameters()["response"]) - response).max()
    digest, ranks = model.parameters_sha256(), model.world_size
    if model.rank == 0:
        print(f"off by {error:.1e}, {digest[:16]} on {ranks} ranks")
