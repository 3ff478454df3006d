from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero import nn
from mpizero.errors import ConfigError, DataError, UnsupportedError
from mpizero.layout.fields import tile_boxes, tree_sum
from mpizero.layout.flat import nested
from mpizero.nn.layer import Graph, NodeOutput
from tests.nn.checks import gradient_slots, random_parameters, require_layer

#: Space by the number of axes: odd extents, and one axis of a single position.
SPACES = {1: (7,), 2: (5, 3), 3: (3, 1, 5)}

LAYERS = {
    "max pool": nn.MaxPool(2),
    "max pool, whole windows": nn.MaxPool(3, partial=False),
    "max pool, windows that overlap": nn.MaxPool(3, 2),
    "max pool with gaps": nn.MaxPool(1, 2),
    "mean pool": nn.AvgPool(2),
    "mean pool, whole windows": nn.AvgPool(3, 1, partial=False),
    "mean pool, windows that overlap": nn.AvgPool(3, 2),
    "mean pool with gaps": nn.AvgPool(2, 3),
    "repetition": nn.Upsample(3),
    "interpolation": nn.Upsample(2, "linear"),
    "interpolation by three": nn.Upsample(3, "linear"),
    "group norm": nn.GroupNorm(2, 6),
    "group norm of one group": nn.GroupNorm(1, 6, eps=0.1),
    "instance norm": nn.InstanceNorm(6),
    "instance norm without weights": nn.InstanceNorm(6, affine=False),
    "layer norm": nn.ChannelLayerNorm(6),
    "residual": nn.Residual(nn.GroupNorm(3, 6)),
    "residual with a shortcut": nn.Residual(nn.Linear(6, 2), nn.Linear(6, 2, bias=False)),
    "concatenation": nn.Concatenate(nn.Sequential([nn.MaxPool(2), nn.Linear(6, 2), nn.Upsample(2, "linear")])),
}


def fits(layer, axes):
    """Whether the layer takes the space with ``axes`` axes: without partial windows, an axis of one is too short."""
    return getattr(layer, "partial", True) or axes < 3


CASES = [(name, axes) for name, axes in product(LAYERS, SPACES) if fits(LAYERS[name], axes)]


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_gradients_are_those_of_finite_differences_and_zero_of_no_samples_and_halves_make_the_whole(name, axes, rng):
    require_layer(LAYERS[name], (2, *SPACES[axes], 6), rng)


spaces = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


