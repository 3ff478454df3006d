"""``assert_same_tiles``: layers that communicate through their group alone keep their bits; others are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ArgumentError, ConfigError
from mpizero.testing import assert_same_tiles
from tests.parallel.models import gpt, mlp, points, tokens

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)


@dataclass(frozen=True)
class Adapter(mz.nn.Layer):
    """x + up(tanh(down(x))), split by columns and rows; ``wrong`` adds what depends on the process."""

    chain: Any
    wrong: bool = False

    def children(self):
        return {"chain": self.chain}

    def output_shape(self, shape):
        return shape

    def forward(self, params, x, run):
        y, cache = self.chain.forward(params["chain"], x, run)
        return x + y, cache

    def backward_input(self, params, cache, dy):
        dx, pending = self.chain.backward_input(params["chain"], cache, dy)
        return dx + dy, pending

    def backward_weights(self, params, cache, pending, grads):
        self.chain.backward_weights(params["chain"], cache, pending, grads["chain"])

    def split(self, group):
        down, tanh, up = self.chain.children().values()
        parts = {"down": mz.nn.ColumnLinear(down, group), "tanh": tanh, "up": mz.nn.RowLinear(up, group)}
        return (WrongAdapter if self.wrong else Adapter)(mz.nn.Sequential(parts))


class WrongAdapter(Adapter):
    def backward_weights(self, params, cache, pending, grads):
        super().backward_weights(params, cache, pending, grads)
        group = self.chain.children()["down"].group
        grads["chain"]["up"]["bias"][...] *= 1 + 1e-6 * (type(group).__name__ == "CommunicatorGroup")


def adapter(wrong=False):
    chain = {"down": mz.nn.Linear(8, 12), "tanh": mz.nn.Tanh(), "up": mz.nn.Linear(12, 8)}
    return Adapter(mz.nn.Sequential(chain), wrong)


def test_layers_and_models_that_use_their_group_alone_keep_their_bits():
    assert_same_tiles(adapter(), X)
    assert_same_tiles(mlp(hidden=(9, 6)), *points(6), tiles=2, clip=0.1, micro_batch=2)
    assert_same_tiles(mlp(hidden=(5,), outputs=1, task="regression"), X[:, :6], X[:, :1])  # tiles that hold nothing
    for axis in ("tensor", "context"):
        assert_same_tiles(gpt(layers=1), *tokens(4), tiles=2, axis=axis, micro_batch=2)


def test_a_layer_whose_bits_depend_on_the_process_is_found_by_name():
    with pytest.raises(AssertionError, match=r"4 tiles on 4 ranks: step\[0\]\['gradient'\]\['layer.chain.up.bias'\]"):
        assert_same_tiles(adapter(wrong=True), X)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((adapter(), X, None, {"tiles": 3}), "tiles=3: expected a power of two"),
        ((adapter(), X, None, {"axis": "data"}), "axis='data': expected 'tensor' or 'context'"),
        ((mz.nn.Dropout(0.1), X, None, {}), "no block of _OneLayer has a form for a tensor group"),
        ((mlp(), points(6)[0], None, {}), "y is missing"),
        ((3, X, None, {}), "3 is neither a model of blocks nor a layer"),
    ],
)
def test_what_cannot_be_checked_is_refused(given, told):
    *arguments, settings = given
    with pytest.raises((ArgumentError, ConfigError), match=told):
        assert_same_tiles(*arguments, **settings)
