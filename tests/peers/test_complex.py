"""Complex parameters: PyTorch's gradients and steps are ours, JAX's gradients are their conjugates."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz

torch = pytest.importorskip("torch")
START = np.random.default_rng(0).normal(size=(2, 6, 4)) @ np.ones((4, 4))


def data():
    rng = np.random.default_rng(1)
    return rng.normal(size=(40, 6)) + 1j * rng.normal(size=(40, 6)), rng.normal(size=(40, 4))


def loss_of(tanh, absolute, w, b, x, y):
    """A loss that is no function of |w| alone, of a complex matrix and a real vector."""
    z = x @ w
    return ((absolute(tanh(z)) + z.imag * b - y) ** 2).sum()


def by_torch(w, b, batch):
    x, y = (torch.tensor(value) for value in batch)
    return loss_of(torch.tanh, torch.abs, w, b, x, y)


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


def test_gradients_are_pytorchs_and_the_conjugates_of_jaxs():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    x, y = data()
    assert mz.testing.check_model(model_of(), x[:5], y[:5]).right  # ... and agree with finite differences
    start = model_of().parameters
    _, found, _ = loss_and_grad(start, (x, y))
    theirs = jax.grad(lambda p: loss_of(jax.numpy.tanh, jax.numpy.abs, p["w"], p["b"], x, y))(dict(start))
    np.testing.assert_allclose(found["w"], np.conj(theirs["w"]), rtol=1e-10)
    np.testing.assert_allclose(found["b"], theirs["b"], rtol=1e-10)
