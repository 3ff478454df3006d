"""Layers split over tensor groups, on parts of sequences: the ranks of both groups have the unsplit model's numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mpizero.comm.model_group import CommunicatorGroup
from mpizero.errors import ConfigError, DataError
from mpizero.nn import (
    GELU,
    GPT,
    CausalSelfAttention,
    Checkpointed,
    CrossEntropy,
    Dropout,
    Embedding,
    FeedForward,
    Frozen,
    LanguageHead,
    Layer,
    LayerNorm,
    Linear,
    MeanSquaredError,
    Position,
    Sequential,
    TokenEmbedding,
    TransformerBlock,
    Zigzag,
    bind,
    context_model,
    cut_batch,
    evaluate,
    freeze,
    loss_and_gradients,
    model_operations,
    split_model,
)
from mpizero.nn.layer import Wrapper
from mpizero.testing import run_in_threads
from mpizero.types import EVALUATE, Run
from tests.nn.tensor import Apart, assembled, cache_bytes, own_parameters, perturbed, specs_of

TRAINING = Run(training=True, seed=3, step=5, first_sample=11)
SMALL = {"dim": 12, "layers": 2, "heads": 6, "sequence": 40, "vocabulary": 11}
F64 = {**SMALL, "dtype": "float64"}
#: Sizes of a tensor group and of a context group.
GRIDS = ((2, 2), (3, 2), (2, 3), (2, 4))


def on_grid(sizes, function):
    """Call ``function(tensor group, context group)`` on every rank of a grid of threads; results by tensor rank."""
    tensor, context = sizes

    def work(comm):
        with (
            comm.split(comm.rank % context, name="tensor") as row,
            comm.split(comm.rank // context, name="c") as column,
        ):
            return function(CommunicatorGroup(row), CommunicatorGroup(column))

    found = run_in_threads(tensor * context, work)
    return [found[rank * context : (rank + 1) * context] for rank in range(tensor)]


def batch(length, samples=3, vocabulary=11):
    x, y = np.random.default_rng(length).integers(0, vocabulary, (2, samples, length))
    y[0, length // 2] = -1
    return x, y


def cut(model, tensor, context):
    return context_model(split_model(model, tensor), context)


def over_grid(model, named, x, y, sizes, run=TRAINING):
    """Loss and weight, gradients in whole, and the whole prediction of each rank."""

    def work(tensor, context):
        part, (own_x, own_y) = cut(model, tensor, context), cut_batch(x, y, context)
        own = own_parameters(part, named)
        loss, weight, gradients = loss_and_gradients(part, own, (own_x, own_y), run)
        prediction = part.whole_prediction(evaluate(part, bind(part, own), own_x, run))
        return loss, weight, gradients, prediction, specs_of(part)

    found = on_grid(sizes, work)
    for context in zip(*found, strict=True):
        assert len({(rank[0], rank[1]) for rank in context}) == 1, "a tensor group has one loss"
    summed = [{name: sum(rank[2][name] for rank in row) for name in row[0][2]} for row in found]
    trained = [{name: row[0][4][name] for name in row[0][2]} for row in found]
    whole = assembled(trained, summed)
    loss, weight = (sum(rank[place] for rank in found[0]) for place in range(2))
    return loss, weight, whole, [rank[3] for row in found for rank in row]


def assert_like_one_process(model, length, sizes, tolerance=1e-12, made=None):
    named, (x, y) = perturbed(model), batch(length) if made is None else made
    loss, weight, gradients = loss_and_gradients(model, named, (x, y), TRAINING)
    found = over_grid(model, named, x, y, sizes)
    assert found[0] == pytest.approx(loss, rel=tolerance)
    assert found[1] == pytest.approx(weight, rel=tolerance)
    assert gradients.keys() == found[2].keys()
    for name, gradient in gradients.items():
        largest = np.abs(gradient).max()
        if largest > 1e-12:  # a shift of all keys changes no probability: their bias has no gradient
            assert np.abs(found[2][name] - gradient).max() < tolerance * largest, name
    whole = evaluate(model, bind(model, named), x, TRAINING)
    for prediction in found[3]:
        np.testing.assert_allclose(prediction, whole, rtol=tolerance, atol=tolerance * np.abs(whole).max())


@pytest.mark.parametrize("sizes", GRIDS)
def test_the_ranks_of_both_groups_have_the_unsplit_models_numbers(sizes):
    for options in ({}, {"dropout": 0.3}, {"dropout": 0.3, "activation_checkpointing": True, "tied": False}):
        for length in (30, 13):
            assert_like_one_process(GPT(**F64, **options), length, sizes)
    assert_like_one_process(GPT(**SMALL, dropout=0.3), 37, sizes, 1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_short_sequences_leave_ranks_of_either_group_without_places(length):
    for sizes in GRIDS:
        assert_like_one_process(GPT(**F64, dropout=0.2), length, sizes)


def test_a_run_repeats_its_bits():
    model, (x, y) = GPT(**SMALL, dropout=0.2), batch(29)
    first, again = (over_grid(model, perturbed(model), x, y, (2, 3)) for _ in range(2))
    assert first[0] == again[0]
    assert all(gradient.tobytes() == again[2][name].tobytes() for name, gradient in first[2].items())
    assert len({prediction.tobytes() for prediction in (*first[3], *again[3])}) == 1


# ---------------------------------------------------------------------- models made by hand


@dataclass(frozen=True)
class Doubled(Wrapper):
    """A user's layer that is split as the layer in it is, and works place by place."""

    def context(self, group):
        return self

    def forward(self, params, x, run=EVALUATE):
        y, cache = super().forward(params, x, run)
        return 2 * y, cache

    def backward_input(self, params, cache, dy):
        return super().backward_input(params, cache, 2 * dy)


