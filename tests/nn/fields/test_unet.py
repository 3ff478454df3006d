from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError, UnsupportedError
from mpizero.nn import UNet, bind, evaluate, initial_parameters, loss_and_gradients
from mpizero.testing import taylor_test
from mpizero.types import BlockModel
from tests.nn.groups import TRAINING

#: Extents of which some are odd, and become 1 on the coarsest grid.
SPACES = {1: (13,), 2: (7, 4), 3: (3, 5, 2)}


def make(axes=2, **changes):
    settings = {"inputs": 2, "outputs": 3, "width": 4, "groups": 2, "dtype": "float64", "space": SPACES[axes]}
    return UNet(axes=axes, **{**settings, **changes})


def batch(model, rng, samples=2):
    x = rng.normal(size=(samples, *model.sample_shape))
    if model.task == "classification":
        return x, rng.integers(-1, model.outputs, x.shape[:-1])
    return x, rng.normal(size=(*x.shape[:-1], model.outputs))


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        (1, {"padding": "reflect", "levels": 2, "refine": "transposed"}),
        (2, {"dropout": 0.3, "refine": "linear", "activation": "gelu"}),
        (
            2,
            {"padding": ("zeros", "periodic"), "task": "classification", "kernel": 2, "activation_checkpointing": True},
        ),
        (3, {"width": 2, "levels": 2}),
    ],
)
def test_gradients_are_those_of_finite_differences(axes, options, rng):
    model = make(axes, **options)
    assert isinstance(model, BlockModel)
    named, (x, y) = initial_parameters(model), batch(model, rng, 1)
    _, weight, gradients = loss_and_gradients(model, named, (x, y), TRAINING)
    assert weight == ((y >= 0).sum() if model.task == "classification" else np.prod(model.space)), "positions"
    taylor_test(lambda point: loss_and_gradients(model, point, (x, y), TRAINING)[0], gradients, named)


@pytest.mark.parametrize("refine", ["nearest", "linear", "transposed"])
@pytest.mark.parametrize("axes", SPACES)
def test_outputs_have_the_extents_of_the_input_and_shapes_are_those_that_were_counted(axes, refine, rng):
    model = make(axes, refine=refine, dtype="float32")
    x, params, shape = batch(model, rng)[0], bind(model, initial_parameters(model)), model.sample_shape
    for name, block in model.blocks.items():
        x, shape = block.forward(params[name], x)[0], block.output_shape(shape)
        if name != "output" and not name.endswith("up.0"):
            assert (x[0].shape[1:], tuple(skip.shape[1:] for skip in x[1])) == shape
    assert (x.shape, x.dtype) == ((2, *SPACES[axes], 3), np.float32)
    assert shape == (*SPACES[axes], 3)
    assert list(model.blocks) == ["down.0", "down.1", "middle", "up.1", "up.0", "output"]


def test_channels_double_from_grid_to_grid():
    model = UNet(3, 1, width=8, levels=4, groups=4)
    shape = (37, 53, 3)
    for name in ("down.0", "down.1", "down.2", "middle"):
        shape = model.blocks[name].output_shape(shape)
    assert shape == ((5, 7, 64), ((37, 53, 8), (19, 27, 16), (10, 14, 32)))


def test_a_field_that_moves_around_a_periodic_domain_moves_the_output(rng):
    model = make(1, padding="periodic", space=(16,))
    x, params = rng.normal(size=(1, 16, 2)), bind(model, initial_parameters(model))
    moved = evaluate(model, params, np.roll(x, 4, axis=1))  # a multiple of the coarsest grid's spacing
    np.testing.assert_allclose(moved, np.roll(evaluate(model, params, x), 4, axis=1), rtol=1e-10, atol=1e-12)


def test_bytes_are_cast_and_a_sample_does_not_depend_on_others(rng):
    model = make(dtype="float32")
    x, params = rng.integers(0, 256, (3, 7, 4, 2)).astype(np.uint8), bind(model, initial_parameters(model))
    y = evaluate(model, params, x)
    np.testing.assert_array_equal(y, evaluate(model, params, x.astype(np.float64)))
    np.testing.assert_array_equal(y[1:2], evaluate(model, params, x[1:2]))
    assert evaluate(model, params, x[:0]).shape == (0, 7, 4, 3)


def test_no_predictor_is_compiled():
    with mz.ShardingConfig(comm="self") as config, mz.ZeRO1Model(make(), config) as net:
        assert not net.supports_jit_compilation
        with pytest.raises(UnsupportedError, match="UNet has no 'compile_predictor'"):
            net.jit_compile()


def test_the_exported_graph_joins_skips():
    nodes = {node["name"]: node for node in make(levels=2).export_computation_graph()["nodes"]}
    skip = "down.0.convolutions.activation2"
    assert nodes["up.0.crop"]["shape"] == ["samples", 7, 4, 4]
    assert nodes["up.0.concatenate"] | {"inputs": [skip, "up.0.crop"]} == nodes["up.0.concatenate"]
    assert nodes["down.0.coarsen"]["inputs"] == [skip]
    with pytest.raises(AttributeError, match=r"space=\(64, 64\)"):
        UNet(1, 1).export_computation_graph()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"axes": 4}, "axes=4.*from 1 to 3"),
        ({"levels": 1}, "levels=1.*from 2 to 16"),
        ({"groups": 3}, "groups=3 must divide width=4"),
        ({"padding": "none"}, 'choose "zeros", "periodic" or "reflect"'),
        ({"padding": ("zeros",)}, "1 values for the 2 axes"),
        ({"refine": "cubic"}, "refine='cubic' is not known; choose one of nearest, linear, transposed"),
        ({"task": "language"}, "task='language'"),
        ({"loss": "cross_entropy"}, "set task='classification'"),
        ({"dropout": 1.0}, "dropout rate"),
        ({"activation": "selu"}, "choose one of gelu, silu"),
        ({"space": (4,)}, "the extents of its 2 axes"),
        ({"width": 0}, "width"),
    ],
)
def test_wrong_settings_are_refused(settings, why):
    with pytest.raises(ConfigError, match=why):
        make(**settings) if "axes" not in settings else UNet(2, 3, **settings)


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (np.zeros((2, 7, 2)), "block 'down.0', layer 'conv1', Conv: takes fields"),
        (np.zeros((2, 2, 7, 4)), "channels come last"),
        (np.zeros((2, 7, 4, 2), complex), "takes real numbers"),
        (np.zeros((2, 0, 4, 2)), "has 0 positions"),
    ],
)
def test_what_is_no_field_is_refused(x, why):
    model = make()
    with pytest.raises(DataError, match=why):
        evaluate(model, bind(model, initial_parameters(model)), x)
