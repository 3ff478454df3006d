"""Models split over tensor and context groups: the ranks together have the numbers of the unsplit model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from mpizero import nn
from mpizero.nn.layer import Wrapper
from mpizero.nn.tensor_parallel import Copy, Reduce
from mpizero.types import EVALUATE, BlockModel, ParameterSpec, Part, Run
from tests.nn import groups

F64 = {**groups.SMALL, "dtype": "float64"}
OPTIONS = ({}, {"tied": False}, {"dropout": 0.3}, {"dropout": 0.3, "activation_checkpointing": True})


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_a_gpt_has_its_numbers_on_every_grid_even_where_ranks_have_no_places(length):
    """Every pair of length and grid, and of grid and option."""
    for number, options in enumerate(OPTIONS):
        grids = groups.GRIDS[(number + length) % 4 :: 4]
        groups.require_same_numbers(nn.GPT(**F64, **options), groups.tokens(length), *grids)


@pytest.mark.slow
def test_a_gpt_in_float32_has_its_numbers_within_rounding():
    groups.require_same_numbers(nn.GPT(**groups.SMALL, **OPTIONS[3]), groups.tokens(37), *groups.GRIDS[::3])
    groups.require_same_numbers(nn.GPT(**groups.SMALL, dropout=0.3), groups.tokens(37), (1, 4), tolerance=2e-6)


@pytest.mark.parametrize("vocabulary", [2, 12])
def test_a_vocabulary_is_cut_even_a_smaller_one_than_the_group(vocabulary):
    groups.require_same_numbers(nn.GPT(**{**F64, "vocabulary": vocabulary}), groups.tokens(5, 2, vocabulary), (4, 1))


def test_attention_of_many_blocks_of_queries_is_split_alike():
    model = nn.GPT(dim=8, layers=1, heads=2, sequence=150, vocabulary=5, dropout=0.2, dtype="float64")
    groups.require_same_numbers(model, groups.tokens(131, 2, 5), (2, 1))


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (2, 3)])
def test_a_run_repeats_its_bits_and_an_empty_batch_has_zero_gradients(sizes):
    model = nn.GPT(**groups.SMALL, dropout=0.3)
    first, again = (groups.over_grid(model, groups.perturbed(model), groups.tokens(29), sizes) for _ in range(2))
    assert first[:2] == again[:2]
    assert all(gradient.tobytes() == again[2][name].tobytes() for name, gradient in first[2].items())
    assert len({prediction.tobytes() for prediction in (*first[3], *again[3])}) == 1
    loss, weight, gradients, _ = groups.over_grid(model, groups.perturbed(model), np.zeros((2, 0, 9), int), sizes)
    assert (loss, weight) == (0, 0)
    assert not any(gradient.any() for gradient in gradients.values())


CHAINS = ({"hidden": (7,)}, {"hidden": (7, 5)}, {"hidden": (6, 1, 9, 4)}, {"hidden": ()}, {"hidden": (8, 8, 8)})


@pytest.mark.parametrize("number", range(len(CHAINS)))
def test_a_split_mlp_has_the_numbers_of_the_whole(number, rng):
    chain, task = CHAINS[number], ("classification", "regression")[number % 2]
    y = rng.integers(0, 3, 6) if task == "classification" else rng.normal(size=(6, 3))
    for dtype, options in (("float64", {}), ("float32", {"active_features": (0, 3)})):
        model = nn.MLP(features=4, outputs=3, task=task, activation="gelu", dtype=dtype, **chain, **options)
        groups.require_same_numbers(model, (rng.normal(size=(6, 4)), y), *groups.TENSOR)


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


class Mean(nn.Layer):
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


class Scaled(nn.Layer):
    """A user's layer: features times a weight, of which each rank holds a part."""

    def __init__(self, features, group=None):
        self.features, self.group = features, group
        own = features // (group.size if group else 1)
        self.own = slice(group.rank * own, (group.rank + 1) * own) if group else slice(0, features)

    def own_specs(self):
        part = None if self.group is None else Part((self.features,), 0, ((self.own.start, self.own.stop),))
        return (ParameterSpec("scale", (self.own.stop - self.own.start,), part=part),)

    def split(self, group):
        return Scaled(self.features, group)

    def forward(self, params, x, run=None):
        y = x[:, self.own] @ params["scale"]
        return (y if self.group is None else Reduce(self.group).forward(y))[:, None], x[:, self.own]

    def backward_input(self, params, cache, dy):
        dx = np.zeros((len(dy), self.features))
        dx[:, self.own] = dy * params["scale"]
        return dx if self.group is None else Copy(self.group).backward(dx), dy

    def backward_weights(self, params, cache, pending, grads):
        grads["scale"][...] = (cache * pending).sum(axis=0)


