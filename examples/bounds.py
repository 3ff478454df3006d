"""Keep parameters within bounds under any optimizer: mpiexec -n 4 python bounds.py."""

import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.testing import check_model


def within(low, high):
    """Map all numbers to those between two bounds; returns the map with its derivative, and its inverse."""

    def value(free):
        share = 1 / (1 + np.exp(-free))
        return low + (high - low) * share, (high - low) * share * (1 - share)

    def inverse(inside):
        share = (np.asarray(inside, float) - low) / (high - low)
        return np.log(share / (1 - share))

    return value, inverse


def bounded(parameters, loss_and_grad, maps):
    """Return a model of the same function whose parameters named in ``maps`` never leave their bounds."""

    def free_loss_and_grad(free, batch):
        mapped = {name: maps[name][0](value) for name, value in free.items() if name in maps}
        loss, gradients, weight = loss_and_grad({**free, **{n: value for n, (value, _) in mapped.items()}}, batch)
        return loss, {**gradients, **{n: gradients[n] * slope for n, (_, slope) in mapped.items()}}, weight

    start = {name: maps[name][1](value) if name in maps else value for name, value in parameters.items()}
    return mz.FunctionModel(start, free_loss_and_grad)


def loss_and_grad(parameters, batch):
    """Fit a share of light and a scale: y = scale * x ** power."""
    x, y = batch
    scale, power = parameters["scale"], parameters["power"]
    model = scale * x**power
    error = model - y
    gradients = {
        "scale": (2 * error * x**power).sum(keepdims=True),
        "power": (2 * error * model * np.log(x)).sum(keepdims=True),
    }
    return float((error**2).sum()), gradients, float(len(x))


rng = np.random.default_rng(0)
x = rng.uniform(0.1, 3, 400)
y = 2 * x**1.3 + rng.normal(0, 0.1, x.size)  # the best power lies beyond its bound
maps = {"power": within(0.0, 1.2)}
function = bounded({"scale": np.ones(1), "power": np.full(1, 0.5)}, loss_and_grad, maps)
check_model(function, x[:8], y[:8], comm=MPI.COMM_WORLD)

config = mz.Config(micro_batch=10)
with mz.distribute(function, mz.Adam(lr=2e-1), "zero1", config=config) as model:
    for part in mz.data.batches(mz.data.ArraySource(x, y), model, global_batch=40, seed=0, steps=300):
        loss = model.train(*part)
    found = model.named_parameters()
    digest, ranks = model.parameters_sha256(), model.world_size
    if model.rank == 0:
        power = maps["power"][0](found["power"])[0][0]
        print(f"scale {found['scale'][0]:.3f}, power {power:.4f}, {digest[:16]} on {ranks} ranks")
