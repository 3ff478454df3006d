"""A network with batch normalization, whose running statistics steps average, and plain NumPy that trains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import mpizero as mz
from mpizero.nn import Layer
from mpizero.types import EVALUATE, Array, Init, IntegerSpec, ParameterSpec
from tests.parallel.parallel_layouts import Chain

EPS, MOMENTUM, RATE = 1e-5, 0.2, 0.05
WIDTHS = (6, 11, 13, 3)


@dataclass(frozen=True)
class BatchNorm(Layer):
    """Normalize every feature by its mean and variance over the micro-batch; keep running ones for evaluation."""

    features: int
    momentum: float = MOMENTUM

    def own_specs(self) -> Any:
        shape, ones = (self.features,), Init("ones")
        return (
            ParameterSpec("weight", shape, ones, decay=False),
            ParameterSpec("mean", shape, averaged=True),
            ParameterSpec("bias", shape, decay=False),
            ParameterSpec("variance", shape, ones, averaged=True),
        )

    def forward(self, params: Any, x: Array, run: Any = EVALUATE) -> tuple[Array, Any]:
        mean, variance = (x.mean(0), x.var(0)) if run.training else (params["mean"], params["variance"])
        unit = (x - mean) / np.sqrt(variance + EPS)
        return unit * params["weight"] + params["bias"], (unit, mean, variance)

    def backward_input(self, params: Any, cache: Any, dy: Array) -> tuple[Any, Any]:
        unit, _, variance = cache
        d = dy * params["weight"]
        dx = (d - d.mean(0) - unit * (d * unit).mean(0)) / np.sqrt(variance + EPS)
        return dx, ((dy * unit).sum(0), dy.sum(0))

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        grads["weight"][...], grads["bias"][...] = pending
        for name, value in (("mean", cache[1]), ("variance", cache[2])):
            grads[name][...] = (1 - self.momentum) * params[name] + self.momentum * value


class CountingNorm(BatchNorm):
    """Count the steps, too, and turn a flag at every step."""

    def own_integers(self) -> Any:
        return IntegerSpec("steps"), IntegerSpec("flags", (3,), "bool", 1), IntegerSpec("unused", (2,), "int32", 7)

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        super().backward_weights(params, cache, pending, grads)
        grads["steps"][...] = params["steps"] + 1
        grads["flags"][0] = params["steps"] % 2


def network(dtype: str = "float64", norm: Any = BatchNorm) -> Chain:
    blocks: dict[str, Any] = {}
    for number, (inputs, outputs) in enumerate(zip(WIDTHS, WIDTHS[1:], strict=False)):
        blocks[f"linear{number}"] = mz.nn.Linear(inputs, outputs)
        if outputs != WIDTHS[-1]:
            blocks[f"norm{number}"] = norm(outputs)
            blocks[f"tanh{number}"] = mz.nn.Tanh()
    return Chain(blocks, mz.nn.MeanSquaredError(), np.dtype(dtype))


def samples(steps: int, count: int, dtype: str = "float64") -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(8)
    return [tuple(rng.normal(size=(count, n)).astype(dtype) for n in (WIDTHS[0], WIDTHS[-1])) for _ in range(steps)]  # type: ignore[misc]


def by_hand(start: dict[str, Array], batches: list[tuple[Array, Array]], grain: int) -> dict[str, Array]:
    """Train by SGD with formulas of its own, grain by grain; statistics are means over grains by their samples."""
    w = {name: value.astype(np.float64) for name, value in start.items()}
    for x, y in batches:
        sums = {name: np.zeros_like(value) for name, value in w.items()}
        for first in range(0, len(x), grain):
            for name, value in _of_grain(w, x[first : first + grain], y[first : first + grain]).items():
                sums[name] += value
        for name in w:
            if name.endswith((".mean", ".variance")):
                w[name] = sums[name] / len(x)
            else:
                w[name] = w[name] - RATE * sums[name] / (len(x) * WIDTHS[-1])
    return w


def _of_grain(w: dict[str, Array], x: Array, y: Array) -> dict[str, Array]:
    """Gradients of the sum of squares, and samples times new statistics, by matrices instead of layers."""
    n, layers = len(x), len(WIDTHS) - 1
    center = np.eye(n) - 1 / n  # takes the mean of every column away
    found, kept, h = {}, [], x
    for i in range(layers):
        z = h @ w[f"linear{i}.weight"] + w[f"linear{i}.bias"]
        kept.append((h, z))
        if i < layers - 1:
            mean, variance = z.sum(0) / n, ((center @ z) ** 2).sum(0) / n
            for name, value in (("mean", mean), ("variance", variance)):
                old = w[f"norm{i}.{name}"]
                found[f"norm{i}.{name}"] = n * ((1 - MOMENTUM) * old + MOMENTUM * value)
            h = np.tanh(w[f"norm{i}.weight"] * (center @ z) / np.sqrt(variance + EPS) + w[f"norm{i}.bias"])
    d = 2 * (z - y)
    for i in reversed(range(layers)):
        h, z = kept[i]
        if i < layers - 1:
            spread = np.sqrt(((center @ z) ** 2).sum(0) / n + EPS)
            unit = (center @ z) / spread
            d = d * (1 - kept[i + 1][0] ** 2)
            found[f"norm{i}.weight"], found[f"norm{i}.bias"] = (d * unit).sum(0), d.sum(0)
            d = d * w[f"norm{i}.weight"]
            d = center @ (d / spread) - (center @ z) * (d * (center @ z)).sum(0) / (n * spread**3)
        found[f"linear{i}.weight"], found[f"linear{i}.bias"] = h.T @ d, d.sum(0)
        d = d @ w[f"linear{i}.weight"].T
    return found