def by_hand():
    """A model of every kind of layer, on sequences of up to 40."""
    return groups.Model({
        "tokens": nn.Embedding(11, 12),
        "places": nn.Position(40, 12),
        "noise": nn.Dropout(0.2, site=5),
        "body": nn.Checkpointed(
            nn.Sequential({"norm": nn.LayerNorm(12), "attention": nn.CausalSelfAttention(12, 6, 0.3, site=4)})
        ),
        "twice": Doubled(nn.Sequential({"up": nn.Linear(12, 9), "act": nn.GELU(), "down": nn.Linear(9, 12)})),
        "mean": Mean(),
        "frozen": nn.Frozen(nn.TransformerBlock(12, 6, 0.1, site=7)),
        "block": nn.TransformerBlock(12, 6, 0.1, site=11),
        "feed": nn.FeedForward(12),
        "head": nn.LanguageHead(12, 11),
    })  # fmt: skip


@pytest.mark.slow
def test_models_made_by_hand_of_any_layers_are_split_and_cut(rng):
    groups.require_same_numbers(by_hand(), groups.tokens(23), (3, 1), (1, 3), *groups.BOTH[:3])
    blocks = {
        "tokens": nn.TokenEmbedding(11, 40, 12, 0.2, site=30),
        **{n: by_hand().blocks[n] for n in ("block", "twice")},
    }
    numbers = groups.tokens(13)[0], rng.normal(size=(3, 13, 12))
    groups.require_same_numbers(groups.Model(blocks, nn.MeanSquaredError()), numbers, (2, 1), (1, 2), *groups.BOTH[:3])


def test_users_layers_and_losses_are_split_without_sequences_and_without_tokens(rng):
    model = groups.Model(
        {"first": nn.Linear(4, 6), "act": nn.Tanh(), "norm": nn.LayerNorm(6), "last": Scaled(6)}, nn.MeanSquaredError()
    )
    assert isinstance(model, BlockModel)
    groups.require_same_numbers(model, (rng.normal(size=(5, 4)), rng.normal(size=(5, 1))), (2, 1), (3, 1))
    blocks = {"one": nn.TransformerBlock(12, 6, 0.2, 1), "two": nn.Checkpointed(nn.TransformerBlock(12, 6, 0.2, 4))}
    groups.require_same_numbers(
        groups.Model(blocks, nn.MeanSquaredError()), rng.normal(size=(2, 2, 5, 12)), (2, 1), (3, 1)
    )


def test_frozen_parameters_stay_so():
    groups.require_same_numbers(nn.freeze(nn.GPT(**F64), ["blocks.0.*", "blocks.1.norm1.*"]), groups.tokens(13), (2, 2))


class Squares:
    """A user's loss of whole logits."""

    def forward(self, prediction, target):
        difference = prediction - target[..., None]
        return float((difference**2).sum()), float(target.size), difference

    def backward(self, cache, scale=1.0):
        return 2 * scale * cache


def test_a_users_loss_of_whole_predictions_works_on_parts_and_full_logits_exist_on_no_rank():
    model = nn.GPT(**F64)
    named, (x, y) = groups.perturbed(model), groups.tokens(7)
    logits = nn.evaluate(model, nn.bind(model, named), x)
    value, weight, cache = Squares().forward(logits, y)
    gradient = Squares().backward(cache, 0.5)

    def work(group):
        split = nn.split_model(model, group)
        own = nn.evaluate(split, nn.bind(split, groups.own_parameters(split, named)), x)
        assert own.shape == (3, 7, (4, 4, 3)[group.rank])
        loss = split.loss_on_parts(Squares())
        found, counted, own_cache = loss.forward(own, y)
        return found, counted, split.whole_prediction(loss.backward(own_cache, 0.5))

    for found, counted, joined in groups.on_ranks(3, work):
        assert found == pytest.approx(value, rel=1e-12)
        assert counted == weight
        groups.require_close(joined, gradient, 1e-12)
    loss = Squares()
    assert nn.split_model(nn.MLP(features=2, hidden=(3,), outputs=2), groups.Apart(0, 2)).loss_on_parts(loss) is loss
    assert nn.whole_prediction(model, logits) is logits


