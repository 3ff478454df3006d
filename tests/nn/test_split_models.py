"""Models split over a tensor group: losses, gradients and predictions of all ranks together are the unsplit model's."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import FunctionModel
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.errors import ConfigError, DataError
from mpizero.layout.flat import nested
from mpizero.nn import (
    GPT,
    MLP,
    Checkpointed,
    CrossEntropy,
    Layer,
    LayerNorm,
    Linear,
    MeanSquaredError,
    SplitModel,
    Tanh,
    TransformerBlock,
    bind,
    evaluate,
    gradient_slots,
    initial_parameters,
    loss_and_gradients,
    model_specs,
    split_model,
    whole_prediction,
)
from mpizero.nn.tensor_parallel import Copy, Reduce
from mpizero.testing import parallel_assert
from mpizero.types import BlockModel, ParameterSpec, Part, Run
from tests.nn.tensor import (
    Apart,
    Counting,
    assembled,
    cache_bytes,
    on_ranks,
    own_parameters,
    perturbed,
    specs_of,
    taken,
)

SMALL = {"dim": 24, "layers": 2, "heads": 12, "sequence": 9, "vocabulary": 11}
TRAINING = Run(training=True, seed=3, step=5, first_sample=11)
TOLERANCE = {np.dtype("float64"): 1e-12, np.dtype("float32"): 1e-5}


def tokens(length=7, samples=3, vocabulary=11):
    x, y = np.random.default_rng(length).integers(0, vocabulary, (2, samples, length))
    y[0, length // 2] = -1
    return x.copy(), y.copy()


def require_close(found, expected, tolerance, name=""):
    assert found.dtype == expected.dtype, name
    assert found.shape == expected.shape, name
    largest = np.abs(expected).max(initial=0)
    assert np.abs(found - expected).max(initial=0) <= tolerance * max(largest, 1e-3), name


def step(group, model, named, batch, run=TRAINING):
    """One rank's loss, weight, gradients and specs."""
    split = split_model(model, group)
    loss, weight, gradients = loss_and_gradients(split, own_parameters(split, named), batch, run, scale=0.5)
    return loss, weight, gradients, specs_of(split)


def require_same_step(model, batch, size, run=TRAINING):
    named = perturbed(model)
    expected = loss_and_gradients(model, named, batch, run, scale=0.5)
    found = on_ranks(size, lambda group: step(group, model, named, batch, run))
    tolerance = TOLERANCE[model.dtype]
    assert len({(loss, weight) for loss, weight, _, _ in found}) == 1, "every rank has the same loss"
    assert found[0][0] == pytest.approx(expected[0], rel=tolerance, abs=1e-300)
    assert found[0][1] == expected[1]
    gradients = assembled([specs for *_, specs in found], [gradients for _, _, gradients, _ in found])
    assert list(gradients) == list(expected[2])
    for name, gradient in gradients.items():
        require_close(gradient, expected[2][name], tolerance, name)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"tied": False}], ids=str)
def test_a_split_gpt_has_the_losses_and_gradients_of_the_whole(options, dtype, size):
    require_same_step(GPT(**SMALL, **options, dtype=dtype), tokens(), size)


@pytest.mark.parametrize("length", [1, 2, 4, 8, 9])
def test_sequences_of_any_length_are_cut_even_shorter_ones_than_the_group(length):
    require_same_step(GPT(**SMALL, dropout=0.3, dtype="float64"), tokens(length), 4)


@pytest.mark.parametrize("vocabulary", [2, 12])
def test_a_vocabulary_is_cut_even_a_smaller_one_than_the_group(vocabulary):
    require_same_step(GPT(**{**SMALL, "vocabulary": vocabulary}, dtype="float64"), tokens(5, 2, vocabulary), 4)


def test_attention_of_many_blocks_of_queries_is_split_alike():
    model = GPT(dim=8, layers=1, heads=2, sequence=150, vocabulary=5, dropout=0.2, dtype="float64")
    require_same_step(model, tokens(131, 2, 5), 2)


def test_checkpointed_blocks_repeat_their_messages_and_have_the_same_bits():
    plain = GPT(**SMALL, dropout=0.3)
    kept = GPT(**SMALL, dropout=0.3, activation_checkpointing=True)
    named, batch = perturbed(plain), tokens()

    def work(group):
        results = []
        for model in (plain, kept):
            counting = Counting(group)
            results.append((*step(counting, model, named, batch), counting.clear()))
        return results

    for one, other in on_ranks(2, work):
        assert one[0] == other[0]
        for name, gradient in one[2].items():
            assert gradient.tobytes() == other[2][name].tobytes(), name
        more = {kind: other[4][kind] - one[4][kind] for kind in one[4]}
        assert more == {"all_gather": 2 * SMALL["layers"], "reduce_scatter": 2 * SMALL["layers"], "all_reduce": 0}
        assert isinstance(split_model(kept, Apart(0, 2)).blocks["blocks.0"], Checkpointed)


