"""What the ranks of split models tell each other, compute and hold: it falls by the sizes of their groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpizero import nn
from mpizero.types import Run
from tests.nn import groups

LAYERS = groups.SMALL["layers"]


def step(group, model, named, batch, run=groups.TRAINING):
    """One rank's loss and gradients of a model that is split over ``group``."""
    split = nn.split_model(model, group)
    return nn.loss_and_gradients(split, groups.own_parameters(split, named), batch, run)


def test_one_reduction_each_way_for_a_column_row_pair():
    """Counted on every rank, block by block: two pairs are four messages each way."""
    model = nn.GPT(**groups.SMALL, dropout=0.3)
    named, (x, y) = groups.perturbed(model), groups.tokens(7)
    pair = {"all_gather": 2, "reduce_scatter": 2}
    forward = {"embedding": {"reduce_scatter": 1}, "blocks.0": pair, "blocks.1": pair, "head": {"all_gather": 1}}
    inputs = {"embedding": {}, "blocks.0": pair, "blocks.1": pair, "head": {"reduce_scatter": 1}}
    end = {"all_gather": 1, "all_reduce": 1}
    weights = {"embedding": {"all_gather": 1}, "blocks.0": {**end, "all_gather": 2}, "head": end}
    weights["blocks.1"] = weights["blocks.0"]

    def work(group):
        counting = groups.Counting(group)
        split = nn.split_model(model, counting)
        params, grads = nn.bind(split, groups.own_parameters(split, named)), nn.gradient_slots(split)
        caches, run = {}, split.run_on(x, groups.TRAINING)
        for name, result, cache in groups.each_block(split, params, x, run):
            h, caches[name] = result, cache
            assert counting.clear() == forward[name], f"{name} forward"
        _, _, cache = split.loss.forward(h, y)
        d = split.loss.backward(cache)
        assert counting.clear() == {"all_gather": 1}, "loss"
        for name, layer in reversed(split.blocks.items()):
            d, pending = layer.backward_input(params[name], caches[name], d)
            assert counting.clear() == inputs[name], f"{name} backward, inputs"
            layer.backward_weights(params[name], caches[name], pending, groups.slots_of(grads, name))
            assert counting.clear() == weights[name], f"{name} backward, weights"

    groups.on_ranks(2, work)


def test_two_layers_of_an_mlp_cost_one_sum_each_way(rng):
    batch = rng.normal(size=(6, 4)), rng.integers(0, 3, 6)

    def work(group, hidden):
        counting, model = groups.Counting(group), nn.MLP(features=4, hidden=hidden, outputs=3)
        step(counting, model, nn.initial_parameters(model), batch)
        return counting.clear()

    # The first layer's input needs no gradient, so its pair has no sum backward.
    for hidden, messages in (
        ((8,), {"all_reduce": 1}),
        ((8, 8, 8), {"all_reduce": 3}),
        ((8, 8), {"all_reduce": 2, "all_gather": 1}),
    ):
        assert groups.on_ranks(2, lambda group, hidden=hidden: work(group, hidden)) == [messages] * 2


def test_checkpointed_blocks_repeat_their_messages_and_have_the_same_bits():
    plain, kept = (nn.GPT(**groups.SMALL, dropout=0.3, activation_checkpointing=again) for again in (False, True))
    named = groups.perturbed(plain)

    def work(group):
        counting = groups.Counting(group)
        return [(*step(counting, model, named, groups.tokens(7)), counting.clear()) for model in (plain, kept)]

    for one, other in groups.on_ranks(2, work):
        assert one[0] == other[0]
        assert all(gradient.tobytes() == other[2][name].tobytes() for name, gradient in one[2].items())
        more = {kind: other[3][kind] - one[3][kind] for kind in one[3]}
        assert more == {"all_gather": 2 * LAYERS, "reduce_scatter": 2 * LAYERS, "all_reduce": 0}


@pytest.mark.parametrize("tensor", [1, 2])
def test_messages_are_those_of_the_ring_and_one_about_the_length_beside_those_of_the_tensor_group(tensor):
    """A tensor group's messages are as many as without a context group; a run that knows the length asks nothing."""
    model, (x, y) = nn.GPT(**groups.SMALL, dropout=0.3), groups.tokens(12)

    def work(tensor, context, run):
        part = groups.cut(model, tensor, context)
        nn.loss_and_gradients(
            part, groups.own_parameters(part, groups.perturbed(model)), nn.cut_batch(x, y, context), run
        )
        return dict(tensor.counts), dict(context.counts)

    def alone(group):
        step(group, model, groups.perturbed(model), (x, y))
        return dict(group.counts)

    expected, ring = groups.on_ranks(tensor, alone)[0], {"shift": LAYERS * 3 * (3 - 1)}
    for run, asked in ((groups.TRAINING, {"all_gather": 1}), (replace(groups.TRAINING, length=12), {})):
        found = groups.on_grid((tensor, 3), lambda tensor, context, run=run: work(tensor, context, run))
        for of_tensor, of_context in (rank for row in found for rank in row):
            assert of_context == {**asked, **ring}
            assert of_tensor == expected


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (2, 2)])
def test_blocks_that_are_told_no_length_ask_each_group_once(sizes):
    model, (x, _) = nn.GPT(**{**groups.SMALL, "dtype": "float64"}, dropout=0.3), groups.tokens(13)
    named = groups.perturbed(model)
    expected = nn.evaluate(model, nn.bind(model, named), x, groups.TRAINING)

    def work(tensor, context):
        counting = groups.Counting(tensor)
        part, h = groups.cut(model, counting, context), nn.cut_batch(x, x, context)[0]
        *_, (_, h, _) = groups.each_block(part, nn.bind(part, groups.own_parameters(part, named)), h, groups.TRAINING)
        told = counting.tags["sequence lengths"], dict(context.counts)
        return part.whole_prediction(h), *told

    for joined, of_tensor, of_context in (rank for row in groups.on_grid(sizes, work) for rank in row):
        groups.require_close(joined, expected, 1e-11)
        if sizes[1] == 1:
            assert of_tensor == LAYERS + 1
        else:
            assert of_context == {"all_gather": LAYERS + 1, "shift": LAYERS * (sizes[1] - 1)}