def test_a_loss_of_numbers_takes_whole_scores_at_the_own_places(rng):
    model, (x, _) = nn.GPT(**F64), groups.tokens(13)
    named, target = groups.perturbed(model), rng.normal(size=(*x.shape, 11))
    expected = nn.MeanSquaredError().forward(nn.evaluate(model, nn.bind(model, named), x), target)[:2]

    def work(tensor, context):
        part, (own_x, own) = groups.cut(model, tensor, context), nn.cut_batch(x, target, context)
        loss = part.loss_on_parts(nn.MeanSquaredError())
        return loss.forward(nn.evaluate(part, nn.bind(part, groups.own_parameters(part, named)), own_x), own)[:2]

    for row in groups.on_grid((2, 2), work):
        assert np.sum(row, axis=0) == pytest.approx(expected, rel=1e-12)


def test_a_group_of_one_rank_gets_the_model_and_the_batch_themselves():
    alone, (x, y) = groups.Apart(0, 1), groups.tokens(9)
    for model in (
        nn.GPT(**groups.SMALL),
        nn.MLP(features=4, hidden=(7,), outputs=3),
        groups.Model({"norm": nn.LayerNorm(3)}),
    ):
        assert nn.split_model(model, alone) is model
    assert nn.GPT(**groups.SMALL).split(alone) == nn.GPT(**groups.SMALL)
    assert nn.context_model(gpt := nn.GPT(**groups.SMALL), alone) is gpt
    assert nn.cut_batch(x, y, alone) == (x, y)


def test_a_cut_model_has_the_parameters_of_the_whole():
    model = nn.GPT(**groups.SMALL, dropout=0.1, activation_checkpointing=True, seed=4)
    part = nn.context_model(model, groups.Apart(0, 2))
    assert {n: b.specs() for n, b in part.blocks.items()} == {n: b.specs() for n, b in model.blocks.items()}
    for form in (part, nn.split_model(model, groups.Apart(0, 2))):
        assert isinstance(form, BlockModel)
        assert isinstance(form.blocks["blocks.1"], nn.Checkpointed)
        assert (form.dtype, form.seed) == (model.dtype, model.seed)


def test_it_does_not_matter_which_group_is_named_first():
    model = nn.GPT(**F64, activation_checkpointing=True)

    def work(tensor, context):
        one, other = groups.cut(model, tensor, context), nn.split_model(nn.context_model(model, context), tensor)
        assert (one.blocks, one.loss) == (other.blocks, other.loss)
        assert groups.cut(model, tensor, groups.Apart(0, 1)).blocks == nn.split_model(model, tensor).blocks
        assert groups.cut(model, groups.Apart(0, 1), context).blocks == nn.context_model(model, context).blocks

    groups.on_grid((2, 2), work)


def test_split_specs_say_which_part_of_the_whole_they_are_and_start_values_are_the_wholes_cut():
    model = nn.GPT(**groups.SMALL, seed=4)
    whole, named = {spec.name: spec for spec in nn.model_specs(model)}, nn.initial_parameters(model)
    for rank in range(2):
        split = nn.split_model(model, groups.Apart(rank, 2))
        own, specs = nn.initial_parameters(split), groups.specs_of(split)
        for spec in nn.model_specs(split):
            unsplit = whole[spec.name]
            assert (spec.init, spec.decay, spec.tied) == (unsplit.init, unsplit.decay, unsplit.tied)
            assert (spec.part.shape if spec.part else spec.shape) == unsplit.shape
        for name, spec in specs.items():
            np.testing.assert_array_equal(own[name], groups.taken(named[name], spec.part), err_msg=name)
    assert specs["blocks.0.attention.qkv.weight"].part == Part((24, 72), 1, ((12, 24), (36, 48), (60, 72)))
    assert specs["blocks.1.feed_forward.projection.weight"].part == Part((96, 24), 0, ((48, 96),))
    assert specs["embedding.token.weight"].part == Part((11, 24), 0, ((6, 11),))
    assert specs["blocks.0.attention.projection.bias"].part is None


def test_a_run_that_knows_the_length_has_the_bits_of_one_that_asks():
    model, batch = nn.GPT(**groups.SMALL, dropout=0.1), groups.tokens(12)
    named = groups.perturbed(model)
    asked, told = (
        groups.over_grid(model, named, batch, (1, 3), run)
        for run in (groups.TRAINING, replace(groups.TRAINING, length=12))
    )
    assert asked[0] == told[0]
    assert all(asked[2][name].tobytes() == told[2][name].tobytes() for name in named)


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