class Mean(Layer):
    """A user's layer without parameters that mixes places: adds the mean over the sequence. It is not split."""

    def __init__(self, group=None):
        self.group = group

    def context(self, group):
        return Mean(group)

    def forward(self, params, x, run=EVALUATE):
        total = x.sum(axis=1, keepdims=True)
        return x + (total if self.group is None else self.group.all_reduce(total)) / self._length(x, run), (x, run)

    def backward_input(self, params, cache, dy):
        return self.forward(params, dy, cache[1])[0], None

    def _length(self, x, run):
        return x.shape[1] if self.group is None else run.length


class Model:
    """A model made by hand of layers."""

    seed, dtype = 0, np.dtype(np.float64)

    def __init__(self, blocks, loss=None):
        self.blocks, self.loss = blocks, loss or CrossEntropy()


def by_hand(loss=None):
    chain = {"up": Linear(12, 9), "act": GELU(), "down": Linear(9, 12)}
    blocks = {
        "tokens": Embedding(11, 12),
        "places": Position(40, 12),
        "noise": Dropout(0.2, site=5),
        "body": Checkpointed(Sequential({"norm": LayerNorm(12), "attention": CausalSelfAttention(12, 6, 0.3, site=4)})),
        "twice": Doubled(Sequential(chain)),
        "mean": Mean(),
        "frozen": Frozen(TransformerBlock(12, 6, 0.1, site=7)),
        "block": TransformerBlock(12, 6, 0.1, site=11),
        "feed": FeedForward(12),
        "head": LanguageHead(12, 11),
    }
    return Model(blocks, loss)


@pytest.mark.parametrize("sizes", GRIDS[:3])
def test_models_made_by_hand_of_any_layers_are_cut_twice(sizes):
    assert_like_one_process(by_hand(), 23, sizes)
    tokens = {"tokens": TokenEmbedding(11, 40, 12, 0.2, site=30)}
    numbers = Model({**tokens, **{name: by_hand().blocks[name] for name in ("block", "twice")}}, MeanSquaredError())
    x, _ = batch(13)
    assert_like_one_process(numbers, 13, sizes, made=(x, np.random.default_rng(0).normal(size=(*x.shape, 12))))


def test_frozen_parameters_stay_so():
    model = freeze(GPT(**F64), ["blocks.0.*", "blocks.1.norm1.*"])
    assert_like_one_process(model, 13, (2, 2))


def test_a_loss_of_the_users_takes_whole_scores_at_the_own_places():
    model, (x, _) = GPT(**F64), batch(13)
    named = perturbed(model)
    target = np.random.default_rng(0).normal(size=(*x.shape, 11))
    expected = MeanSquaredError().forward(evaluate(model, bind(model, named), x), target)[:2]

    def work(tensor, context):
        part, (own_x, own) = cut(model, tensor, context), cut_batch(x, target, context)
        with pytest.raises(ConfigError, match="GPT: the loss Mine does not add up over parts of a sequence"):
            part.loss_on_parts(Mine())
        loss = part.loss_on_parts(MeanSquaredError())
        return loss.forward(evaluate(part, bind(part, own_parameters(part, named)), own_x), own)[:2]

    class Mine(CrossEntropy.__base__):
        """No loss that is known to add up over places."""

    for row in on_grid((2, 2), work):
        assert np.sum(row, axis=0) == pytest.approx(expected, rel=1e-12)


def test_what_cannot_be_cut_twice_is_named():
    class OneWay(Layer):
        def forward(self, params, x, run=EVALUATE):
            return x, None

        def backward_input(self, params, cache, dy):
            return dy, None

    def work(tensor, context):
        with pytest.raises(ConfigError, match="block 'own': OneWay does not say how it works on a part"):
            cut(Model({"block": TransformerBlock(12, 6), "own": OneWay()}), tensor, context)
        with pytest.raises(ConfigError, match="Model has no attention along a sequence"):
            cut(Model({"feed": FeedForward(12)}), tensor, context)

    on_grid((2, 2), work)


# ---------------------------------------------------------------------- forms, messages, work and memory


def test_it_does_not_matter_which_group_is_named_first():
    model = GPT(**F64, activation_checkpointing=True)

    def work(tensor, context):
        one, other = cut(model, tensor, context), split_model(context_model(model, context), tensor)
        assert (one.blocks, one.loss) == (other.blocks, other.loss)
        assert cut(model, tensor, Apart(0, 1)).blocks == split_model(model, tensor).blocks
        assert cut(model, Apart(0, 1), context).blocks == context_model(model, context).blocks

    on_grid((2, 2), work)


