"""Single layers split over a group, between whole activations: outputs and gradients are the unsplit layer's."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import nn
from mpizero.layout.flat import nested
from mpizero.nn.tensor_parallel import SplitCrossEntropy
from tests.nn.checks import gradient_slots
from tests.nn.groups import TRAINING, Apart, Counting, assembled, on_ranks, taken

LAYERS = {
    "linear": (nn.Linear(4, 7), (5, 4)),
    "linear without bias": (nn.Linear(4, 7, bias=False), (2, 3, 4)),
    "linear of one output": (nn.Linear(4, 1), (5, 4)),
    "projection": (nn.Projection(4, 7), (2, 3, 4)),
    "feed forward": (nn.FeedForward(3, 7), (2, 2, 3)),
    "attention": (nn.CausalSelfAttention(12, 6), (2, 5, 12)),
    "attention with dropout": (nn.CausalSelfAttention(12, 6, dropout=0.3, site=1), (2, 5, 12)),
    "block": (nn.TransformerBlock(12, 6), (2, 5, 12)),
    "block with dropout": (nn.TransformerBlock(12, 6, dropout=0.3, site=1), (2, 2, 12)),
    "head": (nn.LanguageHead(4, 7), (2, 3, 4)),
    "sequential": (nn.Sequential([nn.Linear(3, 4), nn.Tanh(), nn.RMSNorm(4), nn.Linear(4, 2)]), (4, 3)),
    "checkpointed": (nn.Checkpointed(nn.TransformerBlock(12, 6, dropout=0.3, site=1)), (2, 5, 12)),
    "frozen": (
        nn.Sequential([nn.Linear(3, 4), nn.Frozen(nn.Linear(4, 6)), nn.Frozen(nn.TransformerBlock(6, 6))]),
        (2, 5, 3),
    ),
}
#: And a number of ids, of which they are given some.
TABLES = {
    "embedding": (nn.Embedding(11, 3), 11),
    "small embedding": (nn.Embedding(2, 3), 2),
    "token embedding": (nn.TokenEmbedding(11, 6, 3, dropout=0.3, site=2), 11),
}


def passes(layer, values, x, dy):
    """Output, input gradient and gradients of a layer; halves apart, as pipelines call them."""
    params = nested({spec.name: taken(values[spec.name], spec.part) for spec in layer.specs()})
    flat, grads = gradient_slots(layer)
    kept = x.copy(), dy.copy()
    y, cache = layer.forward(params, x, TRAINING)
    dx, pending = layer.backward_input(params, cache, dy)
    assert all(np.isnan(gradient).all() for gradient in flat.values()), "the input half writes no gradients"
    layer.backward_weights(params, cache, pending, grads)
    assert (x.tobytes(), dy.tobytes()) == tuple(array.tobytes() for array in kept)
    return y, dx, flat


def require_same_passes(layer, x, size):
    """Outputs and gradients of inputs are whole, the same bits on every rank; those of parameters are put together."""
    assert layer.split(Apart(0, 1)) is layer
    rng = np.random.default_rng(0)
    values = {spec.name: rng.normal(size=spec.shape) for spec in layer.specs()}
    dy = rng.normal(size=(*x.shape[:1], *layer.output_shape(x.shape[1:])))
    expected = passes(layer, values, x, dy)

    def work(group):
        split = layer.split(group)
        return *passes(split, values, x, dy), {spec.name: spec for spec in split.specs() if spec.trainable}

    found = on_ranks(size, work)
    gradients = assembled([rank[3] for rank in found], [rank[2] for rank in found])
    assert list(gradients) == list(expected[2])
    pairs = [(gradient, expected[2][name]) for name, gradient in gradients.items()]
    for whole in range(2):
        if expected[whole] is None:
            assert {rank[whole] for rank in found} == {None}
        else:
            assert len({rank[whole].tobytes() for rank in found}) == 1
            pairs.append((found[0][whole], expected[whole]))
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [*LAYERS, *TABLES])
def test_a_split_layer_is_the_layer(name, size, rng):
    layer, given = LAYERS.get(name) or TABLES[name]
    require_same_passes(layer, rng.integers(0, given, (3, 5)) if name in TABLES else rng.normal(size=given), size)


@pytest.mark.parametrize("name", ["linear", "attention with dropout", "block with dropout", "head"])
def test_split_layers_take_empty_batches(name):
    layer, shape = LAYERS[name]
    require_same_passes(layer, np.empty((0, *shape[1:])), 2)


@pytest.mark.parametrize("layer", [nn.LayerNorm(3), nn.GELU(), nn.Dropout(0.2), nn.Position(4, 3), nn.Select(3, (0,))])
def test_layers_with_nothing_to_split_stay_themselves(layer):
    assert layer.split(Apart(0, 2)) is layer
    assert nn.Frozen(layer).split(Apart(0, 2)).layer is layer
    assert nn.Sequential([layer]).split(Apart(1, 2)).layers == (("0", layer),)


@pytest.mark.parametrize(("size", "dtype"), [(2, np.float32), (3, np.float64), (5, np.float64)])
def test_cross_entropy_over_parts_of_the_classes_is_the_whole_ones(size, dtype, rng):
    """Five ranks share four classes: one has none."""
    logits, target = (3 * rng.normal(size=(2, 3, 4))).astype(dtype), np.array([[0, 3, -1], [2, 1, 0]])
    loss, weight, cache = nn.CrossEntropy().forward(logits, target)
    gradient = nn.CrossEntropy().backward(cache, 0.5)

    def work(group):
        counting = Counting(group)
        split = SplitCrossEntropy(nn.CrossEntropy(), counting, 4)
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
        split = SplitCrossEntropy(nn.CrossEntropy(), group, 3)
        own = logits[:, [slice(0, 2), slice(2, 3)][group.rank]]
        return split.forward(own, np.array([1]))[0]

    assert on_ranks(2, work) == [2e4, 2e4]
