"""Models on parts of sequences: loss, gradients and predictions of all ranks together are the unsplit model's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpizero.comm.model_group import CommunicatorGroup
from mpizero.errors import ConfigError, DataError
from mpizero.nn import (
    GPT,
    MLP,
    CausalSelfAttention,
    Checkpointed,
    CrossEntropy,
    Dropout,
    Embedding,
    FeedForward,
    Frozen,
    Layer,
    LayerNorm,
    Linear,
    Position,
    RelativeL2Loss,
    Sequential,
    TransformerBlock,
    Zigzag,
    bind,
    context_model,
    context_parallel,
    cut_batch,
    evaluate,
    initial_parameters,
    loss_and_gradients,
    model_operations,
)
from mpizero.nn.context_parallel import ContextBlock, ContextDropout, ContextModel, ContextPosition, RingSelfAttention
from mpizero.testing import run_in_threads
from mpizero.types import EVALUATE, Run

SMALL = {"dim": 12, "layers": 2, "heads": 3, "sequence": 40, "vocabulary": 11}
TRAINING = Run(training=True, seed=3, step=5, first_sample=11)


def on_ranks(size, function):
    """Call ``function(group)`` on every rank of a context group of threads."""
    return run_in_threads(size, lambda comm: function(CommunicatorGroup(comm)))


def perturbed(model):
    """Start values with noise: biases and norms are then not at their special values."""
    rng = np.random.default_rng(1)
    return {n: v + rng.normal(0, 0.2, v.shape).astype(v.dtype) for n, v in initial_parameters(model).items()}


def batch(length, samples=3, vocabulary=11):
    x, y = np.random.default_rng(length).integers(0, vocabulary, (2, samples, length))
    y[0, length // 2] = -1
    return x, y


def over_parts(model, named, x, y, ranks, run=TRAINING):
    """Loss, weight and gradients added over a context group, and the whole prediction of each rank."""

    def work(group):
        part = context_model(model, group)
        cut_x, cut_y = cut_batch(x, y, group)
        results = loss_and_gradients(part, named, (cut_x, cut_y), run)
        logits = evaluate(part, bind(part, named), cut_x, run)
        return *results, part.whole_prediction(logits) if group.size > 1 else logits

    losses, weights, gradients, logits = zip(*on_ranks(ranks, work), strict=True)
    summed = {name: sum(part[name] for part in gradients) for name in gradients[0]}
    return sum(losses), sum(weights), summed, logits


def distance(found, expected):
    """Greatest distance, relative to the greatest magnitude."""
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30))


def assert_like_one_process(model, length, ranks, tolerance, samples=3):
    named, (x, y) = perturbed(model), batch(length, samples)
    loss, weight, gradients = loss_and_gradients(model, named, (x, y), TRAINING)
    found = over_parts(model, named, x, y, ranks)
    assert found[0] == pytest.approx(loss, rel=tolerance)
    assert found[1] == weight
    assert gradients.keys() == found[2].keys()
    for name, gradient in gradients.items():
        if np.abs(gradient).max() > 1e-12:  # a shift of all keys changes no probability: their bias has no gradient
            assert distance(found[2][name], gradient) < tolerance, name
    logits = evaluate(model, bind(model, named), x, TRAINING)
    for prediction in found[3]:
        assert prediction.shape == logits.shape
        assert prediction.dtype == logits.dtype
        assert distance(prediction, logits) < tolerance


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [40, 29, 13])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"dropout": 0.3, "activation_checkpointing": True}])
def test_all_ranks_together_have_the_unsplit_models_numbers(options, length, ranks):
    assert_like_one_process(GPT(**SMALL, **options, dtype="float64"), length, ranks, 1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_float32_agrees_within_rounding(dropout, ranks):
    assert_like_one_process(GPT(**SMALL, dropout=dropout), 37, ranks, 1e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sequences_shorter_than_the_chunks_leave_ranks_without_places(length, ranks):
    assert_like_one_process(GPT(**SMALL, dropout=0.2, dtype="float64"), length, ranks, 1e-12)


def test_batches_without_samples_pass_through():
    model = GPT(**SMALL, dropout=0.2)
    loss, weight, gradients, _ = over_parts(model, initial_parameters(model), *np.zeros((2, 0, 9), int), 3)
    assert (loss, weight) == (0, 0)
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("ranks", [2, 3])
def test_tied_tables_and_untied_ones_have_their_gradients(ranks):
    for tied in (True, False):
        assert_like_one_process(GPT(**SMALL, tied=tied, dtype="float64"), 17, ranks, 1e-12)


def test_repeated_runs_have_the_same_bits():
    model = GPT(**SMALL, dropout=0.2)
    named, (x, y) = perturbed(model), batch(33)
    first, again = (over_parts(model, named, x, y, 3) for _ in range(2))
    assert first[0] == again[0]
    for name, gradient in first[2].items():
        assert gradient.tobytes() == again[2][name].tobytes(), name
    assert first[3][0].tobytes() == again[3][2].tobytes(), "all ranks get the same prediction"


class Local(Layer):
    """A user's layer that works place by place, and says so."""

    def context(self, group):
        return self

    def forward(self, params, x, run=EVALUATE):
        return 2 * x, None

    def backward_input(self, params, cache, dy):
        return 2 * dy, None


