"""Parameters that are frozen by patterns keep their bits under every layout; the others train as they would alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError
from mpizero.nn.models import unfrozen
from mpizero.testing import check_model, run_in_threads
from tests.parallel.models import part
from tests.parallel.parallel_layouts import Chain

nn = mz.nn
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 30, (8, 6))
X, Y = RNG.normal(size=(8, 4)).astype("f4"), RNG.normal(size=(8, 2)).astype("f4")


def gpt():
    return nn.GPT(dim=8, layers=2, heads=2, sequence=6, vocabulary=30, dropout=0.1)


def trained(comm, net, x, y, **layout):
    """Train two steps; return a hash, the gradient, and the names of the parameters that did not change."""
    with mz.ShardingConfig(comm=comm, micro_batch=2) as config:
        optimizer = mz.AdamW(1e-2, weight_decay=0.1)
        if layout:
            model = mz.HybridShardedModel(net, config, **layout, optimizer=optimizer)
        else:
            model = mz.ZeRO3Model(net, config, optimizer=optimizer)
        with model:
            before = model.named_parameters()
            mine = part(model.batch_group, x, y)
            gradient = model.compute_gradients(*mine, gather=True).values
            for _ in range(2):
                model.train(*mine)
            after = model.named_parameters()
            same = [name for name, value in after.items() if (value == before[name]).all()]
            return model.parameters_sha256(), gradient, same, before


@pytest.mark.slow
def test_frozen_parameters_keep_their_bits_on_every_layout():
    patterns = ["embedding.*", "blocks.0.*", "*.norm1.*"]
    net = nn.freeze(gpt(), patterns)
    names = [spec.name for spec in nn.model_specs(gpt()) if spec.tied is None]
    frozen = [n for n in names if n.startswith(("embedding.", "blocks.0.")) or ".norm1." in n]
    sha256, gradient, same, start = trained("self", net, IDS, IDS)
    assert same == frozen
    whole = trained("self", gpt(), IDS, IDS)[1]
    position = 0
    for name in names:
        span = slice(position, position := position + start[name].size)
        if name in frozen:
            assert not gradient[span].any()
        else:
            np.testing.assert_array_equal(gradient[span], whole[span], err_msg=name)
    layouts = [
        (3, {}, True),
        (4, {"pipeline_parallel_size": 2, "schedule": "zero_bubble"}, True),
        (2, {"tensor_parallel_size": 2}, False),
        (2, {"context_parallel_size": 2}, False),
    ]
    for ranks, layout, exact in layouts:
        found = run_in_threads(ranks, lambda comm, k=layout: trained(comm, net, IDS, IDS, **k))[0]
        assert found[2] == frozen, layout
        np.testing.assert_allclose(found[1], gradient, rtol=1e-3, atol=1e-5)
        assert (found[0] == sha256) is exact or not exact, layout


class Plain:
    """A layer of one's own that is no subclass of Layer."""

    def __init__(self, layer):
        self.layer = layer

    def __getattr__(self, name):
        if name == "layer":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.layer, name)


def blocks(wrap):
    return Chain({"a": wrap(nn.Linear(4, 5)), "act": nn.Tanh(), "b": wrap(nn.Linear(5, 2))})


@pytest.mark.parametrize("wrap", [lambda layer: layer, Plain], ids=["Layer", "own"])
def test_parts_of_a_block_can_be_frozen(wrap):
    net = nn.freeze(blocks(wrap), "*.bias")
    assert trained("self", net, X, Y)[2] == ["a.bias", "b.bias"]
    values = nn.initial_parameters(net)
    loss, _, gradients = nn.loss_and_gradients(net, values, (X, Y))
    whole = nn.loss_and_gradients(blocks(wrap), values, (X, Y))
    assert loss == whole[0]
    assert set(gradients) == {"a.weight", "b.weight"}
    for name, value in gradients.items():
        np.testing.assert_array_equal(value, whole[2][name])
    again = nn.freeze(net, "a.*")  # twice
    assert trained("self", copy.deepcopy(again), X, Y)[2] == ["a.weight", "a.bias", "b.bias"]


def test_a_frozen_model_is_sound_and_offers_what_the_model_offers():
    net = nn.freeze(nn.MLP(4, (5,), 2, task="regression"), "hidden.*")
    check_model(net, X[:3], Y[:3])
    assert net.sample_shape == (4,)
    assert unfrozen(net.with_active_features([1])).active_features == (1,)
    with mz.ZeRO1Model(net, mz.ShardingConfig(comm="self")) as model:
        assert set(model.feature_importance()) == set("0123")
        assert model.jit_compile()(X).shape == (8, 2)


def test_functions_are_frozen_too():
    def loss_and_grad(parameters, batch):
        error = batch[0] @ parameters["weight"] + parameters["offset"] - batch[1]
        return float((error**2).sum()), {"weight": 2 * batch[0].T @ error, "offset": 2 * error.sum(axis=0)}, len(error)

    function = mz.FunctionModel({"weight": np.zeros((4, 2), "f4"), "offset": np.zeros(2, "f4")}, loss_and_grad)
    net = nn.freeze(function, ["off*"])
    assert trained("self", net, X, Y)[2] == ["offset"]
    assert run_in_threads(3, lambda comm: trained(comm, net, X, Y))[0][0] == trained("self", net, X, Y)[0]
    assert not function.frozen


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("hiden.*", r"freeze: 'hiden\.\*' fits the name of no parameter"),
        (["hidden.0"], r"freeze: .*did you mean 'hidden\.0\.\*'"),
        ("*", "freeze: '\\*' leave no parameter to train"),
        ([], "freeze: expected patterns of names"),
        ([1], "freeze=1: expected patterns"),
    ],
)
def test_patterns_that_make_no_sense_are_errors(patterns, message):
    with pytest.raises(ConfigError, match=message):
        nn.freeze(nn.MLP(4, (5,), 2), patterns)


def test_what_is_no_model_is_told():
    with pytest.raises(ConfigError, match="freeze takes a model of blocks"):
        nn.freeze(nn.Linear(2, 2), "*")
