"""Fit by SciPy's L-BFGS-B, within bounds: mpiexec -n 4 python lbfgs.py."""

import numpy as np
from mpi4py import MPI
from scipy.optimize import minimize

import mpizero as mz
from mpizero.testing import check_model


def loss_and_grad(parameters, batch):
    """Sum of three decays, whose rates and sizes are sought."""
    t, y = batch
    size, rate = parameters["size"], parameters["rate"]
    decay = np.exp(-np.outer(t, rate))
    error = decay @ size - y
    return (
        float((error**2).sum()),
        {"size": 2 * error @ decay, "rate": -2 * (error * t) @ (decay * size)},
        float(len(t)),
    )


rng = np.random.default_rng(0)
t = rng.uniform(0, 4, 960)
y = np.exp(-np.outer(t, [0.3, 1.5, 6.0])) @ [1.0, 2.0, 3.0] + rng.normal(0, 0.01, t.size)
function = mz.FunctionModel({"size": np.ones(3), "rate": np.array([0.1, 1.0, 10.0])}, loss_and_grad)
check_model(function, t[:8], y[:8], comm=MPI.COMM_WORLD)

config = mz.Config(micro_batch=20)
with mz.distribute(function, None, "ddp", config=config) as model:
    mine = slice(*(len(t) * r // model.world_size for r in (model.rank, model.rank + 1)))

    def of(vector):
        """Evaluate at a vector of all parameters; what it returns is the same on all ranks, so all ask alike."""
        model.set_parameters(vector)
        found = model.compute_gradients(t[mine], y[mine])
        return found.loss, found.values

    bounds = [(0, None)] * 3 + [(1e-3, 20)] * 3  # sizes, then rates: the order of the parameters
    start = model.gather_full_parameters()
    found = minimize(of, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 300})
    model.set_parameters(found.x)
    rates = ", ".join(f"{rate:.3f}" for rate in np.sort(model.named_parameters()["rate"]))
    digest, ranks = model.parameters_sha256(), model.world_size
    if model.rank == 0:
        print(f"rates {rates} after {found.nfev} evaluations, loss {found.fun:.3e}, {digest[:16]} on {ranks} ranks")