class Model:
    """A model made by hand of the library's layers."""

    seed, dtype = 0, np.dtype(np.float64)

    def __init__(self, blocks, loss=None):
        self.blocks, self.loss = blocks, loss or CrossEntropy()


def test_models_made_by_hand_of_any_layers_are_cut_too():
    body = Sequential({"norm": LayerNorm(6), "attention": CausalSelfAttention(6, 2, dropout=0.3, site=4)})
    blocks = {
        "tokens": Embedding(11, 6),
        "places": Position(40, 6),
        "noise": Dropout(0.2, site=5),
        "body": Checkpointed(body),
        "twice": Local(),
        "frozen": Frozen(TransformerBlock(6, 1, 0.1, site=7)),
        "out": Linear(6, 11),
    }
    assert_like_one_process(Model(blocks), 23, 3, 1e-12)


def test_a_group_of_one_leaves_model_and_batch_as_they_are():
    model, (x, y) = GPT(**SMALL), batch(9)

    def work(group):
        assert context_model(model, group) is model
        assert cut_batch(x, y, group) == (x, y)

    on_ranks(1, work)


def test_blocks_have_the_parameters_of_the_unsplit_model():
    model = GPT(**SMALL, dropout=0.1, activation_checkpointing=True)

    def work(group):
        cut = context_model(model, group)
        assert isinstance(cut, ContextModel)
        assert {n: b.specs() for n, b in cut.blocks.items()} == {n: b.specs() for n, b in model.blocks.items()}
        assert (cut.loss, cut.dtype, cut.seed) == (model.loss, model.dtype, model.seed)
        assert isinstance(cut.blocks["blocks.0"].layer, ContextBlock)

    on_ranks(2, work)


# ---------------------------------------------------------------------- cutting


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_a_zigzag_gives_every_place_to_one_rank_and_none_one_more_than_another(ranks):
    for length in range(1, 41):
        zigzag = Zigzag(length, ranks)
        places = [zigzag.positions(rank) for rank in range(ranks)]
        assert sorted(np.concatenate(places).tolist()) == list(range(length))
        assert tuple(map(len, places)) == zigzag.sizes
        assert max(zigzag.sizes) == zigzag.longest <= min(zigzag.sizes) + 1
        chunks = np.array_split(np.arange(length), 2 * ranks)
        for rank in range(ranks):
            assert places[rank].tolist() == [*chunks[rank], *chunks[-1 - rank]]


def test_every_array_of_a_tree_is_cut_at_the_same_places():
    def run(group):
        ids = np.arange(2 * 13).reshape(2, 13)
        tree = {"ids": ids, "more": (ids[..., None] * 1.5, None)}
        x, y = cut_batch(tree, [ids + 1], group)
        assert np.array_equal(x["more"][0][..., 0], x["ids"] * 1.5)
        assert np.array_equal(y[0], x["ids"] + 1)
        assert np.array_equal(x["ids"], cut_batch(ids, ids, group)[0])
        with pytest.raises(DataError, match=r"\(2, 13\) and \(2, 12\)"):
            cut_batch({"ids": ids, "short": ids[:, 1:]}, ids, group)

    on_ranks(3, run)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_cut_batch_is_the_places_of_the_rank_in_memory_of_its_own(ranks):
    x, y = batch(17)

    def work(group):
        cut = cut_batch(x, y, group)
        for whole, part in zip((x, y), cut, strict=True):
            np.testing.assert_array_equal(part, whole[:, Zigzag(17, ranks).positions(group.rank)])
            assert part.flags.c_contiguous
            assert not np.shares_memory(part, whole)

    on_ranks(ranks, work)


