"""Models of the matrix: a GPT, an MLP, and two that a user might write with the library's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mpizero as mz

Array = np.ndarray[Any, np.dtype[Any]]
VOCABULARY, LENGTH = 29, 8


@dataclass(frozen=True)
class Adapter(mz.nn.Layer):
    """x + up(tanh(down(x))): split by columns and rows, and the same at each place of a sequence."""

    chain: mz.nn.Sequential

    def children(self) -> dict[str, mz.nn.Layer]:
        """Return the chain of layers."""
        return {"chain": self.chain}

    def forward(self, params: Any, x: Array, run: Any = None) -> tuple[Array, Any]:
        """Return the output, and the cache."""
        y, cache = self.chain.forward(params["chain"], x, run)
        return x + y, cache

    def backward_input(self, params: Any, cache: Any, dy: Array) -> tuple[Array, Any]:
        """Return the gradient of the input, and what the gradients of the weights need."""
        dx, pending = self.chain.backward_input(params["chain"], cache, dy)
        return dx + dy, pending

    def backward_weights(self, params: Any, cache: Any, pending: Any, grads: Any) -> None:
        """Write the gradients of the weights."""
        self.chain.backward_weights(params["chain"], cache, pending, grads["chain"])

    def split(self, group: Any) -> Adapter:
        """Return the form of which each rank of a tensor group holds a part."""
        down, tanh, up = self.chain.children().values()
        parts = {"down": mz.nn.ColumnLinear(down, group), "tanh": tanh, "up": mz.nn.RowLinear(up, group)}
        return type(self)(mz.nn.Sequential(parts))

    def context(self, group: Any) -> Adapter:
        """Return the form for a part of the sequences: each place is computed by itself."""
        return self


class TalkingAdapter(Adapter):
    """An adapter that says that it cannot keep its bits."""

    within_rounding = "an adapter whose ranks add in the order of arrival"


@dataclass(frozen=True)
class OwnModel:
    """Hold a model of 8 blocks for sequences of 5 numbers: attention, and layers of a user's own."""

    dtype: np.dtype[Any]
    adapter: type[Adapter] = Adapter
    loss: Any = field(default_factory=mz.nn.MeanSquaredError)
    seed: int = 4

    @property
    def blocks(self) -> Mapping[str, Any]:
        """The blocks by name."""
        found: dict[str, Any] = {"in": mz.nn.Linear(5, 16)}
        for number in range(2):
            chain = {"down": mz.nn.Linear(16, 12), "tanh": mz.nn.Tanh(), "up": mz.nn.Linear(12, 16)}
            norm = (mz.nn.LayerNorm, mz.nn.RMSNorm)[number](16)
            attention = mz.nn.CausalSelfAttention(16, 8)
            found |= {f"attention.{number}": attention, f"adapter.{number}": self.adapter(mz.nn.Sequential(chain))}
            found[f"norm.{number}"] = norm
        return {**found, "out": mz.nn.Linear(16, 3)}


def deep_gpt(dtype: str) -> mz.nn.GPT:
    """Return a GPT of 16 blocks: two chunks on each of 8 stages."""
    sizes = {"dim": 16, "layers": 14, "heads": 4, "sequence": LENGTH, "vocabulary": VOCABULARY}
    return mz.nn.GPT(**sizes, dropout=0.1, tied=True, dtype=dtype)


def gpt(dtype: str, tied: bool, heads: int = 8) -> mz.nn.GPT:
    """Return a GPT of 4 blocks whose heads, places and widths can be cut into 8 tiles."""
    sizes = {"dim": max(heads, 16), "layers": 2, "heads": heads, "sequence": LENGTH, "vocabulary": VOCABULARY}
    return mz.nn.GPT(**sizes, dropout=0.1, tied=tied, dtype=dtype)


def mlp(dtype: str, blocks: int = 8) -> mz.nn.MLP:
    """Return an MLP, whose widths are no multiples of the number of tiles."""
    hidden = ([7, 9, 8] * blocks)[: blocks - 1]
    return mz.nn.MLP(features=7, hidden=hidden, outputs=4, activation="tanh", dtype=dtype, seed=3)


MODELS = {
    "deep GPT": deep_gpt,
    "deep MLP": lambda dtype: mlp(dtype, 16),
    "GPT": lambda dtype: gpt(dtype, tied=True),
    "untied GPT": lambda dtype: gpt(dtype, tied=False),
    "GPT, 24 heads": lambda dtype: gpt(dtype, tied=True, heads=24),
    "MLP": mlp,
    "own": lambda dtype: OwnModel(np.dtype(dtype)),
    "own, talking": lambda dtype: OwnModel(np.dtype(dtype), TalkingAdapter),
}


def batches(model: str, samples: int, steps: int, rank: int, size: int) -> Iterator[tuple[Array, Array]]:
    """Yield the part of replica ``rank`` of ``size`` in each of ``steps`` global batches for ``MODELS[model]``.

    The parts of replicas may have different numbers of samples.
    """
    rng = np.random.default_rng(7)
    mine = slice(rank * samples // size, (rank + 1) * samples // size)
    for _ in range(steps):
        if "MLP" in model:
            x = rng.normal(size=(samples, 7))
            yield x[mine], (np.abs(x[mine, 0]) + x[mine, 1] > 0.5).astype(np.int64)
        elif "own" in model:
            x = rng.normal(size=(samples, LENGTH, 5))
            yield x[mine], np.cumsum(x, axis=1)[mine, :, :3]
        else:
            text = np.cumsum(rng.integers(1, 4, (samples, LENGTH + 1)), axis=1) % VOCABULARY  # something to learn
            yield text[mine, :-1], text[mine, 1:]
