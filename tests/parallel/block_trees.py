"""A model whose blocks take and return trees of arrays: dictionaries, tuples, lists and dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from mpizero.nn import Checkpointed, Layer
from mpizero.types import EVALUATE, Array, Init, ParameterSpec
from tests.parallel.parallel_layouts import Chain

WIDTH = 5


class Both(NamedTuple):
    """Two arrays, one of them scaled."""

    left: Any
    right: Any = None


@dataclass
class Sides:
    """Two arrays and a place that is not used."""

    even: Any
    odd: Any
    unused: Any = None


def matrix(name: str = "weight") -> ParameterSpec:
    return ParameterSpec(name, (WIDTH, WIDTH), Init("normal", WIDTH**-0.5))


class Spread(Layer):
    """From an array to a dictionary: a product, the input itself, whole numbers and a mask."""

    def own_specs(self) -> Any:
        return (matrix(),)

    def forward(self, params: Any, x: Array, run: Any = EVALUATE) -> Any:
        x = x.astype(params["weight"].dtype)
        signs = (x > 0).astype(np.int32)
        return {"h": np.tanh(x @ params["weight"]), "inputs": x, "signs": signs, "mask": signs.any(1)}, x

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        assert dy["signs"] is None
        assert dy["mask"] is None
        d = dy["h"] * (1 - np.tanh(cache @ params["weight"]) ** 2)
        return d @ params["weight"].T + dy["inputs"], d

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        np.matmul(cache.T, pending, out=grads["weight"])


class Turn(Layer):
    """From the dictionary to a tuple with a list in it; the whole numbers choose a row of a table."""

    def own_specs(self) -> Any:
        return (ParameterSpec("table", (2, WIDTH), Init("normal", 0.5)),)

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        chosen = x["signs"][:, 0]
        return (x["h"] + params["table"][chosen], [x["inputs"], x["mask"]], Both(x["h"])), chosen

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        d, (inputs, mask), (h, nothing) = dy
        assert mask is None
        assert nothing is None
        return {"h": d + h, "inputs": inputs, "signs": None, "mask": None}, d

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        for row in range(2):
            grads["table"][row] = pending[cache == row].sum(0)


class Same(Layer):
    """Pass a tuple on, with its first array multiplied by a matrix; the gradient of it is a view of a gradient."""

    def own_specs(self) -> Any:
        return (ParameterSpec("scale", (WIDTH,), Init("ones")),)

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        return (x[0] * params["scale"], *x[1:]), x[0]

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return (dy[0] * params["scale"], *dy[1:]), dy[0]

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        grads["scale"][...] = (cache * pending).sum(0)


class Halve(Layer):
    """From the tuple to a dataclass."""

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        first, (inputs, mask), both = x
        return Sides(first * mask[:, None], inputs + both.left), mask

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return (dy.even * cache[:, None], [dy.odd, None], Both(dy.odd)), None


class Meet(Layer):
    """From the dataclass to an array, or to a tuple of two arrays that the loss takes."""

    def own_specs(self) -> Any:
        return (matrix("a"), matrix("b"))

    def forward(self, params: Any, x: Any, run: Any = EVALUATE) -> Any:
        return x.even @ params["a"] + x.odd @ params["b"], x

    def backward_input(self, params: Any, cache: Any, dy: Any) -> Any:
        return Sides(dy @ params["a"].T, dy @ params["b"].T), dy

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        np.matmul(cache.even.T, pending, out=grads["a"])
        np.matmul(cache.odd.T, pending, out=grads["b"])


@dataclass(frozen=True)
class OfSides:
    """Squared error of a dataclass as prediction, in place of a last block."""

    def forward(self, prediction: Any, target: Array) -> Any:
        errors = prediction.even - target, prediction.odd - target
        return float(sum((e.astype(np.float64) ** 2).sum() for e in errors)), float(len(target)), errors

    def backward(self, cache: Any, scale: float = 1.0) -> Any:
        return Sides(*(2 * scale * error for error in cache))


def trees(*, checkpointed: bool = False) -> Chain:
    kinds = {"spread": Spread(), "turn": Turn(), "same": Same(), "again": Same(), "halve": Halve(), "meet": Meet()}
    return Chain(
        {name: Checkpointed(layer) if checkpointed else layer for name, layer in kinds.items()},
        dtype=np.dtype("float64"),
    )  # noqa: E501


def ends_in_a_tree() -> Chain:
    blocks = {name: layer for name, layer in trees().blocks.items() if name != "meet"}
    return replace(trees(), blocks=blocks, loss=OfSides())
