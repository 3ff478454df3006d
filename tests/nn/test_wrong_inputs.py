"""What layers, models and losses cannot take is an error that names them, what was given and what they take."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mpizero import nn
from mpizero.errors import ConfigError, DataError
from mpizero.layout.flat import nested
from mpizero.types import Run
from tests.nn.groups import Model

VECTORS = np.linspace(-1, 1, 80, dtype=np.float32).reshape(2, 5, 8)
IDS = np.arange(10).reshape(2, 5)
LAYERS = [
    nn.Linear(8, 3),
    nn.Projection(8, 6),
    nn.Embedding(10, 8),
    nn.Position(6, 8),
    nn.TokenEmbedding(10, 6, 8),
    nn.LayerNorm(8),
    nn.RMSNorm(8),
    nn.GELU(),
    nn.Tanh(),
    nn.Dropout(0.5),
    nn.FeedForward(8),
    nn.TransformerBlock(8, 2),
    nn.CausalSelfAttention(8, 2),
    nn.Select(8, (0, 1)),
    nn.LanguageHead(8, 10),
    nn.Sequential({"first": nn.Linear(8, 4), "second": nn.Linear(4, 4)}),
    nn.Checkpointed(nn.Linear(8, 3)),
    nn.Frozen(nn.Linear(8, 3)),
    nn.MaxPool(2),
    nn.AvgPool((2,)),
    nn.Upsample(2),
    nn.GroupNorm(2, 8),
    nn.InstanceNorm(8),
    nn.ChannelLayerNorm(8),
    nn.Residual(nn.GroupNorm(2, 8)),
    nn.Concatenate(nn.GroupNorm(2, 8)),
]
INPUTS = {
    "vectors": VECTORS,
    "rows": VECTORS[0],
    "ids": IDS,
    "float64": VECTORS.astype(np.float64),
    "float16": VECTORS.astype(np.float16),
    "int": np.ones((2, 5, 8), int),
    "bool": np.ones((2, 5, 8), bool),
    "complex": VECTORS + 1j,
    "str": np.full((2, 5, 8), "a"),
    "object": np.full((2, 5, 8), None),
    "datetime": np.zeros((2, 5, 8), "M8[s]"),
    "list": VECTORS.tolist(),
    "mapping": {"x": VECTORS},
    "none": None,
    "number": 1.0,
    "other features": VECTORS[..., :7],
    "one axis": VECTORS[0, 0],
    "no axis": VECTORS[0, 0, 0],
    "four axes": VECTORS[None],
    "no samples": VECTORS[:0],
    "no places": VECTORS[:, :0],
    "too long": np.zeros((2, 9, 8), np.float32),
    "great ids": IDS + 5,
    "negative ids": IDS - 5,
    "ids of floats": IDS.astype(np.float32),
    "ids of one axis": IDS[0],
    "long ids": np.zeros((2, 9), int),
}
#: What no layer can take.
IMPOSSIBLE = {"complex", "str", "object", "datetime", "list", "mapping", "none", "number"}


def model_of(layer):
    return Model({"encoder.2": layer}, nn.MeanSquaredError(), "f4")


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_layer_takes_an_input_or_names_itself_and_what_it_was_given(layer):
    params = nn.bind(model_of(layer), nn.initial_parameters(model_of(layer)))["encoder.2"]
    grads = nested(dict([(spec.name, np.empty(spec.shape, np.float32)) for spec in layer.specs()]))
    names = "|".join({type(each).__name__ for each in (layer, getattr(layer, "layer", 0), *layer.children().values())})
    for kind, x in INPUTS.items():
        said = ""
        try:
            y, cache = layer.forward(params, x, Run(training=True))
            layer.backward(params, cache, np.ones_like(y), grads)
        except DataError as error:
            said = str(error)
        assert said or kind not in IMPOSSIBLE, kind
        assert not said or re.search(rf"({names}): takes .*the input (has|is) ", said), kind


def test_a_block_in_another_type_than_the_models_computes_in_the_models():
    block = nn.TransformerBlock(8, 2)
    model = model_of(block)
    params = nn.bind(model, nn.initial_parameters(model))["encoder.2"]
    expected, _ = block.forward(params, VECTORS)
    found, _ = block.forward(params, VECTORS.astype(np.float64))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_whole_models_name_the_block_and_the_layer_in_it():
    inside = nn.Sequential({"first": nn.Linear(8, 4), "second": nn.Linear(3, 2)})
    model = model_of(inside)
    values, x = nn.initial_parameters(model), VECTORS[0]
    message = r"^block 'encoder.2', layer 'second', Linear: takes 3 features on the last axis, .* shape \(5, 4\)$"
    with pytest.raises(DataError, match=message):
        nn.loss_and_gradients(model, values, (x, x))
    with pytest.raises(DataError, match=message):
        nn.evaluate(model, nn.bind(model, values), x)


def gpt(**settings):
    return nn.GPT(**{"dim": 12, "layers": 2, "heads": 3, "sequence": 7, "vocabulary": 11, **settings})


def mlp(**settings):
    return nn.MLP(**{"features": 4, "hidden": (5, 3), "outputs": 2, **settings})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.CausalSelfAttention(10, 4), "dim=10 is not divisible by heads=4"),
        (lambda: nn.Linear(0, 3), "inputs=0: expected a whole number >= 1"),
        (lambda: nn.Linear(3, -1), "outputs=-1"),
        (lambda: nn.Embedding(5, 2.5), "features=2.5"),
        (lambda: nn.Dropout(1.0), "rate=1.0"),
        (lambda: nn.Dropout(0.1, site=-1), "site=-1"),
        (lambda: nn.LayerNorm(4, eps=0.0), "eps=0.0"),
        (lambda: nn.FeedForward(4, activation="swoosh"), "activation='swoosh'.*gelu, silu, relu, tanh"),
        (lambda: nn.Sequential([nn.Linear(2, 2), "tanh"]), "'tanh' must be a layer"),
        (lambda: nn.Sequential({"a.b": nn.ReLU()}), "without dots"),
        (lambda: gpt(heads=5), "dim=12 is not divisible by heads=5"),
        (lambda: gpt(layers=0), "layers=0"),
        (lambda: gpt(sequence=-3), "sequence=-3"),
        (lambda: gpt(vocabulary=2.0), "vocabulary=2.0"),
        (lambda: gpt(dropout=1.5), "dropout rate=1.5"),
        (lambda: gpt(dtype="float16"), "'float16' is not supported"),
        (lambda: gpt(dtype="flout"), "'flout' is not supported"),
        (lambda: gpt(seed=-1), "seed=-1"),
        (lambda: mlp(features=0), "features=0"),
        (lambda: mlp(hidden=(5, 0)), r"hidden\[1\]=0"),
        (lambda: mlp(activation="elu"), "activation='elu'"),
        (lambda: mlp(task="ranking"), "task='ranking'"),
        (lambda: mlp(active_features=(4,)), r"active_features=\(4,\) must lie in 0 to 3"),
        (lambda: mlp(loss="huber"), "loss='huber' does not belong to task='classification'; set task="),
        (lambda: mlp(loss=nn.L1Loss, task="regression"), "loss=<class .*an object with forward and"),
        (lambda: nn.HuberLoss(0), "HuberLoss: delta=0: expected a finite number > 0"),
        (lambda: nn.BCEWithLogitsLoss([1.0, -1.0]), "pos_weight=-1.0: expected a finite number > 0"),
        (lambda: nn.RelativeL2Loss(-1), "RelativeL2Loss: eps=-1"),
        (lambda: nn.GaussianNLLLoss(eps=0.0), "GaussianNLLLoss: eps=0.0"),
    ],
)
def test_settings_that_cannot_be_used_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
