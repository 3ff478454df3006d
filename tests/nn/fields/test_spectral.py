"""Spectral convolutions are those of numpy.fft, in values and gradients; the Fourier operator trains on every cut."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero import nn
from mpizero.errors import ConfigError, DataError
from mpizero.kernels import spectral
from mpizero.testing import check_model, run_in_threads
from mpizero.types import BlockModel
from tests.nn.checks import gradient_slots, random_parameters, require_layer


def by_fft(x: Any, weight: Any, layer: nn.SpectralConv) -> Any:
    """Return what the docstring of the layer says."""
    space, axes = x.shape[1:-1], tuple(range(1, x.ndim - 1))
    periods, half = layer.periods(space), [m // 2 for m in layer.modes]
    found, matrices = np.fft.rfftn(x, s=periods, axes=axes), weight[..., 0, :, :] + 1j * weight[..., 1, :, :]
    kept = np.zeros((*found.shape[:-1], layer.outputs), complex)
    ranges = [range(-(m // 2), (m + 1) // 2) for m in layer.modes[:-1]]
    for k in product(*ranges, range(half[-1] + 1)):
        at = (*(a + b for a, b in zip(k[:-1], half, strict=False)), k[-1])
        kept[:, *k] = found[:, *k] @ matrices[at]
    return np.fft.irfftn(kept, s=periods, axes=axes)[:, *(slice(n) for n in space)]


def draw(rng: Any) -> tuple[nn.SpectralConv, tuple[int, ...]]:
    """Draw a layer and the extents of a field: odd and even, of few and of all modes."""
    space = tuple(int(n) for n in rng.integers(1, 14, rng.integers(1, 4)))
    modes = tuple(int(rng.integers(1, n + 1)) if rng.random() < 0.8 else n for n in space)
    inputs, outputs = (int(n) for n in rng.integers(1, 6, 2))
    return nn.SpectralConv(inputs, outputs, modes, padding=float(rng.choice([0, 0.3, 1]))), space


def require_close(found: Any, expected: Any, message: str) -> None:
    assert np.abs(found - expected).max() <= 1e-12 * max(np.abs(expected).max(), 1e-300), message


@pytest.mark.parametrize("seed", range(40))
def test_values_and_gradients_are_those_of_numpy_fft(seed):
    rng = np.random.default_rng(seed)
    layer, space = draw(rng)
    flat, params = random_parameters(layer, rng)
    (_, grads), x = gradient_slots(layer), rng.normal(size=(2, *space, layer.inputs))
    y, cache = layer.forward(params, x)
    require_close(y, by_fft(x, params["weight"], layer), f"{layer} on {space}")
    assert y.shape[1:] == layer.output_shape(x.shape[1:])
    dy = rng.normal(size=y.shape)
    dx = layer.backward(params, cache, dy, grads)
    for one in range(layer.inputs):  # the layer is linear in x and in the weight: these are derivatives, no differences
        basis = np.zeros_like(x)
        place = tuple(int(rng.integers(n)) for n in x.shape[:-1])
        basis[(*place, one)] = 1
        slope = (by_fft(basis, params["weight"], layer) * dy).sum()
        assert abs(slope - dx[(*place, one)]) <= 1e-12 * np.abs(dx).max()
    for _ in range(5):
        basis = np.zeros_like(params["weight"])
        place = tuple(int(rng.integers(n)) for n in basis.shape)
        basis[place] = 1
        slope = (by_fft(x, basis, layer) * dy).sum()
        assert abs(slope - grads["weight"][place]) <= 1e-12 * np.abs(grads["weight"]).max()
    assert list(flat) == ["weight"]


@pytest.mark.parametrize(
    ("modes", "space"), [((4,), (7,)), ((3, 5), (5, 6)), ((3, 2, 4), (3, 4, 5)), ((1, 1), (2, 1))], ids=str
)
def test_the_layer_keeps_the_contract_of_layers(modes, space, rng):
    require_layer(nn.SpectralConv(2, 3, modes, padding=0.25), (2, *space, 2), rng)


def test_float32_has_the_precision_of_float32(rng):
    layer = nn.SpectralConv(8, 8, (12, 12))
    _, params = random_parameters(layer, rng, np.float32)
    x = rng.normal(size=(2, 64, 48, 8)).astype(np.float32)
    y, expected = layer.forward(params, x)[0], by_fft(x, params["weight"].astype(float), layer)
    assert y.dtype == np.float32
    assert np.abs(y - expected).max() < 1e-6 * np.abs(expected).max()


def test_a_cpu_without_fused_multiply_adds_computes_the_same_within_rounding(rng, monkeypatch):
    layer = nn.SpectralConv(3, 2, (3, 4, 3))
    (_, params), x = random_parameters(layer, rng), rng.normal(size=(2, 5, 4, 7, 3))
    (fused, cache), dy, found = layer.forward(params, x), rng.normal(size=(2, 5, 4, 7, 2)), []
    for fuses in (True, False):
        monkeypatch.setattr(spectral, "fuses", lambda fuses=fuses: fuses)
        flat, grads = gradient_slots(layer)
        y, cache = layer.forward(params, x)
        found.append((y, layer.backward(params, cache, dy, grads), flat["weight"]))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12 * np.abs(other).max())
    np.testing.assert_array_equal(found[0][0], fused)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"modes": 12}, "modes=12 is not allowed; give a number for each of one to three axes"),
        ({"modes": (0,)}, "modes=.0,. is not allowed"),
        ({"inputs": 0}, "inputs=0"),
        ({"padding": (0.1, 0.2)}, "one for each of the 1 axes"),
        ({"padding": -1}, "padding=-1 is not allowed"),
        ({"init": "ones"}, "init='ones' must be None"),
    ],
)
def test_settings_that_are_not_allowed_are_told(settings, why):
    with pytest.raises(ConfigError, match=why):
        nn.SpectralConv(**{"inputs": 1, "outputs": 1, "modes": (3,), **settings})


def test_a_flag_of_an_operator_is_true_or_false():
    for flag in ("coordinates", "activation_checkpointing"):
        with pytest.raises(ConfigError, match=f"FNO: {flag}=None: expected True or False"):
            nn.FNO(1, 1, **{flag: None})


def test_a_field_with_fewer_positions_than_modes_is_told():
    with pytest.raises(DataError, match=r"modes=\(4, 5\) are more than a field of \(4, 4\) positions has"):
        nn.SpectralConv(1, 1, (4, 5)).forward({"weight": np.zeros((4, 3, 2, 1, 1))}, np.zeros((1, 4, 4, 1)))
    with pytest.raises(DataError, match="modes="):
        nn.FNO(1, 1, modes=8, space=(8, 7))


@pytest.mark.parametrize("shape", [(1, 8, 8, 1), (1, 8, 8, 8, 2), (1, 8, 2)])
def test_a_field_of_other_axes_or_channels_is_told_as_the_user_gave_it(shape):
    net = nn.FNO(2, 1, 2, modes=[2, 2], width=4)
    params = {"first": {"weight": np.zeros((1, 1, 4, 8), np.float32)}}
    with pytest.raises(DataError, match=re.escape(f"two axes of space, 2), the input has shape {shape}")):
        net.blocks["lift"].forward(params, np.zeros(shape))


def make(axes: int = 2, **changes: Any) -> nn.FNO:
    settings = {"inputs": 2, "outputs": 3, "width": 4, "modes": 2, "layers": 2, "dtype": "float64"}
    return nn.FNO(axes=axes, **{**settings, "space": {1: (13,), 2: (7, 4), 3: (3, 5, 2)}[axes], **changes})


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        (1, {"modes": 5, "padding": 0.2}),
        (2, {"task": "classification", "modes": (5, 4), "activation_checkpointing": True}),
        (3, {"coordinates": False, "activation": "silu", "modes": (3, 2, 2)}),
    ],
)
def test_an_operator_passes_the_check_of_own_models(axes, options, rng):
    model = make(axes, **options)
    assert isinstance(model, BlockModel)
    x = rng.normal(size=(6, *model.sample_shape))
    classes = model.task == "classification"
    y = rng.integers(-1, 3, x.shape[:-1]) if classes else rng.normal(size=(*x.shape[:-1], 3))
    assert "agree with differences" in str(check_model(model, x, y))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_shapes_are_those_that_were_counted(axes, rng):
    model = make(axes, dtype="float32")
    x, params, shape = rng.normal(size=(2, *model.sample_shape)), nn.bind(model, nn.initial_parameters(model)), ()
    shape = model.sample_shape
    for name, block in model.blocks.items():
        x, shape = block.forward(params[name], x)[0], block.output_shape(shape)
        assert (x.shape, x.dtype) == ((2, *shape), np.float32)
    nodes = {node["name"]: node for node in model.export_computation_graph()["nodes"]}
    assert nodes["fourier.0.sum"]["inputs"] == ["fourier.0.spectral", "fourier.0.linear"]


def test_the_operations_of_a_layer_are_those_of_its_matrices():
    count = nn.SpectralConv(3, 5, (4, 6)).operations((16, 24, 3))
    forward = 16 * 24 * 7 + 16 * 8 * 7 * 5  # positions of each tile by cosines and sines of an axis, then of the other
    backward = 5 * 7 * 16 + 16 * 24 * 7
    modes = 4 * 4
    assert count.forward == 2 * (3 * forward + 5 * backward) + 8 * modes * 15
    assert count.backward_input == 2 * (5 * forward + 3 * backward) + 8 * modes * 15
    assert count.backward_weights == 8 * modes * 15


def test_an_operator_of_one_grid_predicts_on_a_finer_one(rng):
    """Parameters know no extents: of a smooth field each grid has the same modes."""
    model = make(2, inputs=1, outputs=1, modes=4)
    params = nn.bind(model, nn.initial_parameters(model))
    phases = rng.random(3)

    def field(n: int, m: int) -> Any:
        north, east = np.meshgrid(np.arange(n) / n, np.arange(m) / m, indexing="ij")
        return sum(np.cos(2 * np.pi * (k * north + east + p)) for k, p in enumerate(phases))[None, ..., None]

    layer = model.blocks["fourier.0"].spectral
    weights = {"weight": params["fourier.0"]["spectral"]["weight"]}
    coarse, fine = (layer.forward(weights, np.repeat(field(*n), 4, axis=-1))[0] for n in ((8, 6), (24, 12)))
    np.testing.assert_allclose(fine[:, ::3, ::2], coarse, atol=1e-12)


def trained(comm: Any, net: Any, strategy: str, **mesh: Any) -> tuple[str, list[float], float]:
    """Train two steps; return the sha256 of the parameters, the losses and an evaluation. Collective."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(6, *net.space, c)).astype(net.dtype) for c in (net.inputs, net.outputs))
    config, source = mz.Config(micro_batch=2), mz.data.ArraySource(x, y)
    with (
        mz.Mesh(comm, **mesh) as grid,
        mz.distribute(net, mz.Adam(lr=0.01), strategy, mesh=grid, config=config) as model,
    ):
        losses = [model.train(*batch) for batch in mz.data.batches(source, model, global_batch=6, steps=2)]
        here = grid.slab(net.space) if mesh.get("domain") else ()
        return model.parameters_sha256(), losses, model.evaluate(x[:, *here], y[:, *here]).loss


@pytest.mark.parametrize(
    ("cuts", "dtype"), [([(2,), (3,), (8,)], "float32"), ([(1, 2, 1), (2, 2, 2)], "float64")], ids=["line", "volume"]
)
def test_an_operator_has_the_bits_of_one_process_on_every_cut_strategy_and_number_of_stages(cuts, dtype):
    """Of a line and of a volume; planes are in ``tests/parallel/partition/test_rollout.py``."""
    axes = len(cuts[0])
    net = nn.FNO(
        2, 1, axes, modes=(5, 4, 3)[:axes], width=6, layers=2, space=(13, 9, 5)[:axes], dtype=dtype, padding=0.2
    )
    alone = trained("self", net, "ddp")
    for number, cut in enumerate(cuts):
        ranks, strategy = int(np.prod(cut)), ("zero3", "zero1", "zero2", "ddp")[(number + axes) % 4]
        for found in run_in_threads(ranks, lambda comm, cut=cut, s=strategy: trained(comm, net, s, domain=cut)):
            assert found == alone, (cut, strategy)
    for found in run_in_threads(4, lambda comm: trained(comm, net, "zero2", domain=cuts[0], pipeline=2)):
        assert found == alone