def test_a_run_repeats_its_bits():
    model = GPT(**SMALL, dropout=0.3)
    named = perturbed(model)
    runs = [on_ranks(3, lambda group: step(group, model, named, tokens())) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert first[0] == second[0]
        for name, gradient in first[2].items():
            assert gradient.tobytes() == second[2][name].tobytes(), name


def test_an_empty_batch_has_no_loss_and_zero_gradients():
    model = GPT(**SMALL, dropout=0.3)
    batch = np.zeros((2, 0, 7), int)
    for loss, weight, gradients, _ in on_ranks(2, lambda group: step(group, model, perturbed(model), batch)):
        assert (loss, weight) == (0.0, 0.0)
        assert not any(gradient.any() for gradient in gradients.values())


def test_predictions_are_joined_and_full_logits_exist_on_no_rank():
    model = GPT(**SMALL, dtype="float64")
    named, (x, _) = perturbed(model), tokens()
    expected = evaluate(model, bind(model, named), x)

    def work(group):
        split = split_model(model, group)
        y = evaluate(split, bind(split, own_parameters(split, named)), x)
        return y, split.whole_prediction(y)

    for rank, (part, joined) in enumerate(on_ranks(3, work)):
        assert part.shape == (3, 7, (4, 4, 3)[rank])
        require_close(joined, expected, 1e-12)
    assert whole_prediction(model, expected) is expected


class Squares:
    """A user's loss of whole logits."""

    def forward(self, prediction, target):
        difference = prediction - target[..., None]
        return float((difference**2).sum()), float(target.size), difference

    def backward(self, cache, scale=1.0):
        return 2 * scale * cache


def test_a_users_loss_of_whole_predictions_works_on_parts():
    model = GPT(**SMALL, dtype="float64")
    named, (x, y) = perturbed(model), tokens()
    logits = evaluate(model, bind(model, named), x)
    value, weight, cache = Squares().forward(logits, y)
    gradient = Squares().backward(cache, 0.5)

    def work(group):
        split = split_model(model, group)
        own = evaluate(split, bind(split, own_parameters(split, named)), x)
        loss = split.loss_on_parts(Squares())
        found, counted, own_cache = loss.forward(own, y)
        return found, counted, split.whole_prediction(loss.backward(own_cache, 0.5))

    for found, counted, joined in on_ranks(3, work):
        assert found == pytest.approx(value, rel=1e-12)
        assert counted == weight
        require_close(joined, gradient, 1e-12)
    whole_outputs = split_model(MLP(features=2, hidden=(3,), outputs=2), Apart(0, 2))
    loss = Squares()
    assert whole_outputs.loss_on_parts(loss) is loss


def test_what_ranks_hold_between_blocks_is_what_the_model_says():
    gpt, mlp = GPT(**SMALL), MLP(features=5, hidden=(7, 3), outputs=2)
    for model, x in ((gpt, tokens()[0]), (mlp, np.ones((3, 5), np.float32))):
        named = initial_parameters(model)

        def work(group, model=model, named=named, x=x):
            split = split_model(model, group)
            params, shape, h = bind(split, own_parameters(split, named)), x.shape[1:], x
            for name, layer in split.blocks.items():
                h = layer.forward(params[name], h, split.run_on(x, Run()))[0]
                assert layer.output_shape(shape) == model.blocks[name].output_shape(shape), name
                shape = layer.output_shape(shape)
                assert h.shape[1:] == split.held_shape(name, shape), name

        on_ranks(3, work)


def test_start_values_are_the_whole_models_cut():
    model = GPT(**SMALL, seed=4, tied=False)
    named = initial_parameters(model)
    for rank in range(3):
        split = split_model(model, Apart(rank, 3))
        own = initial_parameters(split)
        for name, spec in specs_of(split).items():
            np.testing.assert_array_equal(own[name], taken(named[name], spec.part), err_msg=name)


def test_split_specs_say_which_part_of_the_whole_they_are():
    model = GPT(**SMALL)
    whole = {spec.name: spec for spec in model_specs(model)}
    for spec in model_specs(split_model(model, Apart(1, 2))):
        unsplit = whole[spec.name]
        assert (spec.init, spec.decay, spec.tied) == (unsplit.init, unsplit.decay, unsplit.tied)
        assert (spec.part.shape if spec.part else spec.shape) == unsplit.shape
    specs = specs_of(split_model(model, Apart(1, 2)))
    assert specs["blocks.0.attention.qkv.weight"].part == Part((24, 72), 1, ((12, 24), (36, 48), (60, 72)))
    assert specs["blocks.1.feed_forward.projection.weight"].part == Part((96, 24), 0, ((48, 96),))
    assert specs["embedding.token.weight"].part == Part((11, 24), 0, ((6, 11),))
    assert specs["blocks.0.attention.projection.bias"].part is None


def test_one_reduction_each_way_for_a_column_row_pair():
    """Counted on every rank, block by block: two pairs are four messages each way."""
    model = GPT(**SMALL, dropout=0.3)
    named, (x, y) = perturbed(model), tokens()
    pair = {"all_gather": 2, "reduce_scatter": 2}
    forward = {"embedding": {"reduce_scatter": 1}, "blocks.0": pair, "blocks.1": pair, "head": {"all_gather": 1}}
    inputs = {"embedding": {}, "blocks.0": pair, "blocks.1": pair, "head": {"reduce_scatter": 1}}
    end = {"all_gather": 1, "all_reduce": 1}
    weights = {"embedding": {"all_gather": 1}, "blocks.0": {**end, "all_gather": 2}, "head": end}
    weights["blocks.1"] = weights["blocks.0"]

    def work(group):
        counting = Counting(group)
        split = split_model(model, counting)
        params, grads = bind(split, own_parameters(split, named)), gradient_slots(split)
        caches, h, run = {}, x, split.run_on(x, TRAINING)
        for name, layer in split.blocks.items():
            h, caches[name] = layer.forward(params[name], h, run)
            assert counting.clear() == forward[name], f"{name} forward"
        _, _, cache = split.loss.forward(h, y)
        d = split.loss.backward(cache)
        assert counting.clear() == {"all_gather": 1}, "loss"
        for name, layer in reversed(split.blocks.items()):
            d, pending = layer.backward_input(params[name], caches[name], d)
            assert counting.clear() == inputs[name], f"{name} backward, inputs"
            slots = [(n[len(name) + 1 :], g) for n, g in grads.items() if n.startswith(f"{name}.")]
            layer.backward_weights(params[name], caches[name], pending, nested(dict(slots)))
            assert counting.clear() == weights[name], f"{name} backward, weights"

    on_ranks(2, work)


def test_blocks_that_are_not_told_the_length_ask_once():
    model = GPT(**SMALL, dtype="float64")
    named, (x, _) = perturbed(model), tokens()
    expected = evaluate(model, bind(model, named), x)

    def work(group):
        counting = Counting(group)
        split = split_model(model, counting)
        params, h = bind(split, own_parameters(split, named)), x
        for name, layer in split.blocks.items():
            h = layer.forward(params[name], h, Run())[0]
        return split.whole_prediction(h), counting.tags["sequence lengths"]

    for joined, asked in on_ranks(3, work):
        require_close(joined, expected, 1e-12)
        assert asked == SMALL["layers"] + 1


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activations_fall_by_the_size_of_the_group(dropout):
    """What lives from forward to backward, embedding to head; even cuts, so exactly, but for statistics and ids."""
    model = GPT(dim=32, layers=2, heads=4, sequence=16, vocabulary=64, dropout=dropout)
    named, (x, y) = initial_parameters(model), tokens(16, 4, 64)

    def kept(group):
        split = split_model(model, group)
        params, h, sizes = bind(split, own_parameters(split, named)), x, {}
        for name, layer in split.blocks.items():
            h, cache = layer.forward(params[name], h, TRAINING)
            sizes[name] = cache_bytes(cache)
        sizes["loss"] = cache_bytes(split.loss.forward(h, y)[2])
        return sizes

    params, h, whole = bind(model, named), x, {}
    for name, layer in model.blocks.items():
        h, cache = layer.forward(params[name], h, TRAINING)
        whole[name] = cache_bytes(cache)
    whole["loss"] = cache_bytes(model.loss.forward(h, y)[2])
    ids = x.size * 8
    for size in (2, 4):
        for sizes in on_ranks(size, kept):
            for name in ("blocks.0", "blocks.1", "head"):
                assert sizes[name] == whole[name] / size, name
            assert sizes["embedding"] == whole["embedding"] == ids
            assert sizes["loss"] == (whole["loss"] - ids) / size + ids + 2 * y.size * 4


def test_parameters_fall_by_the_size_of_the_group_but_for_norms_positions_and_row_biases():
    model = GPT(dim=32, layers=2, heads=4, sequence=16, vocabulary=64)
    whole = {spec.name: spec.size for spec in model_specs(model)}
    for spec in model_specs(split_model(model, Apart(1, 4))):
        shared = "norm" in spec.name or "position" in spec.name or spec.name.endswith("projection.bias")
        assert spec.size == whole[spec.name] / (1 if shared else 4), spec.name


CHAINS = {
    "even": {"hidden": (7,)},
    "odd": {"hidden": (7, 5)},
    "deep": {"hidden": (6, 1, 9, 4)},
    "linear": {"hidden": ()},
    "wide": {"hidden": (8, 8, 8)},
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_split_mlp_has_the_losses_and_gradients_of_the_whole(chain, task, size, rng):
    for dtype in ("float64", "float32"):
        for options in ({}, {"active_features": (0, 3)}):
            model = MLP(features=4, outputs=3, task=task, activation="gelu", dtype=dtype, **CHAINS[chain], **options)
            x = rng.normal(size=(6, 4))
            y = rng.integers(0, 3, 6) if task == "classification" else rng.normal(size=(6, 3))
            require_same_step(model, (x, y), size)


def test_predictions_of_a_split_mlp_are_whole(rng):
    model = MLP(features=4, hidden=(7, 5), outputs=3)
    named, x = perturbed(model), rng.normal(size=(6, 4))
    expected = evaluate(model, bind(model, named), x)

    def work(group):
        split = split_model(model, group)
        return split.whole_prediction(evaluate(split, bind(split, own_parameters(split, named)), x))

    for y in on_ranks(3, work):
        require_close(y, expected, 1e-5)


def test_two_layers_of_an_mlp_cost_one_sum_each_way(rng):
    batch = rng.normal(size=(6, 4)), rng.integers(0, 3, 6)

    def work(group, hidden):
        counting = Counting(group)
        model = MLP(features=4, hidden=hidden, outputs=3)
        step(counting, model, initial_parameters(model), batch)
        return counting.clear()

    # The first layer's input needs no gradient, so its pair has no sum backward.
    assert on_ranks(2, lambda group: work(group, (8,))) == [{"all_reduce": 1}] * 2
    assert on_ranks(2, lambda group: work(group, (8, 8, 8))) == [{"all_reduce": 3}] * 2
    assert on_ranks(2, lambda group: work(group, (8, 8))) == [{"all_reduce": 2, "all_gather": 1}] * 2


# ------------------------------------------------------------------ users' own models


class Scaled(Layer):
    """A user's layer: features times a weight, of which each rank holds a part."""

    def __init__(self, features, group=None):
        self.features, self.group = features, group

    def own_specs(self):
        if self.group is None:
            return (ParameterSpec("scale", (self.features,)),)
        start, stop = self._range()
        return (ParameterSpec("scale", (stop - start,), part=Part((self.features,), 0, ((start, stop),))),)

    def _range(self):
        half = self.features // self.group.size
        return self.group.rank * half, (self.group.rank + 1) * half

    def split(self, group):
        return Scaled(self.features, group)

    def _sum(self, x, params):
        start, stop = (0, self.features) if self.group is None else self._range()
        y = x[:, start:stop] @ params["scale"]
        return (y if self.group is None else Reduce(self.group).forward(y)), x[:, start:stop]

    def forward(self, params, x, run=None):
        y, own = self._sum(x, params)
        return y[:, None], own

    def backward_input(self, params, cache, dy):
        dx = dy * params["scale"]
        if self.group is not None:
            start, stop = self._range()
            whole = np.zeros((len(dy), self.features))
            whole[:, start:stop] = dx
            dx = Copy(self.group).backward(whole)
        return dx, dy

    def backward_weights(self, params, cache, pending, grads):
        grads["scale"][...] = (cache * pending).sum(axis=0)


class Users:
    """A user's model: some layers of the library's, one of his own."""

    dtype, seed = np.dtype("float64"), 3
    loss = MeanSquaredError()

    def __init__(self, **blocks):
        self.blocks = blocks


def test_a_users_model_is_split_block_by_block(rng):
    model = Users(first=Linear(4, 6), act=Tanh(), norm=LayerNorm(6), last=Scaled(6))
    assert isinstance(model, BlockModel)
    for size in (2, 3):
        require_same_step(model, (rng.normal(size=(5, 4)), rng.normal(size=(5, 1))), size)


def test_a_users_transformer_is_split_block_by_block(rng):
    model = Users(one=TransformerBlock(12, 6, 0.2, 1), two=Checkpointed(TransformerBlock(12, 6, 0.2, 4)))
    x, y = rng.normal(size=(2, 2, 5, 12))
    for size in (2, 3):
        require_same_step(model, (x, y), size)


def test_a_group_of_one_rank_gets_the_model_itself():
    alone = Apart(0, 1)
    for model in (GPT(**SMALL), MLP(features=4, hidden=(7,), outputs=3), Users(norm=LayerNorm(3))):
        assert split_model(model, alone) is model
    assert GPT(**SMALL).split(alone) == GPT(**SMALL)


def test_a_model_with_nothing_to_split_is_refused():
    with pytest.raises(ConfigError, match=r"Users has nothing to split over 2 ranks.*\(norm, act\).*split\(group\)"):
        split_model(Users(norm=LayerNorm(3), act=Tanh()), Apart(0, 2))
    function = FunctionModel({"w": np.zeros(3)}, lambda parameters, batch: (0.0, {}, 1.0))
    with pytest.raises(ConfigError, match="a FunctionModel has no blocks"):
        split_model(function, Apart(0, 2))


def test_a_subclass_of_a_layer_must_say_itself_how_it_is_split():
    class Doubled(Linear):
        def forward(self, params, x, run=None):
            return super().forward(params, 2 * x, run)

    assert Doubled(3, 2).split(Apart(0, 1)) == Doubled(3, 2)
    with pytest.raises(ConfigError, match=r"Doubled has split\(\) from Linear.*define split\(group\) in it"):
        split_model(Users(only=Doubled(3, 2)), Apart(0, 2))


def test_heads_that_cannot_be_dealt_are_refused():
    for model in (GPT(**{**SMALL, "heads": 6}), Users(block=TransformerBlock(24, 6))):
        with pytest.raises(ConfigError, match=r"heads=6 .* group of 4 ranks; .*\(1, 2, 3, 6\), or a multiple of 4"):
            split_model(model, Apart(0, 4))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((1, 10), int), r"length <= 9.*\(1, 10\)"),
        (np.array([[0, 11]]), "ids from 0 to 10, the input has ids from 0 to 11"),
    ],
)
def test_inputs_that_cannot_be_used_are_named_on_every_rank(x, message):
    def work(group):
        split = split_model(GPT(**SMALL), group)
        with pytest.raises(DataError, match=message):
            evaluate(split, bind(split, initial_parameters(split)), x)

    on_ranks(2, work)


