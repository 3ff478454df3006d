"""A GPT against PyTorch's: losses, gradients, and the documented weight mapping."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero.nn import GPT, bind, evaluate, from_torch, initial_parameters, loss_and_gradients

torch = pytest.importorskip("torch")

from tests.peers.twins import torch_twin  # noqa: E402


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"activation_checkpointing": True}])
def test_loss_and_every_gradient_agree_to_1e_10(options, rng):
    model = GPT(dim=24, layers=2, heads=3, sequence=10, vocabulary=17, dtype="float64", **options)
    named = {name: value + rng.normal(0, 0.2, value.shape) for name, value in initial_parameters(model).items()}
    x, y = rng.integers(0, 17, (2, 3, 10))
    y[0, :4] = -1
    twin = torch_twin(model, named)
    mean = twin.mean_loss(x, y)
    mean.backward()
    loss_sum, weight, gradients = loss_and_gradients(model, named, (x, y), scale=1.0 / 26.0)
    assert weight == 26.0
    assert loss_sum / weight == pytest.approx(mean.item(), rel=1e-10)
    wanted = from_torch(model, {name: value.grad for name, value in twin.state_dict(keep_vars=True).items()})
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wanted[name], rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_any_dtype_and_base_model_names_are_read(dtype, rng):
    model = GPT(dim=8, layers=1, heads=2, sequence=4, vocabulary=5)
    twin = torch_twin(model, initial_parameters(model)).to(getattr(torch, dtype))
    state = {name.removeprefix("transformer."): value for name, value in twin.state_dict().items()}
    named = from_torch(model, {**state, "h.0.attn.bias": torch.ones(1)})
    x = rng.integers(0, 5, (2, 4))
    np.testing.assert_allclose(
        evaluate(model, bind(model, named), x), twin.float()(torch.from_numpy(x)).detach().numpy(), rtol=1e-4, atol=1e-6
    )
