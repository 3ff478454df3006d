"""A rollout has the values and gradients of its steps written one after the other, and the memory of one of them."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from mpizero import nn
from mpizero.errors import ConfigError, DataError
from mpizero.layout.flat import nested
from mpizero.testing import check_model
from mpizero.types import BlockModel, Init, ParameterSpec, Run
from tests.nn.checks import gradient_slots, random_parameters, require_contract

STEPS = 4
LAYERS = {
    "mlp": (nn.Sequential([nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)]), (3,)),
    "fno": (nn.FNO(3, 3, 1, modes=3, width=4, layers=1), (7, 3)),
    "unet": (nn.UNet(2, 2, 2, width=2, groups=1, levels=2), (5, 4, 2)),
    "further channels": (nn.Sequential([nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)]), (4, 3)),
}


def repeated(name: str, **settings: Any) -> nn.Repeat:
    made, _ = LAYERS[name]
    if isinstance(made, nn.Layer):
        return nn.Repeat(made, STEPS, **settings)
    return nn.Rollout(made, STEPS, **settings).blocks[""]


def unrolled(layer: nn.Repeat, params: Any, x: Any, dy: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return output and gradients of the steps, each of which has its own parameters and keeps its activations."""
    step, states, caches, inputs = layer.layer, [], [], x
    for _ in range(layer.steps):
        y, cache = step.forward(params, inputs)
        y = inputs[..., : y.shape[-1]] + y if layer.residual else y
        states.append(y)
        caches.append(cache)
        inputs = np.concatenate([y, x[..., y.shape[-1] :]], axis=-1)
    channels, total, dx = y.shape[-1], {}, np.zeros_like(x)
    parts = np.split(dy, layer.steps, axis=-1)
    for number in reversed(range(layer.steps)):
        flat, grads = gradient_slots(step)
        d = parts[number] + dx[..., :channels]
        above = step.backward(params, caches[number], d, grads)
        above[..., :channels] += d if layer.residual else 0
        dx = np.concatenate([above[..., :channels], dx[..., channels:] + above[..., channels:]], axis=-1)
        total = {name: total.get(name, 0) + value for name, value in flat.items()}
    return np.concatenate(states, axis=-1), dx, total


@pytest.mark.parametrize(("keep", "residual"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_rollout_has_the_bits_of_its_steps_one_after_the_other(name, keep, residual, rng):
    layer = repeated(name, activation_checkpointing=not keep, residual=residual)
    _, params = random_parameters(layer, rng)
    x = 0.3 * rng.normal(size=(2, *LAYERS[name][1]))
    y, cache = layer.forward(params, x)
    dy, (flat, grads) = rng.normal(size=y.shape), gradient_slots(layer)
    dx = layer.backward(params, cache, dy, grads)
    expected_y, expected_dx, expected = unrolled(layer, params, x, dy)
    np.testing.assert_array_equal(y, expected_y)
    np.testing.assert_array_equal(dx, expected_dx)
    for parameter, value in flat.items():
        np.testing.assert_array_equal(value, expected[parameter], parameter)
    only, (last, grads) = repeated(name, last=True, residual=residual), gradient_slots(layer)
    for form in (layer, only):
        require_contract(form, x)
    end, cache = only.forward(params, x)
    channels = end.shape[-1]
    np.testing.assert_array_equal(end, y[..., -channels:])
    dy[..., :-channels] = 0
    dx = only.backward(params, cache, dy[..., -channels:], grads)
    _, expected_dx, expected = unrolled(layer, params, x, dy)
    np.testing.assert_array_equal(dx, expected_dx)
    for parameter, value in last.items():
        np.testing.assert_array_equal(value, expected[parameter], parameter)


def peak(layer: nn.Repeat, params: Any, x: Any) -> int:
    """Return the bytes that a forward and a backward pass have at most, beside parameters and input."""
    grads = gradient_slots(layer)[1]
    tracemalloc.start()
    try:
        y, cache = layer.forward(params, x)
        layer.backward(params, cache, np.ones_like(y), grads)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_with_recomputation_a_rollout_has_the_activations_of_one_step(rng):
    step = nn.Sequential([nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2)])
    _, params = random_parameters(step, rng)
    x = rng.normal(size=(512, 2))
    for keep in (True, False):
        peak(nn.Repeat(step, 2, activation_checkpointing=not keep), params, x)  # what is allocated once
    state, one = x.nbytes, peak(nn.Repeat(step, 1), params, x)
    ten, kept = (peak(nn.Repeat(step, 10, activation_checkpointing=how), params, x) for how in (True, False))
    activations = 2 * 512 * 256 * 8  # of one step
    assert ten < one + activations / 2 + 10 * 4 * state
    assert kept > one + 8 * activations


def test_a_model_and_its_rollouts_have_the_same_parameters(rng):
    for model in (nn.FNO(2, 2, modes=3, width=4), nn.UNet(1, 1), nn.MLP(2, [3, 4], 2, task="regression")):
        net = nn.Rollout(model, 3)
        assert isinstance(net, BlockModel)
        one, other = nn.initial_parameters(model), nn.initial_parameters(net)
        assert list(one) == list(other)
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])
    x, named = rng.normal(size=(5, 2)), nn.initial_parameters(model)
    states = nn.evaluate(net, nn.bind(net, named), x)
    first = nn.evaluate(model, nn.bind(model, named), x)
    np.testing.assert_array_equal(states[:, :2], first)
    np.testing.assert_array_equal(states[:, 2:4], nn.evaluate(model, nn.bind(model, named), first))


