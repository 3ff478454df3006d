"""What cannot be split or cut, and inputs of split models that cannot be used, are named on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import FunctionModel, nn
from mpizero.errors import ConfigError, DataError
from mpizero.types import Run
from tests.nn.groups import SMALL, Apart, Model, Mute, cut, on_grid, on_ranks


class Tripled(nn.Linear):
    """A user's layer whose class inherits how it is split."""

    def forward(self, params, x, run=None):
        return super().forward(params, 3 * x, run)


class Mine(nn.CrossEntropy.__base__):
    """No loss that is known to add up over places."""


BLOCK = nn.TransformerBlock(4, 2)
UNCUT = [
    (nn.MLP(4, [3], 2), "MLP has no attention along a sequence"),
    (Model({"drop": nn.Sequential([nn.Linear(3, 3), nn.Dropout(0.5)])}), "Model has no attention along a sequence"),
    (Model({"own": Mute()}), "block 'own': Mute does not say how it works on a part of a sequence"),
    (Model({"b": nn.Sequential({"c": Mute()})}), "block 'b', 'c': Mute does not say"),
    (Model({"b": BLOCK}, nn.RelativeL2Loss()), "RelativeL2Loss does not add up over parts"),
]
UNSPLIT = [
    (
        Model({"norm": nn.LayerNorm(3), "act": nn.Tanh()}),
        r"Model has nothing to split over 4 ranks.*\(norm, act\).*split\(group\)",
    ),
    (FunctionModel({"w": np.zeros(3)}, lambda parameters, batch: (0.0, {}, 1.0)), "a FunctionModel has no blocks"),
    (Model({"only": Tripled(3, 2)}), r"Tripled has split\(\) from Linear.*define split\(group\) in it"),
    (nn.GPT(**{**SMALL, "heads": 6}), r"heads=6 .* group of 4 ranks; .*\(1, 2, 3, 6\), or a multiple of 4"),
]


def test_models_that_cannot_be_split_or_cut_are_named_with_what_is_missing():
    for number, (model, message) in enumerate(UNCUT + UNSPLIT):
        with pytest.raises(ConfigError, match=message):
            nn.context_model(model, Apart(1, 2)) if number < len(UNCUT) else nn.split_model(model, Apart(1, 4))
    assert Tripled(3, 2).split(Apart(0, 1)) == Tripled(3, 2)


def test_models_that_cannot_be_cut_twice_and_losses_that_do_not_add_up_are_named():
    def work(tensor, context):
        for blocks, message in (
            (
                {"block": nn.TransformerBlock(12, 6), "own": Mute()},
                "block 'own': Mute does not say how it works on a part",
            ),
            ({"feed": nn.FeedForward(12)}, "Model has no attention along a sequence"),
        ):
            with pytest.raises(ConfigError, match=message):
                cut(Model(blocks), tensor, context)
        part = cut(nn.GPT(**SMALL), tensor, context)
        with pytest.raises(ConfigError, match="GPT: the loss Mine does not add up over parts of a sequence"):
            part.loss_on_parts(Mine())
        with pytest.raises(DataError, match="rank . of a tensor group of 2 takes places . to . of the . of its contex"):
            part.blocks["blocks.0"].forward({}, np.zeros((3, 9, 24)), Run(length=13))

    on_grid((2, 2), work)


@pytest.mark.parametrize("shapes", [((3,), (3,)), ((3, 0), (3, 0)), ((3, 4), (3, 5))])
def test_batches_without_a_sequence_axis_are_refused(shapes):
    with pytest.raises(DataError, match=r"inputs and targets of \(samples, length >= 1\)"):
        nn.cut_batch(*(np.zeros(shape, int) for shape in shapes), Apart(1, 2))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((1, 41), int), r"length <= 40.*\(1, 41\)"),
        (np.array([[0, 11]]), "ids from 0 to 10, the input has ids from 0 to 11"),
    ],
)
def test_inputs_that_a_split_model_cannot_use_are_named_on_every_rank(x, message):
    def work(group):
        split = nn.split_model(nn.GPT(**SMALL), group)
        with pytest.raises(DataError, match=message):
            nn.evaluate(split, nn.bind(split, nn.initial_parameters(split)), x)
        with pytest.raises(DataError, match="ids from 0 to 5, the input has ids from 1 to 6"):
            nn.Embedding(6, 3).split(group).forward({"weight": np.zeros((3, 3))}, np.array([[1, 6]]))

    on_ranks(2, work)


def test_targets_that_cannot_be_used_are_named_on_every_rank():
    def work(group):
        loss = nn.GPT(**SMALL).split(group).loss
        logits = np.zeros((1, 2, 6 - group.rank), np.float32)
        with pytest.raises(DataError, match="target 11 is not below the number of classes, 11"):
            loss.forward(logits, np.array([[0, 11]]))
        with pytest.raises(DataError, match=r"integers of shape \(1, 2\)"):
            loss.forward(logits, np.zeros((1, 3), int))

    on_ranks(2, work)


def test_a_part_of_another_length_is_refused():
    block = nn.split_model(nn.GPT(**SMALL), Apart(1, 2)).blocks["blocks.0"]
    with pytest.raises(DataError, match=r"rank 1 .* group of 2 takes places 4 to 7 of sequences of 7, .*\(3, 4, 24\)"):
        block.forward({}, np.zeros((3, 4, 24), np.float32), Run(length=7))


def test_inputs_that_are_not_parts_of_the_same_sequences_are_refused_on_every_rank():
    model = nn.GPT(**SMALL)
    params = nn.bind(model, nn.initial_parameters(model))

    def work(group):
        cut = nn.context_model(model, group)
        for shape in ((3, 4 + 2 * group.rank), (3 + group.rank, 4), (3,) if group.rank else (3, 4)):
            with pytest.raises(DataError, match="not parts of the same sequences; cut the same batch"):
                nn.evaluate(cut, params, np.zeros(shape, int))
        with pytest.raises(DataError, match=r"length <= 40.*\(3, 21\) of sequences of 42"):
            nn.evaluate(cut, params, np.zeros((3, 21), int))
        with pytest.raises(DataError, match=r"holds 5 places of a sequence of 10, but the input has shape \(3, 4\)"):
            nn.evaluate(cut, params, np.zeros((3, 4), int), Run(length=10))

    on_ranks(2, work)
