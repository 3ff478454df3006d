"""GPT as a whole: gradients, types, samples, start values, and the names that PyTorch has for its parameters."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import nn
from mpizero.errors import LayoutError
from mpizero.nn.models import torch_name
from mpizero.testing import taylor_test
from mpizero.types import BlockModel, Run
from tests.nn.checks import central_difference
from tests.nn.groups import arrays_in, each_block, perturbed

SMALL = {"dim": 12, "layers": 2, "heads": 3, "sequence": 7, "vocabulary": 11}


@pytest.fixture
def batch(rng):
    x, y = rng.integers(0, 11, (2, 3, 7))
    y[0, 2] = -1
    return x, y


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"activation_checkpointing": True}])
def test_gradients_are_those_of_finite_differences(options, batch, rng):
    """Of sampled entries of every parameter, and along one direction; values are PyTorch's, in ``tests/peers``."""
    model = nn.GPT(**SMALL, **options, dtype="float64")
    named = perturbed(model, 0.3)
    _, weight, gradients = nn.loss_and_gradients(model, named, batch)
    assert weight == 20.0, "the ignored target counts for nothing"
    assert gradients.keys() == named.keys()

    def loss(point=named):
        return nn.loss_and_gradients(model, point, batch)[0]

    for name, value in named.items():
        sample = rng.choice(value.size, 2)
        flat = value.reshape(-1)
        slope = [central_difference(loss, flat[i : i + 1]).item() for i in sample]
        assert gradients[name].reshape(-1)[sample] == pytest.approx(slope, rel=1e-5, abs=1e-7), name
    taylor_test(loss, gradients, named)


def test_everything_stays_in_the_models_dtype(batch):
    model = nn.GPT(**SMALL, dropout=0.2, dtype="float32")
    named = nn.initial_parameters(model)
    run = Run(training=True, seed=1, step=2)
    for block, x, cache in each_block(model, nn.bind(model, named), batch[0], run):
        for array in arrays_in(cache):
            assert array.dtype in ("float32", np.int64), f"{block} caches {array.dtype}"
        assert x.dtype == "float32", block
    loss, _, gradients = nn.loss_and_gradients(model, named, batch, run)
    assert isinstance(loss, float)
    assert {array.dtype for array in (*named.values(), *gradients.values())} == {np.dtype("float32")}


def test_samples_of_a_batch_do_not_know_each_other(batch):
    """Dropout included: a sample alone, under its place in the batch, has the losses it has in company."""
    model = nn.GPT(**SMALL, dropout=0.2, dtype="float64")
    named = nn.initial_parameters(model)
    x, y = batch
    whole = nn.loss_and_gradients(model, named, batch, Run(training=True, step=4))
    parts = [
        nn.loss_and_gradients(model, named, (x[i : i + 1], y[i : i + 1]), Run(training=True, step=4, first_sample=i))
        for i in range(3)
    ]
    assert whole[0] == pytest.approx(sum(part[0] for part in parts), rel=1e-13)
    for name in named:
        total = sum(part[2][name] for part in parts)
        np.testing.assert_allclose(whole[2][name], total, rtol=1e-10, atol=1e-12, err_msg=name)


def test_gradients_may_be_written_over_those_of_an_earlier_step_also_with_checkpoints(batch):
    """And have the same bits."""
    run, results = Run(training=True, seed=1, step=2), []
    for checkpointing in (False, True):
        model = nn.GPT(**SMALL, dropout=0.2, activation_checkpointing=checkpointing)
        named, slots = nn.initial_parameters(model), nn.gradient_slots(model)
        for given in (slots, slots, None):
            loss, _, gradients = nn.loss_and_gradients(model, named, batch, run, slots=given)
            assert given is None or all(gradients[name] is slots[name] for name in named)
            results.append((loss, {name: gradient.tobytes() for name, gradient in gradients.items()}))
    assert all(result == results[0] for result in results)