@pytest.mark.parametrize("shapes", [((3,), (3,)), ((3, 0), (3, 0)), ((3, 4), (3, 5)), ((2, 4), (3, 4))])
def test_batches_without_a_sequence_axis_are_refused_on_every_rank(shapes):
    x, y = (np.zeros(shape, int) for shape in shapes)

    def work(group):
        with pytest.raises(DataError, match=r"inputs and targets of \(samples, length >= 1\)"):
            cut_batch(x, y, group)

    on_ranks(2, work)


# ---------------------------------------------------------------------- what the ranks tell each other


def counts_of(run, model, ranks=3, length=12):
    named, (x, y) = perturbed(model), batch(length)

    def work(group):
        loss_and_gradients(context_model(model, group), named, cut_batch(x, y, group), run)
        return dict(group.counts)

    return on_ranks(ranks, work)


def test_messages_are_those_of_the_ring_and_one_about_the_length():
    model = GPT(**SMALL, dropout=0.1)
    for counts in counts_of(TRAINING, model):
        assert counts == {"all_gather": 1, "shift": model.layers * 3 * (3 - 1)}


def test_a_run_that_knows_the_length_spares_the_ranks_their_question():
    model = GPT(**SMALL, dropout=0.1)
    for counts in counts_of(replace(TRAINING, length=12), model):
        assert counts == {"shift": model.layers * 3 * (3 - 1)}
    named, (x, y) = perturbed(model), batch(12)
    asked = over_parts(model, named, x, y, 3)
    told = over_parts(model, named, x, y, 3, replace(TRAINING, length=12))
    assert asked[0] == told[0]
    assert all(asked[2][name].tobytes() == told[2][name].tobytes() for name in named)


def test_blocks_on_their_own_ask_once_each():
    model, x = GPT(**SMALL, dropout=0.1), np.zeros((2, 4), int)
    params = bind(model, initial_parameters(model))

    def work(group):
        y = x
        for name, block in context_model(model, group).blocks.items():
            y, _ = block.forward(params[name], y, TRAINING)
        assert group.counts == {"all_gather": 1 + model.layers, "shift": model.layers * (3 - 1)}

    on_ranks(3, work)


def test_nothing_is_asked_where_nothing_is_dropped():
    def work(group):
        x = np.ones((2, 3, 4))
        layer = ContextDropout(0.5, group=group)
        assert layer.forward({}, x)[0] is x
        assert ContextDropout(0.0, group=group).forward({}, x, TRAINING)[0] is x
        assert not group.counts

    on_ranks(2, work)


# ---------------------------------------------------------------------- work


@pytest.mark.parametrize(("ranks", "length"), [(2, 32), (3, 36), (4, 21)])
def test_the_work_of_all_ranks_is_the_unsplit_models_but_for_attention(ranks, length):
    """Counted from the shape of whole samples. Attention makes seven products of its tiles, dense attention six."""
    model = GPT(**SMALL, activation_checkpointing=True)
    counts = on_ranks(ranks, lambda group: model_operations(context_model(model, group), (length,)))
    whole = model_operations(model, (length,))
    assert sum(count["head"].total for count in counts) == whole["head"].total
    weights = [sum(count[block].backward_weights for count in counts) for block in whole]
    assert weights == [whole[block].backward_weights for block in whole]
    if length % (2 * ranks) == 0:
        assert len({str(count) for count in counts}) == 1, "as much on every rank"


def test_work_by_layers_made_by_hand_is_counted_for_the_own_places():
    blocks = {
        "in": Sequential({"norm": LayerNorm(6), "wide": Linear(6, 8)}),
        "narrow": Frozen(FeedForward(8)),
        "attention": CausalSelfAttention(8, 2),
    }
    model = Model(blocks)
    counts = on_ranks(2, lambda group: model_operations(context_model(model, group), (10, 6)))
    for block, whole in model_operations(model, (10, 6)).items():
        for count in counts:
            assert 2 * count[block].backward_weights == whole.backward_weights
            if block != "attention":
                assert 2 * count[block].total == whole.total


# ---------------------------------------------------------------------- errors


