"""Train a function of JAX: mpiexec -n 4 python jax_by_hand.py."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.testing import check_model

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")


def loss_sum(parameters, x, y):
    """Return the sum of squared errors of a small network."""
    hidden = jnp.tanh(x @ parameters["hidden"] + parameters["bias"])
    return jnp.sum((hidden @ parameters["output"] - y) ** 2)


value_and_grad = jax.jit(jax.value_and_grad(loss_sum))  # compiled once for each number of samples


def loss_and_grad(parameters, batch):
    """Return the sum of the losses, its gradient and the number of samples."""
    x, y = batch
    loss, gradients = value_and_grad(dict(parameters), x, y)
    return float(loss), {name: np.asarray(g) for name, g in gradients.items()}, float(len(x))


rng = np.random.default_rng(0)
start = {"hidden": rng.normal(0, 1, (3, 16)), "bias": np.zeros(16), "output": rng.normal(0, 0.25, (16, 1))}
function = mz.FunctionModel(start, loss_and_grad)
x = rng.normal(size=(512, 3))
y = np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:]

check_model(function, x[:8], y[:8], comm=MPI.COMM_WORLD)
config = mz.ShardingConfig(comm=MPI.COMM_WORLD, micro_batch=8)
with mz.ZeRO1Model(function, config, optimizer=mz.Adam(lr=1e-2)) as model:
    for part in mz.data.batches(mz.data.ArraySource(x, y), model, global_batch=64, seed=0, steps=40):
        loss = model.train(*part)
    digest, ranks = model.parameters_sha256(), model.world_size
    if model.rank == 0:
        print(f"loss {loss:.4f}, {digest[:16]} on {ranks} ranks")