def windows(space, window, stride):
    """Every output position with the slices of the input that its window covers."""
    outputs = [-(-n // s) for n, s in zip(space, stride, strict=True)]
    for output in np.ndindex(*outputs):
        yield output, tuple(slice(o * s, o * s + k) for o, s, k in zip(output, stride, window, strict=True))


@given(space=spaces, data=st.data())
def test_pooling_takes_maxima_and_means_of_the_positions_that_a_window_has(space, data):
    each = st.tuples(*[st.integers(1, 4)] * len(space))
    window, stride, rng = data.draw(each), data.draw(each), np.random.default_rng(data.draw(st.integers(0, 99)))
    x = rng.integers(0, 4, (2, *space, 3)).astype(float)  # equal maxima are frequent
    for layer, value in ((nn.MaxPool, np.max), (nn.AvgPool, np.mean)):
        y, cache = layer(window, stride).forward({}, x)
        dy = rng.normal(size=y.shape)
        expected, dx = np.full(y.shape, np.nan), np.zeros_like(x)
        for output, box in windows(space, window, stride):
            for n, c in product(range(2), range(3)):
                part, given_dx = x[(n, *box, c)], dx[(n, *box, c)]
                expected[(n, *output, c)] = value(part)
                share = np.full(part.shape, 1 / part.size)
                if layer is nn.MaxPool:
                    share = (np.arange(part.size) == part.argmax()).reshape(part.shape)
                given_dx += share * dy[(n, *output, c)]
        np.testing.assert_allclose(y, expected, rtol=1e-14)
        np.testing.assert_allclose(layer(window, stride).backward({}, cache, dy, {}), dx, rtol=1e-13, atol=1e-14)


@given(space=spaces, data=st.data())
def test_upsampling_repeats_or_interpolates_between_half_pixel_centers(space, data):
    factor = data.draw(st.tuples(*[st.integers(1, 4)] * len(space)))
    x = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(2, *space, 3))
    repeated = interpolated = x
    for axis, (n, f) in enumerate(zip(space, factor, strict=True), start=1):
        repeated = np.repeat(repeated, f, axis)
        centers = (np.arange(n * f) + 0.5) / f - 0.5
        interpolated = np.apply_along_axis(
            lambda line, at=centers: np.interp(at, range(len(line)), line), axis, interpolated
        )
    np.testing.assert_array_equal(nn.Upsample(factor).forward({}, x)[0], repeated)
    np.testing.assert_allclose(nn.Upsample(factor, "linear").forward({}, x)[0], interpolated, rtol=1e-13, atol=1e-14)


@given(space=spaces, groups=st.sampled_from([1, 2, 3, 6]), offset=st.sampled_from([0.0, 1e4]), seed=st.integers(0, 99))
def test_normalized_groups_are_those_of_mean_and_variance(space, groups, offset, seed):
    rng = np.random.default_rng(seed)
    x, weight, bias = offset + rng.normal(size=(2, *space, 6)), rng.normal(size=6), rng.normal(size=6)
    parts = x.reshape(2, -1, groups, 6 // groups)
    mean, variance = parts.mean((1, 3), keepdims=True), parts.var((1, 3), keepdims=True)
    expected = ((parts - mean) / np.sqrt(variance + 1e-3)).reshape(x.shape) * weight + bias
    y, _ = nn.GroupNorm(groups, 6, eps=1e-3).forward({"weight": weight, "bias": bias}, x)
    np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-9)
    if groups == 6:
        same, _ = nn.InstanceNorm(6, eps=1e-3).forward({"weight": weight, "bias": bias}, x)
        np.testing.assert_array_equal(same, y)


def test_statistics_are_those_of_tiles_and_weights_gradients_one_partial_sum_for_each(rng):
    """The sums that ranks with parts of the field would have to make, by hand; to the last bit."""
    layer, shape = nn.InstanceNorm(3), (4, 11, 9, 3)
    x, dy = rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)
    params = {"weight": np.ones(3, np.float32), "bias": np.zeros(3, np.float32)}
    _, cache = layer.forward(params, x)
    grads = {name: np.full(3, np.nan, np.float32) for name in params}
    layer.backward(params, cache, dy, grads)
    whole = []
    for box in tile_boxes(shape[1:3]):
        total = np.zeros(3)
        for sample in dy[:, *box]:
            of_sample = np.zeros(3)
            for row in sample.reshape(-1, 3):
                of_sample += row
            total += of_sample
        whole.append(total.astype(np.float32))
    np.testing.assert_array_equal(grads["bias"], tree_sum(np.array(whole), np.add))


def test_a_nan_is_the_maximum_of_its_window():
    x = np.array([[1.0, np.nan, 5.0, 2.0]])[..., None]
    y, cache = nn.MaxPool(2).forward({}, x)
    np.testing.assert_array_equal(y[0, :, 0], [np.nan, 5.0])
    np.testing.assert_array_equal(nn.MaxPool(2).backward({}, cache, np.ones_like(y), {})[0, :, 0], [0, 1, 1, 0])


def test_minus_zero_and_infinity_are_repeated_and_interpolated():
    x = np.array([[-0.0, np.inf]])[..., None]
    np.testing.assert_array_equal(np.signbit(nn.Upsample(2).forward({}, x)[0][0, :, 0]), [True, True, False, False])
    np.testing.assert_array_equal(nn.Upsample(3, "linear").forward({}, x)[0][0, :2, 0], [0.0, 0.0])


