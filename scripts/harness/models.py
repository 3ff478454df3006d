"""Cases of the matrix, and their models: GPTs, MLPs, and two that a user might write with the library's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import mpizero as mz
from harness.matrix import MEMORIES

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


def gpt(
    dtype: str, *, layers: int = 2, heads: int = 8, tied: bool = True, dropout: float = 0.1, longest: int = LENGTH
) -> mz.nn.GPT:
    """Return a GPT whose heads, places and widths can be cut into 8 tiles."""
    sizes = {"dim": max(heads, 16), "layers": layers, "heads": heads, "sequence": longest, "vocabulary": VOCABULARY}
    return mz.nn.GPT(**sizes, dropout=dropout, tied=tied, dtype=dtype)


def mlp(dtype: str, blocks: int = 8) -> mz.nn.MLP:
    """Return an MLP, whose widths are no multiples of the number of tiles."""
    hidden = ([7, 9, 8] * blocks)[: blocks - 1]
    return mz.nn.MLP(features=7, hidden=hidden, outputs=4, activation="tanh", dtype=dtype, seed=3)


#: By name. The deep ones have 16 blocks: two chunks on each of 8 stages.
MODELS: dict[str, Callable[[str], Any]] = {
    "deep GPT": partial(gpt, layers=14, heads=4),
    "deep MLP": partial(mlp, blocks=16),
    "GPT": gpt,
    "untied GPT": partial(gpt, tied=False),
    "GPT without dropout": partial(gpt, tied=False, dropout=0.0),
    "tied GPT without dropout": partial(gpt, dropout=0.0),
    "GPT for 1024 tokens": partial(gpt, longest=1024),
    "GPT, 24 heads": partial(gpt, heads=24),
    "MLP": mlp,
    "own": lambda dtype: OwnModel(np.dtype(dtype)),
    "own, talking": lambda dtype: OwnModel(np.dtype(dtype), TalkingAdapter),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": partial(mz.AdamW, lr=1e-3),
    "lamb": partial(mz.LAMB, lr=3e-3),
    "sgd": partial(mz.SGD, lr=0.02, momentum=0.9),
}


@dataclass(frozen=True)
class Case:
    """Describe a training whose bits no layout may change: ``batch`` samples in grains of ``grain``.

    ``model`` is a name of ``MODELS``, ``optimizer`` one of ``OPTIMIZERS``. A ``grain`` of None is the default.
    """

    name: str
    model: str
    batch: int
    grain: int | None
    optimizer: str = "adamw"
    clip: float | None = None
    dtype: str = "float32"

    def wrapped(self) -> Any:
        """Return the model of this case."""
        return MODELS[self.model](self.dtype)

    def update(self) -> Any:
        """Return the optimizer of this case."""
        return OPTIMIZERS[self.optimizer]()

    def settings(self, memory: str) -> dict[str, Any]:
        """Return the settings of ``ShardingConfig`` for a kind of memory of ``harness.matrix``."""
        return {"micro_batch": self.grain, "clip": self.clip, **MEMORIES[memory]}

    @property
    def has_sequences(self) -> bool:
        """Tell whether samples are sequences, which a context group can cut."""
        return "MLP" not in self.model

    def batches(self, steps: int, rank: int, size: int) -> Iterator[tuple[Array, Array]]:
        """Yield the part of replica ``rank`` of ``size`` in each of ``steps`` global batches.

        The parts of replicas may have different numbers of samples.
        """
        rng = np.random.default_rng(7)
        mine = slice(rank * self.batch // size, (rank + 1) * self.batch // size)
        for _ in range(steps):
            if "MLP" in self.model:
                x = rng.normal(size=(self.batch, 7))
                yield x[mine], (np.abs(x[mine, 0]) + x[mine, 1] > 0.5).astype(np.int64)
            elif "own" in self.model:
                x = rng.normal(size=(self.batch, LENGTH, 5))
                yield x[mine], np.cumsum(x, axis=1)[mine, :, :3]
            else:
                steps_on = rng.integers(1, 4, (self.batch, LENGTH + 1))
                text = np.cumsum(steps_on, axis=1) % VOCABULARY  # something to learn
                yield text[mine, :-1], text[mine, 1:]
