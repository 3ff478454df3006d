"""Train a PyTorch network: mpiexec -n 4 python torch_by_hand.py."""

import numpy as np
import torch
from mpi4py import MPI
from torch.func import functional_call

import mpizero as mz
from mpizero.testing import check_model

torch.set_num_threads(1)  # ranks share the cores; another number of threads may give other bits
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3, padding=1),
    torch.nn.GroupNorm(2, 4),  # batch norm would let the samples of a batch see each other
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(4 * 8 * 8, 2),
)


def loss_and_grad(parameters, batch):
    """Return the sum of the losses, its gradient and the number of samples."""
    x, y = (torch.tensor(value) for value in batch)  # copies: the arrays of mpizero cannot be written to
    held = {name: torch.tensor(value, requires_grad=True) for name, value in parameters.items()}
    loss = torch.nn.functional.cross_entropy(functional_call(net, held, (x,)), y, reduction="sum")
    gradients = torch.autograd.grad(loss, list(held.values()))
    return loss.item(), dict(zip(held, (g.numpy() for g in gradients), strict=True)), float(len(x))


def predict(parameters, x):
    """Return a score for each class."""
    with torch.no_grad():
        held = {name: torch.tensor(value) for name, value in parameters.items()}
        return functional_call(net, held, (torch.tensor(x),)).numpy()


start = {name: value.detach().numpy().copy() for name, value in net.named_parameters()}
function = mz.FunctionModel(start, loss_and_grad, predict=predict)

rng = np.random.default_rng(0)  # stripes: are they upright?
y = rng.integers(0, 2, 256)
wave = np.sin(np.arange(8) + rng.uniform(0, 6, (256, 1)))
x = np.where(y[:, None, None] == 1, wave[:, None, :], wave[:, :, None])[:, None].astype(np.float32)
x += rng.normal(0, 0.3, x.shape).astype(np.float32)

check_model(function, x[:8], y[:8], comm=MPI.COMM_WORLD)
config = mz.ShardingConfig(comm=MPI.COMM_WORLD, micro_batch=4)
with mz.ZeRO2Model(function, config, optimizer=mz.AdamW(lr=1e-2)) as model:
    source = mz.data.ArraySource(x, y)
    for part in mz.data.batches(source, model, global_batch=32, seed=0, steps=30):
        loss = model.train(*part)
    digest, ranks = model.parameters_sha256(), model.world_size
    if model.rank == 0:
        print(f"loss {loss:.4f}, {digest[:16]} on {ranks} ranks")