@pytest.mark.parametrize(
    "step",
    [
        nn.FNO(3, 2, 1, modes=3, width=4, layers=2, dtype="float64", space=(9,)),
        nn.freeze(nn.UNet(2, 2, 2, width=2, groups=1, levels=2, dtype="float64", space=(6, 5)), "middle.*"),
        nn.MLP(3, [5], 2, task="regression", activation="tanh", dtype="float64"),
    ],
    ids=["fno", "frozen unet", "mlp"],
)
def test_a_rollout_passes_the_check_of_own_models(step, rng):
    net = nn.Rollout(step, 3)
    x = rng.normal(size=(5, *net.sample_shape))
    y = rng.normal(size=(*x.shape[:-1], 6))
    assert "agree with differences" in str(check_model(net, x, y))


def test_a_rollout_of_a_rollout_has_every_so_many_states(rng):
    step, x = nn.MLP(2, [3], 2, task="regression"), rng.normal(size=(5, 2))
    net, all_states = nn.Rollout(nn.Rollout(step, 3, last=True), 2), nn.Rollout(step, 6)
    bound = nn.bind(net, nn.initial_parameters(step))
    states = np.split(nn.evaluate(all_states, bound, x), 6, axis=-1)
    np.testing.assert_array_equal(nn.evaluate(net, bound, x), np.concatenate([states[2], states[5]], axis=-1))


def test_a_frozen_rollout_trains_the_rest(rng):
    net = nn.freeze(nn.Rollout(nn.MLP(2, [3], 2, task="regression", dtype="float64"), 2), "hidden.*")
    x, y = rng.normal(size=(4, 2)), rng.normal(size=(4, 4))
    _, _, gradients = nn.loss_and_gradients(net, nn.initial_parameters(net), (x, y))
    assert sorted(gradients) == ["output.linear.bias", "output.linear.weight"]


def test_a_dropout_has_one_mask_for_all_steps(rng):
    layer, x = nn.Repeat(nn.Dropout(0.5), 3), rng.normal(size=(4, 6))
    run = Run(training=True, seed=1, count=4)
    states = np.split(layer.forward({}, x, run)[0], 3, axis=-1)
    np.testing.assert_array_equal(states[2], 4 * states[0])
    assert 0 < (states[0] == 0).sum() < 24


