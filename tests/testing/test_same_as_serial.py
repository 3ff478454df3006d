"""``assert_same_as_serial`` of models and layers: right split layers pass, wrong ones are found and named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ArgumentError, ConfigError, IntegrityError
from mpizero.testing import assert_same_as_serial, run_in_threads
from mpizero.types import EVALUATE, Init, ParameterSpec, Part
from tests.parallel.models import gpt, mlp, points, tokens

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)


@dataclass(frozen=True)
class Pair(mz.nn.Layer):
    """x + tanh(x A) B + b, with columns of A and rows of B on each rank; ``fault`` is what is done wrong."""

    fault: str = ""
    group: Any = None

    def own_specs(self):
        shapes, parts = {"A": (8, 12), "B": (12, 8)}, dict.fromkeys("AB")
        if self.group is not None:
            each = 12 // self.group.size
            start = each * self.group.rank - (self.fault == "part" and self.group.rank > 0)
            own = ((start, start + each),)
            parts = {name: Part(shape, 1 - axis, own) for axis, (name, shape) in enumerate(shapes.items())}
            shapes = {"A": (8, each), "B": (each, 8)}
        split = (ParameterSpec(name, shapes[name], Init("normal", 0.3), part=parts[name]) for name in "AB")
        return (*split, ParameterSpec("b" if self.fault != "name" or self.group is None else "c", (8,)))

    def sum(self, x, fault):
        return x if self.group is None or self.fault == fault else self.group.all_reduce(x)

    def forward(self, params, x, run=EVALUATE):
        hidden = np.tanh(x @ params["A"])
        y = x + self.sum(hidden @ params["B"], "forward") + params[self.own_specs()[2].name]
        if self.fault == "state" and self.group is not None:
            vars(self)["calls"] = vars(self).get("calls", 0) + 1
            y = y + np.float32(vars(self)["calls"])
        return y, (x, hidden)

    def backward_input(self, params, cache, dy):
        d_hidden = dy @ params["B"].T * (1 - cache[1] ** 2)
        return dy + self.sum(d_hidden @ params["A"].T, "backward"), (dy, d_hidden)

    def backward_weights(self, params, cache, pending, grads):
        x, hidden = cache
        dy, d_hidden = pending
        grads["A"][...], grads["B"][...], total = x.T @ d_hidden, hidden.T @ dy, dy.sum(axis=0)
        if self.group is not None:
            total = self.group.all_reduce(total) if self.fault == "bias twice" else total
            total = total * self.group.rank if self.fault == "bias by rank" else total
            if self.fault == "bits":  # what only a rank of its own does
                total = total * (1 + 1e-6 * (type(self.group).__name__ == "CommunicatorGroup"))
        grads[self.own_specs()[2].name][...] = total

    def split(self, group):
        return Pair(self.fault, group)


@pytest.mark.slow
def test_layers_and_models_that_use_their_group_alone_keep_their_bits():
    assert_same_as_serial(Pair(), x=X)
    run_in_threads(2, lambda comm: assert_same_as_serial(Pair(), comm, X, tiles=4))
    assert_same_as_serial(mlp(hidden=(9, 6)), x=points(6)[0], y=points(6)[1], tiles=2, clip=0.1, micro_batch=2)
    few = mlp(hidden=(5,), outputs=1, task="regression")  # tiles that hold nothing
    assert_same_as_serial(few, x=X[:, :6], y=X[:, :1])
    for axis in ("tensor", "context"):
        x, y = tokens(4)
        assert_same_as_serial(gpt(layers=1), x=x, y=y, tiles=2, axis=axis, micro_batch=2)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("forward", "tile 1 (Pair.forward, {}): the output differs in 48 of 48 elements"),
        ("backward", "tile 1 (Pair.backward_input, {}): the gradient of the input differs"),
        ("bias by rank", "tile 1 (Pair.backward_weights, {}): the gradient of 'b' differs"),
        ("bias twice", "4 tiles (Pair.backward_weights, {}): the gradient of 'b' is not the whole block's, 4 times it"),
        ("state", "(Pair.forward, {}): the output of a second pass on the same input differs"),
        ("part", "the tiles together hold of 'A' the indices ((0, 3), (2, 11)) along axis 1"),
        ("name", "has the parameters ['A', 'B', 'c'], the whole block ['A', 'B', 'b']"),
        ("bits", "4 tiles on 4 ranks: step[0]['gradient']['layer.b'] differs in"),
    ],
)
def test_a_wrong_split_layer_is_found_and_named(fault, told):
    with pytest.raises(AssertionError) as error:
        assert_same_as_serial(Pair(fault), x=X)
    text = re.sub(r"test_same_as_serial\.py:\d+", "{}", str(error.value))
    assert told in text
    assert ("block 'layer' in 4 tiles" in text) == (fault != "bits")


def test_ranks_that_compute_different_gradients_of_a_whole_parameter_are_found_by_check_every():
    class Net:
        dtype, seed, loss, blocks = np.dtype("f4"), 0, mz.nn.MeanSquaredError(), {"pair": Pair("bias by rank")}

    def train(comm):
        told = r"'pair.b'.* differs between ranks 0.*assert_same_as_serial"
        with (
            mz.ShardingConfig(comm=comm, check_every=1) as config,
            mz.TensorParallelModel(Net(), config, optimizer=mz.SGD(lr=0.1)) as model,
        ):
            model.train(X, X)
            with pytest.raises(IntegrityError, match=told):
                model.train(X, X)

    run_in_threads(2, train)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((Pair(), None, X, None, {"tiles": 3}), "tiles=3: expected a power of two"),
        ((Pair(), None, X, None, {"axis": "data"}), "axis='data': expected 'tensor' or 'context'"),
        ((mz.nn.Dropout(0.1), None, X, None, {}), "has nothing to split over 4 ranks"),
        ((mlp(), None, X, None, {}), "y is missing"),
        ((Pair(), None, None, None, {}), "x is missing"),
        ((3, None, X, None, {}), "3 is neither a function, a model of blocks nor"),
        ((Pair, None, X, None, {}), "Pair'> is a class"),
        ((lambda comm: 0, None, None, None, {}), "comm is missing"),
    ],
)
def test_what_cannot_be_checked_is_refused(given, told):
    *arguments, settings = given
    with pytest.raises((ArgumentError, ConfigError), match=told):
        assert_same_as_serial(*arguments, **settings)


def test_ranks_that_cannot_compute_the_tiles_are_refused():
    with pytest.raises(ConfigError, match="4 tiles do not fit 3 ranks"):
        run_in_threads(3, lambda comm: assert_same_as_serial(Pair(), comm, X))
