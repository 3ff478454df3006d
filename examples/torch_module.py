"""Train a PyTorch network: mpiexec -n 4 python torch_module.py."""

import numpy as np
from torch import nn

import mpizero as mz
from mpizero.adapters.torch import TorchModel


def make():
    """Make the network; every rank calls this with the same seed."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1)),
        nn.Linear(4 * 8 * 8, 2),
    )


loss = nn.CrossEntropyLoss(reduction="sum")
network = TorchModel(make, loss, blocks=["0", "1", "2"])

rng = np.random.default_rng(0)  # stripes: are they upright?
y = rng.integers(0, 2, 256)
wave = np.sin(np.arange(8) + rng.uniform(0, 6, (256, 1)))
x = np.where(y[:, None, None] == 1, wave[:, None, :], wave[:, :, None])[:, None].astype(np.float32)
x += rng.normal(0, 0.3, x.shape).astype(np.float32)

config = mz.Config(micro_batch=4)
with mz.distribute(network, mz.AdamW(lr=3e-3), "fsdp", config=config) as model:
    source = mz.data.ArraySource(x, y)
    for part in mz.data.batches(source, model, global_batch=32, seed=0, steps=30):
        mean = model.train(*part)
    scored = model.evaluate(x[model.rank :: model.world_size], y[model.rank :: model.world_size])
    digest, ranks = model.parameters_sha256(), model.world_size
    if model.rank == 0:
        print(f"loss {mean:.4f}, accuracy {scored.accuracy:.3f}, {digest[:16]} on {ranks} ranks")
