"""Complex parameters descend by PyTorch's gradients as they do in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz

torch = pytest.importorskip("torch")
START = np.random.default_rng(0).normal(size=(2, 6, 4)) @ np.ones((4, 4))


def data():
    rng = np.random.default_rng(1)
    return rng.normal(size=(40, 6)) + 1j * rng.normal(size=(40, 6)), rng.normal(size=(40, 4))


def by_torch(w, b, batch):
    """A loss that is no function of |w| alone, of a complex matrix and a real vector."""
    x, y = (torch.tensor(value) for value in batch)
    z = x @ w
    return ((torch.abs(torch.tanh(z)) + z.imag * b - y) ** 2).sum()


def loss_and_grad(parameters, batch):
    held = {name: torch.tensor(value, requires_grad=True) for name, value in parameters.items()}
    loss = by_torch(held["w"], held["b"], batch)
    loss.backward()
    return loss.item(), {name: value.grad.numpy() for name, value in held.items()}, float(len(batch[0]))


def model_of():
    return mz.FunctionModel({"w": START[0] + 1j * START[1], "b": np.linspace(-1, 1, 4)}, loss_and_grad)


@pytest.mark.parametrize(("kind", "settings"), [("SGD", {"momentum": 0.9}), ("AdamW", {"weight_decay": 0.1})])
def test_fifty_steps_are_pytorchs(kind, settings):
    x, y = data()
    config = mz.ShardingConfig(comm="self", micro_batch=len(x))
    with config, mz.DDPModel(model_of(), config, optimizer=getattr(mz, kind)(lr=1e-2, **settings)) as model:
        values = [torch.tensor(model.named_parameters()[n], requires_grad=True) for n in ("w", "b")]
        groups = [{"params": values[:1]}, {"params": values[1:], "weight_decay": 0.0}]
        optimizer = getattr(torch.optim, kind)(groups, lr=1e-2, **settings)
        for _ in range(50):
            model.train(x, y)
            optimizer.zero_grad()
            (by_torch(*values, (x, y)) / len(x)).backward()
            optimizer.step()
        found = model.named_parameters()
    for name, value in zip(("w", "b"), values, strict=True):
        expected = value.detach().numpy()
        assert np.linalg.norm(found[name] - expected) <= 1e-11 * np.linalg.norm(expected)