def test_fields_that_are_not_contiguous_are_taken(rng):
    x = rng.normal(size=(2, 6, 5, 4)).transpose(0, 3, 2, 1)  # as from PyTorch's order of axes
    for layer in (nn.MaxPool(2), nn.AvgPool(2), nn.Upsample(2), nn.Upsample(2, "linear"), nn.InstanceNorm(6)):
        _, params = random_parameters(layer, rng)
        y, cache = layer.forward(params, x)
        copy, copied = layer.forward(params, x.copy())
        np.testing.assert_array_equal(y, copy)
        dy, grads = rng.normal(size=y.shape[:1] + y.shape[:0:-1]).transpose(0, 3, 2, 1), gradient_slots(layer)[1]
        dx = layer.backward(params, cache, dy, grads)
        np.testing.assert_array_equal(dx, layer.backward(params, copied, dy.copy(), grads))


FIELD = np.zeros((2, 4, 3, 6))


@pytest.mark.parametrize(
    ("layer", "x", "message"),
    [
        (
            nn.MaxPool(2),
            FIELD[0, 0],
            r"MaxPool: takes fields \(samples, one to three axes of space, channels\), the in",
        ),
        (nn.MaxPool(2), FIELD.astype(int), "MaxPool: takes float32 or float64, the input has dtype int64; cast"),
        (nn.MaxPool((2, 2, 2)), FIELD, r"three axes of space, channels\), the input has shape \(2, 4, 3, 6\)"),
        (nn.AvgPool(4, partial=False), FIELD, r"at least \(4, 4\) positions, the input has shape .*; partial=True"),
        (nn.AvgPool(2, (1, 1)), FIELD[:, 0], r"two axes of space, channels\), the input has shape \(2, 3, 6\)"),
        (nn.Upsample((2,)), FIELD, r"Upsample: takes fields \(samples, one axis of space"),
        (nn.GroupNorm(2, 4), FIELD, r"space, 4\), the input has shape \(2, 4, 3, 6\); channels come last"),
        (nn.InstanceNorm(6), FIELD.tolist(), "InstanceNorm: takes arrays, the input is of type list"),
        (nn.Residual(nn.AvgPool(2)), FIELD, r"output has shape \(2, 2, 2, 6\), the input has shape \(2, 4, 3, 6\)"),
        (nn.Residual(nn.AvgPool(2), nn.ReLU()), FIELD, "the shortcut's output has shape"),
        (nn.Concatenate(nn.AvgPool(2)), FIELD, r"output has shape \(2, 2, 2, 6\), the input has shape \(2, 4, 3, 6\)"),
        (nn.Residual(nn.ReLU()), FIELD.tolist(), "Residual: takes arrays, the input is of type list"),
    ],
)
def test_inputs_that_a_layer_cannot_take_are_refused_with_what_it_takes(layer, x, message, rng):
    with pytest.raises(DataError, match=message):
        layer.forward(random_parameters(layer, rng)[1], x)


def test_shapes_that_a_layer_cannot_take_are_refused_before_it_runs():
    with pytest.raises(DataError, match=r"input has shape \(samples, 4, 4\)"):
        nn.MaxPool((2, 2)).output_shape((4, 4))
    with pytest.raises(DataError, match=r"input has shape \(samples, 4, 1, 4\)"):
        nn.MaxPool(2, partial=False).output_shape((4, 1, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.MaxPool(0), "MaxPool: window=0: expected a whole number >= 1, or a tuple of one to three"),
        (lambda: nn.AvgPool((2, 0)), "AvgPool: window="),
        (lambda: nn.AvgPool(2, (2, 2, 2, 2)), "AvgPool: stride="),
        (lambda: nn.AvgPool((2, 2), (2,)), "must have one number for an axis"),
        (lambda: nn.Upsample(1.5), "Upsample: factor="),
        (lambda: nn.Upsample(2, "liner"), "nearest, linear.*did you mean 'linear'"),
        (lambda: nn.GroupNorm(4, 6), "channels=6 must be a multiple of groups=4"),
        (lambda: nn.InstanceNorm(0), "InstanceNorm: channels=0"),
        (lambda: nn.ChannelLayerNorm(2, eps=0.0), "ChannelLayerNorm: eps"),
        (lambda: nn.GroupNorm(2, 4, eps=0.0), "GroupNorm: eps=0.0"),
        (lambda: nn.Residual(nn.ReLU), "Residual takes a layer"),
        (lambda: nn.Concatenate(3), "Concatenate takes a layer"),
    ],
)
def test_settings_that_make_no_layer_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_arrays_on_a_gpu_are_refused_in_one_line():
    class OnDevice:
        __cuda_array_interface__ = {}

    for layer in (nn.MaxPool(2), nn.AvgPool(2), nn.Upsample(2), nn.GroupNorm(1, 2), nn.InstanceNorm(2)):
        with pytest.raises(UnsupportedError, match=rf'^{type(layer).__name__}: .* on the CPU only; set device="cpu"$'):
            layer.forward({}, OnDevice())