def test_targets_that_cannot_be_used_are_named_on_every_rank():
    def work(group):
        loss = GPT(**SMALL).split(group).loss
        logits = np.zeros((1, 2, 6 - group.rank), np.float32)
        with pytest.raises(DataError, match="target 11 is not below the number of classes, 11"):
            loss.forward(logits, np.array([[0, 11]]))
        with pytest.raises(DataError, match=r"integers of shape \(1, 2\)"):
            loss.forward(logits, np.zeros((1, 3), int))

    on_ranks(2, work)


def test_a_part_of_another_length_is_refused():
    model = GPT(**SMALL)
    block = split_model(model, Apart(1, 2)).blocks["blocks.0"]
    with pytest.raises(DataError, match=r"rank 1 .* group of 2 takes places 4 to 7 of sequences of 7, .*\(3, 4, 24\)"):
        block.forward({}, np.zeros((3, 4, 24), np.float32), Run(length=7))


@pytest.mark.mpi
def test_split_models_agree_with_the_whole_over_mpi(world):
    group = CommunicatorGroup(world)
    heads = 12 if 12 % world.size == 0 else 2 * world.size
    model = GPT(**{**SMALL, "heads": heads, "dim": 2 * heads}, dropout=0.3, dtype="float64")
    named, batch = perturbed(model), tokens()
    expected = loss_and_gradients(model, named, batch, TRAINING, scale=0.5)
    loss, weight, gradients, specs = step(group, model, named, batch)
    parallel_assert(world, abs(loss - expected[0]) <= 1e-12 * abs(expected[0]))
    parallel_assert(world, weight == expected[1])
    for name, spec in specs.items():
        own = taken(expected[2][name], spec.part)
        parallel_assert(
            world, np.abs(gradients[name] - own).max(initial=0) <= 1e-12 * np.abs(own).max(initial=1.0), name
        )
    bits = world.allgather_object({n: g.tobytes() for n, g in gradients.items() if specs[n].part is None})
    parallel_assert(world, all(other == bits[0] for other in bits))


def test_a_split_model_is_described_by_its_own_class():
    split = split_model(GPT(**SMALL), Apart(0, 2))
    assert isinstance(split, SplitModel)
    assert isinstance(split, BlockModel)
    assert split.dtype == np.float32
    assert isinstance(split.whole.loss, CrossEntropy)
