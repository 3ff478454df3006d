"""Single layers split over a group, between whole activations: outputs and gradients are the unsplit layer's."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero.errors import DataError
from mpizero.layout.flat import nested
from mpizero.nn import (
    GELU,
    CausalSelfAttention,
    Checkpointed,
    CrossEntropy,
    Dropout,
    Embedding,
    FeedForward,
    Frozen,
    LanguageHead,
    LayerNorm,
    Linear,
    Position,
    Projection,
    RMSNorm,
    Select,
    Sequential,
    Tanh,
    TokenEmbedding,
    TransformerBlock,
)
from mpizero.nn.tensor_parallel import SplitCrossEntropy
from mpizero.types import Run
from tests.nn.tensor import Apart, Counting, assembled, on_ranks, taken

TRAINING = Run(training=True, seed=3, step=5, first_sample=11)

LAYERS = {
    "linear": (Linear(4, 7), (5, 4)),
    "linear without bias": (Linear(4, 7, bias=False), (2, 3, 4)),
    "linear of one output": (Linear(4, 1), (5, 4)),
    "projection": (Projection(4, 7), (2, 3, 4)),
    "feed forward": (FeedForward(3, 7), (2, 2, 3)),
    "attention": (CausalSelfAttention(12, 6), (2, 5, 12)),
    "attention with dropout": (CausalSelfAttention(12, 6, dropout=0.3, site=1), (2, 5, 12)),
    "block": (TransformerBlock(12, 6), (2, 5, 12)),
    "block with dropout": (TransformerBlock(12, 6, dropout=0.3, site=1), (2, 2, 12)),
    "head": (LanguageHead(4, 7), (2, 3, 4)),
    "sequential": (Sequential([Linear(3, 4), Tanh(), RMSNorm(4), Linear(4, 2)]), (4, 3)),
    "checkpointed": (Checkpointed(TransformerBlock(12, 6, dropout=0.3, site=1)), (2, 5, 12)),
    "frozen": (Sequential([Linear(3, 4), Frozen(Linear(4, 4)), Frozen(TransformerBlock(4, 6 - 2))]), (2, 5, 3)),
}
TABLES = {
    "embedding": Embedding(11, 3),
    "small embedding": Embedding(2, 3),
    "token embedding": TokenEmbedding(11, 6, 3, dropout=0.3, site=2),
}


def passes(layer, values, x, dy, run=TRAINING):
    """Output, input gradient and gradients of a layer; halves apart, as pipelines call them."""
    params = nested(dict((spec.name, taken(values[spec.name], spec.part)) for spec in layer.specs()))
    grads = {s.name: np.full(s.shape, np.nan, x.dtype if x.dtype.kind == "f" else float) for s in layer.specs()}
    kept = x.copy(), dy.copy()
    y, cache = layer.forward(params, x, run)
    dx, pending = layer.backward_input(params, cache, dy)
    trainable = [(s.name, grads[s.name]) for s in layer.specs() if s.trainable]
    assert all(np.isnan(gradient).all() for _, gradient in trainable), "the input half writes no gradients"
    layer.backward_weights(params, cache, pending, nested(dict(trainable)))
    assert x.tobytes() == kept[0].tobytes()
    assert dy.tobytes() == kept[1].tobytes()
    return y, dx, dict(trainable)


def require_same_passes(layer, x, size, tolerance=1e-12):
    rng = np.random.default_rng(0)
    dtype = x.dtype if x.dtype.kind == "f" else np.float64
    values = {spec.name: rng.normal(size=spec.shape).astype(dtype) for spec in layer.specs()}
    dy = rng.normal(size=(*x.shape[:1], *layer.output_shape(x.shape[1:]))).astype(dtype)
    expected = passes(layer, values, x, dy)

    def work(group):
        split = layer.split(group)
        assert (split is layer) == (group.size == 1)
        return *passes(split, values, x, dy), {spec.name: spec for spec in split.specs()}

    found = on_ranks(size, work)
    gradients = assembled([{n: s for n, s in r[3].items() if s.trainable} for r in found], [r[2] for r in found])
    assert list(gradients) == list(expected[2])
    close = {"rtol": tolerance, "atol": tolerance}
    for y, dx, _, _ in found:
        np.testing.assert_allclose(y, expected[0], **close)
        assert y.tobytes() == found[0][0].tobytes(), "outputs are whole, the same on every rank"
        if expected[1] is None:
            assert dx is None
        else:
            np.testing.assert_allclose(dx, expected[1], **close)
            assert dx.tobytes() == found[0][1].tobytes()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[2][name], **close, err_msg=name)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_a_split_layer_is_the_layer(name, size, rng):
    layer, shape = LAYERS[name]
    if name == "frozen" and size == 3:
        layer = Sequential([Linear(3, 4), Frozen(Linear(4, 6)), Frozen(TransformerBlock(6, 3))])
    require_same_passes(layer, rng.normal(size=shape), size)


@pytest.mark.parametrize("name", ["linear", "attention with dropout", "block with dropout", "head"])
def test_split_layers_take_empty_batches(name):
    layer, shape = LAYERS[name]
    require_same_passes(layer, np.empty((0, *shape[1:])), 2)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", TABLES)
def test_a_split_table_is_the_table(name, size):
    items = 2 if name == "small embedding" else 11
    require_same_passes(TABLES[name], np.random.default_rng(0).integers(0, items, (3, 5)), size)


def test_ids_outside_the_whole_table_are_refused_on_every_rank():
    def work(group):
        with pytest.raises(DataError, match="ids from 0 to 5, the input has ids from 1 to 6"):
            Embedding(6, 3).split(group).forward({"weight": np.zeros((3, 3))}, np.array([[1, 6]]))

    on_ranks(2, work)


@pytest.mark.parametrize("layer", [LayerNorm(3), GELU(), Dropout(0.2), Position(4, 3), Select(3, (0,))])
def test_layers_with_nothing_to_split_stay_themselves(layer):
    assert layer.split(Apart(0, 2)) is layer
    assert Frozen(layer).split(Apart(0, 2)).layer is layer
    assert Sequential([layer]).split(Apart(1, 2)).layers == (("0", layer),)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_cross_entropy_over_parts_of_the_classes_is_the_whole_ones(size, dtype, rng):
    """Five ranks share four classes: one has none."""
    logits, target = (3 * rng.normal(size=(2, 3, 4))).astype(dtype), np.array([[0, 3, -1], [2, 1, 0]])
    loss, weight, cache = CrossEntropy().forward(logits, target)
    gradient = CrossEntropy().backward(cache, 0.5)

    def work(group):
        counting = Counting(group)
        split = SplitCrossEntropy(CrossEntropy(), counting, 4)
        bounds = np.cumsum([0, *(4 // size + (r < 4 % size) for r in range(size))])
        own = logits[:, :, bounds[group.rank] : bounds[group.rank + 1]]
        value, counted, own_cache = split.forward(own, target)
        d = split.backward(own_cache, 0.5)
        assert counting.clear() == {"all_gather": 1}
        return value, counted, split.joined(d)

    for value, counted, joined in on_ranks(size, work):
        assert value == pytest.approx(loss, rel=1e-6 if dtype is np.float32 else 1e-13)
        assert counted == weight
        assert joined.dtype == dtype
        np.testing.assert_allclose(joined, gradient, rtol=0, atol=1e-6 if dtype is np.float32 else 1e-14)


def test_a_huge_logit_on_one_rank_neither_overflows_nor_hides_the_loss():
    logits = np.array([[1e4, -1e4, 0.0]], np.float32)

    def work(group):
        split = SplitCrossEntropy(CrossEntropy(), group, 3)
        own = logits[:, [slice(0, 2), slice(2, 3)][group.rank]]
        return split.forward(own, np.array([1]))[0]

    assert on_ranks(2, work) == [2e4, 2e4]