@pytest.mark.parametrize("ranges", [(), ((0, 13),), ((2, 5), (9, 13)), ((4, 4), (7, 9)), ((0, 0), (0, 0))])
def test_pieces_of_a_run_are_the_positions_that_were_asked_for(ranges):
    run = Run(length=13, ranges=ranges)
    positions = np.concatenate([np.arange(start, stop) for start, stop in ranges or ((0, 13),)])
    assert run.held == len(positions)
    for start in range(run.held + 1):
        for stop in range(start, run.held + 1):
            found = np.full(stop - start, -1)
            for here, there in run.pieces(start, stop):
                found[here] = np.arange(there.start, there.stop)
            np.testing.assert_array_equal(found, positions[start:stop])


def test_blocks_that_are_told_no_length_ask_both_groups():
    model, (x, _) = GPT(**F64, dropout=0.3), batch(13)
    named = perturbed(model)
    expected = evaluate(model, bind(model, named), x, TRAINING)

    def work(tensor, context):
        part, (h, _) = cut(model, tensor, context), cut_batch(x, x, context)
        params = bind(part, own_parameters(part, named))
        for name, layer in part.blocks.items():
            h = layer.forward(params[name], h, TRAINING)[0]
        asked = context.counts["all_gather"]
        with pytest.raises(
            DataError, match=r"rank . of a tensor group of 2 takes places . to . of the . of its contex"
        ):
            part.blocks["blocks.0"].forward(params["blocks.0"], np.zeros((3, 9, 12)), Run(length=13))
        return part.whole_prediction(h), asked

    for prediction, asked in (rank for row in on_grid((2, 2), work) for rank in row):
        np.testing.assert_allclose(prediction, expected, rtol=1e-11, atol=1e-11)
        assert asked == 1 + model.layers


def test_messages_are_those_of_the_two_groups():
    """A tensor group's messages are as many as without a context group; a ring's are only of the rank's own heads."""
    model, (x, y) = GPT(**F64, dropout=0.3), batch(16)

    def work(tensor, context):
        part = cut(model, tensor, context)
        own = own_parameters(part, perturbed(model))
        loss_and_gradients(part, own, cut_batch(x, y, context), TRAINING)
        return dict(tensor.counts), dict(context.counts)

    def alone(comm):
        part = split_model(model, group := CommunicatorGroup(comm))
        loss_and_gradients(part, own_parameters(part, perturbed(model)), (x, y), TRAINING)
        return dict(group.counts)

    expected = run_in_threads(2, alone)[0]
    for of_tensor, of_context in (rank for row in on_grid((2, 3), work) for rank in row):
        assert of_tensor == expected
        assert of_context == {"all_gather": 1, "shift": model.layers * 3 * (3 - 1)}


def test_work_and_activations_fall_by_the_sizes_of_both_groups():
    model, (x, _) = GPT(**{**F64, "vocabulary": 12}, dropout=0.3), batch(24)
    named = perturbed(model)

    def work(tensor, context):
        part, (h, _) = cut(model, tensor, context), cut_batch(x, x, context)
        params, run, kept = bind(part, own_parameters(part, named)), part.run_on(h, TRAINING), {}
        for name, layer in part.blocks.items():
            h, cache = layer.forward(params[name], h, run)
            kept[name] = cache_bytes(cache)
        return model_operations(part, (24,)), kept

    (one,) = on_grid((1, 2), work)
    whole = model_operations(model, (24,))
    for sizes in ((2, 2), (3, 2)):
        tensor, context = sizes
        for counts, kept in (rank for row in on_grid(sizes, work) for rank in row):
            for name, block in whole.items():
                assert counts[name].backward_weights * tensor * context == block.backward_weights
                assert counts[name].total * tensor == one[0][0][name].total
            assert kept["blocks.0"] * tensor == one[0][1]["blocks.0"]
            assert kept["head"] * tensor == one[0][1]["head"]


def test_masks_and_positions_of_a_cut_cut_are_those_of_the_whole():
    """Every element: nothing but the embedding, its dropout and a head of ones."""
    layer, ids = TokenEmbedding(11, 40, 12, 0.4, site=2), batch(29)[0]
    model = Model({"embedding": layer, "block": TransformerBlock(12, 6)})
    named = perturbed(model)
    expected = layer.forward(bind(model, named)["embedding"], ids, TRAINING)[0]

    def work(tensor, context):
        form = cut(model, tensor, context).blocks["embedding"]
        form = type(form)(form.whole, tensor, sequence=True)
        own = own_parameters(Model({"embedding": form}), named)
        part = cut_batch(ids, ids, context)[0]
        y, _ = form.forward(bind(Model({"embedding": form}), own)["embedding"], part, TRAINING)
        mine = Zigzag(29, context.size).positions(context.rank)
        start = np.cumsum([0, *(len(half) for half in np.array_split(mine, tensor.size))])[tensor.rank]
        np.testing.assert_array_equal(y, expected[:, mine[start : start + y.shape[1]]])

    for sizes in GRIDS:
        on_grid(sizes, work)
