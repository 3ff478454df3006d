"""GPT against PyTorch in float64, through the documented weight mapping; runs where PyTorch is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from mpizero.nn import GPT, bind, evaluate, from_torch, initial_parameters, loss_and_gradients, model_specs, to_torch

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compare_torch.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_torch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"activation_checkpointing": True}])
def test_loss_and_every_gradient_agree_to_1e_10(script, options, rng):
    model = GPT(dim=24, layers=2, heads=3, sequence=10, vocabulary=17, dtype="float64", **options)
    named = {name: value + rng.normal(0, 0.2, value.shape) for name, value in initial_parameters(model).items()}
    x, y = rng.integers(0, 17, (2, 3, 10))
    y[0, :4] = -1
    twin = script.torch_twin(model, named)
    mean = twin.mean_loss(x, y)
    mean.backward()
    loss_sum, weight, gradients = loss_and_gradients(model, named, (x, y), scale=1.0 / 26.0)
    assert weight == 26.0
    assert loss_sum / weight == pytest.approx(mean.item(), rel=1e-10)
    wanted = from_torch(model, {name: value.grad for name, value in twin.state_dict(keep_vars=True).items()})
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wanted[name], rtol=1e-10, atol=1e-12, err_msg=name)


def test_losses_of_training_agree(script):
    options = script.argparse.Namespace(steps=5, dim=16, layers=1, heads=2, sequence=8, batch=2)
    ours, theirs = script.pair(options, "float64")
    batches = script.batches(script.library_text(), options)
    for index, (x, y) in zip(range(5), batches, strict=False):
        assert ours(index, x, y) == pytest.approx(theirs(index, x, y), rel=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_any_dtype_and_base_model_names_are_read(script, dtype, rng):
    model = GPT(dim=8, layers=1, heads=2, sequence=4, vocabulary=5)
    twin = script.torch_twin(model, initial_parameters(model)).to(getattr(torch, dtype))
    state = {name.removeprefix("transformer."): value for name, value in twin.state_dict().items()}
    named = from_torch(model, {**state, "h.0.attn.bias": torch.ones(1)})
    x = rng.integers(0, 5, (2, 4))
    np.testing.assert_allclose(
        evaluate(model, bind(model, named), x),
        twin.float()(torch.from_numpy(x)).detach().numpy(),
        rtol=1e-4,
        atol=1e-6,
    )


def test_export_and_import_are_inverse(script):
    model = GPT(dim=8, layers=2, heads=2, sequence=4, vocabulary=5, tied=False)
    named = initial_parameters(model)
    back = from_torch(model, to_torch(model, named))
    assert list(back) == [spec.name for spec in model_specs(model)]
    for name, value in named.items():
        np.testing.assert_array_equal(back[name], value)