@pytest.mark.parametrize(("ranks", "length"), [(2, 32), (3, 36), (4, 21)])
def test_the_work_of_all_ranks_is_the_unsplit_models_but_for_attention(ranks, length):
    """Counted from the shape of whole samples. Attention makes seven products of its tiles, dense attention six."""
    model = nn.GPT(**groups.SMALL, activation_checkpointing=True)
    counts = groups.on_ranks(ranks, lambda group: nn.model_operations(nn.context_model(model, group), (length,)))
    whole = nn.model_operations(model, (length,))
    assert sum(count["head"].total for count in counts) == whole["head"].total
    weights = [sum(count[block].backward_weights for count in counts) for block in whole]
    assert weights == [whole[block].backward_weights for block in whole]
    if length % (2 * ranks) == 0:
        assert len({str(count) for count in counts}) == 1, "as much on every rank"


def test_work_by_layers_made_by_hand_is_counted_for_the_own_places():
    blocks = {
        "in": nn.Sequential({"norm": nn.LayerNorm(6), "wide": nn.Linear(6, 8)}),
        "narrow": nn.Frozen(nn.FeedForward(8)),
        "attention": nn.CausalSelfAttention(8, 2),
    }
    counts = groups.on_ranks(
        2, lambda group: nn.model_operations(nn.context_model(groups.Model(blocks), group), (10, 6))
    )
    for block, whole in nn.model_operations(groups.Model(blocks), (10, 6)).items():
        for count in counts:
            assert 2 * count[block].backward_weights == whole.backward_weights
            if block != "attention":
                assert 2 * count[block].total == whole.total


def test_work_and_activations_fall_by_the_sizes_of_both_groups():
    model, (x, _) = nn.GPT(**{**groups.SMALL, "vocabulary": 12}, dropout=0.3), groups.tokens(24, vocabulary=12)
    named = groups.perturbed(model)

    def work(tensor, context):
        part, (h, _) = groups.cut(model, tensor, context), nn.cut_batch(x, x, context)
        passes = groups.each_block(
            part, nn.bind(part, groups.own_parameters(part, named)), h, part.run_on(h, groups.TRAINING)
        )
        return nn.model_operations(part, (24,)), {name: groups.cache_bytes(cache) for name, _, cache in passes}

    (((counted, held), _),) = groups.on_grid((1, 2), work)
    whole = nn.model_operations(model, (24,))
    for tensor, context in ((2, 2), (3, 2)):
        for counts, kept in (rank for row in groups.on_grid((tensor, context), work) for rank in row):
            for name, block in whole.items():
                assert counts[name].backward_weights * tensor * context == block.backward_weights
                assert counts[name].total * tensor == counted[name].total
            for name in ("blocks.0", "head"):
                assert kept[name] * tensor == held[name]


def test_what_ranks_hold_between_blocks_is_what_the_model_says():
    gpt, mlp = nn.GPT(**groups.SMALL), nn.MLP(features=5, hidden=(7, 3), outputs=2)
    for model, x in ((gpt, groups.tokens(7)[0]), (mlp, np.ones((3, 5), np.float32))):

        def work(group, model=model, x=x):
            split = nn.split_model(model, group)
            params, shape = nn.bind(split, groups.own_parameters(split, nn.initial_parameters(model))), x.shape[1:]
            for name, h, _ in groups.each_block(split, params, x, split.run_on(x, Run())):
                layer = split.blocks[name]
                assert layer.output_shape(shape) == model.blocks[name].output_shape(shape), name
                shape = layer.output_shape(shape)
                assert h.shape[1:] == split.local_shape(name, shape), name

        groups.on_ranks(3, work)


def test_activations_fall_by_the_size_of_the_group():
    """What lives from forward to backward, embedding to head; even cuts, so exactly, but for statistics and ids."""
    model = nn.GPT(dim=32, layers=2, heads=4, sequence=16, vocabulary=64, dropout=0.3)
    named, (x, y) = nn.initial_parameters(model), groups.tokens(16, 4, 64)

    def kept(group):
        split = nn.split_model(model, group)
        passes = list(groups.each_block(split, nn.bind(split, groups.own_parameters(split, named)), x, groups.TRAINING))
        sizes = {name: groups.cache_bytes(cache) for name, _, cache in passes}
        return {**sizes, "loss": groups.cache_bytes(split.loss.forward(passes[-1][1], y)[2])}

    (whole,), ids = groups.on_ranks(1, kept), x.size * 8
    for size in (2, 4):
        for sizes in groups.on_ranks(size, kept):
            for name in ("blocks.0", "blocks.1", "head"):
                assert sizes[name] == whole[name] / size, name
            assert sizes["embedding"] == whole["embedding"] == ids
            assert sizes["loss"] == (whole["loss"] - ids) / size + ids + 2 * y.size * 4