def test_operations_and_shapes_are_those_of_all_steps():
    step = nn.FNO(2, 2, 1, modes=3, width=4, layers=1, space=(8,))
    net, once = nn.Rollout(step, 3), sum(one.forward for one in nn.model_operations(step, (8, 2)).values())
    count = nn.model_operations(net, (8, 2))[""]
    assert count.forward == 3 * once
    assert count.backward_input > count.forward
    kept = nn.model_operations(nn.Rollout(step, 3, activation_checkpointing=False), (8, 2))[""]
    assert count.backward_input - kept.backward_input == count.forward
    assert net.blocks[""].output_shape((8, 2)) == (8, 6)
    (node,) = net.export_computation_graph()["nodes"]
    assert node["attributes"]["steps"] == 3


class Mean(nn.Layer):
    """A layer with an average."""

    def own_specs(self) -> Any:
        return (ParameterSpec("mean", (2,), Init("zeros"), averaged=True, trainable=False),)

    def forward(self, params: Any, x: Any, run: Any = None) -> Any:
        return x, None

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return dy, None


class Blocked(Mean):
    """A layer that returns no gradient of its input."""

    def own_specs(self) -> Any:
        return ()

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return None, None


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Repeat(nn.Tanh(), 0), "Repeat: steps=0"),
        (lambda: nn.Repeat(nn.Tanh(), 2, last=1), "Repeat: last=1"),
        (lambda: nn.Repeat("tanh", 2), "Repeat"),
        (lambda: nn.Repeat(Mean(), 2), "Repeat: 'mean' is an average or an integer array"),
        (lambda: nn.Rollout(nn.Tanh(), 2), r"Rollout takes a model of blocks"),
        (lambda: nn.Rollout(nn.MLP, 2), "Rollout takes a model of blocks.*, got <class"),
        (lambda: nn.Rollout(nn.MLP(2, [3], 2), 2), 'MLP with CrossEntropy .*task="regression"'),
        (lambda: nn.Rollout(nn.GPT(8, 1, 2, 8, 8), 2), "GPT with CrossEntropy predicts no state"),
        (lambda: nn.Rollout(nn.FNO(3, 2, 1, loss="gaussian"), 2), "FNO with GaussianNLLLoss predicts no state"),
    ],
)
def test_what_cannot_be_repeated_is_told(make, why):
    with pytest.raises(ConfigError, match=why):
        make()


def test_an_output_that_is_no_input_is_told(rng):
    with pytest.raises(DataError, match=r"the output has shape \(1, 3\), which is no input .* of shape \(1, 2\)"):
        nn.Repeat(nn.Linear(2, 3), 2).forward(random_parameters(nn.Linear(2, 3), rng)[1], np.ones((1, 2)))
    layer = nn.Repeat(Blocked(), 2)
    y, cache = layer.forward({}, np.ones((1, 2)))
    with pytest.raises(ConfigError, match="no gradient reaches the step before"):
        layer.backward({}, cache, y, {})
    with pytest.raises(ConfigError, match=r"blocks whose names begin alike must follow each other, got a\.0, b, a\.1"):
        _ = nn.Rollout(Mixed(), 2)


class Mixed:
    """A model whose blocks take turns."""

    loss, dtype, seed = nn.MeanSquaredError(), np.dtype("f8"), 0
    blocks = {"a.0": nn.Tanh(), "b": nn.Tanh(), "a.1": nn.Tanh()}  # noqa: RUF012


def test_a_step_may_have_no_parameters():
    layer = nn.Repeat(nn.Tanh(), 2)
    y, cache = layer.forward({}, np.ones((1, 1)))
    np.testing.assert_allclose(y, [[np.tanh(1), np.tanh(np.tanh(1))]], rtol=1e-15)
    assert layer.backward(nested({}), cache, np.ones((1, 2)), {}).shape == (1, 1)
