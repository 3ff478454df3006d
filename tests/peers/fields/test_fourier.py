"""Spectral convolutions and Fourier operators have the values and gradients of PyTorch's FFTs, in float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from mpizero import nn
from tests.nn.checks import gradient_slots, random_parameters

torch = pytest.importorskip("torch")


def spectral(x: Any, weight: Any, layer: nn.SpectralConv) -> Any:
    """Return the layer's function of a tensor (samples, space, channels), by FFTs."""
    space, axes = x.shape[1:-1], tuple(range(1, x.ndim - 1))
    periods = layer.periods(space)
    found = torch.fft.rfftn(x, s=periods, dim=axes)
    matrices = torch.complex(weight[..., 0, :, :], weight[..., 1, :, :])
    kept = torch.zeros(*found.shape[:-1], layer.outputs, dtype=found.dtype)
    half = [m // 2 for m in layer.modes]
    for k in product(*(range(-(m // 2), (m + 1) // 2) for m in layer.modes[:-1]), range(half[-1] + 1)):
        at = (*(a + b for a, b in zip(k[:-1], half, strict=False)), k[-1])
        kept[:, *k] = found[:, *k] @ matrices[at]
    return torch.fft.irfftn(kept, s=periods, dim=axes)[:, *(slice(n) for n in space)]


def require_close(found: Any, expected: Any) -> None:
    expected = expected.detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * max(np.abs(expected).max(), 1e-300))


@pytest.mark.parametrize("seed", range(24))
def test_values_and_gradients_of_a_layer_are_those_of_pytorch(seed):
    rng = np.random.default_rng(seed)
    space = tuple(int(n) for n in rng.integers(1, 12, rng.integers(1, 4)))
    inputs, outputs = (int(n) for n in rng.integers(1, 6, 2))
    modes = tuple(int(rng.integers(1, n + 1)) for n in space)
    layer = nn.SpectralConv(inputs, outputs, modes, padding=float(rng.choice([0, 0.4])))
    (_, params), (_, grads) = random_parameters(layer, rng), gradient_slots(layer)
    x, dy = rng.normal(size=(2, *space, inputs)), rng.normal(size=(2, *space, outputs))
    y, cache = layer.forward(params, x)
    dx = layer.backward(params, cache, dy, grads)
    there, weight = torch.tensor(x, requires_grad=True), torch.tensor(params["weight"], requires_grad=True)
    expected = spectral(there, weight, layer)
    expected.backward(torch.tensor(dy))
    for found, wanted in ((y, expected), (dx, there.grad), (grads["weight"], weight.grad)):
        require_close(found, wanted)


@pytest.mark.parametrize("seed", range(15))
def test_gradients_of_an_operator_are_those_of_pytorch(seed):
    rng = np.random.default_rng(seed)
    axes = seed % 3 + 1
    space = tuple(int(n) for n in rng.integers(2, 10, axes))
    model = nn.FNO(
        2,
        3,
        axes,
        modes=tuple(int(rng.integers(1, n + 1)) for n in space),
        width=int(rng.integers(1, 8)),
        layers=int(rng.integers(1, 4)),
        expansion=int(rng.integers(1, 4)),
        padding=float(rng.choice([0, 0.25])),
        coordinates=bool(rng.random() < 0.7),
        dtype="float64",
        seed=seed,
        space=space,
    )
    named = nn.initial_parameters(model)
    x, y = rng.normal(size=(4, *space, 2)), rng.normal(size=(4, *space, 3))
    loss, weight, gradients = nn.loss_and_gradients(model, named, (x, y))
    params = {name: torch.tensor(value, requires_grad=True) for name, value in named.items()}

    def linear(u: Any, name: str) -> Any:
        matrix = params[f"{name}.weight"]
        return u @ matrix.reshape(matrix.shape[-2:]) + params[f"{name}.bias"]

    def gelu(u: Any) -> Any:
        return torch.nn.functional.gelu(u, approximate="tanh")

    grid = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) / n for n in space), indexing="ij")
    u = torch.tensor(x)
    u = torch.cat([u, torch.stack(grid, -1).expand(4, *space, axes)], dim=-1) if model.coordinates else u
    u = linear(gelu(linear(u, "lift.first")), "lift.last")
    for number in range(model.layers):
        name, layer = f"fourier.{number}", model.blocks[f"fourier.{number}"].spectral
        u = spectral(u, params[f"{name}.spectral.weight"], layer) + linear(u, f"{name}.linear")
        u = gelu(u) if number < model.layers - 1 else u
    u = linear(gelu(linear(u, "project.first")), "project.last")
    expected = ((u - torch.tensor(y)) ** 2).mean(dim=-1).sum()
    expected.backward()
    assert weight == 4 * np.prod(space)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    for name, value in params.items():
        require_close(gradients[name], value.grad)
