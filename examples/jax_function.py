"""Train a function of JAX: mpiexec -n 4 python jax_function.py."""

import jax
import jax.numpy as jnp
import numpy as np

import mpizero as mz
from mpizero.adapters.jax import JaxModel  # imported before JAX computes anything: it gets one thread then
from mpizero.testing import check_model

jax.config.update("jax_enable_x64", True)


def predict(parameters, x):
    """Return the output of a small network."""
    hidden = jnp.tanh(x @ parameters["hidden"]["kernel"] + parameters["hidden"]["bias"])
    return hidden @ parameters["output"]


def loss(parameters, x, y):
    """Return the sum of squared errors."""
    return jnp.sum((predict(parameters, x) - y) ** 2)


rng = np.random.default_rng(0)
hidden = {"kernel": rng.normal(0, 1, (3, 16)), "bias": np.zeros(16)}
function = JaxModel({"hidden": hidden, "output": rng.normal(0, 0.25, (16, 1))}, loss, predict=predict)
x = rng.normal(size=(512, 3))
y = np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:]

check_model(function, x[:8], y[:8])
config = mz.Config(micro_batch=8)
with mz.distribute(function, mz.Adam(lr=1e-2), "zero1", config=config) as model:
    for part in mz.data.batches(mz.data.ArraySource(x, y), model, global_batch=64, seed=0, steps=40):
        loss_of_step = model.train(*part)
    digest, ranks = model.parameters_sha256(), model.world_size
    if model.rank == 0:
        print(f"loss {loss_of_step:.4f}, {digest[:16]} on {ranks} ranks")