class Mute(Layer):
    def forward(self, params, x, run=EVALUATE):
        return x, None

    def backward_input(self, params, cache, dy):
        return dy, None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MLP(4, [3], 2), "MLP has no attention along a sequence"),
        (Model({"drop": Sequential([Linear(3, 3), Dropout(0.5)])}), "Model has no attention along a sequence"),
        (Model({"own": Mute()}), "block 'own': Mute does not say how it works on a part of a sequence"),
        (Model({"b": Sequential({"c": Mute()})}), "block 'b', 'c': Mute does not say"),
        (Model({"b": TransformerBlock(4, 2)}, RelativeL2Loss()), "RelativeL2Loss does not add up over parts"),
    ],
)
def test_models_that_cannot_be_cut_are_named(model, message):
    def work(group):
        with pytest.raises(ConfigError, match=message):
            context_model(model, group)

    on_ranks(2, work)


def test_inputs_that_are_not_parts_of_the_same_sequences_are_refused_on_every_rank():
    model = GPT(**SMALL)
    params = bind(model, initial_parameters(model))

    def work(group):
        cut = context_model(model, group)
        for shape in ((3, 4 + 2 * group.rank), (3 + group.rank, 4), (3,) if group.rank else (3, 4)):
            with pytest.raises(DataError, match="not parts of the same sequences; cut the same batch"):
                evaluate(cut, params, np.zeros(shape, int))
        with pytest.raises(DataError, match=r"length <= 40.*\(3, 21\) of sequences of 42"):
            evaluate(cut, params, np.zeros((3, 21), int))
        with pytest.raises(DataError, match=r"holds 5 places of a sequence of 10, but the input has shape \(3, 4\)"):
            evaluate(cut, params, np.zeros((3, 4), int), Run(length=10))

    on_ranks(2, work)


# ---------------------------------------------------------------------- pieces


def test_positions_of_parts_are_those_of_the_whole(rng):
    x, w = rng.normal(size=(2, 9, 4)), rng.normal(size=(12, 4))
    whole = Position(12, 4)
    y, cache = whole.forward({"weight": w}, x)
    wanted = {"weight": np.empty((12, 4))}
    whole.backward(w, cache, x, wanted)

    def work(group):
        layer, mine = ContextPosition(12, 4, group=group), Zigzag(9, 2).positions(group.rank)
        part, part_cache = layer.forward({"weight": w}, x[:, mine])
        np.testing.assert_array_equal(part, y[:, mine])
        gradient = {"weight": np.full((12, 4), np.nan)}
        layer.backward({"weight": w}, part_cache, x[:, mine], gradient)
        return gradient["weight"]

    np.testing.assert_allclose(sum(on_ranks(2, work)), wanted["weight"], rtol=1e-14)


@pytest.mark.parametrize("length", [8, 9, 11, 3])
def test_masks_of_parts_are_those_of_the_whole(length, rng):
    x = rng.normal(size=(2, length, 5))
    whole = Dropout(0.4, site=2).forward({}, x, TRAINING)[0]

    def work(group):
        layer, mine = ContextDropout(0.4, site=2, group=group), Zigzag(length, 2).positions(group.rank)
        y, cache = layer.forward({}, x[:, mine], TRAINING)
        np.testing.assert_array_equal(y, whole[:, mine])
        np.testing.assert_array_equal(layer.backward_input({}, cache, x[:, mine])[0], whole[:, mine])

    on_ranks(2, work)


def test_shifting_back_is_the_adjoint_of_shifting(rng):
    from mpizero.testing import adjoint_test

    x, y = rng.normal(size=(2, 3, 4, 5))

    def work(comm):
        group = CommunicatorGroup(comm)

        def shift(by):
            return lambda a: group.shift([a], by).wait()[0]

        return adjoint_test(shift(1), shift(-1), x[comm.rank], y[comm.rank], comm)

    run_in_threads(3, work)


def test_what_travels_visits_every_rank_once():
    def work(group):
        seen = [
            (source, int(a[0])) for source, a, _ in context_parallel.ring_pass(group, np.array([10 * group.rank]), "")
        ]
        assert seen == [((group.rank - hop) % 4, 10 * ((group.rank - hop) % 4)) for hop in range(4)]

    on_ranks(4, work)


def test_ring_attention_is_what_attention_becomes():
    def work(group):
        block = context_model(GPT(**SMALL), group).blocks["blocks.1"]
        attention = block.children()["attention"]
        assert isinstance(attention, RingSelfAttention)
        plain = GPT(**SMALL).blocks["blocks.1"].children()["attention"]
        assert (attention.site, attention.projection_init) == (plain.site, plain.projection_init)

    on_ranks(2, work)
