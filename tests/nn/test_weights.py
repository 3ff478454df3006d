"""The weight mapping without PyTorch: arrays under its names."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero.errors import LayoutError
from mpizero.nn import GPT, from_torch, initial_parameters, to_torch
from mpizero.nn.models import torch_name


@pytest.fixture
def model():
    return GPT(dim=4, layers=2, heads=2, sequence=3, vocabulary=5)


def test_names_are_gpt2s():
    assert torch_name("blocks.11.feed_forward.expand.bias") == "transformer.h.11.mlp.c_fc.bias"
    assert torch_name("embedding.token.weight") == "transformer.wte.weight"


def test_linear_layers_are_transposed_and_tables_are_not(model):
    named = initial_parameters(model)
    state = to_torch(model, named)
    np.testing.assert_array_equal(state["transformer.h.1.attn.c_attn.weight"], named["blocks.1.attention.qkv.weight"].T)
    assert state["lm_head.weight"] is state["transformer.wte.weight"]
    assert all(np.array_equal(value, named[name]) for name, value in from_torch(model, state).items())


def test_conv1d_layout_is_told_by_its_shape(model):
    """GPT-2's own checkpoints store (inputs, outputs)."""
    named = initial_parameters(model)
    state = to_torch(model, named)
    for name, value in state.items():
        if ".h." in name and value.ndim == 2:
            state[name] = value.T
    assert all(np.array_equal(value, named[name]) for name, value in from_torch(model, state).items())


def test_what_is_missing_or_misshapen_is_named(model):
    state = to_torch(model, initial_parameters(model))
    with pytest.raises(LayoutError, match="it is not a GPT-2's"):
        from_torch(model, {"fc.weight": np.zeros(3)})
    with pytest.raises(LayoutError, match=r"no 'transformer\.ln_f\.bias', which head\.norm\.bias comes from"):
        from_torch(model, {name: value for name, value in state.items() if name != "transformer.ln_f.bias"})
    with pytest.raises(LayoutError, match=r"'transformer\.wpe\.weight' has shape \(9, 4\).*needs \(3, 4\)"):
        from_torch(model, {**state, "transformer.wpe.weight": np.zeros((9, 4))})
