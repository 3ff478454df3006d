"""Layers of fields against PyTorch's: outputs and all gradients, over random settings and shapes."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.layout.flat import nested

torch = pytest.importorskip("torch")
F = torch.nn.functional

CASES = 60
CHANNELS = 6


def draw_pool(rng, axes, layer, function, **settings):
    """Pooling with any windows, or with windows side by side, of which the last are cut: PyTorch's two kinds."""
    window = tuple(rng.integers(1, 5, axes).tolist())
    partial = bool(rng.integers(2))
    stride = window if partial else tuple(rng.integers(1, 4, axes).tolist())

    def theirs(x, parameters):
        return function(axes)(x, window, stride, ceil_mode=partial, **settings)

    return layer(window, stride, partial), theirs, window + rng.integers(0, 6, axes)


def draw_max_pool(rng, axes):
    return draw_pool(rng, axes, mz.nn.MaxPool, lambda axes: getattr(F, f"max_pool{axes}d"))


def draw_avg_pool(rng, axes):
    return draw_pool(rng, axes, mz.nn.AvgPool, lambda axes: getattr(F, f"avg_pool{axes}d"), count_include_pad=False)


def draw_upsample(rng, axes):
    factor, mode = tuple(rng.integers(1, 5, axes).tolist()), ["nearest", "linear"][rng.integers(2)]
    names = {1: "linear", 2: "bilinear", 3: "trilinear"}
    options = {"mode": "nearest"} if mode == "nearest" else {"mode": names[axes], "align_corners": False}
    scales = tuple(map(float, factor))
    return mz.nn.Upsample(factor, mode), lambda x, _: F.interpolate(x, scale_factor=scales, **options), None


def draw_group_norm(rng, axes):
    groups, eps = int(rng.choice([1, 2, 3, 6])), float(rng.choice([1e-5, 1e-2]))
    return mz.nn.GroupNorm(groups, CHANNELS, eps), lambda x, p: F.group_norm(x, groups, *p, eps), None


def draw_instance_norm(rng, axes):
    affine = bool(rng.integers(2))
    return mz.nn.InstanceNorm(CHANNELS, affine=affine), lambda x, p: F.instance_norm(x, None, None, *p), None


def draw_channel_layer_norm(rng, axes):
    def theirs(x, p):
        return F.layer_norm(x.movedim(1, -1), (CHANNELS,), *p).movedim(-1, 1)

    return mz.nn.ChannelLayerNorm(CHANNELS), theirs, None


def draw_residual(rng, axes):
    layer = mz.nn.Residual(mz.nn.GroupNorm(2, CHANNELS), mz.nn.InstanceNorm(CHANNELS))
    return layer, lambda x, p: F.group_norm(x, 2, *p[:2]) + F.instance_norm(x, None, None, *p[2:]), None


def draw_concatenate(rng, axes):
    """What a layer makes of partial windows is longer than its input, and cropped."""
    factor = int(rng.integers(1, 4))
    layer = mz.nn.Concatenate(mz.nn.Sequential([mz.nn.AvgPool(factor), mz.nn.Upsample(factor)]))

    def theirs(x, parameters):
        coarse = getattr(F, f"avg_pool{axes}d")(x, factor, ceil_mode=True, count_include_pad=False)
        fine = F.interpolate(coarse, scale_factor=float(factor))
        return torch.cat([x, fine[(..., *map(slice, x.shape[2:]))]], dim=1)

    return layer, theirs, None


DRAWS = {name.removeprefix("draw_"): value for name, value in list(globals().items()) if name.startswith("draw_")}
del DRAWS["pool"]


def first_channels(x):
    """A field in PyTorch's order of axes."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def deviation(got, wanted):
    """The largest difference, relative to the largest magnitude."""
    return float(abs(got - wanted).max() / max(abs(wanted).max(), 1e-300))


@pytest.mark.parametrize("name", DRAWS)
def test_outputs_and_all_gradients_are_pytorch_s(name):
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        layer, twin, space = DRAWS[name](rng, axes := 1 + seed % 3)
        space = rng.integers(3, 9, axes) if space is None else space  # norms of two values have gradients of no digits
        x = rng.normal(size=(int(rng.integers(1, 4)), *space, CHANNELS))
        flat = {spec.name: rng.normal(size=spec.shape) for spec in layer.specs()}
        gradients = {name: np.full_like(value, np.nan) for name, value in flat.items()}
        params = nested(dict(flat.items()))
        theirs = first_channels(x).requires_grad_()
        parameters = [torch.from_numpy(value.copy()).requires_grad_() for value in flat.values()]
        wanted = twin(theirs, parameters)
        y, cache = layer.forward(params, x)
        dy = rng.normal(size=y.shape)
        wanted.backward(first_channels(dy))
        dx = layer.backward(params, cache, dy, nested(dict(gradients.items())))
        pairs = [(np.moveaxis(y, -1, 1), wanted.detach()), (np.moveaxis(dx, -1, 1), theirs.grad)]
        pairs += [(gradients[key], one.grad) for key, one in zip(flat, parameters, strict=True)]
        assert y.shape[1:-1] == tuple(wanted.shape[2:]), (layer, x.shape)
        assert len(pairs) == 2 + len(layer.specs())
        assert all(deviation(got, one.numpy()) < 1e-12 for got, one in pairs), (layer, x.shape)
