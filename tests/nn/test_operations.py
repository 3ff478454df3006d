"""Floating-point work as layers count it, against every matrix product that is really made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from mpizero import nn
from mpizero.kernels import matmul
from mpizero.nn.models import run_on
from mpizero.types import EVALUATE, ParameterSpec
from tests.nn.groups import TRAINING, Counted, Model, each_block, on_ranks, slots_of

small = partial(nn.GPT, dim=8, heads=4, vocabulary=5)
MODELS = {
    "gpt": (nn.GPT(dim=24, layers=2, heads=12, sequence=9, vocabulary=11), (7,)),
    "gpt with dropout, untied": (small(layers=1, sequence=9, dropout=0.2, tied=False), (9,)),
    "gpt of several query blocks": (small(layers=1, sequence=150), (135,)),
    "gpt with checkpoints": (small(layers=2, sequence=9, activation_checkpointing=True), (7,)),
    "mlp": (nn.MLP(features=5, hidden=(8, 6, 7), outputs=3), (5,)),
    "deep mlp": (nn.MLP(features=5, hidden=(8, 6), outputs=3, active_features=(1,)), (5,)),
}
SAMPLES = 3


@pytest.fixture(autouse=True)
def products_by_numpy(monkeypatch):
    """Have NumPy make all products, so that arrays can count them."""
    monkeypatch.setattr(matmul, "library", lambda: None)


def batch(model, shape):
    rng = np.random.default_rng(0)
    if isinstance(model, nn.MLP):
        return rng.normal(size=(SAMPLES, *shape)).astype(np.float32), rng.integers(0, 3, SAMPLES)
    return rng.integers(0, 5, (2, SAMPLES, *shape))


def counted(model):
    return {name: value.view(Counted) for name, value in nn.initial_parameters(model).items()}


def spent_by_block(model, x, y):
    """Operations of each block's passes, one after the other."""
    params, caches, spent = nn.bind(model, counted(model)), {}, {}
    grads = {name: value.view(Counted) for name, value in nn.gradient_slots(model).items()}
    Counted.spent()
    for name, h, cache in each_block(model, params, x, run_on(model, x, TRAINING)):
        x, caches[name], spent[name] = h, cache, [Counted.spent()]
    d = model.loss.backward(model.loss.forward(x, y)[2])
    for name, layer in reversed(model.blocks.items()):
        d, pending = layer.backward_input(params[name], caches[name], d)
        spent[name].append(Counted.spent())
        layer.backward_weights(params[name], caches[name], pending, slots_of(grads, name))
        spent[name].append(Counted.spent())
    return {name: nn.Operations(*counts) for name, counts in spent.items()}


def times(count, operations):
    return nn.Operations(*(count * n for n in operations))


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_the_rank_s_own_products_and_the_work_is_dealt(name, size):
    model, shape = MODELS[name]

    def work(group):
        split = nn.split_model(model, group)
        counts = nn.model_operations(split, shape)
        assert spent_by_block(split, *batch(model, shape)) == {b: times(SAMPLES, n) for b, n in counts.items()}
        return counts

    if isinstance(model, nn.MLP) or model.heads % size == 0:
        ranks = on_ranks(size, work)
        for block, whole in nn.model_operations(model, shape).items():
            assert sum((counts[block] for counts in ranks), nn.Operations()) == whole, "none is repeated"


def test_a_whole_step_is_the_sum_of_its_blocks():
    model, shape = MODELS["gpt"]
    slots = {name: value.view(Counted) for name, value in nn.gradient_slots(model).items()}
    Counted.spent()
    nn.loss_and_gradients(model, counted(model), batch(model, shape), TRAINING, slots=slots)
    assert Counted.spent() == SAMPLES * sum(counts.total for counts in nn.model_operations(model, shape).values())
    assert model.sample_shape == (9,), "the longest sample"


def test_known_formulas():
    assert nn.Linear(3, 5).operations((4, 3)) == nn.Operations(120, 120, 120)
    assert nn.Linear(3, 5, input_gradient=False).operations((3,)) == nn.Operations(30, 0, 30)
    assert nn.Frozen(nn.Linear(3, 5)).operations((3,)) == nn.Operations(30, 30, 0)
    assert nn.Checkpointed(nn.Linear(3, 5)).operations((3,)) == nn.Operations(30, 60, 30)
    assert nn.Sequential([nn.Linear(3, 5), nn.Linear(5, 2)]).operations((3,)) == nn.Operations(50, 50, 50)
    # 64 queries see 64 keys and 64 see 128, instead of 128 each: 3/4 of the square.
    product = 2 * 128 * 128 * 64 * 3 // 4
    assert nn.CausalSelfAttention(64, 2).attend_operations(128) == nn.Operations(2 * product, 4 * product)
    # Heads of 16 features: the scores are computed again.
    assert nn.CausalSelfAttention(64, 4).attend_operations(128) == nn.Operations(2 * product, 5 * product)


@dataclass(frozen=True)
class Twice(nn.Layer):
    """A user's layer that is made of ours, and says nothing but how to compute: one child is called two times."""

    first: nn.Layer
    branches: tuple[nn.Layer, ...]

    def own_specs(self):
        return (ParameterSpec("gain", (5,)),)

    def children(self):
        return {"first": self.first, "left": self.branches[0], "right": self.branches[1]}

    def forward(self, params, x, run=EVALUATE):
        h, _ = self.first.forward(params["first"], x, run)
        h = np.maximum(h, 0) * params["gain"]
        left, _ = self.branches[0].forward(params["left"], h, run)
        left, _ = self.branches[0].forward(params["left"], left, run)
        right, _ = self.branches[1].forward(params["right"], h, run)
        return np.concatenate([left, right], axis=-1), None

    def backward_input(self, params, cache, dy):
        raise AssertionError("nobody goes backward to count")


def test_a_layer_made_of_others_counts_what_its_forward_calls_each_time_it_calls_it():
    layer = Twice(nn.Linear(3, 5), (nn.Linear(5, 5), Twice(nn.Linear(5, 5), (nn.Linear(5, 5), nn.Linear(5, 2)))))
    inner = 2 * (5 * 5 + 2 * 5 * 5 + 5 * 2)
    product = 2 * (3 * 5 + 2 * 5 * 5) + inner
    for shape, rows in (((3,), 1), ((7, 3), 7)):
        assert layer.operations(shape) == nn.Operations(*[rows * product] * 3)
        assert layer.output_shape(shape) == (*shape[:-1], 5 + 7)
    assert nn.Sequential([layer, nn.Linear(12, 4)]).operations((3,)).forward == product + 2 * 12 * 4
    assert Twice(nn.Embedding(4, 5), (nn.Linear(5, 5), nn.Linear(5, 1))).operations(()).forward == 2 * (
        5 * 5 * 2 + 5 * 1
    )


def test_layers_that_cannot_be_counted_say_so():
    class Pair(nn.Layer):
        def children(self):
            return {"one": nn.Linear(2, 2)}

        def forward(self, params, x, run=None):
            return x, None

        def backward_input(self, params, cache, dy):
            return dy, None

    with pytest.raises(NotImplementedError, match=r"Pair does not count its products: define operations\(\)"):
        Pair().operations((2,))

    with pytest.raises(NotImplementedError, match="block 'only' is a object, which does not count its products"):
        nn.model_operations(Model({"only": object()}), (3,))