def test_blocks_are_embedding_blocks_and_head_and_the_tied_table_has_a_slot_for_each_use():
    model = nn.GPT(**SMALL)
    assert isinstance(model, BlockModel)
    assert list(model.blocks) == ["embedding", "blocks.0", "blocks.1", "head"]
    specs = {spec.name: spec for spec in nn.model_specs(model)}
    assert specs["head.projection.weight"].tied == "embedding.token.weight"
    assert specs["head.projection.weight"].shape == specs["embedding.token.weight"].shape
    assert nn.model_specs(nn.GPT(**SMALL, tied=False))[-1].tied is None


def test_start_values_depend_on_seed_and_name_and_on_nothing_else():
    one, same, other = (nn.initial_parameters(nn.GPT(**SMALL, seed=seed)) for seed in (1, 1, 2))
    for name, value in one.items():
        np.testing.assert_array_equal(value, same[name])
    assert not np.array_equal(one["blocks.0.attention.qkv.weight"], other["blocks.0.attention.qkv.weight"])
    assert not np.array_equal(one["blocks.0.attention.qkv.weight"], one["blocks.1.attention.qkv.weight"])


def test_dropout_sites_are_unique():
    model = nn.GPT(**{**SMALL, "layers": 4}, dropout=0.1)
    sites = [model.blocks["embedding"].site]
    for i in range(4):
        first = model.blocks[f"blocks.{i}"].site
        sites += [first, first + 1, first + 2]
    assert len(set(sites)) == len(sites)


def test_parameters_that_do_not_fit_are_named():
    model = nn.GPT(**SMALL)
    named = nn.initial_parameters(model)
    norm = named.pop("head.norm.bias")
    for more, told in (
        ({}, r"missing: head\.norm\.bias"),
        ({"head.norm.bias": norm, "surplus": np.zeros(1)}, "no parameters surplus"),
        ({"head.norm.bias": np.zeros(12)}, r"head\.norm\.bias must be float32 of shape \(12,\), it is float64"),
    ):
        with pytest.raises(LayoutError, match=told):
            nn.bind(model, {**named, **more})


@pytest.fixture
def model():
    return nn.GPT(dim=4, layers=2, heads=2, sequence=3, vocabulary=5)


def test_names_are_gpt2s():
    assert torch_name("blocks.11.feed_forward.expand.bias") == "transformer.h.11.mlp.c_fc.bias"
    assert torch_name("embedding.token.weight") == "transformer.wte.weight"


def test_linear_layers_are_transposed_and_tables_are_not_and_conv1d_s_layout_is_told_by_its_shape(model):
    """GPT-2's own checkpoints are of Conv1D layers, which store (inputs, outputs)."""
    named = nn.initial_parameters(model)
    state = nn.to_torch(model, named)
    np.testing.assert_array_equal(state["transformer.h.1.attn.c_attn.weight"], named["blocks.1.attention.qkv.weight"].T)
    assert state["lm_head.weight"] is state["transformer.wte.weight"]
    turned = {name: value.T if ".h." in name and value.ndim == 2 else value for name, value in state.items()}
    for given in (state, turned):
        assert all(np.array_equal(value, named[name]) for name, value in nn.from_torch(model, given).items())


def test_what_is_missing_or_misshapen_is_named(model):
    state = nn.to_torch(model, nn.initial_parameters(model))
    with pytest.raises(LayoutError, match="it is not a GPT-2's"):
        nn.from_torch(model, {"fc.weight": np.zeros(3)})
    with pytest.raises(LayoutError, match=r"no 'transformer\.ln_f\.bias', which head\.norm\.bias comes from"):
        nn.from_torch(model, {name: value for name, value in state.items() if name != "transformer.ln_f.bias"})
    with pytest.raises(LayoutError, match=r"'transformer\.wpe\.weight' has shape \(9, 4\).*needs \(3, 4\)"):
        nn.from_torch(model, {**state, "transformer.wpe.weight": np.zeros((9, 4))})
