"""What a layer cannot take is an error that names it, what it was given and what it takes: never another."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

from mpizero import nn
from mpizero.errors import DataError
from mpizero.layout.flat import nested
from mpizero.types import Run

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
    return SimpleNamespace(blocks={"encoder.2": layer}, loss=nn.MeanSquaredError(), dtype=np.dtype("f4"), seed=0)


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
