"""Users' layers in tiles: what they may do on a rank they may do in a tile, and what they do wrong is told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero import nn
from mpizero.errors import CollectiveError, LayoutError
from mpizero.nn.tensor_parallel import local_range, part_of
from mpizero.testing import run_in_threads
from mpizero.types import Init, IntegerSpec, ParameterSpec
from tests.nn.groups import Model

WIDTH = 5
X, Y = np.random.default_rng(0).normal(size=(2, 4, 6, WIDTH)).astype("f4")


@dataclass(frozen=True)
class Own(nn.Layer):
    """x @ weight, split by rows, with a counter of batches; ``wrong`` names a mistake that one tile makes."""

    wrong: str = ""
    group: Any = None

    @property
    def held(self):
        return slice(*local_range(WIDTH, self.group)) if self.group else slice(0, WIDTH)

    def own_specs(self):
        weight = ParameterSpec("weight", (WIDTH, WIDTH), Init("normal", 0.3))
        return (part_of(weight, 0, ((self.held.start, self.held.stop),)) if self.group else weight,)

    def own_integers(self):
        return (IntegerSpec("batches"),)

    def split(self, group):
        return replace(self, group=group)

    def sum(self, x, tag):
        if self.group is None:
            return x
        last = self.group.rank == self.group.size - 1
        if last and self.wrong == "raises":
            raise ValueError("in one tile")
        if last and self.wrong == "another":
            return self.group.all_max(x, tag)
        if last and self.wrong == "shape":
            return self.group.all_reduce(x[:1], tag)
        return self.group.all_reduce(x, tag)

    def forward(self, params, x, run):
        part = np.ascontiguousarray(x[..., self.held])
        return self.sum(part @ params["weight"], "rows"), part

    def backward_input(self, params, cache, dy):
        dx = np.zeros((*dy.shape[:-1], WIDTH), dy.dtype)
        dx[..., self.held] = dy @ params["weight"].T
        return (dx if self.group is None else self.group.all_reduce(dx, "input")), dy

    def backward_weights(self, params, cache, pending, grads):
        grads["weight"][...] = np.tensordot(cache, pending, (range(pending.ndim - 1), range(pending.ndim - 1)))
        grads["batches"][...] += self.group.rank if self.wrong == "counter" else 1


@dataclass(frozen=True)
class Places(nn.Layer):
    """{"x", "shift"} -> x + bias + shift, place by place; ``writes`` is the number of context tiles that write."""

    writes: int = 2
    group: Any = None

    def own_specs(self):
        return (ParameterSpec("bias", (WIDTH,)),)

    def context(self, group):
        return replace(self, group=group)

    def forward(self, params, x, run):
        return x["x"] + params["bias"] + x["shift"], None

    def backward_input(self, params, cache, dy):
        return {"x": dy, "shift": None}, dy

    def backward_weights(self, params, cache, pending, grads):
        if self.group is None or self.group.rank < self.writes:
            grads["bias"][...] = pending.sum(axis=(0, 1))


def model_of(blocks):
    return Model(blocks, nn.MeanSquaredError(), "f4", seed=3)


def trained(comm, model, x, tiles, **sizes):
    with mz.ShardingConfig(comm=comm, micro_batch=2, tiles=tiles) as config:
        sharded = mz.HybridShardedModel(model, config, **sizes, optimizer=mz.AdamW(lr=1e-2))
        losses = [sharded.train(x, Y) for _ in range(2)]
        return (
            losses,
            sharded.parameters_sha256(),
            {n: int(v) for n, v in sharded._engine.integers.all_values().items()},
        )


def assert_same(model, x, tiles, *layouts):
    alone = trained(None, model, x, tiles)
    for ranks, sizes in layouts:
        for rank in run_in_threads(ranks, lambda comm, sizes=sizes: trained(comm, model, x, tiles, **sizes)):
            assert rank == alone
    return alone


def own(wrong=""):
    return model_of({"first": nn.Linear(WIDTH, WIDTH), "own": Own(wrong)})


def test_integer_arrays_are_counted_once():
    found = assert_same(own(), X, {"tensor": 4}, (2, {"tensor_parallel_size": 2}), (4, {"tensor_parallel_size": 4}))
    assert found[2] == {"own.batches": 2}
    with pytest.raises(
        LayoutError, match=r"block 'own'.* 'batches' differs between tiles: 0 on the first .*, 1 on tile 1"
    ):
        trained(None, own("counter"), X, {"tensor": 2})


def test_what_one_tile_does_wrong_names_the_users_class_and_line():
    with pytest.raises(ValueError, match="in one tile") as told:
        trained(None, own("raises"), X, {"tensor": 2})
    assert told.value.__notes__ == ["In block 'own': Own.forward"]
    for wrong, call in (("another", "all_max"), ("shape", r"all_reduce\(float32 \(1, 6, 5\)")):
        with pytest.raises(CollectiveError, match=rf"tile 1 {call}.* at {__name__[9:]}.py:\d+ in sum"):
            trained(None, own(wrong), X, {"tensor": 2})


def test_trees_of_arrays_are_cut_and_joined_in_context_tiles():
    model = model_of({"places": Places(4), "attention": nn.CausalSelfAttention(WIDTH, 1)})
    x = {"x": X, "shift": X[:, :, ::-1].copy()}
    assert_same(model, x, {"context": 4}, (2, {"context_parallel_size": 2}), (2, {"pipeline_parallel_size": 2}))


def test_a_gradient_that_one_context_tile_does_not_write_is_found():
    model = model_of({"places": Places(1), "attention": nn.CausalSelfAttention(WIDTH, 1)})
    with pytest.raises(
        LayoutError, match="block 'places', Places: the backward pass has not written the gradient of 'bias'"
    ):
        trained(None, model, {"x": X, "shift": X}, {"context": 2})
