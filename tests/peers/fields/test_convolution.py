"""Convolutions of fields have the values and gradients of PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpizero import nn
from tests.nn.checks import gradient_slots, random_parameters

torch = pytest.importorskip("torch")
functional = torch.nn.functional

MODES = {"zeros": "constant", "periodic": "circular", "reflect": "reflect"}
CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


def settings(rng: np.random.Generator, modes: list[str]) -> dict[str, Any]:
    """Draw settings for one to three axes of space."""
    axes = int(rng.integers(1, 4))

    def by_axis(most: int) -> tuple[int, ...]:
        return tuple(int(n) for n in rng.integers(1, most + 1, axes))

    groups = int(rng.integers(1, 4))
    return {
        "inputs": groups * int(rng.integers(1, 5)),
        "outputs": groups * int(rng.integers(1, 5)),
        "groups": groups,
        "kernel": by_axis((6, 4, 3)[axes - 1]),
        "stride": by_axis(3),
        "dilation": by_axis(2),
        "padding": str(rng.choice(modes)),
        "bias": bool(rng.integers(2)),
    }


def channels_first(x: np.ndarray) -> Any:
    return torch.tensor(np.moveaxis(x, -1, 1), requires_grad=True)


def weight_of(params: Any) -> Any:
    """(*kernel, inputs, outputs) -> (outputs, inputs, *kernel)."""
    axes = params["weight"].ndim - 2
    return torch.tensor(params["weight"].transpose(axes + 1, axes, *range(axes)), requires_grad=True)


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(abs(found - expected).max(initial=0) / max(1.0, abs(expected).max(initial=0)))


def compared(layer: Any, x: np.ndarray, rng: np.random.Generator, of_torch: Any) -> float:
    """The largest deviation of value and gradients; ``of_torch`` computes with (x, weight, bias) of PyTorch."""
    (_, params), (_, grads) = random_parameters(layer, rng), gradient_slots(layer)
    y, cache = layer.forward(params, x)
    assert y.shape[1:] == layer.output_shape(x.shape[1:])
    dy = rng.normal(size=y.shape)
    dx = layer.backward(params, cache, dy, grads)
    xt, weight = channels_first(x), weight_of(params)
    bias = torch.tensor(params["bias"], requires_grad=True) if layer.bias else None
    yt = of_torch(xt, weight, bias)
    yt.backward(channels_first(dy).detach())
    found = [deviation(y, np.moveaxis(yt.detach().numpy(), 1, -1)), deviation(dx, np.moveaxis(xt.grad.numpy(), 1, -1))]
    axes = len(layer.kernel)
    found.append(deviation(grads["weight"], weight.grad.numpy().transpose(*range(2, axes + 2), 1, 0)))
    return max(found + ([deviation(grads["bias"], bias.grad.numpy())] if layer.bias else []))


def field(rng: np.random.Generator, layer: Any, modes: tuple[str, ...]) -> np.ndarray:
    """A field of odd extents that the layer takes."""
    space = []
    for axis, mode in enumerate(modes):
        least = layer.reach[axis] + 1
        n = int(rng.integers(least, least + 6))
        stride = layer._by_axis("stride")[axis]
        space.append(-(-n // stride) * stride if mode == "periodic" else n)
    return rng.normal(size=(int(rng.integers(1, 4)), *space, layer.inputs))


def test_convolutions_are_pytorchs():
    for seed in range(80):
        rng = np.random.default_rng(seed)
        layer = nn.Conv(**settings(rng, ["zeros", "periodic", "reflect", "none"]))
        modes = layer._by_axis("padding")

        def of_torch(x, weight, bias, layer=layer, mode=modes[0]):
            if mode != "none":
                amounts = [n for pair in zip(layer.before[::-1], layer.after[::-1], strict=True) for n in pair]
                x = functional.pad(x, amounts, MODES[mode])
            return CONV[len(layer.kernel)](x, weight, bias, layer.stride, 0, layer.dilation, layer.groups)

        assert compared(layer, field(rng, layer, modes), rng, of_torch) < 1e-12, layer


def test_transposed_convolutions_are_pytorchs():
    for seed in range(80):
        rng = np.random.default_rng(1000 + seed)
        layer = nn.ConvTranspose(**settings(rng, ["zeros", "none"]))

        def of_torch(x, weight, bias, layer=layer):
            groups, axes = layer.groups, len(layer.kernel)
            parts = [part.transpose(0, 1) for part in weight.chunk(groups)]  # (inputs / groups, outputs / groups, ...)
            y = TRANSPOSED[axes](x, torch.cat(parts), bias, layer.stride, 0, 0, groups, layer.dilation)
            if layer.padding == "none":
                return y
            wanted = [n * s for n, s in zip(x.shape[2:], layer.stride, strict=True)]
            more = [max(0, b + n - have) for b, n, have in zip(layer.before, wanted, y.shape[2:], strict=True)]
            beyond = functional.pad(y - _bias(y, bias), [n for m in more[::-1] for n in (0, m)]) + _bias(y, bias)
            inside = (slice(b, b + n) for b, n in zip(layer.before, wanted, strict=True))
            return beyond[(slice(None), slice(None), *inside)]

        x = rng.normal(size=(2, *rng.integers(1, 6, len(layer.kernel)), layer.inputs))
        assert compared(layer, x, rng, of_torch) < 1e-12, layer


def _bias(y, bias):
    return 0.0 if bias is None else bias.reshape(-1, *(1,) * (y.ndim - 2))
