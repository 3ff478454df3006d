from __future__ import annotations

import numpy as np
import pytest

from mpizero import nn
from mpizero.errors import DataError
from mpizero.layout.flat import nested
from mpizero.testing import taylor_test
from mpizero.types import Run
from tests.nn.checks import gradient_slots, random_parameters, require_contract, require_gradients, require_layer

TRAINING = Run(training=True, seed=3, step=5, first_sample=11)

LAYERS = {
    "linear": (nn.Linear(4, 3), (5, 4)),
    "linear without bias": (nn.Linear(4, 3, bias=False), (2, 3, 4)),
    "projection": (nn.Projection(4, 3), (2, 3, 4)),
    "layernorm": (nn.LayerNorm(5), (2, 3, 5)),
    "rmsnorm": (nn.RMSNorm(5), (2, 3, 5)),
    "gelu": (nn.GELU(), (3, 4)),
    "silu": (nn.SiLU(), (3, 4)),
    "relu": (nn.ReLU(), (3, 4)),
    "tanh": (nn.Tanh(), (3, 4)),
    "dropout": (nn.Dropout(0.4, site=2), (3, 7)),
    "position": (nn.Position(4, 3), (2, 3, 3)),
    "select": (nn.Select(4, (0, 2)), (3, 4)),
    "attention": (nn.CausalSelfAttention(4, 2), (2, 5, 4)),
    "attention with dropout": (nn.CausalSelfAttention(4, 2, dropout=0.3, site=1), (2, 5, 4)),
    "feed forward": (nn.FeedForward(3, 5), (2, 2, 3)),
    "block": (nn.TransformerBlock(4, 2), (2, 3, 4)),
    "block with dropout": (nn.TransformerBlock(4, 2, dropout=0.3, site=1), (2, 3, 4)),
    "head": (nn.LanguageHead(4, 5), (2, 3, 4)),
    "sequential": (nn.Sequential([nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]), (4, 3)),
    "checkpointed": (nn.Checkpointed(nn.TransformerBlock(4, 2, dropout=0.3, site=1)), (2, 3, 4)),
    "frozen": (nn.Frozen(nn.Linear(4, 3)), (5, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_finite_differences_and_zero_of_no_samples_and_halves_make_the_whole(name, rng):
    require_layer(*LAYERS[name], rng, TRAINING)


@pytest.mark.parametrize(
    "layer", [nn.Embedding(6, 3), nn.TokenEmbedding(6, 5, 3), nn.TokenEmbedding(6, 4, 3, dropout=0.3)]
)
def test_embeddings_have_gradients_for_tables_and_none_for_ids(layer):
    ids = np.array([[0, 5, 5, 1], [2, 0, 5, 1]])
    assert require_gradients(layer, ids, TRAINING) is None
    require_contract(layer, ids.astype(np.uint8), TRAINING)


@pytest.mark.parametrize("length", [1, 64, 65, 130])
def test_attention_in_blocks_equals_attention_in_one_product(length, rng):
    layer = nn.CausalSelfAttention(6, 2)
    x = rng.normal(size=(2, length, 6))
    w, b = rng.normal(size=(6, 18)), rng.normal(size=18)
    params = {"qkv": {"weight": w, "bias": b}, "projection": {"weight": np.eye(6), "bias": np.zeros(6)}}
    q, k, v = (x @ w + b).reshape(2, length, 3, 2, 3).transpose(2, 0, 3, 1, 4)
    scores = np.where(np.tri(length, dtype=bool), q @ k.swapaxes(-1, -2) / np.sqrt(3), -np.inf)
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    expected = (probabilities @ v).transpose(0, 2, 1, 3).reshape(2, length, 6)
    np.testing.assert_allclose(layer.forward(params, x)[0], expected, rtol=1e-12, atol=1e-12)


def test_attention_gradients_hold_across_blocks(rng):
    """A direction through all parameters and inputs at once, at a length of more than one block."""
    layer = nn.CausalSelfAttention(4, 2)
    (flat, params), (gradients, grads) = random_parameters(layer, rng), gradient_slots(layer)
    x, dy = rng.normal(size=(2, 1, 130, 4))

    def value(point):
        return float((layer.forward(nested(point), point["x"])[0] * dy).sum())

    dx = layer.backward(params, layer.forward(params, x)[1], dy, grads)
    taylor_test(value, {**gradients, "x": dx}, {**flat, "x": x})


def test_checkpointing_keeps_only_the_input_and_every_bit(rng):
    plain = nn.TransformerBlock(8, 2, dropout=0.2, site=4)
    _, params = random_parameters(plain, rng, np.float32)
    x, dy = rng.normal(size=(2, 3, 5, 8)).astype(np.float32)
    results = []
    for layer in (plain, nn.Checkpointed(plain)):
        flat, grads = gradient_slots(layer, np.float32)
        y, cache = layer.forward(params, x, TRAINING)
        results.append([y, layer.backward(params, cache, dy, grads), *flat.values()])
    assert cache[0] is x
    assert cache[1:] == (TRAINING,)
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_dropout_outside_training_is_the_identity():
    x = np.ones((2, 3))
    assert nn.Dropout(0.5).forward({}, x, Run(training=False))[0] is x
    assert nn.Dropout(0.0).forward({}, x, Run(training=True))[0] is x


def test_only_matrices_take_weight_decay():
    for spec in (
        *nn.TransformerBlock(4, 2).specs(),
        *nn.TokenEmbedding(5, 3, 4).specs(),
        *nn.LanguageHead(4, 5, "x").specs(),
    ):
        wanted = spec.name.endswith(("qkv.weight", "expand.weight")) or (
            spec.name.endswith("projection.weight") and spec.tied is None
        )
        assert spec.decay == wanted, spec.name


@pytest.mark.parametrize(
    ("layer", "x", "message"),
    [
        (nn.TokenEmbedding(6, 4, 3), np.array([[1, 6]]), "ids from 0 to 5, the input has ids from 1 to 6"),
        (nn.TokenEmbedding(6, 4, 3), np.array([[-1, 2]]), "ids from -1 to 2"),
        (nn.TokenEmbedding(6, 4, 3), np.array([[1.0]]), "dtype float64"),
        (nn.TokenEmbedding(6, 4, 3), np.array([[1, 2, 3, 4, 5]]), r"length <= 4.*shape \(1, 5\)"),
        (nn.TokenEmbedding(6, 4, 3), np.array([1]), r"shape \(1,\)"),
        (nn.Linear(4, 2), np.zeros((2, 3)), r"4 features.*shape \(2, 3\)"),
        (nn.Position(4, 3), np.zeros((2, 5, 3)), r"length <= 4, 3\), the input has shape \(2, 5, 3\)"),
        (nn.Position(4, 3), np.zeros((4, 3)), r"length <= 4, 3\), the input has shape \(4, 3\)"),
        (nn.Position(1, 3), np.zeros((2, 5, 3)), "length <= 1"),  # places are never stretched over a longer sequence
    ],
)
def test_ids_outside_of_the_table_and_inputs_of_other_shapes_are_refused(layer, x, message, rng):
    with pytest.raises(DataError, match=message):
        layer.forward(random_parameters(layer, rng)[1], x)
