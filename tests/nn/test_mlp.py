from __future__ import annotations

import json

import numpy as np
import pytest

from mpizero.errors import DataError
from mpizero.nn import (
    FNO,
    GPT,
    MLP,
    Rollout,
    UNet,
    bind,
    evaluate,
    export_computation_graph,
    initial_parameters,
    loss_and_gradients,
)
from mpizero.types import BlockModel
from tests.nn.checks import central_difference
from tests.nn.groups import perturbed


def make(**changes):
    return MLP(**{"features": 4, "hidden": (5, 3), "outputs": 2, "dtype": "float64", **changes})


@pytest.mark.parametrize(
    ("task", "options"),
    [("classification", {}), ("regression", {"hidden": ()}), ("regression", {"active_features": (0, 3)})],
)
def test_gradients_are_those_of_finite_differences(task, options, rng):
    model = make(task=task, **options)
    assert isinstance(model, BlockModel)
    named = initial_parameters(model)
    x = rng.normal(size=(6, 4))
    y = rng.integers(0, 2, 6) if task == "classification" else rng.normal(size=(6, 2))
    _, weight, gradients = loss_and_gradients(model, named, (x, y), scale=0.5)
    assert weight == 6.0
    for name, value in named.items():
        slope = central_difference(lambda: loss_and_gradients(model, named, (x, y))[0], value, 1e-6)
        np.testing.assert_allclose(gradients[name], slope / 2, rtol=1e-6, atol=1e-8, err_msg=name)


def test_inputs_of_another_dtype_are_cast_to_the_models(rng):
    model = make(dtype="float32")
    params = bind(model, initial_parameters(model))
    x = rng.integers(0, 9, (3, 4))
    assert evaluate(model, params, x).dtype == np.float32
    np.testing.assert_array_equal(evaluate(model, params, x), evaluate(model, params, x.astype(np.float64)))


def test_features_that_are_not_active_change_nothing(rng):
    model = make().with_active_features([3, 1])
    params = bind(model, initial_parameters(model))
    x = rng.normal(size=(5, 4))
    other = x.copy()
    other[:, [0, 2]] = np.nan
    np.testing.assert_array_equal(evaluate(model, params, x), evaluate(model, params, other))
    assert model.active_feature_indices == (1, 3)
    assert make().active_feature_indices == (0, 1, 2, 3)


def test_feature_importance_is_the_share_of_absolute_first_layer_weights():
    model = make(hidden=(2,))
    named = initial_parameters(model)
    named["hidden.0.linear.weight"][...] = [[1, -1], [0, 0], [3, 3], [0, -8]]
    assert model.feature_importance(bind(model, named)) == pytest.approx({"0": 1 / 8, "1": 0, "2": 3 / 8, "3": 4 / 8})
    reduced = model.with_active_features([0, 2])
    assert reduced.feature_importance(bind(model, named)) == pytest.approx({"0": 0.25, "1": 0, "2": 0.75, "3": 0})


def test_feature_importance_of_a_gpt_is_the_share_of_row_norms():
    model = GPT(dim=2, layers=1, heads=1, sequence=3, vocabulary=3)
    named = initial_parameters(model)
    named["embedding.token.weight"][...] = [[3, 4], [0, 0], [0, 5]]
    assert model.feature_importance(bind(model, named)) == pytest.approx({"0": 0.5, "1": 0, "2": 0.5})
    assert model.active_feature_indices == (0, 1, 2)
    with pytest.raises(NotImplementedError, match="cannot ignore vocabulary items"):
        model.with_active_features((0,))


@pytest.mark.parametrize(
    ("dtype", "activation", "options"),
    [
        ("float32", "relu", {}),
        ("float64", "gelu", {"hidden": ()}),
        ("float32", "silu", {"hidden": (9,), "active_features": (0, 2)}),
        ("float64", "tanh", {}),
    ],
)
def test_compiled_prediction_of_an_mlp_equals_evaluation(dtype, activation, options, rng):
    model = make(dtype=dtype, activation=activation, **options)
    params = bind(model, initial_parameters(model))
    predict = model.compile_predictor(params)
    for rows in (0, 1, 7):
        x = rng.normal(size=(rows, 4))
        found, expected = predict(x), evaluate(model, params, x)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-4 if dtype == "float32" else 1e-12, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tied"), [("float32", True), ("float64", False)])
def test_compiled_prediction_of_a_gpt_equals_evaluation(dtype, tied, rng):
    model = GPT(dim=12, layers=2, heads=3, sequence=9, vocabulary=13, tied=tied, dtype=dtype)
    params = bind(model, perturbed(model))
    predict, tolerance = model.compile_predictor(params), 1e-4 if dtype == "float32" else 1e-12
    for shape in ((1, 1), (3, 9), (2, 6), (0, 4)):
        x = rng.integers(0, 13, shape)
        np.testing.assert_allclose(predict(x), evaluate(model, params, x), rtol=tolerance, atol=tolerance)
    with pytest.raises(DataError, match="ids from 0 to 12"):
        predict(np.array([[13]]))
    with pytest.raises(DataError, match="length <= 9"):
        predict(np.zeros((1, 10), int))


def test_a_compiled_predictor_keeps_its_own_parameters(rng):
    model = make()
    named = initial_parameters(model)
    predict = model.compile_predictor(bind(model, named))
    x = rng.normal(size=(2, 4))
    before = predict(x)
    for value in named.values():
        value += 1.0
    np.testing.assert_array_equal(predict(x), before)


@pytest.mark.parametrize(
    "model",
    [
        make(active_features=(1,)),
        GPT(dim=4, layers=2, heads=2, sequence=5, dropout=0.1),
        UNet(2, 3, width=4, groups=2, levels=2, space=(7, 4)),
        FNO(2, 3, 3, modes=2, width=4, layers=2, space=(3, 5, 2)),
        Rollout(FNO(2, 2, 1, modes=3, width=4, layers=1, space=(8,)), 3),
    ],
    ids=lambda model: type(model).__name__,
)
def test_the_exported_graph_is_json_and_names_every_parameter(model):
    graph = model.export_computation_graph()
    assert json.loads(json.dumps(graph)) == graph
    seen = {"x"}
    for node in graph["nodes"]:
        assert set(node["inputs"]) <= seen, f"{node['name']} comes before its inputs"
        assert node["name"] not in seen
        seen.add(node["name"])
    assert set(graph["outputs"]) <= seen
    shapes = {p["name"]: tuple(p["shape"]) for node in graph["nodes"] for p in node["parameters"]}
    assert shapes == {name: value.shape for name, value in initial_parameters(model).items()}


def test_a_graph_follows_shapes_and_ties():
    graph = GPT(dim=4, layers=1, heads=2, sequence=5, vocabulary=7).export_computation_graph()
    nodes = {node["name"]: node for node in graph["nodes"]}
    assert nodes["blocks.0.attention.qkv"]["shape"] == ["samples", 5, 12]
    assert nodes["blocks.0.residual1"]["inputs"] == ["embedding.position", "blocks.0.attention.projection"]
    assert nodes["head.projection"]["shape"] == ["samples", 5, 7]
    assert nodes["head.projection"]["parameters"] == [{"name": "embedding.token.weight", "shape": [7, 4], "tied": True}]


def test_a_users_own_layer_without_description_is_refused():
    class Model:
        blocks = {"only": object()}
        loss, dtype, seed = None, np.dtype("float32"), 0

    with pytest.raises(NotImplementedError, match="derive it from mpizero.nn.Layer"):
        export_computation_graph(Model(), (3,))