def test_branches_say_how_they_are_joined_and_count_the_operations_of_their_layers():
    inner = nn.Sequential([nn.AvgPool(2), nn.Linear(6, 2), nn.Upsample(2)])
    graph = Graph()
    join = nn.Concatenate(inner).trace(graph, "net", NodeOutput("x", (4, 3, 6)))
    assert join == ("net.concatenate", (4, 3, 8))
    assert [(node["op"], node["inputs"]) for node in graph.nodes[-2:]] == [
        ("Crop", ["net.layer.2"]),
        ("Concatenate", ["x", "net.crop"]),
    ]
    assert nn.Concatenate(inner).operations((4, 4, 6)) == nn.Linear(6, 2).operations((2, 2, 6))
    graph, both = Graph(), nn.Residual(nn.Linear(6, 2), nn.Linear(6, 2))
    join = both.trace(graph, "net", NodeOutput("x", (4, 6)))
    assert (graph.nodes[-1]["op"], graph.nodes[-1]["inputs"]) == ("Add", ["net.shortcut", "net.layer"])
    assert both.operations((4, 6)).total == 2 * nn.Linear(6, 2).operations((4, 6)).total
    graph = Graph()
    nn.Residual(nn.ReLU()).trace(graph, "net", NodeOutput("x", (4, 6)))
    assert graph.nodes[-1]["inputs"] == ["x", "net.layer"]


def test_no_gradient_reaches_the_input_of_a_branch_whose_layer_computes_none(rng):
    for layer in (
        nn.Residual(nn.Linear(3, 3, input_gradient=False)),
        nn.Concatenate(nn.Linear(3, 2, input_gradient=False)),
    ):
        _, params = random_parameters(layer, rng)
        y, cache = layer.forward(params, rng.normal(size=(2, 3)))
        flat, grads = gradient_slots(layer)
        assert layer.backward(params, cache, np.ones_like(y), grads) is None
        assert not any(np.isnan(one).any() for one in flat.values())


def test_branches_compute_in_the_type_of_their_parameters(rng):
    layer = nn.Residual(nn.Concatenate(nn.Linear(4, 2)), nn.Linear(4, 6))
    _, params = random_parameters(layer, rng, np.float32)
    assert layer.forward(params, rng.normal(size=(3, 4)))[0].dtype == np.float32
    assert (
        nn.GroupNorm(2, 4)
        .forward(nested({"weight": np.ones(4, "f4"), "bias": np.ones(4, "f4")}), FIELD[..., :4])[0]
        .dtype
        == np.float32
    )


def test_a_loss_of_fields_is_the_loss_alone_and_takes_its_weights(rng):
    prediction, target = rng.normal(size=(2, 3, 16, 16, 4))
    of_rows, of_samples, mask = rng.random((3, 16)), rng.random(3), rng.random((3, 16, 16)) > 0.5
    for loss in (nn.MeanSquaredError(), nn.HuberLoss()):
        for weights in ({}, {"weight": of_rows}, {"mask": mask}, {"weight": of_samples}):
            given, in_field = {"target": target, **weights}, nn.FieldLoss(loss)
            total, weight, cache = in_field.forward(prediction, given)
            expected, wanted, alone = loss.forward(prediction, given)
            np.testing.assert_allclose([total / 256, weight / 256], [expected, wanted], rtol=1e-12)
            np.testing.assert_allclose(in_field.backward(cache, 1 / 256), loss.backward(alone), rtol=1e-12, atol=1e-15)
    labels = rng.integers(-1, 4, (3, 16, 16))
    assert nn.FieldLoss(nn.CrossEntropy()).forward(prediction, labels)[1] == (labels >= 0).sum()
